"""What a KV cache holds: points 1 to 6 of what one must do, with random data and whole values.

Where each point is tested; a test of the cache has its point's number in its name:

1 fresh, 2 appends, 3 reset, 4 layers, 5 KV heads, 6 masks: here, test_1_... to test_6_...
7 continuation, 8 last row, 9 crop, 10 clone, 16 no cache, 19 engagement: test_cache_runs.py,
  test_7_... to test_19_... (7 also test_llama.py:
  test_any_split_of_any_sequence_gives_the_same_logits; 10 also test_branches.py)
11 save and load: test_cache_file.py, test_11_...
12 the end, 13 failed calls, 14 positions, 15 no tokens, other batches, other weights:
  test_cache_refusals.py, test_12_... to test_15_... (15, other dtypes: test_llama.py:
  test_a_cache_of_another_dtype_is_refused_with_both)
17 no hidden growth: test_cache_memory.py,
test_17_five_thousand_steps_take_the_caches_bytes_and_nothing_else
18 causality: test_llama.py: test_a_token_changes_its_own_row_and_none_before_it
20 token 0: test_llama.py: test_with_one_key_attention_is_its_value_through_o_proj
threads, and what is evaluated when: test_cache_threads.py; test_cache_memory.py
all of them in any order: test_cache_properties.py
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import models
import numpy as np
import pytest
from caches import LAYOUTS, Array, ModelOf, config, extend, fresh, held, refused, rows, run, same
from config_cases import LINEAR
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxkv.port import cache as cache_module
from mlxkv.port import llama
from mlxkv.port.cache import BLOCK, Cache, Causal, Layer

# 1 to 5: what is held.


def test_1_a_fresh_cache_holds_nothing() -> None:
    cache = Cache(config())

    assert (len(cache), cache.nbytes, cache.masks, cache.layers) == (
        0,
        0,
        {},
        (Layer(), Layer(), Layer()),
    )
    assert [cache.layers[0].keys, cache.layers[0].values, cache.layers[0].batch] == [
        None,
        None,
        None,
    ]
    # An empty cache is a cache: `if cache:` must not mean "unless it is empty".
    assert bool(cache)


@pytest.mark.parametrize("block", [1, 4, BLOCK])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_2_and_5_appends_return_the_whole_history_in_order_per_kv_head(
    layout: str, batch: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "BLOCK", block)
    shape, random = config(layout), np.random.default_rng(0)
    cache = Cache(shape)
    history: list[list[tuple[Array, Array]]] = [[] for _ in cache.layers]

    for n in (3, 1, 4, 1, 9):
        new = [rows(random, shape, n, batch) for _ in cache.layers]
        found = extend(cache, new)
        for i, pair in enumerate(new):
            history[i].append(pair)
            keys, values = (
                np.concatenate(parts, axis=2) for parts in zip(*history[i], strict=True)
            )
            assert np.array_equal(found[i][0], keys)
            assert np.array_equal(found[i][1], values)
            assert same(
                [np.array(cache.layers[i].keys), np.array(cache.layers[i].values)], [keys, values]
            )
            assert keys.shape == (batch, shape.num_key_value_heads, len(cache), shape.head_dim)

    assert [layer.length for layer in cache.layers] == [18, 18, 18]
    assert cache.nbytes == 2 * 3 * batch * shape.num_key_value_heads * 18 * shape.head_dim * 4


def test_3_a_second_cycle_after_reset_is_the_first_again(model_of: ModelOf) -> None:
    model = model_of()
    cache, calls = fresh(model), [models.ids(5), [7], [8, 9]]

    first, kept = run(model, cache, *calls), held(cache)
    cache.reset()
    assert (len(cache), cache.nbytes, cache.layers) == (0, 0, (Layer(), Layer(), Layer()))
    again = run(model, cache, *calls)

    assert np.array_equal(first, again)
    assert same(held(cache), kept)


def test_3_after_reset_another_prompt_equals_a_fresh_cache(model_of: ModelOf) -> None:
    model = model_of()
    used = fresh(model)
    run(model, used, models.ids(7, seed=1))

    used.reset()

    # reported 11: prompts of 4, 2 and 1 tokens.
    for n in (4, 2, 1):
        prompt = models.ids(n, seed=2)
        assert np.array_equal(
            run(model, used, prompt, index_pos=0), run(model, fresh(model), prompt)
        )
        used.reset()


def test_4_layers_are_independent() -> None:
    shape, random = config(), np.random.default_rng(1)
    cache = Cache(shape)
    extend(cache, [rows(random, shape, 2) for _ in cache.layers])
    before = held(cache)

    cache.extend(1, *map(mx.array, rows(random, shape, 3)))

    assert [layer.length for layer in cache.layers] == [2, 5, 2]
    after = held(cache)
    assert same([*after[:2], *after[4:]], [*before[:2], *before[4:]])
    assert np.array_equal(after[2][:, :, :2], before[2])


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, expected 3"),
        ({"rope_theta": 9999.0}, "rope.theta is 9999.0, expected 10000.0"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1, expected 2"),
        ({"rope_scaling": LINEAR}, "rope.rope_type is 'linear', expected 'default'"),
    ],
)
def test_4_a_cache_of_another_config_is_refused_by_the_field(
    changes: dict[str, Any], difference: str, model_of: ModelOf
) -> None:
    model = model_of()
    for guarded in (True, False):
        cache = Cache(config(**changes), guarded=guarded)
        message = refused(lambda cache=cache: model([[1, 2]], cache=cache), cache)  # type: ignore[misc]
        assert (
            message
            == f"cache: made for another config than the model's: {difference}; make it with "
            f"Cache(model.config)"
        )


# 6: masks.


@pytest.mark.parametrize(
    ("length", "start", "expected"),
    [
        (2, 3, [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]),
        (2, 0, [[0, 1], [0, 0]]),
        (3, 1, [[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]),
    ],
)
def test_6_masks_by_value(length: int, start: int, expected: list[list[int]]) -> None:
    cache = Cache(config())

    found = cache.mask(length, start)

    assert found is not None
    assert found.dtype == mx.uint8
    assert found.tolist() == expected
    assert list(cache.masks) == [(length, start + length)]


def test_6_one_token_has_no_mask() -> None:
    cache = Cache(config())

    assert [cache.mask(1, start) for start in (0, 1, 63)] == [None, None, None]
    assert cache.masks == {}


def test_6_masks_of_equal_kv_length_or_equal_length_are_not_shared(model_of: ModelOf) -> None:
    model = model_of("gqa", "float64")
    tokens = models.ids(12)
    cache = fresh(model)
    whole = run(model, fresh(model), tokens)

    # reported 09: (8, 8), (4, 12) and (8, 12) on one object, in two orders.
    for cuts in ((8, 12), (4, 12), (8, 12)):
        cache.reset()
        found = run(model, cache, tokens[: cuts[0]], tokens[cuts[0] :])
        np.testing.assert_allclose(found, whole, atol=1e-12)

    assert sorted(cache.masks) == [(4, 4), (4, 12), (8, 8), (8, 12)]
    for (length, total), mask in cache.masks.items():
        assert np.array_equal(np.array(mask), np.triu(np.ones((length, total)), total - length + 1))


def test_6_a_mask_is_built_once_and_the_least_recently_used_go_first() -> None:
    cache = Cache(config())
    kept = cache.mask(2, 0)

    for start in range(1, 40):
        cache.mask(2, start)
        assert cache.mask(2, 0) is kept

    assert list(cache.masks) == [*((2, 2 + start) for start in range(25, 40)), (2, 2)]


@pytest.mark.parametrize("queries", [2, 256])
def test_6_a_mask_too_large_to_keep_is_made_in_parts(
    queries: int, model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same logits, bit by bit; a call may be one block of queries or several."""
    model, tokens = model_of("gqa"), models.ids(12)
    monkeypatch.setattr(llama, "QUERIES", queries)
    kept = fresh(model)
    whole = run(model, kept, tokens[:5], tokens[5:])
    monkeypatch.setattr(cache_module, "WHOLE_MASK", 5 * 5)
    cache = fresh(model)

    found = run(model, cache, tokens[:5], tokens[5:])

    assert np.array_equal(found, whole)
    assert (sorted(kept.masks), sorted(cache.masks)) == ([(5, 5), (7, 12)], [(5, 5)])
    large = cache.mask(7, 5)
    assert isinstance(large, Causal)
    for some, columns in ((slice(None), slice(None)), (slice(2, 4), slice(0, 9))):
        expected = np.array(kept.masks[7, 12])[some, columns]
        assert np.array_equal(np.array(large[some, columns]), expected)


# Any history of appends, crops, resets and clones, against lists.


def op() -> st.SearchStrategy[tuple[str, int, int]]:
    return st.tuples(
        st.sampled_from(["append", "append", "append", "crop", "reset", "clone"]),
        st.integers(0, 3),
        st.integers(0, 9),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ops=st.lists(op(), min_size=1, max_size=30))
def test_any_history_of_appends_crops_resets_and_clones_is_that_of_lists(
    ops: list[tuple[str, int, int]],
) -> None:
    shape, random = config("gqa", num_hidden_layers=2), np.random.default_rng(4)
    block, cache_module.BLOCK = cache_module.BLOCK, 4
    try:
        caches, lists = [Cache(shape)], [[np.zeros((1, 2, 0, 8), np.float32)] * 4]
        for name, who, n in ops:
            i = who % len(caches)
            if name == "append":
                new = [rows(random, shape, n + 1) for _ in range(2)]
                extend(caches[i], new)
                lists[i] = [
                    np.concatenate([a, b], axis=2)
                    for a, b in zip(lists[i], [x for pair in new for x in pair], strict=True)
                ]
            elif name == "crop":
                length = min(n, len(caches[i]))
                assert caches[i].crop(length) == lists[i][0].shape[2] - length
                lists[i] = [a[:, :, :length] for a in lists[i]]
            elif name == "reset":
                caches[i].reset()
                lists[i] = [a[:, :, :0] for a in lists[i]]
            else:
                caches.append(caches[i].clone())
                lists.append(list(lists[i]))
        for cache, expected in zip(caches, lists, strict=True):
            assert len(cache) == expected[0].shape[2]
            assert same(held(cache), expected if len(cache) else [])
    finally:
        cache_module.BLOCK = block


def test_a_cache_says_what_it_is(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of())
    assert repr(cache) == "Cache(0 of 64 tokens, 0 bytes, 3 layers x 2 KV heads x 8, float32)"

    run(model, cache, [1, 2, 3])

    assert repr(cache) == "Cache(3 of 64 tokens, 1152 bytes, 3 layers x 2 KV heads x 8, float32)"
    other = Cache(config("mqa"), dtype=mx.bfloat16, use_kv_cache=False, guarded=False)
    assert (
        repr(other) == "Cache(0 of 64 tokens, 0 bytes, 3 layers x 1 KV heads x 12, bfloat16, "
        "use_kv_cache=False, guarded=False)"
    )

"""The same numbers however the tokens come in, and after crops and clones: points 7 to 10, 16 and
19.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import mlx.core as mx
import models
import numpy as np
import pytest
from caches import LAYOUTS, Array, ModelOf, fresh, held, refused, run, same

from mlxkv.port.cache import Cache, Layer

# 7, 8, 16: the same numbers however the tokens come in.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("calls", [[12], [5, 7], [7, 5], [4, 4, 4], [11, 1], [1, 11], [1] * 12])
def test_7_every_split_gives_the_uncached_rows(
    layout: str, calls: list[int], model_of: ModelOf
) -> None:
    model, tokens = model_of(layout), models.ids(12, seed=3)
    cache, starts = fresh(model), np.cumsum([0, *calls])

    found = run(model, cache, *(tokens[s : s + n] for s, n in zip(starts[:-1], calls, strict=True)))

    uncached = np.concatenate(
        [run(model, fresh(model, use_kv_cache=False), tokens[: i + 1])[-1:] for i in range(12)]
    )
    # The noise of float32 between one-row and many-row products.
    np.testing.assert_allclose(found, uncached, atol=3e-6 * np.abs(uncached).max(), rtol=0)


def test_7_a_run_that_pauses_goes_on_as_one_that_did_not(model_of: ModelOf) -> None:
    model = model_of()

    def greedy(cache: Cache, ids: list[int], n: int) -> list[Array]:
        found = []
        for _ in range(n):
            found.append(np.array(model([ids], cache=cache)))
            ids = [int(found[-1].argmax())]
        return found

    straight = greedy(fresh(model), [3, 1, 4], 3)
    cache = fresh(model)
    first = greedy(cache, [3, 1, 4], 2)
    rest = greedy(cache.clone(), [int(first[-1].argmax())], 1)

    assert same([*first, *rest], straight)


def test_8_the_last_row_is_the_last_of_all_rows(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of())
    every = run(model, cache.clone(), [3, 1, 4], [1, 5])

    model([[3, 1, 4]], cache=cache)
    last = np.array(model([[1, 5]], cache=cache))

    np.testing.assert_allclose(last[0], every[-1], atol=1e-6 * np.abs(every).max())


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_16_without_a_kv_cache_nothing_is_stored_or_read(
    layout: str, guarded: bool, model_of: ModelOf
) -> None:
    model, tokens = model_of(layout), models.ids(9, seed=4)
    cache = fresh(model, use_kv_cache=False, guarded=guarded)

    for n in (5, 9, 1, 5):
        assert np.array_equal(
            run(model, cache, tokens[:n], index_pos=0), run(model, fresh(model), tokens[:n])
        )
        assert (len(cache), cache.nbytes, cache.layers) == (0, 0, (Layer(), Layer(), Layer()))


# 9: crop.


@pytest.mark.parametrize("length", [-1, -5, 11, True, False, 2.0, 10.0, "3", None, np.float32(3)])
def test_9_a_crop_to_what_is_no_length_held_is_refused(length: Any, model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of())
    run(model, cache, models.ids(10))

    message = refused(lambda: cache.crop(length), cache)

    assert (
        message
        == f"cache: crop to {length!r}, expected a whole number from 0 to the 10 tokens held"
    )


def test_9_a_crop_says_how_many_tokens_went(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of())
    run(model, cache, models.ids(10))
    whole = held(cache)

    assert [cache.crop(10), len(cache)] == [0, 10]
    assert same(held(cache), whole)
    assert [cache.crop(np.int64(7)), len(cache)] == [3, 7]  # type: ignore[arg-type]
    assert same(held(cache), [a[:, :, :7] for a in whole])
    assert [cache.crop(0), len(cache), cache.nbytes, cache.layers] == [
        7,
        0,
        0,
        (Layer(), Layer(), Layer()),
    ]
    assert cache.crop(0) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keep", [0, 1, 7, 9, 10])
def test_9_cropped_tokens_have_no_influence_afterwards(
    layout: str, keep: int, model_of: ModelOf
) -> None:
    model, tokens, after = model_of(layout), models.ids(10, seed=5), [[11, 12], [13], [14, 15, 16]]
    cropped, never = fresh(model), fresh(model)
    run(model, cropped, *([t] for t in tokens))

    cropped.crop(keep)
    found = run(model, cropped, *after)

    run(model, never, *([t] for t in tokens[:keep]))
    assert np.array_equal(found, run(model, never, *after))
    assert same(held(cropped), held(never))


def test_9_a_replayed_last_token_gives_the_cold_runs_logits(model_of: ModelOf) -> None:
    # reported 17: the prompt is cached whole, and a call needs a token.
    model, cache, prompt = model_of(), fresh(model_of()), models.ids(6)
    cold = run(model, cache, prompt[:5], prompt[5:])[-1]

    refused(lambda: model([[]], cache=cache), cache)
    cache.crop(5)

    assert np.array_equal(run(model, cache, prompt[5:])[-1], cold)


# 10: clones.


@pytest.mark.parametrize("parent_first", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_10_branches_of_one_prefix_equal_their_own_runs(
    layout: str, parent_first: bool, model_of: ModelOf
) -> None:
    model, prefix = model_of(layout), models.ids(5)
    branches = [[[21, 22], [23], [24]], [[31], [32], [33, 34, 35]]]
    parent = fresh(model)
    run(model, parent, prefix)
    caches = [parent, parent.clone()] if parent_first else [parent.clone(), parent]

    # Call by call in turn, each side writing after the other has.
    found: list[list[Array]] = [[], []]
    for calls in zip(*branches, strict=True):
        for side, ids in enumerate(calls):
            found[side].append(run(model, caches[side], ids))

    for side, calls_of in enumerate(branches):
        alone = fresh(model)
        run(model, alone, prefix)
        assert np.array_equal(np.concatenate(found[side]), run(model, alone, *calls_of))
        assert same(held(caches[side]), held(alone))


@pytest.mark.parametrize("writer", ["parent", "clone"])
def test_10_what_one_side_does_never_shows_on_the_other(writer: str, model_of: ModelOf) -> None:
    model, parent = model_of(), fresh(model_of())
    run(model, parent, models.ids(5))
    clone = parent.clone()
    acting, watching = (parent, clone) if writer == "parent" else (clone, parent)
    before = held(watching)

    for act in (
        lambda: run(model, acting, [1, 2]),
        lambda: acting.crop(3),
        lambda: run(model, acting, [9]),
        acting.reset,
    ):
        act()
        assert len(watching) == 5
        assert same(held(watching), before)


def test_10_clones_of_an_empty_a_cloned_and_a_cropped_cache(model_of: ModelOf) -> None:
    model, empty = model_of(), fresh(model_of())
    run(model, empty.clone(), [1, 2, 3])
    assert len(empty) == 0

    cache = fresh(model)
    run(model, cache, *([t] for t in models.ids(6)))
    twice = cache.clone().clone()
    twice.crop(4)
    cropped = twice.clone()
    other = twice.clone()
    run(model, cache, [30])
    run(model, other, [31, 32])

    alone = fresh(model)
    run(model, alone, *([t] for t in models.ids(6)[:4]))
    assert (len(cache), len(twice), len(other)) == (7, 4, 6)
    assert np.array_equal(run(model, cropped, [33], [34]), run(model, alone, [33], [34]))
    assert same(held(cropped), held(alone))


def test_10_references_and_shallow_copies_taken_before_a_step_do_not_move(
    model_of: ModelOf,
) -> None:
    # reported 15: an update in place would show to every holder of the array.
    model, cache = model_of(), fresh(model_of())
    run(model, cache, models.ids(5))
    before = held(cache)
    reference, snapshot, shallow = cache.layers[1].keys, cache.layers, copy.copy(cache)

    run(model, cache, [1], [2], [3])
    cache.crop(2)
    run(model, cache, [4, 5])

    assert np.array_equal(np.array(reference), before[2])
    assert same(held(shallow), before)
    cache.restore(snapshot)
    assert same(held(cache), before)


def test_10_a_clone_outlives_its_parent(model_of: ModelOf) -> None:
    model, parent, alone = model_of(), fresh(model_of()), fresh(model_of())
    run(model, parent, models.ids(5))
    clone = parent.clone()

    del parent
    gc.collect()

    run(model, alone, models.ids(5))
    assert np.array_equal(run(model, clone, [1], [2]), run(model, alone, [1], [2]))


def test_10_a_clone_shares_tables_masks_and_settings(model_of: ModelOf) -> None:
    model, cache = (
        model_of("gqa", "float16"),
        fresh(model_of("gqa", "float16"), guarded=False, use_kv_cache=True),
    )
    run(model, cache, [1, 2, 3])

    clone = cache.clone()

    assert (clone.cos is cache.cos, clone.sin is cache.sin, clone.layers is cache.layers) == (
        True,
        True,
        True,
    )
    assert (clone.dtype, clone.guarded, clone.use_kv_cache, clone.config) == (
        mx.float16,
        False,
        True,
        model.config,
    )
    assert clone.masks.keys() == cache.masks.keys()
    assert all(clone.masks[key] is mask for key, mask in cache.masks.items())
    clone.mask(5, 0)
    assert (5, 5) not in cache.masks


# 19: engagement.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("layer", [0, 2])
def test_19_a_corrupted_row_moves_the_later_logits(
    layout: str, which: str, layer: int, model_of: ModelOf
) -> None:
    model, cache = model_of(layout), fresh(model_of(layout))
    run(model, cache, models.ids(8, seed=6))
    expected = run(model, cache.clone(), [1], [2, 3])

    old = cache.layers[layer]
    assert old.buffers is not None
    parts = list(old.buffers)
    part = ["keys", "values"].index(which)
    parts[part] = mx.slice_update(parts[part], -parts[part][:, :, 4:5], mx.array([4]), axes=[2])
    cache.restore(
        (*cache.layers[:layer], Layer((parts[0], parts[1]), old.length), *cache.layers[layer + 1 :])
    )

    assert np.abs(run(model, cache, [1], [2, 3]) - expected).max() > 1e-3 * np.abs(expected).max()

"""What a cache refuses, in which words, and that it is as it was afterwards: points 12 to 15."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import numpy as np
import pytest
from caches import LAYOUTS, ModelOf, fresh, held, refused, run, same

from mlxkv.port import ops
from mlxkv.port.cache import CacheError
from mlxkv.port.llama import Llama
from mlxkv.port.weights import load


@pytest.mark.parametrize("guarded", [True, False])
def test_12_writing_past_the_end_is_refused_and_the_cache_stays_usable(
    guarded: bool, model_of: ModelOf
) -> None:
    model, cache = model_of(), fresh(model_of(), guarded=guarded)
    run(model, cache, models.ids(62))

    expected = (
        "cache: position 64 (index_pos 62, 3 tokens) is beyond the 64 rows of the RoPE tables; "
        "max_position_embeddings is 64"
    )
    assert refused(lambda: model([[1, 2, 3]], cache=cache), cache) == expected
    run(model, cache, [1, 2])
    assert len(cache) == 64
    full = refused(lambda: model([[1]], cache=cache), cache)
    assert (
        full == "cache: position 64 (index_pos 64, 1 tokens) is beyond the 64 rows of the RoPE "
        "tables; max_position_embeddings is 64"
    )

    cache.crop(10)
    alone = fresh(model)
    run(model, alone, models.ids(62)[:10])
    np.testing.assert_allclose(run(model, cache, [5]), run(model, alone, [5]), atol=1e-4)


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("position", [64, 8192, 2**31])
def test_12_a_position_past_the_end_is_refused_on_a_fresh_cache_too(
    position: int, guarded: bool, model_of: ModelOf
) -> None:
    model, cache = model_of(), fresh(model_of(), guarded=guarded)

    message = refused(lambda: model([[1]], cache=cache, index_pos=position), cache)

    assert f"position {position} (index_pos {position}, 1 tokens)" in message
    assert "max_position_embeddings is 64" in message
    assert np.array_equal(run(model, cache, [1], index_pos=0), run(model, fresh(model), [1]))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, CacheError])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_13_a_call_that_fails_half_way_leaves_every_layer_as_it_was(
    failing: int, error: type[BaseException], model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = model_of(), fresh(model_of())
    run(model, cache, [1, 2, 3])
    before, real, calls = held(cache), ops.attention, [0]

    def attention(*given: Any, **options: Any) -> mx.array:
        calls[0] += 1
        if calls[0] == failing + 1:
            raise error("no more")
        return real(*given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(ops, "attention", attention)
        with pytest.raises(error, match="no more"):
            model([[4, 5]], cache=cache)

    assert calls == [failing + 1]
    assert [layer.length for layer in cache.layers] == [3, 3, 3]
    assert same(held(cache), before)
    alone = fresh(model)
    run(model, alone, [1, 2, 3])
    assert np.array_equal(run(model, cache, [4, 5]), run(model, alone, [4, 5]))


def test_13_unguarded_a_failing_call_leaves_what_candle_leaves(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of(), guarded=False)
    run(model, cache, [1, 2, 3])

    with pytest.raises(CacheError, match=r"^cannot broadcast \[2, 4\] to \[1, 4, 2, 5\]: "):
        model([[4, 5]], cache=cache, index_pos=2)

    assert [layer.length for layer in cache.layers] == [5, 3, 3]


ANOTHER = "reset the cache or make a new one for another sequence, or leave index_pos out to go on"


@pytest.mark.parametrize(
    ("fed", "position", "message"),
    [
        (5, 0, f"0, expected 5 (the cache holds 5 tokens); {ANOTHER}"),
        (5, 3, "3, expected 5 (the cache holds 5 tokens); leave index_pos out"),
        (5, 7, "7, expected 5 (the cache holds 5 tokens); leave index_pos out"),
        (0, 7, "7, expected 0 (the cache holds 0 tokens); leave index_pos out"),
    ],
    ids=["replay", "behind", "gap", "ahead on an empty cache"],
)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_14_a_position_that_is_not_the_cached_length_is_refused_with_both(
    fed: int, position: int, message: str, n: int, model_of: ModelOf
) -> None:
    model, cache = model_of(), fresh(model_of())
    if fed:
        run(model, cache, models.ids(fed))

    assert (
        refused(lambda: model([[1] * n], cache=cache, index_pos=position), cache)
        == f"cache: index_pos is {message}"
    )
    assert np.array_equal(
        run(model, cache.clone(), [1, 2], index_pos=fed), run(model, cache, [1, 2])
    )


def test_14_without_a_kv_cache_every_call_starts_at_0(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of(), use_kv_cache=False)
    run(model, cache, [1, 2, 3])

    message = refused(lambda: model([[4]], cache=cache, index_pos=3), cache)

    expected = (
        "cache: index_pos is 3, expected 0 (without a KV cache every call starts at 0); send the "
        "whole prefix from index_pos 0"
    )
    assert message == expected


@pytest.mark.parametrize("position", [True, False, 1.0, "0", -1, -(2**40), mx.array(0)], ids=repr)
def test_14_a_position_that_is_no_whole_number_is_refused_guarded_or_not(
    position: Any, model_of: ModelOf
) -> None:
    for guarded in (True, False):
        cache = fresh(model_of(), guarded=guarded)
        message = refused(
            lambda cache=cache: model_of()([[1]], cache=cache, index_pos=position), cache
        )  # type: ignore[misc]
        assert message == f"cache: index_pos is {position!r}, expected a whole number from 0"


def test_14_numpys_whole_numbers_are_positions(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of())

    for i, index_pos in enumerate((np.int64(0), np.int32(2), np.uint8(4))):
        run(model, cache, [1, 2], index_pos=index_pos)  # type: ignore[arg-type]
        assert len(cache) == 2 * (i + 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_14_an_offset_of_everything_shows_in_the_keys_alone(layout: str, model_of: ModelOf) -> None:
    model, tokens = model_of(layout, "float64"), models.ids(9)
    here, there = fresh(model), fresh(model, guarded=False)

    rows_here = run(model, here, tokens)
    # One by one: the mask of a longer call would not fit.
    rows_there = np.concatenate(
        [run(model, there, [t], index_pos=7 + i) for i, t in enumerate(tokens)]
    )

    np.testing.assert_allclose(rows_there, rows_here, atol=1e-11)
    for mine, theirs in zip(here.layers, there.layers, strict=True):
        np.testing.assert_allclose(np.array(mine.values), np.array(theirs.values), atol=1e-11)
        assert np.abs(np.array(mine.keys) - np.array(theirs.keys)).max() > 0.5


@pytest.mark.parametrize("guarded", [True, False])
def test_15_no_tokens_are_refused_on_an_empty_and_on_a_used_cache(
    guarded: bool, model_of: ModelOf
) -> None:
    model, cache = model_of(), fresh(model_of(), guarded=guarded)

    for n in (0, 5):
        message = refused(lambda: model([[]], cache=cache), cache)
        assert message == f"cache: no new tokens (the cache holds {n}); a call needs at least one"
        run(model, cache, models.ids(5))


def test_15_another_batch_is_refused_with_both(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of())
    model([[1, 2], [3, 4]], cache=cache)

    for tokens in ([[5]], [[5], [6], [7]]):
        message = refused(lambda tokens=tokens: model(tokens, cache=cache), cache)  # type: ignore[misc]
        assert (
            message
            == f"cache: batch of {len(tokens)}, expected 2 (that of the tokens held); make a new "
            f"cache"
        )
    cache.reset()
    assert model([[5]], cache=cache).shape == (1, 40)


def test_15_the_weights_of_another_model_are_refused_with_both(
    model_of: ModelOf, tmp_path: Path
) -> None:
    shape = models.config("gqa")
    other = load(models.save(tmp_path, shape, models.weights(shape, seed=1)))
    model, cache = model_of(), fresh(model_of())
    run(model, cache, [1, 2, 3])

    message = refused(lambda: other([[4]], cache=cache), cache)

    assert model.fingerprint is not None
    assert other.fingerprint is not None
    mine, theirs = model.fingerprint[:12], other.fingerprint[:12]
    assert (
        message
        == f"cache: the weights are {theirs}, expected {mine} (those of the tokens held); make a "
        f"new cache"
    )
    run(model, cache, [4])
    cache.reset()
    assert np.array_equal(run(other, cache, [1, 2]), run(other, fresh(other), [1, 2]))


def test_15_layers_of_different_lengths_are_refused_with_both(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of())
    run(model, cache, models.ids(11))
    row = mx.zeros((1, 2, 1, 8))
    cache.extend(0, row, row)

    message = refused(lambda: model([[1]], cache=cache), cache)

    assert (
        message
        == "cache: its layers hold 11 to 12 tokens, expected one length; crop it to 11 or reset it"
    )
    too_many = refused(lambda: cache.crop(12), cache)
    assert too_many == "cache: crop to 12, expected a whole number from 0 to the 11 tokens held"
    cache.crop(11)
    alone = fresh(model)
    run(model, alone, models.ids(11))
    assert np.array_equal(run(model, cache, [1]), run(model, alone, [1]))


def test_15_weights_without_a_name_are_told_apart_by_their_arrays(model_of: ModelOf) -> None:
    mine, other = (Llama(model_of().config) for _ in range(2))
    cache = fresh(mine)
    run(mine, cache, [1, 2, 3])

    for model in (other, model_of()):
        refused(lambda model=model: model([[4]], cache=cache), cache)  # type: ignore[misc]
    message = refused(lambda: other([[4]], cache=cache), cache)
    assert (
        message
        == "cache: the weights, without a fingerprint, are other arrays than the tokens held "
        "had; make a new cache"
    )
    run(mine, cache, [4])

    # Weights that were trained on meanwhile are others too.
    mine.layers[1].mlp.update({"up_proj": {"weight": mine.layers[1].mlp.up_proj.weight * 2}})
    assert refused(lambda: mine([[5]], cache=cache), cache) == message
    cache.reset()
    run(other, cache, [1])


def test_15_a_failed_call_leaves_the_weights_name_as_it_was(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of())

    def tap(*_: object) -> mx.array:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        model([[1]], cache=cache, tap=tap)

    assert cache.fingerprint is None
    assert len(cache) == 0

"""Whose a cache is while its rows are still to be computed, and that a call leaves them so."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from caches import ModelOf, fresh, held, run, same

from mlxkv.port.cache import CacheError


def elsewhere(act: Callable[[], Any]) -> Any:
    """What an act gives, or raises, in a thread of its own, which has ended then."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(act())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    thread.join()
    return found[0]


MINE = (
    "cache: belongs to thread 'MainThread' until cache.eval(), expected this thread, 'worker'; "
    "call cache.eval() there first"
)
ENDED = (
    "cache: belongs to a thread that has ended until cache.eval(), expected this thread, "
    "'MainThread'; call cache.eval(), or reset it"
)


def test_another_threads_call_is_refused_until_eval(model_of: ModelOf, tmp_path: Any) -> None:
    model, cache, alone = model_of(), fresh(model_of()), fresh(model_of())
    model([[1, 2, 3]], cache=cache)
    layers, clone = cache.layers, cache.clone()

    acts: list[Callable[[], Any]] = [
        lambda: model([[4]], cache=cache),
        lambda: model([[4]], cache=clone),
        lambda: model([[4]], cache=copy.copy(cache)),
        lambda: cache.crop(1),
        lambda: cache.save(tmp_path / "cache"),
        cache.eval,
    ]
    for act in acts:
        error = elsewhere(act)
        assert isinstance(error, CacheError)
        assert str(error) == MINE
        assert cache.layers is layers

    cache.eval()
    theirs = elsewhere(lambda: np.array(model([[4]], cache=cache)))
    run(model, alone, [1, 2, 3])
    assert np.array_equal(theirs, run(model, alone, [4]))
    assert len(cache) == 4
    assert len(clone) == 3


def test_evaluated_logits_alone_give_the_cache_to_nobody(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of())
    mx.eval(model([[1, 2, 3]], cache=cache))

    assert str(elsewhere(lambda: model([[4]], cache=cache))) == MINE


def test_rows_of_a_thread_that_has_ended_are_refused_and_the_cache_is_not_lost(
    model_of: ModelOf,
) -> None:
    model, cache = model_of(), fresh(model_of())
    assert elsewhere(lambda: model([[1, 2]], cache=cache) is None) is False
    gc.collect()

    for act in (lambda: model([[3]], cache=cache), lambda: cache.crop(1)):
        with pytest.raises(CacheError) as caught:
            act()
        assert str(caught.value) == ENDED
    with pytest.raises(
        CacheError, match=r"^cache: what it holds cannot be computed \(.+\); reset it$"
    ):
        cache.eval()
    assert len(cache) == 2

    cache.reset()
    assert np.array_equal(run(model, cache, [1, 2]), run(model, fresh(model), [1, 2]))


def test_what_a_thread_evaluated_before_it_ended_is_for_whoever_asks(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of())
    elsewhere(lambda: mx.eval(model([[1, 2]], cache=cache)))

    cache.eval()

    alone = fresh(model)
    run(model, alone, [1, 2])
    assert np.array_equal(run(model, cache, [3]), run(model, alone, [3]))


def test_a_refused_call_takes_the_cache_from_nobody(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of())

    assert isinstance(elsewhere(lambda: model([[]], cache=cache)), CacheError)
    assert isinstance(elsewhere(lambda: model([[1]], cache=cache, index_pos=5)), CacheError)

    assert run(model, cache, [1]).shape == (1, 40)


def test_two_threads_at_once_end_in_refusals_and_whole_rows(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of())
    calls, begin = [], threading.Barrier(3)

    def work() -> None:
        begin.wait()
        for _ in range(20):
            try:
                mx.eval(model([[7]], cache=cache))
                cache.eval()
                calls.append(None)
            except CacheError as error:
                calls.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(calls) == 60
    assert all(c is None or c.startswith("cache: belongs to ") for c in calls)
    assert len(cache) == calls.count(None) > 0
    cache.eval()
    alone = fresh(model)
    run(model, alone, *[[7]] * len(cache))
    assert same(held(cache), held(alone))


def test_a_cache_is_not_reset_under_another_threads_call(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of())
    found: list[Any] = []

    def tap(layer: int, name: str, array: mx.array) -> mx.array:
        if not found:
            found.append(elsewhere(cache.reset))
        return array

    model([[1, 2]], cache=cache, tap=tap)

    assert str(found[0]) == MINE
    assert len(cache) == 2
    elsewhere(cache.reset)
    assert len(cache) == 0


def test_an_unguarded_cache_asks_for_no_thread(model_of: ModelOf) -> None:
    model, cache = model_of(), fresh(model_of(), guarded=False)
    mx.eval(model([[1, 2, 3]], cache=cache))

    assert elsewhere(lambda: np.array(model([[4]], cache=cache))).shape == (1, 40)

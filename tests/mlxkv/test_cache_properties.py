"""Any history of calls, clones, crops, resets, saves and refusals, against a plain recompute of the
tokens held.

That any split of any sequence gives the same logits is test_llama.py's. Histories are drawn, not
shrunk, from a fixed seed: the same ones in every run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest
from caches import LAYOUTS, Array, ModelOf, fresh, held
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlxkv.port import cache as cache_module
from mlxkv.port import cache_file, llama, ops
from mlxkv.port.cache import Cache, CacheError, Layer
from mlxkv.port.llama import Llama
from mlxkv.port.weights import load

Rows = tuple[tuple[int, ...], ...]
Recomputed = Callable[[Rows], tuple[Array, list[Array]]]
HISTORIES = settings(
    max_examples=16,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
PLANTED = settings(HISTORIES, phases=[Phase.generate], report_multiple_bugs=False)
WHO, LENGTHS = st.integers(0, 7), st.integers(0, 40)
CHUNK = st.lists(st.integers(0, 39), min_size=1, max_size=6)
BOUND = 1e-10
"""Of the largest logit, key or value."""


def close(found: Array, expected: Array) -> bool:
    return found.shape == expected.shape and bool(
        np.abs(found - expected).max() <= BOUND * np.abs(expected).max()
    )


class Histories(RuleBasedStateMachine):
    """Caches of one model, and beside each the tokens (B, S) that it must hold."""

    def __init__(self, model: Llama, other: Llama, recomputed: Recomputed, path: Path) -> None:
        super().__init__()
        self.model, self.other, self.recomputed, self.path = model, other, recomputed, path
        self.caches: list[Cache] = [fresh(model)]
        self.tokens: list[Rows] = [()]

    @initialize(batch=st.integers(1, 2))
    def begin(self, batch: int) -> None:
        self.batch = batch

    @rule(who=WHO, chunk=CHUNK, told=st.booleans(), every=st.booleans())
    def call(self, who: int, chunk: list[int], told: bool, every: bool) -> None:
        who %= len(self.caches)
        cache, before = self.caches[who], len(self.caches[who])
        if before + len(chunk) > 64:
            return
        new = self.rows(chunk)
        found = np.array(
            self.model(new, cache=cache, index_pos=before if told else None, all_positions=every)
        )
        self.tokens[who] = tuple(
            (*old, *more)
            for old, more in zip(self.tokens[who] or ((),) * self.batch, new, strict=True)
        )
        expected = self.recomputed(self.tokens[who])[0]
        assert close(found, expected[:, before:] if every else expected[:, -1])

    @rule(who=WHO, id=st.integers(0, 39))
    def step(self, who: int, id: int) -> None:
        self.call(who, [id], told=False, every=False)

    @rule(who=WHO)
    def clone(self, who: int) -> None:
        who %= len(self.caches)
        if len(self.caches) < 5:
            self.caches.append(self.caches[who].clone())
            self.tokens.append(self.tokens[who])

    @precondition(lambda self: len(self.caches) < 5)
    @rule(
        who=WHO,
        ids=st.lists(st.integers(0, 39), min_size=2, max_size=2, unique=True),
        clone_first=st.booleans(),
    )
    def fork(self, who: int, ids: list[int], clone_first: bool) -> None:
        """Both sides write at once."""
        sides = [len(self.caches), who % len(self.caches)]
        self.clone(who)
        for side, id in zip(sides if clone_first else sides[::-1], ids, strict=True):
            self.step(side, id)

    @precondition(lambda self: len(self.caches) > 1)
    @rule(who=WHO)
    def drop(self, who: int) -> None:
        del self.caches[who % len(self.caches)], self.tokens[who % len(self.tokens)]

    @rule(who=WHO, length=LENGTHS)
    def crop(self, who: int, length: int) -> None:
        who %= len(self.caches)
        held_before = len(self.caches[who])
        length = length % (held_before + 1)
        assert self.caches[who].crop(length) == held_before - length
        self.tokens[who] = tuple(row[:length] for row in self.tokens[who]) if length else ()

    @rule(who=WHO)
    def reset(self, who: int) -> None:
        self.caches[who % len(self.caches)].reset()
        self.tokens[who % len(self.caches)] = ()

    @rule(who=WHO)
    def save_and_load(self, who: int) -> None:
        who %= len(self.caches)
        self.caches[who].save(self.path)
        self.caches[who] = Cache.load(self.path, self.model)

    @rule(
        who=WHO,
        chunk=CHUNK,
        wrong=st.sampled_from(
            ["position", "end", "token", "batch", "none", "weights", "half-way", "crop", "file"]
        ),
        n=LENGTHS,
    )
    def refused(self, who: int, chunk: list[int], wrong: str, n: int) -> None:
        cache = self.caches[who % len(self.caches)]
        layers, before, length = cache.layers, held(cache), len(cache)
        if wrong in ("batch", "weights") and not length:
            return
        call: Callable[..., Any] = partial(self.model, cache=cache)
        act: Callable[[], Any] = {
            "position": lambda: call(self.rows(chunk), index_pos=n + (n >= length)),
            "end": lambda: call(self.rows([1] * (65 - length))),
            "token": lambda: call(self.rows([*chunk, 40])),
            "batch": lambda: call([*self.rows(chunk), chunk]),
            "none": lambda: call(self.rows([])),
            "weights": lambda: self.other(self.rows(chunk), cache=cache),
            "half-way": lambda: self.half_way(lambda: call(self.rows(chunk))),
            "crop": lambda: cache.crop(length + 1 + n),
            "file": lambda: self.damaged(cache, n),
        }[wrong]
        with pytest.raises(CacheError):
            act()
        assert cache.layers is layers
        assert all(np.array_equal(a, b) for a, b in zip(held(cache), before, strict=True))

    def half_way(self, act: Callable[[], Any]) -> None:
        with patch.object(ops, "attention", side_effect=CacheError("no more")):
            act()

    def rows(self, chunk: list[int]) -> list[list[int]]:
        """Another sequence in every row of the batch."""
        return [[id + row if id < 39 else id for id in chunk] for row in range(self.batch)]

    def damaged(self, cache: Cache, n: int) -> None:
        cache.save(self.path)
        content = bytearray(self.path.read_bytes())
        content[-1 - n] ^= 1
        self.path.write_bytes(content)
        Cache.load(self.path, self.model)

    @invariant()
    def each_holds_its_own_tokens_and_nothing_else(self) -> None:
        for cache, tokens in zip(self.caches, self.tokens, strict=True):
            assert [layer.length for layer in cache.layers] == [len(tokens[0]) if tokens else 0] * 3
            expected = self.recomputed(tokens)[1] if tokens else []
            found = held(cache)
            assert len(found) == len(expected)
            assert all(close(a, b) for a, b in zip(found, expected, strict=True))


def recompute(model: Llama, tokens: Rows) -> tuple[Array, list[Array]]:
    """Logits (B, S, V), and each layer's keys and values: one call on a fresh cache."""
    cache = fresh(model)
    return np.array(model(tokens, cache=cache, all_positions=True)), held(cache)


@pytest.fixture
def histories(
    model_of: ModelOf,
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., None]:
    """Runs histories on a layout's model; small blocks, so that short ones grow over several."""
    monkeypatch.setattr(cache_module, "BLOCK", 8)

    def run(layout: str, bounds: settings) -> None:
        other = load(folder_of(layout), "float64", rounded_to="float16")
        model = model_of(layout, "float64")
        recomputed = lru_cache(maxsize=None)(partial(recompute, model))
        run_state_machine_as_test(
            partial(Histories, model, other, recomputed, tmp_path / "cache.safetensors"),
            settings=bounds,
        )

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_history_ends_as_a_recompute_of_the_tokens_held(
    layout: str, histories: Callable[..., None]
) -> None:
    histories(layout, HISTORIES)


# That the very same histories find what is wrong.


def shared_put(buffer: mx.array | None, rows: mx.array, start: int) -> mx.array:
    """Writes into the buffer that every holder sees."""
    if buffer is None or start + rows.shape[2] > buffer.shape[2]:
        return put(buffer, rows, start)
    buffer[:, :, start : start + rows.shape[2]] = rows
    return buffer


put, reset, append, load_layers, fitting = (
    cache_module._put,
    Cache.reset,
    Layer.append,
    cache_file._read_layers,
    llama.fitting,
)


def cropped_by_one_too_few(self: Cache, length: int) -> int:
    dropped = len(self) - length
    keep = [length] * (len(self.layers) - 1) + [min(length + 1, len(self))]
    self._layers = tuple(layer.crop(n) for layer, n in zip(self.layers, keep, strict=True))
    return dropped


def restored_if_empty(self: Cache, layers: tuple[Layer, ...]) -> None:
    if not len(self):
        self._layers = layers


def reset_but_one(self: Cache) -> None:
    last = getattr(self, "_layers", (Layer(),))[-1]
    reset(self)
    self._layers = (*self._layers[:-1], last)


def last_row_lost(*given: Any) -> tuple[Layer, ...]:
    first, *rest = load_layers(*given)
    return (first.crop(max(first.length - 1, 0)), *rest)


def keys_of_two_layers_swapped(*given: Any) -> tuple[Layer, ...]:
    first, second, *rest = load_layers(*given)
    return (second, first, *rest)


def endless(self: Cache, batch: int, length: int, index_pos: int | None, model: Llama) -> int:
    if not length:
        raise CacheError("no new tokens")
    start = len(self) if index_pos is None else index_pos
    self._guard(batch, start, len(self), model.fingerprint)
    self.fingerprint = model.fingerprint
    return start


BUGS: dict[str, tuple[Any, str, Any]] = {
    "a clone shares a buffer that is written in place": (cache_module, "_put", shared_put),
    "a clone is the cache itself": (Cache, "clone", lambda self: self),
    "a crop keeps a row of the last layer": (Cache, "crop", cropped_by_one_too_few),
    "a crop drops a row too many": (
        Layer,
        "crop",
        lambda self, length: Layer(self.buffers, length - 1) if length > 1 else Layer(),
    ),
    "a reset forgets the last layer": (Cache, "reset", reset_but_one),
    "a load loses a row": (cache_file, "_read_layers", last_row_lost),
    "a load swaps two layers": (cache_file, "_read_layers", keys_of_two_layers_swapped),
    "a load checks no digest": (cache_file, "_digest", lambda _: Always()),
    "no guard": (Cache, "_guard", lambda *_: None),
    "no end": (Cache, "admit", endless),
    "a chunk sees its own future": (
        llama,
        "fitting",
        lambda hidden, scores: fitting(hidden, scores) if hidden is None else hidden * 0 == 1,
    ),
    "a failed call is not undone": (Cache, "restore", restored_if_empty),
}


class Always:
    """A digest that is always the same."""

    def update(self, data: bytes) -> None: ...

    def hexdigest(self) -> str:
        return "0" * 64


@pytest.mark.parametrize("bug", BUGS)
def test_the_histories_find_a_planted_bug(
    bug: str, histories: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*BUGS[bug])

    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError)):
        histories("gqa", PLANTED)

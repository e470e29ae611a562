"""What goes wrong in a cache only later in its life is shown by a scenario of `pitfalls`: a cache
with one planted fault, on tiny models of every head layout, beside the right cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import numpy as np
import own_llama
import pytest

from mlxkv.commands.pitfalls.behaviour import Right, watch
from mlxkv.commands.pitfalls.scenarios import (
    NO,
    OTHER_CACHES,
    RIGHT,
    WRONG,
    Behaviour,
    Setting,
    scenarios,
)
from mlxkv.engines import own
from mlxkv.engines.port import PortRunner
from mlxkv.engines.runner import PlanRunner
from mlxkv.port import cache as caches
from mlxkv.port.cache import Cache, Layer
from mlxkv.port.llama import Llama
from oracle.formats.plan import Plan
from oracle.formats.trace import Meta, Trace

FIRST, SECOND, STEPS = (3, 7, 11, 2, 19), (3, 7, 11, 5, 19), 6
LAYOUTS = ("mha", "gqa", "mqa", "llama3")
RightCache = Cache
Run = Callable[[Plan], PlanRunner]


def greedy(layout: str, prompt: tuple[int, ...]) -> Right:
    """How the talk should go, in float64 numpy; the noise floor is one unit in the last place."""
    config = models.config(layout)
    weights, tokens = models.weights(config), list(prompt)
    for _ in range(STEPS):
        tokens.append(int(models.forward(config, weights, tokens)[-1].argmax()))
    rows = models.forward(config, weights, tokens[:-1])
    floor = np.spacing(np.abs(rows).max(1).astype(np.float32)).astype(np.float64)
    return Right(prompt, tuple(tokens[len(prompt) :]), rows, floor)


def seen(layout: str, run: Run, system: str = "G") -> dict[str, Behaviour]:
    """What comes of every scenario in which a right cache is right."""
    talks = {
        "first": greedy(layout, FIRST),
        "second": greedy(layout, SECOND),
        "one": greedy(layout, FIRST[:1]),
    }
    setting = Setting(
        first=FIRST,
        second=SECOND,
        right=talks["first"].tokens,
        other=talks["second"].tokens,
        limit=64,
        steps=STEPS,
    )
    found = {}
    for scenario in scenarios(setting):
        plan = scenario.plans[system]
        if scenario.expected[system] == RIGHT and isinstance(plan, Plan):
            runner = run(plan).run()
            meta = Meta(plan, "test", "", "float32", outcomes=runner.outcomes)
            made = watch(scenario, RIGHT, Trace(meta, runner.arrays()), talks)
            found[scenario.name] = made.behaviour
    return found


def shown(found: dict[str, Behaviour]) -> set[str]:
    return {name for name, behaviour in found.items() if behaviour != RIGHT}


class SharesKeys(Cache):
    """A clone appends to the key buffer of the cache that it was cloned from, in place."""

    def extend(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if not self.use_kv_cache:
            return keys, values
        shared = self.__dict__.setdefault("shared", {})
        mine = self.layers[layer]
        if layer in shared and mine.buffers is not None:
            mine = Layer((shared[layer], mine.buffers[1]), mine.length)
        grown = mine.append(keys, values)
        assert grown.buffers is not None
        shared[layer] = grown.buffers[0]
        self._layers = (*self._layers[:layer], grown, *self._layers[layer + 1 :])
        return grown.buffers[0][:, :, : grown.length], grown.buffers[1][:, :, : grown.length]

    def clone(self) -> Cache:
        other = object.__new__(SharesKeys)
        other.__dict__.update(self.__dict__)
        return other


class KeepsRows(Cache):
    """Rows that stay what they were: `kept` gives for a layer heads, rows, and the old keys."""

    kept: dict[int, tuple[slice, slice, mx.array]]

    def extend(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        found, values = super().extend(layer, keys, values)
        if layer not in getattr(self, "kept", {}):
            return found, values
        heads, rows, old = self.kept[layer]
        grown = self._layers[layer]
        assert grown.buffers is not None
        rows, buffer = slice(rows.start, min(rows.stop, grown.length)), mx.array(grown.buffers[0])
        buffer[:, heads, rows] = old[:, heads, rows]
        grown = Layer((buffer, grown.buffers[1]), grown.length)
        self._layers = (*self._layers[:layer], grown, *self._layers[layer + 1 :])
        return buffer[:, :, : grown.length], values

    def keep(self, heads: slice, rows: Callable[[Layer], slice]) -> None:
        self.kept = {
            i: (heads, rows(layer), mx.array(layer.buffers[0]))
            for i, layer in enumerate(self.layers)
            if layer.buffers
        }


class ResetKeepsAHead(KeepsRows):
    def reset(self) -> None:
        if "_layers" in self.__dict__:
            self.keep(slice(0, 1), lambda layer: slice(0, layer.length))
        super().reset()


class CropKeepsARow(KeepsRows):
    def crop(self, length: int) -> int:
        self.keep(slice(None), lambda _: slice(length, length + 1))
        return super().crop(length)


class RowReadsAnother(Cache):
    """The second row of a batch attends to the keys of the first."""

    def extend(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        found, values = super().extend(layer, keys, values)
        return mx.broadcast_to(found[:1], found.shape), values


PLANTED: dict[str, tuple[type[Cache], set[str]]] = {
    "a clone shares the key buffer in place": (SharesKeys, {"turns"}),
    "reset keeps a head": (ResetKeepsAHead, {"reset"}),
    "crop keeps a stale row": (CropKeepsARow, {"crop"}),
    "row 1 of a batch reads row 0's keys": (RowReadsAnother, {"batch"}),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def on_port(model: Llama) -> Run:
    return lambda plan: PortRunner(model, plan)


def test_a_right_cache_is_right_on_each(layout: str, model_of: Callable[..., Llama]) -> None:
    found = seen(layout, on_port(model_of(layout)))
    assert {"reset", "turns", "batch", "crop", "branch"} <= set(found)
    assert shown(found) == set()


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_shown_by_its_scenario_alone(
    fault: str, layout: str, model_of: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted, scenario = PLANTED[fault]
    monkeypatch.setattr(caches, "Cache", planted)
    found = seen(layout, on_port(model_of(layout)))
    assert shown(found) == scenario
    assert {found[name] for name in scenario} == {WRONG}


# A cache of one's own, by mlx-lm's convention: copied, trimmed, made anew.

JOIN = """        if self.keys is not None:
            keys, values = (
                mx.concatenate(pair, axis=2) for pair in ((self.keys, keys), (self.values, values))
            )
"""
IN_PLACE = """        if self.keys is None:
            self.buffer = [mx.zeros((*keys.shape[:2], 64, keys.shape[3]))]
        end = self.offset + keys.shape[2]
        self.buffer[0] = mx.array(self.buffer[0])
        self.buffer[0][:, :, self.offset : end] = keys
        keys = self.buffer[0][:, :, :end]
        if self.keys is not None:
            values = mx.concatenate((self.values, values), axis=2)
"""
COPY = """    def __deepcopy__(self, memo):
        other = LayerCache()
        other.__dict__.update(self.__dict__)
        return other

    def trim"""
CUT = "        self.offset -= n\n"
KEEP = "        self.keys, self.values, self.offset = keys, values, keys.shape[2]\n"
STALE = """        old, at = getattr(self, "stale", None), self.offset
        if old is not None:
            parts = keys[:, :, :at], old[:, :, at : at + 1], keys[:, :, at + 1 :]
            keys, self.stale = mx.concatenate(parts, axis=2), None
"""
GIVEN = "        return keys, values\n"
MIXED = "        return mx.broadcast_to(keys[:1], keys.shape), values\n"
OWN: dict[str, tuple[dict[str, str], set[str]]] = {
    "right": ({}, set()),
    "a copy shares the key buffer in place": ({JOIN: IN_PLACE, "    def trim": COPY}, {"turns"}),
    "trim keeps a stale row": (
        {CUT: f"{CUT}        self.stale = self.keys\n", KEEP: STALE + KEEP},
        {"crop"},
    ),
    "row 1 of a batch reads row 0's keys": ({GIVEN: MIXED}, {"batch"}),
}


@pytest.mark.parametrize("fault", OWN)
def test_a_cache_of_ones_own_is_shown_too(
    fault: str,
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    changes, scenario = OWN[fault]
    text = Path(own_llama.__file__).read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "mine.py").write_text(text)
    source = own.find(f"{tmp_path / 'mine.py'}:load")
    model: Any = own.load(source, str(folder_of("gqa")), "float32")
    found = seen("gqa", lambda plan: own.OwnRunner(model, plan, name="mine", vocab=40), "L")
    assert shown(found) == scenario
    assert NO not in found.values()


def test_mlx_lms_other_caches_run_every_new_scenario() -> None:
    setting = Setting(FIRST, SECOND, (1,) * STEPS, (2,) * STEPS, 64, STEPS)
    made = {s.name: s for s in scenarios(setting)}
    for name in ("reset", "turns", "batch"):
        assert set(OTHER_CACHES) < set(made[name].plans)

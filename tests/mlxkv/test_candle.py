"""The real candle 0.11.0 and the unguarded port agree, and a port that errs is seen to disagree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from candle_goldens import GOLDEN, TINY, Golden, goldens

from mlxkv.engines.port import PortRunner
from mlxkv.port import cache as cache_module
from mlxkv.port import llama, ops, rope
from mlxkv.port.cache import Cache, Layer
from mlxkv.port.config.llama import Rope
from mlxkv.port.llama import Llama
from mlxkv.port.weights import from_checkpoint, load
from oracle.formats.trace import Outcome
from oracle.model.checkpoint import Checkpoint


@cache
def tiny(layout: str, dtype: str) -> Llama:
    return load(GOLDEN / "tiny" / layout, dtype)


@pytest.mark.parametrize(
    "golden", [g for layout in TINY for g in goldens(f"tiny/{layout}")], ids=repr
)
def test_the_unguarded_port_does_what_candle_did(golden: Golden) -> None:
    runner = golden.run(tiny(golden.folder.name, golden.dtype))

    assert golden.faults(runner) == []


@pytest.fixture(scope="module")
def smollm2(default_checkpoint: Checkpoint) -> Llama:
    return from_checkpoint(default_checkpoint)


SMOLLM2 = [g for g in goldens("smollm2") if g.dtype == "float32" and g.says_something]


@pytest.mark.parametrize("golden", SMOLLM2, ids=repr)
def test_the_unguarded_port_does_on_smollm2_what_candle_did(golden: Golden, smollm2: Llama) -> None:
    assert golden.faults(golden.run(smollm2)) == []


def test_nothing_of_candle_is_left_out() -> None:
    assert [len(goldens(f"tiny/{layout}")) for layout in TINY] == [34, 34, 34, 34]
    assert [g.name for g in goldens("tiny/gqa") if not g.says_something] == []
    assert [g.name for g in SMOLLM2] == [
        *(
            "cached",
            "nocache",
            "chunked",
            "greedy",
            "pos0",
            "by-calls",
            "reuse",
            "reuse1",
            "far",
            "branch",
        ),
        *("chunk-wrong-pos", "uncached-pos"),
    ]


# A port that errs, one fault at a time.

Patch = Callable[[pytest.MonkeyPatch], None]


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """A function in place of another, made from it."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def frequencies(change: Callable[..., Any]) -> Patch:
    """RoPE tables from changed inverse frequencies."""
    return replaced(rope, "inverse_frequencies", lambda real: lambda *given: change(real, *given))


def mask_of(hides: Callable[[Any, Any, int], Any]) -> Callable[[Any], Any]:
    def mask(self: Cache, length: int, start: int) -> mx.array | None:
        columns, rows = np.arange(start + length)[None, :], np.arange(length)[:, None]
        return None if length == 1 else mx.array(hides(columns, rows, start).astype(np.uint8))

    return lambda real: mask


def newest_first(self: Layer, keys: mx.array, values: mx.array) -> Layer:
    old = () if self.keys is None or self.values is None else (self.keys, self.values)
    rows = (
        [mx.concatenate([new, held], axis=2) for new, held in zip((keys, values), old, strict=True)]
        if old
        else [keys, values]
    )
    return Layer((rows[0], rows[1]), self.length + keys.shape[2])


def always_kept(self: Cache, layer: int, keys: mx.array, values: mx.array) -> Any:
    grown = self._layers[layer].append(keys, values)
    self._layers = (*self._layers[:layer], grown, *self._layers[layer + 1 :])
    return grown.keys, grown.values


def pairwise(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    a, b = x[..., ::2], x[..., 1::2]
    return mx.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)


def theta(real: Any, given: Rope, *rest: Any) -> Any:
    return real(replace(given, theta=given.theta * 1.01), *rest)


MUTANTS: dict[str, tuple[Patch, str, str]] = {
    # what is wrong: the fault, a model and a plan that must show it
    "theta x 1.01": (frequencies(theta), "tiny/gqa", "cached"),
    "angles in half precision": (
        frequencies(lambda real, *given: real(*given).astype(np.float16)),
        "tiny/gqa",
        "cached",
    ),
    "llama3 scaling dropped": (
        replaced(rope, "_llama3", lambda real: lambda frequencies, rope: frequencies),
        "tiny/llama3",
        "cached",
    ),
    "pairs of neighbours turned": (
        replaced(llama, "rotate", lambda real: pairwise),
        "tiny/gqa",
        "cached",
    ),
    # The tiny models' rows are so large that an eps of 1e-5 drowns in their noise.
    "eps x 1.1": (
        replaced(ops, "rms_norm", lambda real: lambda x, weight, eps: real(x, weight, eps * 1.1)),
        "smollm2",
        "cached",
    ),
    "scale x 1.001": (
        replaced(
            ops,
            "attention",
            lambda real: lambda *given, scale, **rest: real(*given, scale=scale * 1.001, **rest),
        ),
        "tiny/gqa",
        "cached",
    ),
    "one future token visible": (
        replaced(Cache, "mask", mask_of(lambda columns, rows, start: columns > start + rows + 1)),
        "tiny/gqa",
        "nocache",
    ),
    "mask without the history's offset": (
        replaced(Cache, "mask", mask_of(lambda columns, rows, start: columns > rows)),
        "tiny/gqa",
        "chunked",
    ),
    "decode position + 1": (
        replaced(
            Cache,
            "rotation",
            lambda real: lambda self, start, length: real(self, start + (length == 1), length),
        ),
        "tiny/gqa",
        "cached",
    ),
    # Attention does not care in which order it is given keys that it sees all of: only a masked
    # call shows this.
    "new rows put before the old": (
        replaced(Layer, "append", lambda real: newest_first),
        "tiny/gqa",
        "chunked",
    ),
    "no-cache flag ignored": (
        replaced(Cache, "extend", lambda real: always_kept),
        "tiny/gqa",
        "nocache-by-one",
    ),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_port_that_errs_is_seen(
    fault: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    patch, name, plan = MUTANTS[fault]
    (golden,) = (g for g in goldens(name) if g.name == plan)
    model = (
        request.getfixturevalue("smollm2")
        if name == "smollm2"
        else tiny(golden.folder.name, "float32")
    )
    # Tables are kept per config: the wrong ones must be made, and must not be kept.
    monkeypatch.setattr(cache_module, "_tables", cache_module._tables.__wrapped__)
    assert golden.faults(golden.run(model)) == []

    patch(monkeypatch)

    assert any("times candle's own error" in f for f in golden.faults(golden.run(model)))


def test_an_error_that_candle_does_not_raise_is_seen() -> None:
    (golden,) = (g for g in goldens("tiny/gqa") if g.name == "cached")

    runner = PortRunner(tiny("gqa", "float32"), golden.plan, guarded=False)
    runner.outcomes = [Outcome(error="too late")] * len(golden.plan.steps)

    assert len(golden.faults(runner)) == 2 + len(golden.plan.steps)


def test_a_row_that_is_not_finite_is_seen() -> None:
    (golden,) = (g for g in goldens("tiny/gqa") if g.name == "cached")
    runner = golden.run(tiny("gqa", "float32"))

    runner.rows[3] = runner.rows[3] * float("nan")

    assert [f.split(" times ")[0] for f in golden.faults(runner)] == [
        "gqa-cached: rows are nan",
        "gqa-cached: the worst row is nan",
    ]


@pytest.mark.parametrize("plan", ["reuse", "far", "chunk-wrong-pos", "uncached-pos"])
def test_an_error_that_only_candle_raises_is_seen(plan: str) -> None:
    (golden,) = (g for g in goldens("tiny/gqa") if g.name == plan)
    runner = golden.run(tiny("gqa", "float32"))

    runner.outcomes = [Outcome(o.tokens) for o in runner.outcomes]
    silent = golden.faults(runner)
    runner.outcomes = [
        Outcome(o.tokens, o.error and "cannot broadcast [9, 9] to [1, 6, 9, 9]")
        for o in golden.outcomes
    ]
    other = golden.faults(runner)

    failing = sum(o.error is not None for o in golden.outcomes)
    assert (len(silent), len(other)) == (failing, failing)


def test_another_greedy_token_is_seen() -> None:
    (golden,) = (g for g in goldens("tiny/gqa") if g.name == "greedy")
    runner = golden.run(tiny("gqa", "float32"))

    right = golden.outcomes[1].tokens
    assert right is not None
    wrong = [*right[:-1], right[-1] + 1]
    runner.outcomes[1] = Outcome(tokens=wrong)

    assert golden.faults(runner) == [f"gqa-greedy: step 1 chose {wrong}, expected {right}"]

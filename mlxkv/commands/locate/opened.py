"""Where an engine that hands out taps first stands out from the noise of the port's own taps.

Nobody can feed such an engine the truth's hidden states, so its taps are those of the run as it is.
A right engine's errors grow from layer to layer as the port's do in the same dtype: the first tap
that is further off than that is where the fault shows first, and all taps before it are right.

The limits are those of a cache. A right engine, with attention in several steps where the port has
one kernel, reads a median of at most 1.9 of 4 and a row of at most 11.5 of 30, both in attention
(SmolLM2 in float32; tiny random models in float32, float16 and bfloat16 read 1.2 and 5.5).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mlxkv.commands.locate import hints
from mlxkv.commands.locate.found import Located, TapRow
from mlxkv.commands.locate.held import NEAR
from mlxkv.commands.locate.layers import HEADED, WALK, Layer, count
from mlxkv.commands.locate.outside import MEDIAN, raised
from mlxkv.judge import floors, measure
from mlxkv.judge.limits import KV_WORST
from mlxkv.judge.measure import Floats
from oracle.formats.trace import Trace

# Of the largest logit: an error that a right head does not make of right hidden states.
SLACK = {"float32": 2.0**-20, "float16": 2.0**-8, "bfloat16": 2.0**-5}


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """One plan followed by an engine that hands out taps, and by the port in the same dtype."""

    run: Trace
    port: Trace


def look(base: Located, truth: Trace, opened: Opened) -> Located | None:
    """The first tap that stands out, or the head where what leaves the last layer is right.

    None where each tap that was handed out is within its limits, and that one was not.
    """
    rows: list[TapRow] = []
    for number in range(count(truth)):
        mine = [row for tap in WALK if (row := _row(opened, truth, number, tap))]
        rows += mine
        wrong = next((row for row in mine if row.wrong), None)
        if wrong is not None:
            return _located(base, truth, opened, wrong, rows)
    if not rows or rows[-1].tap != "hidden" or rows[-1].layer != count(truth) - 1:
        return None
    at, of_run, of_truth = measure.beside(opened.run, truth)
    its = truth.logits[of_truth]
    dtype = opened.run.meta.dtype
    near = SLACK[dtype] * float(np.abs(its).max())
    logits = opened.run.logits[of_run]
    words = hints.behind(logits, its, at, near=near, dtype=dtype) or hints.HEAD
    right = f"each of the {len(rows)} taps is within its limits, what leaves the last layer too"
    plan = opened.run.meta.plan.name
    return replace(base, plan=plan, rows=tuple(rows), hint=f"behind the layers: {words} ({right})")


def _located(
    base: Located, truth: Trace, opened: Opened, wrong: TapRow, rows: list[TapRow]
) -> Located:
    """The place of a tap, of which the `rows` are all that were looked at up to its layer."""
    assert wrong.first is not None
    plain = Layer(opened.run, truth, wrong.layer)
    its = plain.both(wrong.tap)[1]
    floor = _floor(opened, truth, wrong.layer, wrong.tap)
    assert floor is not None
    slack = NEAR * float(floor.max()) / max(float(np.abs(its).max()), np.finfo(np.float64).tiny)
    layer = replace(plain, slack=slack)
    before = sum(not row.wrong for row in rows if row.layer < wrong.layer)
    before += [row.tap for row in rows if row.layer == wrong.layer].index(wrong.tap)
    words = hints.explain(layer, wrong.tap, wrong.first, wrong.heads)
    every = not wrong.heads or len(wrong.heads) == len(its)
    return replace(
        base,
        plan=opened.run.meta.plan.name,
        layer=wrong.layer,
        tap=wrong.tap,
        head=None if every else wrong.heads[0],
        heads=wrong.heads,
        rows=tuple(row for row in rows if row.layer == wrong.layer),
        hint=f"{words} (the first tap that stands out, after {before} within their limits)",
    )


def _row(opened: Opened, truth: Trace, number: int, tap: str) -> TapRow | None:
    """One tap beside its limits; None where the engine hands it out not, or nothing measures it."""
    layer = Layer(opened.run, truth, number)
    errors, floor = _errors(layer, tap), _floor(opened, truth, number, tap)
    relative = layer.errors(tap)
    if errors is None or floor is None or relative is None:
        return None
    ratios = np.where(np.isnan(errors), np.inf, errors / floor)  # [heads, n]
    above = ratios > KV_WORST
    above |= (np.median(ratios, axis=1) > MEDIAN)[:, None] & raised(ratios)
    first = int(np.flatnonzero(above.any(0))[0]) if above.any() else None
    heads = tuple(np.flatnonzero(above.any(1)).tolist()) if tap in HEADED else ()
    worst = float(relative.max())
    return TapRow(number, tap, None, worst, first, heads, float(ratios.max()))


def _errors(layer: Layer, tap: str) -> Floats | None:
    """(heads, n): the rms of each row's error."""
    pair = layer.pair(tap)
    if pair is None:
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.subtract(*pair, dtype=np.float64)
        return np.asarray(np.sqrt(np.mean(error * error, axis=-1)))


def _floor(opened: Opened, truth: Trace, number: int, tap: str) -> Floats | None:
    """(heads, n): the port's error near each position, at least an ulp of the row's largest."""
    port, engine = Layer(opened.port, truth, number), Layer(opened.run, truth, number)
    pair, noise = engine.pair(tap), _errors(port, tap)
    if pair is None:
        return None
    largest = np.abs(pair[1]).max(-1)
    if noise is None and tap == "scores":
        noise = _of_scores(port, largest)
    if noise is None:
        return None
    near = floors.near_rms(noise, np.arange(noise.shape[-1]))
    return np.maximum(near, measure.ulp(largest, opened.run.meta.dtype))


def _of_scores(port: Layer, largest: Floats) -> Floats | None:
    """The error that queries and keys hand on: in the run's dtype the port shows no scores."""
    found = [float(e.max()) for tap in ("q_rope", "k_rope") if (e := port.errors(tap)) is not None]
    return np.full(largest.shape, sum(found) * float(largest.max())) if len(found) == 2 else None

"""Patterns over positions and calls, by what was measured of the same tokens in two ways."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mlxkv.commands.locate import held as caches
from mlxkv.commands.locate.rows import plural
from mlxkv.judge.case import CACHE, Case
from mlxkv.judge.measure import Array, Bools, Floats
from mlxkv.judge.result import Curve, Verdict
from mlxkv.judge.words import listed
from oracle.formats.plan import Plan
from oracle.formats.trace import Trace

UNEVEN = 3.0
"""So many times noisier is a pattern over positions worth naming."""
REDUCED = "in layer 0"
"""In the words of `by_calls` where the first layer's rows show it."""


def by_calls(case: Case, verdict: Verdict, runs: Mapping[str, Trace]) -> str | None:
    """Calls of several tokens much noisier than single ones, of the same tokens at one position.

    In the logits, or in the first layer's rows, which depend on their own token alone.
    """
    curves = {c.plan: dict(zip(c.positions, c.rms, strict=True)) for c in verdict.curves}
    both = [curves[plan] for plan in ("full", "step") if plan in curves]
    at = [p for p in range(case.manifest.prompt_tokens, case.length) if all(p in c for c in both)]
    found = [caches.read(case, plan, runs.get(plan)) for plan in ("full", "step")]
    rows = [held.ratios[:, 0][..., at] for held in found if held is not None]
    if found[0] is not None and len(rows) == 2 and at and _uneven(*rows):
        return _reduced(case, found[0].floors[:, 0] * found[0].ratios[:, 0], at)
    logits = [np.array([curve[p] for p in at]) for curve in both]
    if len(logits) < 2 or not at or not _uneven(*logits):
        return None
    noisy = "calls of several tokens are noisier than single ones"
    if len(rows) == 2:
        return f"{noisy}, though not in the first keys and values: what only such calls do later"
    return f"{noisy}: the mask, or matrix products in reduced precision (TF32, MLX_ENABLE_TF32=0)"


def _uneven(several: Floats, single: Floats) -> bool:
    return bool(np.median(several) > UNEVEN * np.median(single))


def _reduced(case: Case, errors: Floats, at: list[int]) -> str:
    """Of the first layer's rows, in which only matrix products depend on a call's other tokens."""
    pair = case.truth.kv(CACHE, 0)
    assert pair is not None
    sizes = np.stack([np.sqrt(np.mean(np.square(a, dtype=np.float64), axis=-1)) for a in pair])
    part = float(np.median(errors[..., at] / np.maximum(sizes[..., at], np.finfo(float).tiny)))
    noisy = f"calls of several tokens are noisier than single ones: {REDUCED} by {part:.1g}"
    tf32 = TF32[0] <= part <= TF32[1]
    cause = ", as matrix products with 10 bits make it (TF32, MLX_ENABLE_TF32=0)" if tf32 else ""
    return f"{noisy} of keys and values{cause}"


TF32 = (2.0**-14, 2.0**-10)
"""Of a row's size: what products of numbers rounded to 10 bits are off by, as measured 2e-4."""


def growing(verdict: Verdict) -> bool:
    """Whether errors grow all along the sequence."""
    full = next((curve for curve in verdict.curves if curve.plan == "full"), None)
    if full is None or len(full.positions) < 16:
        return False
    at, by_row = np.array(full.positions), in_floors(verdict, full)
    # Of a long sequence, whose first positions have more rows, each quarter of the positions.
    parts = np.array_split(np.arange(at[0], at[-1] + 1), 4)
    quarters = [float(np.median(by_row[np.isin(at, part)])) for part in parts]
    return quarters == sorted(quarters) and quarters[-1] > UNEVEN * quarters[0]


def in_floors(verdict: Verdict, curve: Curve) -> Floats:
    """A plan's errors by position, in noise floors."""
    floors = dict(zip(verdict.floor_at, verdict.floor, strict=True))
    floor = np.array([floors[position] for position in curve.positions])
    return np.asarray(np.array(curve.rms) / floor)


def which(rows: Bools, plan: Plan, at: Array | None = None) -> str:
    """Which of n rows, and of which calls, where that tells them from the others.

    `at` (n,) are the rows' positions, in rising order; None where those are 0 to n - 1.
    """
    n = len(rows)
    at = np.arange(n) if at is None else at
    wrong = at[rows]
    if len(wrong) == n:
        return "at every position"
    named = f"from position {wrong[0]} on"
    if len(wrong) < n - int(np.argmax(rows)):
        shown, many = listed(wrong.tolist()), f"{len(wrong)} of {n} positions"
        named = f"at {many}, of which {wrong[0]} is the first"
        named = f"at position{plural(wrong.tolist())} {shown}" if len(wrong) <= 4 else named
    single = np.zeros(n, bool)
    for call in plan.calls():
        single[(at >= call.start) & (at < call.start + call.fed)] = call.fed == 1
    if single.any() and np.array_equal(rows, single):
        return f"{named}, those of single tokens"
    if single.any() and np.array_equal(rows, ~single):
        return f"{named}, those of calls of several tokens"
    return named

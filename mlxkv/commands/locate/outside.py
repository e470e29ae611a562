"""Where an engine goes wrong whose layers nobody can feed: what its cache shows, in noise floors.

Keys and values of a layer are made of what entered it. So where a layer's are wrong and those of
the layer before are right, the fault lies between the two; how it shows in keys, values, heads and
rows says more. Axes: K key/value heads, n positions, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mlxkv.commands.locate import held as caches
from mlxkv.commands.locate import hints, patterns, turns
from mlxkv.commands.locate.found import Located
from mlxkv.commands.locate.held import NEAR, Held
from mlxkv.commands.locate.layers import Layer
from mlxkv.commands.locate.rows import flat, narrower, plural, scale
from mlxkv.judge import measure
from mlxkv.judge.case import ORDER, Case
from mlxkv.judge.layout import KINDS, Kind
from mlxkv.judge.limits import KV_MOST, KV_WORST
from mlxkv.judge.measure import Bools, Floats
from mlxkv.judge.onset import onset
from mlxkv.judge.result import Strip, Verdict, plain
from mlxkv.judge.words import listed
from oracle.formats.trace import Trace

MEDIAN = 4.0
"""Limit for the median over positions of a layer's keys or values, in floors. Medians, since the
massive activations of one token swamp a maximum."""
STEP = 3.0
"""A layer is wrong by itself above so many times the layer before; what a wrong layer hands on
grows more slowly."""
SURE = 2.0
"""In floors: a head reads more where its layer was given something wrong. A correct one's median
reads 1."""
_GROWS = "the error grows with the position"
ATTENTION = (
    "its attention (mask, scores, or which rows it reads), as a wrong weight would show at every "
    "position"
)


def look(base: Located, case: Case, verdict: Verdict, runs: Mapping[str, Trace]) -> Located:
    """The place that the cache of a plan that failed shows, and patterns over positions."""
    held, why = _held(case, verdict, runs)
    calls = patterns.by_calls(case, verdict, runs)
    words = [calls] if calls else []
    if held is None:
        words += [_GROWS] if patterns.growing(verdict) else []
        return replace(base, hint="; ".join([*words, f"{base.pointed} ({why})"]))
    base = replace(base, strip=_strip(held), plan=base.plan or held.plan)
    if held.plan != base.plan:
        words += [f"by the cache of plan {held.plan}, as plan {base.plan} shows none"]
    found = first_wrong(held.ratios)
    if found is None:
        words += [_GROWS] if patterns.growing(verdict) else []
        place = _behind(base, case, verdict, held)
        return replace(place, hint="; ".join([*words, place.hint or ""]))
    if calls and found[0] == 0 and patterns.REDUCED in calls:
        return replace(base, layer=0, hint=calls)
    place = _place(base, case, held, *found)
    return replace(place, hint="; ".join([*words, place.hint or ""]))


def strip(case: Case, verdict: Verdict, runs: Mapping[str, Trace]) -> Strip | None:
    """Keys and values of the plan that failed, by layer and position, where it shows them."""
    held, _ = _held(case, verdict, runs)
    return None if held is None else _strip(held)


def _strip(held: Held) -> Strip:
    by_position = tuple(finite(layer) for layer in held.ratios.max((0, 2)))
    return Strip("keys and values, rms error in noise floors", KV_WORST, by_position)


def _held(case: Case, verdict: Verdict, runs: Mapping[str, Trace]) -> tuple[Held | None, str]:
    """The cache of the plan in which the first wrong position is, or else of another that failed.

    Where there is none, the second says why.
    """
    failed = {gate.plan for gate in verdict.gates if gate.failed}
    first = verdict.first_wrong.plan if verdict.first_wrong else None
    wanted = [plan for plan in dict.fromkeys((first, *ORDER)) if plan in failed]
    for plan in wanted:
        held = None if plan is None else caches.read(case, plan, runs.get(plan))
        if held is not None:
            return held, ""
    named = listed([str(plan) for plan in wanted] or [str(first)], "or")
    return None, f"no keys and values of plan {named} to read the layer from"


def first_wrong(ratios: Floats) -> tuple[int, Bools] | None:
    """The first wrong layer, and which of its rows are wrong, (keys and values, K, n).

    Each layer is asked for single rows too before the next one is looked at: a row that is wrong in
    one layer makes many wrong in the next. `ratios` are (keys and values, layers, K, n) in floors.
    """
    # A single row that is not a number must not take its layer's median with it.
    finite = np.where(np.isnan(ratios), np.inf, ratios)
    medians = np.median(finite, axis=-1)  # [keys and values, layers, K]
    most = np.percentile(finite, 95, axis=-1, method="lower")  # the same
    for layer in range(ratios.shape[1]):
        before, most_before, rows_before = (
            (of[:, layer - 1].max((0, 1)) if layer else 0.0) for of in (medians, most, finite)
        )
        all_wrong = medians[:, layer] > max(MEDIAN, STEP * before)  # [keys and values, K]
        all_wrong |= most[:, layer] > max(KV_MOST, STEP * most_before)
        rows = finite[:, layer] > np.maximum(KV_WORST, STEP * rows_before)
        rows |= all_wrong[..., None] & raised(finite[:, layer])
        if rows.any():
            return layer, rows
    return None


def raised(ratios: Floats) -> Bools:
    """Rows above a median's limit (..., n), from the position on at which they begin.

    One before it may be above that limit too, and yet be no more than noise.
    """
    found = ratios > MEDIAN
    for head in np.ndindex(ratios.shape[:-1]):
        median, at = float(np.median(ratios[head])), np.arange(ratios.shape[-1])
        level = median if median > MEDIAN else np.inf
        first = onset(at, ratios[head], KV_WORST, level=level, sound=_within)
        found[head][: first.position if first else 0] = False
    return found


def _within(before: Floats) -> bool:
    most = np.percentile(before, 95, method="lower")
    return bool(np.median(before) <= MEDIAN and most <= KV_MOST)


def _place(base: Located, case: Case, held: Held, number: int, wrong: Bools) -> Located:
    """The place and the words, from the rows that are wrong in the first wrong layer."""
    kinds = [kind for kind, of in zip(KINDS, wrong, strict=True) if of.any()]
    heads = tuple(np.flatnonzero(wrong.any((0, 2))).tolist())
    at = replace(base, layer=number, tap=kinds[0], head=heads[0], heads=heads)
    layers = {kind: held.layer(case.truth, number, kind) for kind in kinds}
    known = _known(layers, wrong)
    if known is not None:
        return replace(at, hint=known)
    rows = patterns.which(np.asarray(wrong.any((0, 1))), held.run.meta.plan)
    if len(kinds) == 2 and _given(held.ratios[:, number], wrong):
        return _before(at, layers, rows, alone=_alone(held.ratios[:, number].max((0, 1))))
    if len(kinds) == 2:
        what = "its k_proj and v_proj, or the cache"
        which = f"keys and values of head{plural(heads)} {listed(heads)} alone"
        return replace(at, hint=f"in layer {number}: {which}, {rows}: {what}")
    other = KINDS[kinds == ["keys"]]
    what = _keys(layers["keys"]) if kinds == ["keys"] else "v_proj, or the cache"
    which = f"its {kinds[0]}, {rows}, while its {other} are right"
    return replace(at, hint=f"in layer {number}: {which}: {what}")


def _known(layers: Mapping[Kind, Layer], wrong: Bools) -> str | None:
    """Words where the wrong rows are something known, or the heads stand in another order."""
    for kind, layer in layers.items():
        of, (mine, its) = wrong[KINDS.index(kind)], layer.both(kind)
        heads = np.flatnonzero(of.any(1)).tolist()
        order = hints.order_of_heads(layer, kind, heads)
        if order:
            return f"in layer {layer.number}: the order of the heads of its {kind} ({order})"
        dtype = narrower(mine[of], its[of], layer.run.meta.dtype)
        if dtype is not None:
            rows = patterns.which(of.any(0), layer.run.meta.plan)
            return f"the cache: the {kind} of layer {layer.number}, {rows}, are rounded to {dtype}"
        row, head = (int(i) for i in np.argwhere(of.T)[0])
        words = hints.row_words(layer, kind, row, head)
        if words is not None:
            return words
    return None


def _given(ratios: Floats, wrong: Bools) -> bool:
    """Whether every head is wrong where any is: then the layer was given something wrong."""
    medians = np.median(ratios[..., wrong.any((0, 1))], axis=-1)
    return bool((~(medians <= SURE)).all())


def _above(by_row: Floats) -> Bools:
    """The worst row of a correct engine reads 3.9 in its cache, 2.3 in its logits."""
    return np.asarray(~(by_row <= MEDIAN))


def _alone(by_row: Floats) -> bool:
    """Whether some of n positions are far above the noise and all others within it, in floors."""
    clean = ~_above(by_row)
    return bool(clean.any() and not clean.all() and (~(by_row[~clean] <= KV_WORST)).all())


def _before(at: Located, layers: Mapping[Kind, Layer], rows: str, *, alone: bool) -> Located:
    """Keys and values of every head are wrong: what made them was. `alone`: at some rows only."""
    layer = layers["values"]
    mine, its = map(flat, layer.both("values"))
    scaled = scale(mine, its, near=layer.near("values"))
    none, number = replace(at, tap=None, head=None, heads=()), layer.number
    if scaled is not None:
        what = f"in layer {number}: what its keys and values are made of is scaled ({scaled})"
        return replace(none, tap="input_norm", hint=f"{what}: the first norm, {hints.NORM}")
    which = f"keys and values of all heads are wrong, {rows}"
    if number == 0:
        weights = "" if alone else ", the first norm, or both k_proj and v_proj"
        what = f"the embedding, the token ids{weights}, or what the cache makes of both"
        return replace(none, hint=f"in layer 0: {which}: {what}")
    right = f"the keys and values of layer {number - 1} are within their limits"
    if alone:
        made = f"made in layer {number - 1}, after its keys and values: {ATTENTION}"
        made = f"{made}, or by the cache of layer {number}"
        hint = f"{made} ({right}; in layer {number} {which})"
        return replace(none, layer=number - 1, hint=hint)
    what = (
        f"in layer {number - 1} its attention, o_proj or MLP, or a scale that its first norm hides"
        f"; or in layer {number} the first norm, both k_proj and v_proj, or the cache"
    )
    return replace(none, hint=f"{right}, in layer {number} {which}: between the two: {what}")


def _keys(layer: Layer) -> str:
    mine, its = layer.both("keys")
    before = layer.truth.arrays.get(f"tap/{layer.number:03d}/k")
    found = turns.words(mine, its, before, near=layer.near("keys"))
    return f"RoPE: {found}" if found else "k_proj, RoPE, or the cache"


def _behind(base: Located, case: Case, verdict: Verdict, held: Held) -> Located:
    """Of wrong logits after a cache that is right in every layer."""
    at, of_run, of_truth = measure.beside(held.run, case.truth)
    mine, its = held.run.logits[of_run], case.truth.logits[of_truth]
    floors = np.asarray(case.floors["rms"], np.float64).max()
    found = hints.behind(mine, its, at, near=NEAR * float(floors), dtype=case.manifest.dtype)
    within = "keys and values are within their limits in every layer"
    if found is not None:
        return replace(base, hint=f"{within}: behind the layers: {found}")
    last = held.ratios.shape[1] - 1
    curve = next((curve for curve in verdict.curves if curve.plan == held.plan), None)
    by_row = patterns.in_floors(verdict, curve) if curve else np.zeros(0)
    # A NaN says nothing of its origin: numbers that a mask or a wrong row makes are finite.
    every = len(by_row) == len(case.truth.positions)
    if every and _alone(by_row) and np.isfinite(mine).all():
        rows = patterns.which(_above(by_row), held.run.meta.plan, at)
        made = f"made in layer {last}, the last, after its keys and values"
        hint = f"{within}: {made}: {ATTENTION}, or their logits (wrong {rows})"
        return replace(base, layer=last, hint=hint)
    also = f"in layer {last}, the last, its attention, o_proj or MLP"
    return replace(base, hint=f"{within}: behind those of the last: {also}; or {hints.HEAD}")


def finite(values: Floats) -> tuple[float | None, ...]:
    """Plain numbers, None for what is none."""
    return tuple(plain(values.tolist()))

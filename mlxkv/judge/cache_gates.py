"""The gates on the keys and values that the cache of each plan's run holds in the end.

What is true of them depends on the tokens and not on the calls, so one truth serves for all plans.

If all logits are right, the cache may be laid out in another way than the truth's: then its rows
are measured as the truth lays them out (`layout.py`), or not at all. If any of them is wrong,
nothing is excused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from mlxkv.judge import layout, limits, measure
from mlxkv.judge.admission import cache_reasons, layers
from mlxkv.judge.case import Case
from mlxkv.judge.floors import kind_floors
from mlxkv.judge.gates import Yardstick, beginning, not_run
from mlxkv.judge.layout import KINDS, Kind
from mlxkv.judge.measure import Floats
from mlxkv.judge.onset import onset
from mlxkv.judge.result import Gate, GateName
from oracle.formats.trace import Trace

_OF_KIND: dict[Kind, tuple[GateName, GateName, GateName]] = {
    "keys": (GateName.KEYS_MEDIAN, GateName.KEYS_MOST, GateName.KEYS_WORST),
    "values": (GateName.VALUES_MEDIAN, GateName.VALUES_MOST, GateName.VALUES_WORST),
}
_LIMITS = limits.KV_MEDIAN, limits.KV_MOST, limits.KV_WORST


def cache_gates(
    yardstick: Yardstick, runs: Mapping[str, Trace], others: Sequence[Gate]
) -> tuple[list[Gate], list[str], list[str]]:
    """The gates of each plan whose trace holds a cache, what leaves the verdict open, and notes.

    `runs` are by plan. `others` are all gates on logits and that of cached against uncached. Each
    of them must have run and passed, or no other layout is looked for.
    """
    case, largest, sound = yardstick.case, yardstick.cache_largest, _passed(others)
    gates, reasons, notes = list[Gate](), list[str](), list[str]()
    read = dict[str, Trace]()
    for plan in dict.fromkeys((case.cached, *holding(case, runs))):
        why, odd = _unread(yardstick, plan, runs.get(plan), sound=sound)
        reasons += odd
        if why is None:
            read[plan] = runs[plan]
        else:
            gates += [g for kind in KINDS for g in _no_value(plan, kind, f"not run: {why}")]
    kinds = [] if largest is None else list(zip(KINDS, largest, strict=True))
    for kind, of_kind in kinds:
        floor = kind_floors(case, kind, of_kind)  # once for all plans
        for plan, run in read.items():
            of, note = _kind_gates(case, plan, run, kind, floor, sound=sound)
            gates, notes = gates + of, notes + note
    return gates, reasons, list(dict.fromkeys(notes))


def holding(case: Case, runs: Mapping[str, Trace]) -> list[str]:
    """The plans whose traces hold keys or values; of one trace under two names the one judged."""
    judged = runs.get(case.cached)
    return [
        plan
        for plan, run in runs.items()
        if layers(run) and (plan == case.cached or run is not judged)
    ]


def ratio_gates(case: Case, ratios: Floats) -> list[Gate]:
    """The gates on keys and values, from their errors in floors (keys and values, layers, K, n).

    Per layer and head, of which the worst decides: the median over positions, the 95th percentile,
    and the worst row.
    """
    pairs = zip(KINDS, ratios, strict=True)
    return [gate for kind, of in pairs for gate in _ratios_of(case, case.cached, kind, of)]


def algebra_cache_gates(
    yardstick: Yardstick, traces: Mapping[str, Trace], others: Sequence[Gate]
) -> tuple[list[Gate], list[str]]:
    """The gates on the caches of the float64 runs, of which `others` are the gates on logits.

    They are relative to each layer's largest key or value: layers differ by orders of magnitude.
    """
    ran = {gate.plan for gate in others if gate.ran}
    plans = [plan for plan in holding(yardstick.case, traces) if plan in ran]
    found = [_algebra(yardstick, plan, traces[plan], sound=_passed(others)) for plan in plans]
    return [gate for gate, _ in found], [line for _, odd in found for line in odd]


def _algebra(yardstick: Yardstick, plan: str, run: Trace, *, sound: bool) -> tuple[Gate, list[str]]:
    name, case, largest = GateName.ALGEBRA_CACHE, yardstick.case, yardstick.cache_largest
    odd = cache_reasons(run, case.truth)
    if (odd and not (sound and _shaped(case, run))) or largest is None:
        why = f"not run: {(odd or ['no keys in the oracle folder'])[0]}"
        return not_run(name, plan, limits.ALGEBRA, why), odd
    largest = np.maximum(largest.max(axis=(2, 3), keepdims=True), np.finfo(np.float64).tiny)
    if not odd:
        errors = measure.cache_errors(run, case.truth, measure.worst_over)
        gate = _in_cache(case, plan, name, errors / largest, limits.ALGEBRA)
        if not sound or not gate.failed:
            return gate, []
    return _algebra_laid_out(case, plan, run, largest), []


def _algebra_laid_out(case: Case, plan: str, cached: Trace, largest: Floats) -> Gate:
    """The same gate in the layout that fits, if one does."""
    name, found = GateName.ALGEBRA_CACHE, []
    for kind in KINDS:
        undo, note = layout.undoing(cached, case.truth, kind)
        if undo is None:
            why = f"not compared: {note}" if layout.finite(cached, case.truth, kind) else None
            return Gate(name, plan, math.nan, limits.ALGEBRA, reason=why)
        found.append(measure.kind_errors(cached, case.truth, kind, measure.worst_over, undo))
    return _in_cache(case, plan, name, np.stack(found) / largest, limits.ALGEBRA)


def _kind_gates(
    case: Case, plan: str, cached: Trace, kind: Kind, floor: Floats, *, sound: bool
) -> tuple[list[Gate], list[str]]:
    """The gates on keys, or on values, in the truth's layout or in the one that fits; and notes."""
    gates = list[Gate]()
    if layout.same_shape(cached, case.truth, kind):
        rms = measure.kind_errors(cached, case.truth, kind)
        gates = _ratios_of(case, plan, kind, np.divide(rms, floor, out=rms))
        if not sound or not any(gate.failed for gate in gates):
            return gates, []
    undo, note = layout.undoing(cached, case.truth, kind)
    if undo is None and not layout.finite(cached, case.truth, kind):
        return gates or _no_value(plan, kind, None), []
    if undo is None:
        return _no_value(plan, kind, f"not compared: {note}"), []
    if not note:
        return gates, []
    rms = measure.kind_errors(cached, case.truth, kind, rows=undo)
    return _ratios_of(case, plan, kind, np.divide(rms, floor, out=rms)), [note]


def _passed(gates: Sequence[Gate]) -> bool:
    """Whether each gate ran and passed."""
    return all(gate.ran and not gate.failed for gate in gates)


def _shaped(case: Case, cached: Trace) -> bool:
    return all(layout.shaped(cached, case.truth, kind) for kind in KINDS)


def _unread(
    yardstick: Yardstick, plan: str, cached: Trace | None, *, sound: bool
) -> tuple[str | None, list[str]]:
    """Why keys and values cannot be measured, and what of that leaves the verdict open."""
    case = yardstick.case
    if yardstick.cache_largest is None:
        return case.truth.meta.no_cache or "no keys in the oracle folder", []
    if cached is None or layers(cached) == 0:
        return f"no trace of plan {plan}" if cached is None else "no keys in trace", []
    odd = cache_reasons(cached, case.truth)
    if sound and _shaped(case, cached) and layers(cached) == layers(case.truth):
        return None, []
    # Of another architecture no layout of the cache is the standard; if it lost a row, logits tell.
    return odd[0] if odd else None, odd if case.has_truth else []


def _ratios_of(case: Case, plan: str, kind: Kind, of: Floats) -> list[Gate]:
    """The gates on one kind's `of` (layers, K, n)."""
    names, (median, most, worst) = _OF_KIND[kind], _LIMITS
    percentile = partial(np.percentile, q=95, axis=-1)
    return [
        _over_rows(plan, names[0], of, partial(np.median, axis=-1), median),
        _over_rows(plan, names[1], of, percentile, most),
        _in_cache(case, plan, names[2], of[None], worst),
    ]


def _no_value(plan: str, kind: Kind, why: str | None) -> list[Gate]:
    """The gates on keys, or on values, that did not run; failed ones where there is no `why`."""
    pairs = zip(_OF_KIND[kind], _LIMITS, strict=True)
    return [Gate(name, plan, math.nan, limit, reason=why) for name, limit in pairs]


def _over_rows(
    plan: str, name: GateName, ratios: Floats, over: Callable[[Floats], Floats], limit: float
) -> Gate:
    """What `over` makes of the n rows of `ratios` (layers, K, n); the worst head decides."""
    # A layer at a time, as a median copies what it is given.
    over_n = np.stack([over(layer) for layer in ratios])
    layer, head = (int(i) for i in np.unravel_index(int(np.argmax(over_n)), over_n.shape))
    value, rows = float(over_n[layer, head]), ratios[layer, head]
    gate = Gate(name, plan, value, limit, layer=layer, head=head)
    if not gate.failed:
        return gate

    def sound(before: Floats) -> bool:
        return bool(over(before) <= limit)

    at = np.arange(len(rows))
    return beginning(gate, onset(at, rows, limits.KV_WORST, level=value, sound=sound))


def _in_cache(case: Case, plan: str, name: GateName, ratios: Floats, limit: float) -> Gate:
    """`ratios` (kinds, layers, K, n); the worst row decides."""
    worst = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
    _, layer, head, position = (int(i) for i in worst)
    value, text = float(ratios.max()), case.text(position)
    gate = Gate(name, plan, value, limit, position, text, layer, head)
    by_row = ratios.max(axis=(0, 1, 2))
    return beginning(gate, onset(np.arange(len(by_row)), by_row, limit)) if gate.failed else gate

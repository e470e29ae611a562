"""The gates on the keys and values that a run's cache holds in the end, of `Case.cached`.

If all logits are right, the cache may be laid out in another way than the truth's: then its rows
are measured as the truth lays them out (`layout.py`), or not at all. If any of them is wrong,
nothing is excused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from mlxkv.judge import layout, limits, measure
from mlxkv.judge.admission import cache_reasons, layers
from mlxkv.judge.case import Case
from mlxkv.judge.floors import kind_floors
from mlxkv.judge.gates import Yardstick, first_of, not_run
from mlxkv.judge.layout import KINDS, Kind
from mlxkv.judge.measure import Floats
from mlxkv.judge.result import Gate, GateName
from oracle.formats.trace import Trace

_OF_KIND: dict[Kind, tuple[GateName, GateName, GateName]] = {
    "keys": (GateName.KEYS_MEDIAN, GateName.KEYS_MOST, GateName.KEYS_WORST),
    "values": (GateName.VALUES_MEDIAN, GateName.VALUES_MOST, GateName.VALUES_WORST),
}
_LIMITS = limits.KV_MEDIAN, limits.KV_MOST, limits.KV_WORST


def cache_gates(
    yardstick: Yardstick, cached: Trace | None, others: Sequence[Gate]
) -> tuple[list[Gate], list[str], list[str]]:
    """The gates, what leaves the verdict open, and notes.

    `others` are all gates on logits and that of cached against uncached. Each of them must have
    run and passed, or no other layout is looked for.
    """
    case, largest, sound = yardstick.case, yardstick.cache_largest, _passed(others)
    why, odd = _unread(yardstick, cached, sound=sound)
    if cached is None or largest is None or why is not None:
        gates = [gate for kind in KINDS for gate in _no_value(case, kind, f"not run: {why}")]
        return gates, odd, []
    gates, notes = list[Gate](), list[str]()
    for kind, of_kind in zip(KINDS, largest, strict=True):
        floor = kind_floors(case, kind, of_kind)
        of, note = _kind_gates(case, cached, kind, floor, sound=sound)
        gates, notes = gates + of, notes + note
    return gates, [], notes


def ratio_gates(case: Case, ratios: Floats) -> list[Gate]:
    """The gates on keys and values, from their errors in floors (keys and values, layers, K, n).

    Per layer and head, of which the worst decides: the median over positions, the 95th percentile,
    and the worst row.
    """
    pairs = zip(KINDS, ratios, strict=True)
    return [gate for kind, of in pairs for gate in _ratios_of(case, kind, of)]


def algebra_cache_gates(
    yardstick: Yardstick, traces: Mapping[str, Trace], others: Sequence[Gate]
) -> tuple[list[Gate], list[str]]:
    """The gate on the cache of the float64 runs, of which `others` are the gates on logits.

    It is relative to each layer's largest key or value: layers differ by orders of magnitude.
    """
    name, case, largest = GateName.ALGEBRA_CACHE, yardstick.case, yardstick.cache_largest
    cached = traces.get(case.cached)
    ran = any(gate.ran and gate.plan == case.cached for gate in others)
    if cached is None or not ran or layers(cached) == 0:
        return [], []
    sound = _passed(others)
    odd = cache_reasons(cached, case.truth)
    if (odd and not (sound and _shaped(case, cached))) or largest is None:
        why = f"not run: {(odd or ['no keys in the oracle folder'])[0]}"
        return [not_run(name, case.cached, limits.ALGEBRA, why)], odd
    largest = np.maximum(largest.max(axis=(2, 3), keepdims=True), np.finfo(np.float64).tiny)
    if not odd:
        errors = measure.cache_errors(cached, case.truth, measure.worst_over)
        gate = _in_cache(case, name, errors / largest, limits.ALGEBRA)
        if not sound or not gate.failed:
            return [gate], []
    return [_algebra_laid_out(case, cached, largest)], []


def _algebra_laid_out(case: Case, cached: Trace, largest: Floats) -> Gate:
    """The same gate in the layout that fits, if one does."""
    name, found = GateName.ALGEBRA_CACHE, []
    for kind in KINDS:
        undo, note = layout.undoing(cached, case.truth, kind)
        if undo is None:
            why = f"not compared: {note}" if layout.finite(cached, case.truth, kind) else None
            return Gate(name, case.cached, math.nan, limits.ALGEBRA, reason=why)
        found.append(measure.kind_errors(cached, case.truth, kind, measure.worst_over, undo))
    return _in_cache(case, name, np.stack(found) / largest, limits.ALGEBRA)


def _kind_gates(
    case: Case, cached: Trace, kind: Kind, floor: Floats, *, sound: bool
) -> tuple[list[Gate], list[str]]:
    """The gates on keys, or on values, in the truth's layout or in the one that fits; and notes."""
    gates = list[Gate]()
    if layout.same_shape(cached, case.truth, kind):
        rms = measure.kind_errors(cached, case.truth, kind)
        gates = _ratios_of(case, kind, np.divide(rms, floor, out=rms))
        if not sound or not any(gate.failed for gate in gates):
            return gates, []
    undo, note = layout.undoing(cached, case.truth, kind)
    if undo is None and not layout.finite(cached, case.truth, kind):
        return gates or _no_value(case, kind, None), []
    if undo is None:
        return _no_value(case, kind, f"not compared: {note}"), []
    if not note:
        return gates, []
    rms = measure.kind_errors(cached, case.truth, kind, rows=undo)
    return _ratios_of(case, kind, np.divide(rms, floor, out=rms)), [note]


def _passed(gates: Sequence[Gate]) -> bool:
    """Whether each gate ran and passed."""
    return all(gate.ran and not gate.failed for gate in gates)


def _shaped(case: Case, cached: Trace) -> bool:
    return all(layout.shaped(cached, case.truth, kind) for kind in KINDS)


def _unread(
    yardstick: Yardstick, cached: Trace | None, *, sound: bool
) -> tuple[str | None, list[str]]:
    """Why keys and values cannot be measured, and what of that leaves the verdict open."""
    case = yardstick.case
    if yardstick.cache_largest is None:
        return case.truth.meta.no_cache or "no keys in the oracle folder", []
    if cached is None or layers(cached) == 0:
        return f"no trace of plan {case.cached}" if cached is None else "no keys in trace", []
    odd = cache_reasons(cached, case.truth)
    if sound and _shaped(case, cached) and layers(cached) == layers(case.truth):
        return None, []
    # Of another architecture no layout of the cache is the standard; if it lost a row, logits tell.
    return odd[0] if odd else None, odd if case.has_truth else []


def _ratios_of(case: Case, kind: Kind, of: Floats) -> list[Gate]:
    """The gates on one kind's `of` (layers, K, n)."""
    names, (median, most, worst) = _OF_KIND[kind], _LIMITS
    # A layer at a time, as both copy what they are given.
    medians = np.stack([np.median(layer, axis=-1) for layer in of])
    percentiles = np.stack([np.percentile(layer, 95, axis=-1) for layer in of])
    return [
        _over_rows(case, names[0], of, medians, median),
        _over_rows(case, names[1], of, percentiles, most),
        _in_cache(case, names[2], of[None], worst),
    ]


def _no_value(case: Case, kind: Kind, why: str | None) -> list[Gate]:
    """The gates on keys, or on values, that did not run; failed ones where there is no `why`."""
    pairs = zip(_OF_KIND[kind], _LIMITS, strict=True)
    return [Gate(name, case.cached, math.nan, limit, reason=why) for name, limit in pairs]


def _over_rows(case: Case, name: GateName, ratios: Floats, over_n: Floats, limit: float) -> Gate:
    """`ratios` (layers, K, n), and `over_n` (layers, K) made of them; the worst head decides."""
    layer, head = (int(i) for i in np.unravel_index(int(np.argmax(over_n)), over_n.shape))
    value, above = float(over_n[layer, head]), np.flatnonzero(~(ratios[layer, head] <= limit))
    first = None if value <= limit else first_of(above)
    return Gate(name, case.cached, value, limit, layer=layer, head=head, first=first)


def _in_cache(case: Case, name: GateName, ratios: Floats, limit: float) -> Gate:
    """`ratios` (kinds, layers, K, n); the worst row decides."""
    worst = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
    _, layer, head, position = (int(i) for i in worst)
    value, text = float(ratios.max()), case.text(position)
    first = first_of(np.flatnonzero(~(ratios <= limit).all(axis=(0, 1, 2))))
    return Gate(name, case.cached, value, limit, position, text, layer, head, first)

"""What a wrong run shows of itself, in words: no numbers, changing ones, too few digits.

All are read off the traces' own numbers, so that they are known whatever the cause is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mlxkv.judge import layout
from mlxkv.judge.case import CACHE
from mlxkv.judge.layout import KINDS, Kind
from mlxkv.judge.measure import Bools, beside, blocks, pieces
from mlxkv.judge.result import Gate, GateName
from mlxkv.judge.sequence import Judged
from mlxkv.judge.words import listed, plans_of
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace

_DISTINCT = 4
"""A row of fewer different numbers may consist of short ones by chance, as zeros do."""


def finding(sequences: Sequence[Judged]) -> str:
    """The first that applies, "" if none: a clause without a full stop."""
    for look in (_not_finite, _not_finite_cache, _repeats, _coarse_logits, _coarse_cache):
        for one in sequences:
            if words := look(one):
                return words
    return ""


def changing(gates: Sequence[Gate]) -> str:
    """What the gates say of a plan that was followed twice; "" if none differs from itself."""
    for gate in (g for g in gates if g.name == GateName.REPEAT and g.failed):
        how = "" if gate.limit == 0 else " by more than the noise"
        what = f"plan {gate.plan}, followed twice, differs from itself{how}"
        return f"results change from run to run: {what} (first at position {gate.first})"
    return ""


def _not_finite(one: Judged) -> str:
    names = (GateName.FINITE, GateName.ALGEBRA)
    wrong = [g for g in one.gates if g.failed and g.name in names and g.first is not None]
    exact = [g for g in wrong if g.name == GateName.ALGEBRA and not math.isfinite(g.value)]
    arithmetic = [g for g in wrong if g.name == GateName.FINITE]
    runs, how = (one.runs, "") if arithmetic else (one.exact, " in float64")
    rows = {g.plan: _bad_rows(runs[g.plan], one.case.truth) for g in arithmetic or exact}
    found = {plan: of for plan, of in rows.items() if of}
    if not found:
        return ""
    return _where_not_finite(one, runs, found) + how


def _where_not_finite(
    one: Judged, runs: Mapping[str, Trace], found: Mapping[str, Mapping[int, str]]
) -> str:
    """The wrong rows of the plan that has the first of them, and of the others the same ones.

    `found` says by plan and position what the rows are that are not finite.
    """
    bad = min(found.values(), key=min)
    held = {plan: bad.keys() & set(runs[plan].positions.tolist()) for plan in found}
    alike = [plan for plan, rows in found.items() if rows.keys() == held[plan]]
    others = [plan for plan in found if plan not in alike]
    more = f" and of {len(bad) - 1} more" if len(bad) > 1 else ""
    kinds = listed(sorted({kind for plan in alike for kind in found[plan].values()}), "or")
    where = _plans(one, alike)
    if any(held[plan] != bad.keys() for plan in alike):
        where += " that has them" if where.startswith("every") else ", where they have them"
    also = f", and others are not finite in {_plans(one, others)}" if others else ""
    return f"the logits of position {min(bad)}{more} are {kinds} in {where}{also}"


def _bad_rows(run: Trace, truth: Trace) -> dict[int, str]:
    """By position what the rows of logits are that are not finite."""
    at, rows, _ = beside(run, truth)
    found = {}
    for part in blocks(len(at), run.logits.shape[1]):
        logits = np.asarray(run.logits[rows[part]])
        for i in np.flatnonzero(~np.isfinite(logits).all(axis=1)):
            found[int(at[part][i])] = _kind(logits[i])
    return found


def _not_finite_cache(one: Judged) -> str:
    for kind, name in zip(KINDS, (GateName.KEYS_WORST, GateName.VALUES_WORST), strict=True):
        for gate in one.gates:
            if gate.name == name and gate.failed and not math.isfinite(gate.value):
                run, of = one.runs[gate.plan], _plans(one, [gate.plan])
                what, where = _row(layout.as_truth(run, one.case.truth), kind, gate)
                return f"the {kind} of {where} are {what} in the cache of {of}"
    return ""


def _row(run: Trace, kind: Kind, gate: Gate) -> tuple[str, str]:
    """What the row of a cache, laid out as the truth's, is that a gate names, and its place.

    All rows where it names none, as of a cache whose layout is not known.
    """
    if gate.position is None:
        held = [a for n, a in run.arrays.items() if n.startswith("kv/") and n.endswith(kind)]
        kinds = {_kind(part) for array in held for part in pieces(array)}
        return "NaN" if "NaN" in kinds else "infinite", "some positions"
    pair = run.kv(CACHE, gate.layer or 0)
    assert pair is not None
    where = f"position {gate.position}, layer {gate.layer}, head {gate.head}"
    return _kind(pair[kind == "values"][gate.head, gate.position]), where


def _kind(row: Array) -> str:
    return "NaN" if np.isnan(row).any() else "infinite"


def _repeats(one: Judged) -> str:
    """Where results change, nothing else need be the cause."""
    return changing(one.gates)


def _coarse_logits(one: Judged) -> str:
    lanes = ((one.runs, one.case.manifest.dtype, "logits"), (one.exact, "float64", "algebra"))
    for runs, dtype, scope in lanes:
        plans = {g.plan for g in one.gates if g.failed and g.scope == scope and g.plan in runs}
        found: dict[tuple[str, str], list[str]] = {}
        for plan in (plan for plan in runs if plan in plans):
            if told := _coarse(runs[plan], one.case.truth, dtype):
                found.setdefault(told, []).append(plan)
        for (coarse, where), of in found.items():
            held = f"hold {coarse} numbers only, though the run is {dtype}"
            return f"the logits of {_plans(one, of)} {where}{held}"
    return ""


def _coarse(run: Trace, truth: Trace, dtype: str) -> tuple[str, str] | None:
    """The coarser dtype that rows of logits are exact in, and from which position on."""
    at, rows, _ = beside(run, truth)
    for coarse, exact in _COARSER[dtype].items():
        if not exact(np.asarray(run.logits[rows[-1]]))[()]:
            continue  # a fault that begins somewhere is still there in the last row
        short = np.empty(len(rows), bool)
        for part in blocks(len(rows), run.logits.shape[1]):
            short[part] = exact(np.asarray(run.logits[rows[part]]))
        first = int(np.flatnonzero(~short)[-1]) + 1 if not short.all() else 0
        return coarse, f"from position {at[first]} on " if first else ""
    return None


def _coarse_cache(one: Judged) -> str:
    dtype, of_cache = one.case.manifest.dtype, ("keys", "values")
    failed = {g.plan for g in one.gates if g.failed and g.name.startswith(of_cache)}
    for coarse, exact in _COARSER[dtype].items():
        plans = [plan for plan in one.runs if plan in failed and _all(one.runs[plan], exact)]
        if plans:
            what = f"hold {coarse} numbers only, though the run is {dtype}"
            return f"the keys and values in the cache of {_plans(one, plans)} {what}"
    return ""


def _all(run: Trace, exact: Callable[[Array], Bools]) -> bool:
    """Whether every row of a run's keys and values is `exact`, where it holds some."""
    arrays = [array for name, array in run.arrays.items() if name.startswith(f"kv/{CACHE}/")]
    return bool(arrays) and all(exact(part).all() for array in arrays for part in pieces(array))


def _plans(one: Judged, plans: Sequence[str]) -> str:
    if set(plans) == set(one.runs) and len(plans) > 1:
        return f"every plan of the {one.name}" if one.name else "every plan"
    return plans_of([one.shown(plan) for plan in plans])


def _several(x: Array) -> Bools:
    """Of each row, the last axis, whether it has several different numbers."""
    ranked = np.sort(x, axis=-1)
    least = min(_DISTINCT, x.shape[-1])
    return np.asarray((np.diff(ranked, axis=-1) != 0).sum(-1) + 1 >= least)


def _float16(x: Array) -> Bools:
    with np.errstate(over="ignore"):
        same = x == x.astype(np.float16)
    return np.asarray(same.all(-1)) & _several(x)


def _bfloat16(x: Array) -> Bools:
    """The upper half of a float32 is a bfloat16."""
    half = np.asarray(x, np.float32).view(np.uint32) & 0xFFFF
    return np.asarray((half == 0).all(-1)) & _several(x)


def _float32(x: Array) -> Bools:
    return np.asarray((x == x.astype(np.float32)).all(-1)) & _several(x)


# bfloat16 first: of the usual size, such numbers are float16 numbers too.
_COARSER: Mapping[str, Mapping[str, Callable[[Array], Bools]]] = {
    "float64": {"float32": _float32},
    "float32": {"bfloat16": _bfloat16, "float16": _float16},
    "float16": {"bfloat16": _bfloat16},
    "bfloat16": {},
}

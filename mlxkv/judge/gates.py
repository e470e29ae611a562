"""The gates: from measured numbers to values beside their limits, and where the worst stands.

Every comparison is `not (value <= limit)`, so that NaN fails. A gate that lacks what it needs says
why, and neither passes nor fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlxkv.judge import limits, measure
from mlxkv.judge.case import Case
from mlxkv.judge.floors import Floors, logit_floors
from mlxkv.judge.measure import Bools, Floats, Measures, TruthRows
from mlxkv.judge.onset import Onset, first_of, onset
from mlxkv.judge.result import Gate, GateName
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Yardstick:
    """What every gate measures with: the oracle folder, the truth's rows, the floors.

    `cache_largest` is `measure.cache_largest` of the truth.
    """

    case: Case
    truth: TruthRows
    floors: Floors
    cache_largest: Floats | None

    @classmethod
    def of(cls, case: Case, truth: TruthRows | None = None) -> Yardstick:
        """That of an oracle folder which `admission.case_reasons` finds nothing wrong with.

        `truth` are its truth's rows, where they are known already.
        """
        truth = measure.truth_rows(case.truth) if truth is None else truth
        return cls(case, truth, logit_floors(case, truth), measure.cache_largest(case.truth))


def logit_gates(
    yardstick: Yardstick, plan: str, run: Measures, *, floors: Floors | None = None
) -> list[Gate]:
    """The gates on one run's logits; `floors` are others where a member of the pool is held out."""
    case, truth, at, rows = yardstick.case, yardstick.truth, run.positions, run.rows
    floors = yardstick.floors if floors is None else floors
    sigmas = run.rms / floors.rms[rows]
    flipped = run.best != truth.best[rows]
    flipped &= truth.margin[rows] > limits.FLIP_MARGIN * floors.peak[rows]
    peaks, shifts = run.peak / floors.peak[rows], np.abs(run.shift) / floors.shift[rows]
    return [
        _count(case, GateName.FINITE, plan, at, ~run.finite),
        _pooled(plan, at, sigmas),
        by_position(case, GateName.WORST, plan, at, sigmas, limits.WORST),
        by_position(case, GateName.PEAK, plan, at, peaks, limits.PEAK),
        by_position(case, GateName.SHIFT, plan, at, shifts, limits.SHIFT),
        _count(case, GateName.FLIPS, plan, at, flipped),
    ]


def sigma_of(gates: Sequence[Gate]) -> float:
    """The largest sigma, 0 where none was measured."""
    return max((g.value for g in gates if g.name == GateName.SIGMA), default=0.0)


def pooled(ratios: Floats) -> float:
    """The rms over all positions of errors in floors: sigma."""
    return float(np.sqrt(np.mean(ratios * ratios)))


def algebra_gates(
    yardstick: Yardstick, traces: Mapping[str, Trace], errors: Mapping[str, tuple[Array, Floats]]
) -> list[Gate]:
    """The gates on the logits of float64 runs, whose largest `errors` at their positions these are.

    Where MLX's float64 operations are not (`Meta.probes`), these gates do not run, and the others
    decide.
    """
    case, gates = yardstick.case, list[Gate]()
    for plan, trace in traces.items():
        untrue = None if case.has_truth else "not run: no truth for this architecture"
        why = untrue or _unproved(trace)
        if why is not None:
            gates.append(not_run(GateName.ALGEBRA, plan, limits.ALGEBRA, why))
            continue
        at, of = errors[plan]
        ratios = of / yardstick.truth.largest.max()
        gates.append(by_position(case, GateName.ALGEBRA, plan, at, ratios, limits.ALGEBRA))
    if not gates:
        why = "not run: no float64 run of this engine"
        gates.append(not_run(GateName.ALGEBRA, "-", limits.ALGEBRA, why))
    return gates


def uncached(case: Case, traces: Mapping[str, Trace]) -> str | None:
    """The plan that `Case.cached` is held against, if there are runs of both: full, or prefixes if
    there is no full.
    """
    other = "full" if "full" in traces else "prefixes"
    return other if case.cached in traces and other in traces else None


def cached_gate(
    yardstick: Yardstick, traces: Mapping[str, Trace], apart: tuple[Array, Floats] | None
) -> Gate:
    """Cached against uncached of the same engine, which are `apart` so much at these positions."""
    name, case, plan = GateName.CACHED, yardstick.case, yardstick.case.cached
    why, other = None, uncached(case, traces)
    if other is None or apart is None:
        absent = plan if plan not in traces else "prefixes"
        why = f"no trace of plan {absent}"
    elif case.manifest.plans[plan] == case.manifest.plans["full"]:
        why = f"nothing was decoded, {plan} is the same plan as full"
    elif traces[plan].meta.engine != traces[other].meta.engine:
        why = "the two traces are of different engines"
    if why is not None or apart is None:
        return not_run(name, plan, limits.CACHED, f"not run: {why}")
    at, rms = apart
    ratios = rms / yardstick.floors.cached[measure.rows_of(case.truth, at.tolist())]
    return by_position(case, name, plan, at, ratios, limits.CACHED)


def _unproved(trace: Trace) -> str | None:
    for name, error in sorted(trace.meta.probes.items()):
        if not within(error, limits.PROBE):
            what = f"float64 probe {name} is {error} off numpy"
            return f"cannot tell: {what}, limit {limits.PROBE:.0e}"
    return None if trace.meta.probes else "not run: no float64 probes in trace"


def within(value: object, limit: float) -> bool:
    """For values that a file brings: what is no number is not within its limit."""
    return isinstance(value, int | float) and value <= limit


def by_position(
    case: Case, name: GateName, plan: str, at: Array, ratios: Floats, limit: float
) -> Gate:
    """The gate on rows at the positions `at`, of which the worst decides."""
    worst = int(np.argmax(ratios))  # NaN is the largest
    value, position = float(ratios[worst]), int(at[worst])
    gate = Gate(name, plan, value, limit, position, case.text(position))
    return beginning(gate, onset(at, ratios, limit)) if gate.failed else gate


def _count(case: Case, name: GateName, plan: str, at: Array, wrong: Bools) -> Gate:
    """How many positions are `wrong`; none may be."""
    begin = first_of(at, wrong)
    gate = Gate(name, plan, float(wrong.sum()), 0.0)
    if begin is None:
        return gate
    text = case.text(begin.position)
    return beginning(replace(gate, position=begin.position, token=text), begin)


def _pooled(plan: str, at: Array, sigmas: Floats) -> Gate:
    """The gate on the rms over all positions."""
    sigma = pooled(sigmas)
    gate = Gate(GateName.SIGMA, plan, sigma, limits.SIGMA)

    def sound(before: Floats) -> bool:
        return pooled(before) <= limits.SIGMA

    found = onset(at, sigmas, limits.WORST, level=sigma, sound=sound) if gate.failed else None
    return beginning(gate, found)


def beginning(gate: Gate, at: Onset | None) -> Gate:
    """The gate with the first wrong position that its measure shows."""
    if at is None:
        return gate
    return replace(gate, first=at.position, about=at.about, after=at.after)


def not_run(name: GateName, plan: str, limit: float, reason: str) -> Gate:
    return Gate(name, plan, float("nan"), limit, reason=reason)

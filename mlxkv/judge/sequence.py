"""One sequence judged: an engine's runs beside one oracle folder. No verdict is given here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mlxkv.judge import limits
from mlxkv.judge.admission import admit, case_reasons
from mlxkv.judge.cache_gates import algebra_cache_gates, cache_gates
from mlxkv.judge.case import Case
from mlxkv.judge.controls import Trust, trust
from mlxkv.judge.gates import (
    Yardstick,
    algebra_gates,
    cached_gate,
    logit_gates,
    pooled,
)
from mlxkv.judge.measure import Measures
from mlxkv.judge.repeats import repeat_gates
from mlxkv.judge.result import Gate, GateName
from mlxkv.judge.survey import Survey, survey
from oracle.formats.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """The gates on one sequence, why they leave the verdict open, notes, and all they stand on.

    `layouts` say how keys and values are kept, if not as the truth's are. `runs` are the traces
    measured in the run's dtype, `exact` those in float64, `repeats` those of plans followed a
    second time. `name` is "probe" for the probe's sequence, else "".
    """

    name: str
    yardstick: Yardstick
    survey: Survey
    trusted: Trust
    runs: Mapping[str, Trace]
    exact: Mapping[str, Trace]
    repeats: Mapping[str, Trace]
    gates: tuple[Gate, ...]
    reasons: tuple[str, ...]
    layouts: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def case(self) -> Case:
        return self.yardstick.case

    @property
    def measures(self) -> Mapping[str, Measures]:
        return self.survey.runs

    @property
    def differs(self) -> bool:
        """Whether a gate failed whose measure can be trusted.

        A number that is not finite is wrong, whatever measures it; and so is one that changes, if
        it may not change at all.
        """
        always = (GateName.FINITE, GateName.REPEAT)
        wrong = [gate for gate in self.gates if gate.failed]
        alone = any(gate.name in always and gate.limit == 0 for gate in wrong)
        return alone or any(self.trusted.covers(gate.scope) for gate in wrong)

    @property
    def doubts(self) -> list[str]:
        """Why the verdict is open, of this sequence."""
        found = [*self.trusted.reasons, *self.reasons]
        return [f"{self.name}: {reason}" if self.name else reason for reason in found]

    def shown(self, plan: str) -> str:
        """A plan's name in the verdict."""
        return _shown(self.name, plan)


def sequence(
    case: Case,
    candidates: Mapping[str, Trace],
    algebra: Mapping[str, Trace],
    repeats: Mapping[str, Trace],
    *,
    name: str = "",
) -> Judged | list[str]:
    """The traces, by plan, measured by an oracle folder; or why that folder cannot serve."""
    if unfit := case_reasons(case):
        return unfit
    runs, refused = admit(case, candidates, case.manifest.dtype)
    exact, exact_refused = admit(case, algebra, "float64")
    again, again_refused = admit(case, repeats, case.manifest.dtype)
    surveyed = survey(case, runs, exact)
    yardstick = Yardstick.of(case, surveyed.truth)
    if unfit := _unfit(yardstick):
        return unfit
    measures = surveyed.runs
    gates, reasons, layouts = _gates(yardstick, surveyed, runs, exact, again)
    refused += [*exact_refused, *(f"repeat: {reason}" for reason in again_refused)]
    refused += [_without_first(repeats[plan], plan) for plan in repeats if plan not in candidates]
    near = [note for plan in runs for note in _near(yardstick, _shown(name, plan), measures[plan])]
    return Judged(
        name=name,
        yardstick=yardstick,
        survey=surveyed,
        trusted=trust(yardstick, surveyed),
        runs=runs,
        exact=exact,
        repeats=again,
        gates=tuple(gates),
        reasons=(*refused, *reasons),
        layouts=tuple(layouts),
        notes=tuple(near),
    )


def _gates(
    yardstick: Yardstick,
    surveyed: Survey,
    runs: Mapping[str, Trace],
    exact: Mapping[str, Trace],
    again: Mapping[str, Trace],
) -> tuple[list[Gate], list[str], list[str]]:
    """All gates, what leaves the verdict open, and how the cache is laid out."""
    logits = list[Gate]()
    algebra = algebra_gates(yardstick, exact, surveyed.exact)
    of_exact, exact_odd = algebra_cache_gates(yardstick, exact, algebra)
    for plan, run in surveyed.runs.items():
        logits += logit_gates(yardstick, plan, run)
    changing, apart = repeat_gates(yardstick, runs, again)
    cached = cached_gate(yardstick, runs, surveyed.cached)
    of_cache, odd, layouts = cache_gates(yardstick, runs, [*logits, cached])
    gates = [*algebra, *of_exact, *logits, *changing, cached, *of_cache]
    return gates, [*exact_odd, *apart, *odd], layouts


def _without_first(repeat: Trace, plan: str) -> str:
    what = f"{repeat.label}: a repeat (time {repeat.meta.repeat + 1}) without a first run"
    return f"{what} of plan {plan}; give that trace too"


def _shown(name: str, plan: str) -> str:
    return f"{name} {plan}" if name else plan


def _unfit(yardstick: Yardstick) -> list[str]:
    """Why the truth's numbers cannot serve, which its files alone do not show."""
    largest, cache = yardstick.truth.largest, yardstick.cache_largest
    finite = np.isfinite(largest).all() and (cache is None or np.isfinite(cache).all())
    if finite and largest.max() > 0:
        return []
    what = "holds numbers that are not finite, or only zeros; make the folder again"
    return [f"{yardstick.case.truth.label}: {what}"]


def _near(yardstick: Yardstick, shown: str, run: Measures) -> list[str]:
    """A note on a float32 run nearer to the truth than any that computes in float32 throughout.

    To be accurate is no mistake: an engine may compute in float64 inside, or make its tables so.
    Whether the pool is too far from the truth is asked of the pool itself. The ratio is to what its
    members read: a floor that was raised to one ulp makes a small sigma and says nothing. Nor does
    the mean of n runs, where no sigma can be below 1 / sqrt(n).
    """
    case = yardstick.case
    if case.manifest.dtype != "float32" or not case.has_truth:
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        sigma = pooled(run.rms / yardstick.floors.pool[run.rows])
    if not sigma < limits.SIGMA_LEAST:
        return []
    return [f"plan {shown}: sigma is {sigma:.2g}: nearer to the truth than float32 throughout is"]

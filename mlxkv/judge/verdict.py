"""From traces to a verdict: agree, differ, or cannot tell.

All gates are joined by AND, and the worst plan decides. A failed gate counts where what it was
measured with can be trusted; whatever else is odd makes the verdict "cannot tell", never "agree".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mlxkv.judge import delta, limits, measure
from mlxkv.judge.admission import admit, case_reasons, engine_reasons
from mlxkv.judge.case import Case
from mlxkv.judge.controls import Trust, trust
from mlxkv.judge.gates import (
    Yardstick,
    algebra_gates,
    cache_gates,
    cached_gate,
    logit_gates,
    pooled,
)
from mlxkv.judge.measure import Measures
from mlxkv.judge.notes import notes
from mlxkv.judge.result import (
    SCOPES,
    Curve,
    FirstWrong,
    Gate,
    GateName,
    Outcome,
    Scope,
    Verdict,
    subject,
)
from oracle.formats.trace import Trace


def judge(
    case: Case, candidates: Mapping[str, Trace], *, algebra: Mapping[str, Trace] | None = None
) -> Verdict:
    """The verdict on an engine's runs of the judged plans, by plan.

    `candidates` are in the run's dtype, which the noise floor judges; `algebra` in float64, where
    there is no noise.
    """
    exact = algebra or {}
    about = subject(case.manifest, [*candidates.values(), *exact.values()])
    yardstick, reasons = _yardstick(case)
    if yardstick is None:
        return Verdict("cannot tell", (), (), about, reasons=tuple(reasons))
    trusted = trust(yardstick)
    runs, refused = admit(case, candidates, case.manifest.dtype)
    exact_runs, exact_refused = admit(case, exact, "float64")
    measures = {plan: measure.measure(trace, case.truth) for plan, trace in runs.items()}
    gates, doubts, said = _gates(yardstick, measures, runs, exact_runs)
    reasons = trusted.reasons + refused + exact_refused + doubts
    if not candidates and not exact:
        reasons.append("candidate: nothing to compare, expected a trace of one judged plan or more")
    outcome = _outcome(gates, reasons, trusted)
    return Verdict(
        outcome=outcome,
        scopes=_covered(gates),
        plans=tuple(runs or exact_runs),
        subject=about,
        gates=tuple(gates),
        controls=trusted.controls,
        reasons=tuple(reasons),
        notes=(*said, *notes(yardstick, runs, gates, outcome)),
        first_wrong=_first_wrong(case, gates) if outcome == "differ" else None,
        figures=tuple(_figures(yardstick, plan, run) for plan, run in runs.items()),
        tables=delta.page_tables(case, runs),
        floor=tuple(yardstick.floors.rms.tolist()),
        curves=tuple(_curve(plan, run) for plan, run in measures.items()),
        distinct=case.pool.distinct,
        against="truth" if case.has_truth else "transformers",
    )


def _yardstick(case: Case) -> tuple[Yardstick | None, list[str]]:
    reasons = case_reasons(case)
    if reasons:
        return None, reasons
    yardstick = Yardstick.of(case)
    largest, cache = yardstick.truth.largest, yardstick.cache_largest
    finite = np.isfinite(largest).all() and (cache is None or np.isfinite(cache).all())
    if finite and largest.max() > 0:
        return yardstick, []
    what = "holds numbers that are not finite, or only zeros; make the folder again"
    return None, [f"{case.truth.label}: {what}"]


def _figures(yardstick: Yardstick, plan: str, run: Trace) -> delta.Figures:
    return delta.figures(run, yardstick.case.truth, yardstick.truth, plan=plan)


def _curve(plan: str, run: Measures) -> Curve:
    return Curve(plan, tuple(run.positions.tolist()), tuple(run.rms.tolist()))


def _gates(
    yardstick: Yardstick,
    measures: Mapping[str, Measures],
    runs: Mapping[str, Trace],
    exact: Mapping[str, Trace],
) -> tuple[list[Gate], list[str], list[str]]:
    """The gates, what leaves the verdict open, and notes."""
    gates, doubts = algebra_gates(yardstick, exact)
    of_logits, notes = list[Gate](), list[str]()
    for plan, run in measures.items():
        of_logits += logit_gates(yardstick, plan, run)
        notes += _too_near(yardstick, plan, run)
    others = [*of_logits, cached_gate(yardstick, runs)]
    of_cache, odd, laid = cache_gates(yardstick, runs.get("step"), others)
    doubts = engine_reasons([*runs.values(), *exact.values()]) + doubts + odd
    return [*gates, *others, *of_cache], doubts, notes + laid


def _too_near(yardstick: Yardstick, plan: str, run: Measures) -> list[str]:
    """A note on a float32 run nearer to the truth than any that computes in float32 throughout.

    To be accurate is no mistake: an engine may compute in float64 inside, or make its tables so.
    Whether the pool is too far from the truth is asked of the pool itself (`controls.py`). The
    ratio is to what its members read: a floor that was raised to one ulp makes a small sigma and
    says nothing. Nor does the mean of n runs, where no sigma can be below 1 / sqrt(n).
    """
    case = yardstick.case
    if case.manifest.dtype != "float32" or not case.has_truth:
        return []
    with np.errstate(divide="ignore", invalid="ignore"):
        sigma = pooled(run.rms / yardstick.floors.pool[run.positions])
    if not sigma < limits.SIGMA_LEAST:
        return []
    return [f"plan {plan}: sigma is {sigma:.2g}: nearer to the truth than float32 throughout is"]


def _outcome(gates: Sequence[Gate], reasons: Sequence[str], trusted: Trust) -> Outcome:
    # A number that is not finite is wrong, whatever measures it.
    if any(g.failed and (trusted.covers(g.scope) or g.name == GateName.FINITE) for g in gates):
        return "differ"
    return "cannot tell" if reasons or not any(g.ran for g in gates) else "agree"


def _covered(gates: Sequence[Gate]) -> tuple[Scope, ...]:
    of = {scope: [g for g in gates if g.scope == scope] for scope in SCOPES}
    return tuple(scope for scope in SCOPES if of[scope] and all(g.ran for g in of[scope]))


def _first_wrong(case: Case, gates: Sequence[Gate]) -> FirstWrong | None:
    wrong = [(g.first, g) for g in gates if g.failed and g.first is not None]
    if not wrong:
        return None
    first, gate = min(wrong, key=lambda w: w[0])
    return FirstWrong(first, case.text(first), gate.plan, gate.name, gate.layer)

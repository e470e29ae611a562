"""All that is measured of the rows of logits of one sequence, in one pass over each file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlxkv.judge import limits
from mlxkv.judge.case import Case
from mlxkv.judge.delta import Figures, LookAtFigures
from mlxkv.judge.gates import uncached
from mlxkv.judge.measure import (
    Array,
    Floats,
    LookAtLargest,
    LookAtPair,
    LookAtRun,
    LookAtTruth,
    Measures,
    TruthRows,
)
from mlxkv.judge.walk import Look, walk
from oracle.formats.trace import Trace

_Apart = tuple[Array, Floats]
"""Positions, and a number for each."""


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """What is measured, by plan.

    `runs` are those in the run's dtype, with their `figures`; `exact` the largest errors of those
    in float64, at their positions; `cached` how far cached and uncached of the runs are apart, None
    where there is no such pair. `references` are the runs of transformers, `scaled` the cached one
    of them times each of these factors, and `apart` (rows,) is what it and the full one are apart.
    """

    truth: TruthRows
    runs: Mapping[str, Measures]
    figures: Mapping[str, Figures]
    exact: Mapping[str, _Apart]
    cached: _Apart | None
    references: Mapping[str, Measures]
    scaled: Mapping[float, Measures]
    apart: Floats


def survey(case: Case, runs: Mapping[str, Trace], exact: Mapping[str, Trace]) -> Survey:
    """Measures the runs that were admitted, those in the run's dtype and those in float64."""
    truth, held = case.truth, case.references[case.cached]
    of_truth = LookAtTruth(truth)
    of_runs = {plan: LookAtRun(run, truth) for plan, run in runs.items()}
    figures = {
        plan: LookAtFigures(runs[plan], truth, of_truth.found, look.found.positions.tolist())
        for plan, look in of_runs.items()
    }
    of_exact = {plan: LookAtLargest(run, truth) for plan, run in exact.items()}
    other = uncached(case, runs)
    cached = None if other is None else LookAtPair(runs[case.cached], runs[other], truth)
    references = {plan: LookAtRun(run, truth) for plan, run in case.references.items()}
    scaled = {by: LookAtRun(held, truth, scale=by) for by in _factors(case)}
    apart = LookAtPair(held, case.references["full"], truth)
    # The truth's rows first: of each block, figures ask for its best tokens.
    looks: list[Look] = [of_truth, *of_runs.values(), *figures.values(), *of_exact.values()]
    looks += [*references.values(), *scaled.values(), apart, *([cached] if cached else [])]
    walk(truth, looks)
    return Survey(
        truth=of_truth.found,
        runs={plan: look.found for plan, look in of_runs.items()},
        figures={plan: look.found(plan) for plan, look in figures.items()},
        exact={plan: (look.positions, look.found) for plan, look in of_exact.items()},
        cached=(cached.positions, cached.found) if cached else None,
        references={plan: look.found for plan, look in references.items()},
        scaled={by: look.found for by, look in scaled.items()},
        apart=apart.found,
    )


def _factors(case: Case) -> set[float]:
    """Times which the cached reference is measured: what must be seen, and what float32 sees."""
    return {limits.CONTROL_SCALE[case.manifest.dtype], limits.CONTROL_SCALE["float32"]}

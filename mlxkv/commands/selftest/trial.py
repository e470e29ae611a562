"""What becomes of a run whose answer is known.

A correct run must not be accused; a faulty one must be found, and in its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxkv.commands.locate.found import Located
from mlxkv.judge.result import GateName, Verdict
from mlxkv.judge.words import listed

if TYPE_CHECKING:
    from mlxkv.commands.selftest.faults import Fault, Place

RIGHT = "(correct)"
BRANCH = "(correct, on a branch)"
PLAIN = "(correct, without a faster BLAS)"
RIGHTS = (RIGHT, BRANCH, PLAIN)
"""The names of runs without a fault."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. `passed` when the verdict and the place are what they must be; else `why` not.

    `sigma` and `algebra` are the worst over all plans, None where they did not run; `gate` is the
    failed gate that is furthest over its limit; the place is that of locate. `seen_in_lane_b` says
    whether the run's dtype alone, without lane A (float64), would have shown the fault.
    """

    fault: str
    outcome: str
    passed: bool
    why: str
    sigma: float | None
    algebra: float | None
    gate: str | None
    position: int | None
    layer: int | None
    tap: str | None
    hint: str | None
    seen_in_lane_b: bool


def correct_run(name: str, verdict: Verdict, found: Located) -> Trial:
    """Of a correct run: anything but "agree", and any place, is an accusation."""
    why = []
    if verdict.outcome != "agree":
        reasons = "; ".join(verdict.reasons) or _worst(verdict)
        why.append(f"{verdict.outcome}: {reasons}")
    elif found.outcome != "nothing":
        why.append(f"located at {found.layer} {found.tap}")
    return _trial(name, verdict, found, why)


def faulty_run(fault: Fault, place: Place, verdict: Verdict, found: Located) -> Trial:
    """Of a seeded fault: it must differ, from where it starts, and be located in its place."""
    layer, taps, start = fault.where.layer(place), fault.where.taps, fault.where.first(place)
    positions = (start, start + 1) if fault.sink and start is not None else (start,)
    why = [] if verdict.outcome == "differ" else [f"{verdict.outcome}, expected differ"]
    first = _first(verdict)
    if start is not None and first not in positions:
        why.append(f"first wrong position {first}, expected {' or '.join(map(str, positions))}")
    if taps and found.layer != layer:
        why.append(f"layer {found.layer}, expected {layer}")
    if taps and found.tap not in taps:
        why.append(f"tap {found.tap}, expected {listed(taps, 'or')}")
    return _trial(fault.name, verdict, found, why)


def unseen(trials: Mapping[str, Sequence[Trial]]) -> dict[str, list[str]]:
    """The faults that lane B alone would let pass, each with the models on which it would."""
    found = defaultdict(list)
    for model, some in trials.items():
        for trial in some:
            if trial.fault not in RIGHTS and not trial.seen_in_lane_b:
                found[trial.fault].append(model)
    return dict(found)


def _trial(name: str, verdict: Verdict, found: Located, why: list[str]) -> Trial:
    return Trial(
        fault=name,
        outcome=verdict.outcome,
        passed=not why,
        why="; ".join(why),
        sigma=_most(verdict, GateName.SIGMA),
        algebra=_most(verdict, GateName.ALGEBRA),
        gate=_worst(verdict),
        position=_first(verdict),
        layer=found.layer,
        tap=found.tap,
        hint=found.hint,
        seen_in_lane_b=any(g.failed for g in verdict.gates if g.scope != "algebra"),
    )


def _first(verdict: Verdict) -> int | None:
    return verdict.first_wrong.position if verdict.first_wrong else None


def _most(verdict: Verdict, name: GateName) -> float | None:
    return max((g.value for g in verdict.gates if g.name == name and g.ran), default=None)


def _worst(verdict: Verdict) -> str | None:
    """The failed gate that is furthest over its limit.

    Gates of the run's dtype come first, as those of lane A are over by far in any case.
    """
    failed = [g for g in verdict.gates if g.failed]
    worst = max(failed, key=lambda g: (g.scope != "algebra", g.badness), default=None)
    return None if worst is None else worst.name

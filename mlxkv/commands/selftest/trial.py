"""What becomes of a run whose answer is known: a right one must not be accused, a wrong one must be found, and in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlxkv.commands.locate.place import Located
from mlxkv.judge.result import Gate, Verdict

RIGHT = "(correct)"
BRANCH = "(correct, on a branch)"
PLAIN = "(correct, without a faster BLAS)"
RIGHTS = (RIGHT, BRANCH, PLAIN)
"""The names of runs without a fault."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. `passed` when the verdict and the place are what they must be; `why` says what was not.

    `sigma` and `algebra` are the worst over all plans, each None where it did not run; `gate` is the failed gate that is
    furthest over its limit; the place is that of locate. `seen_in_lane_b`: whether the run's dtype alone would have shown it.
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


def accused(name: str, verdict: Verdict, found: Located) -> Trial:
    """Of a correct run: anything but "agree", and any place, is an accusation."""
    why = (
        []
        if verdict.outcome == "agree"
        else [f"{verdict.outcome}: {'; '.join(verdict.reasons) or _worst(verdict)}"]
    )
    why += (
        []
        if found.outcome == "nothing" or verdict.outcome != "agree"
        else [f"located at {found.layer} {found.tap}"]
    )
    return _trial(name, verdict, found, why)


def missed(
    fault: str,
    verdict: Verdict,
    found: Located,
    expected: tuple[tuple[int, ...], int | None, tuple[str, ...]],
) -> Trial:
    """Of a seeded fault: "differ", at one of its first positions, in its layer, at one of its taps (any, where none is given)."""
    positions, layer, taps = expected
    why = [] if verdict.outcome == "differ" else [f"{verdict.outcome}, expected differ"]
    first = verdict.first_wrong.position if verdict.first_wrong else None
    if first not in positions:
        why.append(f"first wrong position {first}, expected {' or '.join(map(str, positions))}")
    if taps and found.layer != layer:
        why.append(f"layer {found.layer}, expected {layer}")
    if taps and found.tap not in taps:
        why.append(f"tap {found.tap}, expected {' or '.join(taps)}")
    return _trial(fault, verdict, found, why)


def unseen(trials: Mapping[str, Sequence[Trial]]) -> dict[str, list[str]]:
    """The faults that lane B alone would let pass, each with the models on which it would."""
    found: dict[str, list[str]] = {}
    for model, some in trials.items():
        for trial in some:
            if trial.fault not in RIGHTS and not trial.seen_in_lane_b:
                found.setdefault(trial.fault, []).append(model)
    return found


def _trial(fault: str, verdict: Verdict, found: Located, why: list[str]) -> Trial:
    lane_b = [g for g in verdict.gates if g.scope != "algebra"]
    return Trial(
        fault=fault,
        outcome=verdict.outcome,
        passed=not why,
        why="; ".join(why),
        sigma=_most(verdict, "sigma"),
        algebra=_most(verdict, "algebra (float64)"),
        gate=_worst(verdict),
        position=verdict.first_wrong.position if verdict.first_wrong else None,
        layer=found.layer,
        tap=found.tap,
        hint=found.hint,
        seen_in_lane_b=any(g.failed for g in lane_b),
    )


def _most(verdict: Verdict, name: str) -> float | None:
    return max((g.value for g in verdict.gates if g.name == name and g.ran), default=None)


def _worst(verdict: Verdict) -> str | None:
    """The failed gate that is furthest over its limit, those of the run's dtype first: lane A's are over by far in any case."""
    failed: list[Gate] = [g for g in verdict.gates if g.failed]
    if not failed:
        return None
    return max(failed, key=lambda g: (g.scope != "algebra", g.badness)).name

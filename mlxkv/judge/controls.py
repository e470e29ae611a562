"""Whether the measure can be trusted: the oracle's proofs, the size of the noise, the controls.

The controls are runs whose verdict is known beforehand, judged in every comparison by the code that
judges the candidate: one member of the pool, held out, must agree; the same logits times a factor
must differ; the errors that the folder stores of it must be those measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlxkv.judge import limits, measure
from mlxkv.judge.case import Case
from mlxkv.judge.floors import held_out, logit_floors
from mlxkv.judge.gates import Yardstick, logit_gates, sigma_of, within
from mlxkv.judge.measure import Measures
from mlxkv.judge.result import Control, Scope


@dataclass(frozen=True, slots=True)
class Trust:
    """What speaks against the proofs and against the size of the floor, and the controls.

    `disputed`: transformers and the truth disagree, though the truth agrees with itself.
    """

    proofs: tuple[str, ...]
    floor: tuple[str, ...]
    controls: tuple[Control, ...]
    disputed: bool = False

    @property
    def reasons(self) -> list[str]:
        """Why the verdict must be "cannot tell", as far as it is the oracle's side."""
        failed = (_reason(c, self.disputed) for c in self.controls if not c.passed)
        return [*self.proofs, *self.floor, *failed]

    def covers(self, scope: Scope) -> bool:
        """Whether a failed gate of the scope counts: all need the truth, most the pool too."""
        sound = all(c.passed for c in self.controls if c.expected == "agree")
        return not self.proofs and (scope == "algebra" or sound)


def trust(yardstick: Yardstick) -> Trust:
    """Everything that is checked of the oracle's side by measuring it."""
    case = yardstick.case
    return Trust(_proofs(case), _floor(yardstick), _controls(yardstick), _disputed(case))


def blind_to(yardstick: Yardstick, factor: float) -> float | None:
    """The sigma of a reference run's logits times `factor`, if no gate would see it; else None."""
    case = yardstick.case
    scaled = measure.measure(case.references["step"], case.truth, scale=factor)
    gates = logit_gates(yardstick, "step", scaled)
    return None if any(g.failed for g in gates) else sigma_of(gates)


def _controls(yardstick: Yardstick) -> tuple[Control, ...]:
    case, name = yardstick.case, yardstick.case.held_out
    factor, run = limits.CONTROL_SCALE[case.manifest.dtype], case.references["step"]
    floors = logit_floors(case, yardstick.truth, without=name)
    member = measure.measure(run, case.truth)
    scaled = measure.measure(run, case.truth, scale=factor)
    stored, off = f"stored errors of {name}", _stored_apart(yardstick, member)
    same = logit_gates(yardstick, "step", held_out(member, case), floors=floors)
    other = logit_gates(yardstick, "step", scaled, floors=floors)
    agrees, differs = not any(g.failed for g in same), any(g.failed for g in other)
    return (
        Control(f"{name}, held out", "agree", agrees, sigma_of(same), limits.SIGMA),
        Control(f"{name} times {factor:g}", "differ", differs, sigma_of(other), limits.SIGMA),
        Control(stored, "agree", off <= limits.STORED, off, limits.STORED, "floors apart"),
    )


def _stored_apart(yardstick: Yardstick, member: Measures) -> float:
    """How far the stored errors of the held-out member are from those measured, in floors."""
    case, at = yardstick.case, member.positions
    index = case.pool.members.index(case.held_out)
    found = {"rms": member.rms, "shift": member.shift, "peak": member.peak}
    apart = [np.abs(errors - case.floors[name][index][at]) for name, errors in found.items()]
    return float(np.max(np.stack(apart) / yardstick.floors.rms[at]))


def _reason(control: Control, disputed: bool) -> str:
    remedy = "see what its proof says" if disputed else "make the oracle folder again"
    return (
        f"control {control.name!r}: {control.quantity} is {control.value:.3g} "
        f"(limit {control.limit:g}), expected to {control.expected}; "
        f"the floors cannot be trusted, {remedy}"
    )


def _proofs(case: Case) -> tuple[str, ...]:
    what, proofs = case.measure_name, case.manifest.proofs
    most = limits.PROOFS if case.has_truth else limits.MEAN_PROOFS[case.manifest.dtype]
    remedy = _DISPUTED if _disputed(case) else f"the {what} cannot be trusted"
    return tuple(
        f"{what}'s proof {name}: {proofs.get(name)}, expected at most {limit:g}; {remedy}"
        for name, limit in most.items()
        if not within(proofs.get(name), limit)
    )


def _disputed(case: Case) -> bool:
    """Whether somebody else's float64 disagrees with a truth whose plans agree with one another.

    A folder made again would say the same.
    """
    proofs, double = case.manifest.proofs, case.manifest.proofs.get("transformers_double")
    alone = within(proofs.get("truth_agreement"), limits.PROOFS["truth_agreement"])
    return (
        case.has_truth
        and alone
        and isinstance(double, int | float)
        and not within(double, limits.PROOFS["transformers_double"])
    )


_DISPUTED = (
    "transformers and the truth disagree, and either may be at fault: try another version of "
    "transformers, and look in config.json for a key that one of them reads otherwise"
)


def _floor(yardstick: Yardstick) -> tuple[str, ...]:
    case, dtype = yardstick.case, yardstick.case.manifest.dtype
    floor = float(np.sqrt(np.mean(yardstick.floors.rms**2)) / yardstick.truth.largest.max())
    if floor <= limits.FLOOR_MOST[dtype]:
        return ()
    most = f"expected at most {limits.FLOOR_MOST[dtype]:g} in {dtype}"
    return (
        f"noise floor: {floor:.2g} of max |{case.measure_name}|, {most}; "
        "too coarse to judge anything",
    )

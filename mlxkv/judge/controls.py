"""Whether the measure can be trusted: the oracle's proofs, the size of the noise, the controls.

The controls are runs whose verdict is known beforehand, judged in every comparison by the code that
judges the candidate: one member of the pool, held out, must agree; the same logits times a factor
must differ; the errors that the folder stores of it must be those measured here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from mlxkv.judge import limits, measure
from mlxkv.judge.admission import layers
from mlxkv.judge.case import Case
from mlxkv.judge.floors import held_out, logit_floors
from mlxkv.judge.gates import Yardstick, logit_gates, sigma_of
from mlxkv.judge.measure import Measures
from mlxkv.judge.result import Control, Scope
from mlxkv.judge.survey import Survey
from oracle.formats import noise, proofs
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace


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


def trust(yardstick: Yardstick, surveyed: Survey) -> Trust:
    """Everything that is checked of the oracle's side by measuring it."""
    case = yardstick.case
    controls = _controls(yardstick, surveyed)
    return Trust(_proofs(case), _floor(yardstick), controls, _disputed(case))


def blind_to(yardstick: Yardstick, scaled: Measures) -> float | None:
    """The sigma of a reference run's logits times a factor, if no gate would see it; else None."""
    gates = logit_gates(yardstick, yardstick.case.cached, scaled)
    return None if any(g.failed for g in gates) else sigma_of(gates)


def _controls(yardstick: Yardstick, surveyed: Survey) -> tuple[Control, ...]:
    case, name = yardstick.case, yardstick.case.held_out
    factor = limits.CONTROL_SCALE[case.manifest.dtype]
    floors = logit_floors(case, yardstick.truth, without=name)
    member, scaled = surveyed.references[case.cached], surveyed.scaled[factor]
    same = logit_gates(yardstick, case.cached, held_out(member, case), floors=floors)
    other = logit_gates(yardstick, case.cached, scaled, floors=floors)
    agrees, differs = not any(g.failed for g in same), any(g.failed for g in other)
    return (
        Control(f"{name}, held out", "agree", agrees, sigma_of(same), limits.SIGMA),
        Control(f"{name} times {factor:g}", "differ", differs, sigma_of(other), limits.SIGMA),
        *_of_stored_errors(yardstick, surveyed),
    )


def _of_stored_errors(yardstick: Yardstick, surveyed: Survey) -> Iterator[Control]:
    """Whether the folder's errors are those of its runs, and of a pool's size."""
    case, truth = yardstick.case, yardstick.case.truth
    again = {
        case.kept(plan): _errors(surveyed.references[plan], run, case)
        for plan, run in case.references.items()
    }
    again[case.held_out]["cached"] = surveyed.apart
    for each in noise.checks(
        case.manifest,
        case.pool,
        case.floors,
        again,
        largest=float(yardstick.truth.largest.max()),
        positions=truth.positions,
    ):
        yield Control(each.name, "agree", each.passed, each.value, each.limit, each.quantity)


def _errors(run: Measures, of: Trace, case: Case) -> dict[str, Iterable[Array]]:
    errors: dict[str, Iterable[Array]] = {"rms": run.rms, "shift": run.shift, "peak": run.peak}
    if layers(case.truth) == 0:
        return errors
    return errors | {kind: measure.layer_errors(of, case.truth, kind) for kind in noise.CACHE}


def _reason(control: Control, disputed: bool) -> str:
    remedy = "see what its proof says" if disputed else "make the oracle folder again"
    if math.isinf(control.value):
        # Of a pool without a truth: its runs round alike, and only another one shows that they do.
        remedy += ", of fewer tokens if there is no truth: equal runs are no noise to measure by"
    return (
        f"control {control.name!r}: {control.quantity} is {control.value:.3g} "
        f"(limit {control.limit:g}), expected to {control.expected}; "
        f"the floors cannot be trusted, {remedy}"
    )


def _proofs(case: Case) -> tuple[str, ...]:
    what = case.measure_name
    remedy = _DISPUTED if _disputed(case) else f"the {what} cannot be trusted"
    return tuple(
        f"{what}'s proof {name}: {value}, expected at most {limit:g}; {remedy}"
        for name, value, limit in proofs.failed(case.manifest)
    )


def _disputed(case: Case) -> bool:
    """Whether somebody else's float64 disagrees with a truth whose plans agree with one another.

    A folder made again would say the same.
    """
    failed = {name: value for name, value, _ in proofs.failed(case.manifest)}
    measured = isinstance(failed.get("transformers_double"), int | float)
    return case.has_truth and len(failed) == 1 and measured


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

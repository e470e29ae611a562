"""What correct runs read at each gate: the measurements behind the limits. It judges nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mlxkv.judge import limits, measure
from mlxkv.judge.cache_gates import ratio_gates
from mlxkv.judge.case import Case
from mlxkv.judge.floors import cache_floors, logit_floors
from mlxkv.judge.gates import Yardstick, logit_gates
from mlxkv.judge.measure import Measures
from mlxkv.judge.result import GateName, Verdict
from oracle.formats import proofs
from oracle.formats.run_folder import ordinary

PORT, PLAIN, ORDERS, MLX_LM = "port", "plain", "orders", "mlx-lm"
MEMBERS, ORACLE = "members", "oracle"
ENGINES = (PORT, PLAIN, ORDERS, MLX_LM)
"""Whose reading: the port's, its on MLX's own BLAS, its with other sums, or mlx-lm's; that of a
member of the pool that was held out; or one of the oracle's own proofs and controls."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a correct run reads at a gate; `plan` is its plan, or the name of the pool's member."""

    whose: str
    gate: str
    plan: str
    value: float
    limit: float


@dataclass(frozen=True, slots=True)
class Range:
    """A gate's readings on one model; `run` and `plan` say which of them was the largest."""

    model: str
    whose: str
    gate: str
    readings: int
    least: float
    median: float
    largest: float
    limit: float
    run: str
    plan: str

    @property
    def within(self) -> bool:
        """Whether every reading is within the limit; NaN is not."""
        return self.largest <= self.limit

    @property
    def headroom(self) -> float | None:
        """How many times the largest fits under the limit; None where that says nothing."""
        return self.limit / self.largest if self.largest > 0 and self.limit > 0 else None


def read(case: Case, judged: Verdict) -> list[Reading]:
    """Everything that one correct run tells of the limits."""
    return [*of_engine(judged), *of_members(case), *of_oracle(case, judged)]


def plain_run(name: str, judged: Verdict, found: Sequence[Reading]) -> dict[str, Any]:
    """One run as plain values: what it was, its outcome with the reasons, and its readings."""
    return {
        "name": name,
        "outcome": judged.outcome,
        "reasons": list(judged.reasons),
        "readings": [asdict(reading) for reading in found],
    }


def of_engine(judged: Verdict, whose: str = PORT, *, how: str = "") -> list[Reading]:
    """Every gate that ran, plan by plan; `how` stands before the plan."""
    return [
        Reading(whose, g.name, ", ".join(filter(None, (how, g.plan))), g.value, g.limit)
        for g in judged.gates
        if g.ran
    ]


def of_members(case: Case) -> list[Reading]:
    """Each member of the pool, judged by the others from its stored errors.

    A member's top-1 tokens and its step against full are not stored, so two gates have no reading.
    The sequential member is never held out.
    """
    yardstick = Yardstick.of(case)
    truth, largest = yardstick.truth, yardstick.cache_largest
    errors = {name: np.asarray(stored, np.float64) for name, stored in case.floors.items()}
    found = []
    for member in ordinary(case.pool.members):
        i = case.pool.members.index(member)
        rms, shift, peak = (errors[name][i] for name in ("rms", "shift", "peak"))
        at = np.asarray(case.truth.positions)
        run = Measures(at, np.arange(len(at)), rms, shift, peak, truth.best)
        floors = logit_floors(case, truth, without=member)
        gates = [
            g
            for g in logit_gates(yardstick, member, run, floors=floors)
            if g.name not in (GateName.FINITE, GateName.FLIPS)
        ]
        if largest is not None:
            cached = np.stack([errors[name][i] for name in ("keys", "values")])
            gates += ratio_gates(case, cached / cache_floors(case, largest, without=member))
        found += [Reading(MEMBERS, g.name, member, g.value, g.limit) for g in gates]
    return found


def of_oracle(case: Case, judged: Verdict) -> list[Reading]:
    """The truth's proofs, the floor's size, and the control on stored errors."""
    largest = measure.truth_rows(case.truth).largest.max()
    floor = float(np.sqrt(np.mean(np.square(judged.floor))) / largest)
    most = limits.FLOOR_MOST[case.manifest.dtype]
    proved = [
        (f"proof {name}", case.manifest.proofs[name], limit)
        for name, limit in proofs.limits_of(case.manifest).items()
    ]
    stored = [
        (f"control: {c.name}", c.value, c.limit) for c in judged.controls if c.quantity != "sigma"
    ]
    every = [*proved, ("noise floor over max |truth|", floor, most), *stored]
    return [Reading(ORACLE, gate, "-", value, limit) for gate, value, limit in every]


def ranges(model: str, runs: Iterable[tuple[str, Sequence[Reading]]]) -> list[Range]:
    """The readings of several named runs on one model, put together by whose they are and gate."""
    by: dict[tuple[str, str], list[tuple[str, Reading]]] = {}
    for name, found in runs:
        for reading in found:
            by.setdefault((reading.whose, reading.gate), []).append((name, reading))
    return [_range(model, some) for some in by.values()]


def _range(model: str, some: Sequence[tuple[str, Reading]]) -> Range:
    values = np.array([reading.value for _, reading in some])
    run, worst = some[int(np.argmax(values))]  # a NaN counts as the largest
    spread = (float(values.min()), float(np.median(values)), float(values.max()))
    return Range(model, worst.whose, worst.gate, len(some), *spread, worst.limit, run, worst.plan)


def joined(of: Sequence[Range]) -> Range:
    """The same gate on several models: the worst of them, and the median of their medians."""
    return replace(
        max(of, key=lambda r: (not r.within, r.largest)),
        readings=sum(r.readings for r in of),
        least=min(r.least for r in of),
        median=float(np.median([r.median for r in of])),
    )

"""What judging found: gates, controls, the verdict, and the verdict as JSON.

No limit lives here and nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from mlxkv.judge.delta import Figures, Tables
from mlxkv.judge.measure import Floats
from oracle.formats.run_folder import Manifest
from oracle.formats.trace import Trace

FORMAT = "mlxkv-verdict/1"
Outcome = Literal["agree", "differ", "cannot tell"]
Scope = Literal["algebra", "logits", "cache"]
SCOPES: tuple[Scope, ...] = ("algebra", "logits", "cache")
EXIT_CODES: dict[Outcome, int] = {"agree": 0, "differ": 1, "cannot tell": 2}
HINT = "`mlxkv locate` says in which layer and in which operation"


class GateName(StrEnum):
    """The gates, in the order in which they are shown. The value is what reports call the gate."""

    ALGEBRA = "algebra (float64)"
    ALGEBRA_CACHE = "algebra, cache"
    FINITE = "finite"
    SIGMA = "sigma"
    WORST = "worst position"
    PEAK = "peak"
    SHIFT = "shift"
    FLIPS = "decisive flips"
    REPEAT = "repeat"
    CACHED = "cached against uncached"
    KEYS_MEDIAN = "keys median"
    KEYS_MOST = "keys 95%"
    KEYS_WORST = "keys worst row"
    VALUES_MEDIAN = "values median"
    VALUES_MOST = "values 95%"
    VALUES_WORST = "values worst row"

    @property
    def scope(self) -> Scope:
        """What it speaks of: the float64 runs, or in the run's dtype the logits or the cache."""
        if self in (GateName.ALGEBRA, GateName.ALGEBRA_CACHE):
            return "algebra"
        of_cache = self == GateName.CACHED or self.startswith(("keys", "values"))
        return "cache" if of_cache else "logits"


@dataclass(frozen=True, slots=True)
class Gate:
    """One limit on one plan.

    `position` is where the value was found. `first` is the first wrong position that its measure
    shows, None if it shows none; `about` and `after` say how well it is known, as in `FirstWrong`.
    A gate that could not run has a `reason` and a value of NaN; it neither passes nor fails.
    """

    name: GateName
    plan: str
    value: float
    limit: float
    position: int | None = None
    token: str | None = None
    layer: int | None = None
    head: int | None = None
    first: int | None = None
    about: bool = False
    after: int | None = None
    reason: str | None = None

    @property
    def scope(self) -> Scope:
        return GateName(self.name).scope

    @property
    def ran(self) -> bool:
        return self.reason is None

    @property
    def failed(self) -> bool:
        """Ran, and is not within its limit; NaN is not."""
        return self.ran and not (self.value <= self.limit)

    @property
    def headroom(self) -> float:
        """How many times the value fits under the limit; NaN where that says nothing."""
        if not self.ran or not (self.value > 0 and self.limit > 0):
            return math.nan
        return self.limit / self.value

    @property
    def badness(self) -> float:
        """Value over limit, to find the worst of several gates; -1 for a gate that did not run."""
        if not self.ran:
            return -1.0
        if math.isnan(self.value):
            return math.inf
        return self.value / self.limit if self.limit > 0 else self.value


MOST_POINTS = 2048
"""Of a curve that are written: of a longer one the largest of neighbours stands for them. Five
curves of so many take half a megabyte in JSON."""
MOST_COLUMNS = 1024
"""Of a strip that are written, in the same way."""


@dataclass(frozen=True, slots=True)
class Control:
    """A run whose verdict is known beforehand, judged by the code that judges the candidate."""

    name: str
    expected: str
    passed: bool
    value: float
    limit: float
    quantity: str = "sigma"


@dataclass(frozen=True, slots=True)
class Curve:
    """The centred rms error of one plan, position by position."""

    plan: str
    positions: tuple[int, ...]
    rms: tuple[float, ...]

    @property
    def thinned(self) -> Curve:
        """At most MOST_POINTS of it: of each block of neighbours the largest, which is NaN if one
        is.
        """
        if len(self.rms) <= MOST_POINTS:
            return self
        blocks = np.array_split(np.arange(len(self.rms)), MOST_POINTS)
        rms = np.array(self.rms)
        at = [int(block[np.argmax(rms[block])]) for block in blocks]
        return Curve(
            self.plan, tuple(self.positions[i] for i in at), tuple(self.rms[i] for i in at)
        )


@dataclass(frozen=True, slots=True)
class Strip:
    """Errors by layer and position, (layers, n); `unit` says in what. None: not finite."""

    unit: str
    limit: float
    values: tuple[tuple[float | None, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """With `step`, where each value is the largest of so many positions, or None if one is."""
        value = {"unit": self.unit, "limit": self.limit, "values": self.values}
        step = -(-len(self.values[0]) // MOST_COLUMNS)
        if step > 1:
            value |= {"values": self.columns(step).tolist(), "step": step}
        return value

    def columns(self, step: int) -> Floats:
        """(layers, columns): the largest of `step` positions each, NaN if one is not finite."""
        values = np.array(self.values, np.float64)  # None becomes NaN
        starts = np.arange(0, values.shape[1], step)
        return np.asarray(np.maximum.reduceat(values, starts, axis=1))


@dataclass(frozen=True, slots=True)
class FirstWrong:
    """The first wrong position of all plans.

    It is above the limit of a single row; if it is only known `about`, several rows from it on are
    wrong together. `after` is the last position before it that was compared, if that is not its
    neighbour (-1 if there is none): then the fault begins between the two.
    """

    position: int
    token: str | None
    plan: str
    gate: GateName
    layer: int | None = None
    about: bool = False
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """The usual mistake that explains a difference, and the sigma left `against` what has it."""

    name: str
    words: str
    sigma: float
    against: str = "a truth with that mistake"


@dataclass(frozen=True, slots=True)
class Rows:
    """Of how many positions logits were `compared`, of those `kept` by the oracle folder, `of` all.

    Keys and values are compared at every position.
    """

    compared: int = 0
    kept: int = 0
    of: int = 0

    @property
    def sampled(self) -> bool:
        """Whether the folder keeps a sample, as of a long sequence."""
        return self.kept < self.of


@dataclass(frozen=True, slots=True)
class Subject:
    """What was judged: whose run, of which model, over which tokens."""

    engine: str
    engine_version: str
    device: str
    dtype: str
    model: str
    fingerprint: str
    config_digest: str
    tokens: tuple[int, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome and all that it stands on.

    `scopes` are those of which every gate ran; `plans` those compared. `unseen` is the list "not
    exercised" (`unseen.py`); `found` is what a wrong run shows of itself (`finding.py`), "" if
    nothing. `floor` is that of the centred rms at the positions `floor_at`. `against` is the truth,
    or where there is none transformers itself, and then "agree" says no more than that. `rows` are
    those of the sequence itself, without the probe.
    """

    outcome: Outcome
    scopes: tuple[Scope, ...]
    plans: tuple[str, ...]
    subject: Subject
    gates: tuple[Gate, ...] = ()
    controls: tuple[Control, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    found: str = ""
    first_wrong: FirstWrong | None = None
    figures: tuple[Figures, ...] = ()
    tables: Tables = Tables()  # noqa: RUF009 (frozen)
    floor: tuple[float, ...] = ()
    floor_at: tuple[int, ...] = ()
    curves: tuple[Curve, ...] = ()
    distinct: int = 0
    cause: Cause | None = None
    against: Literal["truth", "transformers"] = "truth"
    rows: Rows = Rows()

    @property
    def exit_code(self) -> int:
        """As diff(1): 0 agree, 1 differ, 2 cannot tell."""
        return EXIT_CODES[self.outcome]

    @property
    def hint(self) -> str | None:
        return HINT if self.outcome == "differ" else None

    @property
    def worst(self) -> tuple[Gate, ...]:
        """Of each gate the plan that did worst, in the order of the gates."""
        worst: dict[GateName, Gate] = {}
        for gate in self.gates:
            if gate.name not in worst or gate.badness > worst[gate.name].badness:
                worst[gate.name] = gate
        return tuple(worst.values())

    @property
    def nearest(self) -> Gate | None:
        """The gate that is nearest to its limit, or farthest beyond.

        Where logits are not finite that is the gate that says so: what others make of them is no
        number either. Of keys and values it is the one that has their place.
        """
        infinite = [gate for gate in self.worst if gate.failed and gate.name == GateName.FINITE]

        def off(gate: Gate) -> tuple[float, bool]:
            return gate.badness, gate.position is not None

        return max(infinite or self.worst, key=off, default=None)

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-verdict/1`: plain values; numbers that are not finite are null.

        `rows` is there where not all were kept. Of long curves a part is written (MOST_POINTS).
        """
        value = asdict(replace(self, floor=(), floor_at=(), curves=()))
        for name in ("floor", "floor_at", "curves"):
            del value[name]
        floor = Curve("floor", self.floor_at, self.floor).thinned
        by_position: dict[str, Any] = {"positions": floor.positions, "floor": floor.rms}
        by_position["rms"] = [asdict(curve.thinned) for curve in self.curves]
        value["not_exercised"] = value.pop("unseen")
        if not self.rows.sampled:
            del value["rows"]
        value |= {"format": FORMAT, "exit_code": self.exit_code, "hint": self.hint}
        value |= {"distinct_members": value.pop("distinct"), "by_position": by_position}
        for gate, shown in zip(self.gates, value["gates"], strict=True):
            shown |= {name: getattr(gate, name) for name in ("scope", "ran", "failed", "headroom")}
        return dict(plain(value))


def subject(manifest: Manifest, traces: Sequence[Trace]) -> Subject:
    """Of the traces given, all of one engine, the first speaks for all."""
    meta = traces[0].meta if traces else None
    return Subject(
        engine=meta.engine if meta else "none",
        engine_version=meta.engine_version if meta else "",
        device=meta.device if meta else "",
        dtype=manifest.dtype,
        model=manifest.title,
        fingerprint=manifest.fingerprint,
        config_digest=manifest.config_digest,
        tokens=tuple(manifest.tokens),
        prompt_tokens=manifest.prompt_tokens,
    )


def join(outcomes: Iterable[Outcome]) -> Outcome:
    """Of several verdicts: one that differs decides, then one that cannot tell, as does none."""
    found = set(outcomes)
    if "differ" in found:
        return "differ"
    return "agree" if found == {"agree"} else "cannot tell"


def plain(value: Any) -> Any:
    """Plain JSON values, of dataclasses too; what is not finite is null, no zero is negative."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value + 0.0 if math.isfinite(value) else None
    return value

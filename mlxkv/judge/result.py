"""What judging found: gates, controls, the verdict, and the verdict as JSON. No limit lives here and nothing is measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlxkv.judge.delta import Figures, Tables
from oracle.formats.run_folder import Manifest
from oracle.formats.trace import Trace

FORMAT = "mlxkv-verdict/1"
Outcome = Literal["agree", "differ", "cannot tell"]
Scope = Literal["algebra", "logits", "cache"]
SCOPES: tuple[Scope, ...] = ("algebra", "logits", "cache")
HINT = (
    "the first wrong position names the kind: 0 a scale, an eps or weights; 1 RoPE or the mask; a chunk's start index_pos or the "
    "mask's offset; later a stale or lost cache row; `mlxkv locate` says where"
)


@dataclass(frozen=True, slots=True)
class Gate:
    """One limit on one plan. `position` is where the value was found, `first` the first position above its limit.

    A gate that could not run has a `reason` and a value of NaN; it neither passes nor fails.
    """

    name: str
    scope: Scope
    plan: str
    value: float
    limit: float
    position: int | None = None
    token: str | None = None
    layer: int | None = None
    head: int | None = None
    first: int | None = None
    reason: str | None = None

    @property
    def ran(self) -> bool:
        """Whether there is a value at all."""
        return self.reason is None

    @property
    def failed(self) -> bool:
        """Ran, and is not within its limit; NaN is not."""
        return self.ran and not (self.value <= self.limit)

    @property
    def headroom(self) -> float:
        """How many times the value fits under the limit; NaN where that says nothing."""
        return (
            self.limit / self.value if self.ran and self.value > 0 and self.limit > 0 else math.nan
        )

    @property
    def badness(self) -> float:
        """For finding the worst of several: value over limit, and -1 for a gate that did not run."""
        if not self.ran:
            return -1.0
        if math.isnan(self.value):
            return math.inf
        return self.value / self.limit if self.limit > 0 else self.value


@dataclass(frozen=True, slots=True)
class Control:
    """A run whose verdict is known beforehand, judged by the same code."""

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


@dataclass(frozen=True, slots=True)
class FirstWrong:
    """The first position above a per-position limit, over all plans."""

    position: int
    token: str | None
    plan: str
    gate: str
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """The usual mistake, in words, against whose truth the delta vanishes, and the sigma that is left of it."""

    name: str
    words: str
    sigma: float


@dataclass(frozen=True, slots=True)
class Subject:
    """What was judged: whose run, of which model, over how many tokens."""

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
    """The outcome and all that it stands on. `scopes` are those of which every gate ran; `plans` those compared.

    `against` is the truth, or where there is none transformers itself: then "agree" says no more than that.
    """

    outcome: Outcome
    scopes: tuple[Scope, ...]
    plans: tuple[str, ...]
    subject: Subject
    gates: tuple[Gate, ...] = ()
    controls: tuple[Control, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    first_wrong: FirstWrong | None = None
    figures: tuple[Figures, ...] = ()
    tables: Tables = Tables()  # noqa: RUF009 (frozen)
    floor: tuple[float, ...] = ()
    curves: tuple[Curve, ...] = ()
    distinct: int = 0
    cause: Cause | None = None
    against: Literal["truth", "transformers"] = "truth"

    @property
    def exit_code(self) -> int:
        """As diff(1): 0 agree, 1 differ, 2 cannot tell."""
        return {"agree": 0, "differ": 1, "cannot tell": 2}[self.outcome]

    @property
    def hint(self) -> str | None:
        """What to do next, where something differs."""
        return HINT if self.outcome == "differ" else None

    @property
    def worst(self) -> tuple[Gate, ...]:
        """Of each gate the plan that did worst, in the order of the gates."""
        names = list(dict.fromkeys(g.name for g in self.gates))
        return tuple(
            max((g for g in self.gates if g.name == name), key=lambda g: g.badness)
            for name in names
        )

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-verdict/1`: plain values; numbers that are not finite are null."""
        gates = [
            asdict(g) | {"ran": g.ran, "failed": g.failed, "headroom": g.headroom}
            for g in self.gates
        ]
        tables = {
            name: [asdict(p) for p in pairs]
            for name, pairs in (("cached", self.tables.cached), ("chunked", self.tables.chunked))
        }
        value = {
            "format": FORMAT,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "against": self.against,
            "scopes": self.scopes,
            "plans": self.plans,
            "subject": asdict(self.subject),
            "gates": gates,
            "controls": [asdict(c) for c in self.controls],
            "reasons": self.reasons,
            "notes": self.notes,
            "first_wrong": asdict(self.first_wrong) if self.first_wrong else None,
            "hint": self.hint,
            "cause": asdict(self.cause) if self.cause else None,
            "figures": [asdict(f) for f in self.figures],
            "tables": tables,
            "distinct_members": self.distinct,
            "by_position": {"floor": self.floor, "rms": [asdict(c) for c in self.curves]},
        }
        return dict(plain(value))


def subject(manifest: Manifest, traces: Sequence[Trace]) -> Subject:
    """Of the traces given, all of one engine, the first speaks for all."""
    meta = traces[0].meta if traces else None
    return Subject(
        engine=meta.engine if meta else "none",
        engine_version=meta.engine_version if meta else "",
        device=meta.device if meta else "",
        dtype=manifest.dtype,
        model=f"{manifest.name} ({manifest.note})" if manifest.note else manifest.name,
        fingerprint=manifest.fingerprint,
        config_digest=manifest.config_digest,
        tokens=tuple(manifest.tokens),
        prompt_tokens=manifest.prompt_tokens,
    )


def join(outcomes: Iterable[Outcome]) -> Outcome:
    """Of several prompts or plans: one that differs decides, then one that cannot be told; none at all cannot be told."""
    found = set(outcomes)
    if "differ" in found:
        return "differ"
    return "agree" if found == {"agree"} else "cannot tell"


def plain(value: Any) -> Any:
    """Plain JSON values; numbers that are not finite are null."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value

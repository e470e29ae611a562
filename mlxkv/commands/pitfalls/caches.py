"""What came of several caches on all their lives, beside what was expected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from mlxkv.commands.pitfalls import known, unexercised
from mlxkv.commands.pitfalls.known import Finding
from mlxkv.commands.pitfalls.lives import WHAT
from mlxkv.commands.pitfalls.scenarios import WRONG, Behaviour
from mlxkv.commands.pitfalls.straight import Straight
from mlxkv.commands.pitfalls.trial import Came, Trial
from mlxkv.engines.kinds import Kind
from mlxkv.judge.result import plain
from oracle.formats.trace import Meta

FORMAT = "mlxkv-caches/1"


@dataclass(frozen=True, slots=True)
class Column:
    """One cache. `noise` is a lossy one's own (a centred rms of logits); `facts` are what
    it says of itself after the first of its lives, with `fed` tokens in it.
    """

    kind: Kind
    came: tuple[Came, ...]
    environment: Mapping[str, Any]
    noise: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    fed: int = 0
    unexercised: tuple[str, ...] = ()

    @classmethod
    def of(cls, trial: Trial, came: Sequence[Came], meta: Meta, own: Straight | None) -> Self:
        """From what its first life, which feeds a cache named "a", left."""
        facts = dict(meta.environment.get("caches", {}).get("a", {}))
        environment = {
            name: v for name, v in meta.environment.items() if name not in ("caches", "cache")
        }
        noise = own.noise if own is not None else None
        fed, unseen = meta.plan.longest, unexercised.lines(trial)
        return cls(trial.kind, tuple(came), environment, noise, facts, fed, unseen)

    @property
    def hint(self) -> str:
        """What would explain all that is wrong, if it is meant so; "" if nothing would."""
        return known.depends(self.kind, self.came)

    @property
    def odd(self) -> list[Came]:
        """What was not expected; an error of one's own code, which is no refusal, never is."""
        return [one for one in self.came if known.odd(self.kind, one)]

    def expected(self, life: str) -> tuple[Behaviour, ...]:
        """What may come of a life, the usual first."""
        return known.expected(self.kind, life)

    def finding(self, one: Came) -> Finding | None:
        """What is known of something that goes wrong, silently or not."""
        found = known.finding(self.kind, one.life)
        return found if found is not None and found.behaviour == one.behaviour else None

    def to_json(self) -> dict[str, Any]:
        return {
            "cache": self.kind.name,
            "whose": self.kind.whose,
            "lossy": self.kind.lossy,
            "lives": {one.life: self._life(one) for one in self.came},
            "noise": self.noise,
            "says": {**self.facts, "fed": self.fed},
            "not_exercised": self.unexercised,
            "hint": self.hint,
        }

    def _life(self, one: Came) -> dict[str, Any]:
        found = self.finding(one)
        expected = self.expected(one.life)
        beside: dict[str, str] = {"expected": expected[0]} if one.behaviour not in expected else {}
        beside |= {"finding": found.title} if found is not None else {}
        return {key: v for key, v in asdict(one).items() if key != "life"} | beside


@dataclass(frozen=True, slots=True)
class Caches:
    """All of them, on one model; `without` are those that it cannot have, and why."""

    model: str
    source: str
    fingerprint: str
    columns: tuple[Column, ...]
    without: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> Mapping[str, Any]:
        """What the first of them ran on and with."""
        return self.columns[0].environment

    @property
    def lives(self) -> list[str]:
        """Those that any cache was put through, in their order."""
        made = {one.life for column in self.columns for one in column.came}
        return [name for name in WHAT if name in made]

    @property
    def unexercised(self) -> list[str]:
        """What was not exercised, each line once, with the caches that it is of if not of all."""
        of: dict[str, list[str]] = {}
        for column in self.columns:
            for line in column.unexercised:
                of.setdefault(line, []).append(column.kind.name)
        every = len(self.columns)
        return [
            line if len(names) == every else f"{line} ({', '.join(names)})"
            for line, names in of.items()
        ]

    @property
    def surprises(self) -> list[tuple[Column, Came]]:
        return [(column, one) for column in self.columns for one in column.odd]

    @property
    def wrong(self) -> Iterator[tuple[Column, Came]]:
        """Everything that is silently wrong."""
        return ((column, one) for column, one in self.amiss if one.behaviour == WRONG)

    @property
    def amiss(self) -> Iterator[tuple[Column, Came]]:
        """Everything that is silently wrong, or fails though it should not."""
        for column in self.columns:
            for one in column.came:
                if one.behaviour == WRONG or column.finding(one) is not None:
                    yield column, one

    @property
    def exit_code(self) -> int:
        """0 when all that is built in behaved as is known and one's own cache is nowhere silently
        wrong, else 1."""
        return 1 if self.surprises else 0

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-caches/1`"""
        value = {
            "format": FORMAT,
            "model": {"name": self.model, "source": self.source, "fingerprint": self.fingerprint},
            "lives": {name: WHAT[name] for name in self.lives},
            "caches": [column.to_json() for column in self.columns],
            "not_for_this_model": self.without,
            "not_exercised": self.unexercised,
            "surprises": [(column.kind.name, one.life) for column, one in self.surprises],
            "exit_code": self.exit_code,
            "environment": {column.kind.name: column.environment for column in self.columns},
        }
        return dict(plain(value))

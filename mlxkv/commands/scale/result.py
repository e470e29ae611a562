"""What a case at size showed: a file of its own, `mlxkv-scale/1`, and the bars that it is held to.

No measuring. Sizes are bytes, times seconds. What could not be measured is None, and no bar is met
by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxkv.commands.scale.memory import Memory
from mlxkv.judge.limits import SIGMA
from oracle.formats import strict_json

FORMAT = "mlxkv-scale/1"
BESIDE = 3_000_000_000
"""What all processes together may hold beside the port's own weights in the run's dtype."""
TRUTH = 1e-10
"""Of the largest logit: how far apart the truths of two models of the same logits may be, which
differ by the order of float64 sums alone."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One command: what it took in all, by process as it says itself, and its peaks.

    `disk` is by what the cache folder keeps: the oracle's answers, converted weights, `runs`, where
    the engine's traces lie, and so on.
    """

    command: str
    seconds: float
    took: dict[str, float]
    memory: Memory | None
    disk: dict[str, int]


@dataclass(frozen=True, slots=True)
class Worst:
    """The gate of one name that came nearest to its limit, or went furthest beyond it.

    `value` is None where it is not finite.
    """

    name: str
    plan: str
    value: float | None
    limit: float

    @property
    def badness(self) -> float:
        """Value over limit; where the limit is 0 the value."""
        if self.value is None:
            return math.inf
        return self.value / self.limit if self.limit > 0 else self.value


@dataclass(frozen=True, slots=True)
class Same:
    """The logits beside those of the model that this one was made of, over the same tokens.

    `truth` is how far the two truths are apart, of the largest logit, `sigma` how far the port's
    rows on the large model are from the truth of the small one, in the noise floors of the large.
    """

    of: str
    rows: int
    truth: float | None
    sigma: float | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a fault is; None where it was not named, or need not be."""

    layer: int | None
    tap: str | None
    head: int | None = None
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was planted, and where `mlxkv locate` found it; None where it found nothing."""

    words: str
    planted: Place
    found: Place | None
    outcome: str
    hint: str | None
    ran: Ran

    @property
    def located(self) -> bool:
        """Whether every part of the place is that of the fault."""
        if self.found is None:
            return False
        parts = ("layer", "tap", "head", "position")
        pairs = [(getattr(self.planted, part), getattr(self.found, part)) for part in parts]
        return all(mine == its for mine, its in pairs if mine is not None)


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that had to be so. `met` is None where it could not be measured."""

    what: str
    measured: str
    limit: str
    met: bool | None


@dataclass(frozen=True, slots=True)
class Model:
    """What ran: how it was made, its size, and the fingerprint of its weights.

    `in_memory` are its weights' bytes in the run's dtype, `on_disk` those of its file.
    """

    made: str
    fingerprint: str
    parameters: int
    in_memory: int
    on_disk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One case. `cold` is with no answer of the oracle's kept, `warm` the same command again; None
    for a case that is not run again.

    `sources` is a digest of the code that ran, `machine` the memory that there is. `seconds` are
    those that `cold` and `warm` may take, where the case has such limits. Locating need only fit
    into memory: an engine of one's own gives the logits of all tokens of a call.
    """

    case: str
    about: str
    model: Model
    dtype: str
    tokens: int
    prompt_tokens: int
    rows: str
    outcome: str
    scopes: list[str]
    gates: list[Worst]
    reasons: list[str]
    not_exercised: list[str]
    cold: Ran
    warm: Ran | None
    same: Same | None
    fault: Fault | None
    seconds: dict[str, float]
    environment: dict[str, dict[str, Any]]
    sources: str
    machine: int

    @property
    def runs(self) -> dict[str, Ran]:
        """The comparisons, by name."""
        return {"cold": self.cold} | ({"warm": self.warm} if self.warm else {})

    @property
    def bars(self) -> tuple[Bar, ...]:
        """Everything that the case is held to, the verdict first."""
        found = [Bar("verdict", self.outcome, "agree", self.outcome == "agree")]
        runs = self.runs
        found += [_of_memory(name, run, self._most) for name, run in runs.items()]
        found += [_of_time(name, runs[name], most) for name, most in self.seconds.items()]
        if self.same is not None:
            found += _of_same(self.same)
        if self.fault is not None:
            said = "located" if self.fault.located else "not located"
            found.append(Bar("planted fault", said, "located", self.fault.located))
            found.append(_of_memory("locating it", self.fault.ran, self.machine))
        return tuple(found)

    @property
    def met(self) -> bool:
        """Whether every bar is; one that could not be measured is not."""
        return all(bar.met is True for bar in self.bars)

    @property
    def _most(self) -> int:
        return self.model.in_memory + BESIDE


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def _of_memory(name: str, ran: Ran, most: int) -> Bar:
    what, limit = f"peak of all processes, {name}", gigabytes(most)
    if ran.memory is None:
        return Bar(what, "not measured", limit, None)
    return Bar(what, gigabytes(ran.memory.together), limit, ran.memory.together <= most)


def _of_time(name: str, ran: Ran, most: float) -> Bar:
    return Bar(f"time, {name}", f"{ran.seconds:.0f} s", f"{most:.0f} s", ran.seconds <= most)


def _of_same(same: Same) -> list[Bar]:
    rows = (
        (f"truth beside that of {same.of}", same.truth, TRUTH, "{:.1e}"),
        (f"sigma of the port beside that truth, {same.rows} rows", same.sigma, SIGMA, "{:.2f}"),
    )
    return [
        Bar(what, "not compared", form.format(most), None)
        if value is None
        else Bar(what, form.format(value), form.format(most), value <= most)
        for what, value, most, form in rows
    ]


def read(path: Path) -> Result:
    """A case's file; a Refusal where it is none."""
    remedy = "make the case again with `mlxkv reports --only scale`"
    value = strict_json.read(path, remedy=remedy)
    given = strict_json.of_format(value, FORMAT, where=path, remedy=remedy)
    given = {key: of for key, of in given.items() if key not in ("bars", "met")}
    return strict_json.typed(given, Result, where=path, remedy=remedy)


def to_json(result: Result) -> Mapping[str, Any]:
    """What the file holds: the bars too, for whoever reads it elsewhere."""
    bars: Sequence[Bar] = result.bars
    value = {"format": FORMAT} | asdict(result)
    return value | {"bars": [asdict(bar) for bar in bars], "met": result.met}

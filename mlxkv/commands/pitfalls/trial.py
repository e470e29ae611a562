"""One cache on all its lives: which plans it is to follow, and what came of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from mlxkv.commands.pitfalls.history import Fed, Walk, twins
from mlxkv.commands.pitfalls.lives import FACTS, Life, Talks, lives, straight
from mlxkv.commands.pitfalls.scenarios import LOSSY, NO, REFUSED, RIGHT, UNSEEN, WRONG, Behaviour
from mlxkv.commands.pitfalls.straight import Straight, Talk, centred, noise, rows_of
from mlxkv.engines.kinds import Kind
from mlxkv.judge.limits import SIGMA, WORST
from oracle.formats.plan import Call, Plan
from oracle.formats.trace import Trace

WORST_FIRST = (WRONG, REFUSED, NO, LOSSY, UNSEEN, RIGHT)
DEPENDS = ("SwitchedKVCache", "QuantizedCache")
"""The built-in caches whose rows depend, as documented, on the calls in which they are fed: what is
quantised is what a call before has left. They, and one's own that is said to be so (`--lossy
depends`), are measured by fresh caches fed in the same calls.
Where that is all that a life is, nothing is left to compare; nor is there where tokens that were
trimmed away have set off the switch, which nothing undoes, or where the rows of a batch share a
scale."""

OWN_NOISE = 4.0
"""How far a lossy cache's rows may be from those of itself fed straight, in its own noise.

On SmolLM2-135M-Instruct right windows read at most 1.1, and right quantised caches 0.7 (8 bits),
0.3 (float16) and 0.2 (8 and 4 bits, or 4 throughout); on the small random model of
`assert_cache_behaves` 0.2. The weakest planted fault there, the scale of the row before, reads 1e3
(25 in one of its lives); a window that hides its sinks from chunks reads 2.2e5 on SmolLM2.
"""
_CRASH = re.compile(
    r"\b(?:Attribute|Type|Index|Key|Name|UnboundLocal|ZeroDivision|Assertion|Recursion)Error\b"
)
SPARE = 4096
"""Bytes by which what a cache says may differ from what is allocated: offsets and paddings."""


@dataclass(frozen=True, slots=True)
class Came:
    """What came of one life of one cache.

    `worst` is the distance of its worst row from the truth in noise floors, `apart` that of a lossy
    cache's from itself fed straight, in its own noise. `rows` were compared; `where` is the first
    wrong call. `errors` are those of its steps, and `reason` says why there is no run. `otherwise`:
    all that is wrong was fed in other calls than the cache is measured by.
    """

    life: str
    behaviour: Behaviour
    worst: float | None = None
    apart: float | None = None
    rows: int = 0
    where: str = ""
    errors: tuple[str, ...] = ()
    reason: str = ""
    otherwise: bool = False

    @property
    def crashed(self) -> bool:
        """Whether an error is one of the code's own, rather than a refusal."""
        return any(_CRASH.search(error) for error in self.errors)

    @property
    def cost(self) -> float | None:
        """What is lost or wrong, in floors of what decides: its own noise where there is one."""
        return self.apart if self.behaviour == WRONG and self.apart is not None else self.worst


@dataclass(frozen=True, slots=True)
class Part:
    """One row of one call beside what it should be."""

    fed: Fed
    behaviour: Behaviour
    worst: float | None = None
    apart: float | None = None
    rows: int = 0
    error: str = ""


@dataclass(frozen=True)
class Trial:
    """One cache, and the talks that it is told; `window` are the tokens that a window keeps."""

    kind: Kind
    talks: Talks
    window: int | None = None
    only: tuple[str, ...] = ()

    @cached_property
    def lives(self) -> tuple[Life, ...]:
        """Those that it is put through; one without a plan says why."""
        found = lives(self.talks, window=self.window)
        if (self.window or 256) < 256:  # never has so many rows
            found = [life for life in found if not life.name.startswith("blocks")]
        return tuple(life for life in found if not self.only or life.name in self.only)

    @property
    def plans(self) -> list[Plan]:
        """Those of its lives, and the fresh caches that it is measured by."""
        made = [life.plan for life in self.lives if life.plan is not None]
        return [*made, *{plan.name: plan for plan in self.ways.values()}.values(), *self.straights]

    @property
    def depends(self) -> bool:
        return self.kind.lossy == "depends" or self.kind.base in DEPENDS

    @cached_property
    def ends(self) -> dict[str, int]:
        """By talk how many of its tokens its lives go through."""
        ends: dict[str, int] = {}
        for life in self.lives:
            for fed in Walk(life.plan, self.talks.tokens).calls() if life.plan else ():
                ends[fed.talk] = max(ends.get(fed.talk, 0), fed.end)
        return ends

    @cached_property
    def ways(self) -> dict[tuple[str, tuple[int, ...]], Plan]:
        """By talk and calls the plan of a fresh cache fed so, where that decides."""
        made = [life.plan for life in self.lives if life.plan is not None]
        return twins(made, self.talks.tokens, self.talks.rows) if self.depends else {}

    @cached_property
    def straights(self) -> list[Plan]:
        """A lossy cache fed straight, as far as its lives go: by talk, `straight-<talk>`."""
        if not self.kind.lossy:
            return []
        tokens, rows = self.talks.tokens, self.talks.rows
        made = []
        for talk, end in self.ends.items():
            kept = rows[talk]
            some = kept if isinstance(kept, str) else tuple(at for at in kept if at < end)
            sizes = self._straight_sizes(talk, end)
            made.append(straight(f"straight-{talk}", tokens[talk][:end], sizes, some))
        return made

    def _straight_sizes(self, talk: str, end: int) -> list[int]:
        if self.kind.lossy == "window":
            return [1] * end
        prompt = 250 if talk == "long" else len(self.talks.setting.first)
        return [prompt, *[1] * (end - prompt)]

    def measure(
        self,
        traces: Mapping[str, Trace],
        dithered: Sequence[Mapping[str, Trace]],
        truths: Mapping[str, Talk],
    ) -> Straight | None:
        """The cache's own rows and noise, from runs by their plans' names."""
        if not self.kind.lossy:
            return None
        rows, own = {}, 0.0
        for plan in self.straights:
            talk = plan.name.removeprefix("straight-")
            runs = [rows_of(some[plan.name], truths[talk]) for some in (traces, *dithered)]
            there = np.isfinite(runs[0]).all(axis=1)
            rows[talk] = runs[0]
            if there.any():  # a cache whose calls all fail has no rows, and says why in its lives
                own = max(own, noise([run[there] for run in runs], truths[talk].floor[there]))
        if not self.depends:
            return Straight(rows, own)
        kept = {plan.name: plan for plan in self.ways.values()}
        talk_of = {plan.name: talk for (talk, _), plan in self.ways.items()}
        fed = {name: rows_of(traces[name], truths[talk_of[name]]) for name in kept}
        return Straight(rows, own, {way: fed[plan.name] for way, plan in self.ways.items()})

    def _otherwise(self, parts: Sequence[Part | None]) -> bool:
        """Whether all that is wrong was fed in other calls than a straight cache is."""
        wrong = [p for p in parts if p is not None and p.behaviour == WRONG]
        return bool(wrong) and all(
            p.apart is not None
            and np.isfinite(p.apart)
            and list(p.fed.sizes)
            != self._straight_sizes(p.fed.talk, self.ends[p.fed.talk])[: len(p.fed.sizes)]
            for p in wrong
        )

    def judge(
        self,
        traces: Mapping[str, Trace],
        truths: Mapping[str, Talk],
        own: Straight | None,
    ) -> list[Came]:
        """What came of every life, from runs by their plans' names, and of what it says."""
        tokens = self.talks.tokens
        found, said = [], Said(self.kind, self.window)
        for life in self.lives:
            if life.plan is None:
                found.append(Came(life.name, NO, reason=life.words))
                continue
            trace = traces[life.plan.name]
            failed = {i for i, outcome in enumerate(trace.meta.outcomes) if outcome.error}
            walk = Walk(trace.meta.plan, tokens, failed=failed)
            parts = [_part(fed, trace, truths[fed.talk], own) for fed in walk.calls()]
            made = _came(life, trace, [part for part in parts if part is not None])
            found.append(replace(made, otherwise=self._otherwise(parts)))
            said.hear(life.name, trace, walk.lengths())
        wanted = [name for name in FACTS if not self.only or name in self.only]
        return found + [said.came(name) for name in wanted]


def _part(fed: Fed, trace: Trace, talk: Talk, own: Straight | None) -> Part | None:
    """One row of one call; None where no row of it is known."""
    outcome, plan = trace.meta.outcomes[fed.step], trace.meta.plan
    expected = list(plan.kept_of(fed.start, fed.sizes[-1]))
    rows = _rows(fed, trace)
    if len(rows) != len(expected):
        said = f"{len(rows)} rows, expected {len(expected)}"
        return Part(fed, WRONG, np.inf, None, len(rows), outcome.error or said)
    known = talk.known(fed.start, fed.end)
    there = [i for i, at in enumerate(expected) if at in known]
    if not there:
        return None
    at = talk.at([expected[i] for i in there])
    rows = rows[there]
    sigmas = centred(rows, talk.rows[at]) / talk.floor[at]
    worst, sigma = float(sigmas.max()), float(np.sqrt(np.mean(sigmas * sigmas)))
    if sigma <= SIGMA and worst <= WORST:
        return Part(fed, RIGHT, worst, None, len(rows))
    if own is None:
        return Part(fed, WRONG, worst, None, len(rows))
    if own.ways is not None and fed.plain and np.isfinite(worst):
        return Part(fed, UNSEEN, worst, None, len(rows))
    straight = own.rows[fed.talk] if own.ways is None else own.ways[fed.talk, fed.sizes]
    apart = float(centred(rows, straight[at]).max()) / own.noise
    free = own.ways is not None and (fed.cut or fed.rows > 1)
    beyond: Behaviour = UNSEEN if free and np.isfinite(apart) else WRONG
    return Part(fed, LOSSY if apart <= OWN_NOISE else beyond, worst, apart, len(rows))


def _rows(fed: Fed, trace: Trace) -> Any:
    """The rows of a call, (L, V), without those of its padding."""
    of_call = trace.arrays["steps"] == fed.step
    if "batch" in trace.arrays:
        of_call = of_call & (trace.arrays["batch"] == fed.row)
    return trace.logits[np.flatnonzero(of_call)][fed.left :]


def _came(life: Life, trace: Trace, parts: Sequence[Part]) -> Came:
    failed = [one for one in trace.meta.outcomes if one.error]
    found: set[Behaviour] = {part.behaviour for part in parts}
    found |= {NO if one.kind == NO else REFUSED for one in failed}
    behaviour = next((b for b in WORST_FIRST if b in found), UNSEEN)
    first = next((part for part in parts if part.behaviour == WRONG), None)
    return Came(
        life=life.name,
        behaviour=behaviour,
        worst=max((p.worst for p in parts if p.worst is not None), default=None),
        apart=max((p.apart for p in parts if p.apart is not None), default=None),
        rows=sum(part.rows for part in parts),
        where=_where(first, trace.meta.plan) if first is not None else "",
        errors=tuple(dict.fromkeys(one.error or "" for one in failed)),
    )


def _where(part: Part, plan: Plan) -> str:
    """The call of a part, in words."""
    fed, step = part.fed, plan.steps[part.fed.step]
    assert isinstance(step, Call)
    before = next(
        (
            type(s).__name__.lower()
            for s in plan.steps[fed.step - 1 :: -1]
            if not isinstance(s, Call)
        ),
        "new",
    )
    of = f", row {fed.row} of {len(step.batch)}" if len(step.batch) > 1 else ""
    calls = f"{fed.sizes[-1]} token{'s' * (fed.sizes[-1] != 1)} after {fed.start}"
    more = f" ({part.error})" if part.error else ""
    return f"step {fed.step}, {calls} in cache {step.cache}{of}, after `{before}`{more}"


@dataclass
class Said:
    """What a cache says of itself at the end of its lives: its length and its bytes."""

    kind: Kind
    window: int | None
    wrong: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in FACTS})
    heard: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FACTS, 0))

    def hear(self, life: str, trace: Trace, lengths: Mapping[str, int]) -> None:
        facts: Mapping[str, Any] = trace.meta.environment.get("caches", {})
        for name, length in lengths.items():
            if name not in facts:
                continue
            says = facts[name]
            self._length(life, says, length)
            self._bytes(life, says)

    def _length(self, life: str, says: Mapping[str, Any], length: int) -> None:
        said, rows, size = says.get("length"), says.get("rows"), says.get("size")
        window = self.kind.lossy == "window"
        self.heard["lengths"] += said is not None or size is not None
        # Of a batch with a window the size is what can be asked for.
        if said is not None and said not in (length, min(length, self.window or length)):
            self.wrong["lengths"].append(f"{life}: says {said} after {length} tokens")
        elif rows is not None and (rows > length if window else rows != length):
            self.wrong["lengths"].append(f"{life}: {rows} rows for {length} tokens")
        elif size is not None and (size > length if window else size != length):
            self.wrong["lengths"].append(f"{life}: size() is {size} after {length} tokens")

    def _bytes(self, life: str, says: Mapping[str, Any]) -> None:
        said, allocated = says.get("nbytes"), says.get("allocated")
        if said is None or allocated is None:
            return
        self.heard["bytes"] += 1
        if abs(said - allocated) > SPARE:
            self.wrong["bytes"].append(f"{life}: says {said:,} bytes, {allocated:,} are allocated")

    def came(self, name: str) -> Came:
        wrong = self.wrong[name]
        if wrong:
            more = f", and in {len(wrong) - 1} more lives" if len(wrong) > 1 else ""
            return Came(name, WRONG, where=f"{wrong[0]}{more}")
        if not self.heard[name]:
            return Came(name, NO, reason="it does not say")
        return Came(name, RIGHT)


def judged(came: Sequence[Came]) -> Iterator[Came]:
    """Those that are silently wrong."""
    return (one for one in came if one.behaviour == WRONG)

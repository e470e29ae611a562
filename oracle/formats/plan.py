"""A plan: which tokens go through which named cache, in which calls.

A plan holds token ids only, so an engine that runs one needs no tokenizer. Every experiment of the
project (cached decoding, whole and chunked prefill, growing prefixes, each misuse of a cache) is a
list of these steps, and one runner per engine follows them all. This module knows no engine and no
numbers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import msgspec

from oracle.formats import strict_json
from oracle.formats.errors import Refusal, brief

FORMAT = "mlxkv-plan/1"
REMEDY = "make it again with this version"
Advance = Literal["right", "zero", "by_calls"]
Rows = Literal["all", "last"]
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

PREFIXES_MOST = 32_768
"""Tokens that the growing prefixes may feed in all: at 150 a second, as two cores do in float32,
under four minutes."""

Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""A token id, a position or a length."""
Tokens = Annotated[tuple[Whole, ...], msgspec.Meta(min_length=1)]


class _Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag=str.lower):
    """In JSON an object whose `do` is the name of its class in lower case."""


class New(_Step, frozen=True):
    """A fresh cache under this name; an older one of the same name is dropped."""

    cache: str
    use_kv_cache: bool = True


class Call(_Step, frozen=True):
    """One forward call of `tokens`. `index_pos` None leaves the position to the cache."""

    cache: str
    tokens: Tokens
    index_pos: Whole | None = None


class Greedy(_Step, frozen=True):
    """`n` greedy tokens after `tokens`; ties take the lowest id; the last token chosen is not fed.

    `advance` says what the caller does to index_pos after a call: `right` adds the tokens fed,
    `zero` leaves it where it was, `by_calls` adds one whatever was fed.
    """

    cache: str
    tokens: Tokens
    index_pos: Whole | None
    n: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    advance: Advance = "right"


class Clone(_Step, frozen=True, rename={"source": "from", "target": "to"}):
    """`target` becomes an independent copy of `source`."""

    source: str
    target: str


class Crop(_Step, frozen=True):
    """The cache keeps its first `length` tokens."""

    cache: str
    length: Whole


class Reset(_Step, frozen=True):
    """The cache is empty again."""

    cache: str


Step = New | Call | Greedy | Clone | Crop | Reset


class _Fields(TypedDict):
    """What a plan consists of, for `typed`."""

    name: str
    rows: Rows
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Feed:
    """A step that feeds tokens, by its number, and how many its cache `held` before it.

    A cache without storage (`keeps` false) holds none, whatever is fed.
    """

    index: int
    step: Call | Greedy
    held: int
    keeps: bool

    @property
    def start(self) -> int:
        """The position of the first token: as the step says, or else after those held."""
        return self.held if self.step.index_pos is None else self.step.index_pos

    @property
    def fed(self) -> int:
        """How many tokens go in; of a greedy step's own all but the last."""
        return len(self.step.tokens) + (self.step.n - 1 if isinstance(self.step, Greedy) else 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """A named list of steps. Values that no engine could follow are refused here, by their step.

    `rows` says which logits of a call are kept: those of all its positions, or the last.
    """

    name: str
    steps: tuple[Step, ...]
    rows: Rows = "all"

    def __post_init__(self) -> None:
        where = f"plan {brief(self.name)}"
        values = {"name": self.name, "rows": self.rows, "steps": self.steps}
        plain = msgspec.to_builtins(values, enc_hook=repr)
        # What is right is kept as it was read: a list of steps or tokens becomes a tuple.
        found = strict_json.typed(plain, _Fields, where=where, remedy=REMEDY)
        object.__setattr__(self, "steps", found["steps"])
        if not _NAME.fullmatch(self.name):
            expected = "expected 1 to 100 letters, digits and _ . -"
            raise Refusal(f"its name becomes a file's, {expected}", where=where, remedy="rename it")
        _check_caches(self.steps, where)

    @property
    def digest(self) -> str:
        """sha256 of the steps; name and `rows` do not change what is computed."""
        return hashlib.sha256(strict_json.encode(self.to_json()["steps"]).encode()).hexdigest()

    @property
    def longest(self) -> int:
        """The most tokens that any cache or single call of the plan takes up."""
        return max((call.held + call.fed for call in self.calls()), default=0)

    def calls(self, *, without: Collection[int] = ()) -> Iterator[Feed]:
        """The steps that feed tokens, in order, but those numbered in `without`, which failed."""
        held: dict[str, int] = {}
        keeps: dict[str, bool] = {}
        for i, step in enumerate(self.steps):
            match step:
                case _ if i in without:
                    pass
                case New(cache, use_kv_cache):
                    held[cache], keeps[cache] = 0, use_kv_cache
                case Call(cache) | Greedy(cache):
                    feed = Feed(i, step, held.get(cache, 0), keeps.get(cache, True))
                    yield feed
                    held[cache] = feed.held + feed.fed if feed.keeps else 0
                case Clone(source, target):
                    held[target], keeps[target] = held.get(source, 0), keeps.get(source, True)
                case Crop(cache, length):
                    held[cache] = min(length, held.get(cache, 0))
                case Reset(cache):
                    held[cache] = 0

    def to_json(self) -> dict[str, Any]:
        steps = json.loads(msgspec.json.encode(self.steps))
        return {"format": FORMAT, "name": self.name, "rows": self.rows, "steps": steps}


def from_json(value: Any, *, where: object = "plan") -> Plan:
    """A plan from decoded JSON, or a Refusal that names the step and the key."""
    given = strict_json.of_format(value, FORMAT, where=where, remedy=REMEDY)
    return strict_json.typed(given, Plan, where=where, remedy=REMEDY)


def read(path: Path) -> Plan:
    return from_json(strict_json.read(path, remedy="check the path or write it again"), where=path)


def judged_plans(
    tokens: list[int], *, prompt: int, chunks: list[int] | None = None
) -> dict[str, Plan]:
    """The plans that a comparison judges, over `tokens` of which the first `prompt` are the prompt.

    full: one call. step: the prompt, then single tokens. prefixes: no cache, the growing prefix
    from the prompt on; left out if that is more than PREFIXES_MOST tokens. chunked: the prompt in
    `chunks` (default: ceil(0.6 prompt) and the rest), then single tokens; left out for a prompt of
    one token, which cannot be split.
    """
    if not 1 <= prompt <= len(tokens):
        expected = f"expected 1 to {len(tokens)} (the length of the sequence)"
        raise Refusal(f"the prompt has {prompt} tokens, {expected}", where="plan")
    ids = tuple(tokens)
    first = min(-(-3 * prompt // 5), max(1, prompt - 1))
    sizes = chunks if chunks is not None else [first, prompt - first]
    if chunks is not None and (sum(sizes) != prompt or min(sizes) < 1):
        what = f"chunks {','.join(map(str, sizes))} do not add up to the prompt's {prompt} tokens"
        raise Refusal(what, where="plan", remedy="give positive sizes that do")
    singles = [1] * (len(ids) - prompt)
    plans = {
        "full": Plan("full", (New("a"), Call("a", ids, 0))),
        "step": Plan("step", (New("a"), *_calls(ids, [prompt, *singles]))),
    }
    if prefixes_feed(len(ids), prompt) <= PREFIXES_MOST:
        plans["prefixes"] = Plan("prefixes", growing_prefixes(ids, prompt), "last")
    if prompt > 1:
        plans["chunked"] = Plan("chunked", (New("a"), *_calls(ids, [*sizes, *singles])))
    return plans


def prefixes_feed(length: int, prompt: int) -> int:
    """How many tokens the growing prefixes feed in all, from the prompt to the whole."""
    return (length + prompt) * (length - prompt + 1) // 2


def growing_prefixes(ids: tuple[int, ...], prompt: int) -> tuple[Step, ...]:
    """The prompt, then one token more at each call, every time from nothing."""
    new = New("a", use_kv_cache=False)
    return tuple(s for end in range(prompt, len(ids) + 1) for s in (new, Call("a", ids[:end], 0)))


def _calls(ids: tuple[int, ...], sizes: list[int]) -> tuple[Call, ...]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(Call("a", ids[s : s + n], s) for s, n in zip(starts, sizes, strict=True))


def _check_caches(steps: tuple[Step, ...], where: str) -> None:
    """Refuses caches of odd names, and steps on one that no step before has made."""
    alive: set[str] = set()
    for i, step in enumerate(steps):
        reads, makes = (
            (step.source, step.target)
            if isinstance(step, Clone)
            else (None if isinstance(step, New) else step.cache, step.cache)
        )
        for name in (reads, makes):
            if name is not None and not (name.isidentifier() and len(name) <= 100):
                what = f"steps[{i}]: cache is {brief(name)}, expected letters, digits and _"
                raise Refusal(what, where=where, remedy="rename it")
        if reads is not None and reads not in alive:
            what = f"steps[{i}]: cache {reads!r} does not exist yet"
            raise Refusal(what, where=where, remedy="add a `new` step before it")
        alive.add(makes)

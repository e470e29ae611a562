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
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import msgspec

from oracle.formats import rows as sample
from oracle.formats import strict_json
from oracle.formats.errors import Inexpressible, Refusal, brief

FORMAT = "mlxkv-plan/2"
_OLD = "mlxkv-plan/1"  # which has no batches, and no `rows` but "all" and "last"; it is still read
REMEDY = "make it again with this version"
Advance = Literal["right", "zero", "by_calls"]
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

PREFIXES_MOST = 32_768
"""Tokens that the growing prefixes may feed in all: at 150 a second, as two cores do in float32,
under four minutes."""
PROBE_LENGTH = 300
"""Tokens of the probe: beyond the block of 256 rows in which caches grow, and beyond eight bits."""
JUDGED = ("full", "step", "prefixes", "chunked", "mixed")
"""The judged plans, in the order in which they are made and shown."""
WITHOUT_REFERENCE = ("prefixes", "mixed")
"""The judged plans that transformers does not follow: the truth and the floors, by position, are
what they are judged by."""
_FEW = 3
"""The growing prefixes that are followed in float64."""
MIXED_LEAST = 5
"""Tokens that the plan `mixed` needs: a single one, and two chunks after it."""

Whole = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""A token id, a position or a length."""
Ids = tuple[int, ...]
_Ids = Annotated[tuple[Whole, ...], msgspec.Meta(min_length=1)]
Rows = Literal["all", "last"] | _Ids
"""Which logits of each call are kept: of all its positions, of the last, or of those that lie at
these positions, in rising order."""
if TYPE_CHECKING:
    Tokens = Ids | tuple[Ids, ...]
else:  # msgspec knows no union of two arrays; that they are not mixed, `_check_batches` sees
    Tokens = Annotated[tuple[Whole | _Ids, ...], msgspec.Meta(min_length=1)]


class _Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", tag=str.lower):
    """In JSON an object whose `do` is the name of its class in lower case."""


class New(_Step, frozen=True):
    """A fresh cache under this name; an older one of the same name is dropped."""

    cache: str
    use_kv_cache: bool = True


class Call(_Step, frozen=True):
    """One forward call of `tokens`: ids, or a batch of rows of ids, all of one length.

    `index_pos` None leaves the position to the cache.
    """

    cache: str
    tokens: Tokens
    index_pos: Whole | None = None

    @property
    def batched(self) -> bool:
        """Whether the tokens are a batch, be it of one row."""
        return not isinstance(self.tokens[0], int)

    @property
    def batch(self) -> tuple[Ids, ...]:
        """The tokens of each row; a call that is no batch has one."""
        return self.tokens if self.batched else (self.tokens,)  # type: ignore[return-value]


class Greedy(_Step, frozen=True):
    """`n` greedy tokens after `tokens`; ties take the lowest id; the last token chosen is not fed.

    `advance` says what the caller does to index_pos after a call: `right` adds the tokens fed,
    `zero` leaves it where it was, `by_calls` adds one whatever was fed.
    """

    cache: str
    tokens: _Ids
    index_pos: Whole | None
    n: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    advance: Advance = "right"

    @property
    def batch(self) -> tuple[Ids, ...]:
        """The tokens given, as the one row that they are."""
        return (self.tokens,)


class Clone(_Step, frozen=True, rename={"source": "from", "target": "to"}):
    """`target` becomes an independent copy of `source`."""

    source: str
    target: str


class Crop(_Step, frozen=True):
    """The cache keeps its first `length` tokens."""

    cache: str
    length: Whole


class Trim(_Step, frozen=True):
    """The cache is asked to drop its last `tokens` tokens, be it as many or not."""

    cache: str
    tokens: Whole


class Reset(_Step, frozen=True):
    """The cache is empty again."""

    cache: str


class Pad(_Step, frozen=True):
    """The next call's rows, a batch on an empty cache, begin with so many tokens of padding each.

    A padded row's own tokens count from 0, and nothing sees its padding.
    """

    cache: str
    left: tuple[Whole, ...]


class Reload(_Step, frozen=True):
    """The cache is saved to a file, and what is read from it takes its place."""

    cache: str


class Recall(_Step, frozen=True, rename={"source": "from", "target": "to"}):
    """A store of caches, which has `source`, gives what serves a sequence that begins as its first
    `length` tokens do: `target`. `source` stays as it is.
    """

    source: str
    target: str
    length: Whole


class Fail(_Step, frozen=True):
    """A call of `tokens` that is broken off half way through the layers, as by an interrupt.

    What the cache holds is to be what it held before.
    """

    cache: str
    tokens: _Ids


Step = New | Call | Greedy | Clone | Crop | Trim | Reset | Pad | Reload | Recall | Fail


def needed(step: Step) -> str | None:
    """The cache that a step needs to be there; None for one that makes it from nothing."""
    if isinstance(step, New):
        return None
    return step.source if isinstance(step, Clone | Recall) else step.cache


def require(step: Step, there: Collection[str]) -> None:
    """Refuses a step on a cache that is not there, as the one that was to make it failed."""
    if (name := needed(step)) is not None and name not in there:
        raise Inexpressible(f"cache {name} is not there, as the step that makes it failed")


class _Fields(TypedDict):
    """What a plan consists of, for `typed`."""

    name: str
    rows: Rows
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Feed:
    """A step that feeds tokens, by its number, and how many its cache `held` before it.

    A cache without storage (`keeps` false) holds none, whatever is fed. Of a batch every count is
    that of one row.
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
    def batch(self) -> tuple[Ids, ...]:
        """The tokens given, row by row; one row where the step is no batch."""
        return self.step.batch

    @property
    def width(self) -> int:
        """How many tokens are given."""
        return len(self.batch[0])

    @property
    def fed(self) -> int:
        """How many tokens go in; of a greedy step's own all but the last."""
        return self.width + (self.step.n - 1 if isinstance(self.step, Greedy) else 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """A named list of steps. Values that no engine could follow are refused here, by their step.

    `rows` says which logits of a call are kept: those of all its positions, of its last, or of
    those named. Keys and values are kept of all.
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
        object.__setattr__(self, "rows", found["rows"])
        if not _NAME.fullmatch(self.name):
            expected = "expected 1 to 100 letters, digits and _ . -"
            raise Refusal(f"its name becomes a file's, {expected}", where=where, remedy="rename it")
        _check_caches(self.steps, where)
        _check_batches(self.steps, where)
        self._check_rows(where)

    @property
    def digest(self) -> str:
        """sha256 of the steps, and of `rows` where it names positions.

        The name changes nothing that is computed. Neither do the other `rows`, and a trace that
        keeps more rows than were asked for is as good.
        """
        value = self.to_json()
        of = value["steps"] if isinstance(self.rows, str) else [value["rows"], value["steps"]]
        return hashlib.sha256(strict_json.encode(of).encode()).hexdigest()

    @property
    def batched(self) -> bool:
        """Whether any call is a batch, so that a row of a trace must say of which row it is."""
        return any(isinstance(step, Call) and step.batched for step in self.steps)

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
                case Trim(cache, tokens):
                    held[cache] = max(0, held.get(cache, 0) - tokens)
                case Recall(source, target, length):
                    held[target] = min(length, held.get(source, 0))
                    keeps[target] = keeps.get(source, True)
                case Reset(cache):
                    held[cache] = 0

    def kept(self, feed: Feed) -> tuple[int, ...]:
        """The positions whose logits a step that feeds tokens leaves, of every row of a batch."""
        calls = [(feed.held, feed.width)]
        ends = range(feed.held + feed.width, feed.held + feed.fed)
        calls += [(end if feed.keeps else 0, 1) for end in ends]
        return tuple(p for held, width in calls for p in self.kept_of(held, width))

    def kept_of(self, held: int, width: int) -> Sequence[int]:
        """The positions whose logits are kept of one forward call of `width` tokens after `held`.

        A runner asks by what its cache really holds, since a step before may have failed.
        """
        if isinstance(self.rows, str):
            return range(held if self.rows == "all" else held + width - 1, held + width)
        return self.rows[bisect_left(self.rows, held) : bisect_left(self.rows, held + width)]

    def _check_rows(self, where: str) -> None:
        """Refuses positions that are out of order, that no call has, or beside a greedy step."""
        rows = self.rows
        if isinstance(rows, str):
            return
        what = None
        if sorted(set(rows)) != list(rows):
            what = "are not in rising order, each once"
        elif any(isinstance(step, Greedy) for step in self.steps):
            what = "are positions beside a greedy step, which needs the last of each call"
        elif foreign := set(rows).difference(*map(self.kept, self.calls())):
            what = f"hold {min(foreign)}, which no call of the plan reaches"
        if what:
            raise Refusal(f"rows {what}", where=where, remedy="name positions that it feeds")

    def to_json(self) -> dict[str, Any]:
        steps = json.loads(msgspec.json.encode(self.steps))
        rows = self.rows if isinstance(self.rows, str) else list(self.rows)
        return {"format": FORMAT, "name": self.name, "rows": rows, "steps": steps}


def from_json(value: Any, *, where: object = "plan") -> Plan:
    """A plan from decoded JSON, or a Refusal that names the step and the key."""
    old = isinstance(value, dict) and value.get("format") == _OLD
    expected = _OLD if old else FORMAT
    given = strict_json.of_format(value, expected, where=where, remedy=REMEDY)
    plan = strict_json.typed(given, Plan, where=where, remedy=REMEDY)
    if old and (plan.batched or not isinstance(plan.rows, str)):
        has = "batches" if plan.batched else "rows named by their positions"
        what = f"format is {_OLD!r}, expected {FORMAT!r} for a plan with {has}"
        raise Refusal(what, where=where, remedy=REMEDY)
    return plan


def read(path: Path) -> Plan:
    return from_json(strict_json.read(path, remedy="check the path or write it again"), where=path)


def judged_plans(
    tokens: Sequence[int],
    *,
    prompt: int,
    chunks: list[int] | None = None,
    original: int | None = None,
    all_rows: bool = False,
) -> dict[str, Plan]:
    """The plans that a comparison judges, over `tokens` of which the first `prompt` are the prompt.

    full: one call. step: the prompt, then single tokens. prefixes: no cache, the growing prefix
    from the prompt on. chunked: the prompt in `chunks` (default: ceil(0.6 prompt) and the rest),
    then single tokens. mixed: chunks longer than what is held, and after single tokens, to the end.
    Those of `left_out` are not among them; `original` is as there. All but the prefixes keep the
    same rows: of a long sequence a sample (`oracle.formats.rows`), unless `all_rows`.
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
    singles, n = [1] * (len(ids) - prompt), len(ids)
    calls = {"full": [n], "step": [prompt, *singles], "chunked": [*sizes, *singles]}
    calls["mixed"] = mixed_sizes(n)
    without = left_out(n, prompt=prompt, original=original)
    calls = {name: sizes for name, sizes in calls.items() if name not in without}
    rows = sample.kept(n, prompt, calls.values(), all_rows=all_rows)
    plans = {name: in_calls(name, ids, sizes, rows) for name, sizes in calls.items()}
    if "prefixes" not in without:
        plans["prefixes"] = Plan("prefixes", growing_prefixes(ids, prompt), "last")
    return {name: plans[name] for name in JUDGED if name in plans}


def prompt_calls(plan: Plan, length: int, prompt: int) -> list[int]:
    """The sizes of a plan's calls but the singles after the prompt, over `length` tokens."""
    sizes = [call.fed for call in plan.calls()]
    return sizes[: len(sizes) - (length - prompt)]


def left_out(length: int, *, prompt: int, original: int | None = None) -> dict[str, str]:
    """The judged plans that a sequence cannot have, and why not.

    `original` is the length beyond which a model has other RoPE factors (longrope; None: no such
    length): transformers takes those of each call, so that a cache may not be filled on both sides.
    """
    reasons = {}
    if (feed := prefixes_feed(length, prompt)) > PREFIXES_MOST:
        reasons["prefixes"] = f"it would feed {feed} tokens, at most {PREFIXES_MOST} are fed"
    if prompt < 2:
        reasons["chunked"] = "a prompt of one token cannot be split"
    if length < MIXED_LEAST:
        reasons["mixed"] = f"{length} tokens are too few for a chunk after a single one"
    elif original is not None and original < length:
        reasons["mixed"] = f"it would fill a cache on both sides of {original} (longrope)"
    return reasons


def mixed_sizes(n: int) -> list[int]:
    """The calls of the plan `mixed`, in tokens, of a sequence of n.

    It has what the other plans lack: a chunk longer than what is held, several tokens after single
    ones, and a third chunk. A long sequence has one more chunk after a single, with much held.
    """
    if n < 8:
        return [1, 2, n - 3]
    if n < 19:
        return [2, 3, 1, n - 6]
    sizes = [2, 6, 1, 1, 1, 3, 2, 1]
    rest = n - sum(sizes)
    return [*sizes, rest] if rest < 17 else [*sizes, rest - rest // 3 - 1, 1, rest // 3]


def prefixes_feed(length: int, prompt: int) -> int:
    """How many tokens the growing prefixes feed in all, from the prompt to the whole."""
    return (length + prompt) * (length - prompt + 1) // 2


def growing_prefixes(ids: tuple[int, ...], prompt: int) -> tuple[Step, ...]:
    """The prompt, then one token more at each call, every time from nothing."""
    new = New("a", use_kv_cache=False)
    return tuple(s for end in range(prompt, len(ids) + 1) for s in (new, Call("a", ids[:end], 0)))


def fewer_prefixes(plan: Plan) -> Plan:
    """A plan of growing prefixes with three of them left, the first, the middle and the last; any
    other plan as it is.

    Where there is no noise, what three lengths show from nothing the others do not add to.
    """
    calls = list(plan.calls())
    if len(calls) <= _FEW or any(call.keeps for call in calls):
        return plan
    kept = [calls[0].step, calls[len(calls) // 2].step, calls[-1].step]
    new = next(step for step in plan.steps if isinstance(step, New))
    return Plan(plan.name, tuple(step for call in kept for step in (new, call)), plan.rows)


def in_calls(name: str, ids: Ids, sizes: Sequence[int], rows: Rows = "all") -> Plan:
    """A plan that feeds `ids` into one new cache in calls of these sizes."""
    ends = accumulate(sizes)
    calls = (Call("a", ids[end - n : end], end - n) for end, n in zip(ends, sizes, strict=True))
    return Plan(name, (New("a"), *calls), rows)


def probe_tokens(vocab_size: int, context: int) -> Ids:
    """The probe's ids, PROBE_LENGTH of them or as many as the context has.

    A fixed function of both sizes. They span the vocabulary: one of each of as many equal parts, 0
    and the last id among them, in no order. A vocabulary of fewer ids has each several times.
    """
    n = min(PROBE_LENGTH, context)
    mixed = [i * 2_654_435_761 % 2**32 for i in range(n)]  # Knuth's multiplicative hash
    ids = []
    for i, chance in enumerate(mixed):
        first, after = i * vocab_size // n, (i + 1) * vocab_size // n
        last = vocab_size - 1 if i == n - 1 else first + (chance >> 8) % max(1, after - first)
        ids.append(last if i else 0)
    return tuple(ids[i] for i in sorted(range(n), key=mixed.__getitem__))


def probe_sizes(n: int) -> list[int]:
    """The calls of the probe's plan `chunked`: of 300 tokens 250, ten singles, and the rest."""
    first = max(1, 5 * n // 6)
    singles = min(max(1, n // 30), n - first)
    sizes = [first, *[1] * singles, n - first - singles]
    return [size for size in sizes if size > 0]


def probe_rows(n: int) -> Ids:
    """The positions of n whose logits the probe keeps, 57 of 300.

    Where a cache begins, grows (powers of two) and is fed in another way, its end, and a ladder.
    """
    sizes = probe_sizes(n)
    edges = {edge + near for edge in (32, 64, 128, 256) for near in (-1, 0, 1)}
    ladder = {round(8 * 1.15**i) for i in range(27)}
    fed = range(sizes[0] - 1, sizes[0] + len(sizes) + 1)
    return tuple(sorted(p for p in {*range(8), *edges, *ladder, *fed, n - 2, n - 1} if 0 <= p < n))


def probe_plans(tokens: Sequence[int]) -> dict[str, Plan]:
    """The plans of the probe over its tokens: full, and chunked as `probe_sizes` says."""
    ids, n = tuple(tokens), len(tokens)
    sizes = {"full": [n], "chunked": probe_sizes(n)}
    return {name: in_calls(name, ids, calls, probe_rows(n)) for name, calls in sizes.items()}


def _check_caches(steps: tuple[Step, ...], where: str) -> None:
    """Refuses caches of odd names, and steps on one that no step before has made."""
    alive: set[str] = set()
    for i, step in enumerate(steps):
        reads = needed(step)
        makes = step.target if isinstance(step, Clone | Recall) else step.cache
        for name in (reads, makes):
            if name is not None and not (name.isidentifier() and len(name) <= 100):
                what = f"steps[{i}]: cache is {brief(name)}, expected letters, digits and _"
                raise Refusal(what, where=where, remedy="rename it")
        if reads is not None and reads not in alive:
            what = f"steps[{i}]: cache {reads!r} does not exist yet"
            raise Refusal(what, where=where, remedy="add a `new` step before it")
        alive.add(makes)


def _check_batches(steps: tuple[Step, ...], where: str) -> None:
    """Refuses ragged batches, and a cache that is fed another number of rows than before."""
    holds: dict[str, int | None] = {}  # None: no batch
    for i, step in enumerate(steps):
        if isinstance(step, New | Reset):
            holds.pop(step.cache, None)
        elif isinstance(step, Clone | Recall):
            copied = {step.target: holds[step.source]} if step.source in holds else {}
            holds.pop(step.target, None)
            holds |= copied
        elif isinstance(step, Call | Greedy):
            has = _batch_of(step, f"{where}: steps[{i}]")
            was = holds.setdefault(step.cache, has)
            if was != has:
                said = ["no batch" if n is None else f"a batch of {n}" for n in (has, was)]
                what = f"steps[{i}]: is {said[0]}, expected {said[1]} as cache {step.cache!r} holds"
                raise Refusal(what, where=where, remedy="reset it before, or use another cache")


def _batch_of(step: Call | Greedy, where: str) -> int | None:
    """How many rows the step feeds; None where it is no batch."""
    kinds = {type(token) for token in step.tokens}
    if len(kinds) > 1:
        raise Refusal("tokens are ids and rows, expected one of them", where=where, remedy=REMEDY)
    if isinstance(step, Greedy) or not step.batched:
        return None
    if len(sizes := sorted({len(row) for row in step.batch})) > 1:
        what = f"tokens are rows of {sizes[0]} to {sizes[-1]} ids, expected one length"
        raise Refusal(what, where=where, remedy="a batch has no padding")
    return len(step.batch)

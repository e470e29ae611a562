"""What each call of a plan should be: which talk it continues, from where, and in which calls its
cache came to hold what it holds.

A talk is a sequence of tokens whose rows are known. Nobody writes down what a step was meant to be:
the tokens that a cache holds after it are the beginning of a talk, whatever was done to the cache
meanwhile, and a plan in which they are not says nothing there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from oracle.formats.plan import (
    Call,
    Clone,
    Crop,
    Fail,
    Ids,
    New,
    Pad,
    Plan,
    Recall,
    Reload,
    Reset,
    Rows,
    Step,
    Trim,
    in_calls,
    needed,
)

Sizes = tuple[int, ...]
"""The calls, in tokens, that made a cache hold what it holds."""


@dataclass(frozen=True, slots=True)
class Fed:
    """One row of one call: the tokens of `talk` from `start` to `end` went in, in the last of the
    calls `sizes`.

    `plain` says that the cache has been fed and nothing else, `cut` that it was cut back. The call
    has so many `rows`, and of this one `left` tokens are padding.
    """

    step: int
    row: int
    talk: str
    sizes: Sizes
    left: int = 0
    plain: bool = True
    cut: bool = False
    rows: int = 1

    @property
    def end(self) -> int:
        return sum(self.sizes)

    @property
    def start(self) -> int:
        return self.end - self.sizes[-1]


@dataclass(frozen=True, slots=True)
class _Row:
    tokens: Ids = ()
    sizes: Sizes = ()

    def fed(self, tokens: Ids) -> _Row:
        return _Row(self.tokens + tokens, (*self.sizes, len(tokens)))

    def cut(self, length: int) -> _Row:
        sizes = list(self.sizes)
        while sum(sizes) > length:
            over = sum(sizes) - length
            last = sizes.pop()
            sizes += [last - over] if last > over else []
        return _Row(self.tokens[:length], tuple(sizes))


@dataclass(frozen=True, slots=True)
class _Held:
    """What one cache holds: a row, or those of a batch; `left` is the padding of the next call."""

    rows: tuple[_Row, ...] = (_Row(),)
    left: tuple[int, ...] = ()
    padded: tuple[int, ...] = ()
    plain: bool = True
    was_cut: bool = False

    @property
    def length(self) -> int:
        """The tokens of the first row, its padding among them."""
        return len(self.rows[0].tokens) + (self.padded[0] if self.padded else 0)

    def cut(self, length: int) -> _Held:
        rows = tuple(row.cut(length) for row in self.rows)
        return replace(self, rows=rows, plain=False, was_cut=True)


class Walk:
    """Follows a plan's steps, but those numbered in `failed`, which changed nothing.

    A call that failed, or one that was broken off and could not be undone, leaves a cache of which
    nothing is known: it is in `lost` from then on.
    """

    def __init__(
        self, plan: Plan, talks: Mapping[str, Ids], *, failed: Collection[int] = ()
    ) -> None:
        self.plan, self.talks, self.failed = plan, talks, failed
        self.held: dict[str, _Held] = {}
        self.lost: set[str] = set()

    def calls(self) -> Iterator[Fed]:
        """Every row of every call that continues a talk."""
        for i, step in enumerate(self.plan.steps):
            if isinstance(step, Call):
                yield from self._call(i, step)
            elif i in self.failed or needed(step) not in (None, *self.held):
                self.lost |= {step.cache} if isinstance(step, Fail) else set()
            else:
                self._changed(step)

    def lengths(self) -> dict[str, int]:
        """How many tokens each cache holds in the end; of a padded batch the padding counts."""
        return {name: one.length for name, one in self.held.items() if name not in self.lost}

    def _call(self, i: int, step: Call) -> Iterator[Fed]:
        one = self.held.get(step.cache)
        if one is None:
            return
        left = one.left or (0,) * len(step.batch)
        rows = one.rows if any(row.tokens for row in one.rows) else (_Row(),) * len(step.batch)
        fed = [row.fed(tokens[n:]) for row, tokens, n in zip(rows, step.batch, left, strict=True)]
        if i in self.failed:
            self.lost.add(step.cache)
        elif step.cache not in self.lost:
            for r, (row, n) in enumerate(zip(fed, left, strict=True)):
                talk = self._talk(row.tokens)
                plain = one.plain and len(fed) == 1
                if talk is not None:
                    yield Fed(i, r, talk, row.sizes, n, plain, one.was_cut, len(fed))
        self.held[step.cache] = replace(
            one, rows=tuple(fed), left=(), padded=one.padded or one.left
        )

    def _talk(self, tokens: Ids) -> str | None:
        known = self.talks.items()
        return next((name for name, talk in known if talk[: len(tokens)] == tokens), None)

    def _changed(self, step: Step) -> None:
        held = self.held
        match step:
            case New(cache) | Reset(cache):
                held[cache] = _Held(plain=isinstance(step, New))
                self.lost.discard(cache)
            case Pad(cache, left):
                held[cache] = replace(held[cache], left=left)
            case Clone(source, target):
                held[target] = replace(held[source], plain=False)
                self._as(source, target)
            case Recall(source, target, length):
                held[target] = held[source].cut(length)
                self._as(source, target)
            case Crop(cache, length):
                held[cache] = held[cache].cut(length)
            case Trim(cache, tokens):
                held[cache] = held[cache].cut(max(0, held[cache].length - tokens))
            case Reload(cache) | Fail(cache):
                held[cache] = replace(held[cache], plain=False)

    def _as(self, source: str, target: str) -> None:
        (self.lost.add if source in self.lost else self.lost.discard)(target)


def twins(
    plans: Sequence[Plan], talks: Mapping[str, Ids], rows: Mapping[str, Rows]
) -> dict[tuple[str, Sizes], Plan]:
    """For each way in which some call of `plans` continues a talk the plan of a fresh cache that
    comes to the same in the same calls; one plan may serve many.

    `rows` are, by talk, those that a plan over it keeps.
    """
    ways = {(fed.talk, fed.sizes) for plan in plans for fed in Walk(plan, talks).calls()}
    longest = [
        (talk, sizes)
        for talk, sizes in sorted(ways)
        if not any(
            of == talk and len(other) > len(sizes) and other[: len(sizes)] == sizes
            for of, other in ways
        )
    ]
    found: dict[tuple[str, Sizes], Plan] = {}
    for i, (talk, sizes) in enumerate(longest):
        kept = rows[talk]
        if not isinstance(kept, str):
            kept = tuple(at for at in kept if at < sum(sizes)) or "last"
        plan = in_calls(f"twin{i}", talks[talk][: sum(sizes)], sizes, kept)
        found |= {(talk, sizes[:n]): plan for n in range(1, len(sizes) + 1)}
    return found

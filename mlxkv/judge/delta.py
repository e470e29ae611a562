"""Distances between two traces as people know them: the page's tables, and other tools' figures.

All in float64, a block of rows at a time. Everything here is shown and nothing is judged; what is
judged is in measure.py. "The page" is the article on KV caches whose experiments are repeated here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlxkv.judge.case import Case
from mlxkv.judge.measure import Floats, TruthRows, rows_of
from mlxkv.judge.walk import Block, Softmax, blocks, softmax, walk
from oracle.formats.errors import Refusal
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace

_PAGE_NAMES = {"step": "cached", "prefixes": "nocache"}

Key = tuple[Literal["ours", "theirs"], str]
"""A run in the page's tables: the engine that is judged, or transformers, and the plan."""

_CACHED: tuple[tuple[Key, Key], ...] = (
    (("theirs", "step"), ("theirs", "full")),
    (("ours", "step"), ("ours", "prefixes")),
    (("ours", "step"), ("ours", "full")),
    (("ours", "step"), ("theirs", "full")),
    (("ours", "prefixes"), ("theirs", "full")),
    (("ours", "full"), ("theirs", "full")),
    (("ours", "step"), ("theirs", "step")),
)
_CHUNKED: tuple[tuple[Key, Key], ...] = (
    (("theirs", "chunked"), ("theirs", "step")),
    (("ours", "chunked"), ("ours", "step")),
    (("ours", "chunked"), ("theirs", "full")),
    (("ours", "chunked"), ("theirs", "chunked")),
    (("ours", "mixed"), ("ours", "step")),
    (("ours", "mixed"), ("theirs", "full")),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What other tools report of a run against the truth, over all its rows.

    KL is in nats, the mean of the rows. `nmse_db` is minus infinity where nothing differs. What
    rounding alone would put beyond its range (a cosine above 1, a KL below 0) is at its end.
    """

    plan: str
    rows: int
    max_abs: float
    rms: float
    nmse_db: float
    cosine: float
    kl: float
    top1_equal: int
    top5_equal: int


@dataclass(frozen=True, slots=True)
class Run:
    """Whose trace: an engine and a plan, under the page's names."""

    engine: str
    plan: str

    @property
    def page_name(self) -> str:
        return _PAGE_NAMES.get(self.plan, self.plan)

    def __str__(self) -> str:
        return f"{self.engine} {self.page_name}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs over the same positions, as in the page's tables.

    `max_abs` is max |a - b| over all rows, `first_max` and `last_max` that of the first and of the
    last row, `max_abs_ref` is max |b|.
    """

    a: Run
    b: Run
    max_abs: float
    first_max: float
    last_max: float
    rms: float
    top1_equal: int
    rows: int
    max_abs_ref: float


@dataclass(frozen=True, slots=True)
class Tables:
    """The page's table 3 (cached against uncached) and table 4 (chunked prefill), to which the plan
    mixed is added.
    """

    cached: tuple[Pair, ...] = ()
    chunked: tuple[Pair, ...] = ()


def figures(
    a: Trace, b: Trace, rows: TruthRows, *, plan: str, positions: Sequence[int] | None = None
) -> Figures:
    """The figures of run `a`, named `plan`, with `b` in the truth's place, whose `rows` these are.

    Over `positions`, or all of a's; a Refusal where either lacks one of them.
    """
    positions = sorted(a.positions.tolist()) if positions is None else positions
    look = LookAtFigures(a, b, rows, positions)
    walk(b, [look])
    return look.found(plan)


class LookAtFigures:
    """The sums that the figures of a run are made of, over some positions."""

    def __init__(self, a: Trace, b: Trace, truth: TruthRows, positions: Sequence[int]) -> None:
        self.rows, self.runs = rows_of(b, positions), [(a, rows_of(a, positions))]
        self._truth, self._size = truth, len(positions) * a.logits.shape[1]
        self._squares = dict.fromkeys(("e", "t", "x", "xt"), 0.0)
        self._largest, self._kl, self._top1, self._top5 = [0.0], 0.0, 0, 0

    def see(self, block: Block, *runs: Array) -> None:
        x, t = runs[0].astype(np.float64), block.truth.astype(np.float64)
        e = x - t
        for name, (u, w) in {"e": (e, e), "t": (t, t), "x": (x, x), "xt": (x, t)}.items():
            self._squares[name] += float(np.einsum("rv,rv->", u, w))
        self._largest.append(float(np.abs(e).max()))
        self._kl += float(_divergence(block.softmax, e).sum())
        self._top1 += int((x.argmax(1) == self._truth.best[block.rows]).sum())
        self._top5 += _same_five(x, self._truth.five[block.rows])

    def found(self, plan: str) -> Figures:
        """Once all blocks were seen."""
        squares, count = self._squares, len(self.rows)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            norms = np.sqrt(squares["t"]) * np.sqrt(squares["x"])
            return Figures(
                plan=plan,
                rows=count,
                max_abs=float(np.max(self._largest)),
                rms=float(np.sqrt(squares["e"] / self._size)),
                nmse_db=float(10 * np.log10(np.divide(squares["e"], squares["t"]))),
                cosine=float(np.clip(np.divide(squares["xt"], norms), -1, 1)),
                kl=float(np.maximum(self._kl / count, 0)),
                top1_equal=self._top1,
                top5_equal=self._top5,
            )


def _same_five(x: Floats, five: Array) -> int:
    """In how many rows the truth's best five are the best five of x, ties allowed.

    They are if nothing else in the row lies above the least of them.
    """
    theirs = np.take_along_axis(x, five, 1)
    least = theirs.min(1, keepdims=True)
    return int(((x > least).sum(1) == (theirs > least).sum(1)).sum())


def pair(
    a: Trace, b: Trace, positions: Sequence[int], *, names: tuple[Run, Run] | None = None
) -> Pair:
    """`a` against `b` over `positions`, whose order says which row is the first and the last.

    Raises a Refusal where either lacks a position, or where their vocabularies differ.
    """
    if len(positions) == 0:
        raise Refusal("no positions to compare, expected one or more", where=a.label)
    vocab, expected = a.logits.shape[1], b.logits.shape[1]
    if vocab != expected:
        raise Refusal(f"vocabulary is {vocab}, expected {expected} as {b.label}", where=a.label)
    rows_a, rows_b = rows_of(a, positions), rows_of(b, positions)
    row_max, squares, equal, largest = np.empty(len(positions)), 0.0, 0, [0.0]
    with np.errstate(invalid="ignore", over="ignore"):
        for part in blocks(len(positions), vocab):
            x, y = a.logits[rows_a[part]], b.logits[rows_b[part]]
            d = np.subtract(x, y, dtype=np.float64)
            row_max[part] = np.maximum(d.max(1), -d.min(1))
            squares += float(np.einsum("rv,rv->", d, d))
            equal += int((x.argmax(1) == y.argmax(1)).sum())
            largest.append(float(np.maximum(y.max(), -y.min())))
    runs = names or (Run(a.meta.engine, a.meta.plan.name), Run(b.meta.engine, b.meta.plan.name))
    return Pair(
        *runs,
        max_abs=float(row_max.max()),
        first_max=float(row_max[0]),
        last_max=float(row_max[-1]),
        rms=float(np.sqrt(squares / (len(positions) * vocab))),
        top1_equal=equal,
        rows=len(positions),
        max_abs_ref=float(np.max(largest)),
    )


def page_tables(case: Case, candidates: Mapping[str, Trace]) -> Tables:
    """The page's tables 3 and 4 for whichever judged plans there are; `candidates` by plan."""
    there: dict[Key, Trace] = {("ours", plan): trace for plan, trace in candidates.items()}
    there |= {("theirs", plan): trace for plan, trace in case.references.items()}
    cached, chunked = (
        tuple(
            _named((there[a], a[1]), (there[b], b[1]), case)
            for a, b in wanted
            if a in there and b in there
        )
        for wanted in (_CACHED, _CHUNKED)
    )
    return Tables(cached, chunked)


def three_way(
    case: Case, ours: Mapping[str, Trace], third: Mapping[str, Trace]
) -> tuple[Pair, ...]:
    """For each plan that both hold: the third engine against ours, then each against transformers
    and against the truth.
    """
    pairs: list[Pair] = []
    truth = (case.truth, "full")
    for plan in (name for name in case.manifest.plans if name in ours and name in third):
        known = plan if plan in case.references else "full"
        theirs = (case.references[known], known)
        its, mine = (third[plan], plan), (ours[plan], plan)
        wanted = ((its, mine), (its, theirs), (mine, theirs), (its, truth), (mine, truth))
        pairs += [_named(a, b, case) for a, b in wanted]
    return tuple(pairs)


def _named(a: tuple[Trace, str], b: tuple[Trace, str], case: Case) -> Pair:
    """The pair of two traces over the rows shown, each under the plan that it is shown as."""
    names = (Run(a[0].meta.engine, a[1]), Run(b[0].meta.engine, b[1]))
    return pair(a[0], b[0], case.rows, names=names)


def divergence(t: Floats, e: Floats) -> Floats:
    """KL(softmax t || softmax(t + e)) per row.

    Accurate far below 1e-16, where a difference of two log-softmaxes is nothing but rounding.
    """
    return _divergence(softmax(t), e)


def _divergence(of: Softmax, e: Floats) -> Floats:
    e = e - np.einsum("rv,rv->r", of.p, e)[:, None]
    near = np.log1p(np.einsum("rv,rv->r", of.p, np.expm1(np.minimum(e, 1.0))))
    if e.max() <= 1.0:
        return np.asarray(near)
    shifted = of.z + e
    most = shifted.max(1)
    far = most + np.log(np.exp(shifted - most[:, None]).sum(1)) - np.log(of.total)
    return np.asarray(np.where(e.max(1) <= 1.0, near, far))

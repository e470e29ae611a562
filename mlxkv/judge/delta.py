"""Distances between two traces as people know them: the page's tables, and the figures of other tools.

All in float64, a block of rows at a time. Everything here is shown and nothing is judged; what is judged is in measure.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlxkv.judge.case import Case
from mlxkv.judge.measure import Array, Floats, TruthRows, blocks, in_order, rows_of, truth_rows
from oracle.formats.errors import Refusal
from oracle.formats.trace import Trace

_PAGE_NAMES = {"step": "cached", "prefixes": "nocache"}
_Key = tuple[str, str]
_CACHED: tuple[tuple[_Key, _Key], ...] = (
    (("theirs", "step"), ("theirs", "full")),
    (("ours", "step"), ("ours", "prefixes")),
    (("ours", "step"), ("ours", "full")),
    (("ours", "step"), ("theirs", "full")),
    (("ours", "prefixes"), ("theirs", "full")),
    (("ours", "full"), ("theirs", "full")),
    (("ours", "step"), ("theirs", "step")),
)
_CHUNKED: tuple[tuple[_Key, _Key], ...] = (
    (("theirs", "chunked"), ("theirs", "step")),
    (("ours", "chunked"), ("ours", "step")),
    (("ours", "chunked"), ("theirs", "full")),
    (("ours", "chunked"), ("theirs", "chunked")),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What other tools report, against the truth over all rows of a run. Shown, never judged. KL in nats, a row's mean."""

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

    def __str__(self) -> str:
        return f"{self.engine} {_PAGE_NAMES.get(self.plan, self.plan)}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs over the same positions, as in the page's tables: |a - b| over all rows, in the first and in the last."""

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
    """The page's table 3 (cached against uncached) and 4 (chunked prefill), within and across engines."""

    cached: tuple[Pair, ...] = ()
    chunked: tuple[Pair, ...] = ()


def figures(trace: Trace, truth: Trace, rows: TruthRows, *, plan: str) -> Figures:
    """The figures of other tools, in float64."""
    order, positions, _ = in_order(trace)
    return _figures(trace, truth, rows, plan=plan, order=order, positions=positions)


def beside(a: Trace, b: Trace, positions: Sequence[int]) -> Figures:
    """The same of any two runs over `positions`, b in the truth's place; a Refusal where either lacks one of them."""
    rows_a, rows_b = rows_of(a, positions), rows_of(b, positions)
    return _figures(a, b, truth_rows(b), plan=a.meta.plan.name, order=rows_a, positions=rows_b)


def _figures(
    trace: Trace, truth: Trace, rows: TruthRows, *, plan: str, order: Array, positions: Array
) -> Figures:
    """`order` are rows of the trace, `positions` those rows of the truth that stand beside them."""
    vocab = trace.logits.shape[1]
    squares = {"e": 0.0, "t": 0.0, "x": 0.0, "xt": 0.0}
    largest, kl, top1, top5 = [0.0], 0.0, 0, 0
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for part in blocks(len(order), vocab):
            x, t = (
                trace.logits[order[part]].astype(np.float64),
                truth.logits[positions[part]].astype(np.float64),
            )
            e = x - t
            for name, (u, w) in {"e": (e, e), "t": (t, t), "x": (x, x), "xt": (x, t)}.items():
                squares[name] += float(np.einsum("rv,rv->", u, w))
            largest.append(float(np.abs(e).max()))
            kl += float(_kl(t, e).sum())
            top1 += int((x.argmax(1) == rows.best[positions[part]]).sum())
            # The truth's five are among the highest five of x, ties allowed: nothing else lies above the least of them.
            five = np.take_along_axis(x, rows.five[positions[part]], 1)
            least = five.min(1, keepdims=True)
            top5 += int(((x > least).sum(1) == (five > least).sum(1)).sum())
        count = len(order)
        return Figures(
            plan=plan,
            rows=count,
            max_abs=float(np.max(largest)),
            rms=float(np.sqrt(squares["e"] / (count * vocab))),
            nmse_db=float(10 * np.log10(np.divide(squares["e"], squares["t"]))),
            cosine=float(np.divide(squares["xt"], np.sqrt(squares["t"]) * np.sqrt(squares["x"]))),
            kl=kl / count,
            top1_equal=top1,
            top5_equal=top5,
        )


def pair(
    a: Trace, b: Trace, positions: Sequence[int], *, names: tuple[Run, Run] | None = None
) -> Pair:
    """`a` against `b` over `positions` (first and last as given); a Refusal where either lacks one of them."""
    if len(positions) == 0:
        raise Refusal(f"{a.label}: no positions to compare, expected one or more")
    if a.logits.shape[1] != b.logits.shape[1]:
        raise Refusal(
            f"{a.label}: vocabulary is {a.logits.shape[1]}, expected {b.logits.shape[1]} as {b.label}"
        )
    rows_a, rows_b = rows_of(a, positions), rows_of(b, positions)
    vocab = a.logits.shape[1]
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
    rms = float(np.sqrt(squares / (len(positions) * vocab)))
    first, last = float(row_max[0]), float(row_max[-1])
    return Pair(
        *runs, float(row_max.max()), first, last, rms, equal, len(positions), float(np.max(largest))
    )


def page_tables(case: Case, candidates: Mapping[str, Trace]) -> Tables:
    """The page's tables 3 and 4 for whichever of the judged plans there are; `candidates` by plan name."""
    there = {("ours", name): trace for name, trace in candidates.items()}
    there |= {("theirs", name): trace for name, trace in case.references.items()}

    def pairs(wanted: Sequence[tuple[_Key, _Key]]) -> tuple[Pair, ...]:
        return tuple(
            _named(there[a], there[b], a[1], b[1], case)
            for a, b in wanted
            if a in there and b in there
        )

    return Tables(cached=pairs(_CACHED), chunked=pairs(_CHUNKED))


def three_way(
    case: Case, ours: Mapping[str, Trace], third: Mapping[str, Trace]
) -> tuple[Pair, ...]:
    """For each plan that both hold: the third engine against ours, and each against transformers and against the truth."""
    pairs = []
    for plan in (name for name in case.manifest.plans if name in ours and name in third):
        beside = plan if plan in case.references else "full"
        mine, its, theirs = (
            (ours[plan], plan),
            (third[plan], plan),
            (case.references[beside], beside),
        )
        truth = (case.truth, "full")
        for (a, name_a), (b, name_b) in (
            (its, mine),
            (its, theirs),
            (mine, theirs),
            (its, truth),
            (mine, truth),
        ):
            pairs.append(_named(a, b, name_a, name_b, case))
    return tuple(pairs)


def _named(a: Trace, b: Trace, plan_a: str, plan_b: str, case: Case) -> Pair:
    return pair(a, b, case.rows, names=(Run(a.meta.engine, plan_a), Run(b.meta.engine, plan_b)))


def _kl(t: Floats, e: Floats) -> Floats:
    """KL(softmax t || softmax(t + e)) per row; accurate far below 1e-16, where differences of log-softmaxes are noise."""
    z = t - t.max(1, keepdims=True)
    p = np.exp(z)
    total = p.sum(1)
    p /= total[:, None]
    e = e - np.einsum("rv,rv->r", p, e)[:, None]
    near = np.log1p(np.einsum("rv,rv->r", p, np.expm1(np.minimum(e, 1.0))))
    if e.max() <= 1.0:
        return np.asarray(near)
    most = (z + e).max(1)
    far = most + np.log(np.exp(z + e - most[:, None]).sum(1)) - np.log(total)
    return np.asarray(np.where(e.max(1) <= 1.0, near, far))

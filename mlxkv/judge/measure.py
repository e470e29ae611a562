"""What a run is judged by: its distance from the truth, in float64, a block of rows at a time.

Arrays are memory-mapped, so the logits of a trace of any length need a few MB here, and keys and
values one number for each of their rows. Rows may stand in any order
in a file; results are in order of position. A truth may hold a sample of the positions: rows of a
run at others are passed over. This module knows no limit and gives no verdict.
Axes: R rows, V vocabulary, n positions, K key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxkv.judge.admission import layers
from mlxkv.judge.case import CACHE
from mlxkv.judge.walk import Block, walk
from mlxkv.judge.walk import blocks as blocks
from oracle.formats.errors import Refusal
from oracle.formats.tensors import Array as Array
from oracle.formats.trace import Trace

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Mantissa bits, and the exponent of the least normal number.
_DIGITS = {"float32": (23, -126), "float16": (10, -14), "bfloat16": (7, -126)}


@dataclass(frozen=True, slots=True, eq=False)
class TruthRows:
    """Per row of the truth, each (R,): the largest |logit|, the best token and its margin.

    `five` are the five best tokens, (R, 5), in no order.
    """

    largest: Floats
    best: Array
    margin: Floats
    five: Array


@dataclass(frozen=True, slots=True, eq=False)
class Measures:
    """A run against the truth, each (R,): the shift, which is the row's mean error; rms and largest
    absolute value (`peak`) of the error about it; and the run's own best token.

    `rows` are the truth's rows at these positions, which floors have a column for.
    """

    positions: Array
    rows: Array
    rms: Floats
    shift: Floats
    peak: Floats
    best: Array

    @property
    def finite(self) -> Bools:
        """Whether each row holds finite numbers only: if one is not finite, the rms is not."""
        return np.isfinite(self.rms)


def truth_rows(truth: Trace) -> TruthRows:
    """What the judge needs to know of the truth itself."""
    look = LookAtTruth(truth)
    walk(truth, [look])
    return look.found


class LookAtTruth:
    """The truth's own rows."""

    runs = ()

    def __init__(self, truth: Trace) -> None:
        n, vocab = truth.logits.shape
        self.rows: Array = np.argsort(truth.positions, kind="stable")
        largest, best, margin = np.empty(n), np.empty(n, np.int64), np.full(n, np.inf)
        self.found = TruthRows(largest, best, margin, np.empty((n, min(5, vocab)), np.int64))

    def see(self, block: Block, *_: Array) -> None:
        t, rows, found = block.truth, block.rows, self.found
        found.largest[rows] = np.abs(t).max(1)
        found.best[rows] = t.argmax(1)
        five = found.five.shape[1]
        found.five[rows] = np.argpartition(t, t.shape[1] - five, axis=1)[:, -five:]
        if five > 1:
            top = np.sort(np.take_along_axis(t, found.five[rows], 1), 1)
            found.margin[rows] = top[:, -1] - top[:, -2]


def measure(trace: Trace, truth: Trace, *, scale: float = 1.0) -> Measures:
    """rms, shift, peak of `trace` (times `scale`) against the truth."""
    look = LookAtRun(trace, truth, scale=scale)
    walk(truth, [look])
    return look.found


class LookAtRun:
    """A run, times `scale`, against the truth."""

    def __init__(self, run: Trace, truth: Trace, *, scale: float = 1.0) -> None:
        positions, mine, self.rows = beside(run, truth)
        self.runs, self._scale, n = [(run, mine)], scale, len(mine)
        rms, shift, peak = (np.empty(n) for _ in range(3))
        self.found = Measures(positions, self.rows, rms, shift, peak, np.empty(n, np.int64))

    def see(self, block: Block, *runs: Array) -> None:
        (x,), part, found = runs, block.part, self.found
        found.best[part] = x.argmax(1)
        e = np.multiply(x, self._scale, dtype=np.float64)
        e -= block.truth
        found.shift[part] = e.mean(1)
        e -= found.shift[part, None]
        found.rms[part] = np.sqrt(np.einsum("rv,rv->r", e, e) / x.shape[1])
        found.peak[part] = np.maximum(e.max(1), -e.min(1))


def largest_error(trace: Trace, truth: Trace) -> tuple[Array, Floats]:
    """Positions, and max over the vocabulary of |trace - truth| at each, not centred."""
    look = LookAtLargest(trace, truth)
    walk(truth, [look])
    return look.positions, look.found


class LookAtLargest:
    """The largest error of each row of a run, not centred, at its `positions`."""

    def __init__(self, run: Trace, truth: Trace) -> None:
        self.positions, mine, self.rows = beside(run, truth)
        self.runs, self.found = [(run, mine)], np.empty(len(mine))

    def see(self, block: Block, *runs: Array) -> None:
        (x,) = runs
        self.found[block.part] = np.abs(x - block.truth).max(1)


def difference(a: Trace, b: Trace) -> tuple[Array, Floats]:
    """The positions that both hold, and at each the rms of a - b over V, not centred."""
    look = LookAtPair(a, b, b)
    walk(b, [look])
    return look.positions, look.found


class LookAtPair:
    """What two runs are apart, as `difference` says, at the `positions` that the truth has too."""

    def __init__(self, a: Trace, b: Trace, truth: Trace) -> None:
        both = np.intersect1d(a.positions, b.positions)
        self.positions, _, self.rows = np.intersect1d(both, truth.positions, return_indices=True)
        at = self.positions.tolist()
        self.runs = [(run, rows_of(run, at)) for run in (a, b)]
        self.found = np.empty(len(at))

    def see(self, block: Block, *runs: Array) -> None:
        d = np.subtract(*runs, dtype=np.float64)
        self.found[block.part] = np.sqrt(np.einsum("rv,rv->r", d, d) / d.shape[1])


def rms_over(e: Floats) -> Floats:
    """The rms over the last axis."""
    return np.asarray(np.sqrt(np.mean(e * e, axis=-1)))


def worst_over(e: Floats) -> Floats:
    """The largest absolute value over the last axis."""
    return np.asarray(np.abs(e).max(-1))


def as_stored(array: Array, part: slice) -> Array:
    """Rows of a layer's keys or values that is laid out as the truth's: (K, positions, D)."""
    return array[:, part]


def cache_errors(trace: Trace, truth: Trace, over: Callable[[Floats], Floats] = rms_over) -> Floats:
    """What `over` makes of the cache's errors over D: (keys and values, layers, K, n)."""
    return np.stack([kind_errors(trace, truth, kind, over) for kind in ("keys", "values")])


def kind_errors(
    trace: Trace,
    truth: Trace,
    kind: str,
    over: Callable[[Floats], Floats] = rms_over,
    rows: Callable[[Array, slice], Array] = as_stored,
) -> Floats:
    """The same of keys, or of values: (layers, K, n)."""
    return np.stack(list(layer_errors(trace, truth, kind, over, rows)))


def layer_errors(
    trace: Trace,
    truth: Trace,
    kind: str,
    over: Callable[[Floats], Floats] = rms_over,
    rows: Callable[[Array, slice], Array] = as_stored,
) -> Iterator[Floats]:
    """The same of one layer after another, each (K, n).

    `rows` gives those of a layer's stored array at some positions as the truth has them.
    """
    for layer in range(layers(truth)):
        name = f"kv/{CACHE}/{layer:03d}/{kind}"
        if name not in trace.arrays or name not in truth.arrays:
            what, remedy = f"no {kind} of layer {layer}", "write keys and values of every layer"
            raise Refusal(f"{what}, expected them", where=trace.label, remedy=remedy)
        mine, its = trace.arrays[name], truth.arrays[name]
        found = np.empty(its.shape[:2])
        with np.errstate(invalid="ignore", over="ignore"):
            for part in spans(its):
                found[:, part] = over(np.subtract(rows(mine, part), its[:, part], dtype=np.float64))
        yield found


def cache_largest(truth: Trace) -> Floats | None:
    """The largest |value| of each row of the cache, (keys and values, layers, K, n).

    None where the trace has no cache.
    """
    pairs = [pair for layer in range(layers(truth)) if (pair := truth.kv(CACHE, layer)) is not None]
    if not pairs:
        return None
    found = np.empty((2, len(pairs), *pairs[0][0].shape[:2]))
    for layer, pair in enumerate(pairs):
        for kind, array in enumerate(pair):
            found[kind, layer] = row_largest(array)
    return found


def row_largest(array: Array) -> Floats:
    """The largest |value| of each row of a layer's keys, or values: (K, n)."""
    found = np.empty(array.shape[:2])
    for part in spans(array):
        found[:, part] = np.abs(array[:, part]).max(-1)
    return found


def spans(array: Array) -> Iterator[slice]:
    """Slices over the positions of keys or values (K, n, D), each of a block of them."""
    heads, n, width = array.shape
    return blocks(n, heads * width)


def pieces(array: Array) -> Iterator[Array]:
    """All of keys or values as they are stored, whatever their axes, a block at a time.

    The last axis is whole in each.
    """
    rows = array.reshape(-1, array.shape[-1])
    return (rows[part] for part in blocks(*rows.shape))


def ulp(values: Floats, dtype: str) -> Floats:
    """One unit in the last place of each value in `dtype`, at least of its least normal one."""
    bits, least = _DIGITS[dtype]
    _, exponent = np.frexp(values)
    exponent = np.where(values == 0, least, np.maximum(exponent - 1, least))
    return np.asarray(np.ldexp(1.0, exponent - bits))


def beside(a: Trace, b: Trace) -> tuple[Array, Array, Array]:
    """The positions that both hold, in order, and at each the row of `a` and the row of `b`."""
    found: tuple[Array, Array, Array] = np.intersect1d(
        a.positions, b.positions, return_indices=True
    )
    return found


def rows_of(trace: Trace, positions: Sequence[int]) -> Array:
    """The row of each position; a Refusal where one has none."""
    at = {p: row for row, p in enumerate(trace.positions.tolist())}
    missing = [p for p in positions if p not in at]
    if missing:
        what = f"no row for position {missing[0]}, expected {len(positions)} positions"
        raise Refusal(what, where=trace.label, remedy="run the judged plan")
    return np.array([at[p] for p in positions], np.int64)

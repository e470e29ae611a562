"""What the rows of a cache's lives are measured by: the truth, and for a lossy cache itself.

A lossy cache is not the truth, so how far its rows are from it says nothing of whether it is right.
What can be asked is that it gives what the same cache gives when it is fed straight: a fresh one,
the prompt in one call and then single tokens (a window: single tokens from the start, which no
mask of a chunk can spoil). Where rounding turns a bucket of a quantiser, rows jump; so its own
noise is measured, by runs whose embeddings are dithered by as much as float32 rounds.

Axes: R rows of known positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlxkv.commands.pitfalls.history import Sizes
from mlxkv.judge.limits import WORST
from mlxkv.judge.measure import Floats
from oracle.formats.plan import Ids
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace

DITHERS = (1, 2)
"""The dithered straight runs."""


@dataclass(frozen=True, slots=True, eq=False)
class Talk:
    """A sequence of tokens and its truth: `rows` (R, V) at `positions` (R,), in rising order, and
    the noise floor of each, (R,).
    """

    tokens: Ids
    positions: Array
    rows: Floats
    floor: Floats

    def at(self, positions: Sequence[int] | Array) -> Array:
        """Which rows are those of these positions, all of which are known."""
        return np.searchsorted(self.positions, np.asarray(positions, np.int64))

    def known(self, start: int, end: int) -> list[int]:
        """The positions from `start` to `end` that have a row."""
        return [int(at) for at in self.positions if start <= at < end]


@dataclass(frozen=True, slots=True, eq=False)
class Straight:
    """One lossy cache fed straight: by talk its rows (R, V), and how far dithered runs of it lie
    from one another (`noise`, a centred rms, of the talk where that is most: a bucket turns seldom
    on a small model, and by as much wherever it does).

    A cache whose rows depend on how it is fed has rows for each way instead, in `ways`.
    """

    rows: Mapping[str, Array]
    noise: float
    ways: Mapping[tuple[str, Sizes], Array] | None = None


def centred(rows: Array, expected: Array) -> Floats:
    """Each row's rms distance (R,) from the one expected, both (R, V), without what is added to all
    logits alike; a row that is not finite is infinitely far.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.subtract(rows, expected, dtype=np.float64)
        errors -= errors.mean(axis=1, keepdims=True)
        found = np.sqrt(np.mean(errors * errors, axis=1))
    return np.where(np.isfinite(found), found, np.inf)


def noise(runs: Sequence[Array], floor: Floats) -> float:
    """The largest distance of a row of any run from that of the first, never below the floors."""
    apart = [float(centred(run, runs[0]).max()) for run in runs[1:]]
    return max([float(floor.max()), *apart])


def rows_of(trace: Trace, talk: Talk) -> Array:
    """The rows of a straight run at the talk's positions; NaN where it has none."""
    found = np.full(talk.rows.shape, np.nan, np.float32)
    positions = trace.arrays["positions"]
    inside = np.isin(positions, talk.positions)
    found[talk.at(positions[inside])] = trace.logits[np.flatnonzero(inside)]
    return found


def left_at(rows: Array, talk: Talk) -> int | None:
    """The first position whose row, of a cache fed token by token, is not the truth's; None where
    each is.
    """
    there = np.isfinite(rows).all(axis=1)
    off = there & ~(centred(rows, talk.rows) / talk.floor <= WORST)
    return int(talk.positions[np.flatnonzero(off)[0]]) if off.any() else None

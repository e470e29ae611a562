"""One pass over rows of logits: a block of each file is read once, and shown to all that measure.

The files of a long sequence do not fit into memory beside one another, so each further pass reads
them from the disk again. Axes: R rows of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from oracle.formats.tensors import Array
from oracle.formats.trace import Trace

# Logits held at once: 2 MB in float64, so that the few passes over a block stay in the
# processor's cache.
_BLOCK = 2**18


@dataclass(frozen=True, eq=False)
class Block:
    """Some of the rows that are measured: which of them (`part`), and the truth's, (R, V)."""

    part: slice
    rows: Array
    truth: Array

    @cached_property
    def softmax(self) -> Softmax:
        """Of the truth, made once for all runs."""
        return softmax(np.asarray(self.truth, np.float64))


class Softmax(NamedTuple):
    """The logits less their largest, (R, V), their exponentials over the sum, and the sum (R,)."""

    z: Array
    p: Array
    total: Array


def softmax(t: Array) -> Softmax:
    """Of logits in float64, (R, V)."""
    z = t - t.max(1, keepdims=True)
    p = np.exp(z)
    total = p.sum(1)
    p /= total[:, None]
    return Softmax(z, p, total)


class Look(Protocol):
    """What is measured of rows of the truth and of runs."""

    @property
    def rows(self) -> Array:
        """Those of the truth, in the order in which they are shown."""

    @property
    def runs(self) -> Sequence[tuple[Trace, Array]]:
        """The runs, each with its rows beside those of the truth."""

    def see(self, block: Block, *runs: Array) -> None:
        """Is called with one block after another, and the rows of each run beside it, (R, V)."""


def walk(truth: Trace, looks: Sequence[Look]) -> None:
    """Shows each its rows. All that look at the same rows of the truth go through them together."""
    alike: dict[bytes, list[Look]] = {}
    for look in looks:
        alike.setdefault(np.asarray(look.rows, np.int64).tobytes(), []).append(look)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for group in alike.values():
            for part in blocks(len(group[0].rows), truth.logits.shape[1]):
                _show(truth, group, part)


def _show(truth: Trace, group: Sequence[Look], part: slice) -> None:
    rows = group[0].rows[part]
    block, read = Block(part, rows, truth.logits[rows]), dict[int, Array]()
    for look in group:
        for run, its in look.runs:
            if id(run) not in read:
                read[id(run)] = run.logits[its[part]]
        look.see(block, *(read[id(run)] for run, _ in look.runs))


def blocks(rows: int, vocab: int) -> Iterator[slice]:
    """Slices over all rows, each of a block of them: one row or more."""
    size = max(1, _BLOCK // max(vocab, 1))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))

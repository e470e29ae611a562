"""Which rows of logits a long sequence keeps: a fixed function of its length and its calls.

A row is as wide as the vocabulary, so all rows of 32,768 tokens are 6 GB a run for a small model
and 17 GB for a large one. Keys and values are compared at every position all the same, and a fault
of a cache, of a mask or of RoPE is wrong over a stretch of positions or at the border of a call or
a block. These borders and no stretch of BLOCK positions are left out; what one row alone shows
may be, and "n of m rows compared" stands in the verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Literal

WHOLE = 1024
"""Tokens up to which all rows are kept: 200 MB a run in float32 at a vocabulary of 49,152."""
BLOCK = 256
"""Caches grow by blocks of so many rows, and windows and tables end at multiples of it."""
FIRST = 64
"""Positions from the start on that are all kept: here RoPE turns the fastest, and masks differ."""
END = 8
"""Positions before the prompt's end and the sequence's that are kept."""
DECODED = 1024
"""Decoded tokens of which each has its row; of more than that the first and the last half."""
STEP = 2 ** (1 / 8)
"""The ladder's: eight positions to an octave."""


def sampled(n: int, prompt: int, calls: Collection[Sequence[int]]) -> tuple[int, ...]:
    """The positions of n whose logits are kept, in rising order; `prompt` tokens come first.

    `calls` are the sizes of each judged plan's calls. Kept are the first ones, the prompt's end,
    each border of calls of several tokens and each of blocks with its neighbours, a geometric
    ladder from the start and one from the prompt's end, and all that are decoded, up to a bound.
    """
    borders = {BLOCK // 2, prompt, *range(BLOCK, n, BLOCK)}
    borders |= {border for sizes in calls for border in _borders(sizes)}
    found = {*range(FIRST), *range(prompt - END, prompt), *range(n - END, n)}
    found |= {border + near for border in borders for near in (-1, 0, 1)}
    found |= {start + rung for start in (0, prompt) for rung in _ladder(n)}
    decoded = range(prompt, n)
    found |= {*decoded} if len(decoded) <= DECODED else {*decoded[: DECODED // 2]}
    found |= {*decoded[-DECODED // 2 :]}
    return tuple(sorted(position for position in found if 0 <= position < n))


def kept(
    n: int, prompt: int, calls: Collection[Sequence[int]], *, all_rows: bool
) -> Literal["all"] | tuple[int, ...]:
    """The rows that the judged plans over n tokens keep."""
    return "all" if all_rows or n <= WHOLE else sampled(n, prompt, calls)


def _borders(sizes: Sequence[int]) -> Iterable[int]:
    """Where calls of several tokens begin and end: single ones are decoded, or beside these."""
    ends = accumulate(sizes)
    return (
        border
        for end, size in zip(ends, sizes, strict=True)
        if size > 1
        for border in (end - size, end)
    )


def _ladder(n: int) -> Iterable[int]:
    rung = float(FIRST)
    while rung < n:
        yield round(rung)
        rung *= STEP

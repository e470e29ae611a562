"""Where wrong rows begin, from the errors of all rows in noise floors.

A row is wrong for certain if it is above the limit of a single row. Several together are wrong at
less, and so a median or an rms of them has a lower limit; but a row of a correct run may well be
above that one. Correct rows read about 1, up to 4 in a cache. So the beginning is looked for from
the first certain row backwards, or from the end if there is none: it goes back as far as rows are
nearer to the fault's size than to 1, as the sum of their logarithms says (Page's CUSUM).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mlxkv.judge.measure import Array, Bools, Floats

_EVIDENCE = 2.0
"""In nats, of all rows before the first certain one.

Of 12,000 drawn sequences (24 to 1,100 rows of one head or the largest of 12, noise lognormal with
0.4, wrong by a factor of 10 to 1,000 from one of five places on) the position named is right to 2
in 98 % or more of each kind. Wrong by 6, where no gate fails or hardly one does, it is so in half.
"""


@dataclass(frozen=True, slots=True)
class Onset:
    """The first wrong position.

    `about`: the row there is not beyond the limit of a single row, but those from there on together
    are. `after` is the last position before it that was compared, if that is not its neighbour (-1
    if there is none): then the fault begins between the two.
    """

    position: int
    about: bool = False
    after: int | None = None


def onset(
    at: Array,
    ratios: Floats,
    limit: float,
    *,
    level: float = math.inf,
    sound: Callable[[Floats], bool] = lambda before: True,
) -> Onset | None:
    """The beginning in rows (n,) at the positions `at`, of which each alone has this limit.

    `level` is what a gate read that looks at several of them together, and `sound` whether some
    rows alone would pass it: where those before the beginning would not, no position is named for
    which the gate failed. None if no row is wrong, or none is known to be the first.
    """
    certain = np.flatnonzero(~(ratios <= limit))
    end = int(certain[0]) if len(certain) else len(ratios)
    between = math.sqrt(np.nanmin([level, limit]))
    gains = np.log(np.clip(ratios[:end], 1e-3 * between, limit) / between)[::-1].cumsum()[::-1]
    row = int(gains.argmax()) if gains.max(initial=0.0) > _EVIDENCE else end
    if row < end and row and not sound(ratios[:row]):
        row = end
    return None if row == len(ratios) else _at(at, row, about=row < end)


def first_of(at: Array, wrong: Bools) -> Onset | None:
    """The first of the rows at the positions `at` that are `wrong` (n,), whatever they read."""
    found = np.flatnonzero(wrong)
    return _at(at, int(found[0]), about=False) if len(found) else None


def _at(at: Array, row: int, *, about: bool) -> Onset:
    position, before = int(at[row]), int(at[row - 1]) if row else -1
    return Onset(position, about, before if position - before > 1 else None)

"""What wrong numbers are, where they are something: another row, a multiple, another dtype's.

`near` is an absolute distance: as near as two correct runs are. No words for a fault but those for
a row of a cache, and no limit of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxkv.judge.measure import Array, Floats
from mlxkv.judge.words import listed

ALIKE = 1e-3
"""Of an error: what is left of it where something explains it."""
_LEFT = 1 / 6
"""Of the rms of an error: what may be left of it, as noise, where a rule explains it."""
_NARROWER = {"float64": ("bfloat16", "float16", "float32"), "float32": ("bfloat16", "float16")}
_HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def alike(a: Array, b: Array, near: float) -> bool:
    """Whether no number is further from the other than `near`; one that is NaN is further."""
    return bool(np.abs(np.subtract(a, b, dtype=np.float64)).max() <= near)


def rounded(values: Array, dtype: str) -> Floats:
    """The values as `dtype` holds them, in float64."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return np.asarray(values, dtype).astype(np.float64)
    bits = np.asarray(values, np.float32).view(np.uint32)
    # To the nearest, ties to even: numpy has no bfloat16.
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    kept = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return np.asarray(kept.view(np.float32), np.float64)


def narrower(mine: Array, its: Array, dtype: str) -> str | None:
    """The narrower dtype that holds every number of a run in `dtype`, if its error is no larger
    than rounding to it makes.
    """
    error, size = np.abs(np.subtract(mine, its, dtype=np.float64)), np.abs(its).max()
    for other in _NARROWER.get(dtype, ()):
        if (
            np.array_equal(rounded(mine, other), mine)
            and error.max() <= 4 * _HALF_ULP[other] * size
        ):
            return other
    return None


def factors(mine: Array, its: Array, *, axis: int, near: float) -> Floats | None:
    """What each row (axis 1) or each column (axis 0) of the truth (n, width) is multiplied by.

    None where that is not all of the error but the noise, and where a row or column has too few
    numbers to show it.
    """
    if its.shape[axis] < 3:
        return None
    mine, its = np.asarray(mine, np.float64), np.asarray(its, np.float64)
    squares = np.maximum((its * its).sum(axis, keepdims=True), np.finfo(np.float64).tiny)
    factor = (mine * its).sum(axis, keepdims=True) / squares
    error, left = mine - its, mine - factor * its
    most = max(ALIKE * float(np.abs(error).max()), near)
    explained = np.linalg.norm(left) <= _LEFT * np.linalg.norm(error)
    return np.asarray(factor.ravel()) if np.abs(left).max() <= most and explained else None


def row_of_cache(held: Array, true: Array, row: int, *, near: float, dtype: str) -> str | None:
    """What a wrong row of one head is, both (n, D), in words; None where it is nothing known."""
    if np.isnan(held[row]).any():
        return "is missing or not a number"
    if not held[row].any():
        return "is empty"
    distances = np.abs(np.subtract(true, held[row], dtype=np.float64)).max(1)
    same = int(np.argmin(distances))
    if distances[same] <= min(near, distances[row] / 4):
        return f"is the truth's row {same}: {_moved(held, true, row, same, near)}"
    other = narrower(held[row], true[row], dtype)
    return None if other is None else f"is rounded to {other}"


def _moved(held: Array, true: Array, row: int, same: int, near: float) -> str:
    """Is the next row off by as many rows as this one?"""
    mine, its = row + 1, same + 1
    if max(mine, its) < len(true) and alike(held[mine], true[its], near):
        return "a token was lost or moved before it"
    return "stale" if same < row else "written too early, or moved"


def some(what: str, wrong: Array, count: int) -> str:
    """Which of `count` channels, outputs or rows are wrong, the first four by number."""
    if len(wrong) == count:
        return f"all {count} {what}s"
    named = wrong[:4].tolist() + ([f"{len(wrong) - 4} more"] if len(wrong) > 4 else [])
    return f"{what}{'s' if len(wrong) > 1 else ''} {listed(named)} of {count}"


def scale(mine: Array, its: Array, *, near: float, at: Array | None = None) -> str | None:
    """By which factors all wrong rows of (n, width) differ, if by nothing else.

    `at` (n,) are the positions by which rows are named, None where those are 0 to n - 1.
    """
    by_row = factors(mine, its, axis=1, near=near)
    if by_row is None:
        return None
    off, noise = np.abs(by_row - 1), near / max(float(np.abs(its).max()), near)
    wrong = np.flatnonzero(off > max(ALIKE * off.max(), noise))
    if len(wrong) == len(by_row) > 1 and np.ptp(by_row) <= max(0.01 * off.max(), noise):
        return f"every row is {_times(by_row.mean())} times the truth's"
    if len(wrong) == 1:
        row = int(wrong[0] if at is None else at[wrong[0]])
        return f"row {row} is {_times(by_row[wrong[0]])} times the truth's"
    return "each row is the truth's times a factor of its own"


def _times(factor: float) -> str:
    return f"{factor:.6g}" if abs(factor - 1) > 1e-4 else f"{factor:.9g}"


def plural(of: Sequence[int]) -> str:
    return "s" if len(of) > 1 else ""


def flat(array: Array) -> Floats:
    """(heads, n, width) -> (n, heads * width), as the projections count."""
    return np.asarray(array.swapaxes(0, 1).reshape(array.shape[1], -1), np.float64)

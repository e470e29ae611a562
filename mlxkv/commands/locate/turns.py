"""What is wrong with rotated rows (RoPE, arXiv:2104.09864), by how each pair of numbers turned.

Rows are (heads, n, D); number i of a head turns with number i + D/2, so a pair is one complex
number and a turn a factor of length 1. `near` is as near as two correct runs are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxkv.commands.locate.rows import alike
from mlxkv.judge.measure import Array, Floats

Complex = npt.NDArray[np.complex128]
_PART = 0.02
"""Of the largest error of a turn: what may be left where a rule explains the turns."""
_SLIGHT = 0.05
"""Radians: an angle or a table that lost precision is not off by more at the lengths judged."""


@dataclass(frozen=True, slots=True, eq=False)
class _Turns:
    """The factor between run and truth, (n, D/2), where all heads share it; `noise` of a factor."""

    factor: Complex
    noise: float

    @property
    def error(self) -> float:
        return float(np.abs(self.factor - 1).max())

    def explained(self, by: Complex) -> bool:
        """Whether these factors are those found, up to the noise and a small part of the error."""
        left = float(np.abs(self.factor - by).max())
        return bool(left <= max(_PART * self.error, self.noise))


def words(mine: Array, its: Array, before: Array | None, *, near: float) -> str | None:
    """What the turns are, in words; None where the rows are not the truth's rows turned otherwise.

    `before` are the truth's rows before they were turned, where they are known.
    """
    if its.shape[2] % 2 or not np.isfinite(mine).all():
        return None
    a, b = _pairs(mine), _pairs(its)
    found = _Turns(_factor(a, b), _noise(b, near))
    kept = bool(np.abs(np.abs(a) - np.abs(b)).max() <= 2 * near)
    shared = _alike(a, found.factor * b, max(2 * near, _PART * float(np.abs(a - b).max())))
    if kept and shared:
        return _turned(found, None if before is None else _factor(b, _pairs(before)))
    # One head alone is its truth times some factors whatever was done to it.
    if shared and len(mine) > 1:
        return _tables(found)
    if alike(np.linalg.norm(mine, axis=-1), np.linalg.norm(its, axis=-1), 2 * near):
        return "its pairing: each row keeps its length, and its pairs do not"
    return None


def _alike(a: Complex, b: Complex, near: float) -> bool:
    return bool(np.abs(a - b).max() <= near)


def _pairs(rows: Array) -> Complex:
    half = rows.shape[2] // 2
    return np.asarray(rows[..., :half], np.float64) + 1j * np.asarray(rows[..., half:], np.float64)


def _factor(a: Complex, b: Complex) -> Complex:
    """a over b by least squares over the heads, (n, D/2)."""
    squares = np.maximum((np.abs(b) ** 2).sum(0), np.finfo(np.float64).tiny)
    return np.asarray((a * b.conj()).sum(0) / squares)


def _noise(b: Complex, near: float) -> float:
    """Of a factor: where a pair is short, noise turns it far."""
    return float(2 * near / max(np.sqrt((np.abs(b) ** 2).sum(0)).min(), near))


def _turned(found: _Turns, right: Complex | None) -> str:
    n = len(found.factor)
    wrong = np.flatnonzero(np.abs(found.factor - 1).max(1) > max(found.noise, _PART * found.error))
    if right is not None and n > 1 and len(wrong):
        shift = _shift(found, right, wrong)
        if shift is not None:
            first = int(wrong[0])
            return (
                f"positions: position {first} is turned as position {first + shift} is (index_pos)"
            )
    same = found.factor[wrong] - found.factor[wrong[:1]]
    if len(wrong) > 1 and np.abs(same).max() <= max(found.noise, _PART * found.error):
        return "each wrong row is turned by the same angles: counted from another position"
    speeds = found.factor[1] ** np.arange(n)[:, None] if n > 3 else None
    if speeds is not None and found.explained(speeds):
        return (
            "each pair turns at another speed: theta, scaling, the sign of the angles or the order "
            "of the pairs"
        )
    if found.error <= _SLIGHT:
        return f"angles off by at most {found.error:.2g} rad: the precision of its angles or tables"
    return "each pair keeps its length and has another angle: positions, theta, scaling or tables"


def _shift(found: _Turns, right: Complex, wrong: Array) -> int | None:
    """By how many positions the wrong rows are all turned too far, if they are."""
    n = len(right)
    speed = right[1] / np.maximum(np.abs(right[1]), np.finfo(np.float64).tiny)
    tolerance = max(1e-6, found.noise)
    for shift in (s for by in range(1, n + 1) for s in (by, -by)):
        if np.abs(found.factor[wrong] - speed**shift).max() <= tolerance:
            return shift
    return None


def _tables(found: _Turns) -> str:
    lengths: Floats = np.abs(found.factor)
    if np.ptp(lengths) <= max(found.noise, _PART * abs(lengths.mean() - 1)):
        return f"every row is {lengths.mean():.6g} times as long: a factor on its tables"
    if found.error <= _SLIGHT:
        return f"its tables, cos or sin, are off by at most {found.error:.2g}: their precision"
    return "its tables: cos and sin are not those of one angle"

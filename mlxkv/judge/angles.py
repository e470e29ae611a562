"""RoPE's angles, read from the keys of layer 0: a theta or a factor that no usual suspect has.

Before RoPE the keys of layer 0 depend on nothing but the embedding, a norm and a projection. So if
these are right, an engine's keys are the truth's keys turned back and turned again by its own
angles, and the one number that its angles depend on can be estimated.

Axes: K key/value heads, n positions, P = D / 2 pairs that RoPE turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlxkv.judge.case import CACHE, Case
from mlxkv.judge.floors import layer_floor
from mlxkv.judge.limits import SIGMA
from mlxkv.judge.measure import Bools, Floats, row_largest
from mlxkv.judge.result import Cause
from oracle.formats.trace import Trace

MOST = 512
"""Positions that are looked at: enough for theta to 1e-7 in float32."""
_FIRST = 16  # positions of the search, whose steps turn the fastest pair by a radian at most
_STEPS = 24
_EXACT = 2e-6  # relative: a theta's frequencies in float32 are no nearer
_AGAINST = "the truth's keys of layer 0 turned so"
Complex = npt.NDArray[np.complex128]


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """The truth's: theta, each pair's frequency (P,) and the power of theta that it is (P,)."""

    theta: float
    frequencies: Floats
    powers: Floats


class _Family(NamedTuple):
    """Angles that depend on one number x: `turn(positions, x)` and its derivative, each (n, P).

    `grid` is where x is looked for, `pairs` (P,) are those that follow it. `words(x, error)` says
    what x means, None where it means the truth's own angles.
    """

    turn: Callable[[Floats, float], tuple[Floats, Floats]]
    grid: Floats
    pairs: Bools
    words: Callable[[float, float], str | None]


def estimate(case: Case, run: Trace, angles: Angles) -> Cause | None:
    """The one number of RoPE that explains the keys of layer 0, where it is not the truth's.

    Keys are tried in both orders of a head's rows, halves and neighbours; and with neighbours
    turned in place of halves.
    """
    mine, its = run.kv(CACHE, 0), case.truth.kv(CACHE, 0)
    if mine is None or its is None or mine[0].shape != its[0].shape:
        return None
    n = min(MOST, mine[0].shape[1])
    floor = layer_floor(case, "keys", 0, row_largest(its[0]))[:, :n, None]
    keys, right = (np.asarray(pair[0][:, :n], np.float64) / floor for pair in (mine, its))
    turned = np.exp(1j * np.arange(n)[:, None] * angles.frequencies)
    before = _halves(right) / turned
    if not np.isfinite(keys).all() or _sigma(_halves(keys), _halves(right)) <= SIGMA:
        return None  # nothing to explain, or not by RoPE
    beside = _neighbours(np.concatenate([before.real, before.imag], axis=-1))
    found = [
        cause
        for prefix, after, start in (
            ("", _halves(keys), before),
            ("", _neighbours(keys), before),
            ("interleaved RoPE and ", _neighbours(keys), beside),
        )
        for family in _families(angles)
        if (cause := _fit(after, start, family, prefix))
    ]
    return min(found, key=lambda cause: cause.sigma, default=None)


def _halves(keys: Floats) -> Complex:
    x, y = np.split(keys, 2, axis=-1)
    return np.asarray(x + 1j * y)


def _neighbours(keys: Floats) -> Complex:
    return np.asarray(keys[..., ::2] + 1j * keys[..., 1::2])


def _sigma(keys: Complex, other: Complex) -> float:
    """The rms of the error of keys in floors."""
    e = keys - other
    return float(np.sqrt(np.mean(e.real**2 + e.imag**2) / 2))


def _fit(after: Complex, before: Complex, family: _Family, prefix: str) -> Cause | None:
    """The x of least squares between `after` and `before` turned, both (K, n, P), in floors.

    It is looked for at the first positions, and made more exact at twice as many each time: an
    angle must not be a turn off.
    """
    after, before = after[..., family.pairs], before[..., family.pairs]
    at, product = np.arange(after.shape[1], dtype=np.float64), (after * before.conj()).sum(0)

    def slopes(x: float, m: int) -> tuple[float, float, float]:
        angle, by_x = (of[:, family.pairs] for of in family.turn(at[:m], x))
        left = product[:m] * np.exp(-1j * angle)
        return left.real.sum(), (left.imag * by_x).sum(), (left.real * by_x**2).sum()

    m = min(_FIRST, len(at))
    x = float(max(family.grid, key=lambda x: slopes(float(x), m)[0]))
    for step in range(_STEPS):
        m = len(at) if step > _STEPS // 2 else min(len(at), _FIRST << step)
        _, slope, curve = slopes(x, m)
        if not (curve > 0 and np.isfinite(slope)):
            return None
        x += slope / curve
    angle = family.turn(at, x)[0][:, family.pairs]
    sigma, words = _sigma(after, before * np.exp(1j * angle)), family.words(x, 5 * curve**-0.5)
    if words is None or not sigma <= SIGMA:
        return None
    return Cause("angles", prefix + words, sigma, _AGAINST)


def _families(angles: Angles) -> Iterator[_Family]:
    w, powers = angles.frequencies, -np.arange(len(angles.frequencies)) / len(angles.frequencies)
    plain, everywhere = angles.theta**powers, np.ones(len(w), bool)
    thetas = np.log(np.geomspace(2, 1e10, 100) / angles.theta)

    def theta(of: Floats, pairs: Bools, lost: str = "") -> _Family:
        def turn(at: Floats, x: float) -> tuple[Floats, Floats]:
            turned = at[:, None] * of * np.exp(powers * x)
            return turned, turned * powers

        return _Family(turn, thetas, pairs, partial(_theta, angles.theta, lost))

    # Where scaling blends, as llama3's does, a pair's frequency is no power of theta.
    yield theta(w, np.isclose(angles.powers, powers, atol=1e-6))
    if not np.allclose(w, plain, rtol=1e-9):
        yield theta(plain, everywhere, "lost RoPE scaling and ")

    def divided(at: Floats, x: float) -> tuple[Floats, Floats]:
        return at[:, None] * w * x, at[:, None] * w

    def shifted(at: Floats, x: float) -> tuple[Floats, Floats]:
        return (at[:, None] + x) * w, np.broadcast_to(w, (len(at), len(w)))

    yield _Family(divided, np.arange(0.02, 4.0, 1 / _FIRST), everywhere, _factor)
    yield _Family(shifted, np.arange(-4.0, 5.0), everywhere, _start)


def _theta(right: float, lost: str, x: float, error: float) -> str | None:
    value = right * float(np.exp(x))
    found, its = _simplest(value, value * max(error, _EXACT)), f"{right:.10g}"
    return None if found == its else f"{lost}rope_theta {found} instead of {its}"


def _factor(x: float, error: float) -> str | None:
    found = _simplest(1 / x, max(error / x, _EXACT) / x)
    return None if found == "1" else f"RoPE's angles divided by {found} (as linear scaling does)"


def _start(x: float, error: float) -> str | None:
    start = round(x)
    near = abs(x - start) <= max(error, 1e-3)
    return f"positions that start at {start} instead of 0" if start and near else None


def _simplest(value: float, apart: float) -> str:
    """The number of fewest digits that is no further from the value."""
    texts = (f"{float(f'{value:.{digits}g}'):.10g}" for digits in range(1, 10))
    return next((text for text in texts if abs(float(text) - value) <= apart), f"{value:.10g}")

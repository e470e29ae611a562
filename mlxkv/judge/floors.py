"""The noise floor: how far transformers itself is from the truth, by position, layer and head.

Made here, at judging, from the raw errors of the pool's members, so that a member can be held out and judged by the
others. Where there is no truth the errors are deviations from the members' mean, and widened
(`mean.py`). Smoothing: a position's floor also looks at those within `NEAR` of it, because a single position's error is one
draw and may be small by luck. Nothing is ever below one unit in the last place of what is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlxkv.judge import mean
from mlxkv.judge.case import Case
from mlxkv.judge.measure import Floats, TruthRows, ulp

NEAR = 8  # positions on either side (DESIGN): a window of 17 rows over 5 runs settles an rms to some 10 %


@dataclass(frozen=True, slots=True, eq=False)
class Floors:
    """Per position, each (n,): of the centred error's rms and peak, of the shift, and of cached against uncached.

    `pool` is the rms floor before an ulp bounds it from below: what the members really read.
    """

    rms: Floats
    pool: Floats
    peak: Floats
    shift: Floats
    cached: Floats


def logit_floors(case: Case, truth: TruthRows, *, without: str | None = None) -> Floors:
    """The floors of all members, or of all but `without`."""
    keep = [i for i, name in enumerate(case.pool.members) if name != without]
    raw = {
        name: np.asarray(case.floors[name], np.float64)
        for name in ("rms", "peak", "shift", "cached")
    }
    least = ulp(truth.largest, case.manifest.dtype)
    rms, peak, shift = (raw[name][keep] * mean.widening(case) for name in ("rms", "peak", "shift"))
    pool = np.maximum(_rms(rms), _near_rms(rms))
    return Floors(
        rms=np.maximum(pool, least),
        pool=pool,
        peak=np.maximum(_near_max(peak), least),
        shift=np.maximum(_near_rms(shift), least),
        cached=np.maximum(_near_rms(raw["cached"]), least),
    )


def cache_floors(case: Case, largest: Floats, *, without: str | None = None) -> Floats:
    """The floors of keys and values, (keys and values, layers, K, n), as is `largest`, of the truth; of all members but `without`."""
    least = ulp(largest, case.manifest.dtype)
    keep = [i for i, name in enumerate(case.pool.members) if name != without]
    raw = [
        np.asarray(case.floors[name], np.float64)[keep] * mean.widening(case)
        for name in ("keys", "values")
    ]
    return np.stack(
        [np.maximum.reduce([_rms(a), _near_rms(a), least[i]]) for i, a in enumerate(raw)]
    )


def _rms(errors: Floats) -> Floats:
    """Over the members, the first axis."""
    return np.asarray(np.sqrt(np.mean(errors * errors, axis=0)))


def _near_rms(errors: Floats) -> Floats:
    """Over the members and the positions near each; positions are the last axis."""
    squares, counts = np.mean(errors * errors, axis=0), np.ones(errors.shape[-1])
    return np.asarray(np.sqrt(_windows(squares).sum(-1) / _windows(counts).sum(-1)))


def _near_max(peaks: Floats) -> Floats:
    return np.asarray(_windows(np.abs(peaks).max(0)).max(-1))


def _windows(values: Floats) -> Floats:
    """(..., n) -> (..., n, 2 NEAR + 1), zeros beyond the ends."""
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(NEAR, NEAR)])
    return np.lib.stride_tricks.sliding_window_view(padded, 2 * NEAR + 1, axis=-1)

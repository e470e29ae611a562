"""The noise floor: how far transformers itself is from the truth, by position, layer and head.

Made at judging, from the raw errors of the pool's members, so that a member can be held out and
judged by the others. One position's error is a single draw and may be small by luck, so the floor
of a position also looks at those within `noise.NEAR` of it. No floor is below one unit in the last
place of what is measured.

One member's norms add up a row strictly one number after another, as MLX does on a CPU. In wide
rows of few bits such roundings do not cancel: at a width of 2048, with weights of bfloat16, keys of
layer 0 are off by 2.0e-6, those of torch by 3.4e-7. That is a correct order too, so a floor is at
least what that member reads. It is the maximum and not one more of a mean: of six members it would
raise a floor to 1 / sqrt(6) of its own error, and a port that adds up so would read up to 2.4
however right it is. Where a member is held out, the sequential one is too, so that it hides nothing
of what is wrong with the others. On SmolLM2 it widens the floor of the logits by 1.33, on tiny
models by 1.03 to 1.26, in half precision by 1.02.

Cached and uncached runs are each as far off as an ordinary member, so they may be apart by as much.
Where torch computes both by the same kernels, as most rows of the probe's 250 tokens and 300, they
are apart by 0.01 to 0.5 of that: a correct engine of 24 layers, whose sums follow the size of a
call, read 9.0 of CACHED there, and now 1.4.

Where there is no truth, the mean of the pool's n distinct members stands in its place. Each member
lies nearer to that mean than to the truth, by sqrt(1 - 1/n), so its deviation is widened by the
inverse; and a member that is held out is measured against the mean of the others. The limits are
those that hold against the truth. Measured both ways on SmolLM2, 24 tokens, correct engines read a
sigma of 0.7 to 0.8 against the truth and of 1.0 against the mean; against the mean also a shift of
4.7, and of keys and values at most a median of 1.3, a 95th percentile of 2.2, a worst row of 2.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from mlxkv.judge.case import Case
from mlxkv.judge.measure import Array, Floats, Measures, TruthRows, ulp
from oracle.formats.noise import windows
from oracle.formats.run_folder import SEQUENTIAL, ordinary


@dataclass(frozen=True, slots=True, eq=False)
class Floors:
    """For each row of the truth: of the centred error's rms and peak, of the shift, and of cached
    against uncached.

    `pool` is the rms floor before an ulp bounds it from below: what the members really read.
    """

    rms: Floats
    pool: Floats
    peak: Floats
    shift: Floats
    cached: Floats


def logit_floors(case: Case, truth: TruthRows, *, without: str | None = None) -> Floors:
    """The floors of all members, or of all but `without`."""
    least, at = ulp(truth.largest, case.manifest.dtype), np.asarray(case.truth.positions)
    cached = np.asarray(case.floors["cached"], np.float64)  # by kind of attention, not by member
    pool = _pooled(case, "rms", _near, at, without)
    peak = _pooled(case, "peak", _near_max, at, without)
    shift = _pooled(case, "shift", _near, at, without)
    apart = np.maximum(near_rms(cached, at), _pooled(case, "rms", _near, at, without or SEQUENTIAL))
    return Floors(
        rms=np.maximum(pool, least),
        pool=pool,
        peak=np.maximum(peak, least),
        shift=np.maximum(shift, least),
        cached=np.maximum(apart, least),
    )


def cache_floors(case: Case, largest: Floats, *, without: str | None = None) -> Floats:
    """The floors of keys and values, of all members or of all but `without`.

    They are (keys and values, layers, K, n), as is `largest`, the truth's largest |value| of a row.
    """
    kinds = zip(("keys", "values"), largest, strict=True)
    return np.stack([kind_floors(case, kind, of, without=without) for kind, of in kinds])


def kind_floors(case: Case, kind: str, largest: Floats, *, without: str | None = None) -> Floats:
    """The floors of keys, or of values: (layers, K, n), as `largest` is."""
    found = np.empty_like(largest)
    for layer, of in enumerate(largest):
        found[layer] = layer_floor(case, kind, layer, of, without=without)
    return found


def layer_floor(
    case: Case, kind: str, layer: int, largest: Floats, *, without: str | None = None
) -> Floats:
    """The floor of one layer's keys, or values: (K, n), as `largest` is."""
    errors, at = np.asarray(case.floors[kind], np.float64)[:, layer], np.arange(largest.shape[-1])
    pool = _over_members(case, errors, _near, at, without)
    return np.maximum(pool, ulp(largest, case.manifest.dtype))


def held_out(run: Measures, case: Case) -> Measures:
    """A member as the others measure it. Against the truth that changes nothing."""
    k = 1.0 if case.has_truth else case.pool.distinct / (case.pool.distinct - 1)
    return replace(run, rms=run.rms * k, shift=run.shift * k, peak=run.peak * k)


def widening(case: Case) -> float:
    """What makes an error of a member's deviation from the measure: 1 where that is the truth."""
    n = case.pool.distinct
    return 1.0 if case.has_truth else math.sqrt(n / (n - 1))


def _pooled(
    case: Case,
    name: str,
    over: Callable[[Floats, Array], Floats],
    at: Array,
    without: str | None,
) -> Floats:
    """What `over` makes of the members' errors of this name, at the positions `at` of logits."""
    return _over_members(case, np.asarray(case.floors[name], np.float64), over, at, without)


def _over_members(
    case: Case,
    errors: Floats,
    over: Callable[[Floats, Array], Floats],
    at: Array,
    without: str | None,
) -> Floats:
    """What `over` makes of the ordinary members' errors (members, ..., n), or of the sequential
    one's where that is larger and no member is held out. `at` are the positions of the last axis.
    """
    members = case.pool.members
    keep = [members.index(name) for name in ordinary(members) if name != without]
    floor = over(errors[keep] * widening(case), at)
    if without is not None or SEQUENTIAL not in members:
        return floor
    own = members.index(SEQUENTIAL)
    return np.maximum(floor, over(errors[own : own + 1], at))


def _near(errors: Floats, at: Array) -> Floats:
    """The rms over members, at the position itself or near it, whichever is larger."""
    return np.maximum(_rms(errors), near_rms(errors, at))


def _rms(errors: Floats) -> Floats:
    return np.asarray(np.sqrt(np.mean(errors * errors, axis=0)))


def near_rms(errors: Floats, at: Array) -> Floats:
    """Over the members and the positions near each; the last axis is that of the positions `at`."""
    squares, counts = np.mean(errors * errors, axis=0), np.ones(len(at))
    return np.asarray(np.sqrt(windows(squares, at).sum(-1) / windows(counts, at).sum(-1)))


def _near_max(peaks: Floats, at: Array) -> Floats:
    return np.asarray(windows(np.abs(peaks).max(0), at).max(-1))

"""Whether the stored errors of a run folder can be those of its pool.

The judge makes its noise floor of these errors, so errors that are stored too large let a wrong
engine pass. Where the folder keeps a member's run, its errors are measured again and must be those
stored. The other members are bounded by the kept ones. What all of them read together is bounded
by the float32 parts of transformers' `.double()`, which stand in the folder as a proof: they pass
through the same weights, and grow as the pool's errors do where a model amplifies rounding.

Both the oracle and the judge ask here; each brings its own measurements. numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oracle.formats.run_folder import SEQUENTIAL, Manifest, Pool, ordinary
from oracle.formats.tensors import Array

Errors = Mapping[str, Iterable[Any]]
"""One run's errors: rms, shift and peak (rows,); of keys and values a layer's (K, n) after another,
so that those of a long sequence need not stand in memory together.
"""

CACHE = ("keys", "values")
"""The errors of which each layer has some."""

# Between stored errors and those measured again, relative to the largest of a row of positions.
# Both are sums of the same float64 numbers, in another order on another machine: 3e-15.
STORED = 1e-3

# Members without a kept run, over the largest of the kept ones within NEAR positions: at one
# position, and rms over all (a shift also over the kept rms). 280 pools of SmolLM2, of random
# Llamas (width 48 to 8192, 1 to 40 layers, weights of std 0.02 to 3, 1 to 100 tokens, three dtypes)
# and of neighbours read at most 3.0 at one position and 2.9 over all, that on a single token (1.9
# and 1.2 on SmolLM2). Beyond them is one pool only: two layers of std 3 in bfloat16 read 24 and
# 3.3, as rounding decides there which key attention picks. Two of five members that are as wide as
# the limits allow widen a floor by 4.0 at one position and by 2.6 over all.
BESIDE, BESIDE_ALL = 6.0, 4.0

NEAR = 8
"""Positions on either side: a window of 17 rows over 5 runs settles an rms to some 10 %."""

# The sequential member reads as much in rows of up to 512 numbers. Beyond that its limits grow with
# the row, as the roundings of one long sum do that do not cancel. With values of bfloat16, keys and
# values of layer 0 read 2.9 at 576, 3.8 at 1024, 6.3 at 2048, 4.2 at 4096 and 4.7 at 8192; with
# values of full precision 1.9 at most.
IN_ORDER = 512

# What the ordinary members read, rms over max |T| in ulps of the run's dtype, over the float32
# parts of transformers' float64 form in ulps of float32, at the positions of that proof:
#                                          pool          ratio
#   SmolLM2, float32, 8 to 40 tokens       1.2 to 2.2    1.2 to 3.0
#   width 64 to 256, std 0.02 to 0.3       0.2 to 2.9    2.0 to 4.3
#   width 1024, 2048, 4096, 8192           1.6 to 5.5    4.7, 5.5, 9.4, 11
#   40 layers of std 0.3, 2 to 100 tokens  3.8 to 33     2.2 to 4.2
#   2 layers of std 1 and 3                0.9 to 12     2.5 to 5.9
#   float16 and bfloat16, all of these     0.1 to 14     0.4 to 2.4
# The ulps alone say little, since a model may amplify any rounding; their ratio says a lot.
AMPLIFIED = 40.0
"""Above this the pool is noisier than its dtype."""
QUIET = 10.0
"""Of the inverse: above this the float32 parts are not this pool's."""

_EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
PARTS = "float32_parts"
"""The proof that bounds the pool's noise, rms over max |T|."""
_FIRST = 32  # The proof looks at so many positions.


@dataclass(frozen=True, slots=True)
class Check:
    """A measured value that must not be above its limit; NaN is."""

    name: str
    quantity: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return bool(self.value <= self.limit)


def checks(
    manifest: Manifest,
    pool: Pool,
    floors: Mapping[str, Array],
    again: Mapping[str, Errors],
    *,
    largest: float,
    positions: Array,
) -> tuple[Check, ...]:
    """What must hold of a pool's `floors`, of shapes that fit.

    `again` are the errors of the members whose runs are kept, measured anew, by member; `cached`
    (rows,) among a step's errors is how far that run is from the full one. `largest` is max |T|,
    and `positions` (rows,) are those of the truth's rows.
    """
    most = "truth_max" if manifest.has_truth else "mean_max"
    others = [name for name in ordinary(pool.members) if name not in again]
    beside = _beside(pool, floors, others, positions)
    in_order = [SEQUENTIAL] * (SEQUENTIAL in pool.members)
    sums = _beside(pool, floors, in_order, positions) / max(1.0, pool.widest / IN_ORDER)
    names = f"{' and '.join(others) or 'no run'} beside them"
    if not sums <= beside:
        names, beside = f"{SEQUENTIAL} beside them", sums
    off = _off(pool, floors, again)
    off[f"{most} in the manifest"] = abs(_number(manifest.proofs.get(most)) / largest - 1)
    worst = max(off, key=lambda name: (np.isnan(off[name]), off[name]))
    read = _read(pool, floors, positions) / largest / _EPS[manifest.dtype]
    parts = _number(manifest.proofs.get(PARTS)) / _EPS["float32"]
    kept = "stored errors of the kept runs" if off[worst] <= STORED else f"stored {worst}"
    return (
        Check(kept, "part off", off[worst], STORED),
        Check(names, "part of the limit", beside, 1.0),
        _size(read, parts),
    )


def _size(read: float, parts: float) -> Check:
    """Whether the noise that was `read` is of the size that the float32 `parts` make likely."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio, inverse = float(np.divide(read, parts)), float(np.divide(parts, read))
    noisy = Check("noise of the pool", "ratio to the float32 parts", ratio, AMPLIFIED)
    if inverse <= QUIET or not noisy.passed:
        return noisy
    return Check("float32 parts", "ratio to the noise of the pool", inverse, QUIET)


def _off(pool: Pool, floors: Mapping[str, Array], again: Mapping[str, Errors]) -> dict[str, float]:
    """How far the stored errors are from those measured again."""
    off = {}
    for member, errors in again.items():
        for name, found in errors.items():
            row = (
                pool.kinds.index(member.split("-")[0])
                if name == "cached"
                else pool.members.index(member)
            )
            stored = floors[name][row]
            pairs = zip(stored, found, strict=True) if name in CACHE else [(stored, found)]
            off[f"{name} of {member}"] = float(np.max([0.0, *(_apart(*pair) for pair in pairs)]))
    return off


def _apart(stored: Array, found: Array) -> float:
    """The largest difference, relative to the largest value over the positions, the last axis."""
    off = np.abs(np.asarray(stored, np.float64) - found)
    return float(
        _over(off, np.abs(found).max(axis=-1, keepdims=True, initial=0.0)).max(initial=0.0)
    )


def windows(values: Array, at: Array) -> Array:
    """(..., rows) -> (..., rows, 2 NEAR + 1): what stands at the positions near each of `at`, zeros
    where nothing does.
    """
    laid = np.zeros((*values.shape[:-1], int(at[-1]) + 1 + 2 * NEAR))
    laid[..., at + NEAR] = values
    found = np.lib.stride_tricks.sliding_window_view(laid, 2 * NEAR + 1, axis=-1)
    return np.asarray(found[..., at, :])


def _beside(
    pool: Pool, floors: Mapping[str, Array], others: Sequence[str], positions: Array
) -> float:
    """The errors of `others` over the kept members' largest nearby, as a part of the limits."""
    at = [pool.members.index(name) for name in others]
    kept = [i for i, name in enumerate(pool.members) if name.split("-")[0] == pool.kinds[-1]]

    def both(errors: Array) -> tuple[Array, Array]:
        return np.abs(errors[at]), np.abs(errors[kept]).max(axis=0)

    found = {name: both(np.asarray(floors[name])) for name in ("rms", "shift", "peak")}
    # A shift is one number a row, and small by chance. What a run with a cache and one without are
    # apart is no more than what both are off.
    found["shift"] = found["shift"][0], np.maximum(found["shift"][1], found["rms"][1])
    cached = np.asarray(floors["cached"])
    found["cached"] = cached[:-1], np.maximum(cached[-1], found["rms"][1])
    parts = [_part(*pair, np.asarray(positions)) for pair in found.values()]
    every = np.arange(np.shape(floors["keys"])[-1])
    for kind in CACHE:
        for layer in np.moveaxis(np.asarray(floors[kind]), 1, 0):
            parts.append(_part(*both(layer), every))
    return float(np.max(parts))


def _part(mine: Array, of: Array, at: Array) -> float:
    """The errors `mine` (members, ..., positions) over the largest of `of` (..., positions) near
    each, at one position and over all, as a part of the limits.
    """
    ratios = _over(mine, windows(of, at).max(-1))
    over_all = np.sqrt(np.mean(ratios * ratios, axis=-1)).max(initial=0.0)
    return float(np.max([ratios.max(initial=0.0) / BESIDE, over_all / BESIDE_ALL]))


def _over(part: Array, whole: Array) -> Array:
    """Their ratio, 0 where there is no part."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(part == 0, 0.0, part / whole))


def _read(pool: Pool, floors: Mapping[str, Array], positions: Array) -> float:
    """The rms error of the ordinary members at the positions that the proof looks at."""
    at = [pool.members.index(name) for name in ordinary(pool.members)]
    rms = np.asarray(floors["rms"])[at][:, np.asarray(positions) < _FIRST]
    return float(np.sqrt(np.mean(rms * rms)))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")

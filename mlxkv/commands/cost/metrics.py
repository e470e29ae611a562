"""What a variant costs, from what it read at each position. numpy only, and no limit is judged here
but one: whether a known answer is met.

Names are those of llama.cpp's `llama-perplexity --kl-divergence` where it has the same quantity: Q
is the variant, base the truth, p the right token's probability, dp what the variant changes of it.
Standard errors take the positions as independent of each other, as llama.cpp's do; those of ratios
and differences are paired, position by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mlxkv.commands.cost.rows import Array, Rows

FLIP_MARGIN = 16.0
"""In largest errors that float32 makes at a position: as mlxkv/judge/limits.py has it."""
NOISE = 3.0
"""A mean KL of up to so many of float32's own is none: nothing is lost that could be seen."""
WITHIN = 0.1
"""How far the mean KL may be from its known answer, of that."""
APART_ROUNDED, APART = 100.0, 20.0
"""How far apart, at a position, a variant and its known answer may lie on average, of the known
mean: so many times q**(1/4) where numbers are rounded, q**(1/2) where rows are only left out, with
q float32's own mean KL over the known one. KL is a square of errors: a second error e beside a
variant's E moves it by 2e/E of it. A number whose last bits differ is rounded to the other side now
and then, and what that adds, squared, is the noise times the step. Right caches read up to 8.3 and
0.33 on four random models, 27 (8 bits) and 0.7 on the default one; mlx-lm's sinks, which its mask
hides, 23,000 and more.
"""
MOST_AT_ONE = 10.0
"""The largest KL of a cache that loses nothing, of float32's largest on the same text. A full cache
with its rows in another order, which rounds each sum otherwise, reads 0.35 to 2.1 on texts of 8 to
400 tokens of eight random models of 2 to 16 layers, up to 1,024 wide, and 0.91 to 1.0 on the
default one; its mean 0.99 to 1.5 of the noise's. A row lost at one position reads 10,000 and more.
"""
NOTHING = "nothing lost"
"""The known answer of a cache that keeps everything, in place of a SPEC."""
_BINS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Value:
    """A mean and its standard error, which is NaN of a single position."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Array) -> Value:
        n = len(values)
        error = float(np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else np.nan
        return cls(float(np.mean(values)) if n else np.nan, error)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of some positions: KL in nats, probabilities as they are, `flips` as a count."""

    positions: int
    mean_kld: Value
    median_kld: float
    kld_90: float
    kld_99: float
    maximum_kld: float
    mean_dp: Value
    rms_dp: Value
    same_top_p: Value
    same_top_5: Value
    decisive_flips: int
    ppl_q: Value
    ppl_base: Value
    ppl_ratio: Value


def figures(rows: Rows, noise: Rows, at: slice = slice(None)) -> Figures:
    """Over the positions `at`, of which there is one at least; all rows must be finite.

    `noise` is what the full cache read in float32.
    """
    kl, same = rows.kl[at], rows.same[at]
    told = ~np.isnan(rows.nll[at])  # the text's last token is followed by none
    dp = (rows.p - rows.p_truth)[at][told]
    log_ratio = Value.of((rows.nll - rows.nll_truth)[at][told])
    flips = (same == 0) & (rows.margin[at] > FLIP_MARGIN * noise.peak[at])
    return Figures(
        positions=len(kl),
        mean_kld=Value.of(kl),
        median_kld=float(np.median(kl)),
        kld_90=float(np.quantile(kl, 0.9)),
        kld_99=float(np.quantile(kl, 0.99)),
        maximum_kld=float(kl.max()),
        mean_dp=Value.of(dp),
        rms_dp=_root(Value.of(dp**2)),
        same_top_p=Value.of(same),
        same_top_5=Value.of(rows.five[at]),
        decisive_flips=int(flips.sum()),
        ppl_q=_exp(Value.of(rows.nll[at][told])),
        ppl_base=_exp(Value.of(rows.nll_truth[at][told])),
        ppl_ratio=_exp(log_ratio),
    )


def _exp(value: Value) -> Value:
    with np.errstate(over="ignore"):
        mean = float(np.exp(value.mean))
    return Value(mean, mean * value.error)


def _root(value: Value) -> Value:
    root = float(np.sqrt(value.mean))
    return Value(root, value.error / (2 * root) if root else 0.0)


@dataclass(frozen=True, slots=True)
class Bin:
    """Mean KL at the positions from `first` to `last`."""

    first: int
    last: int
    kld: Value


def bins(rows: Rows, edges: Sequence[int] = _BINS) -> list[Bin]:
    """By position, between `edges` and up to the end."""
    n = len(rows.kl)
    cuts = [*(edge for edge in edges if edge < n), n]
    return [Bin(a, b - 1, Value.of(rows.kl[a:b])) for a, b in pairwise(cuts)]


@dataclass(frozen=True, slots=True)
class Known:
    """A known answer, a SPEC or NOTHING: its mean KL, the variant's over it, and how far apart the
    two lie.

    `apart` is the mean size of their difference at a position, of the known mean, and `most_apart`
    what rounding explains of it. `errors` counts standard errors: of the mean difference, or of its
    mean size where that lies further beyond what rounding explains. The ratio is NaN where both lie
    in the noise, as for a window longer than the text. `met`: whether the variant costs what such a
    cache must, on average and at each position.
    """

    spec: str
    mean_kld: float
    ratio: float
    errors: float
    apart: float
    most_apart: float
    met: bool


def known(spec: str, answer: Array, rows: Rows, noise: Rows) -> Known:
    """How a variant compares with its known answer, KL of each position, (n,)."""
    mean, found = float(answer.mean()), float(rows.kl.mean())
    floor, least = float(noise.kl.mean()), float(np.finfo(np.float64).tiny)
    scale = max(mean, NOISE * floor, least)
    q, rounds = floor / scale, not spec.startswith("window")
    most = APART_ROUNDED * q**0.25 if rounds else APART * q**0.5
    signed, size = Value.of(rows.kl - answer), Value.of(np.abs(rows.kl - answer))
    both_none = max(mean, found) <= NOISE * floor
    beyond = _in_errors(size.mean - most * scale, size)
    return Known(
        spec,
        mean_kld=mean,
        ratio=np.nan if both_none else found / scale,
        errors=max(_in_errors(abs(signed.mean), signed), beyond),
        apart=size.mean / scale,
        most_apart=most,
        met=both_none or (abs(found - mean) <= WITHIN * scale and size.mean <= most * scale),
    )


def nothing_lost(rows: Rows, noise: Rows) -> Known:
    """How a cache that keeps everything compares with what float32 alone loses.

    The ratios are to that noise: `ratio` of the means, NaN while it is none, and `apart` of the
    largest KL at a position, of which `most_apart` is what rounding explains.
    """
    least = float(np.finfo(np.float64).tiny)
    floor, peak = (max(float(of), least) for of in (noise.kl.mean(), noise.kl.max()))
    ratio, apart = float(rows.kl.mean()) / floor, float(rows.kl.max()) / peak
    over, most = Value.of(rows.kl - noise.kl), MOST_AT_ONE
    met = ratio <= NOISE and apart <= most
    errors = _in_errors(abs(over.mean), over)
    return Known(NOTHING, floor, np.nan if met else ratio, errors, apart, most, met)


def _in_errors(far: float, value: Value) -> float:
    return far / value.error if value.error > 0 else 0.0

"""RoPE's tables (arXiv:2104.09864), made on the host.

As in candle's `llama.rs`, inverse frequencies, angles, cosines and sines are in float32 and cast to
the run's dtype last: a table computed in half precision is wrong by up to 1.8 at position 1000. The
tables for float64 come from the same lines with float64 throughout. The types of RoPE that candle
lacks follow their papers. Axes as in `mlxkv.port.llama`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from mlxkv.port.config.llama import LlamaConfig, Rope

Floats = npt.NDArray[np.floating]


def inverse_frequencies(
    rope: Rope, head_dim: int, dtype: type[np.floating] = np.float32, length: int = 1
) -> Floats:
    """(D / 2,) radians per position: 1 / theta^(i / D) for i = 0, 2, 4, ..., changed by the type.

    `length` is that of the longest sequence. Only longrope (arXiv:2402.13753) looks at it: it
    divides by the long factors beyond its original length, and by the short ones up to it.
    """
    exponents = np.arange(0, head_dim, 2).astype(dtype) / dtype(head_dim)
    frequencies = dtype(1) / np.power(dtype(rope.theta), exponents)
    match rope.rope_type:
        case "linear":
            frequencies = frequencies / dtype(rope.factor)
        case "llama3":
            frequencies = _llama3(frequencies, rope)
        case "yarn":
            frequencies = _yarn(frequencies, rope)
        case "longrope":
            beyond = length > rope.original_max_position_embeddings
            stretch = rope.long_factor if beyond else rope.short_factor
            frequencies = frequencies / np.array(stretch, dtype)
    return np.asarray(frequencies)


def attention_factor(rope: Rope) -> float:
    """What cosines and sines are multiplied by.

    Longer contexts flatten attention, and this sharpens it again. It is sqrt(1 + ln(factor) /
    ln(original length)) for LongRoPE, arXiv:2402.13753, and 0.1 ln(factor) + 1 for YaRN,
    arXiv:2309.00071. YaRN's `mscale` and `mscale_all_dim` are DeepSeek's, as transformers has them.
    """
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1 or rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.rope_type == "longrope":
        original = rope.original_max_position_embeddings
        return math.sqrt(1 + math.log(rope.factor) / math.log(original))
    stretch = 0.1 * math.log(rope.factor)
    # Either alone says nothing, in transformers too.
    if rope.mscale and rope.mscale_all_dim:
        return (stretch * rope.mscale + 1) / (stretch * rope.mscale_all_dim + 1)
    return stretch + 1


def tables(
    config: LlamaConfig, dtype: type[np.floating] = np.float32, *, length: int | None = None
) -> tuple[Floats, Floats]:
    """cos and sin of each position times each inverse frequency, (length, D / 2) each.

    The length is that of `span` where none is given.
    """
    rows = span(config) if length is None else length
    positions = np.arange(rows).astype(dtype)
    frequencies = inverse_frequencies(config.rope, config.head_dim, dtype, rows)
    angles = positions[:, None] * frequencies[None, :]
    scale = dtype(attention_factor(config.rope))
    return np.cos(angles) * scale, np.sin(angles) * scale


def span(config: LlamaConfig) -> int:
    """The positions that tables serve where nobody says how long the sequence will be."""
    most, original = config.max_position_embeddings, config.rope.original_max_position_embeddings
    return min(most, original) if config.rope.rope_type == "longrope" else most


def end(config: LlamaConfig, length: int, needed: int) -> str:
    """Why tables of `length` rows end there, and what serves `needed` positions; for a refusal."""
    rope, most = config.rope, config.max_position_embeddings
    if needed > most:
        return f"max_position_embeddings is {most}{rope.beyond}"
    remedy = f"make the cache with max_length={needed} or more"
    original = rope.original_max_position_embeddings
    if rope.rope_type == "longrope" and length <= original < needed:
        return (
            f"longrope turns keys by its short factors up to {original} tokens "
            f"and all of them by its long ones beyond; {remedy}"
        )
    return f"the cache was made with max_length={length}; {remedy}"


def _llama3(frequencies: Floats, rope: Rope) -> Floats:
    """Llama 3.1's scaling, from `apply_scaling` in Meta's llama-models.

    Long waves are divided by the factor, short ones kept, those between them blended.
    """
    dtype = frequencies.dtype.type
    wavelengths = dtype(2 * np.pi) / frequencies
    original = dtype(rope.original_max_position_embeddings)
    low, high = dtype(rope.low_freq_factor), dtype(rope.high_freq_factor)
    # 0 at the longest wave that is still divided, 1 at the shortest that is not.
    smooth = np.clip((original / wavelengths - low) / (high - low), dtype(0), dtype(1))
    blended: Floats = (dtype(1) - smooth) * frequencies / dtype(rope.factor) + smooth * frequencies
    return blended


def _yarn(frequencies: Floats, rope: Rope) -> Floats:
    """YaRN, arXiv:2309.00071.

    Pairs that turn often over the original context are kept, those that turn rarely are slowed by
    the factor, and a ramp lies between them.
    """
    dtype, pairs = frequencies.dtype.type, len(frequencies)
    first, last = (_pair_turning(turns, rope, pairs) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    # As published, the upper bound is that of a head's elements and not of its pairs.
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first if last != first else 0.001
    places = (np.arange(pairs).astype(dtype) - dtype(first)) / dtype(width)
    ramp = np.clip(places, dtype(0), dtype(1))
    slowed: Floats = frequencies * (dtype(1) - ramp) + frequencies / dtype(rope.factor) * ramp
    return slowed


def _pair_turning(turns: float, rope: Rope, pairs: int) -> float:
    """The index, which may be a fraction, of the pair that turns so often over that context."""
    wave = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return pairs * math.log(wave) / math.log(rope.theta)

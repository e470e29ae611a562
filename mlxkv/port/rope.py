"""RoPE's tables, made on the host.

Angles follow candle's `llama.rs`: inverse frequencies, angles, cosines and sines in float32, cast to the run's dtype
last (a table computed in half precision is wrong by up to 1.8 at position 1000). The float64 tables of the algebra lane
come from the same lines with float64 throughout.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlxkv.port.config import LlamaConfig, Rope

Floats = npt.NDArray[np.floating]


def inverse_frequencies(rope: Rope, head_dim: int, dtype: type[np.floating] = np.float32) -> Floats:
    """(head_dim / 2,) angles per position: 1 / theta^(i / head_dim) for i = 0, 2, 4, ..., scaled for llama3."""
    exponents = np.arange(0, head_dim, 2).astype(dtype) / dtype(head_dim)
    frequencies = dtype(1) / np.power(dtype(rope.theta), exponents)
    return _llama3(frequencies, rope) if rope.rope_type == "llama3" else frequencies


def tables(config: LlamaConfig, dtype: type[np.floating] = np.float32) -> tuple[Floats, Floats]:
    """cos and sin, each (max_position_embeddings, head_dim / 2), for the position times each inverse frequency."""
    positions = np.arange(config.max_position_embeddings).astype(dtype)
    angles = positions[:, None] * inverse_frequencies(config.rope, config.head_dim, dtype)[None, :]
    return np.cos(angles), np.sin(angles)


def _llama3(frequencies: Floats, rope: Rope) -> Floats:
    """Llama 3.1's scaling: long waves divided by the factor, short ones kept, those between them blended."""
    dtype = frequencies.dtype.type
    wavelengths = dtype(2 * np.pi) / frequencies
    original, low, high = dtype(rope.original_max_position_embeddings), dtype(rope.low_freq_factor), dtype(rope.high_freq_factor)
    # 0 at the longest wave that is still divided, 1 at the shortest that is not.
    smooth = np.clip((original / wavelengths - low) / (high - low), dtype(0), dtype(1))
    blended: Floats = (dtype(1) - smooth) * frequencies / dtype(rope.factor) + smooth * frequencies
    return blended

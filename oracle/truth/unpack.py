"""MLX's packed weights -> float64, in numpy: what a checkpoint's words, scales and biases mean.

A row's words, read as bytes from the lowest on, are one string of bits, lowest first. Each `bits`
of them are a number q from 0 on, whether or not `bits` divides 32. With q below 2^8 and scales of
at most 24 bits the product q * scale is exact in float64, and adding the bias rounds at 2^-53: no
dtype that is judged comes near it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def numbers(words: Array, *, bits: int) -> npt.NDArray[np.uint16]:
    """uint32 words (rows, w) -> the whole numbers packed in them, (rows, 32 w / bits)."""
    octets = np.ascontiguousarray(words, dtype="<u4").view(np.uint8)
    starts = np.arange(words.shape[1] * 32 // bits) * bits
    first = starts // 8
    # A number reaches into one more byte at most. If the row has no more, its last byte is read
    # instead and masked away.
    after = np.minimum(first + 1, octets.shape[1] - 1)
    window = octets[:, first] | octets[:, after].astype(np.uint16) << 8
    found: npt.NDArray[np.uint16] = (window >> (starts % 8) & ((1 << bits) - 1)).astype(np.uint16)
    return found


def weight(
    words: Array, scales: Array, biases: Array, *, bits: int, group_size: int
) -> npt.NDArray[np.float64]:
    """uint32 words (out, in * bits / 32), scales and biases (out, in / group_size) -> (out, in)."""
    grouped = numbers(words, bits=bits).reshape(*scales.shape, group_size).astype(np.float64)
    grouped *= scales[..., None]
    grouped += biases[..., None]
    return grouped.reshape(len(words), -1)

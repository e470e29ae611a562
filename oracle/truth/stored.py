"""What a cache keeps that stores less than it is given, in float64, and a layer that reads it.

The weights, the queries and all arithmetic stay those of the truth. What the cache keeps of the
current tokens is what they read of themselves, too, as in mlx-lm's quantised cache.

Axes: L tokens of one segment, S tokens in the cache after it, K key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oracle.formats.errors import Refusal
from oracle.formats.stored import Affine, Rounded, Spec, Window
from oracle.truth import llama
from oracle.truth.config import Config

_Keep = Callable[[Tensor], Tensor]

# Significant bits, the exponent of the least positive number, and the largest number.
_FLOATS = {"float16": (11, -24, 65504.0), "bfloat16": (8, -133, 2.0**128 - 2.0**120)}
_LEAST = float(torch.tensor(1e-7, dtype=torch.float32))  # MLX's least scale, a float32


def rounded(x: Tensor, dtype: str) -> Tensor:
    """x (any shape) to the nearest number of the dtype, ties to even; infinite beyond its range.

    torch rounds float64 to float32 first, and what lies beside a tie can go the wrong way then.
    """
    bits, least, largest = _FLOATS[dtype]
    _, exponent = np.frexp(x.numpy())
    unit = np.maximum(exponent - bits, least)
    found = torch.from_numpy(np.ldexp(np.rint(np.ldexp(x.numpy(), -unit)), unit))
    return torch.where(found.abs() > largest, found.sign() * torch.inf, found)


def affine(x: Tensor, *, bits: int, group_size: int) -> Tensor:
    """What `mx.quantize` and `mx.dequantize` (mode affine) make of x (..., D), in float64.

    A group is `group_size` numbers along D. Its scale is its span over 2^bits - 1, changed so that
    the edge further from 0 is kept exactly and 0 is a multiple of it; the bias is that edge. Scale
    and bias are rounded to float32, as a float32 cache stores them, then each number q is rounded
    (ties to even, as MLX does on the CPU) and clamped. MLX's documentation of `quantize` has the
    span, its mlx/backend/cpu/quantized.cpp the edges.
    """
    groups, most = x.view(*x.shape[:-1], -1, group_size), 2**bits - 1
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    negative = low.abs() > high.abs()
    edge = torch.where(negative, low, high)
    scale = ((high - low) / most).clamp_min(_LEAST) * torch.where(negative, 1.0, -1.0)
    steps = (edge / scale).round()
    scale = _float32(torch.where(steps == 0, scale, edge / steps))
    bias = _float32(torch.where(steps == 0, 0.0, edge))
    q = ((groups - bias) / scale).round().clamp(0, most)
    return (q * scale + bias).view(x.shape)


def _float32(x: Tensor) -> Tensor:
    return x.to(torch.float32).to(x.dtype)


def band(window: Window, start: int, rows: int, columns: int) -> Tensor:
    """The mask (rows, columns) of a window: True if the token at start + row may not see that key.

    A token sees itself, the size - keep - 1 before it and the first `keep`: `size` in all, as
    mlx-lm's RotatingKVCache holds where single tokens are fed.
    """
    key, own = torch.arange(columns), torch.arange(start, start + rows)[:, None]
    forgotten = (own - key >= window.size - window.keep) & (key >= window.keep)
    return forgotten | llama.hides(start, rows, columns)


class Layer(llama.Layer):
    """A layer whose cache keeps what `spec` says."""

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, Tensor],
        tables: tuple[Tensor, Tensor],
        *,
        spec: Spec,
    ) -> None:
        super().__init__(config, weights, tables)
        self.spec = spec

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, start: int, seen: dict[str, Any]
    ) -> Tensor:
        """Attention over keys and values (K, S, D), of which the last L are stored first."""
        for array, keep in zip((keys, values), _kept(self.spec), strict=True):
            new = array[:, start:]
            new[...] = keep(new)
            if not bool(torch.isfinite(new).all()):
                what = "keys or values become infinite, expected a dtype that holds them"
                raise Refusal(what, where=f"--stored {self.spec.name}", remedy="leave it out")
        mask = partial(band, self.spec) if isinstance(self.spec, Window) else None
        return llama.attend(queries, keys, values, start=start, seen=seen, mask=mask)


def _kept(spec: Spec) -> tuple[_Keep, _Keep]:
    """What is kept of keys and of values, each (K, L, D)."""
    if isinstance(spec, Rounded):
        keep = partial(rounded, dtype=spec.dtype)
        return keep, keep
    if isinstance(spec, Affine):
        return _quantised(spec.keys, spec.group_size), _quantised(spec.values, spec.group_size)
    return _same, _same


def _quantised(bits: int, group_size: int) -> _Keep:
    return partial(affine, bits=bits, group_size=group_size) if bits else _same


def _same(x: Tensor) -> Tensor:
    return x

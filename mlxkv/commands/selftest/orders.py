"""Correct engines that add up in other orders: the port with other sums in its products and norms.

None of them is wrong, so none may be accused. Half precision adds up in float32 here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxkv.commands.selftest.faults import patched
from mlxkv.port import ops

Product = Callable[[mx.array, mx.array], mx.array]
"""x (..., E) and w (out, E) in float32 to x @ w.T."""

_LANES = 8


def _in_parts(parts: int) -> Product:
    """Split-K: the products of so many parts of E, added up one after another."""

    def product(x: mx.array, w: mx.array) -> mx.array:
        size = -(-x.shape[-1] // parts)
        first, *others = _cut(x, w, size)
        for other in others:
            first = first + other
        return first

    return product


def _in_pairs(x: mx.array, w: mx.array) -> mx.array:
    """The products of 32 columns each, added up as a tree."""
    parts = _cut(x, w, 32)
    while len(parts) > 1:
        odd = parts[-1:] if len(parts) % 2 else []
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


def _cut(x: mx.array, w: mx.array, size: int) -> list[mx.array]:
    starts = range(0, x.shape[-1], size)
    return [x[..., i : i + size] @ w[:, i : i + size].T for i in starts]


def _reversed(x: mx.array, w: mx.array) -> mx.array:
    return x[..., ::-1] @ w[:, ::-1].T


def _norm_in_lanes(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """RMSNorm with its squares added up in eight lanes, as vector units do."""
    wide = x.astype(mx.float32)
    squares = (wide * wide).reshape(*x.shape[:-1], -1, _LANES)
    mean = squares.sum(-2).sum(-1, keepdims=True) / x.shape[-1]
    return (wide * mx.rsqrt(mean + eps)).astype(x.dtype) * weight


@contextmanager
def _products(product: Product) -> Iterator[None]:
    def times(x: mx.array, w: mx.array) -> mx.array:
        return product(x.astype(mx.float32), w.astype(mx.float32)).astype(x.dtype)

    def linear(self: Any, x: mx.array) -> mx.array:
        out = times(x, self.weight)
        return out + self.bias if "bias" in self else out

    with patched(nn.Linear, "__call__", lambda _: linear):  # noqa: SIM117
        with patched(nn.Embedding, "as_linear", lambda _: lambda self, x: times(x, self.weight)):
            yield


ORDERS: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    **{f"products in {n} parts": partial(_products, _in_parts(n)) for n in (2, 4, 8, 16)},
    "products in reverse": partial(_products, _reversed),
    "products in pairs": partial(_products, _in_pairs),
    "norms in lanes": lambda: patched(ops, "rms_norm", lambda _: _norm_in_lanes),
}
"""What makes the port in this process add up so, for as long as it is entered. The weights must not
be packed."""

"""The few operations with two forms: the production one, and an exact one for float64.

MLX's float64 `exp`, `sigmoid`, `softmax` and `mx.fast.*` are only as accurate as float32; its
matmul, sqrt, rsqrt, tanh, sums and division are accurate. So in float64 exp and sigmoid go through
tanh, exp of many numbers through numpy, and RMSNorm through rsqrt. The dtype chooses the form, and
nothing else in the model depends on it. Axes as in `mlxkv.port.llama`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import mlx.core as mx
import numpy as np

from mlxkv.port.watched import watch

MANY = 2**20
"""Scores from which numpy takes the exponentials of a float64 softmax, and the block is computed
then. 9 heads of 56 queries and 8,191 keys took 75 ms of CPU so, and 184 by tanh. Fewer scores stay
part of a graph that is not computed yet."""

DTYPES: dict[str, mx.Dtype] = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "float64": mx.float64,
}

Tap = Callable[[str, mx.array], object]
"""Is shown the array at a named place inside a layer."""


def dtype_of(dtype: str | mx.Dtype) -> mx.Dtype:
    """The MLX dtype of a name; ValueError for one that the port does not run in."""
    if isinstance(dtype, mx.Dtype):
        dtype = name_of(dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def name_of(dtype: mx.Dtype) -> str:
    """`float32` for mx.float32."""
    return str(dtype).removeprefix("mlx.core.")


def accurate(dtype: mx.Dtype) -> mx.Dtype:
    """The dtype of attention and of the logits: float64 for float64 weights, else float32."""
    return mx.float64 if dtype == mx.float64 else mx.float32


def attended(dtype: mx.Dtype, queries: int, groups: int, head_dim: int) -> mx.Dtype:
    """The dtype in which attention of `queries` per head loses nothing, H / K of them `groups`.

    It adds up in float32 everywhere. Metal's kernel for one query (`sdpa_vector.h`) does so inside
    and rounds once, when it writes: there the cache is read as it is. It has these head_dims and
    at most 32 queries for each KV head. Elsewhere MLX puts attention together from products and a
    softmax, and rounds the scores themselves to the run's dtype: to 8 bits in bfloat16, where a
    score of 30 is off by 0.06 and its weight by 6%. There queries and rows are made wide first.
    """
    kernel = mx.default_device() == mx.Device(mx.gpu) and mx.metal.is_available()
    fits = queries == 1 and groups <= 32 and head_dim in (64, 128)
    return dtype if kernel and fits else accurate(dtype)


def stream(dtype: mx.Dtype) -> AbstractContextManager[None]:
    """Where arrays of this dtype are computed: MLX has float64 on the CPU only."""
    where: AbstractContextManager[None] = mx.stream(
        mx.cpu if dtype == mx.float64 else mx.default_device()
    )
    return where


def show(tap: Tap, **arrays: mx.array) -> None:
    """Calls a tap with each array under its name."""
    for name, array in arrays.items():
        tap(name, array)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (arXiv:1910.07467).

    Half precision accumulates in float32.
    """
    if x.dtype != mx.float64:
        return mx.fast.rms_norm(x, weight, eps)
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + mx.array(eps, mx.float64)) * weight


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x)"""
    if x.dtype != mx.float64:
        return x * mx.sigmoid(x)
    return x * (0.5 * (1.0 + mx.tanh(0.5 * x)))


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    hidden: mx.array | None,
    tap: Tap | None = None,
) -> mx.array:
    """softmax(queries @ keys^T * scale) @ values.

    [B, H, L, D] and twice [B, K, S, D] -> [B, H, L, D].

    `hidden` (L, S) is true where a query may not see a key. Query head h reads KV head
    h // (H / K). `tap` is shown the masked `scores` [B, K, H/K, L, S], which only the exact form
    has.
    """
    if queries.dtype != mx.float64:
        visible = None if hidden is None else mx.logical_not(hidden)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=visible
        )
    B, H, L, D = queries.shape
    K = keys.shape[1]
    grouped = queries.reshape(B, K, H // K, L, D)
    scores = (grouped * scale) @ keys[:, :, None].swapaxes(-1, -2)  # [B, K, H/K, L, S]
    if hidden is not None:
        scores = mx.where(hidden, -mx.inf, scores)
    if tap is not None:
        tap("scores", scores)
    return (_softmax(scores) @ values[:, :, None]).reshape(B, H, L, D)


def _softmax(scores: mx.array) -> mx.array:
    shifted = scores - mx.max(scores, axis=-1, keepdims=True)
    if scores.size >= MANY and scores.shape[-2] > 1:
        weights = mx.array(np.exp(np.array(shifted, copy=False)), mx.float64)
    else:
        t = mx.tanh(0.5 * shifted)
        # exp(x) = (1 + tanh(x/2)) / (1 - tanh(x/2)). Here x <= 0, so the error stays below one ulp
        # of the largest term.
        weights = (1.0 + t) / (1.0 - t)
    return weights / mx.sum(weights, axis=-1, keepdims=True)


watch(sys.modules[__name__])

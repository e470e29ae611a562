"""Faults of a person's own engine, planted in `own_open.OpenLlama` by overriding one of its steps.

Each is a function of a layer, `at`, and gives the methods that replace the right ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from own_open import OpenLlama

Methods = dict[str, Callable[..., Any]]
Plant = Callable[[int], Methods]
ROW = 9  # a row that decoding writes


def model(methods: Methods) -> type[OpenLlama]:
    return type("Faulty", (OpenLlama,), dict(methods))


# The cache.


def copied(kind: str) -> Plant:
    """In one layer the row of keys or values at ROW is a copy of the one before it."""

    def plant(at: int) -> Methods:
        def write(self: Any, layer: int, cache: Any, keys: mx.array, values: mx.array) -> Any:
            if layer == at and cache.offset == ROW and keys.shape[2] == 1:
                keys = cache.keys[:, :, -1:] if kind == "keys" else keys
                values = cache.values[:, :, -1:] if kind == "values" else values
            return cache.update(keys, values)

        return {"write": write}

    return plant


def stored(dtype: mx.Dtype) -> Plant:
    def plant(at: int) -> Methods:
        def write(self: Any, layer: int, cache: Any, keys: mx.array, values: mx.array) -> Any:
            if layer == at:
                values = values.astype(dtype).astype(values.dtype)
            return cache.update(keys, values)

        return {"write": write}

    return plant


def in_steps(at: int) -> Methods:
    """From ROW on one layer keeps keys and values in steps of 0.02."""

    def write(self: Any, layer: int, cache: Any, keys: mx.array, values: mx.array) -> Any:
        if layer == at and cache.offset >= ROW:
            keys, values = (mx.round(a * 50) / 50 for a in (keys, values))
        return cache.update(keys, values)

    return {"write": write}


def heads_swapped(at: int) -> Methods:
    def write(self: Any, layer: int, cache: Any, keys: mx.array, values: mx.array) -> Any:
        return cache.update(*((a[:, ::-1] if layer == at else a) for a in (keys, values)))

    return {"write": write}


def not_a_number(at: int) -> Methods:
    def write(self: Any, layer: int, cache: Any, keys: mx.array, values: mx.array) -> Any:
        wrong = layer == at and cache.offset == ROW and keys.shape[2] == 1
        return cache.update(keys, values * mx.nan if wrong else values)

    return {"write": write}


# The mask, the scores, the heads.

Visible = Callable[[Any, Any, int, int], mx.array]


def masked(visible: Visible, *, everywhere: bool = True) -> Plant:
    """`visible(queries, keys, start, L)` of a call's first position and length."""

    def plant(at: int) -> Methods:
        def mask(self: Any, layer: int, start: int, L: int) -> mx.array:
            if not everywhere and layer != at:
                return OpenLlama.mask(self, layer, start, L)
            queries, keys = mx.arange(start, start + L)[:, None], mx.arange(start + L)[None, :]
            return visible(queries, keys, start, L)

        return {"mask": mask}

    return plant


def ahead(queries: Any, keys: Any, start: int, L: int) -> mx.array:
    return keys <= queries + 1


def without_offset(queries: Any, keys: Any, start: int, L: int) -> mx.array:
    return keys <= queries - (start if L > 1 else 0)


def in_chunked_alone(queries: Any, keys: Any, start: int, L: int) -> mx.array:
    """Without its offset in one call, which the plan chunked alone has."""
    return keys <= queries - (start if (start, L) == (3, 2) else 0)


def window(queries: Any, keys: Any, start: int, L: int) -> mx.array:
    return (keys <= queries) & (keys > queries - 16)


def scored(change: Callable[[mx.array], mx.array]) -> Plant:
    def plant(at: int) -> Methods:
        def scores(self: Any, layer: int, queries: Any, keys: Any, mask: Any) -> mx.array:
            right = queries @ keys.swapaxes(-1, -2) * self.config["head_dim"] ** -0.5
            return mx.where(mask, change(right), -mx.inf)

        return {"scores": scores}

    return plant


def head_order(at: int) -> Methods:
    def shared(self: Any, layer: int, keys: mx.array, heads: int) -> mx.array:
        return mx.tile(keys, (1, heads // keys.shape[1], 1, 1))

    return {"shared": shared}


def head_scaled(at: int) -> Methods:
    def mix(self: Any, layer: int, scores: mx.array, values: mx.array) -> mx.array:
        mixed = OpenLlama.mix(self, layer, scores, values)
        return mx.concatenate([mixed[:, :1] * (0.9 if layer == at else 1.0), mixed[:, 1:]], axis=1)

    return {"mix": mix}


# Norms.


def normed(square: Callable[[mx.array], mx.array], *, of: str = "norm") -> Plant:
    """`square` gives 1 / sqrt(...) of the input; in all norms, or in one layer's `of`."""

    def plant(at: int) -> Methods:
        def norm(self: Any, name: str, x: mx.array) -> mx.array:
            here = of == "norm" or name == (of if "." in of else f"model.layers.{at}.{of}")
            if not here:
                return OpenLlama.norm(self, name, x)
            return x * square(x) * self.weights[f"{name}.weight"]

        return {"norm": norm}

    return plant


def mean(x: mx.array) -> mx.array:
    return mx.mean(x * x, axis=-1, keepdims=True)


def rough_rsqrt(x: mx.array) -> mx.array:
    m = mean(x) + 1e-5
    return mx.rsqrt(m) * (1 + 5e-6 * mx.sin(1e3 * m))


def over_one_less(x: mx.array) -> mx.array:
    E = x.shape[-1]
    return mx.rsqrt(mean(x) * (E / (E - 1)) + 1e-5)


def large_eps(x: mx.array) -> mx.array:
    return mx.rsqrt(mean(x) + 1e-3)


def channel(at: int) -> Methods:
    def norm(self: Any, name: str, x: mx.array) -> mx.array:
        factors = [1.01 if name == f"model.layers.{at}.input_layernorm" else 1.0]
        right = OpenLlama.norm(self, name, x)
        return right * mx.array(factors + [1.0] * (x.shape[-1] - 1))

    return {"norm": norm}


# RoPE.


def turned(angles: Callable[[Any, Any], Any], *, swap: bool = False) -> Plant:
    """`angles(positions, speeds)` (L, D/2); with `swap` a key has the numbers of a pair swapped."""

    def plant(at: int) -> Methods:
        def rope(self: Any, x: mx.array, layer: int, offset: int) -> mx.array:
            D = x.shape[-1]
            speeds = self.config["rope_theta"] ** (-np.arange(0, D, 2) / D)
            turns = angles(np.arange(offset, offset + x.shape[2]), speeds)
            cos, sin = (mx.array(f(turns).astype(np.float32)) for f in (np.cos, np.sin))
            a, b = x[..., : D // 2], x[..., D // 2 :]
            pair = [a * cos - b * sin, b * cos + a * sin]
            swapped = swap and x.shape[1] == self.config["num_key_value_heads"]
            return mx.concatenate(pair[::-1] if swapped else pair, axis=-1)

        return {"rope": rope}

    return plant


def late(positions: Any, speeds: Any) -> Any:
    """One position too far in single tokens."""
    return np.outer(positions + (len(positions) == 1), speeds)


def interleaved(at: int) -> Methods:
    def rope(self: Any, x: mx.array, layer: int, offset: int) -> mx.array:
        theta = self.config["rope_theta"]
        kind = {"traditional": True, "base": theta, "scale": 1.0, "offset": offset}
        return mx.fast.rope(x, x.shape[-1], **kind)

    return {"rope": rope}


def in_half(positions: Any, speeds: Any) -> Any:
    return np.outer(positions, speeds).astype(np.float16).astype(np.float64)


# The rest.


def silu(at: int) -> Methods:
    return {"silu": lambda self, x: x * mx.sigmoid(1.702 * x)}


def no_residual(at: int) -> Methods:
    def block(self: Any, layer: int, x: mx.array, cache: Any) -> mx.array:
        if layer != at:
            return OpenLlama.block(self, layer, x, cache)
        name = f"model.layers.{layer}"
        x = self.attend(layer, self.norm(f"{name}.input_layernorm", x), cache)
        return x + self.mlp(layer, self.norm(f"{name}.post_attention_layernorm", x))

    return {"block": block}


def tied(at: int) -> Methods:
    def linear(self: Any, name: str, x: mx.array) -> mx.array:
        return OpenLlama.linear(self, "model.embed_tokens" if name == "lm_head" else name, x)

    return {"linear": linear}


def ten_bits(at: int) -> Methods:
    """Matrix products of calls of several tokens, as TF32 makes them."""

    def cut(array: mx.array) -> mx.array:
        return ((array.view(mx.uint32) + 0x1000) & 0xFFFFE000).view(mx.float32)

    def linear(self: Any, name: str, x: mx.array) -> mx.array:
        if x.shape[-2] < 2:
            return OpenLlama.linear(self, name, x)
        return cut(x) @ cut(self.weights[f"{name}.weight"]).T

    return {"linear": linear}


def logits(change: Callable[[mx.array], mx.array]) -> Plant:
    def plant(at: int) -> Methods:
        return {
            "__call__": lambda self, tokens, cache: change(OpenLlama.__call__(self, tokens, cache))
        }

    return plant


def last_is_none(x: mx.array) -> mx.array:
    return mx.concatenate([x[:, :-1], x[:, -1:] * mx.nan], axis=1)


def one_weight(part: str) -> Plant:
    def plant(at: int) -> Methods:
        name = f"model.layers.{at}.{part}.weight"

        def init(self: Any, config: Any, weights: dict[str, mx.array]) -> None:
            array = np.array(weights[name])
            array[3, 4] += 0.1
            OpenLlama.__init__(self, config, weights | {name: mx.array(array)})

        return {"__init__": init}

    return plant

"""Caches of one's own as `mlxkv cost --cache FILE.py:make` takes them: right ones, and others with
one planted mistake each. What each is meant to keep stands beside the tests.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import without_torch  # noqa: F401 before mlx-lm
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from mlxkv.engines.our_caches import SplitKVCache


class StaleScale(QuantizedKVCache):
    """The first group's scale of each row is that of the row before."""

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        before = self.offset
        super().update_and_fetch(keys, values)
        scales = self.keys[1]
        scales[..., max(before, 1) : self.offset, 0] = (
            scales[..., max(before, 1) - 1 : self.offset - 1, 0] + 0
        )
        return self.keys_and_values()


class KeysForValues(KVCache):
    """Keeps the keys twice."""

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        return super().update_and_fetch(keys, keys)


class Sinks(KVCache):
    """Holds everything, and shows each token the first `keep` rows and the last `size - keep`."""

    def __init__(self, size: int, keep: int) -> None:
        super().__init__()
        self.window, self.keep = size - keep, keep

    def make_mask(self, n: int, **_: Any) -> mx.array:
        token, row = mx.arange(self.offset, self.offset + n)[:, None], mx.arange(self.offset + n)
        near = (row <= token) & (row > token - self.window)
        return near | ((row < self.keep) & (row <= token))


def quantised(config: Any) -> list[Any]:
    return [QuantizedKVCache(64, 8) for _ in range(config.num_hidden_layers)]


def stale_scale(config: Any) -> list[Any]:
    return [StaleScale(64, 8) for _ in range(config.num_hidden_layers)]


def keys_bits_for_values(config: Any) -> list[Any]:
    return [SplitKVCache(8, 8, 64) for _ in range(config.num_hidden_layers)]


def window_of(size: int, keep: int, config: Any) -> list[Any]:
    return [RotatingKVCache(size, keep) for _ in range(config.num_hidden_layers)]


def window(config: Any) -> list[Any]:
    return window_of(64, 0, config)


def window_one_short(config: Any) -> list[Any]:
    return window_of(63, 0, config)


def sinks(config: Any) -> list[Any]:
    return [Sinks(64, 4) for _ in range(config.num_hidden_layers)]


def sinks_overwritten(config: Any) -> list[Any]:
    return [Sinks(64, 0) for _ in range(config.num_hidden_layers)]


def broken(config: Any) -> list[Any]:
    raise RuntimeError("no such table")


def full(config: Any) -> list[Any]:
    return [KVCache() for _ in range(config.num_hidden_layers)]


def keys_for_values(config: Any) -> list[Any]:
    return [KeysForValues() for _ in range(config.num_hidden_layers)]

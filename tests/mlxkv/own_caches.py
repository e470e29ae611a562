"""Caches as somebody would write them, for `--cache FILE.py:make`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import without_torch  # noqa: F401 before mlx-lm
from mlx_lm.models.cache import KVCache


def make(config: Any) -> list[KVCache]:
    """Right ones."""
    return [KVCache() for _ in range(config.num_hidden_layers)]


class Untrimmed(KVCache):
    """Says that it has trimmed, and has not."""

    def trim(self, n: int) -> int:
        return min(self.offset, n)


def make_untrimmed(config: Any) -> list[KVCache]:
    return [Untrimmed() for _ in range(config.num_hidden_layers)]


class Window(KVCache):
    """Attends to the newest 6 rows, and keeps all."""

    def make_mask(self, N: int, **_: Any) -> mx.array:
        rows, columns = mx.arange(self.offset, self.offset + N)[:, None], mx.arange(self.offset + N)
        return (columns <= rows) & (columns > rows - 6)


def make_window(config: Any) -> list[KVCache]:
    return [Window() for _ in range(config.num_hidden_layers)]


def make_nothing(config: Any) -> list[KVCache]:
    return []

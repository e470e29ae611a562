"""One sequence, or a batch of equally long ones, in each engine: filled, decoded, taken back.

Both are asked as their users ask them: the port is given a prompt whole, and mlx-lm in calls of
2,048 tokens whose logits nobody asks for, as its own `generate_step` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import mlx.core as mx

Rows = list[list[int]]
STEP = 2048
"""mlx-lm's `prefill_step_size`."""


class Engine(Protocol):
    """A loaded model and the sequence that it is at."""

    vocab: int

    def begin(self, room: int) -> None:
        """An empty cache for so many tokens; the one before it is let go first."""

    def prefill(self, rows: Rows) -> mx.array:
        """The greedy next ids (B,) of rows (B, L), which are computed when they are asked for."""

    def step(self, tokens: Sequence[int]) -> mx.array:
        """The greedy next ids (B,) after one token of each sequence, not computed yet."""

    def back(self, tokens: int) -> None:
        """Takes back the last so many tokens."""


class Port:
    """The port, guarded."""

    def __init__(self, folder: str, dtype: str, ignore_keys: Sequence[str] = ()) -> None:
        from mlxkv.port.weights import load

        self._model, self._dtype = load(folder, dtype, ignore_keys=ignore_keys), dtype
        self.vocab = self._model.config.vocab_size
        self._cache: Any = None

    def begin(self, room: int) -> None:
        from mlxkv.port.cache import Cache

        self._cache = None
        self._cache = Cache(self._model.config, dtype=self._dtype, max_length=room)

    def prefill(self, rows: Rows) -> mx.array:
        return _greedy(self._model(rows, cache=self._cache))

    def step(self, tokens: Sequence[int]) -> mx.array:
        return _greedy(self._model([[token] for token in tokens], cache=self._cache))

    def back(self, tokens: int) -> None:
        self._cache.crop(len(self._cache) - tokens)


class MlxLm:
    """mlx-lm's Llama on its own KVCache."""

    def __init__(self, folder: str, dtype: str) -> None:
        from mlxkv.engines.mlx_lm import load

        self._model = load(folder, dtype)
        self.vocab = self._model.args.vocab_size
        self._cache: list[Any] = []

    def begin(self, room: int) -> None:
        from mlxkv.engines.mlx_lm import KVCACHE, caches_for

        self._cache = []
        self._cache = caches_for(self._model, KVCACHE)

    def prefill(self, rows: Rows) -> mx.array:
        import mlx.core as mx

        ids = mx.array(rows)
        for first in range(0, ids.shape[1] - 1, STEP):
            last = min(first + STEP, ids.shape[1] - 1)
            self._model(ids[:, first:last], cache=self._cache)
            mx.eval([layer.state for layer in self._cache])
            mx.clear_cache()
        return _greedy(self._model(ids[:, -1:], cache=self._cache)[:, -1])

    def step(self, tokens: Sequence[int]) -> mx.array:
        import mlx.core as mx

        ids = mx.array([[token] for token in tokens])
        return _greedy(self._model(ids, cache=self._cache)[:, -1])

    def back(self, tokens: int) -> None:
        for layer in self._cache:
            layer.trim(tokens)


def load(engine: str, folder: str, dtype: str, ignore_keys: Sequence[str] = ()) -> Engine:
    """`mlxkv` or `mlx-lm`, with the weights in memory."""
    return Port(folder, dtype, ignore_keys) if engine == "mlxkv" else MlxLm(folder, dtype)


def made_up(length: int, batch: int, vocab: int) -> list[list[int]]:
    """Token ids (B, L), the same for both engines; each sequence has its own."""
    return [[(3 + 7919 * i + 31 * b) % vocab for i in range(length)] for b in range(batch)]


def _greedy(logits: mx.array) -> mx.array:
    """[B, V] -> [B]"""
    import mlx.core as mx

    return mx.argmax(logits, axis=-1)

"""Llama on MLX, with the cache outside the model.

Axes: B batch, L new tokens in this call, S tokens the cache holds after it, H query heads, K key/value heads,
D head_dim, E hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn

from mlxkv.port import ops
from mlxkv.port.cache import Cache, CacheError
from mlxkv.port.config.llama import LlamaConfig

Tokens = Sequence[Sequence[int]] | npt.NDArray[np.integer] | mx.array

QUERIES = 256
"""Queries whose scores are held at once."""


class RMSNorm(nn.Module):
    """Scales a row to a root mean square of 1, times a weight (E,)."""

    def __init__(self, dims: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """[..., E] -> [..., E]"""
        return ops.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention whose keys and values live in the cache; in float32 whatever the weights' dtype."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads = config.num_attention_heads
        self.n_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        E, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(E, self.n_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(E, self.n_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(E, self.n_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.n_heads * self.head_dim, E, bias=bias)

    def __call__(self, x: mx.array, cache: Cache, start: int) -> mx.array:
        """[B, L, E] -> [B, L, E]; appends to this layer of the cache."""
        B, L, _ = x.shape
        queries = self._heads(self.q_proj(x), self.n_heads)  # [B, H, L, D]
        keys = self._heads(self.k_proj(x), self.n_kv_heads)  # [B, K, L, D]
        values = self._heads(self.v_proj(x), self.n_kv_heads)
        # Both at once: decoding is made of small operations, and this saves six a layer.
        turned = rotate(
            mx.concatenate([queries, keys], axis=1), *cache.rotation(start, L)
        )  # [B, H + K, L, D]
        queries, keys = turned[:, : self.n_heads], turned[:, self.n_heads :]
        keys, values = cache.extend(self.layer, keys, values)  # [B, K, S, D]
        hidden = fitting(cache.mask(L, start), (B, self.n_heads, L, keys.shape[2]))
        out = self._attend(queries, keys, values, hidden)
        return self.o_proj(out.swapaxes(1, 2).reshape(B, L, -1))  # [B, L, E]

    def _heads(self, x: mx.array, n: int) -> mx.array:
        B, L, _ = x.shape
        return x.reshape(B, L, n, self.head_dim).swapaxes(1, 2)

    def _attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, hidden: mx.array | None
    ) -> mx.array:
        dtype = ops.accurate(queries.dtype)
        wide = queries.astype(dtype), keys.astype(dtype), values.astype(dtype)
        return blockwise(*wide, scale=self.scale, hidden=hidden).astype(queries.dtype)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        E, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(E, inner, bias=bias)
        self.up_proj = nn.Linear(E, inner, bias=bias)
        self.down_proj = nn.Linear(inner, E, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        """[B, L, E] -> [B, L, E]"""
        return self.down_proj(ops.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def __call__(self, x: mx.array, cache: Cache, start: int) -> mx.array:
        """[B, L, E] -> [B, L, E]"""
        x = x + self.self_attn(self.input_layernorm(x), cache, start)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A Llama whose state lives in the `Cache` given to each call.

    `fingerprint` names the weights, as `load` took them from a checkpoint; None for those that came in another way.
    Weights changed by hand afterwards keep the name.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.fingerprint: str | None = None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Block(config, i) for i in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def dtype(self) -> mx.Dtype:
        """The weights' dtype."""
        dtype: mx.Dtype = self.norm.weight.dtype
        return dtype

    def __call__(
        self,
        tokens: Tokens,
        *,
        cache: Cache,
        index_pos: int | None = None,
        all_positions: bool = False,
    ) -> mx.array:
        """Logits of the last position (B, V), or of all (B, L, V); float32, or float64 where the weights are.

        `tokens` (B, L) are ids; `index_pos` is the position of the first of them, left to the cache when None. Refuses
        with a CacheError (a ValueError) and, in a guarded cache, leaves every layer as it was.
        """
        ids = self._ids(tokens)
        B, L = ids.shape
        start = cache.admit(B, L, index_pos, self)
        before = cache.snapshot()
        try:
            # MLX has float64 on the CPU only.
            with mx.stream(mx.cpu if self.dtype == mx.float64 else mx.default_device()):
                return self._logits(ids, cache, start, all_positions)
        except BaseException:
            if cache.guarded:
                cache.restore(before)
            raise

    def _ids(self, tokens: Tokens) -> npt.NDArray[np.int32]:
        try:
            ids = np.array(tokens)
        except ValueError as error:
            raise CacheError(
                "tokens: expected whole numbers of shape (B, L), got rows of unequal length or no numbers"
            ) from error
        if ids.ndim != 2 or (ids.size and ids.dtype.kind not in "iu"):
            raise CacheError(
                f"tokens: expected whole numbers of shape (B, L), got shape {ids.shape} {ids.dtype}"
            )
        V = self.config.vocab_size
        if ids.size and not (ids.min() >= 0 and ids.max() < V):
            worst = ids.max() if ids.max() >= V else ids.min()
            raise CacheError(f"tokens: id {worst} is outside the vocabulary of {V}")
        return ids.astype(np.int32)

    def _logits(
        self, ids: npt.NDArray[np.int32], cache: Cache, start: int, all_positions: bool
    ) -> mx.array:
        x = self.embed_tokens(mx.array(ids))  # [B, L, E]
        for block in self.layers:
            x = block(x, cache, start)
        x = self.norm(
            x if all_positions else x[:, -1]
        )  # the other rows' logits would be thrown away
        logits = (
            self.embed_tokens.as_linear(x) if self.config.tie_word_embeddings else self.lm_head(x)
        )
        return logits.astype(ops.accurate(logits.dtype))


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """RoPE on [B, heads, L, D]: element i turns with element i + D/2 by the angles of (L, D/2) tables."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def blockwise(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, hidden: mx.array | None
) -> mx.array:
    """`ops.attention`, QUERIES queries at a time: [B, H, L, D] and twice [B, K, S, D] -> [B, H, L, D].

    No query of a block sees a key after the block's last one, so that a long prompt costs little more than half the work
    and its scores a fraction of the memory.
    """
    L, S = queries.shape[2], keys.shape[2]
    if hidden is None or L <= QUERIES:
        return ops.attention(queries, keys, values, scale=scale, hidden=hidden)
    blocks = []
    for first in range(0, L, QUERIES):
        last = min(first + QUERIES, L)
        seen = S - L + last
        rows, columns = queries[:, :, first:last], hidden[first:last, :seen]
        blocks.append(
            ops.attention(rows, keys[:, :, :seen], values[:, :, :seen], scale=scale, hidden=columns)
        )
    return mx.concatenate(blocks, axis=2)


def fitting(hidden: mx.array | None, scores: tuple[int, ...]) -> mx.array | None:
    """The mask as booleans, refused where candle's broadcast would fail; MLX would stretch an axis of 1."""
    if hidden is not None and hidden.shape != scores[2:]:
        raise CacheError(
            f"cannot broadcast {list(hidden.shape)} to {list(scores)}: the cache holds other rows than index_pos says"
        )
    return None if hidden is None else hidden.astype(mx.bool_)


def parameters(model: Llama) -> dict[str, mx.array]:
    """Every weight by the name that Hugging Face checkpoints give it."""
    from mlx.utils import tree_flatten

    flat: list[tuple[str, Any]] = tree_flatten(model.parameters())
    return {name if name.startswith("lm_head.") else f"model.{name}": array for name, array in flat}

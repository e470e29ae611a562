"""Llama on MLX, with the cache outside the model.

Axes, by the same letters everywhere in `mlxkv.port`:

    B  batch                          H  query heads
    L  new tokens in this call        K  key/value heads
    S  tokens that the cache holds    D  head_dim
       after this call                E  hidden_size
    V  vocabulary

The architecture is Llama's (arXiv:2302.13971): RMSNorm before each half of a block, RoPE, grouped
queries (arXiv:2305.13245) and a SwiGLU MLP. How a call's position and mask follow from the cache is
that of candle's `llama.rs`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx.utils import tree_flatten

from mlxkv.port import ops, step
from mlxkv.port.cache import Cache, CacheError, Causal, Mask
from mlxkv.port.config.llama import LlamaConfig
from mlxkv.port.joint import Embedding, Joint, Linear
from mlxkv.port.ops import Tap
from mlxkv.port.part import Part
from mlxkv.port.step import Rows, Step
from mlxkv.port.watched import Noted, watch

Tokens = Sequence[Sequence[int]] | npt.NDArray[np.integer] | mx.array

ModelTap = Callable[[int, str, mx.array], mx.array]
"""Given a layer, the name of a place in it, and the array there; only what it returns for `hidden`,
the layer's output, is used: it goes on in that array's place."""

QUERIES = 256
"""Queries whose scores are held at once, where they are no more than SCORES."""
SCORES = 2**22
"""Scores of all heads that are held at once, 32 MB in float64, up to which glibc keeps memory and
needs no new pages for the next block. A call that has more computes each block before it begins the
next: MLX on a CPU makes room for a hundred operations ahead, which over 4,096 tokens and 9 heads
took 991 MB, and takes 195 MB so."""
ROWS = 1024
"""Positions that go through an MLP at once: 8,192 wide over 32,768 tokens each array in it would
take 1 GB."""


class RMSNorm(Noted):
    """Divides a row by its root mean square and multiplies by a weight (E,); arXiv:1910.07467."""

    def __init__(self, dims: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        """[..., E] -> [..., E]"""
        return ops.rms_norm(x, self.weight, self.eps)


class Several(Noted):
    """What has several projections of one input, which may lie in one array."""

    joint: Joint | None = None
    names: tuple[str, ...] = ()

    def projections(self) -> list[nn.Module]:
        return [*map(self.get, self.names)]

    def joined(self) -> Joint | None:
        """What multiplies with all of them at once; let go once one has another array."""
        joint = self.joint
        if joint is not None and not joint.serves(self.projections()):
            joint = self.joint = None
        return joint


class Attention(Several):
    """Causal self-attention whose keys and values live in the cache.

    It adds up in float32 whatever the weights' dtype, and in float64 where they are float64.
    """

    names = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads = config.num_attention_heads
        self.n_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        E, bias = config.hidden_size, config.attention_bias
        self.q_proj = Linear(E, self.n_heads * self.head_dim, bias=bias)
        self.k_proj = Linear(E, self.n_kv_heads * self.head_dim, bias=bias)
        self.v_proj = Linear(E, self.n_kv_heads * self.head_dim, bias=bias)
        self.o_proj = Linear(self.n_heads * self.head_dim, E, bias=bias)

    def __call__(
        self, x: mx.array, cache: Cache | Rows, start: Any, tap: Tap | None = None
    ) -> mx.array:
        """[B, L, E] -> [B, L, E]; appends to this layer of the cache."""
        B, L, _ = x.shape
        H, K = self.n_heads, self.n_kv_heads
        # Queries and keys are rotated together: decoding is bound by the number of small kernels,
        # and this saves six per layer.
        both, values = self._projected(x)
        turned = rotate(both, *cache.rotation(start, L))  # [B, H + K, L, D]
        held = cache.extend(self.layer, turned[:, H:], values)  # twice [B, K, S, D]
        hidden = fitting(cache.mask(L, start), (B, H, L, held[0].shape[2]))
        dtype = ops.accurate(x.dtype)
        if cache.guarded:  # candle always makes them wide
            dtype = ops.attended(x.dtype, L, H // K, self.head_dim)
        wide = [a.astype(dtype) for a in (turned[:, :H], *held)]
        mixed = blockwise(*wide, hidden=hidden, scale=self.scale, tap=tap).astype(turned.dtype)
        mixed = mixed.swapaxes(1, 2).reshape(B, L, -1)  # [B, L, H * D]
        out = self.o_proj(mixed)
        if tap is not None:
            ops.show(tap, input_norm=x, q=both[:, :H], k=both[:, H:], v=values)
            ops.show(tap, q_rope=turned[:, :H], k_rope=turned[:, H:], attention=mixed, o_proj=out)
        return out

    def _projected(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """[B, L, E] -> queries and keys [B, H + K, L, D], values [B, K, L, D]"""
        H, K, joint = self.n_heads, self.n_kv_heads, self.joined()
        if joint is not None:
            made = self._heads(joint.whole(x), H + 2 * K)
            return made[:, : H + K], made[:, H + K :]
        queries = self._heads(self.q_proj(x), H)
        keys, values = (self._heads(project(x), K) for project in (self.k_proj, self.v_proj))
        return mx.concatenate([queries, keys], axis=1), values

    def _heads(self, x: mx.array, n: int) -> mx.array:
        B, L, _ = x.shape
        return x.reshape(B, L, n, self.head_dim).swapaxes(1, 2)


class MLP(Several):
    """down(silu(gate(x)) * up(x)), known as SwiGLU (arXiv:2002.05202)."""

    names = ("gate_proj", "up_proj")

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        E, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(E, inner, bias=bias)
        self.up_proj = Linear(E, inner, bias=bias)
        self.down_proj = Linear(inner, E, bias=bias)

    def __call__(self, x: mx.array, tap: Tap | None = None) -> mx.array:
        """[B, L, E] -> [B, L, E]"""
        L = x.shape[1]
        if tap is None and L > ROWS:
            blocks = [self(x[:, i : i + ROWS]) for i in range(0, L, ROWS)]
            for block in blocks:
                mx.eval(block)
            return mx.concatenate(blocks, axis=1)
        joint = self.joined()
        gate, up = (self.gate_proj(x), self.up_proj(x)) if joint is None else joint(x)
        activation = ops.silu(gate) * up
        out = self.down_proj(activation)
        if tap is not None:
            ops.show(tap, post_norm=x, gate=gate, up=up, activation=activation, down=out)
        return out


class Block(Noted):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def __call__(
        self, x: mx.array, cache: Cache | Rows, start: Any, tap: Tap | None = None
    ) -> mx.array:
        """[B, L, E] -> [B, L, E]"""
        x = x + self.self_attn(self.input_layernorm(x), cache, start, tap)
        return x + self.mlp(self.post_attention_layernorm(x), tap)


class Llama(Noted):
    """A Llama whose state lives in the `Cache` given to each call.

    `fingerprint` names the weights that `load` took from a checkpoint; None for weights that came
    in another way. Weights that are changed by hand afterwards keep the name. `part` is the rank's
    whose heads and MLP it has, None for a whole model. With `compiled` a call of one token per
    sequence is one compiled function where it can be (`steps_compiled`); its logits are the same
    within the dtype's noise.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.fingerprint: str | None = None
        self.part: Part | None = None
        self.compiled = True
        self._step = Step()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Block(config, i) for i in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = self.norm.weight.dtype
        return dtype

    def shard(self, group: mx.distributed.Group) -> None:
        """Keeps this rank's heads and part of the MLP; from now on every rank makes each call.

        Its caches are made with `Cache(model.config, part=model.part)`. Raises Refusal where heads,
        KV heads, inner width or packed groups do not divide by the group's size.
        """
        from mlxkv.port import shard

        shard.shard(self, group)

    def __call__(
        self,
        tokens: Tokens,
        *,
        cache: Cache,
        index_pos: int | None = None,
        all_positions: bool = False,
        places: Sequence[int] | None = None,
        tap: ModelTap | None = None,
    ) -> mx.array:
        """Logits of the last position (B, V), of all positions (B, L, V), or of those at `places`.

        They are float32, or float64 where the weights are. `tokens` (B, L) are ids. `index_pos` is
        the position of the first of them; None leaves it to the cache. `places`, from 0 to L - 1,
        are those of the tokens whose logits are wanted, (B, len(places), V), whatever
        `all_positions` says. `tap(layer, name, array)` is shown what each layer computes, under the
        names of `oracle.formats.trace.TAPS`, and what enters layer 0 as `embedding`; what it
        returns for `hidden` replaces that layer's output.

        Raises CacheError, a ValueError, for a call that the cache refuses. A guarded cache is then
        as it was before the call.
        """
        ids = self._ids(tokens)
        B, L = ids.shape
        with cache.call(B, L, index_pos, self) as start, ops.stream(self.dtype):
            kept = (slice(None) if all_positions else -1) if places is None else _indices(places, L)
            return cache.done(self._logits(ids, cache, start, kept, tap))

    def _ids(self, tokens: Tokens) -> npt.NDArray[np.int32]:
        expected = "tokens: expected whole numbers of shape (B, L)"
        try:
            ids = np.array(tokens)
        except ValueError as error:
            raise CacheError(f"{expected}, got rows of unequal length or no numbers") from error
        if ids.ndim != 2 or (ids.size and ids.dtype.kind not in "iu"):
            raise CacheError(f"{expected}, got shape {ids.shape} {ids.dtype}{_odd(tokens, ids)}")
        V = self.config.vocab_size
        outside = np.argwhere((ids < 0) | (ids >= V))
        if len(outside):
            b, i = outside[0]
            where = f"place {i}" if len(ids) == 1 else f"place {i} of sequence {b}"
            raise CacheError(f"tokens: id {ids[b, i]} at {where} is outside the vocabulary of {V}")
        return ids.astype(np.int32)

    def _logits(
        self,
        ids: npt.NDArray[np.int32],
        cache: Cache,
        start: int,
        kept: slice | int | mx.array,
        tap: ModelTap | None,
    ) -> mx.array:
        given = cache.after(mx.array(ids))
        if ids.shape[1] == 1 and tap is None and self.steps_compiled:
            logits = self._step(self, given, cache, start)
            if logits is not None:
                return logits if isinstance(kept, int) else logits[:, None][:, kept]
        return self.forward(given, cache, start, kept, tap)

    @property
    def steps_compiled(self) -> bool:
        """Whether decoding is compiled, as `step.serves` has it and `compiled` allows."""
        return self.compiled and step.serves(self.dtype, whole=self.part is None)

    def forward(
        self,
        ids: mx.array,
        cache: Cache | Rows,
        start: Any,
        kept: slice | int | mx.array,
        tap: ModelTap | None,
    ) -> mx.array:
        """Logits of ids (B, L) from the position `start` on, of the rows `kept`.

        All that the model is: of a cache, or of the arrays of a step that is being traced.
        """
        x = self.embed_tokens(ids)  # [B, L, E]
        if tap is not None:
            tap(0, "embedding", x)
        for i, block in enumerate(self.layers):
            x = block(x, cache, start, None if tap is None else partial(tap, i))
            x = x if tap is None else tap(i, "hidden", x)
        # The other rows' logits would be thrown away.
        x = self.norm(x[:, kept])
        head = self.embed_tokens.as_linear if self.config.tie_word_embeddings else self.lm_head
        logits = head(x)
        return logits.astype(ops.accurate(logits.dtype))


def _indices(places: Sequence[int], length: int) -> mx.array:
    """Places in a call of `length` tokens, to index with; MLX would read beyond the end."""
    outside = [place for place in places if not 0 <= place < length]
    if outside or not len(places):
        found = outside[0] if outside else "none"
        raise CacheError(f"places: {found}, expected one or more from 0 to {length - 1}")
    return mx.array(list(places))


def _odd(tokens: Any, ids: npt.NDArray[Any]) -> str:
    """Which of the tokens (B, L) is the first that is no whole number."""
    rows: Any = tokens if isinstance(tokens, Sequence) else ids
    for b, row in enumerate(rows if ids.ndim == 2 else ()):
        for i, id in enumerate(row):
            whole = isinstance(id, int | np.integer) and not isinstance(id, bool)
            if not whole or abs(int(id)) >= 2**63:
                return f", {id!r:.40} at place {i} of sequence {b}"
    return ""


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """RoPE (arXiv:2104.09864) on [B, heads, L, D], with (L, D/2) tables.

    Element i turns with element i + D/2, as in Hugging Face's checkpoints; the paper pairs
    neighbours.
    """
    half = x.shape[-1] // 2
    swapped = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
    cos, sin = mx.concatenate([cos, cos], axis=-1), mx.concatenate([-sin, sin], axis=-1)
    return x * cos + swapped * sin


def blockwise(
    queries: mx.array, keys: mx.array, values: mx.array, *, hidden: Mask | None, **options: Any
) -> mx.array:
    """`ops.attention` of some queries at a time, as QUERIES and SCORES allow.

    [B, H, L, D] and twice [B, K, S, D] -> [B, H, L, D].

    No query of a block sees a key after the block's last one. So a long prompt costs little more
    than half the work, and its scores take a fraction of the memory.
    """
    (B, H, L, _), S = queries.shape, keys.shape[2]
    most = min(QUERIES, max(1, SCORES // (B * H * S)))
    if hidden is None or most >= L:
        whole = hidden[:, :] if isinstance(hidden, Causal) else hidden
        return ops.attention(queries, keys, values, hidden=whole, **options)
    blocks = []
    for first in range(0, L, most):
        last = min(first + most, L)
        seen = S - L + last
        given = queries[:, :, first:last], keys[:, :, :seen], values[:, :, :seen]
        blocks.append(ops.attention(*given, hidden=hidden[first:last, :seen], **options))
        if B * H * L * S > SCORES:
            mx.eval(blocks[-1])
    return mx.concatenate(blocks, axis=2)


def fitting(hidden: Mask | None, scores: tuple[int, ...]) -> Mask | None:
    """The mask (L, S) for scores of the shape [B, H, L, S]; an array becomes booleans.

    Raises CacheError where candle's broadcast would fail. MLX would stretch an axis of 1 silently.
    """
    if hidden is not None and hidden.shape != scores[2:]:
        what = f"cannot broadcast {list(hidden.shape)} to {list(scores)}"
        raise CacheError(f"{what}: the cache holds other rows than index_pos says")
    return hidden.astype(mx.bool_) if isinstance(hidden, mx.array) else hidden


def parameters(model: Llama) -> dict[str, mx.array]:
    """Every weight by the name that Hugging Face checkpoints give it."""
    flat: list[tuple[str, Any]] = tree_flatten(model.parameters())
    return {name if name.startswith("lm_head.") else f"model.{name}": array for name, array in flat}


watch(sys.modules[__name__], RMSNorm, Several, Attention, MLP, Block, Llama)

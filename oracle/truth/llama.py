"""The strict float64 Llama that everything is judged against: plain torch, one layer's weights at a time.

transformers' `.double()` is not float64: its RMSNorm, softmax and RoPE angles stay float32. Here everything is. The
weights are the stored ones after rounding to the run's dtype, so that arithmetic is judged and not their rounding. Of
packed weights the scales and biases are what is stored and rounded; what they unpack to is left exact, since every engine
rounds that in its own way or not at all: it is arithmetic, and the pool's rounding of it is part of the noise.

Axes: L tokens of one segment, S tokens in a layer's cache after it, n tokens of the whole sequence; H query heads,
K key/value heads, G = H / K query heads to each of them, D head_dim; E hidden, F the MLP's width, V vocabulary.

The sequence is followed in several ways at once (whole, in chunks, token by token), each with a cache of its own in every
layer. That they agree is the truth's first proof of itself. This module knows no plan, no noise and no port.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import linear

from oracle.formats.errors import Refusal
from oracle.formats.tensors import Array
from oracle.model.checkpoint import Checkpoint
from oracle.model.packing import Packed
from oracle.truth import unpack as dequantise
from oracle.truth.config import Config
from oracle.truth.rope import Linear, Llama3, LongRope, Yarn

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_BLOCK = 2**23  # float64 numbers in one block of scores or logits: 64 MB

Change = Callable[[str, Tensor], Tensor]
Sink = Callable[[int, dict[str, Tensor]], None]
Progress = Callable[[str, int, int], None]


class Weights:
    """The checkpoint's tensors in float64, read one at a time, after rounding to the run's dtype and then `change`."""

    def __init__(self, checkpoint: Checkpoint, *, dtype: str, change: Change | None = None) -> None:
        self.checkpoint, self.dtype = checkpoint, dtype
        self._change = change

    def __call__(self, name: str, *, rows: Tensor | None = None) -> Tensor:
        """One tensor, or only some of its rows."""
        packed = self.checkpoint.packed.get(name)
        rounded = (
            self._rounded(name, rows) if packed is None else self._unpacked(name, packed, rows)
        )
        return rounded if self._change is None else self._change(name, rounded)

    def stored(self, name: str) -> Tensor:
        """One tensor as stored, mapped from its file."""
        file = self.checkpoint.tensors[name].file
        with safe_open(str(file), framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        return tensor

    def _rounded(self, name: str, rows: Tensor | None) -> Tensor:
        stored = self.stored(name)
        rounded = (
            (stored if rows is None else stored[rows]).to(DTYPES[self.dtype]).to(torch.float64)
        )
        if not bool(torch.isfinite(rounded).all()):
            where = f"{self.checkpoint.folder}: {name}"
            raise Refusal(
                f"{where}: not finite in {self.dtype}, expected finite weights; use other weights or another --dtype"
            )
        return rounded

    def _unpacked(self, name: str, packed: Packed, rows: Tensor | None) -> Tensor:
        stored = self.stored(name).numpy()
        words = stored if rows is None else stored[rows.numpy()]
        scales, biases = (
            self._rounded(part, rows).numpy() for part in (packed.scales, packed.biases)
        )
        return torch.from_numpy(
            dequantise.weight(words, scales, biases, bits=packed.bits, group_size=packed.group_size)
        )

    def layer(self, config: Config, i: int) -> dict[str, Tensor]:
        """One layer's tensors by the rest of their names."""
        prefix = f"model.layers.{i}."
        return {
            name.removeprefix(prefix): self(name)
            for name in config.shapes()
            if name.startswith(prefix)
        }

    def head(self, config: Config) -> Tensor:
        """The matrix that makes logits, (V, E)."""
        embedding = "model.embed_tokens.weight"
        if not config.tied:
            return self("lm_head.weight")
        for part in ("weight", "scales", "biases"):
            name, its = f"lm_head.{part}", f"model.embed_tokens.{part}"
            if name in self.checkpoint.tensors and not (
                its in self.checkpoint.tensors and torch.equal(self.stored(name), self.stored(its))
            ):
                where = self.checkpoint.folder
                raise Refusal(
                    f"{where}: {name} differs from {its} though tie_word_embeddings is true; correct config.json"
                )
        return self(embedding)


@dataclass(slots=True)
class Stream:
    """One way of following the sequence: its spans, and its hidden states, which every layer replaces."""

    spans: list[tuple[int, int]]
    hidden: Tensor


@torch.inference_mode()
def follow(
    weights: Weights,
    config: Config,
    tokens: Sequence[int],
    *,
    segments: Mapping[str, Sequence[int]],
    taps: frozenset[str] = frozenset(),
    sink: Sink | None = None,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """What enters the head, (n, E), for each way of cutting the sequence into segments.

    `sink` is given each layer's number and, of the first way, its `keys` (after RoPE) and `values`, both (K, n, D), and
    the taps asked for, which need that way to be a single segment.
    """
    n, ids = len(tokens), torch.tensor(tokens)
    embedded = weights("model.embed_tokens.weight", rows=ids)  # [n, E]
    streams = {name: Stream(_spans(sizes, n), embedded.clone()) for name, sizes in segments.items()}
    watched = next(iter(streams))
    if taps and len(streams[watched].spans) > 1:
        raise ValueError(
            f"truth: {watched} has {len(streams[watched].spans)} segments, expected one for taps"
        )
    tables = rope_tables(config, n)
    for i in range(config.n_layers):
        if progress:
            progress("truth (float64), layers", i, config.n_layers)
        layer = Layer(config, weights.layer(config, i), tables)
        for name, stream in streams.items():
            seen = dict.fromkeys(taps) if name == watched else {}
            keys, values = layer.run(stream, seen)
            if sink and name == watched:
                sink(
                    i,
                    {"keys": keys, "values": values}
                    | {k: v for k, v in seen.items() if v is not None},
                )
    norm = weights("model.norm.weight")
    return {name: rms_norm(stream.hidden, norm, config.eps) for name, stream in streams.items()}


class Layer:
    """One decoder layer, followed segment by segment against its own cache."""

    def __init__(
        self, config: Config, weights: Mapping[str, Tensor], tables: tuple[Tensor, Tensor]
    ) -> None:
        self.config, self.weights, self.tables = config, weights, tables

    def run(self, stream: Stream, seen: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Replaces the stream's hidden states; returns the keys and values of all its tokens, each (K, n, D)."""
        shape = (self.config.n_kv_heads, len(stream.hidden), self.config.head_dim)
        cache = (
            torch.full(shape, math.nan, dtype=torch.float64),
            torch.full(shape, math.nan, dtype=torch.float64),
        )
        for start, stop in stream.spans:
            stream.hidden[start:stop] = self._segment(stream.hidden[start:stop], start, cache, seen)
        return cache

    def _segment(
        self, x: Tensor, start: int, cache: tuple[Tensor, Tensor], seen: dict[str, Any]
    ) -> Tensor:
        c, (L, _) = self.config, x.shape
        stop = start + L
        normed = rms_norm(x, self.weights["input_layernorm.weight"], c.eps)
        projected = (self._linear(f"self_attn.{name}_proj", normed) for name in "qkv")
        q, k, v = (t.view(L, -1, c.head_dim).transpose(0, 1) for t in projected)  # [H or K, L, D]
        cos, sin = (table[start:stop] for table in self.tables)
        queries, keys = (rotate(t, cos, sin, interleaved=c.interleaved) for t in (q, k))
        cache[0][:, start:stop], cache[1][:, start:stop] = keys, v
        _keep(seen, input_norm=normed, q=q, k=k, v=v, q_rope=queries, k_rope=keys)
        mixed = attend(
            queries, cache[0][:, :stop], cache[1][:, :stop], start=start, seen=seen
        )  # [L, H * D]
        out = self._linear("self_attn.o_proj", mixed)
        x = x + out
        post = rms_norm(x, self.weights["post_attention_layernorm.weight"], c.eps)
        gate, up = self._linear("mlp.gate_proj", post), self._linear("mlp.up_proj", post)
        activation = gate * torch.sigmoid(gate) * up
        down = self._linear("mlp.down_proj", activation)
        x = x + down
        _keep(
            seen,
            attention=mixed,
            o_proj=out,
            post_norm=post,
            gate=gate,
            up=up,
            activation=activation,
            down=down,
            hidden=x,
        )
        return x

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, *, start: int, seen: dict[str, Any] | None = None
) -> Tensor:
    """Causal attention of queries (H, L, D) at positions from `start` on over keys and values (K, S, D), to (L, H * D)."""
    (H, L, D), (K, S, _) = queries.shape, keys.shape
    grouped = queries.reshape(K, H // K, L, D)
    rows = max(1, _BLOCK // (H * S))
    mixed, kept = [], []
    for first in range(0, L, rows):
        block = grouped[:, :, first : first + rows]  # [K, G, rows, D]
        scores = block @ keys[:, None].transpose(-1, -2) / math.sqrt(D)  # [K, G, rows, S]
        hidden = hides(first + start, block.shape[2], S)
        mixed.append(torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1) @ values[:, None])
        if seen and "scores" in seen:
            kept.append(scores.masked_fill(hidden, 0.0).flatten(0, 1))
    if kept:
        _keep(seen or {}, scores=torch.cat(kept, dim=1))
    return torch.cat(mixed, dim=2).flatten(0, 1).transpose(0, 1).reshape(L, H * D)


def hides(start: int, rows: int, columns: int) -> Tensor:
    """The causal mask: True where the token at position start + row may not see the key at that column."""
    return torch.arange(columns) > torch.arange(start, start + rows)[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over its root mean square, times the weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_tables(config: Config, n: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each (n, D / 2), of the angles of positions 0 to n - 1 of a sequence of n tokens, all in float64."""
    angles = torch.arange(n, dtype=torch.float64)[:, None] * inverse_frequencies(config, n)
    s = config.scaling
    attention = s.attention if isinstance(s, Yarn | LongRope) else 1.0
    return angles.cos() * attention, angles.sin() * attention


def inverse_frequencies(config: Config, n: int = 1) -> Tensor:
    """One frequency for each pair that RoPE turns, (D / 2,), in a sequence of n tokens."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain = config.theta**-exponents
    s = config.scaling
    if isinstance(s, Linear):
        return plain / s.factor
    if isinstance(s, Llama3):
        # Turns that a pair makes over the original context: many are kept, few are slowed down, the rest blends.
        turns = s.original_max_position_embeddings * plain / (2 * math.pi)
        share = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(
            0.0, 1.0
        )
        return share * plain + (1.0 - share) * plain / s.factor
    if isinstance(s, Yarn):
        stretched = _yarn_share(config, s)
        return plain * (1.0 - stretched) + plain / s.factor * stretched
    if isinstance(s, LongRope):
        return plain / torch.tensor(
            s.long if n > s.original_max_position_embeddings else s.short, dtype=torch.float64
        )
    return plain  # dynamic too, up to the longest sequence that is judged


def _yarn_share(config: Config, s: Yarn) -> Tensor:
    """How far each pair is stretched, (D / 2,) from 0 to 1: a ramp between the pairs that make beta_fast and beta_slow turns."""
    ends = []
    for turns in (s.beta_fast, s.beta_slow):
        wavelength = s.original_max_position_embeddings / turns
        ends.append(
            config.head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.theta))
        )
    if s.truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = (
        max(ends[0], 0),
        min(ends[1], config.head_dim - 1),
    )  # of a head, as published, not of its pairs
    if low == high:
        high += 0.001
    return ((torch.arange(config.head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(
        0.0, 1.0
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x (heads, L, D) with its pairs (i, i + D / 2) turned, or its pairs (2i, 2i + 1) where interleaved."""
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@torch.inference_mode()
def write_logits(streams: Mapping[str, Tensor], head: Tensor, out: Array) -> tuple[float, float]:
    """Fills `out` (n, V) with the first stream's logits; returns max |logit| and the largest difference to any other stream's."""
    (name, first), *others = streams.items()
    most = apart = 0.0
    rows = max(1, _BLOCK // len(head))
    for start in range(0, len(first), rows):
        logits = first[start : start + rows] @ head.T
        if not bool(torch.isfinite(logits).all()):
            raise Refusal(
                f"truth: logits of {name} at positions from {start} on are not finite, expected finite ones; check the weights"
            )
        out[start : start + rows] = logits.numpy()
        most = max(most, float(logits.abs().max()))
        for _, other in others:
            apart = max(
                apart,
                float(
                    (other[start : start + rows] @ head.T - logits)
                    .abs()
                    .max()
                    .nan_to_num(nan=math.inf)
                ),
            )
    return most, apart


def _spans(sizes: Sequence[int], n: int) -> list[tuple[int, int]]:
    stops = np.cumsum(sizes).tolist()
    if min(sizes) < 1 or stops[-1] != n:
        raise ValueError(f"truth: segments {list(sizes)} do not add up to {n} tokens")
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _keep(seen: dict[str, Any], **values: Tensor) -> None:
    seen.update({name: value for name, value in values.items() if name in seen})

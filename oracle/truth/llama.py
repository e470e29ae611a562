"""The strict float64 Llama that everything is judged against: plain torch, a layer at a time.

transformers' `.double()` is not float64: its RMSNorm, softmax and RoPE angles stay float32 unless
they are widened too (`oracle/pool/orders.py`). Here everything is. The architecture is that of
transformers' `modeling_llama.py` and candle's `llama.rs`: RMSNorm before attention and before the
MLP, RoPE on queries and keys, grouped-query attention, SwiGLU.

Axes: L tokens of one segment, S tokens in a layer's cache after it, n tokens of the whole sequence;
H query heads, K key/value heads, G = H / K query heads to each of them, D head_dim; E hidden, F the
MLP's width, V vocabulary.

The sequence is followed in several ways at once (whole, in chunks, token by token), each with a
cache of its own in every layer. That they agree is the truth's first proof of itself. What a layer
does to each position by itself, but for RoPE, is computed for all segments of a way together, and
for some thousand positions at once where there are more. This module knows no plan, no noise and no
port.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from oracle.formats.errors import Refusal
from oracle.formats.progress import Progress, silent
from oracle.formats.tensors import Array
from oracle.truth.config import Config
from oracle.truth.rope import Linear, Llama3, LongRope, Yarn
from oracle.truth.weights import EMBEDDING, NORM, Weights

_BLOCK = 2**23  # float64 numbers in one block of scores or logits: 64 MB
_LONG_BLOCK = 2**21  # and of scores where a sequence is long: twice as fast as 64 MB at a time
_WIDE = 2**24  # numbers of the MLP's width that are computed at once, of which five stand in memory
_SHORT = 1024  # positions that are computed at once however wide the MLP is

Sink = Callable[[int, dict[str, Tensor]], None]
Maker = Callable[[Config, Mapping[str, Tensor], tuple[Tensor, Tensor]], "Layer"]
Mask = Callable[[int, int, int], Tensor]
"""Of a first token's position, rows and columns: see `hides`."""


@dataclass(slots=True)
class Stream:
    """One way of following the sequence: its spans, and hidden states (n, E) between two layers.

    `maker` makes its layers (None: Layer does).
    """

    spans: list[tuple[int, int]]
    hidden: Tensor
    maker: Maker | None = None


@torch.inference_mode()
def follow(
    weights: Weights,
    config: Config,
    tokens: Sequence[int],
    *,
    segments: Mapping[str, Sequence[int]],
    shared: int = 0,
    taps: frozenset[str] = frozenset(),
    sink: Sink | None = None,
    tables: tuple[Tensor, Tensor] | None = None,
    makers: Mapping[str, Maker] | None = None,
    progress: Progress = silent,
) -> dict[str, Tensor]:
    """What enters the head, (n, E), for each way of cutting the sequence into segments.

    Every way but the first takes the first `shared` positions from it, where a segment must begin.
    `makers` make the layers of ways that do not follow Layer. `sink` is given each layer's number
    and, of the first way, its `keys` (after RoPE) and `values`, both (K, n, D), and the taps asked
    for, which need that way to be a single segment. `tables` are `rope_tables` of all tokens.
    """
    n, embedded = len(tokens), weights(EMBEDDING, rows=torch.tensor(tokens))  # [n, E]
    first, *others = (streams := _streams(segments, embedded, shared, makers or {})).values()
    if taps and len(first.spans) > 1:
        raise ValueError(f"truth: {len(first.spans)} segments first, expected one for taps")
    tables, room = tables or rope_tables(config, n), dict[str, Tensor]()
    for i in range(config.n_layers):
        progress("truth (float64), layers", i, config.n_layers)
        # Written over those of the layer before: what names them ends with the call.
        given = config, weights.layer(config, i, into=room), tables
        kept = _through(given, first, others, taps, shared)
        if sink:
            sink(i, kept)
    for stream in others:
        stream.hidden[:shared] = first.hidden[:shared]
    norm = weights(NORM)
    return {n: rms_norm(s.hidden, norm, config.eps) for n, s in streams.items()}


def _through(
    given: tuple[Config, Mapping[str, Tensor], tuple[Tensor, Tensor]],
    first: Stream,
    others: Sequence[Stream],
    taps: Collection[str],
    shared: int,
) -> dict[str, Tensor]:
    """All ways through the layer of these weights; what the sink is given of the first."""
    seen: dict[str, Any] = dict.fromkeys(taps)
    whole = (first.maker or Layer)(*given).run(first, seen)
    for stream in others:
        (stream.maker or Layer)(*given).run(stream, {}, [a[:, :shared] for a in whole])
    kept = dict(zip(("keys", "values"), whole, strict=True)) | seen
    return {name: value for name, value in kept.items() if value is not None}


def _streams(
    segments: Mapping[str, Sequence[int]],
    embedded: Tensor,
    shared: int,
    makers: Mapping[str, Maker],
) -> dict[str, Stream]:
    streams = dict[str, Stream]()
    for name, sizes in segments.items():
        spans = [s for s in _spans(sizes, len(embedded)) if not streams or s[0] >= shared]
        streams[name] = Stream(spans, embedded.clone(), makers.get(name))
    return streams


class Layer:
    """One decoder layer, its attention followed segment by segment against its own cache."""

    def __init__(
        self, config: Config, weights: Mapping[str, Tensor], tables: tuple[Tensor, Tensor]
    ) -> None:
        self.config, self.weights, self.tables = config, weights, tables

    def run(
        self, stream: Stream, seen: dict[str, Any], before: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor]:
        """Replaces the stream's hidden states; returns the keys and values, each (K, n, D).

        `seen` has a key for each tap asked for, and gets its value. `before` are the keys and
        values of the positions that come before the stream's first.
        """
        shape = (2, self.config.n_kv_heads, len(stream.hidden), self.config.head_dim)
        keys, values = torch.full(shape, math.nan, dtype=torch.float64)
        for array, given in zip((keys, values), before, strict=False):
            array[:, : given.shape[1]] = given
        first = stream.spans[0][0] if stream.spans else len(stream.hidden)
        x, mixed = stream.hidden[first:], []
        q, k, v = self._projected(x, seen)
        for start, stop in stream.spans:
            own = slice(start - first, stop - first)
            queries, turned = (self._rotate(t[:, own], start) for t in (q, k))
            keys[:, start:stop], values[:, start:stop] = turned, v[:, own]
            _keep(seen, q_rope=queries, k_rope=turned)
            held = keys[:, :stop], values[:, :stop]
            mixed.append(self._attend(queries, *held, start=start, seen=seen))
        stream.hidden[first:] = self._finished(x, torch.cat(mixed), seen)
        return keys, values

    def _pieces(self, n: int, seen: Mapping[str, Any]) -> list[slice]:
        """Positions that are computed at once: all, unless the MLP would take too much memory.

        What is recorded inside the layer is kept whole.
        """
        step = n if set(seen) - {"hidden"} else max(_SHORT, _WIDE // self.config.mlp)
        return [slice(start, min(start + step, n)) for start in range(0, n, max(1, step))]

    def _projected(self, x: Tensor, seen: dict[str, Any]) -> tuple[Tensor, ...]:
        """Queries (H, L, D), keys and values (K, L, D) of hidden states (L, E), before RoPE."""
        parts = []
        for rows in self._pieces(len(x), seen):
            normed = self._norm("input_layernorm", x[rows])
            projected = (self._linear(f"self_attn.{name}_proj", normed) for name in "qkv")
            shape = len(normed), -1, self.config.head_dim
            q, k, v = (t.view(shape).transpose(0, 1) for t in projected)  # [H or K, L, D]
            _keep(seen, input_norm=normed, q=q, k=k, v=v)
            parts.append((q, k, v))
        joined = zip(*parts, strict=True)
        return parts[0] if len(parts) == 1 else tuple(torch.cat(each, dim=1) for each in joined)

    def _finished(self, x: Tensor, mixed: Tensor, seen: dict[str, Any]) -> Tensor:
        """The layer's output (L, E) for its input and what attention mixed (L, H * D)."""
        out = torch.empty_like(x)
        for rows in self._pieces(len(x), seen):
            out[rows] = self._after(x[rows], mixed[rows], seen)
        _keep(seen, hidden=out)
        return out

    def _after(self, x: Tensor, mixed: Tensor, seen: dict[str, Any]) -> Tensor:
        out = self._linear("self_attn.o_proj", mixed)
        x = x + out
        post = self._norm("post_attention_layernorm", x)
        gate, up = self._linear("mlp.gate_proj", post), self._linear("mlp.up_proj", post)
        activation = gate * torch.sigmoid(gate) * up
        down = self._linear("mlp.down_proj", activation)
        _keep(seen, attention=mixed, o_proj=out, post_norm=post)
        _keep(seen, gate=gate, up=up, activation=activation, down=down)
        return x + down

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.eps)

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        cos, sin = (table[start : start + x.shape[1]] for table in self.tables)
        return rotate(x, cos, sin, interleaved=self.config.interleaved)

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, start: int, seen: dict[str, Any]
    ) -> Tensor:
        return attend(queries, keys, values, start=start, seen=seen)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    start: int,
    seen: dict[str, Any] | None = None,
    mask: Mask | None = None,
) -> Tensor:
    """Causal grouped-query attention (arXiv:2305.13245) of queries (H, L, D) at `start` and on.

    Over keys and values (K, S, D), to (L, H * D). Another `mask` stands in for `hides`.
    """
    (H, L, D), (K, S, _) = queries.shape, keys.shape
    grouped = queries.reshape(K, H // K, L, D)
    whole, tapped = S <= _SHORT, "scores" in (seen or {})
    rows = max(1, (_BLOCK if whole else _LONG_BLOCK) // (H * S))
    times = _broadcast if whole else _folded
    mixed, kept = [], []
    for first in range(0, L, rows):
        block = grouped[:, :, first : first + rows]  # [K, G, rows, D]
        # Beyond its last row's own position a block sees nothing.
        C = S if whole or tapped else start + first + block.shape[2]
        scores = times(block, keys[:, :C].transpose(-1, -2)).div_(math.sqrt(D))  # [K, G, rows, C]
        hidden = (mask or hides)(first + start, block.shape[2], C)
        if tapped:
            kept.append(scores.masked_fill(hidden, 0.0).flatten(0, 1))
        shares = torch.softmax(scores.masked_fill_(hidden, -math.inf), dim=-1)
        mixed.append(times(shares, values[:, :C]))
    if kept:
        _keep(seen or {}, scores=torch.cat(kept, dim=1))
    return torch.cat(mixed, dim=2).flatten(0, 1).transpose(0, 1).reshape(L, H * D)


def _broadcast(x: Tensor, matrix: Tensor) -> Tensor:
    """x (K, G, rows, m) times each KV head's matrix (K, m, n), of which torch makes G copies."""
    return x @ matrix[:, None]


def _folded(x: Tensor, matrix: Tensor) -> Tensor:
    """The same without the copies; torch adds it up in another order where there are few rows."""
    return (x.flatten(1, 2) @ matrix).view(*x.shape[:3], -1)


def hides(start: int, rows: int, columns: int) -> Tensor:
    """The causal mask (rows, columns): True if the token at start + row may not see that key."""
    return torch.arange(columns) > torch.arange(start, start + rows)[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float | Tensor) -> Tensor:
    """x over its root mean square, times the weight (arXiv:1910.07467)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_tables(config: Config, n: int, *, at: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin, each (n, D / 2), of the angles at positions 0 to n - 1 (arXiv:2104.09864).

    Or at other positions of a sequence of n tokens.
    """
    positions = torch.arange(n) if at is None else at
    angles = positions.to(torch.float64)[:, None] * inverse_frequencies(config, n)
    s = config.scaling
    attention = s.attention if isinstance(s, Yarn | LongRope) else 1.0
    return angles.cos() * attention, angles.sin() * attention


def inverse_frequencies(config: Config, n: int = 1) -> Tensor:
    """One frequency for each pair that RoPE turns, (D / 2,), in a sequence of n tokens.

    `oracle.truth.rope` names the source of each scaling. Dynamic has plain frequencies up to the
    longest sequence that is judged.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain = config.theta**-exponents
    s = config.scaling
    if isinstance(s, Linear):
        return plain / s.factor
    if isinstance(s, Llama3):
        # Turns that a pair makes over the original context: if many, it is kept; if few, it is
        # slowed down; between them it blends.
        turns = s.original_max_position_embeddings * plain / (2 * math.pi)
        share = _ramp(turns, s.low_freq_factor, s.high_freq_factor)
        return share * plain + (1.0 - share) * plain / s.factor
    if isinstance(s, Yarn):
        stretched = _yarn_share(config, s)
        return plain * (1.0 - stretched) + plain / s.factor * stretched
    if isinstance(s, LongRope):
        factors = s.long if n > s.original_max_position_embeddings else s.short
        return plain / torch.tensor(factors, dtype=torch.float64)
    return plain


def _yarn_share(config: Config, s: Yarn) -> Tensor:
    """How far each pair is stretched, (D / 2,) from 0 to 1 (arXiv:2309.00071, section 3.2).

    A ramp between the pairs that make `beta_fast` and `beta_slow` turns over the original context.
    """
    D, theta = config.head_dim, config.theta

    def pair(turns: float) -> float:
        wavelength = s.original_max_position_embeddings / turns
        return D * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(s.beta_fast), pair(s.beta_slow)
    if s.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, D - 1)  # of a head, as published, not of its pairs
    if low == high:
        high += 0.001
    return _ramp(torch.arange(D // 2, dtype=torch.float64), low, high)


def _ramp(x: Tensor, low: float, high: float) -> Tensor:
    """0 up to `low`, 1 from `high` on, a straight line between them."""
    return ((x - low) / (high - low)).clamp(0.0, 1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x (heads, L, D), its pairs (i, i + D / 2) turned, or (2i, 2i + 1) if interleaved."""
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@torch.inference_mode()
def write_logits(
    streams: Mapping[str, Tensor],
    head: Iterable[Tensor],
    out: Array,
    *,
    positions: Sequence[int] | None = None,
) -> tuple[float, float]:
    """Fills `out` (rows, V) from the first stream; returns max |logit|, and how far others differ.

    The streams (rows, E) are what enters the head at these positions (None: from 0 on); `head` has
    the blocks of its rows, one after another.
    """
    (name, first), *others = streams.items()
    most, apart, column = 0.0, 0.0, 0
    for block in head:
        columns, step = slice(column, column + len(block)), max(1, _BLOCK // len(block))
        for start in range(0, len(first), step):
            rows = slice(start, start + step)
            at = start if positions is None else positions[start]
            logits = logits_of(first[rows], block, name, at=at)
            out[rows, columns] = logits.numpy()
            most = max(most, float(logits.abs().max()))
            for _, other in others:
                largest = (other[rows] @ block.T - logits).abs().max()
                apart = max(apart, float(largest.nan_to_num(nan=math.inf)))
        column = columns.stop
    return most, apart


def logits_of(hidden: Tensor, head: Tensor, name: str, *, at: int) -> Tensor:
    """The logits (rows, V) of what enters the head (rows, E); a Refusal if one is not finite.

    `at` is the position of the first row in the way `name`.
    """
    logits = hidden @ head.T
    if not bool(torch.isfinite(logits).all()):
        what = f"logits of {name} at positions from {at} on are not finite, expected finite ones"
        raise Refusal(what, where="truth", remedy="check the weights")
    return logits


def _spans(sizes: Sequence[int], n: int) -> list[tuple[int, int]]:
    stops = np.cumsum(sizes).tolist()
    if min(sizes) < 1 or stops[-1] != n:
        raise ValueError(f"truth: segments {list(sizes)} do not add up to {n} tokens")
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _keep(seen: dict[str, Any], **values: Tensor) -> None:
    seen.update({name: value for name, value in values.items() if name in seen})

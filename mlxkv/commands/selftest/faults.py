"""Seeded faults: ways in which a port of Llama goes wrong, put into the real port one by one.

While a fault is planted it changes the model's config, its weights, or a function of the port,
which has no branch for any of them. `FAULTS`, at the end, is the list; each entry says where the
fault must be found. The judge looks at a run in two lanes: lane A is the port in float64, lane B
the port in the run's dtype. Axes as in the port: L new tokens, S held, K key/value heads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_unflatten

from mlxkv.port import cache as caches
from mlxkv.port import llama, ops
from mlxkv.port.cache import Cache
from oracle.formats.plan import PROBE_LENGTH, mixed_sizes

if TYPE_CHECKING:
    from mlxkv.port.config.llama import LlamaConfig
    from mlxkv.port.llama import Llama

Plant = Callable[["Llama", "Place"], AbstractContextManager[None]]
"""Given the model and the place, a context manager inside of which the port is wrong."""
Rows = tuple[Any, ...]
Need = Literal["grouped", "square", "several", "probe", "wide ids"]
Seen = Literal["judged", "mixed", "probe", "repeat"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a model of `layers` layers, and in a prompt sent in two calls, faults are put.

    `prompt` is the prompt's length and `cut` the length of its first call. `tokens` are the whole
    sequence, and `probe` those of the probe.
    """

    layers: int
    prompt: int
    cut: int
    tokens: tuple[int, ...] = ()
    probe: tuple[int, ...] = ()

    @property
    def middle(self) -> int:
        return self.layers // 2

    @property
    def row(self) -> int:
        """A row that decoding writes, with tokens before and after it."""
        return self.prompt + 4

    def call(self, is_it: Callable[[list[int]], bool]) -> int:
        """The position at which that call of the plan `mixed` begins of which `is_it(sizes)` is
        true; `sizes` are those of its calls so far, that one last.
        """
        sizes = mixed_sizes(len(self.tokens))
        return next(sum(sizes[:i]) for i in range(len(sizes)) if is_it(sizes[: i + 1]))

    @property
    def large(self) -> int:
        """The first position of an id that two signed bytes do not hold."""
        tried = [i for ids in (self.tokens, self.probe) for i, id in enumerate(ids) if id > SHORT]
        return min(tried)

    @property
    def spare(self) -> int:
        """A position of the probe, where it has an id for the first time that nothing else has."""
        held = (i for i in range(40, len(self.probe)) if self.probe[i] not in self.probe[:i])
        return next(i for i in held if self.probe[i] not in self.tokens)


Position = Callable[[Place], int]


@dataclass(frozen=True, slots=True)
class Where:
    """Where a fault must be found: the first wrong position, the layer, and one of `taps`.

    A layer of None is behind all layers, a position of None may be any. Without taps neither layer
    nor tap is looked at.
    """

    first: Callable[[Place], int | None]
    layer: Callable[[Place], int | None]
    taps: tuple[str, ...]

    def at(self, first: Position, layer: Position | None = None) -> Where:
        """The same taps from another position on, and in another layer where one is given."""
        return Where(first, layer or self.layer, self.taps)


@dataclass(frozen=True, slots=True)
class Fault:
    """One seeded fault.

    `lanes` are those in which it can be planted, `needs` the head layout without which it would
    change nothing: grouped heads (1 < K < H), a square o_proj, or several key/value heads.
    `in_logits` is where logits first change, if that is later than `where.first`: a cache's row is
    wrong before anybody reads it. `none_in` are dtypes in which a right port computes the same.
    `sink`: position 0 may not show it, since trained models put values of thousands there, beside
    which no eps is seen. `seen` is what shows it beside full, step and chunked.
    """

    name: str
    plant: Plant
    where: Where
    lanes: str = "AB"
    needs: Need | None = None
    in_logits: Position | None = None
    none_in: tuple[str, ...] = ()
    sink: bool = False
    seen: Seen = "judged"


def applies(fault: Fault, c: LlamaConfig, dtype: str = "float32") -> bool:
    """Whether the fault changes anything on this model and in this dtype."""
    has: dict[Need | None, bool] = {
        None: True,
        "grouped": 1 < c.num_key_value_heads < c.num_attention_heads,
        "square": c.num_attention_heads * c.head_dim == c.hidden_size,
        "several": c.num_key_value_heads > 1,
        "probe": c.max_position_embeddings >= PROBE_LENGTH,
        "wide ids": c.max_position_embeddings >= PROBE_LENGTH and c.vocab_size > SHORT + 1,
    }
    return has[fault.needs] and dtype not in fault.none_in


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """An attribute of `owner` replaced by what `make` makes of it."""
    real = getattr(owner, name)
    setattr(owner, name, make(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def function(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    return lambda _model, _place: patched(owner, name, make)


def attribute(
    name: str, times: float, modules: Callable[[Llama, Place], Iterable[nn.Module]]
) -> Plant:
    """A number that each of some modules holds, multiplied."""

    @contextmanager
    def plant(model: Llama, place: Place) -> Iterator[None]:
        with ExitStack() as stack:
            for module in list(modules(model, place)):
                stack.enter_context(patched(module, name, lambda value: value * times))
            yield

    return plant


def _every_norm(model: Llama, _: Place) -> Iterable[nn.Module]:
    return (module for module in model.modules() if isinstance(module, llama.RMSNorm))


def theta(times: float) -> Plant:
    """rope_theta times something; the cache makes its tables from the model's config."""

    def other(c: LlamaConfig) -> LlamaConfig:
        return replace(c, rope=replace(c.rope, theta=c.rope.theta * times))

    return lambda model, _: patched(model, "config", other)


# Weights.


def weights(change: Callable[[dict[str, mx.array], Place], dict[str, mx.array]]) -> Plant:
    """The parameters that `change` gives, by Hugging Face name, in place of the model's."""

    @contextmanager
    def plant(model: Llama, place: Place) -> Iterator[None]:
        before = llama.parameters(model)
        _load(model, before | change(before, place))
        try:
            yield
        finally:
            _load(model, before)

    return plant


def _load(model: Llama, arrays: dict[str, mx.array]) -> None:
    # MLX has float64 on the CPU only.
    with mx.stream(mx.cpu if model.dtype == mx.float64 else mx.default_device()):
        mx.eval(list(arrays.values()))
    named = [(name.removeprefix("model."), array) for name, array in arrays.items()]
    model.update(tree_unflatten(named))


def every_weight(change: Callable[[mx.array], mx.array]) -> Plant:
    return weights(lambda held, _: {name: change(array) for name, array in held.items()})


def one_weight(part: str, change: Callable[[mx.array], mx.array]) -> Plant:
    """One parameter of the middle layer changed."""

    def changed(held: dict[str, mx.array], place: Place) -> dict[str, mx.array]:
        name = f"model.layers.{place.middle}.{part}.weight"
        return {name: change(held[name])}

    return weights(changed)


def _swapped(held: dict[str, mx.array], place: Place) -> dict[str, mx.array]:
    """The weights of the middle layer and of the one before it, exchanged."""
    a, b = f"model.layers.{place.middle - 1}.", f"model.layers.{place.middle}."
    pairs = [(name, name.replace(a, b)) for name in held if name.startswith(a)]
    return {one: held[other] for pair in pairs for one, other in (pair, pair[::-1])}


def rounded(dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
    """Through another dtype and back."""
    return lambda array: array.astype(dtype).astype(array.dtype)


def _int8(array: mx.array) -> mx.array:
    """Each row to 255 levels and back, as weight-only quantisation does; norms are left alone."""
    if array.ndim < 2:
        return array
    scale = mx.max(mx.abs(array), axis=1, keepdims=True) / 127
    return mx.round(array / scale) * scale


# RoPE, mask, heads.


def _interleaved(_: Any) -> Any:
    def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        a, b = x[..., ::2], x[..., 1::2]
        return mx.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)

    return rotate


def tables(change: Callable[[mx.array, mx.array], Rows]) -> Plant:
    """Other RoPE tables: `change(cos, sin)`."""
    return function(caches, "_tables", lambda real: lambda *given: change(*real(*given)))


def shifted(applies: Callable[[int, int], bool]) -> Plant:
    """Positions one too large in calls where `applies(start, L)`; the tables have room for it."""

    def make(real: Any) -> Any:
        return lambda self, start, length: real(self, start + applies(start, length), length)

    return function(Cache, "rotation", make)


Sizes = Callable[[list[int]], bool]
"""Of the sizes of a cache's calls so far, the one under way last."""


def masked(
    change: Callable[[mx.array, mx.array, mx.array], mx.array],
    when: Sizes = lambda sizes: sizes[-1] > 1,
) -> Plant:
    """Another causal mask: `change(mask, rows, columns)`, the mask (L, S) with 1 where hidden.

    `rows` (L, 1) are the positions of the queries, `columns` (1, S) those of the keys. Only calls
    `when` has them have it. Nothing wrong is kept in the cache.
    """

    def make(real: Any) -> Any:
        calls: dict[int, list[int]] = {}

        def mask(self: Cache, length: int, start: int) -> mx.array | None:
            sizes = calls.setdefault(id(self), [])
            if (sum(sizes), sizes[-1:]) != (start + length, [length]):  # A call's first layer.
                sizes[:] = [*(sizes if sum(sizes) == start else []), length]
            right: mx.array | None = real(self, length, start)
            if not when(sizes):
                return right
            rows, columns = mx.arange(start, start + length), mx.arange(start + length)
            plain = mx.zeros((length, start + length), mx.uint8) if right is None else right
            return change(plain, rows[:, None], columns[None, :]).astype(mx.uint8)

        return mask

    return function(Cache, "mask", make)


def _after_single(sizes: list[int]) -> bool:
    return sizes[-1] > 1 and sizes[-2:-1] == [1]


def _longer(sizes: list[int]) -> bool:
    return sizes[-1] > sum(sizes[:-1]) > 0


def _third(sizes: list[int]) -> bool:
    return sizes[-1] > 1 and sum(size > 1 for size in sizes) > 2


def _without_offset(_: mx.array, rows: mx.array, columns: mx.array) -> mx.array:
    return columns > rows - rows[0]


def _sees_all(mask: mx.array, rows: mx.array, columns: mx.array) -> mx.array:
    return mx.zeros_like(mask)


def _hides_self(mask: mx.array, rows: mx.array, columns: mx.array) -> mx.array:
    return mx.where((rows == columns) & (rows % 3 == 2) & (rows >= 5), 1, mask)


def _heads_interleaved(real: Any) -> Any:
    def attention(queries: mx.array, keys: mx.array, values: mx.array, **given: Any) -> Any:
        repeats = (1, queries.shape[1] // keys.shape[1], 1, 1)
        return real(queries, mx.tile(keys, repeats), mx.tile(values, repeats), **given)

    return attention


def _wrong_split(_: Any) -> Any:
    def heads(self: Any, x: mx.array, n: int) -> mx.array:
        B, L, _ = x.shape
        return x.reshape(B, L, self.head_dim, n).transpose(0, 3, 1, 2)

    return heads


# The cache.


def extended(extend: Callable[[Any, Place, Cache, int, Rows], Any]) -> Plant:
    """Another `Cache.extend`: `extend(real, place, cache, layer, (keys, values))`."""

    def plant(_: Llama, place: Place) -> AbstractContextManager[None]:
        def make(real: Any) -> Any:
            return lambda cache, layer, *new: extend(real, place, cache, layer, new)

        return patched(Cache, "extend", make)

    return plant


def stored(dtype: mx.Dtype) -> Plant:
    """What is kept goes through another dtype; a call still sees its own new rows as they were."""

    def extend(real: Any, _: Place, cache: Cache, layer: int, new: Rows) -> Any:
        held = real(cache, layer, *map(rounded(dtype), new))
        L = new[0].shape[2]
        pairs = zip(held, new, strict=True)
        return tuple(mx.concatenate([kept[:, :, :-L], own], axis=2) for kept, own in pairs)

    return extended(extend)


def stale(which: Literal["keys", "values"], layer: Position) -> Plant:
    """In one layer the row of keys or values at `Place.row` is a copy of the row before it."""
    kind = ("keys", "values").index(which)

    def extend(real: Any, place: Place, cache: Cache, i: int, new: Rows) -> Any:
        held, rows = cache.layers[i], list(new)
        if i == layer(place) and held.length == place.row and new[0].shape[2] == 1:
            rows[kind] = getattr(held, which)[:, :, -1:]
        return real(cache, i, *rows)

    return extended(extend)


def _lost_row(real: Any, place: Place, cache: Cache, layer: int, new: Rows) -> Any:
    """What decoding wrote at one position is never seen again, in any layer."""
    held, p = real(cache, layer, *new), place.row
    if new[0].shape[2] > 1 or p + 1 >= held[0].shape[2]:
        return held
    return tuple(mx.concatenate([a[:, :, :p], a[:, :, p + 1 :]], axis=2) for a in held)


def _crossed_layers(real: Any, place: Place, cache: Cache, layer: int, new: Rows) -> Any:
    """While decoding, the middle layer reads the keys and values of the layer before it."""
    held = real(cache, layer, *new)
    if layer != place.middle or new[0].shape[2] > 1:
        return held
    other = cache.layers[layer - 1]
    return other.keys, other.values


def rows_from(first: int, change: Callable[[mx.array], mx.array]) -> Plant:
    """Keys and values of the positions from `first` on through a function; their own call too."""

    def extend(real: Any, _: Place, cache: Cache, layer: int, new: Rows) -> Any:
        begins, L = cache.layers[layer].length, new[0].shape[2]
        at = mx.arange(begins, begins + L)[None, None, :, None]
        return real(cache, layer, *(mx.where(at >= first, change(a), a) for a in new))

    return extended(extend)


def _levels(array: mx.array) -> mx.array:
    """Each row of keys or values to 255 levels and back."""
    scale = mx.max(mx.abs(array), axis=-1, keepdims=True) / 127
    return mx.round(array / scale) * scale


def _overwritten(real: Any, _: Place, cache: Cache, layer: int, new: Rows) -> Any:
    """The row where a buffer has to grow holds what stands before it, in every layer."""
    held, L = cache.layers[layer], new[0].shape[2]
    i, rows = caches.BLOCK - held.length, list(new)
    if not 0 <= i < L:
        return real(cache, layer, *new)
    for kind, (own, before) in enumerate(zip(new, (held.keys, held.values), strict=True)):
        row = own[:, :, i - 1 : i] if i or before is None else before[:, :, -1:]
        rows[kind] = mx.concatenate([own[:, :, :i], row, own[:, :, i + 1 :]], axis=2)
    return real(cache, layer, *rows)


def _coarse_positions(cos: mx.array, sin: mx.array) -> Rows:
    """Positions in bfloat16, which has no odd numbers above 256."""
    at = mx.minimum(mx.arange(len(cos)).astype(mx.bfloat16).astype(mx.int32), len(cos) - 1)
    return cos[at], sin[at]


# Ids, and calls that are not alike.


def _short(real: Any) -> Any:
    def ids(self: Any, tokens: Any) -> Any:
        right = real(self, tokens)
        return np.where(right > SHORT, 0, right)

    return ids


@contextmanager
def _one_embedding(model: Llama, place: Place) -> Iterator[None]:
    """The embedding of one id of the probe halved where it goes in, and not where logits are."""
    spare = place.probe[place.spare]

    def make(real: Any) -> Any:
        def embed(self: Any, ids: mx.array) -> Any:
            right = real(self, ids)
            return mx.where((ids == spare)[..., None], right / 2, right)

        return embed

    with patched(nn.Embedding, "__call__", make):
        yield


@contextmanager
def _now_and_then(model: Llama, _: Place) -> Iterator[None]:
    """One call of five gives logits that are off by less than any noise."""
    chance = random.Random(0)

    def make(real: Any) -> Any:
        def call(*given: Any) -> Any:
            right = real(*given)
            return right * (1 + 2.0**-21) if chance.random() < 0.2 else right

        return call

    with patched(llama.Llama, "_logits", make):
        yield


# Arithmetic and the way through the layers.


def logits(change: Callable[[mx.array], mx.array]) -> Plant:
    """The logits through a function."""
    return function(llama.Llama, "_logits", lambda real: lambda *given: change(real(*given)))


def _ten_bits(array: mx.array) -> mx.array:
    """float32 with its mantissa cut to 10 bits, rounded."""
    bits = array.view(mx.uint32)
    return ((bits + 0x1000) & 0xFFFFE000).view(mx.float32)


def _tf32(real: Any) -> Any:
    def linear(self: Any, x: mx.array) -> Any:
        if x.dtype != mx.float32 or x.shape[-2] < 2:
            return real(self, x)
        out = _ten_bits(x) @ _ten_bits(self.weight).T
        return out + self.bias if "bias" in self else out

    return linear


@contextmanager
def _dropped_residual(model: Llama, place: Place) -> Iterator[None]:
    block = model.layers[place.middle]

    def make(real: Any) -> Any:
        def call(self: Any, x: mx.array, cache: Cache, start: int, *tap: Any) -> Any:
            if self is not block:
                return real(self, x, cache, start, *tap)
            x = x + self.self_attn(self.input_layernorm(x), cache, start, *tap)
            return self.mlp(self.post_attention_layernorm(x), *tap)

        return call

    with patched(llama.Block, "__call__", make):
        yield


# The list.

START, SECOND, SIXTH = (lambda _: 0), (lambda _: 1), (lambda _: 5)
CUT, DECODE, ROW = attrgetter("cut"), attrgetter("prompt"), attrgetter("row")
FIRST, MIDDLE, LAST = (lambda _: 0), attrgetter("middle"), (lambda place: place.layers - 1)

LOGITS = Where(START, lambda _: None, ("logits",))
WEIGHTS = Where(START, FIRST, ("embedding",))
NORM = Where(START, FIRST, ("input_norm",))
ANGLES = Where(SECOND, FIRST, ("q_rope", "k_rope"))
KEYS, VALUES = Where(START, FIRST, ("keys",)), Where(START, FIRST, ("values",))
ATTENTION = Where(START, FIRST, ("scores", "attention"))
UNSEEN_IN_A = Where(START, lambda _: None, ())
NOWHERE = Where(lambda _: None, lambda _: None, ())
SHORT = 2**15 - 1


def of_calls(
    name: str, change: Callable[[mx.array, mx.array, mx.array], mx.array], when: Sizes
) -> Fault:
    """Another mask in some calls of the plan `mixed`; it shows where the first of them begins."""
    at = NOWHERE.at(lambda place: place.call(when))
    return Fault(name, masked(change, when), at, seen="mixed")


F16, BF16 = ("float16",), ("bfloat16",)

FAULTS: tuple[Fault, ...] = (
    # From the least error in the logits to the largest.
    Fault("every logit +0.05", logits(lambda x: x + 0.05), LOGITS),
    Fault("rms_norm_eps a tenth", attribute("eps", 0.1, _every_norm), NORM),
    Fault("cache stored in float16", stored(mx.float16), KEYS, in_logits=CUT, none_in=F16),
    Fault("rope_theta times 0.99", theta(0.99), ANGLES),
    Fault(
        "attention scale times 1.001",
        attribute("scale", 1.001, lambda model, _: [layer.self_attn for layer in model.layers]),
        ATTENTION.at(SECOND),
    ),
    Fault("one stale key row, last layer", stale("keys", LAST), KEYS.at(ROW, LAST)),
    Fault("logits times 1.001", logits(lambda x: x * 1.001), LOGITS),
    Fault(
        "TF32-like matmul",
        function(nn.Linear, "__call__", _tf32),
        UNSEEN_IN_A,
        lanes="B",
        none_in=F16 + BF16,
    ),
    Fault(
        "cos and sin in bfloat16",
        tables(lambda cos, sin: (rounded(mx.bfloat16)(cos), rounded(mx.bfloat16)(sin))),
        ANGLES,
        none_in=BF16,
    ),
    Fault("cache stored in bfloat16", stored(mx.bfloat16), KEYS, in_logits=CUT, none_in=BF16),
    Fault("logits rounded to bfloat16", logits(rounded(mx.bfloat16)), LOGITS, none_in=BF16),
    Fault("one stale key row, middle layer", stale("keys", MIDDLE), KEYS.at(ROW, MIDDLE)),
    Fault("weights through bfloat16", every_weight(rounded(mx.bfloat16)), WEIGHTS, none_in=BF16),
    Fault("a chunk's positions +1", shifted(lambda start, L: start > 0 and L > 1), ANGLES.at(CUT)),
    Fault("weights through int8 per row", every_weight(_int8), WEIGHTS),
    Fault("the mask hides some tokens from themselves", masked(_hides_self), ATTENTION.at(SIXTH)),
    Fault("decode positions +1", shifted(lambda start, L: start > 0 and L == 1), ANGLES.at(DECODE)),
    Fault("the cache lost one token", extended(_lost_row), ATTENTION.at(lambda p: p.row + 1)),
    Fault("rope_theta a tenth", theta(0.1), ANGLES),
    Fault(
        "the mask lets one future token in",
        masked(lambda mask, rows, columns: mx.where(columns == rows + 1, 0, mask)),
        ATTENTION,
    ),
    Fault(
        "sigmoid(1.702 x) gate",
        function(ops, "silu", lambda _: lambda x: x * mx.sigmoid(1.702 * x)),
        Where(START, FIRST, ("activation",)),
    ),
    Fault("interleaved RoPE", function(llama, "rotate", _interleaved), ANGLES),
    Fault(
        "a chunk's mask without offset",
        masked(_without_offset),
        ATTENTION.at(CUT),
    ),
    Fault(
        "KV heads interleaved",
        function(ops, "attention", _heads_interleaved),
        ATTENTION,
        needs="grouped",
    ),
    # Not in that order.
    Fault("two layers' weights swapped", weights(_swapped), NORM.at(START, lambda p: p.middle - 1)),
    Fault(
        "o_proj transposed",
        one_weight("self_attn.o_proj", lambda w: w.T),
        Where(START, MIDDLE, ("o_proj",)),
        needs="square",
    ),
    Fault(
        "a norm's weight +1",
        one_weight("post_attention_layernorm", lambda w: w + 1),
        Where(START, MIDDLE, ("post_norm",)),
    ),
    Fault("one stale value row, middle layer", stale("values", MIDDLE), VALUES.at(ROW, MIDDLE)),
    Fault(
        "decoding reads the layer before", extended(_crossed_layers), ATTENTION.at(DECODE, MIDDLE)
    ),
    Fault("angles of the wrong sign", tables(lambda cos, sin: (cos, -sin)), ANGLES),
    Fault(
        "heads split the wrong way",
        function(llama.Attention, "_heads", _wrong_split),
        Where(START, FIRST, ("q", "k", "v")),
        needs="several",
    ),
    Fault("a residual dropped", _dropped_residual, Where(START, MIDDLE, ("hidden",))),
    Fault(
        "eps times 1.1 in one norm",
        attribute("eps", 1.1, lambda model, at: [model.layers[at.middle].input_layernorm]),
        NORM.at(START, MIDDLE),
        lanes="A",
        sink=True,
    ),
    # What only other chunks, more positions, other ids or a second run show.
    of_calls("no mask after single tokens", _sees_all, _after_single),
    of_calls("a chunk longer than what is held loses its mask's offset", _without_offset, _longer),
    of_calls("the mask without offset from the third chunk on", _without_offset, _third),
    Fault(
        "attention sees 32 tokens",
        masked(
            lambda mask, rows, columns: mx.where(columns <= rows - 32, 1, mask),
            when=lambda sizes: True,
        ),
        ATTENTION.at(lambda _: 32),
    ),
    Fault("rows in 255 levels from 33 on", rows_from(33, _levels), KEYS.at(lambda _: 33)),
    Fault(
        "rows in float16 from 128 on",
        rows_from(128, rounded(mx.float16)),
        NOWHERE.at(lambda _: 128),
        needs="probe",
        none_in=F16,
        seen="probe",
    ),
    Fault(
        "row 256 overwritten",
        extended(_overwritten),
        NOWHERE.at(lambda _: caches.BLOCK),
        needs="probe",
        seen="probe",
    ),
    Fault(
        "the mask ends after 256 rows",
        masked(
            lambda mask, rows, columns: mx.where(rows >= 256, 0, mask),
            when=lambda sizes: sizes[-1] > 256,
        ),
        NOWHERE.at(lambda _: 256),
        needs="probe",
        seen="probe",
    ),
    Fault(
        "positions in bfloat16",
        tables(_coarse_positions),
        NOWHERE.at(lambda _: 257),
        needs="probe",
        seen="probe",
    ),
    Fault(
        "ids of 16 bits",
        function(llama.Llama, "_ids", _short),
        NOWHERE.at(attrgetter("large")),
        needs="wide ids",
        seen="probe",
    ),
    Fault(
        "one id's embedding",
        _one_embedding,
        NOWHERE.at(attrgetter("spare")),
        needs="probe",
        seen="probe",
    ),
    Fault("one call of five a bit off", _now_and_then, NOWHERE, lanes="B", seen="repeat"),
)
"""All seeded faults.

In half precision a right port keeps its cache, tables, weights and logits in that dtype, and TF32
is a way of float32 alone.
"""

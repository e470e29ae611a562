"""Seeded faults: ways in which a port of Llama goes wrong, each put into the real port from outside and taken out again.

By configuration, by changed weights, or by a wrapped function: the port itself has no branch for any of them. Every fault
says where it must be found. Axes as in the port: L new tokens, S held, K key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

from mlxkv.port import cache as caches
from mlxkv.port import llama, ops
from mlxkv.port.cache import Cache

if TYPE_CHECKING:
    from mlxkv.port.config.llama import LlamaConfig
    from mlxkv.port.llama import Llama

Plant = Callable[["Llama", "Place"], Any]
"""Given the model and the place, a context manager inside of which the port is wrong."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in model and sequence a fault is put: `early` and `late` layers, a prompt cut at `cut`, a row after the prompt."""

    layers: int
    prompt: int
    cut: int

    @property
    def early(self) -> int:
        """A layer about the middle."""
        return self.layers // 2

    @property
    def late(self) -> int:
        """The last layer."""
        return self.layers - 1

    @property
    def row(self) -> int:
        """A row that decoding writes, with tokens before and after it."""
        return self.prompt + 4


@dataclass(frozen=True, slots=True)
class Fault:
    """`first` is the first position that must be named wrong; `layer` and `taps` where locate must point.

    `in_logits` is where logits first change, if that is later: a cache's row is wrong before anybody reads it.
    `none_in` are the dtypes in which it is no fault: a right port in that dtype computes the same. `sink` says that position 0
    may not show it: trained models put values of thousands there, beside which no eps is seen.
    """

    name: str
    plant: Plant
    first: Callable[[Place], int]
    layer: Callable[[Place], int | None]
    taps: tuple[str, ...]
    lanes: str = "AB"
    in_logits: Callable[[Place], int] | None = None
    none_in: tuple[str, ...] = ()
    sink: bool = False


def applies(fault: Fault, c: LlamaConfig, dtype: str = "float32") -> bool:
    """Whether the fault is one on this head layout and in this dtype; elsewhere it would change nothing, or have no place."""
    needs = {
        "g": 1 < c.num_key_value_heads < c.num_attention_heads,
        "s": c.num_attention_heads * c.head_dim == c.hidden_size,
        "m": c.num_key_value_heads > 1,
    }
    return dtype not in fault.none_in and all(
        needs[letter] for letter in fault.lanes if letter in needs
    )


def _at(position: int) -> Callable[[Place], int]:
    return lambda _: position


@contextmanager
def patched(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """A function of `owner` replaced by one made from it."""
    real = getattr(owner, name)
    setattr(owner, name, make(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


# By configuration.


def config(**changes: Any) -> Plant:
    """The model's config with other values; the cache makes its tables from it."""

    @contextmanager
    def plant(model: Llama, _: Place) -> Iterator[None]:
        before = model.config
        model.config = replace(before, **changes)
        try:
            yield
        finally:
            model.config = before

    return plant


def theta(times: float) -> Plant:
    """rope_theta times something, wherever the config keeps it."""

    @contextmanager
    def plant(model: Llama, place: Place) -> Iterator[None]:
        rope = model.config.rope
        with config(rope=replace(rope, theta=rope.theta * times))(model, place):
            yield

    return plant


def attribute(path: str, name: str, change: Callable[[Any], Any], *, only: str = "all") -> Plant:
    """A module's attribute in all layers, or in the middle one; `path` is below a layer, or `norm`."""

    @contextmanager
    def plant(model: Llama, place: Place) -> Iterator[None]:
        layers = model.layers if only == "all" else [model.layers[place.early]]
        modules = [_below(layer, path) for layer in layers]
        before = [getattr(module, name) for module in modules]
        for module, value in zip(modules, before, strict=True):
            setattr(module, name, change(value))
        try:
            yield
        finally:
            for module, value in zip(modules, before, strict=True):
                setattr(module, name, value)

    return plant


def both(*plants: Plant) -> Plant:
    """Several at once."""

    @contextmanager
    def plant(model: Llama, place: Place) -> Iterator[None]:
        if not plants:
            yield
            return
        with plants[0](model, place), both(*plants[1:])(model, place):
            yield

    return plant


# Weights.


def weights(change: Callable[[str, mx.array], mx.array]) -> Plant:
    """Every parameter through a function of its Hugging Face name."""

    @contextmanager
    def plant(model: Llama, _: Place) -> Iterator[None]:
        before = llama.parameters(model)
        _load(model, {name: change(name, array) for name, array in before.items()})
        try:
            yield
        finally:
            _load(model, before)

    return plant


def one_weight(part: str, change: Callable[[mx.array], mx.array]) -> Plant:
    """One parameter of the middle layer."""

    @contextmanager
    def plant(model: Llama, place: Place) -> Iterator[None]:
        wanted = f"model.layers.{place.early}.{part}.weight"
        with weights(lambda name, array: change(array) if name == wanted else array)(model, place):
            yield

    return plant


@contextmanager
def swapped_layers(model: Llama, place: Place) -> Iterator[None]:
    """The weights of the middle layer and of the one before it, exchanged."""
    a, b = f"model.layers.{place.early - 1}.", f"model.layers.{place.early}."
    before = llama.parameters(model)

    def other(name: str) -> str:
        return (
            name.replace(a, b)
            if name.startswith(a)
            else name.replace(b, a)
            if name.startswith(b)
            else name
        )

    _load(model, {name: before[other(name)] for name in before})
    try:
        yield
    finally:
        _load(model, before)


def rounded(dtype: mx.Dtype) -> Callable[[Any, mx.array], mx.array]:
    """Through another dtype and back."""
    return lambda _, array: array.astype(dtype).astype(array.dtype)


def int8(name: str, array: mx.array) -> mx.array:
    """Per row to 255 levels and back, as weight-only quantisation does; norms are left alone."""
    if array.ndim < 2:
        return array
    scale = mx.max(mx.abs(array), axis=1, keepdims=True) / 127
    return mx.round(array / scale) * scale


# RoPE, mask, scale.


def function(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """A function replaced, whatever the model."""
    return lambda _model, _place: patched(owner, name, make)


def _interleaved(_: Any) -> Any:
    def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        a, b = x[..., ::2], x[..., 1::2]
        return mx.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)

    return rotate


def _rounded_tables(real: Any) -> Any:
    def tables(*given: Any) -> tuple[mx.array, mx.array]:
        cos, sin = real(*given)
        return rounded(mx.bfloat16)(None, cos), rounded(mx.bfloat16)(None, sin)

    return tables


def _negative(real: Any) -> Any:
    def tables(*given: Any) -> tuple[mx.array, mx.array]:
        cos, sin = real(*given)
        return cos, -sin

    return tables


def shifted(applies: Callable[[int, int], bool]) -> Plant:
    """Positions one too large in the calls that `applies(start, L)` names; the tables have room for it."""

    def make(real: Any) -> Any:
        return lambda self, start, length: real(self, start + applies(start, length), length)

    return function(Cache, "rotation", make)


def masked(change: Callable[[mx.array, int], mx.array]) -> Plant:
    """Another causal mask: `change(mask, start)`, (L, start + L) with 1 where hidden. Nothing wrong is kept in the cache."""

    def make(real: Any) -> Any:
        def mask(self: Cache, length: int, start: int) -> mx.array | None:
            right = real(self, length, start)
            return None if right is None else change(right, start)

        return mask

    return function(Cache, "mask", make)


def _hides_self(mask: mx.array, start: int) -> mx.array:
    L, S = mask.shape
    rows, columns = mx.arange(L)[:, None] + start, mx.arange(S)[None, :]
    return mx.where((rows == columns) & (rows % 3 == 2) & (rows >= 5), 1, mask).astype(mask.dtype)


def _sees_next(mask: mx.array, start: int) -> mx.array:
    L, S = mask.shape
    rows, columns = mx.arange(L)[:, None] + start, mx.arange(S)[None, :]
    return mx.where(columns == rows + 1, 0, mask).astype(mask.dtype)


def _without_offset(mask: mx.array, start: int) -> mx.array:
    L, S = mask.shape
    return (mx.arange(S)[None, :] > mx.arange(L)[:, None]).astype(mask.dtype)


def _heads_interleaved(real: Any) -> Any:
    def attention(queries: mx.array, keys: mx.array, values: mx.array, **given: Any) -> mx.array:
        groups = queries.shape[1] // keys.shape[1]
        out: mx.array = real(
            queries, mx.tile(keys, (1, groups, 1, 1)), mx.tile(values, (1, groups, 1, 1)), **given
        )
        return out

    return attention


# The cache.


def stored(change: Callable[[Any, mx.array], mx.array]) -> Plant:
    """What is kept is changed; a call still sees its own new rows as they were."""

    def make(real: Any) -> Any:
        def extend(
            self: Cache, layer: int, keys: mx.array, values: mx.array
        ) -> tuple[mx.array, mx.array]:
            L = keys.shape[2]
            held = real(self, layer, change(None, keys), change(None, values))
            old = (array[:, :, : array.shape[2] - L] for array in held)
            return tuple(
                mx.concatenate([a, new], axis=2) for a, new in zip(old, (keys, values), strict=True)
            )  # type: ignore[return-value]

        return extend

    return function(Cache, "extend", make)


def stale(which: str, layer: Callable[[Place], int]) -> Plant:
    """One row of keys or values in one layer is a copy of the row before it."""

    @contextmanager
    def plant(_: Llama, place: Place) -> Iterator[None]:
        def make(real: Any) -> Any:
            def extend(
                self: Cache, i: int, keys: mx.array, values: mx.array
            ) -> tuple[mx.array, mx.array]:
                held = self.layers[i]
                if i == layer(place) and held.length == place.row and keys.shape[2] == 1:
                    before = {"keys": held.keys, "values": held.values}[which]
                    assert before is not None
                    keys, values = (
                        (before[:, :, -1:], values)
                        if which == "keys"
                        else (keys, before[:, :, -1:])
                    )
                return real(self, i, keys, values)  # type: ignore[no-any-return]

            return extend

        with patched(Cache, "extend", make):
            yield

    return plant


@contextmanager
def lost_row(_: Llama, place: Place) -> Iterator[None]:
    """What decoding wrote at one position is never seen again, in any layer."""

    def make(real: Any) -> Any:
        def extend(
            self: Cache, layer: int, keys: mx.array, values: mx.array
        ) -> tuple[mx.array, mx.array]:
            held = real(self, layer, keys, values)
            S, p = held[0].shape[2], place.row
            if keys.shape[2] > 1 or p + 1 >= S:
                return held  # type: ignore[no-any-return]
            return tuple(mx.concatenate([a[:, :, :p], a[:, :, p + 1 :]], axis=2) for a in held)  # type: ignore[return-value]

        return extend

    with patched(Cache, "extend", make):
        yield


@contextmanager
def crossed_layers(_: Llama, place: Place) -> Iterator[None]:
    """While decoding, the middle layer reads the keys and values of the layer before it."""

    def make(real: Any) -> Any:
        def extend(
            self: Cache, layer: int, keys: mx.array, values: mx.array
        ) -> tuple[mx.array, mx.array]:
            held = real(self, layer, keys, values)
            if layer != place.early or keys.shape[2] > 1:
                return held  # type: ignore[no-any-return]
            other = self.layers[layer - 1]
            assert other.keys is not None
            assert other.values is not None
            return other.keys, other.values

        return extend

    with patched(Cache, "extend", make):
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
    def linear(self: Any, x: mx.array) -> mx.array:
        if x.dtype != mx.float32 or x.shape[-2] < 2:
            return real(self, x)  # type: ignore[no-any-return]
        out = _ten_bits(x) @ _ten_bits(self.weight).T
        return out + self.bias if "bias" in self else out

    return linear


def _quick_gelu(_: Any) -> Any:
    return lambda x: x * mx.sigmoid(1.702 * x)


@contextmanager
def dropped_residual(model: Llama, place: Place) -> Iterator[None]:
    """The middle layer's MLP result without what went in."""
    block = model.layers[place.early]

    def make(real: Any) -> Any:
        def call(self: Any, x: mx.array, cache: Cache, start: int, tap: Any) -> mx.array:
            if self is not block:
                return real(self, x, cache, start, tap)  # type: ignore[no-any-return]
            x = x + self.self_attn(self.input_layernorm(x), cache, start, tap)
            return self.mlp(self.post_attention_layernorm(x), tap)

        return call

    with patched(llama.Block, "__call__", make):
        yield


def _wrong_split(_: Any) -> Any:
    def heads(self: Any, x: mx.array, n: int) -> mx.array:
        B, L, _ = x.shape
        return x.reshape(B, L, self.head_dim, n).transpose(0, 3, 1, 2)

    return heads


def _below(layer: Any, path: str) -> Any:
    for part in path.split("."):
        layer = getattr(layer, part)
    return layer


def _load(model: Llama, arrays: dict[str, mx.array]) -> None:
    from mlx.utils import tree_unflatten

    # float64 is a thing of the CPU alone.
    with mx.stream(mx.cpu if model.dtype == mx.float64 else mx.default_device()):
        mx.eval(list(arrays.values()))
    model.update(
        tree_unflatten([(name.removeprefix("model."), array) for name, array in arrays.items()])
    )


# What a place must be called: several names where one fault may be seen at either.
_START, _SECOND = _at(0), _at(1)
_CUT: Callable[[Place], int] = lambda place: place.cut  # noqa: E731
_DECODE: Callable[[Place], int] = lambda place: place.prompt  # noqa: E731
_FIRST_LAYER: Callable[[Place], int | None] = _at(0)
_HEAD: Callable[[Place], int | None] = lambda _: None  # noqa: E731
_EARLY: Callable[[Place], int | None] = lambda place: place.early  # noqa: E731
_LATE: Callable[[Place], int | None] = lambda place: place.late  # noqa: E731
_TURNED = ("q_rope", "k_rope")
_SEEN = ("scores", "attention")
_NORMS = ("input_layernorm", "post_attention_layernorm")


@contextmanager
def _eps(model: Llama, place: Place) -> Iterator[None]:
    before, model.norm.eps = model.norm.eps, model.norm.eps / 10
    try:
        with both(*(attribute(norm, "eps", lambda eps: eps / 10) for norm in _NORMS))(model, place):
            yield
    finally:
        model.norm.eps = before


FAULTS: tuple[Fault, ...] = (
    Fault("every logit +0.05", logits(lambda x: x + 0.05), _START, _HEAD, ("logits",)),
    Fault("rms_norm_eps a tenth", _eps, _START, _FIRST_LAYER, ("input_norm",)),
    Fault(
        "cache stored in float16",
        stored(rounded(mx.float16)),
        _START,
        _FIRST_LAYER,
        ("keys",),
        in_logits=_CUT,
        none_in=("float16",),
    ),
    Fault("rope_theta times 0.99", theta(0.99), _SECOND, _FIRST_LAYER, _TURNED),
    Fault(
        "attention scale times 1.001",
        attribute("self_attn", "scale", lambda x: x * 1.001),
        _SECOND,
        _FIRST_LAYER,
        _SEEN,
    ),
    Fault(
        "one stale key row, last layer",
        stale("keys", lambda p: p.late),
        lambda p: p.row,
        _LATE,
        ("keys",),
    ),
    Fault("logits times 1.001", logits(lambda x: x * 1.001), _START, _HEAD, ("logits",)),
    Fault(
        "TF32-like matmul",
        function(nn.Linear, "__call__", _tf32),
        _START,
        _HEAD,
        (),
        "B",
        none_in=("float16", "bfloat16"),
    ),
    Fault(
        "cos and sin in bfloat16",
        function(caches, "_tables", _rounded_tables),
        _SECOND,
        _FIRST_LAYER,
        _TURNED,
        none_in=("bfloat16",),
    ),
    Fault(
        "cache stored in bfloat16",
        stored(rounded(mx.bfloat16)),
        _START,
        _FIRST_LAYER,
        ("keys",),
        in_logits=_CUT,
        none_in=("bfloat16",),
    ),
    Fault(
        "logits rounded to bfloat16",
        logits(lambda x: rounded(mx.bfloat16)(None, x)),
        _START,
        _HEAD,
        ("logits",),
        none_in=("bfloat16",),
    ),
    Fault(
        "one stale key row, middle layer",
        stale("keys", lambda p: p.early),
        lambda p: p.row,
        _EARLY,
        ("keys",),
    ),
    Fault(
        "weights through bfloat16",
        weights(rounded(mx.bfloat16)),
        _START,
        _FIRST_LAYER,
        ("embedding",),
        none_in=("bfloat16",),
    ),
    Fault(
        "a chunk's positions +1",
        shifted(lambda start, L: start > 0 and L > 1),
        _CUT,
        _FIRST_LAYER,
        _TURNED,
    ),
    Fault("weights through int8 per row", weights(int8), _START, _FIRST_LAYER, ("embedding",)),
    Fault(
        "the mask hides some tokens from themselves",
        masked(_hides_self),
        _at(5),
        _FIRST_LAYER,
        _SEEN,
    ),
    Fault(
        "decode positions +1",
        shifted(lambda start, L: start > 0 and L == 1),
        _DECODE,
        _FIRST_LAYER,
        _TURNED,
    ),
    Fault("the cache lost one token", lost_row, lambda p: p.row + 1, _FIRST_LAYER, _SEEN),
    Fault("rope_theta a tenth", theta(0.1), _SECOND, _FIRST_LAYER, _TURNED),
    Fault("the mask lets one future token in", masked(_sees_next), _START, _FIRST_LAYER, _SEEN),
    Fault(
        "sigmoid(1.702 x) gate",
        function(ops, "silu", _quick_gelu),
        _START,
        _FIRST_LAYER,
        ("activation",),
    ),
    Fault(
        "interleaved RoPE", function(llama, "rotate", _interleaved), _SECOND, _FIRST_LAYER, _TURNED
    ),
    Fault("a chunk's mask without offset", masked(_without_offset), _CUT, _FIRST_LAYER, _SEEN),
    Fault(
        "KV heads interleaved",
        function(ops, "attention", _heads_interleaved),
        _START,
        _FIRST_LAYER,
        _SEEN,
        "ABg",
    ),
    # Of our own.
    Fault(
        "two layers' weights swapped",
        swapped_layers,
        _START,
        lambda p: p.early - 1,
        ("input_norm",),
    ),
    Fault(
        "o_proj transposed",
        one_weight("self_attn.o_proj", lambda w: w.T),
        _START,
        _EARLY,
        ("o_proj",),
        "ABs",
    ),
    Fault(
        "a norm's weight +1",
        one_weight("post_attention_layernorm", lambda w: w + 1),
        _START,
        _EARLY,
        ("post_norm",),
    ),
    Fault(
        "one stale value row, middle layer",
        stale("values", lambda p: p.early),
        lambda p: p.row,
        _EARLY,
        ("values",),
    ),
    Fault("decoding reads the layer before", crossed_layers, _DECODE, _EARLY, _SEEN),
    Fault(
        "angles of the wrong sign",
        function(caches, "_tables", _negative),
        _SECOND,
        _FIRST_LAYER,
        _TURNED,
    ),
    Fault(
        "heads split the wrong way",
        function(llama.Attention, "_heads", _wrong_split),
        _START,
        _FIRST_LAYER,
        ("q", "k", "v"),
        "ABm",
    ),
    Fault("a residual dropped", dropped_residual, _START, _EARLY, ("hidden",)),
    Fault(
        "eps times 1.1 in one norm",
        attribute("input_layernorm", "eps", lambda eps: eps * 1.1, only="middle"),
        _START,
        _EARLY,
        ("input_norm",),
        "A",
        sink=True,
    ),
)
"""All seeded faults. Letters after the lanes: g needs grouped heads (1 < K < H), s a square o_proj, m heads of more than one.

In half precision a right port keeps its cache, tables, weights and logits in that dtype, and TF32 is a way of float32 alone.
"""

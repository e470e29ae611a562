"""The KV cache: one object outside the model, in the style of `Cache` in candle's `llama.rs`.

It carries, per layer, the keys (after RoPE) and values of every token fed, before the query heads
of a group share them; the RoPE tables; and the causal masks. Axes as in `mlxkv.port.llama`.

`guarded=False` is candle: index_pos picks table rows and the mask's shape, and is never checked
against what is held. `guarded=True`, the default, refuses, before anything is written, every call
whose result would be silently wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlxkv.port import rope
from mlxkv.port.config.llama import LlamaConfig
from mlxkv.port.ops import dtype_of, name_of
from oracle.formats.errors import Refusal

if TYPE_CHECKING:
    from mlxkv.port.llama import Llama

BLOCK = 256
"""Buffers grow by this many rows: a token per step must not copy the whole history each time."""

TABLES = 2**32
"""Bytes that both RoPE tables may take: 4 million positions of float64 at 64 pairs."""

MASKS = 16
"""Masks kept per cache, the least recently used dropped first."""


class CacheError(Refusal):
    """A call that the cache refuses. A guarded cache is as it was before the call."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's rows: buffers [B, K, capacity, D], of which the first `length` along S are held.

    A Layer never changes: an append makes a new one. MLX writes into the old buffer when nobody
    else holds it and copies it when somebody does. So clones share memory until one side writes,
    and never see each other's rows.
    """

    buffers: tuple[mx.array, mx.array] | None = None
    length: int = 0

    @property
    def keys(self) -> mx.array | None:
        """[B, K, S, D], after RoPE; None when nothing is held."""
        return None if self.buffers is None else self.buffers[0][:, :, : self.length]

    @property
    def values(self) -> mx.array | None:
        """[B, K, S, D]; None when nothing is held."""
        return None if self.buffers is None else self.buffers[1][:, :, : self.length]

    @property
    def batch(self) -> int | None:
        """B of the rows held; None when nothing is held."""
        return None if self.buffers is None else self.buffers[0].shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows held; the buffers are up to 255 rows larger."""
        if self.buffers is None:
            return 0
        B, K, _, D = self.buffers[0].shape
        return 2 * B * K * self.length * D * self.buffers[0].dtype.size

    def append(self, keys: mx.array, values: mx.array) -> Layer:
        """The layer with these rows, [B, K, L, D] each, after its own."""
        old = self.buffers or (None, None)
        put = (_put(old[0], keys, self.length), _put(old[1], values, self.length))
        return Layer(put, self.length + keys.shape[2])

    def crop(self, length: int) -> Layer:
        """The layer's first `length` rows; the buffers stay."""
        return Layer(self.buffers, length) if length else Layer()


class Cache:
    """Keys, values, RoPE tables and masks of one sequence, or of a batch of equally long ones.

    `dtype` must be the weights' dtype. With `use_kv_cache=False` nothing is stored or read, and
    every call must send the whole prefix. `max_length` bounds the sequence and with it the RoPE
    tables; for RoPE of type longrope it also chooses, once, between the short factors (the default)
    and the long ones. `len(cache)` is the number of tokens held; `fingerprint` names the weights
    that the last call used. Raises CacheError for a `max_length` that the config does not allow.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: str | mx.Dtype = "float32",
        use_kv_cache: bool = True,
        guarded: bool = True,
        max_length: int | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype_of(dtype)
        self.use_kv_cache = use_kv_cache
        self.guarded = guarded
        self.max_length = _span(config, max_length)
        self.cos, self.sin = _tables(config, self.dtype, self.max_length)
        self.fingerprint: str | None = None
        self._layers = (Layer(),) * config.num_hidden_layers
        self._masks: OrderedDict[tuple[int, int], mx.array] = OrderedDict()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer's rows, to look at, as in `cache.layers[0].keys.shape`, or to `restore`."""
        return self._layers

    @property
    def masks(self) -> dict[tuple[int, int], mx.array]:
        """The masks built so far, by (L, S); 1 hides a key."""
        return dict(self._masks)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows held, keys and values of all layers."""
        return sum(layer.nbytes for layer in self._layers)

    def __len__(self) -> int:
        return self._layers[0].length

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        c = self.config
        size = f"{len(self)} of {self.max_length} tokens, {self.nbytes} bytes"
        shape = f"{c.num_hidden_layers} layers x {c.num_key_value_heads} KV heads x {c.head_dim}"
        flags = [
            f", {name}=False" for name in ("use_kv_cache", "guarded") if not getattr(self, name)
        ]
        return f"Cache({size}, {shape}, {name_of(self.dtype)}{''.join(flags)})"

    def clone(self) -> Cache:
        """An independent copy, which shares memory until one side writes."""
        other = object.__new__(Cache)
        other.__dict__.update(self.__dict__)
        other._masks = self._masks.copy()
        return other

    def reset(self) -> None:
        """Drops every row. Tables and masks stay: they depend on the config and on shapes alone."""
        self._layers = (Layer(),) * self.config.num_hidden_layers

    def crop(self, length: int) -> int:
        """Keeps the first `length` tokens and returns how many were dropped.

        Raises CacheError where fewer are held.
        """
        if not _whole(length) or not 0 <= length <= len(self):
            what = (
                f"crop to {length!r}, expected a whole number from 0 to the {len(self)} tokens held"
            )
            raise CacheError(what, where="cache")
        length = int(length)
        dropped = len(self) - length
        self._layers = tuple(layer.crop(length) for layer in self._layers)
        return dropped

    def save(self, path: str | Path) -> None:
        """Writes the rows held and all that they depend on into one safetensors file.

        The file is whole or not there. Raises CacheError where it could not be used again: for rows
        that are not finite, or that come from weights without a fingerprint.
        """
        from mlxkv.port import cache_file

        cache_file.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, model: Llama) -> Cache:
        """The cache in a file that `save` wrote, to go on with `model`.

        Raises CacheError, which names what differs, where another model, dtype, config or RoPE made
        the rows, and where the file is not as it was written.
        """
        from mlxkv.port import cache_file

        return cache_file.load(Path(path), model)

    # What the model calls, in this order: admit, then for each layer rotation, extend and mask.

    def admit(self, batch: int, length: int, index_pos: int | None, model: Llama) -> int:
        """The position of the first of `length` new tokens in each of `batch` sequences.

        Raises CacheError with nothing changed. An unguarded cache refuses only what candle does:
        another dtype, no tokens, rows beyond the RoPE tables.
        """
        held = len(self) if self.use_kv_cache else 0
        start = held if index_pos is None else index_pos
        if not _whole(start) or start < 0:
            raise CacheError(f"cache: index_pos is {start!r}, expected a whole number from 0")
        start = int(start)
        self._check_model(model)
        if batch == 0 or length == 0:
            what = f"no new tokens (the cache holds {held})"
            raise CacheError(what, where="cache", remedy="a call needs at least one")
        if start + length > self.max_length:
            what = f"position {start + length - 1} (index_pos {start}, {length} tokens)"
            what += f" is beyond the {self.max_length} rows of the RoPE tables"
            why = rope.end(self.config, self.max_length, start + length)
            raise CacheError(what, where="cache", remedy=why)
        if self.guarded:
            self._guard(batch, start, held, model.fingerprint)
        # Rows of several weights, which only an unguarded cache can hold, are no known weights'.
        same = not held or model.fingerprint == self.fingerprint
        self.fingerprint = model.fingerprint if same else None
        return start

    def _check_model(self, model: Llama) -> None:
        if model.config != self.config:
            what = "made for another config than the model's"
            raise CacheError(what, where="cache", remedy="make it with Cache(model.config)")
        if model.dtype != self.dtype:
            what = f"dtype is {name_of(self.dtype)}, the weights' is {name_of(model.dtype)}"
            remedy = f"make it with Cache(model.config, dtype='{name_of(model.dtype)}')"
            raise CacheError(what, where="cache", remedy=remedy)

    def _guard(self, batch: int, start: int, held: int, fingerprint: str | None) -> None:
        if start != held:
            holder, remedy = f"the cache holds {held} tokens", "leave index_pos out"
            if not self.use_kv_cache:
                holder = "without a KV cache every call starts at 0"
                remedy = "send the whole prefix from index_pos 0"
            elif start == 0:
                other = "reset the cache or make a new one for another sequence"
                remedy = f"{other}, or leave index_pos out to go on"
            raise CacheError(f"cache: index_pos is {start}, expected {held} ({holder}); {remedy}")
        own = self._layers[0].batch
        if self.use_kv_cache and own not in (None, batch):
            what = f"batch of {batch}, expected {own} (that of the tokens held)"
            raise CacheError(what, where="cache", remedy="make a new cache")
        if held and fingerprint != self.fingerprint:
            what = f"the weights are {short(fingerprint)}, expected {short(self.fingerprint)}"
            what += " (those of the tokens held)"
            raise CacheError(what, where="cache", remedy="make a new cache")

    def rotation(self, start: int, length: int) -> tuple[mx.array, mx.array]:
        """cos and sin of `length` positions from `start`, (L, D / 2) each."""
        return self.cos[start : start + length], self.sin[start : start + length]

    def extend(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends [B, K, L, D] each to one layer; gives all its keys and values, [B, K, S, D]."""
        if not self.use_kv_cache:
            return keys, values
        grown = self._layers[layer].append(keys, values)
        self._layers = (*self._layers[:layer], grown, *self._layers[layer + 1 :])
        assert grown.buffers is not None
        return grown.buffers[0][:, :, : grown.length], grown.buffers[1][:, :, : grown.length]

    def mask(self, length: int, start: int) -> mx.array | None:
        """(L, start + L) uint8, 1 where row i hides column j, which is j > start + i.

        None for a single token, which sees everything.
        """
        if length == 1:
            return None
        key = (length, start + length)
        if key not in self._masks:
            columns, rows = np.arange(start + length), start + np.arange(length)
            self._masks[key] = mx.array((columns[None, :] > rows[:, None]).astype(np.uint8))
            if len(self._masks) > MASKS:
                self._masks.popitem(last=False)
        self._masks.move_to_end(key)
        return self._masks[key]

    def restore(self, layers: tuple[Layer, ...]) -> None:
        """Puts every layer back as `layers` had it before."""
        self._layers = layers


def short(fingerprint: str | None) -> str:
    """Enough of a fingerprint to tell two apart, and what the weights were rounded to."""
    return "unknown" if fingerprint is None else fingerprint[:12] + fingerprint[64:]


def _put(buffer: mx.array | None, rows: mx.array, start: int) -> mx.array:
    """The buffer with `rows` at `start` along S; larger by whole blocks where they do not fit."""
    B, K, L, D = rows.shape
    full = buffer if buffer is not None else mx.zeros((B, K, 0, D), rows.dtype)
    lacking = start + L - full.shape[2]
    if lacking > 0:
        blank = mx.zeros((B, K, -(-lacking // BLOCK) * BLOCK, D), rows.dtype)
        full = mx.concatenate([full, blank], axis=2)
    return mx.slice_update(full, rows, mx.array([start]), axes=[2])


def _whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _span(config: LlamaConfig, max_length: int | None) -> int:
    most = config.max_position_embeddings
    if max_length is None:
        return rope.span(config)
    if not _whole(max_length) or not 1 <= max_length <= most:
        expected = f"expected a whole number from 1 to max_position_embeddings {most}"
        raise CacheError(f"max_length is {max_length!r}, {expected}", where="cache")
    return int(max_length)


@lru_cache(maxsize=4)
def _tables(config: LlamaConfig, dtype: mx.Dtype, length: int) -> tuple[mx.array, mx.array]:
    host = np.float64 if dtype == mx.float64 else np.float32
    size = length * config.head_dim * np.dtype(host).itemsize
    if size > TABLES:
        what = f"RoPE tables of {length} rows take {size} bytes, expected at most {TABLES}"
        raise CacheError(what, where="cache", remedy="give a smaller max_length")
    cos, sin = rope.tables(config, host, length=length)
    # Without a dtype mx.array would make float32 of a float64 array.
    return mx.array(cos, dtype), mx.array(sin, dtype)

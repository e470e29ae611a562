"""The KV cache: one object outside the model, in the style of `Cache` in candle's `llama.rs`.

It carries, per layer, the keys (after RoPE) and values of every token fed, before the query heads
of a group share them; the RoPE tables; and the causal masks. Axes as in `mlxkv.port.llama`.

`guarded=False` is candle: index_pos picks table rows and the mask's shape, and is never checked
against what is held. `guarded=True`, the default, refuses, before anything is written, every call
whose result would be silently wrong.

No call of few tokens evaluates anything (see `llama.SCORES`). So that calls may wait for their
evaluation by the thousand, each is made to depend on the one before it: MLX writes rows into a
buffer where nobody else needs it any more, and would otherwise keep one copy per call for an
attention that is still to be computed.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxkv.port import rope
from mlxkv.port.config.llama import OF_READING, LlamaConfig
from mlxkv.port.config.values import flat
from mlxkv.port.ops import dtype_of, name_of
from mlxkv.port.watched import watch
from oracle.formats.errors import Refusal, one_line

if TYPE_CHECKING:
    from mlxkv.port.llama import Llama
    from mlxkv.port.part import Part

BLOCK = 256
"""Buffers grow by this many rows: a token per step must not copy the whole history each time."""

TABLES = 2**32
"""Bytes that both RoPE tables may take: 4 million positions of float64 at 64 pairs."""

MASKS = 16
"""Masks kept per cache, the least recently used dropped first."""

WHOLE_MASK = 2**24
"""Bytes of a mask that is kept whole: 4,096 x 4,096 keys. 32,768 x 32,768 would take 1 GB."""

_CLAIMS = threading.Lock()


Weights = tuple[weakref.ref[mx.array], ...]
Buffers = tuple[mx.array, mx.array]
"""Of keys and of values, [B, K, capacity, D] each."""


class CacheError(Refusal):
    """A call that the cache refuses. A guarded cache is as it was before the call."""


@dataclass(frozen=True, slots=True)
class Causal:
    """A mask that is too large to keep; what is asked of it is made then, (rows, columns) booleans.

    `shape` is (L, S). The last of its rows sees every key.
    """

    shape: tuple[int, int]

    def __getitem__(self, place: tuple[slice, slice]) -> mx.array:
        L, S = self.shape
        rows, columns = mx.arange(S - L, S)[place[0]], mx.arange(S)[place[1]]
        return columns[None] > rows[:, None]


Mask = mx.array | Causal
"""What hides keys from queries (L, S): an array of zeros and ones, or what makes parts of it."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's rows: buffers [B, K, capacity, D], of which the first `length` along S are held.

    A Layer never changes: an append makes a new one. MLX writes into the old buffer when nobody
    else holds it and copies it when somebody does. So clones share memory until one side writes,
    and never see each other's rows. Of `written` rows those from `length` on are cropped.
    """

    buffers: Buffers | None = None
    length: int = 0
    written: int = 0

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
        length = self.length + keys.shape[2]
        return Layer(put, length, max(self.written, length))

    def crop(self, length: int) -> Layer:
        """The layer's first `length` rows; the buffers stay."""
        return Layer(self.buffers, length, max(self.written, self.length)) if length else Layer()

    def room(self) -> Buffers | None:
        """The buffers with room for a row, and zeros in place of the rows that were cropped.

        None where nothing is held. A step that reads whole buffers gives a cropped row the weight
        0, which would not hide a NaN. How large they are follows from `length` alone, so that the
        sums are those of any cache that holds these rows.
        """
        if self.buffers is None:
            return None
        capacity = -(-(self.length + 1) // BLOCK) * BLOCK
        if self.written <= self.length and self.buffers[0].shape[2] == capacity:
            return self.buffers
        keys, values = (self._fitted(buffer, capacity) for buffer in self.buffers)
        return keys, values

    def _fitted(self, buffer: mx.array, capacity: int) -> mx.array:
        """A buffer of so many rows, of which those that are not held and were written are 0."""
        B, K, _, D = buffer.shape
        buffer, stale = buffer[:, :, :capacity], min(self.written, capacity) - self.length
        if stale > 0:
            buffer = _put(buffer, mx.zeros((B, K, stale, D), buffer.dtype), self.length)
        return mx.pad(buffer, [(0, 0), (0, 0), (0, capacity - buffer.shape[2]), (0, 0)])


class Cache:
    """Keys, values, RoPE tables and masks of one sequence, or of a batch of equally long ones.

    What a thread has not evaluated yet no other can: a guarded cache belongs to the thread of its
    last call until `eval`.

    `dtype` must be the weights' dtype. With `use_kv_cache=False` nothing is stored or read, and
    every call must send the whole prefix. `max_length` bounds the sequence and with it the RoPE
    tables; for RoPE of type longrope it also chooses, once, between the short factors (the default)
    and the long ones. `len(cache)` is the number of tokens held; `fingerprint` names the weights
    that the last call used. `part` is that of a model shared by several ranks, whose cache holds
    its own KV heads. Raises CacheError for a `max_length` that the config does not allow.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: str | mx.Dtype = "float32",
        use_kv_cache: bool = True,
        guarded: bool = True,
        max_length: int | None = None,
        part: Part | None = None,
    ) -> None:
        self.config, self.part = config, part
        self.dtype = dtype_of(dtype)
        self.use_kv_cache = use_kv_cache
        self.guarded = guarded
        self.max_length = _span(config, max_length)
        self.cos, self.sin = _tables(config, self.dtype, self.max_length)
        self._masks: OrderedDict[tuple[int, int], mx.array] = OrderedDict()
        self._calling = False
        self.reset()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer's rows, to look at, as in `cache.layers[0].keys.shape`, or to `restore`."""
        return self._layers

    @property
    def masks(self) -> dict[tuple[int, int], mx.array]:
        """The masks built so far, by (L, S), except the largest; 1 hides a key."""
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
        heads = c.num_key_value_heads
        mine = heads if self.part is None else heads // self.part.size
        shape = f"{c.num_hidden_layers} layers x {mine} KV heads x {c.head_dim}"
        shape += "" if self.part is None else f", {self.part.heads(heads)}"
        flags = [
            f", {name}=False" for name in ("use_kv_cache", "guarded") if not getattr(self, name)
        ]
        return f"Cache({size}, {shape}, {name_of(self.dtype)}{''.join(flags)})"

    def clone(self) -> Cache:
        """An independent copy, which shares memory until one side writes."""
        other = object.__new__(Cache)
        other.__dict__.update(self.__dict__)
        other._masks, other._calling = self._masks.copy(), False
        return other

    def reset(self) -> None:
        """Drops every row. Tables and masks stay: they depend on the config and on shapes alone.

        Raises CacheError during another thread's call.
        """
        if self._calling:
            self.require_thread()
        self.fingerprint: str | None = None
        self._weights: Weights = ()
        self._layers = (Layer(),) * self.config.num_hidden_layers
        self._last: mx.array = mx.array(0)
        self._owner: weakref.ref[threading.Thread] | None = None

    def eval(self) -> None:
        """Computes what is still to be computed; any thread may go on with the cache afterwards.

        Raises CacheError in another thread than that of the last call while that one lives.
        """
        if self._owner is not None and _living(self._owner) is not None:
            self.require_thread()
        try:
            mx.eval(self._last, [layer.buffers for layer in self._layers if layer.buffers])
        except RuntimeError as error:
            what = f"what it holds cannot be computed ({one_line(error)})"
            raise CacheError(what, where="cache", remedy="reset it") from error
        self._owner = None

    def crop(self, length: int) -> int:
        """Keeps the first `length` tokens and returns how many were dropped.

        Raises CacheError where a layer holds fewer, and during another thread's turn.
        """
        self.require_thread()
        most = min(layer.length for layer in self._layers)
        if not _whole(length) or not 0 <= length <= most:
            what = f"crop to {length!r}, expected a whole number from 0 to the {most} tokens held"
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

    def require_thread(self) -> None:
        """Raises CacheError where the rows held are another thread's to compute."""
        if not self.guarded or self._owner is None or self._owner() is threading.current_thread():
            return
        owner, mine = _living(self._owner), threading.current_thread().name
        whose = f"thread {owner.name!r}" if owner else "a thread that has ended"
        what = f"belongs to {whose} until cache.eval(), expected this thread, {mine!r}"
        remedy = "call cache.eval() there first" if owner else "call cache.eval(), or reset it"
        raise CacheError(what, where="cache", remedy=remedy)

    # What the model calls: `call` around all, in it `after`, then for each layer rotation, extend
    # and mask, or `room` and `wrote` for all at once, and `done`.

    @contextmanager
    def call(self, batch: int, length: int, index_pos: int | None, model: Llama) -> Iterator[int]:
        """One forward call: gives what `admit` does, and undoes the call where it fails."""
        with _CLAIMS:
            self.require_thread()
            before = self.__dict__.copy()
            self._owner, self._calling = weakref.ref(threading.current_thread()), True
        try:
            yield self.admit(batch, length, index_pos, model)
        except BaseException:
            if self.guarded:
                self.restore(before["_layers"])
                kept = ("fingerprint", "_weights", "_last", "_owner")
                self.__dict__.update({name: before[name] for name in kept})
            raise
        finally:
            self._calling = False

    def after(self, ids: mx.array) -> mx.array:
        """The ids of a call, which are there once the call before it has been computed."""
        first: mx.array = mx.depends([ids], [self._last])[0]
        return first

    def done(self, logits: mx.array) -> mx.array:
        """The logits of a call; from now on it is the last one."""
        # Both come into being at once, so that this waits for nothing that logits do not.
        logits, self._last = mx.depends([logits, self._last], [self._last])
        return logits

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
        weights = _arrays(model) if self.guarded and model.fingerprint is None else ()
        if self.guarded:
            self._guard(batch, start, held, model.fingerprint, weights)
        # Rows of several weights, which only an unguarded cache can hold, are no known weights'.
        same = not held or model.fingerprint == self.fingerprint
        self.fingerprint, self._weights = model.fingerprint if same else None, weights
        return start

    def _check_model(self, model: Llama) -> None:
        if model.config != self.config:
            mine, theirs = flat(asdict(self.config)), flat(asdict(model.config))
            key = next(k for k in theirs if mine[k] != theirs[k] and k not in OF_READING)
            what = "made for another config than the model's"
            what += f": {key} is {mine[key]!r:.120}, expected {theirs[key]!r:.120}"
            raise CacheError(what, where="cache", remedy="make it with Cache(model.config)")
        if model.part != self.part:
            made, given = (f"{part or 'a whole model'}" for part in (self.part, model.part))
            what = f"made for {made}, expected {given} as the model is"
            remedy = "make it with Cache(model.config, part=model.part)"
            raise CacheError(what, where="cache", remedy=remedy)
        if model.dtype != self.dtype:
            what = f"dtype is {name_of(self.dtype)}, the weights' is {name_of(model.dtype)}"
            remedy = f"make it with Cache(model.config, dtype='{name_of(model.dtype)}')"
            raise CacheError(what, where="cache", remedy=remedy)

    def _guard(
        self, batch: int, start: int, held: int, fingerprint: str | None, weights: Weights = ()
    ) -> None:
        lengths = [layer.length for layer in self._layers]
        if min(lengths) != max(lengths):
            what = f"its layers hold {min(lengths)} to {max(lengths)} tokens, expected one length"
            raise CacheError(what, where="cache", remedy=f"crop it to {min(lengths)} or reset it")
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
        if held and [*map(id, weights)] != [*map(id, self._weights)]:
            what = "the weights, without a fingerprint, are other arrays than the tokens held had"
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

    def mask(self, length: int, start: int) -> Mask | None:
        """(L, start + L) uint8, 1 where row i hides column j, which is j > start + i.

        None for a single token, which sees everything; a `Causal` beyond WHOLE_MASK bytes.
        """
        if length == 1:
            return None
        if length * (start + length) > WHOLE_MASK:
            return Causal((length, start + length))
        key = (length, start + length)
        if key not in self._masks:
            columns, rows = np.arange(start + length), start + np.arange(length)
            self._masks[key] = mx.array((columns[None, :] > rows[:, None]).astype(np.uint8))
            if len(self._masks) > MASKS:
                self._masks.popitem(last=False)
        self._masks.move_to_end(key)
        return self._masks[key]

    def room(self) -> list[Buffers] | None:
        """Every layer's buffers with room for one row more, where all hold equally many; else None.

        The cache is not changed by it.
        """
        if not self.use_kv_cache or len({layer.length for layer in self._layers}) > 1:
            return None
        found = [layer.room() for layer in self._layers]
        return [pair for pair in found if pair is not None] if None not in found else None

    def wrote(self, buffers: list[Buffers]) -> None:
        """Takes the buffers that `room` gave, with one row more in each."""
        length = len(self) + 1
        self._layers = tuple(Layer(pair, length) for pair in buffers)

    def restore(self, layers: tuple[Layer, ...]) -> None:
        """Puts every layer back as `layers` had it before."""
        self._layers = layers


def short(fingerprint: str | None) -> str:
    """Enough of a fingerprint to tell two apart, and what the weights were rounded to."""
    return "unknown" if fingerprint is None else fingerprint[:12] + fingerprint[64:]


def _put(buffer: mx.array | None, rows: mx.array, start: int) -> mx.array:
    """The buffer with `rows` at `start` along S; larger by whole blocks where they do not fit."""
    L, capacity = rows.shape[2], 0 if buffer is None else buffer.shape[2]
    more = -(-max(0, start + L - capacity) // BLOCK) * BLOCK
    if buffer is None:
        return mx.pad(rows, [(0, 0), (0, 0), (0, more - L), (0, 0)])
    full = mx.pad(buffer, [(0, 0), (0, 0), (0, more), (0, 0)]) if more else buffer
    return mx.slice_update(full, rows, mx.array([start]), axes=[2])


def _living(thread: weakref.ref[threading.Thread]) -> threading.Thread | None:
    found = thread()
    return found if found is not None and found.is_alive() else None


def _arrays(model: Llama) -> Weights:
    """Each of a model's weights, to be known again and not to be kept alive.

    While an array lives, every reference to it is the same object.
    """
    return tuple(weakref.ref(array) for _, array in tree_flatten(model.parameters()))


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


watch(sys.modules[__name__], Cache, Layer, Causal)

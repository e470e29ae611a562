"""Small caches of mlx-lm's protocol, for what mlx-lm has no class of its own.

They are what others' caches are measured beside, so each does one thing: it rounds to a dtype, or
quantises keys and values with bits of their own, or goes over to mlx-lm's QuantizedKVCache in
mid-sequence. What they hand to attention are plain arrays in the model's dtype, except after the
switch. mlx-lm is imported where it is used, since it brings torch in. Axes as in
`mlxkv.port.llama`; keys and values are [B, K, L, D] as they come and [B, K, S, D] as they go.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import mlx.core as mx

from mlxkv.port.ops import dtype_of

Parts = tuple[mx.array, ...]
"""What is stored of keys or of values: arrays [B, K, S, *]."""


class Protocol(ABC):
    """What mlx-lm asks of a cache beside `update_and_fetch`; `offset` is the tokens held."""

    offset: int

    @abstractmethod
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Appends the rows of a call; all keys and values held."""

    @property
    @abstractmethod
    def state(self) -> Any:
        """All that it holds: arrays, numbers and text, in tuples."""

    @state.setter
    @abstractmethod
    def state(self, state: Any) -> None: ...

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """The cache that a `state` was of."""
        made = cls.__new__(cls)
        made.state = state
        return made

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of everything allocated for rows."""

    @abstractmethod
    def trim(self, n: int) -> int:
        """Forgets the last `n` tokens, or as many as there are; how many those were."""

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    def make_mask(self, N: int, **given: Any) -> Any:
        """mlx-lm's own mask for N tokens after those held."""
        from mlx_lm.models.cache import create_attention_mask

        return create_attention_mask(N, offset=self.offset, **given)


class StoringKVCache(Protocol):
    """Stores keys and values as a subclass packs them; side 0 are the keys, 1 the values.

    Without spare rows, which would save less time than unpacking all rows at each call takes.
    """

    stored: list[Parts]

    def __init__(self) -> None:
        self.offset, self.stored = 0, [(), ()]

    @abstractmethod
    def pack(self, side: int, rows: mx.array) -> Parts:
        """What is stored of rows [B, K, L, D]: arrays [B, K, L, *]."""

    @abstractmethod
    def unpack(self, side: int, parts: Parts, dtype: mx.Dtype) -> mx.array:
        """The rows that `parts` stand for, [B, K, S, D] in `dtype`."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        held = self._held() if self.offset else ((), ())
        for side, rows in enumerate((keys, values)):
            new = self.pack(side, rows)
            pairs = zip(held[side], new, strict=True) if held[side] else ()
            self.stored[side] = tuple(mx.concatenate([*pair], axis=2) for pair in pairs) or new
        self.offset += keys.shape[2]
        return self.keys_and_values(keys.dtype)

    def keys_and_values(self, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
        """All that is held, as attention gets it."""
        keys, values = self._held()
        return self.unpack(0, keys, dtype), self.unpack(1, values, dtype)

    def _held(self) -> tuple[Parts, Parts]:
        """The parts of the tokens held; those that were trimmed may still be stored."""
        keys, values = (tuple(part[:, :, : self.offset] for part in p) for p in self.stored)
        return keys, values

    def trim(self, n: int) -> int:
        n = min(self.offset, n)
        self.offset -= n
        return n

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.stored for part in parts)

    @property
    def state(self) -> Any:
        """Keys' parts and values' parts (None where nothing was ever held), tokens, options."""
        keys, values = (parts or None for parts in self.stored)
        return keys, values, self.offset, *self._options()

    @state.setter
    def state(self, state: Any) -> None:
        keys, values, self.offset, *options = state
        self.stored = [tuple(keys or ()), tuple(values or ())]
        self._set_options(*options)

    @abstractmethod
    def _options(self) -> tuple[Any, ...]: ...

    @abstractmethod
    def _set_options(self, *options: Any) -> None: ...


class StoredKVCache(StoringKVCache):
    """Rounds keys and values to `dtype` ("float16" or "bfloat16") and stores them so."""

    def __init__(self, dtype: str = "float16") -> None:
        super().__init__()
        self._set_options(dtype)

    def pack(self, side: int, rows: mx.array) -> Parts:
        return (rows.astype(dtype_of(self.dtype)),)

    def unpack(self, side: int, parts: Parts, dtype: mx.Dtype) -> mx.array:
        return parts[0].astype(dtype)

    def _options(self) -> tuple[Any, ...]:
        return (self.dtype,)

    def _set_options(self, *options: Any) -> None:
        (self.dtype,) = options


class SplitKVCache(StoringKVCache):
    """Affine groups of `group_size` along D (mx.quantize), with bits of their own for keys and for
    values; 0 bits: stored as they come.
    """

    def __init__(self, keys: int = 8, values: int = 4, group_size: int = 64) -> None:
        super().__init__()
        self._set_options(keys, values, group_size)

    def pack(self, side: int, rows: mx.array) -> Parts:
        bits = self.of_sides[side]
        return tuple(mx.quantize(rows, self.group_size, bits)) if bits else (rows,)

    def unpack(self, side: int, parts: Parts, dtype: mx.Dtype) -> mx.array:
        if not (bits := self.of_sides[side]):
            return parts[0].astype(dtype)
        packed, scales, biases = parts
        rows = mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=bits)
        return rows.astype(dtype)

    def _options(self) -> tuple[Any, ...]:
        return (*self.of_sides, self.group_size)

    def _set_options(self, *options: Any) -> None:
        keys, values, self.group_size = options
        # Not `bits`: mlx-lm takes a cache that has it for one that hands out packed arrays.
        self.of_sides = (keys, values)


class SwitchedKVCache(Protocol):
    """mlx-lm's KVCache, which `to_quantized` turns into its QuantizedKVCache before the first call
    that begins with `start` tokens held or more, of which there is one at least.

    So does mlx-lm's `maybe_quantize_kv_cache`, after every call.
    """

    def __init__(self, bits: int = 4, group_size: int = 64, start: int = 0) -> None:
        from mlx_lm.models.cache import KVCache

        self.inner: Any = KVCache()
        self.to, self.start = {"bits": bits, "group_size": group_size}, start

    def __getattr__(self, name: str) -> Any:
        """`bits` and `group_size` once it is quantised, which is how mlx-lm's attention sees it."""
        if name in ("bits", "group_size") and self.quantised:
            return getattr(self.inner, name)
        raise AttributeError(name)

    @property
    def quantised(self) -> bool:
        return not hasattr(self.inner, "to_quantized")

    @property
    def offset(self) -> int:  # type: ignore[override]
        return int(self.inner.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """After the switch both are triples, as mx.quantize gives them."""
        if not self.quantised and self.offset >= max(1, self.start):
            self.inner = self.inner.to_quantized(**self.to)
        return self.inner.update_and_fetch(keys, values)

    def keys_and_values(self) -> Any:
        return self.inner.keys_and_values()

    def trim(self, n: int) -> int:
        return int(self.inner.trim(n))

    @property
    def nbytes(self) -> int:
        return 0 if self.inner.empty() else int(self.inner.nbytes)

    @property
    def state(self) -> Any:
        """Keys, values and tokens, whether they are quantised, and what to and from when."""
        rows, to = self.inner.state[:3], self.to
        return *rows, self.quantised, to["bits"], to["group_size"], self.start

    @state.setter
    def state(self, state: Any) -> None:
        from mlx_lm.models.cache import KVCache, QuantizedKVCache

        keys, values, offset, quantised, bits, group_size, self.start = state
        self.to = {"bits": bits, "group_size": group_size}
        self.inner = QuantizedKVCache(**self.to) if quantised else KVCache()
        self.inner.keys, self.inner.values, self.inner.offset = keys, values, offset

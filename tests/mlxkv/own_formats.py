"""Caches of one's own in formats that mlx-lm has not: right ones, and some with one planted fault.

`make` functions, as `assert_cache_behaves` and `--cache FILE.py:make` take them.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import without_torch  # noqa: F401 before mlx-lm
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from planted import of

BLOCK = 16


class Paged:
    """Rows in blocks of 16; the state is a list of them, keys first, and the offset."""

    def __init__(self) -> None:
        self.blocks: tuple[list[mx.array], list[mx.array]] = ([], [])
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        start, self.offset = self.offset, self.offset + keys.shape[2]
        pairs = zip(self.blocks, (keys, values), strict=True)
        sides = [
            mx.concatenate([*(side and [mx.concatenate(side, axis=2)[:, :, :start]]), new], axis=2)
            for side, new in pairs
        ]
        room = -self.offset % BLOCK
        padded = [mx.pad(one, [(0, 0), (0, 0), (0, room), (0, 0)]) for one in sides]
        keys, values = (mx.split(one, one.shape[2] // BLOCK, axis=2) for one in padded)
        self.blocks = (keys, values)
        return tuple(sides)

    @property
    def state(self) -> Any:
        return [*self.blocks[0], *self.blocks[1], self.offset]


class BlockKeys:
    """Keys are packed by channel when a block of 32 is full, as KIVI has it; until then, and
    values always, they are as they came.
    """

    def __init__(self) -> None:
        self.packed: list[Any] = []
        self.rest: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        join = mx.concatenate
        self.rest = keys if self.rest is None else join([self.rest, keys], axis=2)
        self.values = values if self.values is None else join([self.values, values], axis=2)
        self.offset += keys.shape[2]
        while self.rest.shape[2] >= 32:
            full, self.rest = self.rest[:, :, :32].swapaxes(2, 3), self.rest[:, :, 32:]
            self.packed.append(mx.quantize(full, group_size=32, bits=3))
        old = [mx.dequantize(*one, group_size=32, bits=3).swapaxes(2, 3) for one in self.packed]
        return join([*old, self.rest], axis=2), self.values


class Running:
    """int8 with one scale for a channel that only grows: what is held is rounded again."""

    top = 7

    def __init__(self) -> None:
        self.sides: list[tuple[mx.array, mx.array]] = []
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        made = []
        for i, new in enumerate((keys, values)):
            scale = mx.max(mx.abs(new), axis=2, keepdims=True) / self.top + 1e-9
            old = []
            if self.offset:
                held, before = self.sides[i]
                scale = mx.maximum(scale, before)
                old = [mx.round(held[:, :, : self.offset] * (before / scale))]
            made.append((mx.concatenate([*old, mx.round(new / scale)], axis=2), scale))
        self.sides, self.offset = made, self.offset + keys.shape[2]
        return tuple(rows * scale for rows, scale in made)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = min(n, self.offset)
        self.offset -= n
        return n

    def reset(self) -> None:
        self.sides, self.offset = [], 0


class KeepsScale(Running):
    """A fault: when it is emptied, a row stays."""

    def reset(self) -> None:
        self.offset = min(1, self.offset)


class ShowsOneLess(QuantizedKVCache):
    """Gives to attention all that it holds, and says that it gives a row less."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        super().update_and_fetch(keys, values)
        return super().keys_and_values()

    def keys_and_values(self) -> Any:
        return tuple(tuple(a[..., :-1, :] for a in side) for side in super().keys_and_values())


class SizeOneMore(KVCache):
    def size(self) -> int:
        return int(self.offset) + 1


class SizeOfBits(QuantizedKVCache):
    def size(self) -> int:
        return int(self.offset) - 1 if self.offset else 0


class ResetKeepsARow(KVCache):
    def reset(self) -> None:
        self.offset = min(1, self.offset)


class Resets(KVCache):
    def reset(self) -> None:
        self.keys = self.values = None
        self.offset = 0


class WideWindow(KVCache):
    """Its newest 300 rows, with what it says of its bytes off."""

    def make_mask(self, N: int, **_: Any) -> mx.array:
        rows, columns = mx.arange(self.offset, self.offset + N)[:, None], mx.arange(self.offset + N)
        return (columns <= rows) & (columns > rows - 300)

    @property
    def nbytes(self) -> int:
        return 0


class Fails:
    """In its first call, with a long story whose end says where to look."""

    def __init__(self) -> None:
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        raise RuntimeError("boom: " + "the table of pages was asked for a page of nothing, " * 8)


paged, block_keys, running = of(Paged), of(BlockKeys), of(Running)
fails, shows_one_less, size_one_more = of(Fails), of(ShowsOneLess), of(SizeOneMore)

"""Caches of mlx-lm's protocol with one planted fault each, and right ones beside them.

`make` functions, as `assert_cache_behaves` and `--cache FILE.py:make` take them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import without_torch  # noqa: F401 before mlx-lm
from mlx_lm.models.cache import (
    BatchKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

Make = Callable[[Any], list[Any]]
WINDOW, SINKS = 10, 2


class SinkKVCache(KVCache):
    """A right window with sinks: keeps every row, and hides what lies between, in calls of any
    size. Its `state` keeps the window's size.
    """

    window = WINDOW
    newest = WINDOW - SINKS

    def make_mask(self, N: int, **_: Any) -> mx.array:
        rows, columns = mx.arange(self.offset, self.offset + N)[:, None], mx.arange(self.offset + N)
        shown = (columns < SINKS) | (columns > rows - self.newest)
        return (columns <= rows) & shown

    def size(self) -> int:
        return min(self.offset, self.window)


class OneShortInChunks(SinkKVCache):
    """The window is one short, in calls of several tokens."""

    def make_mask(self, N: int, **given: Any) -> mx.array:
        self.newest = WINDOW - SINKS - (N > 1)
        return super().make_mask(N, **given)


class OneShort(SinkKVCache):
    """The window is one short, always: that is another right window."""

    newest = WINDOW - SINKS - 1


class SinksOverwritten(RotatingKVCache):
    """Where the ring comes round, single tokens are written over what is to stay."""

    def _update_in_place(self, keys: mx.array, values: mx.array) -> Any:
        kept, self.keep = self.keep, 0
        try:
            return super()._update_in_place(keys, values)
        finally:
            self.keep = kept

    def make_mask(self, N: int, **_: Any) -> Any:
        """Chunks see their sinks, as mlx-lm's do not."""
        if N == 1:
            return None
        before = min(self.max_size - 1, self.offset)
        rows, columns = mx.arange(before, before + N)[:, None], mx.arange(before + N)
        shown = (columns < self.keep) | (columns > rows - (self.max_size - self.keep))
        return (columns <= rows) & shown


class StaleScale(QuantizedKVCache):
    """The first token of a call has the scale and the bias of the row before it."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        before = self.offset
        super().update_and_fetch(keys, values)
        if before:
            for part in (1, 2):
                self.keys[part][:, :, before] = self.keys[part][:, :, before - 1]
        return self.keys_and_values()


class StaleScaleAfterTrim(QuantizedKVCache):
    """What is written after a trim has the scale and bias of what it replaces."""

    stale: tuple[int, int] = (0, 0)

    def trim(self, n: int) -> int:
        self.stale = (self.offset - n, self.offset)
        return int(super().trim(n))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        before, (start, end) = self.offset, self.stale
        kept = [mx.array(part) for part in self.keys[1:]] if end else []
        super().update_and_fetch(keys, values)
        last = min(self.offset, end)
        for part, old in zip((1, 2), kept, strict=False):
            first = max(before, start)
            self.keys[part][:, :, first:last] = old[:, :, first:last]
        return self.keys_and_values()


class ValuesAsKeys(QuantizedKVCache):
    """Values have as few bits as keys were to have: a right cache of fewer bits."""

    def __init__(self) -> None:
        super().__init__(group_size=64, bits=4)


class OffsetNotTrimmed(KVCache):
    """Says that it has trimmed, and has not."""

    def trim(self, n: int) -> int:
        return min(self.offset, n)


class SharedClone(KVCache):
    """A copy writes into the same buffers, since `__setitem__` of an array is in place."""

    def copy(self) -> SharedClone:
        other = SharedClone()
        other.keys, other.values, other.offset = self.keys, self.values, self.offset
        return other


class LostOffset(KVCache):
    """The state is keys and values alone; what is read back holds the spare rows too."""

    @property
    def state(self) -> Any:
        return self.keys, self.values

    @state.setter
    def state(self, state: Any) -> None:
        self.keys, self.values = state
        self.offset = self.keys.shape[2]


class FirstRowForAll(KVCache):
    """Of a batch all rows read the first one's keys."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        keys, values = super().update_and_fetch(keys, values)
        return mx.broadcast_to(keys[:1], keys.shape), values


class KeptRow(KVCache):
    """A new one begins with the last row that any of them was given, in the place of its first."""

    last: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        first = self.offset == 0
        found = super().update_and_fetch(keys, values)
        if first and KeptRow.last is not None and KeptRow.last.shape[0] == keys.shape[0]:
            self.keys[:, :, :1] = KeptRow.last
            found = self.keys_and_values()
        KeptRow.last = mx.array(keys[:, :, -1:])
        return found


class LateMask(KVCache):
    """The mask of a chunk does not know how much is held."""

    def make_mask(self, N: int, **_: Any) -> Any:
        if N == 1:
            return None
        return mx.arange(self.offset + N) <= mx.arange(N)[:, None]


class LosesAtBlock(KVCache):
    """Where it grows, its newest row is lost."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        grows = self.keys is not None and self.offset + keys.shape[2] > self.keys.shape[2]
        if grows:
            self.keys[:, :, self.offset - 1 : self.offset] = 0
        return super().update_and_fetch(keys, values)


class SaysTooLittle(KVCache):
    """Counts its keys and forgets its values."""

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None else int(self.keys.nbytes)


class Crashes(KVCache):
    """Fails where it is trimmed."""

    def trim(self, n: int) -> int:
        return int(self.no_such_thing)  # type: ignore[attr-defined]


def of(kind: Callable[[], Any]) -> Make:
    """`make` of one kind of cache for each layer."""

    def make(config: Any) -> list[Any]:
        return [kind() for _ in range(config.num_hidden_layers)]

    return make


class PaddedKVCache(BatchKVCache):
    """A right batch cache, made for one row; it becomes one for as many as the first call has."""

    def __init__(self) -> None:
        super().__init__([0])

    def prepare(self, *, left_padding: Any = None, **given: Any) -> None:
        if left_padding is not None:
            super().__init__(list(left_padding))

    def __deepcopy__(self, memo: Any) -> PaddedKVCache:
        other = PaddedKVCache()
        other.state = copy.deepcopy(self.state, memo)
        return other


RIGHT: dict[str, tuple[Make, str]] = {
    "KVCache": (of(KVCache), ""),
    "sinks": (of(SinkKVCache), "window"),
    "one short": (of(OneShort), "window"),
    "RotatingKVCache": (of(lambda: RotatingKVCache(WINDOW)), "window"),
    "8 bits": (of(QuantizedKVCache), "quantised"),
    "4 bits": (of(ValuesAsKeys), "quantised"),
}
"""What must not be accused. A window that is always one short, and values with the bits of keys,
behave: it is `mlxkv cost` that moves away from its known answer."""

PLANTED: dict[str, tuple[Make, str, set[str]]] = {
    "stale scale of a group": (of(StaleScale), "quantised", {"alone", "chunks"}),
    "stale scale after a trim": (of(StaleScaleAfterTrim), "quantised", {"trim"}),
    "window one short in chunks": (of(OneShortInChunks), "window", {"chunks", "wide"}),
    "sinks overwritten": (
        of(lambda: SinksOverwritten(WINDOW, keep=SINKS)),
        "window",
        {"ends-chunks"},
    ),
    "offset not trimmed": (of(OffsetNotTrimmed), "", {"trim", "draft", "nothing"}),
    "clone shares its buffers": (of(SharedClone), "", {"turns", "copy"}),
    "state without the offset": (of(LostOffset), "", {"saved", "cut-saved"}),
    "batch row 1 reads row 0's": (of(FirstRowForAll), "", {"batch"}),
    "reset keeps a row": (of(KeptRow), "", {"reset"}),
    "a chunk's mask without its offset": (of(LateMask), "", {"chunks", "several"}),
    "a row lost where it grows": (of(LosesAtBlock), "", {"blocks"}),
    "bytes of keys alone": (of(SaysTooLittle), "", {"bytes"}),
    "an error in trim": (of(Crashes), "", {"trim"}),
}
"""By fault the cache, what it is said to lose, and lives that must show it."""

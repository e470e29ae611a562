"""How an engine lays out its cache, if not as the truth does: found from the numbers, and undone.

An engine may keep the same keys and values in another order or scale and still compute the same
logits. Each layout known here is one fixed rule for all layers, heads and positions, so that a row
that breaks the rule is still seen once the cache is laid out as the truth's. Which layout a cache
has is decided by medians over positions, layer by layer and head by head: a few stale rows, or rows
of low precision, change nothing of it.

Axes: K key/value heads, n positions, D head_dim, P positions looked at, l layers looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations, product
from typing import Literal

import numpy as np

from mlxkv.judge.admission import layers
from mlxkv.judge.case import CACHE
from mlxkv.judge.measure import Floats, pieces
from oracle.formats.tensors import Array
from oracle.formats.trace import ROPE_TABLES, Trace

Kind = Literal["keys", "values"]
KINDS: tuple[Kind, ...] = ("keys", "values")
Pairs = Literal["halves", "neighbours"]
"""Which channels RoPE turns together: i and i + D / 2, or 2i and 2i + 1."""

Tables = tuple[Array, Array]
"""cos and sin, each (n, D / 2), of the angles by which RoPE turns the pairs."""

_AXES = ("heads", "positions", "channels")

# A layout fits a head if the median row's error is at most this part of the row. Right ones read
# 1e-7 in float32, 0.03 in bfloat16 (a tiny model of three layers); wrong ones 0.5 to 1.4, but keys
# before RoPE, which turns the first rows little, 0.1 to 0.7 on six tokens or fewer.
NEAR = 0.25

# It fits better than another only by this factor, else the one with fewer changes is taken: an
# estimated scale lowers any error a little.
CLEARLY = 4.0

# A scale within this factor of 1 is an error and no layout.
LEAST_SCALE = 1.25

# How many positions and layers are looked at, spread over all.
_POSITIONS, _LAYERS = 32, 8


@dataclass(frozen=True, slots=True)
class Layout:
    """How keys or values of the truth, (K, n, D), became what is stored.

    `axes` are the truth's axes in the order stored. `stored` says which channels make a pair if
    they are not those of the truth, `unturned` which channels of the truth's RoPE has yet to turn.
    `heads` gives the stored head of each of the truth's, `scale` what the truth's values are
    multiplied by.
    """

    axes: tuple[int, ...] = (0, 1, 2)
    newest_first: bool = False
    stored: Pairs | None = None
    unturned: Pairs | None = None
    heads: tuple[int, ...] | None = None
    scale: float = 1.0

    @property
    def changes(self) -> int:
        """In how many ways it differs from the truth's."""
        plain = Layout()
        return sum(getattr(self, name) != getattr(plain, name) for name in self.__slots__)

    def words(self, found: Sequence[int], wanted: Sequence[int]) -> str:
        """What a reader is told of it, of arrays of the shape `found` instead of `wanted`."""
        shaped = self.axes != (0, 1, 2) or tuple(found) != tuple(wanted)
        plain = f"[{', '.join(_AXES)}]"
        said = {
            f"as [{', '.join(self._named(found, wanted))}] instead of {plain}": shaped,
            "newest first": self.newest_first,
            "in Meta's order (neighbours make a pair)": self.stored == "neighbours",
            "in Hugging Face's order (halves make a pair)": self.stored == "halves",
            "before RoPE": self.unturned is not None,
            f"with heads in the order {', '.join(map(str, self.heads or ()))}": bool(self.heads),
            f"times {self.scale:.4g}": self.scale != 1.0,
        }
        return " and ".join(words for words, true in said.items() if true)

    def _named(self, found: Sequence[int], wanted: Sequence[int]) -> list[str]:
        """The axes of the shape `found` by the names of those of `wanted`, (K, n, D).

        Lengths stand in for names if no run of the truth's axes is as long as one that is stored.
        """
        left = [axis for axis in self.axes if wanted[axis] > 1]
        names = []
        for length in found:
            held, of = 1, list[str]()
            while left and held < length:
                held *= wanted[left[0]]
                of.append(_AXES[left.pop(0)])
            if held != length:
                return [str(length) for length in found]
            names.append(" x ".join(of) or "1")
        return names

    def undo(self, array: Array, part: slice, truth: Trace, kind: Kind) -> Array:
        """One layer's keys or values as stored, at some positions, to what the truth has there.

        That is (K, positions, D); a block of them at a time needs no copy of the layer.
        """
        tables = _tables(truth)
        turns = (tables[0][part], tables[1][part]) if tables else None
        return self.undone(self.rows(array, wanted(truth, kind))[:, part], turns)

    def rows(self, array: Array, shape: Sequence[int]) -> Array:
        """The stored array as `shape` (K, n, D), oldest first; a view of it."""
        x = array.reshape([shape[axis] for axis in self.axes]).transpose(np.argsort(self.axes))
        return x[:, ::-1] if self.newest_first else x

    def undone(self, x: Array, tables: Tables | None) -> Array:
        """Rows (K, P, D) as the truth has them, at whose positions `tables` are."""
        if self.stored is not None:
            x = _as_halves(x) if self.stored == "neighbours" else _as_neighbours(x)
        x = x[list(self.heads)] if self.heads else x
        x = np.divide(x, self.scale, dtype=np.float64) if self.scale != 1.0 else x
        return x if self.unturned is None or tables is None else _turned(x, tables, self.unturned)


def wanted(truth: Trace, kind: Kind) -> tuple[int, ...]:
    """(K, n, D) of the truth's keys or values."""
    return tuple(truth.arrays[_name(0, kind)].shape)


def same_shape(trace: Trace, truth: Trace, kind: Kind) -> bool:
    """Whether every layer's keys or values have the truth's shape."""
    names = [_name(layer, kind) for layer in range(layers(truth))]
    return all(trace.arrays[name].shape == truth.arrays[name].shape for name in names)


def shaped(trace: Trace, truth: Trace, kind: Kind) -> bool:
    """Whether each layer has keys, or values, of one shape, with as many numbers as the truth's."""
    names = [_name(layer, kind) for layer in range(layers(truth))]
    if any(name not in trace.arrays for name in names):
        return False
    sizes = all(trace.arrays[name].size == truth.arrays[name].size for name in names)
    return sizes and len({trace.arrays[name].shape for name in names}) == 1


def finite(trace: Trace, truth: Trace, kind: Kind) -> bool:
    """Whether every layer's keys or values are numbers: a layout excuses nothing else."""
    names = [_name(layer, kind) for layer in range(layers(truth))]
    parts = (part for name in names for part in pieces(trace.arrays[name]))
    return all(bool(np.isfinite(part).all()) for part in parts)


def undoing(
    trace: Trace, truth: Trace, kind: Kind
) -> tuple[Callable[[Array, slice], Array] | None, str]:
    """What gives a layer's stored array, at some positions, as the truth has it, and words for how
    it was stored.

    The words are "" for the truth's own layout. Where no known layout fits there is nothing that
    gives it, and the words say so.
    """
    layout = find(trace, truth, kind)
    if layout is None:
        return None, f"{kind} laid out in another way, or wrong: not judged"
    words = layout.words(trace.arrays[_name(0, kind)].shape, wanted(truth, kind))
    note = f"{kind} are kept {words}; compared after undoing that" if words else ""
    return partial(layout.undo, truth=truth, kind=kind), note


def as_truth(trace: Trace, truth: Trace) -> Trace:
    """The trace with keys and values laid out as the truth's, where a known layout fits them.

    What is laid out anew is so each time that it is read: a layer, and not all of them, is copied.
    """
    undo: dict[str, Callable[[Array, slice], Array]] = {}
    for kind in KINDS:
        if not shaped(trace, truth, kind):
            continue
        rows, note = undoing(trace, truth, kind)
        if rows is not None and note:
            undo |= {_name(layer, kind): rows for layer in range(layers(truth))}
    return replace(trace, arrays=_LaidOut(trace.arrays, undo)) if undo else trace


@dataclass(frozen=True, slots=True, eq=False)
class _LaidOut(Mapping[str, Array]):
    """Arrays by name, of which some are laid out as the truth's when they are asked for."""

    stored: Mapping[str, Array]
    undo: Mapping[str, Callable[[Array, slice], Array]]

    def __getitem__(self, name: str) -> Array:
        array = self.stored[name]
        return self.undo[name](array, slice(None)) if name in self.undo else array

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def find(trace: Trace, truth: Trace, kind: Kind) -> Layout | None:
    """The known layout that fits the most heads of the most layers; None if none fits any.

    Of several that fit as many, the one with the fewest changes: the truth's own, if that is among
    them. `shaped` must hold.
    """
    at, wrongs = _Sample.of(trace, truth, kind), dict[Layout, Floats]()
    for way in _ways(kind, at):
        for layout, x in at.variants(way):
            wrongs[layout] = at.errors(x)
    if not wrongs:
        return None  # no order of the axes has this shape
    best = np.minimum.reduce(list(wrongs.values()))

    def fits(layout: Layout) -> tuple[int, int]:
        error = wrongs[layout]
        return int(np.sum((error <= NEAR) & (error <= CLEARLY * best))), -layout.changes

    found = max(wrongs, key=fits)
    return found if fits(found)[0] else None


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """Some layers of a trace as stored, and (l, K, P, D) of the truth, at the positions `at`.

    `shape` is (K, n, D); `tables` those of the truth's RoPE at these positions.
    """

    stored: Sequence[Array]
    shape: tuple[int, ...]
    at: Array
    true: Floats
    tables: Tables | None

    @classmethod
    def of(cls, trace: Trace, truth: Trace, kind: Kind) -> _Sample:
        names = [_name(layer, kind) for layer in _spread(layers(truth), _LAYERS)]
        shape, tables = wanted(truth, kind), _tables(truth)
        at = _spread(shape[1], _POSITIONS)
        true = np.stack([truth.arrays[name][:, at] for name in names]).astype(np.float64)
        turns = (tables[0][at], tables[1][at]) if tables else None
        return cls([trace.arrays[name] for name in names], shape, at, true, turns)

    def variants(self, way: Layout) -> Iterator[tuple[Layout, Floats]]:
        """The layout, the same with its heads in the order that fits, and both with a scale."""
        rows = (way.rows(array, self.shape)[:, self.at] for array in self.stored)
        plain = np.stack([way.undone(x, self.tables) for x in rows]).astype(np.float64)
        found = [(way, plain)]
        heads = _order(plain, self.true)
        if heads is not None:
            found.append((replace(way, heads=heads), plain[:, list(heads)]))
        for layout, x in found:
            yield layout, x
            scale = _scale(x, self.true)
            if scale is not None:
                yield replace(layout, scale=scale), x / scale

    def errors(self, x: Floats) -> Floats:
        """(l, K): the median over positions of each row's error, as a part of the row."""
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            off, size = (np.sqrt(np.mean(a * a, axis=-1)) for a in (x - self.true, self.true))
            return np.asarray(np.median(np.nan_to_num(off / size, nan=np.inf), axis=-1))


def _ways(kind: Kind, sample: _Sample) -> Iterator[Layout]:
    """The known layouts that the shape allows, without orders of heads and without scales."""
    even = kind == "keys" and sample.shape[2] % 2 == 0
    stored: tuple[Pairs | None, ...] = (None, "neighbours", "halves") if even else (None,)
    unturned = stored if sample.tables else (None,)
    orders = [axes for axes in permutations(range(3)) if _allows(sample, axes)]
    for way in product(orders, (False, True), stored, unturned):
        yield Layout(*way)


def _allows(sample: _Sample, axes: tuple[int, ...]) -> bool:
    """Whether what is stored may be (K, n, D) with its axes so; of fewer axes all may be."""
    found = [size for size in sample.stored[0].shape if size > 1]
    asked = [sample.shape[axis] for axis in axes if sample.shape[axis] > 1]
    return found == asked or len(found) < len(asked)


def _order(x: Floats, true: Floats) -> tuple[int, ...] | None:
    """Which head of x (l, K, P, D) is like each of the truth's; None if they stand in order.

    None too where two of the truth's are most like the same one: then a head is lost.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        unit, other = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (true, x))
        alike = np.abs(np.einsum("lkpd,ljpd->lpkj", unit, other))
    found = np.nan_to_num(np.median(alike, axis=(0, 1))).argmax(axis=1).tolist()
    heads = list(range(len(found)))
    return tuple(found) if sorted(found) == heads and found != heads else None


def _scale(x: Floats, true: Floats) -> float | None:
    """The one constant that the median row of x has over the truth's; None if it is near 1.

    A power of two is taken as it is, where rows lie about it.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        ratios = np.sum(x * true, axis=-1) / np.sum(true * true, axis=-1)
    ratios = ratios[np.isfinite(ratios)]
    scale = float(np.median(ratios)) if len(ratios) else 0.0
    if 1 / LEAST_SCALE <= scale <= LEAST_SCALE or abs(scale) < np.finfo(np.float32).tiny:
        return None
    power = float(np.copysign(2.0 ** np.round(np.log2(abs(scale))), scale))
    return power if abs(power - scale) <= np.median(np.abs(ratios - scale)) else scale


def _spread(n: int, most: int) -> Array:
    """At most so many of the numbers from 0 to n - 1, the first and last among them."""
    return np.unique(np.linspace(0, n - 1, min(n, most)).round().astype(np.int64))


def _name(layer: int, kind: Kind) -> str:
    return f"kv/{CACHE}/{layer:03d}/{kind}"


def _tables(truth: Trace) -> Tables | None:
    """Those of the truth's RoPE, where it keeps them."""
    cos, sin = (truth.arrays.get(name) for name in ROPE_TABLES)
    return None if cos is None or sin is None else (cos, sin)


def _as_halves(x: Array) -> Array:
    return np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def _as_neighbours(x: Array) -> Array:
    return np.stack(np.split(x, 2, axis=-1), axis=-1).reshape(x.shape)


def _turned(x: Array, tables: Tables, pairs: Pairs) -> Floats:
    """x (K, n, D) after RoPE by the tables of its positions, in float64."""
    halves = x if pairs == "halves" else _as_halves(x)
    a, b = np.split(halves.astype(np.float64), 2, axis=-1)
    cos, sin = tables
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned if pairs == "halves" else _as_neighbours(turned)

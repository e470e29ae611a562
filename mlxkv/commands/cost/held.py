"""What a cache shows of itself: its bytes, and how far the rows it holds are from the truth's.

Axes as in `mlxkv.port.llama`; n tokens of the text. What a cache does not show is None, not 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxkv.commands.cost.rows import Array
from mlxkv.engines import prompt_cache
from mlxkv.engines.kinds import Kind
from mlxkv.engines.runner import blamed_on, host

_CHUNK = 256
Errors = list[list[float | None]]


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of all layers after so many tokens: what the caches say of themselves (None: nothing), and
    the bytes of all distinct arrays that they lead to."""

    tokens: int
    said: int | None
    allocated: int


@dataclass(frozen=True, slots=True)
class Held:
    """At the text's end: bytes, and the relative rms error of the rows held, [layer][head].

    `why` says why the errors were not seen.
    """

    bytes: Bytes
    keys: Errors | None = None
    values: Errors | None = None
    why: str = ""


def look(caches: Sequence[Any], kind: Kind, keys: Array, values: Array) -> Held:
    """Of caches that hold the text, whose true keys and values these are, (layers, K, n, D)."""
    _, K, n, D = keys.shape
    held = _bytes(caches, kind, (K, D), n)
    errors: tuple[Errors, Errors] = ([], [])
    for i, cache in enumerate(caches):
        with blamed_on(kind.name, "state"):
            rows = prompt_cache.rows_of(cache, (K, D))
        if rows is None:
            return Held(held, why=f"layer {i} shows no keys and values")
        at = _positions(cache, rows[0].shape[2], n)
        if at is None:
            return Held(held, why=f"layer {i} shows {rows[0].shape[2]} rows of {n} tokens")
        for found, true, error in zip(rows, (keys[i], values[i]), errors, strict=True):
            error.append(_relative(host(found[0]), true[:, at]))
    return Held(held, *errors)


def _positions(cache: Any, rows: int, n: int) -> Array | None:
    """Where the rows of a cache stand in a text of n tokens; None if that is not known.

    mlx-lm's RotatingKVCache has its first `keep` rows in front, then a ring, whose newest row lies
    before `_idx`.
    """
    if rows == n:
        return np.arange(n)
    keep, next_one = (getattr(cache, name, None) for name in ("keep", "_idx"))
    if not isinstance(keep, int) or not isinstance(next_one, int):
        return None
    slots = np.arange(rows)
    older = np.where(slots >= next_one, rows - keep, 0)
    return np.where(slots < keep, slots, n - next_one + slots - older)


def _relative(found: Array, true: Array) -> list[float | None]:
    """Relative rms error by head, of arrays (K, S, D); None where the truth is 0."""
    error, size = (np.square(a).sum((1, 2), dtype=np.float64) for a in (found - true, true))
    return [float(np.sqrt(e / s)) if s else None for e, s in zip(error, size, strict=True)]


def bytes_at(caches: Sequence[Any], kind: Kind, shape: Sequence[int], tokens: int) -> Bytes:
    """Of empty caches after so many tokens, all zeros; `shape` is the keys', (layers, K, n, D).

    One layer is fed and stands for all, except of a person's own, whose layers may differ.
    """
    import mlx.core as mx

    layers, K, _, D = shape
    fed, sizes = list(caches) if kind.whose == "own" else list(caches[:1]), list[Bytes]()
    while fed:
        cache = fed.pop()
        with blamed_on(kind.name, f"{tokens} tokens of zeros"):
            for _ in range(0, tokens, _CHUNK):
                zeros = mx.zeros((1, K, _CHUNK, D))
                mx.eval(cache.update_and_fetch(zeros, zeros))
        sizes.append(_bytes([cache], kind, (K, D), tokens))
    times = layers // len(sizes)
    said = [one.said for one in sizes if one.said is not None]
    whole = sum(said) * times if len(said) == len(sizes) else None
    return Bytes(tokens, whole, sum(one.allocated for one in sizes) * times)


def _bytes(caches: Sequence[Any], kind: Kind, heads: tuple[int, int], tokens: int) -> Bytes:
    with blamed_on(kind.name, "a look at what it holds"):
        facts = prompt_cache.facts(list(caches), heads)
    return Bytes(tokens, facts["nbytes"], facts["allocated"])

"""From the first wrong tap to words: what makes this tap wrong while all before it are right.

Everything here looks at one layer whose input is the truth's, or as near to it as a correct run's
is, so an error in a tap was made between it and the taps before. The words name what to look at
and, where the numbers show it, the row, the head or the factor. Where several mistakes would make
these numbers, the words say what they share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxkv.commands.locate import attention, turns
from mlxkv.commands.locate.layers import HEADED, WALK, Layer
from mlxkv.commands.locate.rows import (
    ALIKE,
    alike,
    factors,
    flat,
    narrower,
    row_of_cache,
    scale,
    some,
)
from mlxkv.judge.measure import Array, Floats
from mlxkv.judge.words import listed

# A projection, its input, and its name in the checkpoint.
_LINEAR = {
    "q": ("input_norm", "self_attn.q_proj"),
    "k": ("input_norm", "self_attn.k_proj"),
    "v": ("input_norm", "self_attn.v_proj"),
    "o_proj": ("attention", "self_attn.o_proj"),
    "gate": ("post_norm", "mlp.gate_proj"),
    "up": ("post_norm", "mlp.up_proj"),
    "down": ("activation", "mlp.down_proj"),
}
_PLAIN = {
    "embedding": "the embedding: its weights, its scale, or other token ids",
    "activation": "the activation: silu, or its product with up",
    "hidden": "the residual: what leaves the layer is not what entered it plus o_proj plus down",
}
# What a tap is made of. Where one of these was not recorded, the fault may lie before it.
_MADE_OF = {tap: (source,) for tap, (source, _) in _LINEAR.items()} | {
    "q_rope": ("q",),
    "k_rope": ("k",),
    "keys": ("k_rope",),
    "values": ("v",),
    "scores": ("q_rope", "k_rope"),
    "attention": ("q_rope", "k_rope", "v"),
    "post_norm": ("o_proj",),
    "activation": ("gate", "up"),
    "hidden": ("o_proj", "down"),
}
HEAD = (
    "the final norm's weight, the head's weights (tied to the embedding or not), or a function of "
    "the logits"
)
NORM = "its mean, eps or rsqrt"
"""What scales every row of a norm by a factor of its own."""


def explain(layer: Layer, tap: str, first: int, heads: Sequence[int]) -> str:
    """A sentence on a wrong tap; `first` is its first wrong position, `heads` the wrong heads."""
    missing = [name for name in _MADE_OF.get(tap, ()) if not layer.recorded(name)]
    if missing:
        words = _unrecorded(layer, tap, missing)
    elif tap in ("input_norm", "post_norm"):
        words = _norm(layer, tap)
    elif tap in _LINEAR:
        words = _projection(layer, tap, heads)
    elif tap in ("q_rope", "k_rope"):
        words = _rope(layer, tap, first)
    elif tap in ("keys", "values"):
        return _cache(layer, tap, first, heads[0])
    else:
        words = _of_attention(layer, tap, heads)
    mine, its = layer.both(tap)
    dtype = narrower(mine, its, layer.run.meta.dtype)
    return words if dtype is None else f"{words}; every number of it is one that {dtype} holds"


def behind(mine: Array, its: Array, at: Array, *, near: float, dtype: str) -> str | None:
    """What all rows of wrong logits (n, V) share, as only the last steps make it; else None.

    `at` (n,) are their positions.
    """
    other = narrower(mine, its, dtype)
    if other is not None:
        return f"the logits of this {dtype} run are rounded to {other}"
    found = scale(mine, its, near=near, at=at)
    if found is not None:
        return f"{found}: the final norm ({NORM}), or a scale of the logits"
    error = np.subtract(mine, its, dtype=np.float64)
    left = np.abs(error - error.mean(1, keepdims=True)).max()
    if left <= max(ALIKE * np.abs(error).max(), near) < np.abs(error).max():
        return "all logits of a position are off by one number: a bias of the head"
    return None


def _unrecorded(layer: Layer, tap: str, missing: Sequence[str]) -> str:
    before = WALK[: WALK.index(tap)]
    right = [name for name in before if name not in ("keys", "values") and layer.recorded(name)]
    since = right[-1] if right else "what enters the layer"
    what = f"made between {since} and {tap}"
    return f"{what}: {listed(missing)}, which would say more, {_was(missing)} not recorded"


def _was(names: Sequence[str]) -> str:
    return "was" if len(names) == 1 else "were"


def _norm(layer: Layer, tap: str) -> str:
    mine, its = (array[0] for array in layer.both(tap))
    near = layer.near(tap)
    by_channel = factors(mine, its, axis=0, near=near)
    found = scale(mine, its, near=near)
    if found is not None:
        if by_channel is not None:
            return f"RMSNorm: {found}: its mean, or one factor on its weight"
        change = _eps(factors(mine, its, axis=1, near=near), layer.entered(tap))
        if change is not None:
            larger = "larger" if change > 0 else "smaller"
            return f"RMSNorm: eps ({found}, that of an eps {larger} by {abs(change):.3g})"
        return f"RMSNorm: {found}: {NORM}"
    if by_channel is not None:
        off = np.abs(by_channel - 1)
        wrong = np.flatnonzero(off > max(ALIKE * off.max(), layer.slack))
        return f"RMSNorm: the norm's weight ({some('channel', wrong, its.shape[1])})"
    if tap == "post_norm":
        entered = "what entered the layer plus o_proj"
        return f"the residual before the norm ({entered}), or RMSNorm's own formula"
    return "RMSNorm: its formula, or another input than what the layer was given"


def _eps(by_row: Floats | None, entered: Array | None) -> float | None:
    """By how much another eps would make these factors, where one does.

    A row's factor is then sqrt((m + eps) / (m + eps')), with m its mean square.
    """
    if by_row is None or entered is None:
        return None
    mean = np.mean(np.asarray(entered, np.float64) ** 2, axis=1)
    wanted = 1 / by_row**2 - 1  # (eps' - eps) / (m + eps)
    system = np.stack([np.ones_like(mean), -wanted], axis=1)
    (change, eps), *_ = np.linalg.lstsq(system, wanted * mean, rcond=None)
    left = np.abs(system @ (change, eps) - wanted * mean).max()
    fits = left <= ALIKE * abs(change) and -ALIKE * mean.max() <= eps <= mean.max()
    return float(change) if fits else None


def _projection(layer: Layer, tap: str, heads: Sequence[int]) -> str:
    source, name = _LINEAR[tap]
    order, given = order_of_heads(layer, tap, heads), layer.pair(source)
    if order:
        return f"{name}: the order of its heads ({order})"
    mine, its = map(flat, layer.both(tap))
    error, near = mine - its, layer.near(tap)
    wrong = np.flatnonzero(~(np.abs(error).max(0) <= near))
    if len(wrong) == 1 and given is not None:
        column = _column(error[:, wrong[0]], flat(given[1]), near=near)
        if column is not None:
            return f"{name}.weight: the single weight [{wrong[0]}, {column}]"
    if alike(np.sort(mine, axis=1), np.sort(its, axis=1), near):
        return f"{name}: the same numbers in another order: how they are split into heads"
    return f"{name}: its weight, bias or precision ({some('output', wrong, its.shape[1])})"


def _column(error: Floats, given: Floats, *, near: float) -> int | None:
    """The input to which the error is proportional at every position, if there is one."""
    if len(error) < 3 or not np.isfinite(error).all():
        return None
    sizes = np.linalg.norm(given, axis=0) * np.linalg.norm(error)
    likeness = np.abs(error @ given) / np.maximum(sizes, np.finfo(np.float64).tiny)
    best, noise = int(np.argmax(likeness)), near / np.abs(error).max()
    return best if 1 - likeness[best] <= max(ALIKE, noise) ** 2 else None


def _rope(layer: Layer, tap: str, first: int) -> str:
    before = layer.both(tap.removesuffix("_rope"))[1]
    found = turns.words(*layer.both(tap), before, near=layer.near(tap))
    if found is not None:
        return f"RoPE: {found}"
    if first == 0:
        return "RoPE: its formula (position 0 must not turn at all), its pairing or its tables"
    return f"RoPE: its formula, pairing or tables from position {first} on"


def _cache(layer: Layer, tap: str, row: int, head: int) -> str:
    """On a row of a cache's `keys` or `values` that is not the one that went into it."""
    order = order_of_heads(layer, tap, _wrong_heads(layer, tap))
    if order:
        return f"the cache: the order of the heads of its {tap} ({order})"
    other = "is none of the truth's rows: overwritten or changed"
    return row_words(layer, tap, row, head) or f"{_row(layer, tap, row, head)}, {other}"


def _wrong_heads(layer: Layer, tap: str) -> list[int]:
    errors = np.abs(np.subtract(*layer.both(tap))).max((1, 2))
    return [int(head) for head in np.flatnonzero(~(errors <= layer.near(tap)))]


def row_words(layer: Layer, tap: str, row: int, head: int) -> str | None:
    """On a wrong row of a cache's `keys` or `values`, where it is something known."""
    held, true = (array[head] for array in layer.both(tap))
    found = row_of_cache(held, true, row, near=layer.near(tap), dtype=layer.run.meta.dtype)
    return None if found is None else f"{_row(layer, tap, row, head)}, {found}"


def _row(layer: Layer, tap: str, row: int, head: int) -> str:
    return f"the cache: row {row} of its {tap} in layer {layer.number}, head {head}"


def _of_attention(layer: Layer, tap: str, heads: Sequence[int]) -> str:
    if tap == "scores":
        return attention.scores(layer, heads)
    return attention.mixed(layer, heads) if tap == "attention" else _PLAIN[tap]


def order_of_heads(layer: Layer, tap: str, heads: Sequence[int]) -> str:
    """Which other head of the truth each wrong head is; "" where one of them is none."""
    if tap not in HEADED or not heads:
        return ""
    mine, its = layer.both(tap)
    found, near = [], layer.near(tap)
    for head in heads:
        others = [j for j in range(len(its)) if j != head and alike(mine[head], its[j], near)]
        if not others:
            return ""
        found.append(f"head {head} is the truth's head {others[0]}")
    return ", ".join(found)

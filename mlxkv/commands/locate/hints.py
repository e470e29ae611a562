"""From the first wrong tap to words: what makes this tap wrong while all before it are right.

Everything here looks at one layer that was fed the truth's input, so an error in a tap was made
between it and the taps before. The words name what to look at and, where the numbers allow, the
row, the head or the factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from mlxkv.commands.locate.layers import HEADED, Layer
from mlxkv.judge.measure import Array, Floats

EQUAL = 1e-12
"""Of a tap's largest value: as near as two float64 runs of the same formulas are, and nearer."""
_ALIKE = 1e-3  # of an error: what makes two errors the same one

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
    "embedding": "the embedding: its weights, or other token ids",
    "activation": "the activation: silu, or its product with up",
    "hidden": "the residual: what leaves the layer is not what entered it plus o_proj plus down",
    "logits": "behind the layers: the final norm's eps or weight, or the head's weights (tied to "
    "the embedding or not)",
}


def explain(layer: Layer, tap: str, first: int, heads: Sequence[int]) -> str:
    """A sentence on a wrong tap; `first` is its first wrong position, `heads` the wrong heads."""
    if tap in ("input_norm", "post_norm"):
        return _norm(layer, tap)
    if tap in _LINEAR:
        return _projection(layer, tap, heads)
    if tap in ("q_rope", "k_rope"):
        return _rope(first)
    if tap in ("keys", "values"):
        return _cache(layer, tap, first, heads[0])
    if tap == "scores":
        return _scores(layer, heads)
    return _attention(layer, heads) if tap == "attention" else _PLAIN[tap]


def _norm(layer: Layer, tap: str) -> str:
    mine, its = (array[0] for array in layer.both(tap))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(np.abs(its) > 1e-6 * np.abs(its).max(), mine / its, np.nan) - 1
    most = np.nanmax(np.abs(ratio))
    by_row, by_channel = _spread(ratio, 1), _spread(ratio, 0)
    if by_row <= _ALIKE * most < by_channel:
        return "RMSNorm: eps (each row is off by one factor of its own)"
    if by_channel <= _ALIKE * most:
        wrong = np.flatnonzero(np.nanmax(np.abs(ratio), axis=0) > EQUAL)
        return f"RMSNorm: the norm's weight ({_some('channel', wrong, ratio.shape[1])})"
    if tap == "post_norm":
        entered = "what entered the layer plus o_proj"
        return f"the residual before the norm ({entered}), or RMSNorm's own formula"
    return "RMSNorm: its formula, or another input than what the layer was given"


def _spread(ratio: Floats, axis: int) -> float:
    missing = np.isnan(ratio)
    highest = np.where(missing, -np.inf, ratio).max(axis)
    return float(np.max(highest - np.where(missing, np.inf, ratio).min(axis)))


def _projection(layer: Layer, tap: str, heads: Sequence[int]) -> str:
    source, name = _LINEAR[tap]
    order, given = _order(layer, tap, heads), layer.pair(source)
    if order:
        return f"{name}: the order of its heads ({order})"
    mine, its = map(_flat, layer.both(tap))
    error = mine - its
    wrong = np.flatnonzero(~(np.abs(error).max(0) <= EQUAL * np.abs(its).max()))
    if len(wrong) == 1 and given is not None:
        column = _column(error[:, wrong[0]], _flat(given[1]))
        if column is not None:
            return f"{name}.weight: the single weight [{wrong[0]}, {column}]"
    return f"{name}: its weight or bias ({_some('output', wrong, its.shape[1])})"


def _column(error: Floats, given: Floats) -> int | None:
    """The input to which the error is proportional at every position, if there is one."""
    if len(error) < 3 or not np.isfinite(error).all():
        return None
    sizes = np.linalg.norm(given, axis=0) * np.linalg.norm(error)
    likeness = np.abs(error @ given) / np.maximum(sizes, np.finfo(np.float64).tiny)
    best = int(np.argmax(likeness))
    return best if 1 - likeness[best] <= _ALIKE**2 else None


def _rope(first: int) -> str:
    if first == 0:
        return "RoPE: positions (position 0 must not turn at all), or its pairing or tables"
    if first == 1:
        return "RoPE: theta, scaling, pairing or positions"
    return f"RoPE: positions from {first} on (index_pos), or tables that end there"


def _cache(layer: Layer, tap: str, row: int, head: int) -> str:
    held, true = (array[head] for array in layer.both(tap))
    where = f"the cache: row {row} of its {tap} in layer {layer.number}, head {head}"
    if np.isnan(held[row]).any():
        return f"{where}, is missing"
    same = next((j for j in range(len(true)) if j != row and _near(held[row], true[j], true)), None)
    if same is not None:
        # Is the next row off by as many rows as this one?
        mine, its = row + 1, same + 1
        moved = max(mine, its) < len(true) and _near(held[mine], true[its], true)
        why = "a token was lost or moved before it" if moved else "stale"
        return f"{where}, is the truth's row {same}: {why}"
    if not held[row].any():
        return f"{where}, is empty"
    for dtype in ("float32", "float16", "bfloat16"):
        if _near(held[row], rounded(true[row], dtype), true):
            return f"{where}, is rounded to {dtype}"
    return f"{where}, is none of the truth's rows: overwritten, or written for another position"


def _near(a: Array, b: Array, whole: Array) -> bool:
    return bool(np.abs(a - b).max() <= EQUAL * np.abs(whole).max())


def rounded(values: Floats, dtype: str) -> Floats:
    """The values as `dtype` holds them, in float64."""
    if dtype != "bfloat16":
        return np.asarray(values, dtype).astype(np.float64)
    bits = np.asarray(values, np.float32).view(np.uint32)
    # To the nearest, ties to even: numpy has no bfloat16.
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    kept = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return np.asarray(kept.view(np.float32), np.float64)


def _scores(layer: Layer, heads: Sequence[int]) -> str:
    mine, its = layer.both("scores")
    positions = np.arange(its.shape[1])
    future = positions[None, :] > positions[:, None]
    sees, misses = (mine != 0) & future, (mine == 0) & (its != 0) & ~future
    for odd, words in ((sees, "lets it see"), (misses, "hides from it")):
        if odd.any():
            _, query, key = (int(i) for i in np.argwhere(odd)[0])
            return f"the mask: at position {query} it {words} the key of position {key}"
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (mine / its)[np.abs(its) > 1e-6 * np.abs(its).max()]
    if ratio.size and np.ptp(ratio) <= _ALIKE * abs(ratio.mean() - 1):
        times = f"every score is {ratio.mean():.6g} times the truth's"
        return f"the attention's scale: {times} (1 / sqrt(head_dim) is right)"
    other = "which key head a query head reads (GQA), a key row of the cache, or the scale"
    read = _read(layer, heads, "scores")
    return f"GQA's head order: {read}" if read else f"scores of right queries and keys: {other}"


def _attention(layer: Layer, heads: Sequence[int]) -> str:
    among = "GQA's head order among the values"
    read = _read(layer, heads, "attention")
    other = f"softmax, {among}, or a value row of the cache"
    return f"{among}: {read}" if read else f"attention with right scores: {other}"


def _read(layer: Layer, heads: Sequence[int], tap: Literal["scores", "attention"]) -> str | None:
    """Which key/value head each wrong query head reads, if each reads another one than it should.

    By the last position's row. For scores the keys may be another head's, for attention the values.
    """
    pairs = [pair for name in (tap, "q_rope", "k_rope", "v") if (pair := layer.pair(name))]
    if len(pairs) < 4:
        return None
    (mine, its), (_, queries), (_, keys), (_, values) = pairs
    found = []
    for head in heads:
        right = head * len(keys) // len(queries)
        query = queries[head, -1] / np.sqrt(keys.shape[2])
        for j in range(len(keys)):
            row = keys[j] @ query if tap == "scores" else _softmax(keys[right] @ query) @ values[j]
            if _near(mine[head, -1], row, its):
                found.append(f"query head {head} reads head {j}, expected {right}")
    return "; ".join(found) if len(found) == len(heads) > 0 else None


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())


def _order(layer: Layer, tap: str, heads: Sequence[int]) -> str:
    """Which other head of the truth each wrong head is; "" where one of them is none."""
    if tap not in HEADED or not heads:
        return ""
    mine, its = layer.both(tap)
    found = []
    for head in heads:
        others = [j for j in range(len(its)) if j != head and _near(mine[head], its[j], its)]
        if not others:
            return ""
        found.append(f"head {head} is the truth's head {others[0]}")
    return ", ".join(found)


def _some(what: str, wrong: Array, count: int) -> str:
    """Which of `count` channels or outputs are wrong, the first four by number."""
    if len(wrong) == count:
        return f"all {count} {what}s"
    first = ", ".join(map(str, wrong[:4].tolist()))
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return f"{what}{'s' if len(wrong) > 1 else ''} {first}{more} of {count}"


def _flat(array: Array) -> Floats:
    """(heads, n, width) -> (n, heads * width), as the projections count."""
    return np.asarray(array.swapaxes(0, 1).reshape(array.shape[1], -1), np.float64)

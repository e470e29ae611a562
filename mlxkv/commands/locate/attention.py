"""Words on wrong scores of right queries and keys, and on wrong attention of right scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from mlxkv.commands.locate import masks
from mlxkv.commands.locate.layers import Layer
from mlxkv.commands.locate.rows import alike, factors, flat, plural, scale
from mlxkv.judge.measure import Floats
from mlxkv.judge.words import listed


def scores(layer: Layer, heads: Sequence[int]) -> str:
    mine, its = layer.both("scores")
    near, seen = layer.near("scores"), its != 0
    found = masks.words(mine, its, layer.run.meta.plan, near=near)
    if found is not None:
        return f"the mask: {found}"
    ratio = factors(mine[seen][None], its[seen][None], axis=1, near=near)
    if ratio is not None:
        times = f"every score is {ratio[0]:.6g} times the truth's"
        return f"the attention's scale: {times} (1 / sqrt(head_dim) is right)"
    read = _read(layer, heads, "scores")
    if read:
        return f"GQA's head order: {read}"
    missing = masks.lost(mine, its, near=near)
    if missing is not None:
        return f"the cache: {missing}"
    ranks = np.argsort(its[seen])
    if (np.diff(mine[seen][ranks]) >= -2 * near).all():
        return "scores of right queries and keys: each keeps its rank: a cap or another function"
    other = "they read other keys than those (of another head, row or layer), or add a bias"
    return f"scores of right queries and keys: {other}"


def mixed(layer: Layer, heads: Sequence[int]) -> str:
    among = "GQA's head order among the values"
    if not layer.recorded("scores"):
        return f"attention of right queries, keys and values: mask, scale, softmax, or {among}"
    mine, its = (array[list(heads)] for array in layer.both("attention"))
    found = scale(flat(mine), flat(its), near=layer.near("attention"))
    if found is not None:
        return f"attention with right scores: {found} in head{plural(heads)} {listed(heads)}"
    read = _read(layer, heads, "attention")
    other = f"softmax, {among}, or other values than those (of another row or layer)"
    return f"{among}: {read}" if read else f"attention with right scores: {other}"


def _read(layer: Layer, heads: Sequence[int], tap: Literal["scores", "attention"]) -> str | None:
    """Which key/value head each wrong query head reads, if each reads another one than it should.

    By the last position's row. For scores the keys may be another head's, for attention the values.
    """
    pairs = [pair for name in (tap, "q_rope", "k_rope", "v") if (pair := layer.pair(name))]
    if len(pairs) < 4:
        return None
    (mine, _), (_, queries), (_, keys), (_, values) = pairs
    found, near = [], layer.near(tap)
    for head in heads:
        right = head * len(keys) // len(queries)
        query = queries[head, -1] / np.sqrt(keys.shape[2])
        for j in range(len(keys)):
            row = keys[j] @ query if tap == "scores" else _softmax(keys[right] @ query) @ values[j]
            if j != right and alike(mine[head, -1], row, near):
                found.append(f"query head {head} reads head {j}, expected {right}")
    return "; ".join(found) if len(found) == len(heads) > 0 else None


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())

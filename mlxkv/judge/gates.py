"""Gates from measured numbers: where the worst stands, and the first above the limit. The limits are verdict.py's."""

from __future__ import annotations

import numpy as np

from mlxkv.judge.case import Case
from mlxkv.judge.measure import Array, Bools, Floats
from mlxkv.judge.result import Gate, Scope


def over_rows(name: str, ratios: Floats, pooled: Floats, limit: float) -> Gate:
    """`ratios` (layers, K, n) pooled over n into (layers, K); the worst head decides."""
    layer, head = np.unravel_index(int(np.argmax(pooled)), pooled.shape)
    value, above = float(pooled[layer, head]), np.flatnonzero(~(ratios[layer, head] <= limit))
    first = int(above[0]) if not (value <= limit) else None
    return Gate(name, "cache", "step", value, limit, layer=int(layer), head=int(head), first=first)


def in_cache(case: Case, name: str, scope: Scope, ratios: Floats, limit: float) -> Gate:
    """`ratios` (kinds, layers, K, n), row by row; the worst row decides."""
    _, layer, head, position = (
        int(i) for i in np.unravel_index(int(np.argmax(ratios)), ratios.shape)
    )
    value, above = float(ratios.max()), np.flatnonzero(~(ratios <= limit).all(axis=(0, 1, 2)))
    first = int(above[0]) if len(above) else None
    return Gate(
        name, scope, "step", value, limit, position, case.text(position), layer, head, first
    )


def by_position(
    case: Case, name: str, scope: Scope, plan: str, at: Array, ratios: Floats, limit: float
) -> Gate:
    """The worst of `ratios`, one per position in `at`."""
    worst = int(np.argmax(ratios))  # a NaN counts as the largest
    above, position = at[~(ratios <= limit)], int(at[worst])
    first = int(above[0]) if len(above) else None
    return Gate(
        name, scope, plan, float(ratios[worst]), limit, position, case.text(position), first=first
    )


def count(case: Case, name: str, plan: str, at: Array, wrong: Bools) -> Gate:
    """How many positions are `wrong`; none may be."""
    first = int(at[wrong][0]) if wrong.any() else None
    text = case.text(first) if first is not None else None
    return Gate(name, "logits", plan, float(wrong.sum()), 0.0, first, text, first=first)


def not_run(name: str, scope: Scope, plan: str, limit: float, reason: str) -> Gate:
    """A gate without a value, and why."""
    return Gate(name, scope, plan, float("nan"), limit, reason=reason)

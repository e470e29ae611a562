"""What a wrong mask lets a token see or hides from it, in words, by the scores that softmax takes.

Scores are (H, n, n): queries, then keys; 0 where a mask hides a key.
"""

from __future__ import annotations

import numpy as np

from mlxkv.judge.measure import Array, Bools
from oracle.formats.plan import Plan


def words(mine: Array, its: Array, plan: Plan, *, near: float) -> str | None:
    """None where every token sees the keys that it should, or a score that it sees is wrong."""
    both = (mine != 0) & (its != 0)
    if not (np.abs(mine[both] - its[both]) <= near).all():
        return None
    places = np.arange(its.shape[1])
    ahead = places[None, :] - places[:, None]  # of a query, [query, key]
    sees = ((mine != 0) & (ahead > 0)).any(0)
    hidden = ((mine == 0) & (its != 0) & (ahead <= 0)).any(0)
    if sees.any():
        most = int(ahead[sees].max())
        return f"{_first(sees, 'sees')}, and none sees more than {most} ahead"
    if not hidden.any():
        return None
    rule = _rule(hidden, -ahead, plan)
    first = _first(hidden, "does not see")
    return f"{rule} ({first})" if rule else f"{first}, and {int(hidden.sum()) - 1} more pairs"


def lost(mine: Array, its: Array, *, near: float) -> str | None:
    """Which key the first wrong query does not read, if it reads all others one place earlier."""
    wrong = np.flatnonzero(~(np.abs(mine - its) <= near).all((0, 2)))
    query = int(wrong[0])
    keys = its[:, query, : query + 1]
    for row in range(query + 1 if query else 0):
        if (np.abs(np.delete(keys, row, axis=1) - mine[:, query, :query]) <= near).all():
            return f"at position {query} the key of position {row} is not read: its row was lost"
    return None


def _first(pairs: Bools, verb: str) -> str:
    query, key = (int(i) for i in np.argwhere(pairs)[0])
    return f"position {query} {verb} the key of position {key}"


def _rule(hidden: Bools, back: Array, plan: Plan) -> str | None:
    """One rule that hides exactly these keys; `back` is how far a key lies before its query."""
    if not back[hidden].any():
        many = int(hidden.sum())
        return (
            "a token does not see itself" if many == 1 else f"{many} tokens do not see themselves"
        )
    least = int(back[hidden].min())
    if np.array_equal(hidden, back >= least):
        return f"a window of {least}: a token sees itself and the {least - 1} before it"
    starts = _starts(plan, len(hidden))
    for call in np.unique(starts[hidden.any(1)]).tolist():
        of = starts == call
        if call and np.array_equal(hidden[of], _unshifted(back[of], call)):
            return f"the offset of the call that starts at position {call} is missing"
    keys = np.flatnonzero(hidden.any(0))
    if len(keys) == 1 and hidden[keys[0] + 1 :, keys[0]].all():
        return f"the key of position {int(keys[0])} is hidden from every later token"
    return None


def _unshifted(back: Array, start: int) -> Bools:
    """What a mask hides whose first query counts as position 0: keys less than `start` back."""
    return np.asarray((back >= 0) & (back < start))


def _starts(plan: Plan, n: int) -> Array:
    """The start of the call that each of n positions came in, of the plan's last cache."""
    starts = np.zeros(n, np.int64)
    for call in plan.calls():
        starts[call.start : call.start + call.fed] = call.start
    return starts

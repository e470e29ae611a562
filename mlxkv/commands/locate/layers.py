"""How far each tap of a layer is from the truth's, head by head and position by position.

Beside the oracle's taps stand three more: `embedding`, what enters layer 0; and `keys` and
`values`, what the cache holds at the end, which come after k_rope and v. In shapes, n is the
number of positions. This module knows no limit and has no words for a fault.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlxkv.judge.case import CACHE
from mlxkv.judge.measure import Array, Floats
from oracle.formats.trace import TAPS, Trace

_SCORES = TAPS.index("scores")
WALK = ("embedding", *TAPS[:_SCORES], "keys", "values", *TAPS[_SCORES:])
"""Every tap, in the order of computation."""
EQUAL = 1e-12
"""Of a tap's largest value: as near as two float64 runs of the same formulas are, and nearer."""
HEADED = ("q", "k", "v", "q_rope", "k_rope", "keys", "values", "scores", "attention")


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer in a run and in the truth.

    `slack` is how near two correct runs are, of a tap's largest value.
    """

    run: Trace
    truth: Trace
    number: int
    slack: float = EQUAL

    def pair(self, tap: str) -> tuple[Array, Array] | None:
        """The run's and the truth's array of a tap, alike in shape; None where one has none.

        Taps with heads are (heads, n, width), the others (1, n, width). Rows that the run's cache
        lacks are NaN.
        """
        mine, its = self._of_run(tap), self._of_truth(tap)
        if mine is None or its is None:
            return None
        heads = self._heads() if tap == "attention" else 1
        mine, its = _by_head(mine, heads), _by_head(its, heads)
        return _fitted(mine, its.shape), its

    def both(self, tap: str) -> tuple[Array, Array]:
        """`pair` of a tap that was found wrong, so that both have it."""
        found = self.pair(tap)
        assert found is not None
        return found

    def near(self, tap: str) -> float:
        """How near two correct runs are at a tap."""
        return self.slack * float(np.abs(self.both(tap)[1]).max())

    def recorded(self, *taps: str) -> bool:
        """Whether the run and the truth both have all of these."""
        return all(self.pair(tap) is not None for tap in taps)

    def entered(self, tap: str) -> Array | None:
        """(n, E): what the truth gives to `input_norm` or `post_norm`, where it is known."""
        before = Layer(self.truth, self.truth, self.number - 1, self.slack)
        x = self._of_truth("embedding") if self.number == 0 else before._tap(self.truth, "hidden")
        attended = self._tap(self.truth, "o_proj")
        if tap == "input_norm" or x is None:
            return x
        return None if attended is None else np.asarray(x + attended)

    def errors(self, tap: str) -> Floats | None:
        """(heads, n): each row's largest error, relative to the largest value of the truth."""
        pair = self.pair(tap)
        if pair is None:
            return None
        # The truth's embedding is a difference of hidden states, and no more exact than they are.
        whole = self._tap(self.truth, "hidden") if tap == "embedding" else pair[1]
        assert whole is not None
        largest = max(np.abs(whole).max(), np.finfo(np.float64).tiny)
        with np.errstate(invalid="ignore", over="ignore"):
            difference = np.abs(np.subtract(pair[0], pair[1], dtype=np.float64)).max(-1)
            return np.asarray(difference / float(largest))

    def _tap(self, of: Trace, name: str) -> Array | None:
        return of.arrays.get(f"tap/{self.number:03d}/{name}")

    def _of_run(self, tap: str) -> Array | None:
        if tap in ("keys", "values"):
            pair = self.run.kv(CACHE, self.number)
            return None if pair is None else pair[tap == "values"]
        return self._tap(self.run, tap)

    def _of_truth(self, tap: str) -> Array | None:
        """The stored tap, or one that follows from what is stored: keys are k_rope, values v."""
        stored = self._tap(self.truth, tap)
        if stored is not None:
            return stored
        if tap == "embedding":
            hidden, attended, down = (
                self._tap(self.truth, name) for name in ("hidden", "o_proj", "down")
            )
            if self.number or hidden is None or attended is None or down is None:
                return None
            return np.asarray(hidden - attended - down)
        pair = self.truth.kv(CACHE, self.number)
        if pair is None or tap not in ("k_rope", "v", "keys", "values"):
            return None
        return pair[tap in ("v", "values")]

    def _heads(self) -> int:
        found = (self._tap(self.run, name) for name in ("q_rope", "q", "scores"))
        return next((len(array) for array in found if array is not None), 1)


def count(truth: Trace) -> int:
    return len({name.split("/")[1] for name in truth.arrays if name.startswith("tap/")})


def _by_head(array: Array, heads: int) -> Array:
    if array.ndim == 3:
        return array
    return np.asarray(array.reshape(len(array), heads, -1).swapaxes(0, 1))


def _fitted(array: Array, shape: tuple[int, ...]) -> Array:
    """Cut, or filled up with NaN, so that what is missing counts as wrong."""
    if array.shape == shape:
        return array
    out = np.full(shape, np.nan)
    common = tuple(slice(0, min(a, b)) for a, b in zip(array.shape, shape, strict=True))
    out[common] = array[common]
    return out

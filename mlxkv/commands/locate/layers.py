"""How far each tap of a layer is from the truth's, head by head and position by position. No limit and no words here.

Beside the oracle's taps stand three more: `embedding`, what enters layer 0; and `keys` and `values`, what the cache holds
at the end, which come after k_rope and v. Axes: H query heads, K key/value heads, D head_dim, E hidden, n positions.
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
HEADED = ("q", "k", "v", "q_rope", "k_rope", "keys", "values", "scores", "attention")


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer in a run and in the truth."""

    run: Trace
    truth: Trace
    number: int

    def pair(self, tap: str) -> tuple[Array, Array] | None:
        """The run's and the truth's array of a tap, alike in shape; None where one of them has none.

        Taps with heads are (heads, n, width), the others (1, n, width). Rows that the run's cache lacks are NaN.
        """
        mine, its = _of_run(self.run, self.number, tap), _of_truth(self.truth, self.number, tap)
        if mine is None or its is None:
            return None
        heads = self._heads() if tap == "attention" else 1
        mine, its = _by_head(mine, heads), _by_head(its, heads)
        return _fitted(mine, its.shape), its

    def errors(self, tap: str) -> Floats | None:
        """(heads, n): the largest error of each head's row, relative to the largest value of the truth's tap."""
        pair = self.pair(tap)
        if pair is None:
            return None
        scale = self._largest(tap, pair[1])
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(
                np.abs(np.subtract(pair[0], pair[1], dtype=np.float64)).max(-1) / scale
            )

    def _largest(self, tap: str, its: Array) -> float:
        # The truth's embedding is a difference of hidden states, and no more exact than they are.
        whole = self.truth.arrays[f"tap/{self.number:03d}/hidden"] if tap == "embedding" else its
        return float(max(np.abs(whole).max(), np.finfo(np.float64).tiny))

    def _heads(self) -> int:
        for name in ("q_rope", "q", "scores"):
            found = self.run.arrays.get(f"tap/{self.number:03d}/{name}")
            if found is not None:
                return len(found)
        return 1


def count(truth: Trace) -> int:
    """How many layers the truth has recorded."""
    return len({name.split("/")[1] for name in truth.arrays if name.startswith("tap/")})


def _of_run(run: Trace, layer: int, tap: str) -> Array | None:
    if tap in ("keys", "values"):
        pair = run.kv(CACHE, layer)
        return None if pair is None else pair[tap == "values"]
    return run.arrays.get(f"tap/{layer:03d}/{tap}")


def _of_truth(truth: Trace, layer: int, tap: str) -> Array | None:
    """The stored tap, or one that follows from what is stored: keys are k_rope, values v."""
    stored = truth.arrays.get(f"tap/{layer:03d}/{tap}")
    if stored is not None:
        return stored
    if tap == "embedding":
        parts = [
            truth.arrays.get(f"tap/{layer:03d}/{name}") for name in ("hidden", "o_proj", "down")
        ]
        hidden, attended, down = parts
        return (
            None
            if hidden is None or attended is None or down is None or layer
            else np.asarray(hidden - attended - down)
        )
    pair = truth.kv(CACHE, layer)
    return (
        None
        if pair is None or tap not in ("k_rope", "v", "keys", "values")
        else pair[tap in ("v", "values")]
    )


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

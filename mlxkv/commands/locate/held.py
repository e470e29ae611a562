"""The cache that a plan leaves, in noise floors.

Axes: K key/value heads, n positions, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlxkv.commands.locate.layers import Layer
from mlxkv.judge import layout, measure
from mlxkv.judge.admission import cache_reasons
from mlxkv.judge.case import CACHE, Case
from mlxkv.judge.floors import cache_floors
from mlxkv.judge.layout import KINDS, Kind
from mlxkv.judge.measure import Floats
from oracle.formats.trace import Trace

NEAR = 8.0
"""In floors: no number of a correct row is further from the truth. Correct rows read an rms of up
to 2, and the largest of 64 numbers is some 3.5 times that."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The cache of one plan; `floors` and `ratios` are (keys and values, layers, K, n)."""

    plan: str
    run: Trace
    floors: Floats
    ratios: Floats

    def layer(self, truth: Trace, number: int, kind: Kind) -> Layer:
        """A layer to look at, whose slack is that of the keys or of the values."""
        pair = truth.kv(CACHE, number)
        assert pair is not None
        largest = max(float(np.abs(pair[KINDS.index(kind)]).max()), np.finfo(np.float64).tiny)
        floor = float(self.floors[KINDS.index(kind), number].max())
        return Layer(self.run, truth, number, NEAR * floor / largest)


def read(case: Case, plan: str, run: Trace | None) -> Held | None:
    """The cache of a run, laid out as the truth's; None without keys and values to read."""
    largest = measure.cache_largest(case.truth)
    if run is None or run.kv(CACHE, 0) is None or largest is None:
        return None
    run = layout.as_truth(run, case.truth)
    if cache_reasons(run, case.truth):
        return None
    floors = cache_floors(case, largest)
    return Held(plan, run, floors, measure.cache_errors(run, case.truth) / floors)

"""The retrieval probe: lists of random ids that come again, each at a distance of its own.

Whoever still sees a list's first copy knows the next token of its second; who has forgotten it
cannot. Whether a model can tell at all, its full cache says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

LIST = 48
"""Ids of a list."""
LEAD = 4
"""Those of a second copy that nobody need know: a model must see first that it is one."""
BEYOND = 64
"""Tokens by which a distance is longer than a window."""
USUAL = (64, 256, 1024)
"""Windows whose distances are always tried: the first lies within every one of the default ones."""
TELLS = 0.9
"""The hit rate of the full cache below which the model cannot tell."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Token ids; the places whose id is known from before, and at which distance before."""

    tokens: tuple[int, ...]
    asked: tuple[int, ...]
    distances: tuple[int, ...]

    def rates(self, hits: Sequence[int]) -> dict[int, float]:
        """The share of hits by distance."""
        far, hit = np.array(self.distances), np.array(hits)
        return {one: float(hit[far == one].mean()) for one in sorted(set(self.distances))}


def probe(windows: Collection[int], *, vocab: int, limit: int) -> Probe | None:
    """For these windows and the usual ones, within `limit` tokens; None where there is no room.

    Random ids come first, then the second copies, the nearest of their first ones first.
    """
    distances = _distances({*USUAL, *windows}, limit)
    if not distances:
        return None
    random, far = np.random.default_rng(0), distances[-1]
    total = far + LIST * len(distances)
    tokens = random.choice(vocab, total, replace=total > vocab)
    asked, back = list[int](), list[int]()
    for i, distance in enumerate(distances):
        second = far + LIST * i
        tokens[second : second + LIST] = tokens[second - distance : second - distance + LIST]
        asked += range(second + LEAD, second + LIST)
        back += [distance] * (LIST - LEAD)
    return Probe(tuple(map(int, tokens)), tuple(asked), tuple(back))


def _distances(windows: Collection[int], limit: int) -> list[int]:
    """Each beyond a window, and so far apart that no list's first copy touches another's."""
    found = list[int]()
    for window in sorted(windows):
        distance = max(window + BEYOND, found[-1] + 2 * LIST if found else 0)
        if distance + LIST * (len(found) + 1) <= limit:
            found.append(distance)
    return found

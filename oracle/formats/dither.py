"""What runs are dithered by, so that they differ as float32's rounding makes them differ."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EPSILON = 2.0**-23
"""The distance from 1 to the next float32."""


def factors(shape: tuple[int, ...], seed: int) -> npt.NDArray[np.float64]:
    """What every engine multiplies its embedding (V, E) by: 1 + EPSILON times normal numbers."""
    normal = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return 1 + EPSILON * normal.astype(np.float64)

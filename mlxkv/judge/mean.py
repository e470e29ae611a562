"""Judging where there is no truth: the oracle's folder measures by the mean of transformers' own runs.

Of n members the mean is made from, each lies nearer to it than to the truth, by sqrt(1 - 1/n), and so their deviations are
widened; a member that is held out is measured against the mean of the others. No engine can be accused by an error that all
members share, nor can one be praised for lacking it: the best verdict is that it agrees with transformers.

The limits are those that hold against the truth. Measured both ways on SmolLM2 (24 tokens, Linux, 2 cores) correct engines
read a sigma of 0.7 to 0.8 against the truth and 1.0 against the mean, shift 4.7, cached keys and values at most a median of
1.3, a 95th percentile of 2.2 and a worst row of 2.5. The truth itself reads 0.68 against the mean, and could not read less than
1 / sqrt(n), however exact it were. So "nearer to the measure than any right engine" (SIGMA_LEAST) cannot be seen here; that
the pool is no noisier than its dtype is what `mean_double` vouches for, transformers' float64 form against the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from mlxkv.judge.case import Case
from mlxkv.judge.measure import Measures

# As the oracle's own, where the measurements stand that chose them.
PROOFS: Mapping[str, Mapping[str, float]] = {
    "float32": {"members_apart": 1e-5, "mean_double": 5e-6},
    "float16": {"members_apart": 5e-3, "mean_double": 5e-3},
    "bfloat16": {"members_apart": 5e-2, "mean_double": 5e-2},
}


def widening(case: Case) -> float:
    """What a member's deviation from the measure is multiplied by for an error: 1 where the measure is the truth."""
    n = case.pool.distinct
    return 1.0 if case.has_truth else math.sqrt(n / (n - 1))


def held_out(run: Measures, case: Case) -> Measures:
    """A member measured against the mean of all, as it would be against the mean of the others; against the truth it is the same."""
    n = case.pool.distinct
    k = 1.0 if case.has_truth else n / (n - 1)
    return replace(run, rms=run.rms * k, shift=run.shift * k, peak=run.peak * k)


def note(case: Case) -> list[str]:
    """That the truth is missing, in one line; none where it is not."""
    if case.has_truth:
        return []
    pool, left = ", ".join(case.pool.members), case.manifest.left_out
    odd = (
        [f"; left out, as it computes something else in float64: {', '.join(left)}"] if left else []
    )
    return [
        f"no truth for this architecture: the reference is the mean of transformers' own runs ({pool}), "
        f"and an error that all of them share is not seen{''.join(odd)}"
    ]

"""The mean of transformers' own runs, in the truth's place where no truth is written out.

It is the mean of the pool's bitwise distinct members, in float64, without the sequential one, whose
roundings lean to one side. It does not show what all of them get wrong together; how far it is from
transformers' float64 form says how much of their rounding they share. numpy only, a block of
positions at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oracle.formats import trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace
from oracle.pool import errors

ENGINE = "transformers' mean"
# Between kinds of attention in float64, in the same unit. They read 1e-15; with softmax in float32,
# as another architecture's own code might have it in spite of all, up to 1e-7.
KINDS_APART = 1e-6


def faithful(doubles: Mapping[Any, Array]) -> dict[str, float]:
    """How far each kind's float64 logits are from the last kind's, rms over the largest |logit|."""
    own = list(doubles.values())[-1]
    most = max(float(np.abs(own).max()), np.finfo(np.float64).tiny)
    return {kind: _rms(found - own) / most for kind, found in doubles.items()}


def write(
    path: Path, plan: Plan, members: Mapping[str, Trace], *, environment: Mapping[str, Any]
) -> Trace:
    """The mean as a trace of the full plan, with keys and values if every member has all."""
    distinct = list(errors.distinct_of(members).values())
    if len(distinct) < 2:
        equal = f"all {len(members)} runs are bitwise equal"
        what = f"{equal}, expected noise to measure by where no truth is written out"
        raise Refusal(what, where="transformers pool", remedy="give more tokens")
    lacks = next((m.meta.no_cache for m in members.values() if m.meta.no_cache), "")
    first = distinct[0]
    names = [name for name in sorted(first.arrays) if name.startswith("kv/") and not lacks]
    meta = replace(
        first.meta,
        plan=plan,
        engine=ENGINE,
        dtype="float64",
        outcomes=[trace.Outcome() for _ in plan.steps],
        environment=dict(environment),
        no_cache=lacks,
    )
    n = len(first.logits)
    shapes: dict[str, tuple[type, tuple[int, ...]]]
    shapes = {name: (np.float64, first.arrays[name].shape) for name in ("logits", *names)}
    shapes |= dict.fromkeys(("positions", "steps"), (np.int32, (n,)))
    with trace.writer(path, meta, shapes) as out:
        for name in ("logits", *names):
            _mean([m.arrays[name] for m in distinct], out.arrays[name])
        out.arrays["positions"][...] = first.positions
        out.arrays["steps"][...] = len(plan.steps) - 1
        out.finish(meta.to_json())
    return trace.read(path)


def proofs(mean: Trace, members: Mapping[str, Trace], double: Array) -> dict[str, float]:
    """The mean's proofs; `double` (n, V) are transformers' float64 logits, the first."""
    most = max(float(np.abs(mean.logits[rows]).max()) for rows in errors.blocks(mean.logits))
    require_signal(most, mean)
    apart = max(_apart(member.logits, mean.logits) for member in members.values())
    return {
        "members_apart": apart / most,
        "mean_double": _rms(double - mean.logits[: len(double)]) / most,
        "mean_max": most,
    }


def require_signal(most: float, measure: Trace) -> None:
    """Refuses a measure whose largest |logit| is 0."""
    if not most > 0:
        what = "every logit is 0, expected a trained model's"
        raise Refusal(what, where=measure.label, remedy="check the weights")


def _mean(arrays: Sequence[Array], out: Array) -> None:
    for rows in errors.blocks(out) if out.ndim == 2 else [slice(None)]:
        out[rows] = sum(array[rows].astype(np.float64) for array in arrays) / len(arrays)


def _apart(member: Array, mean: Array) -> float:
    squares = (np.square(member[rows] - mean[rows]).sum() for rows in errors.blocks(mean))
    return float(np.sqrt(sum(map(float, squares)) / mean.size))


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))

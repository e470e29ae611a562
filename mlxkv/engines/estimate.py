"""What a job takes in time, memory and disk, before it runs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mlxkv.engines.job import Job
from oracle.formats.plan import Plan

if TYPE_CHECKING:
    from oracle.model.checkpoint import Checkpoint

_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
IMPORTS_BYTES = 150_000_000
"""A process with MLX, numpy and no model."""
_STATES, _HEAD = 2**27, 2**23  # as `engines.exact` has them, and the head's block in bytes
_IMPORTS, _WEIGHTS, _OPERATIONS = 1.5, 4e9, 6e10
"""Measured on two cores with SmolLM2: seconds of imports; bytes of weights that a call reads, and
operations that it does, a second; in float64 a third of the operations."""


def bytes_of(job: Job, checkpoint: Checkpoint) -> int:
    """About the memory that is no file's: weights in the job's dtype, caches and kept rows.

    In float64 the port follows all plans layer by layer: twice a layer's weights, the hidden states
    of all calls, and a block of the head.
    """
    longest = max((_trace(plan, checkpoint, job.dtype) for plan in job.plans), default=0)
    if job.dtype != "float64" or job.caches:
        return IMPORTS_BYTES + checkpoint.parameters * _SIZES[job.dtype] + longest
    fed = sum(feed.fed for plan in job.plans for feed in plan.calls())
    states = min(fed * int(checkpoint.config["hidden_size"]), _STATES)
    return IMPORTS_BYTES + 16 * _layer(checkpoint) + 16 * states + 4 * _HEAD


def seconds_of(job: Job, checkpoint: Checkpoint) -> float:
    """About the time on two cores."""
    size, calls, tokens = _SIZES[job.dtype], 0, 0
    for plan in job.plans:
        times = 2 if plan.name in job.repeat else 1
        feeds = list(plan.calls())
        calls += times * len(feeds)
        tokens += times * sum(feed.fed * len(feed.batch) for feed in feeds)
    slower = 3 if job.dtype == "float64" else 1
    read = (calls + 1) * checkpoint.parameters * size / _WEIGHTS
    return _IMPORTS + read + 2 * tokens * slower * checkpoint.parameters / _OPERATIONS


def disk_of(job: Job, checkpoint: Checkpoint) -> int:
    """The bytes of its traces."""
    twice = [plan for plan in job.plans if plan.name in job.repeat]
    return sum(_trace(plan, checkpoint, job.dtype) for plan in (*job.plans, *twice))


def _trace(plan: Plan, checkpoint: Checkpoint, dtype: str) -> int:
    """A trace's logits, the keys and values that its caches hold in the end, and its header."""
    rows = sum(len(plan.kept(feed)) * len(feed.batch) for feed in plan.calls())
    numbers = rows * checkpoint.vocab_size + plan.longest * _cache_width(checkpoint)
    header = 2**16 + 1536 * len(plan.steps)
    return header + numbers * (8 if dtype == "float64" else 4)


def _layer(checkpoint: Checkpoint) -> int:
    """Numbers of the largest layer."""
    sizes: dict[str, int] = {}
    for name, shape in checkpoint.weights.items():
        if ".layers." in name:
            layer = name.split(".layers.")[1].split(".")[0]
            sizes[layer] = sizes.get(layer, 0) + math.prod(shape)
    return max(sizes.values(), default=0)


def _cache_width(checkpoint: Checkpoint) -> int:
    """Numbers of keys and values for a token in all layers, by the weights that make them."""
    made = ("k_proj.weight", "v_proj.weight", "qkv_proj.weight")
    found = (shape for name, shape in checkpoint.weights.items() if name.endswith(made))
    return sum(math.prod(shape[:1]) for shape in found)

"""What a job will take, before it is started: memory that nothing but its process can give back,
time, and disk.

Both follow from the shapes of the model and of its calls. The throughputs are those of one thread
of a 2-core x86-64 with BLIS; what they are estimated for is a person who waits, and lanes that must
not run beside each other. Axes as in `mlxkv.port.llama`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mlxkv.engines.job import Job
from oracle.formats.plan import Feed, New, Plan
from oracle.model.checkpoint import Checkpoint

Rows = Literal["kept", "some", "all"]
_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

BASE = 64 * 2**20
"""Bytes of a process that has loaded MLX and numpy: 58 to 63 MB were measured."""
START = 1.5
"""Seconds until it has."""
STATES = 2**27
"""Numbers of hidden states that `mlxkv.engines.exact` keeps between two layers, 1 GB. Plans that
have more in all are followed in groups, each of which has the weights converted once more."""
HEAD = 2**20
"""Numbers of the head that `mlxkv.engines.exact` has in float64 at once, 8 MB."""
HELD = {8: 3, 4: 2}
"""Arrays of a block of scores that are there at once, by their bytes, as measured: softmax is
written out in float64."""
HEADER = 2**16
"""Bytes of a trace's header, and 1,536 for each of its steps, whose outcomes it has room for."""
SCORES, ROWS = 2**22, 1024
"""Those of `mlxkv.port.llama`, which this module does not import: it needs no MLX."""

WHOLE = 2**24
"""Logits of a call up to which mlx-lm's models compute all rows: 64 MB in float32."""
LEAST = 256
"""Rows of a longer one that `mlxkv.engines.head` has them compute at least. A BLAS adds up in
another order where a matrix has few rows; with so many the rows had the bits that they have among
thousands (seen with BLIS). That is looked at in each process, with whatever BLAS it has."""

PRODUCTS = {"float64": 25e9, "float32": 45e9, "bfloat16": 5e9, "float16": 4e9}
"""Operations a second of a product with 8 to 64 rows. MLX's CPU products of half precision do not
use the BLAS."""
WEIGHTS = {"float64": 20e9, "float32": 13e9, "bfloat16": 2.2e9, "float16": 1.1e9}
"""Bytes of weights a second in a product with one row."""
ATTENTION = {"float64": 33e6, "float32": 52e6}
"""Scores a second, of which a causal mask leaves half; softmax is most of it."""
CONVERTED = 0.22e9
"""Numbers a second that become float64, or float32 from half precision."""
READ = 1.5e9
"""Bytes a second that are copied out of a mapped file, or into one."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A model's sizes. What its config does not say is 0."""

    E: int
    F: int
    H: int
    K: int
    D: int
    V: int
    layers: int
    positions: int
    numbers: int
    of_layers: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _Shape:
        config: Mapping[str, Any] = checkpoint.config

        def size(key: str, other: int = 0) -> int:
            found = config.get(key)
            return found if isinstance(found, int) else other

        E, H = size("hidden_size"), size("num_attention_heads")
        inside = {n: math.prod(s) for n, s in checkpoint.weights.items() if ".layers." in n}
        return cls(
            E=E,
            F=size("intermediate_size"),
            H=H,
            K=size("num_key_value_heads", H),
            D=size("head_dim", E // H if H else 0),
            V=size("vocab_size"),
            layers=max(1, size("num_hidden_layers")),
            positions=size("max_position_embeddings"),
            numbers=checkpoint.parameters,
            of_layers=sum(inside.values()),
        )


def bytes_of(job: Job, checkpoint: Checkpoint, *, rows: Rows = "kept") -> int:
    """The anonymous memory that the job's process will need at its peak; mapped files not counted.

    `rows` are those whose logits the engine computes: the kept ones, all of each call, or "some",
    which is all of short calls and no fewer than LEAST of long ones.
    """
    shape, item = _Shape.of(checkpoint), _SIZES[job.dtype]
    calls = [(plan, call) for plan in job.plans for call in plan.calls()]
    if item == 8:
        fed = sum(call.fed for _, call in calls)
        longest = max((call.fed for _, call in calls), default=0)
        layer = shape.of_layers // shape.layers * 8 + _largest(checkpoint)
        weights = max(layer, min(HEAD, shape.V * shape.E) * (8 + 4))
        states = max(longest * shape.E, min(fed * shape.E, STATES)) * 8
        caches = max((_rows(plan) for plan in job.plans), default=0) * 2 * shape.K * shape.D * 8
        logits = 0
    else:
        weights, states = _held(checkpoint, item) + _largest(checkpoint), 0
        held = max((_rows(plan) for plan in job.plans), default=0)
        caches = held * 2 * shape.K * shape.D * item * shape.layers
        most = max((_logits(plan, rows, shape.V) for plan in job.plans), default=0)
        logits = most * shape.V * 4
    passing = max((_passing(call, shape, item) for _, call in calls), default=0)
    tables = 2 * shape.positions * shape.D * item
    return BASE + weights + states + caches + logits + passing + tables


def seconds_of(job: Job, checkpoint: Checkpoint) -> float:
    """The seconds that its process will take on one thread."""
    shape, dtype = _Shape.of(checkpoint), job.dtype
    item = _SIZES[dtype]
    plans = [*job.plans, *(plan for plan in job.plans if plan.name in job.repeat)]
    seconds = START + shape.numbers * item / READ
    stored = {tensor.dtype for tensor in checkpoint.tensors.values()}
    if item == 8 or (item == 4 and stored & {"F16", "BF16"}):
        fed = sum(call.fed for plan in plans for call in plan.calls())
        groups = max(1, -(-fed * shape.E // STATES)) if item == 8 else 1
        seconds += groups * shape.numbers / CONVERTED
    for plan in plans:
        for call in plan.calls():
            rows = len(plan.kept(call)) * len(call.batch)
            seconds += _product(call.fed * len(call.batch), shape.of_layers, dtype)
            seconds += _product(rows, shape.V * shape.E, dtype)
            scores = shape.H * call.fed * (call.held + call.fed / 2) * len(call.batch)
            seconds += shape.layers * scores / ATTENTION["float64" if item == 8 else "float32"]
            seconds += rows * shape.V * max(4, item) / READ
    return seconds


def _product(rows: int, weights: int, dtype: str) -> float:
    """The seconds of products of so many rows with so many weights."""
    if not rows:
        return 0.0
    return max(weights * _SIZES[dtype] / WEIGHTS[dtype], 2 * rows * weights / PRODUCTS[dtype])


def _held(checkpoint: Checkpoint, item: int) -> int:
    """The bytes of all weights as a model of this item size holds them; packed ones stay so."""
    head = "lm_head." if checkpoint.config.get("tie_word_embeddings") else "\0"
    return sum(
        math.prod(tensor.shape) * (4 if tensor.dtype == "U32" else item)
        for name, tensor in checkpoint.tensors.items()
        if not name.startswith(head)
    )


def _largest(checkpoint: Checkpoint) -> int:
    """The bytes of the largest weight of a layer, as it is stored beside what becomes of it."""
    return max(
        (t.stop - t.start for name, t in checkpoint.tensors.items() if ".layers." in name),
        default=0,
    )


def _rows(plan: Plan) -> int:
    """The rows of keys that the plan's caches hold at once, by whole blocks of 256."""
    caches = {step.cache for step in plan.steps if isinstance(step, New) and step.use_kv_cache}
    batch = max((len(call.batch) for call in plan.calls()), default=1)
    return len(caches) * batch * -(-plan.longest // 256) * 256


def _logits(plan: Plan, rows: Rows, V: int) -> int:
    """The rows of logits that are in memory before they are written."""
    kept = sum(len(plan.kept(call)) * len(call.batch) for call in plan.calls())
    if rows == "kept":
        return kept
    return kept + max((_computed(plan, call, rows, V) for call in plan.calls()), default=0)


def _computed(plan: Plan, call: Feed, rows: Rows, V: int) -> int:
    """The rows of logits that a call computes."""
    every, batch = call.fed * len(call.batch), len(call.batch)
    if rows == "all" or every * V <= WHOLE:
        return every
    return min(every, batch * (LEAST + len(plan.kept(call))))


def _passing(call: Feed, shape: _Shape, item: int) -> int:
    """The bytes of what a call computes on its way through a layer; attention is never in half."""
    wide = max(4, item)
    n, batch = call.fed, len(call.batch)
    scores = min(SCORES, batch * shape.H * n * (call.held + n))
    heads = 4 * shape.H * shape.D + 4 * shape.K * shape.D
    narrow = batch * n * 4 * shape.E + batch * min(n, ROWS) * 4 * shape.F
    return (HELD[wide] * scores + batch * n * heads) * wide + narrow * item


def disk_of(job: Job, checkpoint: Checkpoint) -> int:
    """The bytes of its traces: kept rows of logits, the caches' keys and values, and headers."""
    shape, item = _Shape.of(checkpoint), max(4, _SIZES[job.dtype])
    again = [plan for plan in job.plans if plan.name in job.repeat]
    found = 0
    for plan in (*job.plans, *again):
        kept = sum(len(plan.kept(call)) * len(call.batch) for call in plan.calls())
        held = plan.longest * 2 * shape.K * shape.D * shape.layers
        found += item * (kept * shape.V + held) + HEADER + 1536 * len(plan.steps)
    return found

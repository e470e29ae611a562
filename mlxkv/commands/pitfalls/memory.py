"""What branches of one prefix cost in memory, counted by MLX in a process of its own.

python -m mlxkv.commands.pitfalls.memory JOB.json CONTEXT BRANCHES STEPS
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mlxkv.engines import job
from oracle.formats.disk import write_text
from oracle.formats.errors import Refusal

if TYPE_CHECKING:
    from mlxkv.port.cache import Cache
    from mlxkv.port.llama import Llama

FORMAT = "mlxkv-branches/1"
CHUNK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Bytes, except for the first three, which are what was asked for.

    `rows` are the rows of the prefix's cache and `buffers` what was allocated for them. `birth` is
    what a clone adds, `first_write` what its first step adds. Then `branches` clones decode `steps`
    tokens each in turn: `active` is what MLX then holds and `peak` the most that it held, both over
    what it held with the prefix's cache alone; `per_branch` is a branch's part of `active`, and
    `branch_buffers` what one branch has allocated in the end.
    """

    context_tokens: int
    branches: int
    steps: int
    rows: int
    buffers: int
    birth: int
    first_write: int
    active: int
    peak: int
    per_branch: float
    branch_buffers: int


def tokens(n: int, vocab: int, *, start: int = 3) -> list[int]:
    return [(start + 7919 * i) % vocab for i in range(n)]


def prefill(model: Llama, context: int) -> Cache:
    """A cache of that many tokens, fed in chunks."""
    import mlx.core as mx

    from mlxkv.port.cache import Cache

    cache = Cache(model.config, dtype=model.dtype)
    ids = tokens(context, model.config.vocab_size)
    for first in range(0, context, CHUNK):
        mx.eval(model([ids[first : first + CHUNK]], cache=cache))
    return cache


def decode(model: Llama, caches: Sequence[Cache], steps: int) -> list[npt.NDArray[Any]]:
    """Each cache goes on by `steps` tokens of its own, in turn; each one's last logits (V,)."""
    ids = [tokens(steps, model.config.vocab_size, start=11 + i) for i in range(len(caches))]
    last = [np.zeros(0)] * len(caches)
    for step in range(steps):
        for i, cache in enumerate(caches):
            last[i] = np.array(model([[ids[i][step]]], cache=cache)[0])
    return last


def measure(model: Llama, *, context: int, branches: int, steps: int) -> Figures:
    import mlx.core as mx

    limit = model.config.max_position_embeddings
    if context < 1 or branches < 1 or steps < 1 or context + steps > limit:
        raise Refusal(
            f"branches: context {context}, branches {branches}, steps {steps}, expected each "
            f"from 1 and at most {limit} tokens in all; ask for fewer"
        )
    parent = prefill(model, context)
    # What MLX makes once for a kind of call is not the branches' doing.
    decode(model, [parent.clone()], 1)
    base = _active()
    first = parent.clone()
    birth = _active() - base
    decode(model, [first], 1)
    first_write = _active() - base - birth
    del first
    clones = [parent.clone() for _ in range(branches)]
    before = _active()
    mx.reset_peak_memory()
    decode(model, clones, steps)
    peak, active = mx.get_peak_memory() - before, _active() - before
    return Figures(
        context_tokens=context,
        branches=branches,
        steps=steps,
        rows=parent.nbytes,
        buffers=_buffers(parent),
        birth=birth,
        first_write=first_write,
        active=active,
        peak=peak,
        per_branch=active / branches,
        branch_buffers=_buffers(clones[0]),
    )


def _active() -> int:
    """Bytes that MLX holds once what nobody holds is gone."""
    import mlx.core as mx

    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


def _buffers(cache: Cache) -> int:
    return sum(b.nbytes for layer in cache.layers for b in layer.buffers or ())


def follow(asked: job.Job, context: int, branches: int, steps: int) -> None:
    """Measures on the job's model and writes `branches.json` into its folder."""
    environment, checkpoint = asked.prepare(asked.device)
    from mlxkv.port.weights import from_checkpoint

    model = from_checkpoint(checkpoint, asked.dtype)
    figures = measure(model, context=context, branches=branches, steps=steps)
    value: dict[str, Any] = {"format": FORMAT, "model": checkpoint.name, "dtype": asked.dtype}
    value |= {"environment": environment} | asdict(figures)
    write_text(asked.out / "branches.json", json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    job.serve(lambda asked: follow(asked, *map(int, sys.argv[2:])))

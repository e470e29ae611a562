"""One decode step of each engine: what a GPU would run of its graph, and how long building takes.

`python -m mlxkv.commands.bench.count FOLDER DTYPE DEVICE [KEY ...]` is a process of its own: its
models compute nonsense, and what it compiles must not be used for anything else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from mlxkv.commands.bench import sequence, turns
from mlxkv.commands.bench.ask import computes_in
from mlxkv.commands.bench.grid import Block
from mlxkv.commands.bench.result import Step, Steps
from mlxkv.engines import machine
from oracle.formats import child
from oracle.formats.exits import code_of

PROMPT, ROUNDS = 4, 30
"""Tokens that are held, and steps that are built in turns; a build takes 1 to 4 ms."""


def counted(block: Block, device: str) -> Steps:
    """Both engines' steps, from a process of their own."""
    checkpoint = block.checkpoint
    given = (str(checkpoint.folder), computes_in(block.dtype), device, *checkpoint.without)
    command = child.command("mlxkv.commands.bench.count", *given)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise turns.ended(done.returncode)
    found = json.loads(done.stdout)
    port, other = (_step(found[engine]) for engine in ("mlxkv", "mlx-lm"))
    return Steps(block.name, block.dtype, port, other)


def _step(found: dict[str, Any]) -> Step:
    return Step(**found | {"seconds": tuple(found["seconds"])})


def steps(folder: str, dtype: str, device: str, *keys: str) -> dict[str, dict[str, Any]]:
    """By engine: `primitives`, `kernels`, `kinds`, and the `seconds` that each build took."""
    environment = machine.prepare(device)
    from mlxkv.commands.bench import graph

    on_gpu = environment["device"] == "gpu"
    with nullcontext() if on_gpu else graph.as_on_a_gpu():
        engines = {name: sequence.load(name, folder, dtype, keys) for name in ("mlxkv", "mlx-lm")}
        counted = {name: _begun(engine) for name, engine in engines.items()}
        seconds = _built(engines)
    return {name: {**asdict(counted[name]), "seconds": seconds[name]} for name in engines}


def _begun(engine: sequence.Engine) -> Any:
    """The count of a step after a prompt, the second: the first may compile something."""
    from mlxkv.commands.bench import graph

    engine.begin(PROMPT + 2 + ROUNDS)
    engine.prefill(sequence.made_up(PROMPT, 1, engine.vocab)).tolist()
    engine.step([0]).tolist()
    step = engine.step([0])
    counted = graph.count(step)
    step.tolist()
    return counted


def _built(engines: Mapping[str, sequence.Engine]) -> dict[str, list[float]]:
    """Seconds of each build, the engines in turns. Between builds each is computed, as a cache that
    waits for thousands of steps is not what decoding meets.
    """
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            begun = time.perf_counter()
            step = engine.step([0])
            found[name].append(time.perf_counter() - begun)
            step.tolist()
    return found


if __name__ == "__main__":
    sys.exit(code_of(lambda: print(json.dumps(steps(*sys.argv[1:])))))

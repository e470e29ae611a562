"""An engine's process, which takes a turn whenever it is told to.

`python -m mlxkv.commands.bench.worker ENGINE FOLDER DTYPE DEVICE [KEY ...]` answers each line of
stdin, a JSON list, with a line of JSON. The engines live in processes of their own, as mlx-lm
brings transformers with it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import mlxkv.commands.bench.bandwidth as bandwidth
from mlxkv.commands.bench import sequence
from mlxkv.engines import machine
from oracle.formats.exits import code_of


class Turns:
    """What can be asked: the surroundings, a prefill, a decode after it, the copy bandwidth."""

    def __init__(self, engine: str, folder: str, dtype: str, device: str, *keys: str) -> None:
        others = {name: machine.version(name) for name in ("mlx-lm", "transformers")}
        self.environment = machine.prepare(device) | others
        self.engine = sequence.load(engine, folder, dtype, keys)
        self._next: list[int] = []

    def prefill(self, length: int, batch: int, room: int) -> dict[str, float]:
        """A new sequence of `length` tokens, in a cache that will have to hold `room`."""
        rows = sequence.made_up(length, batch, self.engine.vocab)
        self.engine.begin(room)

        def fill() -> None:
            self._next = _ids(self.engine.prefill(rows))

        return _timed(fill)

    def decode(self, steps: int) -> dict[str, Any]:
        """Greedy tokens after the last prefill, which are taken back afterwards; also the last."""
        tokens = self._next

        def decode() -> None:
            nonlocal tokens
            for _ in range(steps):
                tokens = _ids(self.engine.step(tokens))

        taken = _timed(decode)
        self.engine.back(steps)
        return {**taken, "ids": tokens}

    def copy(self) -> float:
        """Bytes that a copy reads and writes in a second."""
        return bandwidth.copied(on_gpu=self.environment["device"] == "gpu")


def _timed(work: Callable[[], None]) -> dict[str, float]:
    """Seconds that it takes, and the most bytes that MLX's arrays took meanwhile."""
    import mlx.core as mx

    mx.reset_peak_memory()
    begun = time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - begun, "peak": mx.get_peak_memory()}


def _ids(computed: Any) -> list[int]:
    found: list[int] = computed.tolist()
    return found


def serve(engine: str, folder: str, dtype: str, device: str, *keys: str) -> None:
    turns = Turns(engine, folder, dtype, device, *keys)
    asked: dict[str, Callable[..., Any]] = {
        "environment": lambda: turns.environment,
        "prefill": turns.prefill,
        "decode": turns.decode,
        "copy": turns.copy,
    }
    for line in sys.stdin:
        what, *given = json.loads(line)
        print(json.dumps(asked[what](*given)), flush=True)


if __name__ == "__main__":
    sys.exit(code_of(lambda: serve(*sys.argv[1:])))

"""What every runner of plans does: steps in order, the rows that calls returned, what became of each step.

An engine's own runner adds how its caches are made and changed, and one forward call.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mlxkv.engines.job import Job
from mlxkv.engines.progress import bar
from oracle.formats.plan import Call, Clone, Crop, Greedy, New, Plan, Reset, Step
from oracle.formats.trace import Meta, Outcome, write

Array = npt.NDArray[Any]


class PlanRunner(ABC):
    """Follows one plan. `failures` are the errors that a step may end with; others are faults of ours."""

    failures: tuple[type[Exception], ...] = (ValueError,)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rows: list[Array] = []
        self.positions: list[Array] = []
        self.steps: list[Array] = []
        self.outcomes: list[Outcome] = []
        self.seconds = 0.0

    @abstractmethod
    def new(self, name: str, use_kv_cache: bool) -> None:
        """A fresh cache under this name."""

    @abstractmethod
    def clone(self, source: str, target: str) -> None:
        """`target` becomes an independent copy of `source`."""

    @abstractmethod
    def crop(self, name: str, length: int) -> None:
        """The cache keeps its first `length` tokens."""

    @abstractmethod
    def reset(self, name: str) -> None:
        """The cache is empty again."""

    @abstractmethod
    def held(self, name: str) -> int:
        """How many tokens the cache says that it holds."""

    @abstractmethod
    def forward(self, name: str, tokens: tuple[int, ...], index_pos: int | None) -> Array:
        """One call's logits in float32 or float64: (L, V), or (1, V) where only the last position's are asked for."""

    @abstractmethod
    def nothing(self) -> Array:
        """What a call of no tokens would return: (0, V)."""

    @abstractmethod
    def kept(self) -> Iterator[tuple[str, int, Any, Any]]:
        """Cache, layer, keys and values, each (K, length, D), of every layer that holds some."""

    def run(self, advance: Callable[[int], None] = lambda _: None) -> Self:
        """Every step in order; a step that fails keeps its error's text and the next one follows."""
        for i, step in enumerate(self.plan.steps):
            try:
                self.outcomes.append(Outcome(tokens=self._step(i, step)))
            except self.failures as error:
                self.outcomes.append(Outcome.failed(error))
            advance(1)
        return self

    def arrays(self) -> dict[str, Array]:
        """The trace's arrays: all rows, and the keys and values that each cache holds at the end."""
        arrays = {
            "logits": np.concatenate(self.rows) if self.rows else self.nothing(),
            "positions": np.concatenate(self.positions).astype(np.int32)
            if self.rows
            else np.zeros(0, np.int32),
            "steps": np.concatenate(self.steps).astype(np.int32)
            if self.rows
            else np.zeros(0, np.int32),
        }
        for name, i, keys, values in self.kept():
            arrays[f"kv/{name}/{i:03d}/keys"] = host(keys)
            arrays[f"kv/{name}/{i:03d}/values"] = host(values)
        return arrays

    def _step(self, index: int, step: Step) -> list[int] | None:
        match step:
            case New(name, use_kv_cache):
                self.new(name, use_kv_cache)
            case Call(name, tokens, index_pos):
                self._call(index, name, tokens, index_pos)
            case Greedy():
                return self._greedy(index, step)
            case Clone(source, target):
                self.clone(source, target)
            case Crop(name, length):
                self.crop(name, length)
            case Reset(name):
                self.reset(name)
        return None

    def _call(self, index: int, name: str, tokens: tuple[int, ...], index_pos: int | None) -> Array:
        held = self.held(name)
        begun = time.perf_counter()
        rows = self.forward(name, tokens, index_pos)
        self.seconds += time.perf_counter() - begun
        last = held + len(tokens)
        self.rows.append(rows)
        self.positions.append(np.arange(last - len(rows), last))
        self.steps.append(np.full(len(rows), index))
        newest: Array = rows[-1]
        return newest

    def _greedy(self, index: int, step: Greedy) -> list[int]:
        chosen: list[int] = []
        tokens, position = step.tokens, step.index_pos
        for calls in range(1, step.n + 1):
            # numpy takes the first of equals, which is the lowest id.
            chosen.append(int(np.argmax(self._call(index, step.cache, tokens, position))))
            if position is not None and step.index_pos is not None:
                position = {
                    "right": position + len(tokens),
                    "zero": position,
                    "by_calls": step.index_pos + calls,
                }[step.advance]
            tokens = (chosen[-1],)
        return chosen


def follow(job: Job, label: str, begin: Callable[[Plan], tuple[PlanRunner, Meta]]) -> None:
    """Each of the job's plans by what `begin` gives for it: a trace of each, and word of the seconds in forward calls."""
    seconds = 0.0
    with bar(label, sum(len(plan.steps) for plan in job.plans)) as advance:
        for plan in job.plans:
            runner, meta = begin(plan)
            runner.run(advance)
            seconds += runner.seconds
            write(
                job.trace(plan), replace(meta, plan=plan, outcomes=runner.outcomes), runner.arrays()
            )
    job.report(seconds)


def host(array: Any) -> Array:
    """A numpy copy of an MLX array: numpy has no bfloat16, and float32 holds every half-precision value exactly."""
    import mlx.core as mx

    kept = array.dtype in (mx.float32, mx.float64)
    return np.array(array if kept else array.astype(mx.float32))

"""What every runner of plans does: steps in order, the rows of calls, what became of each step.

An engine's own runner adds how its caches are made and changed, and one forward call. Axes as in
`mlxkv.port.llama`.
"""

from __future__ import annotations

import copy
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mlxkv.engines.job import Job
from mlxkv.engines.progress import bar
from oracle.formats.errors import Inexpressible, Refusal
from oracle.formats.exits import DEBUG, PARENT
from oracle.formats.plan import Call, Clone, Crop, Greedy, New, Plan, Reset, Step
from oracle.formats.trace import Meta, Outcome, write

Array = npt.NDArray[Any]


@contextmanager
def blamed_on(name: str, what: str) -> Iterator[None]:
    """Turns what an engine's own code raises into one line: what it was asked, what came, where.

    `name` is the engine's, a file's first.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        came = " ".join(traceback.format_exception_only(error)[-1].split())[:300]
        what = f"{what} failed with {came}{place(error, name.partition(':')[0])}"
        raise Refusal(what, where=name, remedy=more()) from error


def place(error: BaseException, file: str = "") -> str:
    """The innermost line of a file by this name, else of any code but ours; in parentheses."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}:{error.lineno})"
    ours = ("<", str(Path(__file__).parent))
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)
    ]
    own = [frame for frame in frames if Path(frame.filename).name == file]
    for frame in (own or frames)[-1:]:
        return f" ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"
    return ""


def more() -> str:
    """How a person sees more of an error in an engine's code."""
    if PARENT not in os.environ:
        return "run it by itself to see more"
    return "its traceback is above" if DEBUG in os.environ else "run again with --debug to see more"


class CropRefusal(Refusal):
    """A crop to more tokens than the cache has; the step ends alone."""


class PlanRunner(ABC):
    """Follows one plan. `failures` are the errors that end a step alone; others are faults of ours.

    `caches` are the engine's, by name; mlx-lm's convention has None for no cache. `seconds` are
    those spent in forward calls.
    """

    failures: tuple[type[Exception], ...] = (ValueError,)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.caches: dict[str, Any] = {}
        self.rows: list[Array] = []
        self.positions: list[Array] = []
        self.steps: list[Array] = []
        self.outcomes: list[Outcome] = []
        self.seconds = 0.0

    @abstractmethod
    def new(self, name: str, use_kv_cache: bool) -> None:
        """A fresh cache under this name."""

    def clone(self, source: str, target: str) -> None:
        """`target` becomes an independent copy of `source`."""
        self.caches[target] = copy.deepcopy(self.caches[source])

    @abstractmethod
    def crop(self, name: str, length: int) -> None:
        """The cache keeps its first `length` tokens."""

    def reset(self, name: str) -> None:
        """The cache is empty again."""
        self.new(name, self.caches[name] is not None)

    @abstractmethod
    def held(self, name: str) -> int:
        """How many tokens the cache says that it holds."""

    @abstractmethod
    def forward(self, name: str, tokens: tuple[int, ...], index_pos: int | None) -> Array:
        """One call's logits (L, V), or (1, V) where the plan keeps only the last position's.

        In float32 or float64.
        """

    @abstractmethod
    def nothing(self) -> Array:
        """The rows of no call at all: (0, V)."""

    @abstractmethod
    def kept(self) -> Iterator[tuple[str, int, Any, Any]]:
        """Cache, layer, keys and values, each [K, S, D], of every layer that holds some."""

    def run(self, advance: Callable[[int], None] = lambda _: None) -> Self:
        """Follows every step; one that fails keeps its error's text, and the next one follows."""
        for i, step in enumerate(self.plan.steps):
            try:
                outcome = Outcome(tokens=self._step(i, step))
            except self.failures as error:
                if os.environ.get(DEBUG):
                    traceback.print_exc()
                outcome = Outcome.failed(error)
            self.outcomes.append(outcome)
            advance(1)
        return self

    def arrays(self) -> dict[str, Array]:
        """A trace's arrays: all rows, and the keys and values that each cache holds in the end."""
        none = [np.zeros(0, np.int32)]
        arrays = {
            "logits": np.concatenate(self.rows) if self.rows else self.nothing(),
            "positions": np.concatenate(self.positions or none).astype(np.int32),
            "steps": np.concatenate(self.steps or none).astype(np.int32),
        }
        for name, i, keys, values in self.kept():
            arrays[f"kv/{name}/{i:03d}/keys"] = host(keys)
            arrays[f"kv/{name}/{i:03d}/values"] = host(values)
        return arrays

    def check_crop(self, length: int, held: int) -> None:
        """Refuses to keep more tokens than the cache has."""
        if length > held:
            what = f"length is {length}, expected at most the {held} tokens cached"
            raise CropRefusal(what, where="crop")

    def check_position(self, index_pos: int | None, held: int, why: str) -> None:
        """Refuses a position that is not the cache's own, where a call cannot name one."""
        if index_pos not in (None, held):
            raise Inexpressible(f"index_pos {index_pos} with {held} tokens cached, as {why}")

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
    """Runs each of the job's plans on the runner that `begin` makes for it, and writes its trace.

    Writes the seconds spent in forward calls too.
    """
    seconds = 0.0
    with bar(label, sum(len(plan.steps) for plan in job.plans)) as advance:
        for plan in job.plans:
            runner, meta = begin(plan)
            runner.run(advance)
            seconds += runner.seconds
            made = replace(meta, plan=plan, outcomes=runner.outcomes)
            write(job.trace(plan), made, runner.arrays())
    job.write_seconds(seconds)


def host(array: Any) -> Array:
    """A numpy copy of an MLX array, in float64 where it is, else in float32.

    numpy has no bfloat16, and float32 holds every half-precision value exactly.
    """
    import mlx.core as mx

    kept = array.dtype in (mx.float32, mx.float64)
    return np.array(array if kept else array.astype(mx.float32))

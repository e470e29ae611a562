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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mlxkv.engines.job import Job
from mlxkv.engines.progress import bar
from oracle.formats.dither import factors
from oracle.formats.errors import Inexpressible, Refusal
from oracle.formats.exits import DEBUG, PARENT
from oracle.formats.plan import (
    Call,
    Clone,
    Crop,
    Fail,
    Greedy,
    New,
    Pad,
    Plan,
    Recall,
    Reload,
    Reset,
    Step,
    Trim,
    require,
)
from oracle.formats.tensors import release
from oracle.formats.trace import Meta, Outcome, writer

Array = npt.NDArray[Any]
Batch = tuple[tuple[int, ...], ...]
"""The tokens of a call, row by row, all of one length."""
Run = tuple[Plan, Path, int]
"""A plan to follow, where its trace goes, and how often it was followed before."""


@contextmanager
def blamed_on(name: str, what: str) -> Iterator[None]:
    """Turns what an engine's own code raises into one line: what it was asked, what came, where.

    `name` is the engine's, a file's first.
    """
    try:
        yield
    except (Inexpressible, BrokenOff):
        raise  # these are ours, and no fault of the code
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


class BrokenOff(Exception):
    """What a call raises that is to be broken off."""


class CropRefusal(Refusal):
    """A crop to more tokens than the cache has; the step ends alone."""


class PlanRunner(ABC):
    """Follows one plan. `failures` are the errors that end a step alone; others are faults of ours.

    `caches` are the engine's, by name; mlx-lm's convention has None for no cache. `seconds` are
    those spent in forward calls. Of a batch the logits of one row stand after those of another, and
    `batch` says which they are of; `batches` are the rows of each cache's, 0 where it holds none,
    and `padding` what stands before each of them.
    """

    failures: tuple[type[Exception], ...] = (ValueError,)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.caches: dict[str, Any] = {}
        self.rows: list[Array] = []
        self.positions: list[Array] = []
        self.steps: list[Array] = []
        self.batch: list[Array] = []
        self.batches: dict[str, int] = {}
        self.padding: dict[str, tuple[int, ...]] = {}
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

    def trim(self, name: str, tokens: int) -> None:
        """Asks the cache itself to drop so many tokens from its end, even more than it has."""
        raise Inexpressible("it is cut back to a length, and not by a number of tokens")

    def reset(self, name: str) -> None:
        """The cache is empty again."""
        self.new(name, self.caches[name] is not None)

    def pad(self, name: str, left: tuple[int, ...]) -> None:
        """The next rows of this cache, which is empty, have so much padding on the left."""
        raise Inexpressible("it takes no padded rows")

    def reload(self, name: str) -> None:
        """The cache goes to a file, and what comes back takes its place."""
        raise Inexpressible("it has no way to save a cache")

    def recall(self, source: str, target: str, length: int) -> None:
        """`target` is what a store that has `source` gives for its first `length` tokens."""
        raise Inexpressible("it has no store of caches")

    def fail(self, name: str, tokens: tuple[int, ...]) -> None:
        """A call that is broken off half way through the layers, and what a user does then."""
        raise Inexpressible("its calls cannot be broken off here")

    @abstractmethod
    def held(self, name: str) -> int:
        """How many tokens the cache says that it holds."""

    @abstractmethod
    def forward(
        self, name: str, rows: Batch, index_pos: int | None, places: Sequence[int]
    ) -> Array:
        """One call of `rows`, B of L tokens each: the logits at `places` in them, of which there is
        one at least, (B, len(places), V).

        In float32 or float64.
        """

    def says(self) -> dict[str, Any]:
        """What the trace's environment must say of this run alone."""
        return {}

    @abstractmethod
    def nothing(self) -> Array:
        """The rows of no call at all: (0, V)."""

    @abstractmethod
    def kept(self) -> Iterator[tuple[str, int, Any, Any]]:
        """Cache, layer, keys and values, each [B, K, S, D], of every layer that holds some."""

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

    def numbers(self) -> dict[str, Array]:
        """What each row of logits is, (rows,) int32 each."""
        found = {"positions": self.positions, "steps": self.steps}
        found |= {"batch": self.batch} if self.plan.batched else {}
        empty = np.zeros(0, np.int32)
        return {n: np.concatenate([empty, *of]).astype(np.int32) for n, of in found.items()}

    def beside(self) -> dict[str, Array]:
        """What else the trace keeps, by name."""
        return {}

    def arrays(self) -> dict[str, Array]:
        """A trace's arrays: all rows, and the keys and values that each cache holds in the end.

        Those of one sequence are [K, S, D], those of a batch [B, K, S, D].
        """
        logits = np.concatenate(self.rows) if self.rows else self.nothing()
        held = {name: host(array) for name, array in self.held_rows()}
        return {"logits": logits} | self.numbers() | held | self.beside()

    def write(self, path: Path, meta: Meta) -> None:
        """The trace file of `arrays`, which are not all made in memory first.

        The rows are gone afterwards.
        """
        import mlx.core as mx

        rows, small = self.rows or [self.nothing()], self.numbers() | self.beside()
        width = sum(map(len, rows)), rows[0].shape[1]
        shapes: dict[str, Any] = {"logits": (np.result_type(*rows).type, width)}
        shapes |= {name: (array.dtype.type, array.shape) for name, array in small.items()}
        for name, array in self.held_rows():
            kind = np.float64 if array.dtype == mx.float64 else np.float32
            shapes[name] = kind, tuple(array.shape)
        with writer(path, meta, shapes) as out:
            for name, array in small.items():
                out.arrays[name][...] = array
            first = 0
            while rows:
                some = rows.pop(0)
                out.arrays["logits"][first : first + len(some)] = some
                first += len(some)
            for name, array in self.held_rows():
                put(out.arrays[name], array)
                release(out.arrays[name])
            out.finish(meta.to_json())

    def held_rows(self) -> Iterator[tuple[str, Any]]:
        """Each layer's keys and values, as the engine's arrays."""
        for name, i, *pair in self.kept():
            for kind, array in zip(("keys", "values"), pair, strict=True):
                yield f"kv/{name}/{i:03d}/{kind}", array if self.batches[name] else array[0]

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
        require(step, self.caches)
        match step:
            case New(name, use_kv_cache):
                self.new(name, use_kv_cache)
                self.batches[name], self.padding[name] = 0, ()
            case Call(name, _, index_pos):
                self.batches[name] = len(step.batch) if step.batched else 0
                self._call(index, name, step.batch, index_pos)
            case Greedy():
                return self._greedy(index, step)
            case Clone(source, target):
                self.clone(source, target)
                self._same_rows(source, target)
            case Crop(name, length):
                self.crop(name, length)
            case Trim(name, tokens):
                self.trim(name, tokens)
            case Reset(name):
                self.reset(name)
                self.padding[name] = ()
            case Pad(name, left):
                self.pad(name, left)
                self.padding[name] = left
            case Reload(name):
                self.reload(name)
            case Recall(source, target, length):
                self.recall(source, target, length)
                self._same_rows(source, target)
            case Fail(name, tokens):
                self.fail(name, tokens)
        return None

    def _same_rows(self, source: str, target: str) -> None:
        """`target` holds what `source` does, of as many rows."""
        self.batches[target] = self.batches[source]
        self.padding[target] = self.padding.get(source, ())

    def _call(self, index: int, name: str, batch: Batch, index_pos: int | None) -> Array:
        """One call, whose kept rows go into the trace; the last of its logits."""
        held, width = self.held(name), len(batch[0])
        places = [position - held for position in self.plan.kept_of(held, width)]
        begun = time.perf_counter()
        logits = self.forward(name, batch, index_pos, places or [width - 1])
        self.seconds += time.perf_counter() - begun
        rows = logits[:, : len(places)].reshape(-1, logits.shape[-1])
        self.rows.append(rows)
        left = np.array(self.padding.get(name) or (0,) * len(batch), np.int32)
        at = held + np.array(places, np.int32) - left[:, None]
        self.positions.append(at.ravel())
        self.batch.append(np.repeat(np.arange(len(batch)), len(places)))
        self.steps.append(np.full(len(rows), index))
        newest: Array = logits[-1, -1]
        return newest

    def _greedy(self, index: int, step: Greedy) -> list[int]:
        chosen: list[int] = []
        tokens, position = step.tokens, step.index_pos
        for calls in range(1, step.n + 1):
            # numpy takes the first of equals, which is the lowest id.
            chosen.append(int(np.argmax(self._call(index, step.cache, (tokens,), position))))
            if position is not None and step.index_pos is not None:
                position = {
                    "right": position + len(tokens),
                    "zero": position,
                    "by_calls": step.index_pos + calls,
                }[step.advance]
            tokens = (chosen[-1],)
        return chosen


def runs_of(job: Job) -> list[Run]:
    """The job's plans, then those that are to be repeated."""
    runs = [(plan, job.trace(plan), 0) for plan in job.plans]
    return runs + [(plan, job.repeated(plan), 1) for plan in job.plans if plan.name in job.repeat]


def follow(job: Job, label: str, begin: Callable[[Plan], tuple[PlanRunner, Meta]]) -> None:
    """Runs each of the job's plans on the runner that `begin` makes for it, and writes its trace.

    Then those that are to be repeated. Writes the seconds spent in forward calls too.
    """
    seconds, runs = 0.0, runs_of(job)
    with bar(label, sum(len(plan.steps) for plan, _, _ in runs)) as advance:
        for plan, path, repeat in runs:
            with job.alone(plan):
                runner, meta = begin(plan)
                runner.run(advance)
                seconds += runner.seconds
                environment = dict(meta.environment) | runner.says()
                made = replace(meta, plan=plan, outcomes=runner.outcomes, repeat=repeat)
                runner.write(path, replace(made, environment=environment))
    job.write_seconds(seconds)


def dither(module: Any, seed: int) -> None:
    """Multiplies an embedding's weight (V, E) by the seed's `factors`; 0: does nothing.

    A Refusal for packed weights, which cannot change by so little; those of half precision do not,
    since they are rounded to it again.
    """
    import mlx.core as mx

    if not seed:
        return
    weight = module.weight
    if not mx.issubdtype(weight.dtype, mx.floating):
        raise Refusal("the embedding is packed, expected floats", where="dither")
    with mx.stream(mx.cpu):
        by = mx.array(factors(weight.shape, seed), mx.float64)
        module.weight = (weight.astype(mx.float64) * by).astype(weight.dtype)


def host(array: Any) -> Array:
    """A numpy copy of an MLX array, in float64 where it is, else in float32.

    numpy has no bfloat16, and float32 holds every half-precision value exactly.
    """
    return np.array(_plain(array))


def seen(array: Any) -> Array:
    """As `host`, but MLX's own memory where it has that dtype."""
    return np.asarray(_plain(array))


def put(target: Array, array: Any) -> None:
    """Fills a mapped array with an MLX array, without a copy in between."""
    target[...] = seen(array)


def _plain(array: Any) -> Any:
    import mlx.core as mx

    return array if array.dtype in (mx.float32, mx.float64) else array.astype(mx.float32)

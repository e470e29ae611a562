"""The engine that is judged follows the plans, in processes of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxkv.commands.compare.ask import Answer, Request
from mlxkv.engines import machine, own, process
from mlxkv.engines.job import Job
from mlxkv.engines.process import Finished
from mlxkv.judge.case import Case
from oracle.formats import trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan
from oracle.formats.trace import Trace
from oracle.model.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Engine:
    """Whose model is judged: its name, the module of its process, and of a person's own the
    FILE.py:function.
    """

    name: str
    module: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Runs:
    """Everything that a verdict on one sequence is made from.

    `arithmetic` are the engine's traces in the run's dtype, `algebra` the port's in float64. `took`
    is what each process took, None where its result was there already.
    """

    engine: str
    folder: Path
    case: Case
    checkpoint: Checkpoint
    arithmetic: tuple[Trace, ...]
    algebra: tuple[Trace, ...]
    took: dict[str, Finished | None]

    @property
    def environments(self) -> dict[str, dict[str, Any]]:
        """What the engine and the oracle ran on, and with."""
        return {self.engine: self.environment, "oracle": self.case.manifest.surroundings}

    @property
    def environment(self) -> dict[str, Any]:
        return self.arithmetic[0].meta.environment


def find(request: Request) -> Engine:
    """The engine that a request names; a Refusal where it could not run here."""
    machine.require_device(request.device)
    if request.engine == "port":
        return Engine("port", process.PORT)
    if request.engine != "mlx-lm":
        source = own.find(request.engine)
        return Engine(source.name, process.OWN, f"{source.file}:{source.function}")
    if not machine.has("mlx_lm"):
        raise Refusal("mlx-lm is not installed: pip install 'mlxkv[port]'")
    return Engine("mlx-lm", process.MLX_LM)


@contextmanager
def follow(engine: Engine, answers: Sequence[Answer], device: str) -> Iterator[tuple[Runs, ...]]:
    """The engine's runs over each answer's plans; its weights are loaded once for all of them.

    The traces are removed when the block ends.
    """
    with process.scratch() as room:
        jobs = _jobs(engine, answers, room / "run", device)
        with ExitStack() as stack:
            # The second says nothing unless it fails.
            running = {
                name: stack.enter_context(job.begin(engine.module, aside=name != engine.name))
                for name, job in jobs.items()
            }
            took = {name: job.end(running[name]) for name, job in jobs.items()}
        arithmetic, *exact = [_traces(job, answers) for job in jobs.values()]
        yield tuple(
            Runs(
                engine=engine.name,
                folder=answer.folder,
                case=answer.case,
                checkpoint=answer.checkpoint,
                arithmetic=arithmetic[i],
                algebra=exact[0][i] if exact else (),
                took={"oracle": answer.made, **took},
            )
            for i, answer in enumerate(answers)
        )


def _jobs(engine: Engine, answers: Sequence[Answer], out: Path, device: str) -> dict[str, Job]:
    """The engine's in the run's dtype, and the port's in float64 too.

    Of another's model float64 would prove nothing: MLX's own functions, which it may call, are only
    float32-accurate. The port's two run side by side: one thread does nearly as much as two where
    memory is the limit, and a GPU is not in the CPU's way.
    """
    checkpoint, dtype = answers[0].checkpoint, answers[0].case.manifest.dtype
    folder, plans = str(checkpoint.folder), _apart([answer.plans for answer in answers])
    without, custom = checkpoint.without, engine.source
    one = Job(folder, plans, out, dtype, dtype, device, ignore_keys=without, custom=custom)
    if engine.name != "port":
        return {engine.name: one}
    one = replace(one, threads=max(1, (os.cpu_count() or 1) // 2))
    exact = replace(one, out=out.with_name("float64"), dtype="float64", device="cpu")
    return {"port": one, "port float64": exact}


def _apart(plans: Sequence[tuple[Plan, ...]]) -> tuple[Plan, ...]:
    """The plans of one job, whose names are files' names: those of several sequences get its number
    before theirs.
    """
    if len(plans) == 1:
        return plans[0]
    return tuple(
        replace(plan, name=f"{i}-{plan.name}") for i, of in enumerate(plans) for plan in of
    )


def _traces(job: Job, answers: Sequence[Answer]) -> list[tuple[Trace, ...]]:
    """Of each sequence the traces, under the plans' own names."""
    made = iter([trace.read(job.trace(plan)) for plan in job.plans])
    return [tuple(_named(next(made), plan.name) for plan in answer.plans) for answer in answers]


def _named(made: Trace, name: str) -> Trace:
    return replace(made, meta=replace(made.meta, plan=replace(made.meta.plan, name=name)))

"""The engine that is judged follows the plans, in processes of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxkv.commands.compare.ask import Answer, Answers, Request
from mlxkv.engines import lanes, launch, machine, own, process
from mlxkv.engines.job import Job, longest_first, repeated
from mlxkv.engines.kinds import Kind
from mlxkv.engines.lanes import Lane, Room
from mlxkv.engines.process import Finished
from mlxkv.judge.assign import Assigned, assign
from mlxkv.judge.case import Case
from oracle.formats import trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan, fewer_prefixes
from oracle.formats.trace import Trace
from oracle.model.checkpoint import Checkpoint

_SHARED = ("probe-full", "probe-chunked")
"""The probe's plans, which begin with the same tokens. In float64 they are computed once: on two
cores that lane ends last, and on SmolLM2, in seconds of CPU time of one thread, the judged plans
take 8.4, the probe's full 2.3 and its chunked 3.5, of which its first call is most."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Whose model is judged: its name, the module of its process, of a person's own the
    FILE.py:function, the cache that it runs on if not its usual one, and where: on a device, and in
    `ranks` processes, or on the hosts in `hostfile`, that share the model. With `several` a
    sequence that it cannot follow does not end the others; of ranks one that fails ends all.
    """

    name: str
    module: str
    source: str = ""
    cache: Kind | None = None
    device: str = "auto"
    ranks: int = 0
    hostfile: str = ""
    several: bool = False


@dataclass(frozen=True, slots=True)
class Probe:
    """The runs over the model's probe, as those of `Runs`."""

    case: Case
    arithmetic: tuple[Trace, ...]
    algebra: tuple[Trace, ...]


@dataclass(frozen=True, slots=True)
class Runs:
    """Everything that a verdict on one sequence is made from.

    `arithmetic` are the engine's traces in the run's dtype, `algebra` the port's in float64, and
    `repeats` those of the plan that was followed a second time. `took` is what each process took,
    None where its result was there already. `cache` is the one that was named, if one was.
    `refused` says why the sequence could not be followed, and then there are no traces of it.
    """

    engine: str
    folder: Path
    case: Case
    checkpoint: Checkpoint
    arithmetic: tuple[Trace, ...]
    algebra: tuple[Trace, ...]
    repeats: tuple[Trace, ...]
    probe: Probe | None
    took: dict[str, Finished | None]
    cache: Kind | None = None
    refused: str = ""

    @property
    def assigned(self) -> Assigned:
        """Every trace under its plan's name, for the judge."""
        arithmetic, algebra = [*self.arithmetic, *self.repeats], list(self.algebra)
        if self.probe is None:
            return assign(self.case, arithmetic, algebra=algebra)
        arithmetic += self.probe.arithmetic
        algebra += self.probe.algebra
        return assign(self.case, arithmetic, algebra=algebra, probe=self.probe.case)

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
    _require_ranks(request)
    hosts = str(request.hostfile.absolute()) if request.hostfile else ""
    where: dict[str, Any] = {"device": request.device, "hostfile": hosts}
    where["ranks"] = request.ranks or 0
    if request.engine == "port":
        return Engine("port", process.PORT, **where)
    if request.engine != "mlx-lm":
        source = own.find(request.engine)
        return Engine(source.name, process.OWN, f"{source.file}:{source.function}", **where)
    machine.require_mlx_lm()
    if (cache := request.cache) is None:
        return Engine("mlx-lm", process.MLX_LM, **where)
    return Engine(f"mlx-lm with {cache.name}", process.MLX_LM, cache=cache, **where)


def _require_ranks(request: Request) -> None:
    """Refuses what cannot be run on several ranks."""
    if not request.shared_by:
        return
    if request.ranks and request.hostfile:
        what = "expected one of them, as a hostfile has a host for each rank"
        raise Refusal(what, where="--ranks and --hostfile", remedy="leave one out")
    if request.engine not in ("port", "mlx-lm"):
        what = f"{request.engine} is not known to have shard(group), expected port or mlx-lm"
        raise Refusal(what, where="--ranks", remedy="judge it in one process")
    launch.command()


@contextmanager
def follow(engine: Engine, answers: Answers) -> Iterator[tuple[Runs, ...]]:
    """The engine's runs over each answer's plans; its weights are loaded once for all of them.

    The traces are removed when the block ends, or if it breaks off, kept for the next run.
    """
    with lanes.room() as room:
        yield followed(engine, answers, room)


def followed(
    engine: Engine,
    answers: Answers,
    room: Room,
    *,
    part: str = "",
    probe: Probe | None = None,
) -> tuple[Runs, ...]:
    """The runs over each answer's plans, whose traces lie in the room; `probe` was followed before.

    `part` tells the folders of several from one another.
    """
    found = lanes_of(engine, answers, room.folder, part=part)
    took = lanes.follow(found, room)
    jobs = [lane.job for lane in found.values()]
    return _runs(engine, answers, jobs, took, probe)


def probed(engine: Engine, answers: Answers, room: Room) -> Probe | None:
    """The runs over the probe alone; None where there is none."""
    if answers.probe is None:
        return None
    found = lanes_of(engine, Answers((), answers.probe), room.folder, part="-probe")
    lanes.follow(found, room)
    return _probe(answers.probe, [lane.job for lane in found.values()], _name(engine))


def _name(engine: Engine) -> str | None:
    """What the engine's traces are said to be of, if not what they say."""
    return engine.name if engine.cache is not None else None


def _probe(answer: Answer, jobs: Sequence[Job], named: str | None) -> Probe:
    plans = _named([answer.plans], "probe-")[0]
    if refused := _refused(jobs, plans):
        raise Refusal(refused, where="the model's probe", remedy="--quick leaves it out")
    arithmetic, *algebra = (_traces(job, plans, named) for job in jobs)
    return Probe(answer.case, arithmetic, algebra[0] if algebra else ())


def _runs(
    engine: Engine,
    answers: Answers,
    jobs: Sequence[Job],
    took: Mapping[str, Finished | None],
    probe: Probe | None,
) -> tuple[Runs, ...]:
    """What the jobs left, sequence by sequence; the second job is the port's in float64."""
    plans, named = _named([of.plans for of in answers.each]), _name(engine)
    refused = [_refused(jobs, some) for some in plans]
    told = [[] if why else some for some, why in zip(plans, refused, strict=True)]
    each = [[_traces(job, some, named) for some in told] for job in jobs]
    algebra = each[1] if len(jobs) > 1 else [()] * len(plans)
    if answers.probe is not None:
        probe = _probe(answers.probe, jobs, named)
    return tuple(
        Runs(
            engine=engine.name,
            folder=answer.folder,
            case=answer.case,
            checkpoint=answer.checkpoint,
            arithmetic=each[0][i],
            algebra=algebra[i],
            repeats=_repeats(jobs[0], told[i], named),
            probe=probe,
            took={"oracle": answer.made, **took},
            cache=engine.cache,
            refused=refused[i],
        )
        for i, answer in enumerate(answers.each)
    )


def lanes_of(engine: Engine, answers: Answers, out: Path, *, part: str = "") -> dict[str, Lane]:
    """The lanes over answers' plans, by the names that `took` gives them; see `of_plans`."""
    first = (*answers.each, *([answers.probe] if answers.probe else []))[0]
    plans = [of.plans for of in answers.each]
    probe = answers.probe.plans if answers.probe is not None else ()
    dtype = first.case.manifest.dtype
    return of_plans(engine, first.checkpoint, plans, probe, out, dtype, part=part)


def of_plans(
    engine: Engine,
    checkpoint: Checkpoint,
    each: Sequence[Sequence[Plan]],
    probe: Sequence[Plan],
    out: Path,
    dtype: str,
    *,
    part: str = "",
) -> dict[str, Lane]:
    """The engine's lane in the run's dtype, and the port's in float64 too.

    Of another's model float64 would prove nothing: MLX's own functions, which it may call, are only
    float32-accurate. The port's two share the cores where they run side by side: one thread does
    nearly as much as two where memory is the limit, and a GPU is not in the CPU's way.
    """
    judged = _named(each)
    asked = [plan for some in (*judged, *_named([probe], "probe-")) for plan, _ in some]
    one = Job.on(
        checkpoint,
        asked,
        out / f"run{part}",
        dtype=dtype,
        device=engine.device,
        ranks=engine.ranks,
        hostfile=engine.hostfile,
        custom=engine.source,
        caches={plan.name: engine.cache.text for plan in asked} if engine.cache else {},
        repeat=tuple(repeated(plan for plan, _ in some).name for some in judged),
        several=engine.several and not (engine.ranks or engine.hostfile),
    )
    jobs = {engine.name: one}
    if engine.name == "port":
        jobs["port float64"] = _exact(one, out / f"float64{part}")
    found = {name: Lane(job, engine.module, checkpoint) for name, job in jobs.items()}
    if len(found) == 1 or not lanes.beside(found):
        return found
    half = max(1, (os.cpu_count() or 1) // 2)
    return {name: replace(of, job=replace(of.job, threads=half)) for name, of in found.items()}


def _exact(one: Job, out: Path) -> Job:
    """The same in float64, of the growing prefixes three.

    In one process, as what it proves of the arithmetic is the same on every rank.
    """
    return replace(
        one,
        plans=longest_first(map(fewer_prefixes, one.plans)),
        shared=_SHARED,
        out=out,
        dtype="float64",
        device="cpu",
        repeat=(),
        ranks=0,
        hostfile="",
    )


_Named = tuple[Plan, str]
"""A plan under the name that it has in a job, which becomes a file's, and its own name."""


def _named(each: Sequence[Sequence[Plan]], prefix: str = "") -> list[list[_Named]]:
    """The plans of each sequence, by names that differ; with `prefix` those of one."""
    fronts = [prefix] if len(each) == 1 else [f"{i}-" for i in range(len(each))]
    return [
        [(replace(plan, name=f"{front}{plan.name}"), plan.name) for plan in plans]
        for front, plans in zip(fronts, each, strict=True)
    ]


def _refused(jobs: Sequence[Job], plans: Sequence[_Named]) -> str:
    """Why the first of these plans that could not be followed could not; "" if all could."""
    found = (
        f"plan {name}: {why}" for job in jobs for plan, name in plans if (why := job.refused(plan))
    )
    return next(found, "")


def _traces(job: Job, plans: Sequence[_Named], engine: str | None) -> tuple[Trace, ...]:
    """The job's traces of these plans, under the plans' own names."""
    followed = {plan.name for plan in job.plans}
    named = [(job.trace(plan), name) for plan, name in plans if plan.name in followed]
    return tuple(_read(path, name, engine) for path, name in named)


def _repeats(job: Job, plans: Sequence[_Named], engine: str | None) -> tuple[Trace, ...]:
    """Those of the plans that were followed twice."""
    again = [(plan, name) for plan, name in plans if plan.name in job.repeat]
    return tuple(_read(job.repeated(plan), name, engine) for plan, name in again)


def _read(path: Path, name: str, engine: str | None) -> Trace:
    """A trace under another name of its plan, and of its `engine` where there is one, without what
    its caches said of themselves.
    """
    made = trace.read(path)
    said = {key: value for key, value in made.meta.environment.items() if key != trace.CACHES}
    plan = replace(made.meta.plan, name=name)
    meta = replace(made.meta, plan=plan, environment=said, engine=engine or made.meta.engine)
    return replace(made, meta=meta)

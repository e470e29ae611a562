"""`mlxkv compare --dry-run`: the plans, and what a comparison would take. Nothing runs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxkv.commands.compare.ask import Request, asking, given
from mlxkv.commands.compare.batches import grouped
from mlxkv.commands.compare.follow import Engine, find, of_plans
from mlxkv.engines import estimate, lanes, machine, oracle
from mlxkv.engines.lanes import Lane
from mlxkv.engines.progress import about
from mlxkv.report.publish import Report
from mlxkv.report.text import columns, pretty, several
from oracle.formats.plan import Plan
from oracle.formats.questions import Estimate
from oracle.model import measured
from oracle.model.cache_folder import part
from oracle.model.checkpoint import Checkpoint

FORMAT = "mlxkv-dry-run/1"
_PLANS = ("plan", "calls", "tokens", "rows")
_PROCESSES = ("process", "time", "memory", "disk")


@dataclass(frozen=True, slots=True)
class Planned:
    """What would be followed: each sequence's plans and the probe's, by name and once each.

    `kept` says of each sequence, and of the probe last, whether the oracle's answer is there; what
    making the others takes is `made`, None where there is nothing to make.
    """

    checkpoint: Checkpoint
    dtype: str
    names: tuple[str, ...]
    each: tuple[tuple[Plan, ...], ...]
    probe: tuple[Plan, ...]
    kept: tuple[bool, ...]
    made: Estimate | None


@dataclass(frozen=True, slots=True)
class Process:
    """About what a process takes. Its memory is that of no file. `measured`: its time is by the
    last such one on this machine, and not by constants of two cores alone.
    """

    name: str
    seconds: float
    memory_bytes: int
    disk_bytes: int
    measured: bool


@dataclass(frozen=True, slots=True)
class Dry:
    """All that a dry run says; `batches` are those in which the engine follows the sequences."""

    engine: str
    planned: Planned
    processes: tuple[Process, ...]
    side_by_side: bool
    batches: int
    free_bytes: int

    @property
    def seconds(self) -> float:
        made, *of_engine = (one.seconds for one in self.processes)
        return made + (max(of_engine) if self.side_by_side else sum(of_engine))

    @property
    def memory_bytes(self) -> int:
        """The most at one time."""
        made, *of_engine = (one.memory_bytes for one in self.processes)
        return max(made, sum(of_engine) if self.side_by_side else max(of_engine))

    @property
    def disk_bytes(self) -> int:
        return sum(one.disk_bytes for one in self.processes)

    def to_json(self) -> dict[str, Any]:
        of = self.planned
        named = zip([*of.names, "probe"], [*of.each, of.probe], strict=True)
        named_kept = zip(named, [*of.kept, True], strict=False)
        return {
            "format": FORMAT,
            "engine": self.engine,
            "model": of.checkpoint.name,
            "fingerprint": of.checkpoint.fingerprint,
            "dtype": of.dtype,
            "sequences": [
                {"name": name, "kept": kept, "plans": [_facts(plan) for plan in plans]}
                for (name, plans), kept in named_kept
                if plans
            ],
            "processes": [
                {name: getattr(one, name) for name in Process.__slots__} for one in self.processes
            ],
            **{name: getattr(self, name) for name in ("side_by_side", "batches")},
            **{name: getattr(self, name) for name in ("seconds", "memory_bytes", "disk_bytes")},
            "machine_bytes": machine.memory_bytes(),
            "free_bytes": self.free_bytes,
        }


def report(requests: Sequence[Request], *, out: Path, command: str) -> Report:
    """The plans and the estimate of one comparison over the requests; no file is written."""
    found = dry(requests)
    return Report({}, console(found), pretty(found.to_json()), 0)


def dry(requests: Sequence[Request]) -> Dry:
    """What would be run; a Refusal where a comparison would refuse before it runs anything."""
    first = requests[0]
    engine = find(first)
    planned = _planned(requests)
    found, sizes = _lanes(engine, planned)
    parts, free = grouped(sizes), shutil.disk_usage(part("runs")).free
    made = planned.made
    answers = Process("oracle", 0.0, 0, 0, False)
    if made is not None:
        took = made.seconds, made.memory_bytes, made.disk_bytes, made.measured
        answers = Process("oracle", *took)
    share = max(sum(sizes[i] for i in some) for some in parts) / max(1, sum(sizes))
    engines = [_process(name, lane, share) for name, lane in found.items()]
    together = lanes.beside(found)
    return Dry(engine.name, planned, (answers, *engines), together, len(parts), free)


def _planned(requests: Sequence[Request]) -> Planned:
    first = requests[0]
    names = tuple(one.name or "sequence" for one in requests)
    if first.oracle is not None:
        answers = given(first, first.oracle)
        (answer,), its = answers.each, answers.probe.plans if answers.probe is not None else ()
        dtype, kept = answer.case.manifest.dtype, (True,) * (1 + bool(its))
        return Planned(answer.checkpoint, dtype, names, (answer.plans,), its, kept, None)
    asked = asking(requests)
    made, there = oracle.expected(asked.questions, asked.probe)
    missing = [True] * len(there) if first.fresh else [not one for one in there]
    plans = [_once(some) for some in made.plans]
    probe = plans.pop() if asked.probe is not None else ()
    dtype, kept = asked.questions[0].dtype, tuple(not one for one in missing)
    todo = made if any(missing) else None
    return Planned(asked.checkpoint, dtype, names, tuple(plans), probe, kept, todo)


def _once(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    return tuple({plan.digest: plan for plan in plans}.values())


def _lanes(engine: Engine, planned: Planned) -> tuple[dict[str, Lane], list[int]]:
    """The lanes over all sequences, and of each sequence the bytes of its traces."""
    checkpoint, dtype = planned.checkpoint, planned.dtype

    def of(each: Sequence[Sequence[Plan]], probe: Sequence[Plan]) -> dict[str, Lane]:
        return of_plans(engine, checkpoint, each, probe, Path(), dtype)

    sizes = [
        sum(estimate.disk_of(lane.job, checkpoint) for lane in of([plans], ()).values())
        for plans in planned.each
    ]
    return of(planned.each, planned.probe), sizes


def _process(name: str, lane: Lane, share: float) -> Process:
    """A lane's; its traces lie on the disk for the largest batch, a `share` of all, at a time."""
    size = round(share * estimate.disk_of(lane.job, lane.checkpoint))
    return Process(name, lane.seconds, lane.bytes, size, measured.known(lane.key))


def console(found: Dry) -> str:
    """What `compare --dry-run` prints."""
    of = found.planned
    n = len(of.each)
    whose = f"{n} prompts" if n > 1 else f"{max(plan.longest for plan in of.each[0])} tokens"
    rows = [_row(name, plans) for name, plans in _by_name(of).items()]
    lines = [
        f"dry run, nothing was run: {found.engine} on {of.checkpoint.name}, {of.dtype}, {whose}",
        "",
        *columns(_PLANS, rows, left={0}),
        "",
        *columns(_PROCESSES, [_cells(one) for one in found.processes], left={0}),
        "",
        *_words(found),
    ]
    return "\n".join(lines) + "\n"


def _words(found: Dry) -> list[str]:
    made, *engines = found.processes
    kept, n = sum(found.planned.kept), len(found.planned.kept)
    lines = [f"oracle: {kept} of {several(n, 'answer')} kept"]
    if len(engines) > 1:
        fit = "fit in half of" if found.side_by_side else "do not fit in half of"
        how = "side by side" if found.side_by_side else "one after the other"
        whole = _size(machine.memory_bytes())
        lines.append(f"{' and '.join(one.name for one in engines)}: {how}, as they {fit} {whole}")
    if found.batches > 1:
        lines.append(f"the engine follows the prompts in {found.batches} batches")
    known = any(one.measured for one in (made, *engines))
    by = "as the last run on this machine was" if known else "by what two cores of one machine took"
    short = ", too little" if found.disk_bytes > found.free_bytes else ""
    lines.append(f"time: about {about(found.seconds)}, {by}")
    lines.append(f"memory: {_size(found.memory_bytes)} at once, that of files not counted")
    lines.append(f"disk: {_size(found.disk_bytes)}; {_size(found.free_bytes)} are free{short}")
    return lines


def _by_name(of: Planned) -> Mapping[str, list[Plan]]:
    """The plans of all sequences under one name, and the probe's."""
    found: dict[str, list[Plan]] = {}
    for plans in of.each:
        for plan in plans:
            found.setdefault(plan.name, []).append(plan)
    return found | {f"probe {plan.name}": [plan] for plan in of.probe}


def _row(name: str, plans: Sequence[Plan]) -> tuple[str, ...]:
    facts = [_facts(plan) for plan in plans]
    sums = (sum(one[key] for one in facts) for key in _PLANS[1:])
    return name, *(f"{number:,}" for number in sums)


def _facts(plan: Plan) -> dict[str, Any]:
    """A plan's calls, the tokens fed in all, and the rows of logits kept."""
    calls = list(plan.calls())
    return {
        "plan": plan.name,
        "calls": len(calls),
        "tokens": sum(call.fed for call in calls),
        "rows": sum(len(plan.kept(call)) for call in calls),
    }


def _cells(one: Process) -> tuple[str, ...]:
    if not one.seconds:
        return one.name, "-", "-", "-"
    return one.name, about(one.seconds), _size(one.memory_bytes), _size(one.disk_bytes)


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{max(1, round(count / 1e6))} MB"

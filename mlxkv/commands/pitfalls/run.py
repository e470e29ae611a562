"""`mlxkv pitfalls`: every scenario on every system, each in a process of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mlxkv.commands.pitfalls import ask, behaviour, page, scenarios
from mlxkv.commands.pitfalls.ask import Request as Request
from mlxkv.commands.pitfalls.behaviour import Matrix, Right, Seen
from mlxkv.commands.pitfalls.scenarios import NO, OTHER_CACHES, SYSTEMS, Scenario
from mlxkv.engines import job, machine, oracle, process
from mlxkv.engines.progress import announce, say, steps
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import disk, trace
from oracle.formats.plan import Plan
from oracle.model import tokenizer
from oracle.model.checkpoint import Checkpoint
from oracle.model.default import is_original

CONTEXT, BRANCHES, BRANCH_STEPS = 2048, 8, 16
"""Tokens whose branches are measured in memory, where the model has twice as many positions; how
many branches, and the tokens that each of them decodes."""
SECONDS, EACH = 30.0, 7.5e-7
"""About what all of it takes, and more for each parameter of the model: 216 s of CPU time for the
default model's 134,515,008, on 1.5 of two cores."""


def report(request: Request, *, out: Path, command: str) -> Report:
    matrix = run(request)
    files = matrix_files(matrix, commands=[command])
    text = page.console(matrix, report=str(out / "pitfalls.md"))
    return Report(files, text, files["pitfalls.json"], matrix.exit_code)


def matrix_files(matrix: Matrix, *, commands: Sequence[str]) -> dict[str, str]:
    text = page.markdown(matrix, commands=commands)
    return {"pitfalls.json": pretty(matrix.to_json()), "pitfalls.md": text}


def run(request: Request) -> Matrix:
    """Asks the oracle how the talks should go, runs all systems, and looks at what came."""
    machine.require_device(request.device)
    machine.require_mlx_lm()
    oracle.require_torch()
    checkpoint = request.checkpoint(steps())
    draft = ask.setting(request, checkpoint)
    systems = f"{len(scenarios.TABLE)} scenarios on {len(SYSTEMS)} systems"
    announce(f"pitfalls: {systems}, {checkpoint.name}", SECONDS + EACH * checkpoint.parameters)
    rights = ask.rights(request, checkpoint, scenarios.talks(draft))
    setting = ask.answered(draft, rights)
    made = scenarios.scenarios(setting)
    with process.scratch() as room:
        traces = _traces(request, checkpoint, made, room)
        words = tokenizer.load(checkpoint.folder)
        return Matrix(
            model=checkpoint.name,
            source=checkpoint.source,
            fingerprint=checkpoint.fingerprint,
            scenarios=tuple(made),
            seen=_seen(made, traces, rights),
            rights=rights,
            environments={who: _surroundings(traces["greedy", who]) for who in SYSTEMS},
            branches=_branches(request, checkpoint, room),
            comparable=is_original(checkpoint),
            text=lambda before, ids: "".join(words.stream(before, ids)) if words else "",
        )


def _surroundings(found: trace.Trace) -> dict[str, Any]:
    """What a system ran on and with, whatever its caches said of themselves in one scenario."""
    environment = found.meta.environment
    return {name: value for name, value in environment.items() if name != trace.CACHES}


def _traces(
    request: Request, checkpoint: Checkpoint, made: Sequence[Scenario], room: Path
) -> dict[tuple[str, str], trace.Trace]:
    """By scenario and system; transformers' process runs beside the others.

    mlx-lm's, which has most to do, runs beside the port's where all fit into memory. Then each has
    half of the cores: decoding waits for memory, where one thread does nearly as much as two.
    """
    found = {}
    beside = machine.holds_together(3 * 4 * checkpoint.parameters)  # in float32
    threads = max(1, (os.cpu_count() or 1) // 2) if beside else None
    jobs = _jobs(request, checkpoint, made, room, threads=threads)
    with ExitStack() as stack:
        asked = _plans(made, "T")
        other = stack.enter_context(transformers(checkpoint, asked.values(), room / "T"))
        aside = {
            engine: stack.enter_context(one.begin(module, aside=True))
            for engine, (module, one) in jobs.items()
            if beside and engine == "L"
        }
        for engine, (module, one) in jobs.items():
            say(f"{SYSTEMS[engine]}: {len(one.plans)} scenarios")
            running = aside.get(engine) or stack.enter_context(one.begin(module))
            one.end(running)
            for key, plan in _plans(made, engine).items():
                found[key] = trace.read(one.trace(plan))
        other.wait()
        for key, plan in asked.items():
            found[key] = trace.read(room / "T" / f"{plan.name}.safetensors")
    return found


def _plans(made: Sequence[Scenario], engine: str) -> dict[tuple[str, str], Plan]:
    """What one system's engine runs, by scenario and system; mlx-lm's on its other caches too."""
    systems = ("L", *OTHER_CACHES) if engine == "L" else (engine,)
    return {
        (s.name, system): plan
        for s in made
        for system in systems
        if isinstance(plan := s.plans.get(system), Plan)
    }


def _jobs(
    request: Request,
    checkpoint: Checkpoint,
    made: Sequence[Scenario],
    room: Path,
    *,
    threads: int | None,
) -> dict[str, tuple[str, job.Job]]:
    def asked(engine: str, **more: Any) -> job.Job:
        (room / engine).mkdir()
        plans = tuple(_plans(made, engine).values())
        return _job(request, checkpoint, plans, room / engine, threads=threads, **more)

    dtypes = {s.name: s.cache_dtype for s in made if s.cache_dtype}
    # A RotatingKVCache is made for a length; make_prompt_cache keeps 4.
    classes = {"RotatingKVCache": f"RotatingKVCache:size={checkpoint.max_positions},keep=4"}
    others = {
        plan.name: classes.get(system, system)
        for (_, system), plan in _plans(made, "L").items()
        if system in OTHER_CACHES
    }
    return {
        "C": (process.PORT, asked("C", guarded=False, caches=dtypes, masks=True)),
        "G": (process.PORT, asked("G", caches=dtypes, masks=True)),
        "L": (process.MLX_LM, asked("L", caches=others)),
    }


def _job(
    request: Request, checkpoint: Checkpoint, plans: tuple[Plan, ...], out: Path, **more: Any
) -> job.Job:
    return job.Job.on(checkpoint, plans, out, dtype="float32", device=request.device, **more)


def transformers(
    checkpoint: Checkpoint, plans: Iterable[Plan], out: Path, more: Sequence[str] = ()
) -> process.Process:
    """The process in which transformers follows plans, with `more` options; traces go to `out`."""
    out.mkdir(exist_ok=True)
    arguments = ["oracle", "follow", checkpoint.source, "--out", str(out), *more]
    if checkpoint.revision:
        arguments += ["--revision", checkpoint.revision]
    arguments += [f"--ignore-key={key}" for key in checkpoint.without]
    for plan in plans:
        path = out / f"{plan.name}.json"
        disk.write_text(path, json.dumps(plan.to_json()))
        arguments += ["--plan", str(path)]
    return process.Process(arguments, stderr=out / "stderr.txt")


def _seen(
    made: Sequence[Scenario],
    traces: Mapping[tuple[str, str], trace.Trace],
    rights: Mapping[str, Right],
) -> dict[tuple[str, str], Seen]:
    seen = {}
    for one in made:
        for system, expected in one.expected.items():
            key, plan = (one.name, system), one.plans[system]
            if isinstance(plan, str):
                seen[key] = Seen(NO, expected, reason=plan)
            else:
                seen[key] = behaviour.watch(one, expected, traces[key], rights)
    return seen


def _branches(request: Request, checkpoint: Checkpoint, room: Path) -> dict[str, Any]:
    """What branches of one prefix cost in memory, at CONTEXT tokens or at half the model's."""
    context = min(CONTEXT, checkpoint.max_positions // 2)
    say(f"{SYSTEMS['G']}: the memory of branches at {context} tokens")
    # Bytes are counted here and no seconds. Threads that wait for one another in the prefix's long
    # calls took four times the CPU time on a busy machine.
    asked = _job(request, checkpoint, (), room, threads=1)
    figures = map(str, (context, BRANCHES, BRANCH_STEPS))
    process.start(["mlxkv.commands.pitfalls.memory", str(asked.save()), *figures])
    found = dict(json.loads((room / "branches.json").read_text(encoding="utf-8")))
    # What MLX needs in passing varies by some bytes from run to run.
    return found | {"peak": -(-found["peak"] // 2**20) * 2**20}

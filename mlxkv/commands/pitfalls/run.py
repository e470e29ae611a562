"""The steps of `mlxkv pitfalls`: every scenario on every system, each in a process of its own, and what came of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mlxkv.commands.pitfalls import behaviour
from mlxkv.commands.pitfalls import page as pages
from mlxkv.commands.pitfalls.behaviour import Right, Seen
from mlxkv.commands.pitfalls.scenarios import NO, SYSTEMS, Scenario, Setting, Talk, scenarios, talks
from mlxkv.engines import job, oracle, process
from mlxkv.engines import machine as runtime
from mlxkv.engines.progress import say
from mlxkv.judge.case import read_case
from mlxkv.judge.result import plain
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import disk, trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan
from oracle.model import tokenizer as tokenizers
from oracle.model import tokenizer as tokens
from oracle.model.checkpoint import Checkpoint, require_llama, resolve
from oracle.model.default import is_original

FORMAT = "mlxkv-pitfalls/1"
PROMPTS = ("The capital of France is", "The capital of Germany is")
CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Request:
    """Two prompts that begin alike, as text or as ids, and how many greedy tokens follow each."""

    model: str | None = None
    revision: str | None = None
    prompts: tuple[str, str] | None = None
    ids: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    steps: int = 20
    device: str = "auto"
    ignore_keys: tuple[str, ...] = ()


def requested(
    *,
    prompt: str | None,
    other_prompt: str | None,
    tokens: tuple[int, ...] | None,
    other_tokens: tuple[int, ...] | None,
    **rest: Any,
) -> Request:
    """From the command line's options."""
    if (tokens is None) != (other_tokens is None):
        raise Refusal("--tokens and --other-tokens: one is given, expected both or none")
    if tokens is not None and other_tokens is not None:
        if prompt is not None or other_prompt is not None:
            raise Refusal("--prompt and --tokens: expected text or ids; leave one kind out")
        return Request(ids=(tokens, other_tokens), **rest)
    return Request(prompts=(prompt or PROMPTS[0], other_prompt or PROMPTS[1]), **rest)


@dataclass(frozen=True, slots=True)
class Matrix:
    """What every system made of every scenario, by scenario and system; `comparable` with the page's values."""

    checkpoint: Checkpoint
    setting: Setting
    scenarios: tuple[Scenario, ...]
    seen: dict[tuple[str, str], Seen]
    rights: dict[str, Right]
    environments: dict[str, dict[str, Any]]
    branches: dict[str, Any]
    comparable: bool

    @property
    def surprises(self) -> list[tuple[str, str]]:
        """Where a system did not behave as documented."""
        return [key for key, seen in self.seen.items() if not seen.documented]

    @property
    def exit_code(self) -> int:
        """0 when all behaved as documented, 1 when one did not."""
        return 1 if self.surprises else 0

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-pitfalls/1`"""
        systems = {
            name: {who: asdict(seen) for (of, who), seen in self.seen.items() if of == name}
            for name in self._names
        }
        value = {
            "format": FORMAT,
            "model": {
                "name": self.checkpoint.name,
                "source": self.checkpoint.source,
                "fingerprint": self.checkpoint.fingerprint,
            },
            "prompts": {
                name: {"ids": right.prompt, "generated": right.tokens}
                for name, right in self.rights.items()
            },
            "scenarios": [
                {"name": s.name, "what": s.what, "systems": systems[s.name], "page": s.page}
                for s in self.scenarios
            ],
            "page_comparable": self.comparable,
            "surprises": self.surprises,
            "exit_code": self.exit_code,
            "branches": {k: v for k, v in self.branches.items() if k != "environment"},
            "environment": self.environments,
        }
        return dict(plain(value))

    @property
    def _names(self) -> list[str]:
        return [s.name for s in self.scenarios]


def markdown(
    matrix: Matrix, *, text: Callable[[Sequence[int]], str], commands: Sequence[str]
) -> str:
    """The Markdown of a matrix; `text` turns ids into text."""
    facts = pages.Facts(
        model=matrix.checkpoint.name,
        source=matrix.checkpoint.source,
        fingerprint=matrix.checkpoint.fingerprint,
        prompts={name: right.prompt for name, right in matrix.rights.items()},
        generated={name: right.tokens for name, right in matrix.rights.items()},
        environments=matrix.environments,
        branches=matrix.branches,
        comparable=matrix.comparable,
    )
    return pages.report(facts, matrix.scenarios, matrix.seen, text=text, commands=commands)


def run(request: Request) -> Matrix:
    """Asks the oracle for the three talks, runs all systems, and watches."""
    runtime.require_device(request.device)
    checkpoint = resolve(request.model, revision=request.revision, ignore_keys=request.ignore_keys)
    require_llama(checkpoint)
    first, second = _prompts(request, checkpoint)
    # Refused before the oracle works; what the model answers changes nothing of it.
    Setting(first, second, (0,) * request.steps, checkpoint.max_positions, request.steps).check()
    drafts = talks(Setting(first, second, (), checkpoint.max_positions, request.steps))
    rights = {talk.name: _right(request, checkpoint, talk) for talk in drafts}
    setting = Setting(
        first, second, rights["first"].tokens, checkpoint.max_positions, request.steps
    )
    made = scenarios(setting)
    with process.scratch() as room:
        traces = _traces(request, checkpoint, made, room)
        seen = _watch(made, traces, rights)
        environments = {who: traces["greedy", who].meta.environment for who in SYSTEMS}
        branches = _branches(request, checkpoint, room)
        return Matrix(
            checkpoint,
            setting,
            tuple(made),
            seen,
            rights,
            environments,
            branches,
            is_original(checkpoint),
        )


def _branches(request: Request, checkpoint: Checkpoint, room: Path) -> dict[str, Any]:
    """What branches of one prefix cost in memory: at CONTEXT tokens, or at half of what the model has."""
    context, out = min(CONTEXT, checkpoint.max_positions // 2), room / "branches.json"
    say(f"{SYSTEMS['G']}: the memory of branches at {context} tokens")
    arguments = [
        str(checkpoint.folder),
        str(out),
        "--context",
        str(context),
        "--device",
        request.device,
    ]
    arguments += [f"--ignore-key={key}" for key in checkpoint.without]
    process.start(["mlxkv.commands.pitfalls.memory", *arguments])
    found = dict(json.loads(out.read_text(encoding="utf-8")))
    # What MLX needs in passing varies by some bytes from run to run.
    return found | {"peak": -(-found["peak"] // 2**20) * 2**20}


def _prompts(request: Request, checkpoint: Checkpoint) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if request.ids is not None:
        first, second = request.ids
    else:
        tokenizer = tokenizers.load(checkpoint.folder)
        if tokenizer is None:
            raise Refusal(
                f"{checkpoint.folder}: no tokenizer.json, expected one for prompts of text; give ids with --tokens and --other-tokens"
            )
        first, second = (tuple(tokenizer.encode(text)) for text in request.prompts or PROMPTS)
    for ids in (first, second):
        tokenizers.check_ids(
            list(ids), vocab_size=checkpoint.vocab_size, max_positions=checkpoint.max_positions
        )
    longest = len(first) + len(second) + 2 * request.steps
    if longest > checkpoint.max_positions:
        raise Refusal(
            f"--steps {request.steps}: both prompts and their answers take {longest} positions, "
            f"expected at most {checkpoint.max_positions} (max_position_embeddings); take fewer steps or shorter prompts"
        )
    return first, second


def _right(request: Request, checkpoint: Checkpoint, talk: Talk) -> Right:
    texts = (
        dict(zip(("first", "second"), request.prompts or PROMPTS, strict=True))
        if request.ids is None
        else {}
    )
    question = oracle.Question(
        checkpoint=checkpoint,
        prompt=texts.get(talk.name),
        tokens=talk.prompt,
        prompt_tokens=len(talk.prompt),
        steps=request.steps,
        chunks=None,
        dtype="float32",
        threads=os.cpu_count() or 1,
    )
    say(
        f"oracle: the truth of {len(talk.prompt)} tokens and {request.steps} steps on {checkpoint.name}"
    )
    case = read_case(oracle.ask(question).folder)
    generated = case.manifest.generated
    if len(generated) != request.steps:
        raise Refusal(
            f"manifest.json: {request.steps} generated tokens expected, found {generated!r}; run again with --fresh"
        )
    return behaviour.right(case, generated)


def _traces(
    request: Request, checkpoint: Checkpoint, made: list[Scenario], room: Path
) -> dict[tuple[str, str], trace.Trace]:
    """By scenario and system; transformers' process runs beside the others."""
    asked = {s.name: plan for s in made if isinstance(plan := s.plans["T"], Plan)}
    found: dict[tuple[str, str], trace.Trace] = {}
    with ExitStack() as stack:
        other = stack.enter_context(_transformers(checkpoint, asked, room / "T"))
        for system, (module, one) in _jobs(request, checkpoint, made, room).items():
            say(f"{SYSTEMS[system]}: {len(one.plans)} scenarios")
            with one.begin(module) as running:
                one.end(running)
            found |= {_key(plan.name, system): trace.read(one.trace(plan)) for plan in one.plans}
        other.wait()
    return found | {(name, "T"): trace.read(room / "T" / f"{name}.safetensors") for name in asked}


def _jobs(
    request: Request, checkpoint: Checkpoint, made: list[Scenario], room: Path
) -> dict[str, tuple[str, job.Job]]:
    """Each system's module and its job. A plan on another of mlx-lm's caches has that cache's name behind its own."""
    sizes = {
        "ConcatenateKVCache": "ConcatenateKVCache",
        "RotatingKVCache": f"RotatingKVCache:{checkpoint.max_positions}",
    }
    plans = {
        system: [p for s in made if isinstance(p := s.plans[system], Plan)]
        for system in ("C", "G", "L")
    }
    named = [
        (cache, replace(p, name=f"{s.name}-{cache}"))
        for s in made
        for cache in s.others
        if isinstance(p := s.plans["L"], Plan)
    ]
    dtypes = {s.name: s.cache_dtype for s in made if s.cache_dtype}
    given: dict[str, tuple[str, list[Plan], dict[str, Any]]] = {
        "C": (process.PORT, plans["C"], {"guarded": False, "caches": dtypes, "masks": True}),
        "G": (process.PORT, plans["G"], {"caches": dtypes, "masks": True}),
        "L": (
            process.MLX_LM,
            plans["L"] + [p for _, p in named],
            {"caches": {p.name: sizes[cache] for cache, p in named}},
        ),
    }
    jobs = {}
    for system, (module, chosen, options) in given.items():
        (room / system).mkdir()
        options |= {"device": request.device, "ignore_keys": checkpoint.without}
        one = job.Job(
            str(checkpoint.folder), tuple(chosen), room / system, "float32", "float32", **options
        )
        jobs[system] = (module, one)
    return jobs


def _key(name: str, system: str) -> tuple[str, str]:
    scenario, _, cache = name.partition("-")
    return scenario, cache or system


def _transformers(checkpoint: Checkpoint, plans: dict[str, Plan], out: Path) -> process.Process:
    oracle.require_torch()
    out.mkdir()
    arguments = ["oracle", "follow", checkpoint.source, "--out", str(out)]
    if checkpoint.revision:
        arguments += ["--revision", checkpoint.revision]
    arguments += [f"--ignore-key={key}" for key in checkpoint.without]
    for name, plan in plans.items():
        path = out / f"{name}.json"
        disk.write_text(path, json.dumps(plan.to_json()))
        arguments += ["--plan", str(path)]
    return process.Process(arguments, stderr=out / "stderr.txt")


def _watch(
    made: list[Scenario], traces: dict[tuple[str, str], trace.Trace], rights: dict[str, Right]
) -> dict[tuple[str, str], Seen]:
    seen = {}
    for scenario in made:
        for system, expected in (*scenario.expected.items(), *scenario.others.items()):
            plan = scenario.plans[system] if system in scenario.expected else scenario.plans["L"]
            if isinstance(plan, str):
                seen[scenario.name, system] = Seen(NO, expected, reason=plan)
            else:
                seen[scenario.name, system] = behaviour.watch(
                    scenario, expected, traces[scenario.name, system], rights
                )
    return seen


def report(request: Request, *, out: Path, command: str) -> Report:
    """Runs the scenarios on every system."""
    matrix = run(request)
    files = matrix_files(matrix, commands=[command])
    text = pages.console(matrix.scenarios, matrix.seen, report=str(out / "pitfalls.md"))
    return Report(files, text, files["pitfalls.json"], matrix.exit_code)


def matrix_files(matrix: Matrix, *, commands: Sequence[str]) -> dict[str, str]:
    """The report of the scenarios, by file name."""
    tokenizer = tokens.load(matrix.checkpoint.folder)
    text = (lambda ids: tokenizer.decode(list(ids))) if tokenizer else (lambda _: "")
    return {
        "pitfalls.json": pretty(matrix.to_json()),
        "pitfalls.md": markdown(matrix, text=text, commands=commands),
    }

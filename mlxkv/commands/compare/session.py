"""The steps of `mlxkv compare`: what to run, what to reuse, what to write. It computes nothing itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mlxkv.engines import job, oracle, process
from mlxkv.engines import machine as runtime
from mlxkv.engines import own as custom
from mlxkv.engines.process import MLX_LM, OWN, PORT, scratch
from mlxkv.engines.progress import say
from mlxkv.judge.case import Case, read_case
from mlxkv.judge.cause import read_suspects
from mlxkv.port.config.llama import LlamaConfig
from oracle.formats import run_folder, trace
from oracle.formats.errors import AlreadySaid, Refusal
from oracle.formats.plan import Plan
from oracle.model import tokenizer as tokenizers
from oracle.model.checkpoint import Checkpoint, is_neighbour, require_llama, resolve

DEFAULT_PROMPT = "The capital of France is"


@dataclass(frozen=True, slots=True)
class Request:
    """What a person asked to compare. None where the oracle folder, or the default, decides.

    Where `prompt_tokens` is given, `tokens` are the whole sequence and so many of them the prompt. `name` tells one of
    several requests from the others.
    """

    model: str | None = None
    revision: str | None = None
    prompt: str | None = None
    tokens: tuple[int, ...] | None = None
    steps: int | None = None
    chunks: tuple[int, ...] | None = None
    dtype: str | None = None
    device: str = "auto"
    threads: int | None = None
    oracle: Path | None = None
    fresh: bool = False
    ignore_keys: tuple[str, ...] = ()
    engine: str = "port"
    prompt_tokens: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Runs:
    """Everything that a verdict on `engine` is made from, and what each process took (None: reused)."""

    engine: str
    folder: Path
    case: Case
    checkpoint: Checkpoint
    arithmetic: tuple[trace.Trace, ...]
    algebra: tuple[trace.Trace, ...]
    took: dict[str, process.Finished | None]


@contextmanager
def run(request: Request, *, meanwhile: Callable[[], object] = lambda: None) -> Iterator[Runs]:
    """The oracle's answer and the engine's traces (the port's in both lanes), which are removed when the block ends.

    `meanwhile` is called while the engine's processes run and this one would only wait.
    """
    with run_all([request], meanwhile=meanwhile) as (runs,):
        yield runs


@contextmanager
def run_all(
    requests: Sequence[Request], *, meanwhile: Callable[[], object] = lambda: None
) -> Iterator[tuple[Runs, ...]]:
    """As `run`, of several sequences on the first request's model, dtype and device: the engine loads its weights once."""
    first = requests[0]
    runtime.require_device(first.device)
    follow = _follower(first.engine)
    answers = [_given(first)] if first.oracle else _asked(requests)
    if first.engine == "port":
        require_llama(answers[0][0])
    checkpoint, cases = (
        answers[0][0],
        [_case(checkpoint, folder) for checkpoint, folder, _ in answers],
    )
    if not first.oracle:
        cases = [_renamed(case, checkpoint) for case in cases]
    plans = [_plans(case, folder) for case, (_, folder, _) in zip(cases, answers, strict=True)]
    with scratch() as room:
        dtype, keys = cases[0].manifest.dtype, checkpoint.without
        arithmetic = job.Job(
            str(checkpoint.folder),
            _apart(plans),
            room / "run",
            dtype,
            dtype,
            first.device,
            ignore_keys=keys,
        )
        done, took = follow(arithmetic, meanwhile)
        lanes = [_traces(one, plans) for one in done]
        yield tuple(
            Runs(
                Path(first.engine).name,
                folder,
                case,
                checkpoint,
                lanes[0][i],
                sum((lane[i] for lane in lanes[1:]), ()),
                {"oracle": made} | took,
            )
            for i, (case, (_, folder, made)) in enumerate(zip(cases, answers, strict=True))
        )


def _case(checkpoint: Checkpoint, folder: Path) -> Case:
    case = read_case(folder)
    if case.manifest.fingerprint != checkpoint.fingerprint:
        raise Refusal(
            f"{folder}: made with weights {case.manifest.fingerprint[:16]}, but {checkpoint.source} holds {checkpoint.fingerprint[:16]}; "
            "run the oracle on these weights, or name the model that the folder was made with"
        )
    return case


def _renamed(case: Case, checkpoint: Checkpoint) -> Case:
    """A kept answer may have been made from the same weights under another name: the one asked for now is shown."""
    asked = {name: getattr(checkpoint, name) for name in ("source", "name", "note", "revision")}
    return replace(case, manifest=replace(case.manifest, **asked))


def suspects(runs: Runs) -> Path | str:
    """The folder of the usual suspects, kept or made, or why there is none: the verdict stands without them."""
    unsought, manifest = "the cause was not looked for", runs.case.manifest
    if not manifest.has_truth:
        return f"{unsought}: the usual suspects are mistakes in a Llama, tried on its truth"
    kept = oracle.suspects_folder(manifest)
    try:
        read_suspects(kept, manifest.fingerprint)
        os.utime(kept)
        return kept
    except Refusal:
        pass  # absent, unfinished or damaged: made anew below
    if not runtime.has("torch"):
        return f"{unsought}: torch is not installed"
    try:
        checkpoint = runs.checkpoint
        if checkpoint.config_digest != manifest.config_digest:
            checkpoint = resolve(manifest.source, revision=manifest.revision)
        say("oracle: the usual suspects")
        runs.took["suspects"] = oracle.make_suspects(checkpoint, runs.folder, kept)
        read_suspects(kept, manifest.fingerprint)
    except AlreadySaid:
        return f"{unsought}: the oracle refused, see above"
    except Refusal as error:
        return f"{unsought}: {error}"
    return kept


_Followed = tuple[list[job.Job], dict[str, process.Finished | None]]


def _follower(engine: str) -> Callable[[job.Job, Callable[[], object]], _Followed]:
    """Who follows a job of an engine, refused before the oracle is asked where it could not run."""
    if engine == "port":
        return _both_lanes
    if engine != "mlx-lm":
        source = custom.find(engine)
        return partial(_one_lane, OWN, source.name, f"{source.file}:{source.function}")
    if not runtime.has("mlx_lm"):
        raise Refusal("mlx-lm is not installed: pip install 'mlxkv[port]'")
    return partial(_one_lane, MLX_LM, engine, "")


def _both_lanes(arithmetic: job.Job, meanwhile: Callable[[], object]) -> _Followed:
    """The port in the run's dtype and in float64.

    Side by side: one thread does nearly as much as two where memory is the limit, and a GPU is not in the CPU's way.
    """
    half = max(1, (os.cpu_count() or 1) // 2)
    arithmetic = replace(arithmetic, threads=half)
    algebra = replace(
        arithmetic, out=arithmetic.out.with_name("float64"), dtype="float64", device="cpu"
    )
    with arithmetic.begin(PORT) as b, algebra.begin(PORT, aside=True) as a:
        meanwhile()
        return [arithmetic, algebra], {"port": arithmetic.end(b), "port float64": algebra.end(a)}


def _one_lane(
    module: str, name: str, source: str, arithmetic: job.Job, meanwhile: Callable[[], object]
) -> _Followed:
    """Another's model in the run's dtype: in float64 MLX's own functions, which it may call, are only float32-accurate."""
    arithmetic = replace(arithmetic, custom=source)
    with arithmetic.begin(module) as a:
        meanwhile()
        return [arithmetic], {name: arithmetic.end(a)}


def _plans(case: Case, folder: Path) -> tuple[Plan, ...]:
    """Plans may coincide (full and step where nothing is decoded): one run then serves both names."""
    return tuple(
        {plan.digest: plan for plan in oracle.judged(case.manifest, folder).values()}.values()
    )


def _apart(plans: Sequence[tuple[Plan, ...]]) -> tuple[Plan, ...]:
    """The plans of one job, whose names are files': those of several sequences get its number before theirs."""
    if len(plans) == 1:
        return plans[0]
    return tuple(
        replace(plan, name=f"{i}-{plan.name}") for i, of in enumerate(plans) for plan in of
    )


def _traces(done: job.Job, plans: Sequence[tuple[Plan, ...]]) -> list[tuple[trace.Trace, ...]]:
    """Of each sequence the traces, under the plans' own names."""
    paths = iter([done.trace(plan) for plan in done.plans])
    return [tuple(_named(trace.read(next(paths)), plan) for plan in of) for of in plans]


def _named(made: trace.Trace, plan: Plan) -> trace.Trace:
    return replace(made, meta=replace(made.meta, plan=replace(made.meta.plan, name=plan.name)))


_Answered = tuple[Checkpoint, Path, process.Finished | None]


def _asked(requests: Sequence[Request]) -> list[_Answered]:
    """The oracle's answer to each; what can be refused of any is refused before the first is asked."""
    checkpoint = resolve(
        requests[0].model, revision=requests[0].revision, ignore_keys=requests[0].ignore_keys
    )
    beyond = ""
    if requests[0].engine == "port" or not is_neighbour(checkpoint):
        require_llama(checkpoint)
        beyond = LlamaConfig.of(
            checkpoint
        ).rope.beyond  # what the port refuses must not cost a run of the oracle first
    questions = [_named_question(request, checkpoint, beyond=beyond) for request in requests]
    answers: list[_Answered] = []
    for request, question in zip(requests, questions, strict=True):
        whose = f"{request.name}, " if request.name else ""
        say(
            f"oracle: {whose}{len(question.tokens)} tokens and {question.steps} steps on {checkpoint.name}"
        )
        answer = oracle.ask(question, fresh=request.fresh)
        answers.append((checkpoint, answer.folder, answer.made))
    return answers


def _named_question(request: Request, checkpoint: Checkpoint, *, beyond: str) -> oracle.Question:
    try:
        return _question(request, checkpoint, beyond=beyond)
    except Refusal as error:
        raise Refusal(f"prompt {request.name}: {error}" if request.name else str(error)) from error


def _question(request: Request, checkpoint: Checkpoint, *, beyond: str) -> oracle.Question:
    prompt = (
        request.prompt
        if request.prompt is not None or request.tokens is not None
        else DEFAULT_PROMPT
    )
    if request.tokens is not None:
        ids = list(request.tokens)
    else:
        tokenizer = tokenizers.load(checkpoint.folder)
        if tokenizer is None:
            raise Refusal(
                f"{checkpoint.folder}: no tokenizer.json, expected one for --prompt; give the ids with --tokens"
            )
        assert prompt is not None
        ids = tokenizer.encode(prompt)
        if tokenizer.warning is not None:
            print(f"warning: {tokenizer.warning}", file=sys.stderr)
    # A sequence that is given whole needs no greedy tokens.
    steps = (
        0 if request.prompt_tokens is not None else 20 if request.steps is None else request.steps
    )
    tokenizers.check_ids(
        ids, vocab_size=checkpoint.vocab_size, max_positions=checkpoint.max_positions
    )
    if len(ids) + max(0, steps - 1) > checkpoint.max_positions:
        limit = f"at most {checkpoint.max_positions} (max_position_embeddings{beyond})"
        raise Refusal(
            f"--steps {steps}: {len(ids)} tokens and {steps - 1} after them, expected {limit}; take fewer steps or a shorter prompt"
        )
    return oracle.Question(
        checkpoint=checkpoint,
        prompt=None if request.tokens is not None else prompt,
        tokens=tuple(ids),
        prompt_tokens=request.prompt_tokens or len(ids),
        steps=steps,
        chunks=request.chunks,
        dtype=request.dtype or "float32",
        threads=os.cpu_count() or 1 if request.threads is None else request.threads,
    )


def _given(request: Request) -> tuple[Checkpoint, Path, None]:
    """A folder made elsewhere decides everything; what the request says beside it must agree."""
    assert request.oracle is not None
    manifest = run_folder.read_manifest(request.oracle)
    where = request.oracle / "manifest.json"
    prompt_ids = manifest.tokens[: manifest.prompt_tokens]
    for name, wanted, found in (
        ("prompt", request.prompt, manifest.prompt),
        ("tokens", None if request.tokens is None else list(request.tokens), prompt_ids),
        ("dtype", request.dtype, manifest.dtype),
    ):
        if wanted is not None and wanted != found:
            raise Refusal(
                f"{where}: {name} is {found!r}, expected {wanted!r} as asked for; leave --{name} out or make another folder"
            )
    for name, given in (("steps", request.steps), ("chunks", request.chunks)):
        if given is not None:
            raise Refusal(
                f"--{name}: {where} has its own plans; leave the option out or make another folder"
            )
    keys = request.ignore_keys or tuple(manifest.ignored_keys)
    model, revision = request.model or manifest.source, request.revision or manifest.revision
    return resolve(model, revision=revision, ignore_keys=keys), request.oracle, None

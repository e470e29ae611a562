"""What is compared: from a request to the oracle's answer, kept, made now, or made elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlxkv.engines import kinds, oracle, ranks
from mlxkv.engines.kinds import Kind
from mlxkv.engines.own import heads_of
from mlxkv.engines.process import Finished
from mlxkv.engines.progress import say, steps
from mlxkv.judge.case import Case, read_case
from mlxkv.port.config.llama import LlamaConfig
from mlxkv.port.config.rope import Rope
from mlxkv.port.part import require_splits
from oracle.formats import rows, run_folder
from oracle.formats.errors import AlreadySaid, Refusal
from oracle.formats.plan import Plan
from oracle.model import tokenizer as tokenizers
from oracle.model.checkpoint import Checkpoint, is_neighbour, require_llama, resolve

DEFAULT_PROMPT = "The capital of France is"
DEFAULT_STEPS = 20


@dataclass(frozen=True, slots=True)
class Request:
    """What a person asked to compare. None: taken from the oracle folder, else the default.

    If `prompt_tokens` is given, `tokens` are the whole sequence and so many of them the prompt.
    `cache` is one that runs inside mlx-lm's Llama, whose engine is then mlx-lm. `name` tells one of
    several requests from the others. `quick` leaves the probe out, `all_rows` compares all rows of
    logits of a long sequence. `has_oracle` says that the command has the option --oracle, for its
    messages. `ranks`, or the hosts in `hostfile`, share the engine's model.
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
    cache: Kind | None = None
    prompt_tokens: int | None = None
    name: str | None = None
    quick: bool = False
    all_rows: bool = False
    has_oracle: bool = False
    ranks: int | None = None
    hostfile: Path | None = None

    @property
    def shared_by(self) -> int:
        """How many ranks run the engine, 0 for one process; a Refusal for a bad hostfile."""
        return ranks.count(self.ranks or 0, self.hostfile or "")


@dataclass(frozen=True, slots=True)
class Answer:
    """The oracle's answer on one sequence: the case and its plans, and the model that they are of.

    `made` is what making it took, None where it was there already or came with another. Plans may
    coincide (full and step, if nothing is decoded), and stand here once.
    """

    checkpoint: Checkpoint
    folder: Path
    case: Case
    plans: tuple[Plan, ...]
    made: Finished | None


@dataclass(frozen=True, slots=True)
class Untold:
    """One of several sequences that could not be judged: why, and its tokens, as far as known."""

    name: str
    reason: str
    tokens: tuple[int, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Answers:
    """The answer to each request, and that on the model's probe; None where there is none.

    `refused` are those that the oracle has none to.
    """

    each: tuple[Answer, ...]
    probe: Answer | None
    refused: tuple[Untold, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What the oracle is to be asked: for each request, and for the model's probe."""

    checkpoint: Checkpoint
    questions: tuple[oracle.Question, ...]
    probe: oracle.Question | None


def ask(requests: Sequence[Request]) -> Answers:
    """The answers, all on the first request's model.

    What can be refused of any request is refused before the oracle is asked the first.
    """
    first = requests[0]
    if first.oracle is not None:
        return given(first, first.oracle)
    asked = asking(requests)
    name = asked.checkpoint.name
    if len(requests) == 1:
        (one,) = asked.questions
        say(f"oracle: {len(one.tokens)} tokens and {one.steps} steps on {name}")
    else:
        say(f"oracle: {len(requests)} prompts on {name}")
    found, probe = oracle.ask_all(asked.questions, asked.probe, fresh=first.fresh)
    each = tuple(_kept(asked.checkpoint, one) for one in found if isinstance(one, oracle.Answer))
    if not each:
        raise AlreadySaid
    refused = tuple(
        Untold(str(of.name), f"the oracle refused it: {why}", its.tokens, its.prompt_tokens)
        for of, its, why in zip(requests, asked.questions, found, strict=True)
        if isinstance(why, str)
    )
    return Answers(each, None if probe is None else _kept(asked.checkpoint, probe), refused)


def asking(requests: Sequence[Request]) -> Asked:
    """The questions, all on the first request's model; nothing is asked yet."""
    first = requests[0]
    elsewhere = ", or give --oracle DIR with a folder made elsewhere"
    oracle.require_torch(otherwise=elsewhere if first.has_oracle else "")
    keys = first.ignore_keys
    checkpoint = resolve(first.model, revision=first.revision, ignore_keys=keys, progress=steps())
    _require_fits(first, checkpoint)
    beyond, original = "", None
    if first.engine == "port" or not is_neighbour(checkpoint):
        require_llama(checkpoint)
        # What the port refuses must not cost a run of the oracle first.
        rope = LlamaConfig.of(checkpoint).rope
        beyond, original = rope.beyond, _original(rope)
    questions = tuple(_question(request, checkpoint, beyond=beyond) for request in requests)
    return Asked(checkpoint, questions, None if first.quick else _probe(questions[0], original))


def _original(rope: Rope) -> int | None:
    """The length beyond which RoPE has other factors, None if it has the same at every length."""
    return rope.original_max_position_embeddings if rope.rope_type == "longrope" else None


def _probe(question: oracle.Question, original: int | None) -> oracle.Question | None:
    """What is asked of the model's probe; None where there is none.

    The oracle refuses a cache that is filled on both sides of longrope's original length. It is not
    asked in vain, as no answer would be kept and each comparison would ask again.
    """
    probe = oracle.probe_beside(question)
    if probe is None or original is None or not probe.prompt_tokens <= original < len(probe.tokens):
        return probe
    both = f"{probe.prompt_tokens} of its {len(probe.tokens)} tokens come first"
    say(f"oracle: no probe, as {both}, and beyond {original} longrope has other factors")
    return None


def _kept(checkpoint: Checkpoint, found: oracle.Answer) -> Answer:
    # A kept answer may have been made from the same weights under another name: the name that was
    # asked for now is shown.
    asked = {name: getattr(checkpoint, name) for name in ("source", "name", "note", "revision")}
    return _answer(checkpoint, found.folder, replace(found.manifest, **asked), found.made)


def given(request: Request, folder: Path) -> Answers:
    """A folder made elsewhere decides everything; what the request says beside it must agree."""
    say(f"oracle: reading {folder}")
    manifest = run_folder.read_manifest(folder)
    _require_same(request, manifest, folder / "manifest.json")
    checkpoint = resolve(
        request.model or manifest.source,
        revision=request.revision or manifest.revision,
        ignore_keys=request.ignore_keys or tuple(manifest.ignored_keys),
        progress=steps(),
    )
    if request.engine == "port":
        require_llama(checkpoint)
    _require_fits(request, checkpoint)
    if manifest.fingerprint != checkpoint.fingerprint:
        found, expected = manifest.fingerprint[:16], checkpoint.fingerprint[:16]
        what = f"made with weights {found}, but {checkpoint.source} holds {expected}"
        remedy = "run the oracle on these weights, or name the model that the folder was made with"
        raise Refusal(what, where=folder, remedy=remedy)
    _require_texts(checkpoint, manifest, folder / "manifest.json")
    inside = None if request.quick else run_folder.probe_of(folder, manifest)
    probe = None
    if inside is not None:
        probe = _answer(checkpoint, inside, run_folder.read_manifest(inside), None)
    return Answers((_answer(checkpoint, folder, manifest, None),), probe)


def _require_fits(request: Request, checkpoint: Checkpoint) -> None:
    """Refuses a cache that no head of the model fits, and ranks that its heads do not divide by,
    before the oracle is asked.
    """
    heads = heads_of(checkpoint.config)
    if request.cache is not None and heads:
        kinds.require(request.cache, heads[1])
    if size := request.shared_by:
        require_splits(checkpoint, size)


def _require_texts(checkpoint: Checkpoint, manifest: run_folder.Manifest, where: Path) -> None:
    """Refuses texts that the checkpoint's own tokenizer does not give."""
    tokenizer = tokenizers.load(checkpoint.folder) if manifest.texts else None
    texts = zip(manifest.tokens, manifest.texts, strict=True) if tokenizer is not None else ()
    for i, (token, text) in enumerate(texts):
        if tokenizer is not None and text != (wanted := tokenizer.token_text(token)):
            what = f"texts[{i}] is {text!r}, expected {wanted!r} as the model's tokenizer has it"
            raise Refusal(what, where=where, remedy="copy or make the folder again")


def _require_same(request: Request, manifest: run_folder.Manifest, where: Path) -> None:
    prompt_ids = manifest.tokens[: manifest.prompt_tokens]
    remedy = "leave the option out or make another folder"
    for name, wanted, found in (
        ("prompt", request.prompt, manifest.prompt),
        ("tokens", None if request.tokens is None else list(request.tokens), prompt_ids),
        ("dtype", request.dtype, manifest.dtype),
    ):
        if wanted is not None and wanted != found:
            what = f"{name} is {found!r}, expected {wanted!r} as asked for"
            raise Refusal(what, where=where, remedy=remedy)
    for name, given in (("steps", request.steps), ("chunks", request.chunks)):
        if given is not None:
            raise Refusal(f"{where} has its own plans", where=f"--{name}", remedy=remedy)
    if request.all_rows and not manifest.all_rows and len(manifest.tokens) > rows.WHOLE:
        raise Refusal(f"{where} keeps a sample of rows", where="--all-rows", remedy=remedy)


def _answer(
    checkpoint: Checkpoint, folder: Path, manifest: run_folder.Manifest, made: Finished | None
) -> Answer:
    plans = {plan.digest: plan for plan in run_folder.read_plans(folder, manifest).values()}
    case = replace(read_case(folder), manifest=manifest)
    return Answer(checkpoint, folder, case, tuple(plans.values()), made)


def _question(request: Request, checkpoint: Checkpoint, *, beyond: str) -> oracle.Question:
    try:
        prompt, ids = _sequence(request, checkpoint)
        # A sequence that is given whole needs no greedy tokens.
        steps = 0 if request.prompt_tokens is not None else request.steps
        steps = DEFAULT_STEPS if steps is None else steps
        _require_room(ids, steps, checkpoint, beyond)
    except Refusal as error:
        if request.name is None:
            raise
        raise Refusal(str(error), where=f"prompt {request.name}") from error
    return oracle.Question(
        checkpoint=checkpoint,
        prompt=prompt,
        tokens=tuple(ids),
        prompt_tokens=request.prompt_tokens or len(ids),
        steps=steps,
        chunks=request.chunks,
        all_rows=request.all_rows,
        dtype=request.dtype or "float32",
        threads=os.cpu_count() or 1 if request.threads is None else request.threads,
    )


def _sequence(request: Request, checkpoint: Checkpoint) -> tuple[str | None, list[int]]:
    """The prompt's text, None where ids were given, and its ids."""
    if request.tokens is not None:
        return None, list(request.tokens)
    tokenizer = tokenizers.load(checkpoint.folder)
    if tokenizer is None:
        remedy = "give the ids with --tokens"
        if request.name is not None:
            remedy = 'give --prompts a FILE with ids, in lines such as {"tokens": [1, 2]}'
        what = "no tokenizer.json, expected one for a prompt of text"
        raise Refusal(what, where=checkpoint.folder, remedy=remedy)
    if tokenizer.warning is not None:
        print(f"warning: {tokenizer.warning}", file=sys.stderr)
    prompt = DEFAULT_PROMPT if request.prompt is None else request.prompt
    return prompt, tokenizer.encode(prompt)


def _require_room(ids: list[int], steps: int, checkpoint: Checkpoint, beyond: str) -> None:
    most = checkpoint.max_positions
    tokenizers.check_ids(ids, vocab_size=checkpoint.vocab_size, max_positions=most)
    if len(ids) + max(0, steps - 1) > most:
        expected = f"expected at most {most} (max_position_embeddings{beyond})"
        what = f"{len(ids)} tokens and {steps - 1} after them, {expected}"
        remedy = "take fewer steps or a shorter prompt"
        raise Refusal(what, where=f"--steps {steps}", remedy=remedy)

"""Starts the oracle in its own process, or reads a folder that it wrote here or elsewhere.

An answer is used again while the digest of everything that it depends on is the same.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from mlxkv.engines import machine, process
from mlxkv.engines.progress import say
from oracle.formats import disk, run_folder, stored, text
from oracle.formats.errors import AlreadySaid, Refusal, install
from oracle.formats.run_folder import Inputs
from oracle.model.cache_folder import cache_dir, in_use
from oracle.model.checkpoint import Checkpoint, is_neighbour

_Kind = Literal["run", "probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Inputs):
    """What the oracle is asked of a model; `prompt` is the prompt's text where it is known."""

    checkpoint: Checkpoint
    prompt: str | None

    @property
    def kind(self) -> _Kind:
        """The oracle's command that answers it."""
        return "probe" if self.probe else "run"

    def arguments(self, folder: Path, prompt_file: str) -> list[str]:
        """Those of `oracle run`, or for the probe of `oracle probe`, that write into `folder`."""
        given = [self.checkpoint.source, "--out", str(folder), "--force"]
        given += _named(self.checkpoint)
        given += [f"--dtype={self.dtype}", f"--threads={self.threads}"]
        if self.probe:
            return [self.kind, *given]
        if self.prompt is not None:
            given += ["--prompt-file", prompt_file]
        else:
            given += [f"--tokens={_commas(self.tokens)}", f"--prompt-tokens={self.prompt_tokens}"]
        given += [f"--chunks={_commas(self.chunks)}"] if self.chunks is not None else []
        given += ["--all-rows"] if self.all_rows else []
        return [self.kind, *given, f"--steps={self.steps}", f"--taps={','.join(self.taps)}"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A verified run folder, and what making it took (None: it was there)."""

    folder: Path
    manifest: run_folder.Manifest
    made: process.Finished | None


def probe_beside(question: Question) -> Question | None:
    """What the oracle is asked for the probe of the same model; None where there can be none.

    A neighbour of Llama has no truth, and a context of one token no room.
    """
    checkpoint = question.checkpoint
    if is_neighbour(checkpoint):
        return None
    sizes = checkpoint.vocab_size, checkpoint.max_positions
    inputs = run_folder.probe_inputs(*sizes, dtype=question.dtype, threads=question.threads)
    if inputs is None:
        return None
    asked = {each.name: getattr(inputs, each.name) for each in fields(inputs)}
    return Question(checkpoint=checkpoint, prompt=None, **asked)


def ask(question: Question, *, fresh: bool = False) -> Answer:
    """The oracle's folder for a question: the one kept from last time, or a new one.

    `fresh` makes a new one in any case. One process at a time makes it.
    """
    return ask_both(question, None, fresh=fresh)[0]


def ask_both(
    question: Question, probe: Question | None, *, fresh: bool = False
) -> tuple[Answer, Answer | None]:
    """The folders for a question and for the model's probe; None for a probe that cannot be had.

    One process makes both if neither was kept. What it took stands with the first.
    """
    require_torch()
    answers, missing = dict[_Kind, Answer](), list[_Place]()
    with ExitStack() as locks:
        # A probe comes last, and whoever waits for one holds nothing that its maker asks for.
        for asked in (question, probe):
            if asked is None:
                continue
            with ExitStack() as lock:
                place = lock.enter_context(_alone(asked))
                found = None if fresh else place.kept()
                if found is not None:
                    answers[asked.kind] = found
                    continue
                locks.enter_context(lock.pop_all())
                missing.append(place)
        answers |= _made(missing) if missing else {}
    return answers["run"], answers.get("probe")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a question's answer is kept, under the digest of all that it depends on."""

    question: Question
    folder: Path
    digest: str

    def kept(self) -> Answer | None:
        try:
            manifest = run_folder.read_manifest(self.folder)
        except Refusal:
            return None  # absent, unfinished or damaged: made anew
        if manifest.inputs != self.digest:
            return None
        os.utime(self.folder)
        return Answer(self.folder, manifest, None)

    def answer(self, finished: process.Finished | None) -> Answer:
        """What was made just now."""
        manifest = run_folder.read_manifest(self.folder)
        if manifest.inputs != self.digest:
            raise Refusal(
                f"made from inputs {manifest.inputs[:16]}, expected {self.digest[:16]}",
                where=self.folder,
                remedy="the oracle's sources changed meanwhile, run again",
            )
        return Answer(self.folder, manifest, finished)


@contextmanager
def _alone(question: Question) -> Iterator[_Place]:
    """The place of a question's answer, which no other process makes or looks for meanwhile."""
    asked = question.checkpoint
    digest = run_folder.inputs_digest(asked.fingerprint, asked.config_digest, question)
    folder = in_use("oracle") / digest[:32]
    with _locked(digest):
        yield _Place(question, folder, digest)


@contextmanager
def _locked(digest: str) -> Iterator[None]:
    """While no other process makes or looks for what has this digest."""
    lock = cache_dir() / "locks" / digest[:32]
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise disk.unwritable(lock, error) from error
    busy = "oracle: another mlxkv asks it the same, waiting for that one"
    with disk.alone(lock, waiting=lambda: say(busy)):
        yield


def _made(places: Sequence[_Place]) -> dict[_Kind, Answer]:
    """Answers by their questions' kinds, made by one process: of a run, a probe, or both.

    A probe that the oracle cannot measure is not among them; why not, the oracle has said.
    """
    first, *others = places
    with tempfile.NamedTemporaryFile("wb", suffix=".txt") as prompt:
        # A file, since an argument has a limit that a long prompt exceeds.
        prompt.write((first.question.prompt or "").encode())
        prompt.flush()
        given = first.question.arguments(first.folder, prompt.name)
        if not first.question.probe:
            given += [f"--probe-out={one.folder}" for one in others] or ["--no-probe"]
        try:
            finished = process.start(["oracle", *given])
        except AlreadySaid:
            if not first.question.probe:
                raise
            return {}
    beside = {one.question.kind: found for one in others if (found := one.kept()) is not None}
    return beside | {first.question.kind: first.answer(finished)}


@contextmanager
def text_folder(
    checkpoint: Checkpoint, tokens: Sequence[int], specs: Sequence[str], *, fresh: bool
) -> Iterator[Path]:
    """The folder of a text's truth, and of what caches that keep less, by their SPECs, make of it.

    It is kept for later runs on the same weights and tokens, and the oracle adds what it lacks.
    What is given are links to its files, which stay until the block ends: another run may make the
    kept folder anew meanwhile, or add to it.
    """
    require_torch()
    digest = text.inputs(checkpoint.fingerprint, checkpoint.config_digest, tokens)
    folder = in_use("texts") / digest[:32]
    with ExitStack() as stack:
        with _locked(digest):
            if fresh or not _has(folder, specs):
                _make_text(checkpoint, tokens, specs, folder, fresh=fresh)
            os.utime(folder)
            with disk.writing(folder):
                own = disk.own_folder(folder.parent, prefix=f".{folder.name}.")
                links = stack.enter_context(own)
            for path in folder.iterdir():
                disk.linked(path, links / path.name)
        yield links


def _make_text(
    checkpoint: Checkpoint, tokens: Sequence[int], specs: Sequence[str], out: Path, *, fresh: bool
) -> None:
    """Makes the folder of a text, or adds to it what it lacks."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as ids:
        json.dump(list(tokens), ids)
        ids.flush()
        given = [checkpoint.source, f"--ids={ids.name}", f"--out={out}", *_named(checkpoint)]
        given += [f"--threads={os.cpu_count() or 1}", *(f"--stored={spec}" for spec in specs)]
        process.start(["oracle", "text", *given, *(["--force"] if fresh else [])])


def _has(folder: Path, specs: Sequence[str]) -> bool:
    """Whether a folder is there, unharmed, with all that is asked; one that is damaged goes."""
    try:
        kept = text.read_manifest(folder).stored
    except Refusal:
        with suppress(OSError):
            shutil.rmtree(folder)
        return False
    return {stored.parse(spec).name for spec in specs} <= set(kept)


def suspects_folder(manifest: run_folder.Manifest, plan: str) -> Path:
    """Where the usual suspects of a run folder are kept, with those of `plan`'s calls."""
    return in_use("suspects") / run_folder.suspects_digest(manifest, plan)[:32]


def make_suspects(
    checkpoint: Checkpoint, folder: Path, out: Path, *, plan: str
) -> process.Finished:
    """Writes the usual suspects of a run folder into `out`.

    These are truths of a model with one usual mistake each, at the borders of `plan`'s calls too.
    `checkpoint` is what the folder was made with.
    """
    source = [checkpoint.source, *_revision(checkpoint), "--plan", plan]
    return process.start(["oracle", "suspects", str(folder), *source, "--out", str(out)])


def require_torch(*, otherwise: str = "") -> None:
    """A Refusal with the line that installs what is missing, and what may be done `otherwise`."""
    for package in ("torch", "transformers"):
        if not machine.has(package):
            remedy = install("oracle") + otherwise
            raise Refusal(f"{package} is not installed", remedy=remedy)


def _revision(checkpoint: Checkpoint) -> list[str]:
    return ["--revision", checkpoint.revision] if checkpoint.revision else []


def _named(checkpoint: Checkpoint) -> list[str]:
    """The options that a checkpoint was asked for with."""
    return _revision(checkpoint) + [f"--ignore-key={key}" for key in checkpoint.without]


def _commas(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))

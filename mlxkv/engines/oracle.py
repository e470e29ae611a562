"""Starts the oracle in its own process, or reads a folder that it wrote here or elsewhere.

An answer is used again while the digest of everything that it depends on is the same.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mlxkv.engines import machine, process
from mlxkv.engines.progress import say
from oracle.formats import disk, run_folder
from oracle.formats.errors import Refusal, install
from oracle.formats.run_folder import Inputs
from oracle.model.cache_folder import cache_dir, in_use
from oracle.model.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Inputs):
    """What the oracle is asked of a model; `prompt` is the prompt's text where it is known."""

    checkpoint: Checkpoint
    prompt: str | None

    def arguments(self, folder: Path, prompt_file: str) -> list[str]:
        """Those of `oracle run` that writes the answer into `folder`."""
        given = ["run", self.checkpoint.source, "--out", str(folder), "--force"]
        given += _revision(self.checkpoint)
        given += [f"--ignore-key={key}" for key in self.checkpoint.without]
        if self.prompt is not None:
            given += ["--prompt-file", prompt_file]
        else:
            given += [f"--tokens={_commas(self.tokens)}", f"--prompt-tokens={self.prompt_tokens}"]
        given += [f"--chunks={_commas(self.chunks)}"] if self.chunks is not None else []
        given += [f"--steps={self.steps}", f"--dtype={self.dtype}", f"--threads={self.threads}"]
        return [*given, f"--taps={','.join(self.taps)}"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A verified run folder, and what making it took (None: it was there)."""

    folder: Path
    manifest: run_folder.Manifest
    made: process.Finished | None


def ask(question: Question, *, fresh: bool = False) -> Answer:
    """The oracle's folder for a question: the one kept from last time, or a new one.

    `fresh` makes a new one in any case. One process at a time makes it.
    """
    require_torch()
    asked = question.checkpoint
    digest = run_folder.inputs_digest(asked.fingerprint, asked.config_digest, question)
    folder = in_use("oracle") / digest[:32]
    lock = cache_dir() / "locks" / digest[:32]
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise disk.unwritable(lock, error) from error
    busy = "oracle: another mlxkv asks it the same, waiting for that one"
    with disk.alone(lock, waiting=lambda: say(busy)):
        kept = None if fresh else _kept(folder, digest)
        return kept or _made(question, folder, digest)


def _kept(folder: Path, digest: str) -> Answer | None:
    try:
        manifest = run_folder.read_manifest(folder)
    except Refusal:
        return None  # absent, unfinished or damaged: made anew
    if manifest.inputs != digest:
        return None
    os.utime(folder)
    return Answer(folder, manifest, None)


def _made(question: Question, folder: Path, digest: str) -> Answer:
    with tempfile.NamedTemporaryFile("wb", suffix=".txt") as prompt:
        # A file, since an argument has a limit that a long prompt exceeds.
        prompt.write((question.prompt or "").encode())
        prompt.flush()
        finished = process.start(["oracle", *question.arguments(folder, prompt.name)])
    manifest = run_folder.read_manifest(folder)
    if manifest.inputs != digest:
        raise Refusal(
            f"made from inputs {manifest.inputs[:16]}, expected {digest[:16]}",
            where=folder,
            remedy="the oracle's sources changed meanwhile, run again",
        )
    return Answer(folder, manifest, finished)


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


def _commas(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))

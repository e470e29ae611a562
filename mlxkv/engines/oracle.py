"""Starts the oracle in its own process, or reads a folder that it wrote here or elsewhere.

Results are used again when the digest of everything they depend on is the same.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mlxkv.engines import machine as runtime
from mlxkv.engines import process
from mlxkv.engines.progress import say
from oracle.formats import disk, run_folder
from oracle.formats import plan as plans
from oracle.formats.errors import Refusal
from oracle.model.cache_folder import cache_dir
from oracle.model.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Question:
    """What the oracle is asked: which tokens, how many steps after them, in which chunks and dtype, and what to record."""

    checkpoint: Checkpoint
    prompt: str | None
    tokens: tuple[int, ...]
    prompt_tokens: int
    steps: int
    chunks: tuple[int, ...] | None
    dtype: str
    threads: int
    taps: tuple[str, ...] = ("hidden",)

    def digest(self) -> str:
        """Of everything that the answer depends on."""
        return run_folder.inputs_digest(
            fingerprint=self.checkpoint.fingerprint,
            config_digest=self.checkpoint.config_digest,
            tokens=list(self.tokens),
            prompt_tokens=self.prompt_tokens,
            steps=self.steps,
            chunks=None if self.chunks is None else list(self.chunks),
            dtype=self.dtype,
            threads=self.threads,
            taps=self.taps,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A verified run folder, and what making it took (None: it was there)."""

    folder: Path
    manifest: run_folder.Manifest
    made: process.Finished | None


def ask(question: Question, *, fresh: bool = False) -> Answer:
    """The oracle's folder for a question: the one kept from last time, or a new one; made by one process at a time."""
    require_torch()
    digest = question.digest()
    folder = cache_dir() / "oracle" / digest[:32]
    lock = cache_dir() / "locks" / digest[:32]
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        raise disk.unwritable(lock, error) from error
    with disk.alone(
        lock, waiting=lambda: say("oracle: another mlxkv asks it the same, waiting for that one")
    ):
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
        finished = process.start(["oracle", *_arguments(question, folder, prompt.name)])
    manifest = run_folder.read_manifest(folder)
    if manifest.inputs != digest:
        raise Refusal(
            f"{folder}: made from inputs {manifest.inputs[:16]}, expected {digest[:16]}; the oracle's sources changed meanwhile, run again"
        )
    return Answer(folder, manifest, finished)


def suspects_folder(manifest: run_folder.Manifest) -> Path:
    """Where the usual suspects of a run folder are kept."""
    return cache_dir() / "suspects" / run_folder.suspects_digest(manifest)[:32]


def make_suspects(checkpoint: Checkpoint, folder: Path, out: Path) -> process.Finished:
    """The usual suspects of a run folder into `out`; `checkpoint` is what the folder was made with."""
    revision = ["--revision", checkpoint.revision] if checkpoint.revision else []
    return process.start(
        ["oracle", "suspects", str(folder), checkpoint.source, *revision, "--out", str(out)]
    )


def require_torch() -> None:
    """A Refusal with the line that installs what is missing."""
    for package in ("torch", "transformers"):
        if not runtime.has(package):
            raise Refusal(
                f"{package} is not installed: pip install 'mlxkv[oracle]', or give --oracle DIR with a folder made elsewhere"
            )


def judged(manifest: run_folder.Manifest, folder: Path) -> dict[str, plans.Plan]:
    """The plans of a run folder, by name; refused where one is not what the manifest says."""
    found = {}
    for name, digest in manifest.plans.items():
        path = folder / "plans" / f"{name}.json"
        found[name] = plans.read(path)
        if found[name].digest != digest:
            raise Refusal(
                f"{path}: digest is {found[name].digest[:16]}, expected {digest[:16]}; make the folder again"
            )
    return found


def _arguments(question: Question, folder: Path, prompt: str) -> list[str]:
    arguments = ["run", question.checkpoint.source, "--out", str(folder), "--force"]
    if question.checkpoint.revision:
        arguments += ["--revision", question.checkpoint.revision]
    for key in question.checkpoint.without:
        arguments += ["--ignore-key", key]
    if question.prompt is not None:
        arguments += ["--prompt-file", prompt]
    else:
        arguments += [
            "--tokens",
            ",".join(map(str, question.tokens)),
            "--prompt-tokens",
            str(question.prompt_tokens),
        ]
    if question.chunks is not None:
        arguments += ["--chunks", ",".join(map(str, question.chunks))]
    arguments += [
        "--steps",
        str(question.steps),
        "--dtype",
        question.dtype,
        "--threads",
        str(question.threads),
    ]
    return [*arguments, "--taps", ",".join(question.taps)]

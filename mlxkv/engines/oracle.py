"""Starts the oracle in its own process, or reads a folder that it wrote here or elsewhere.

An answer is used again while the digest of everything that it depends on is the same.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec

from mlxkv.engines import machine, process, stays
from mlxkv.engines.progress import say
from oracle.formats import disk, questions, run_folder, stored, text
from oracle.formats.errors import AlreadySaid, Refusal, install
from oracle.formats.questions import Estimate
from oracle.formats.run_folder import Inputs
from oracle.model.cache_folder import cache_dir, hold, part
from oracle.model.checkpoint import Checkpoint, is_neighbour

_AT_ONCE = 128
"""Questions that one process of the oracle answers: each has a lock, which is an open file, of
which macOS allows a process 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Inputs):
    """What the oracle is asked of a model; `prompt` is the prompt's text where it is known."""

    checkpoint: Checkpoint
    prompt: str | None

    @property
    def digest(self) -> str:
        """That of all that the answer depends on."""
        asked = self.checkpoint
        return run_folder.inputs_digest(asked.fingerprint, asked.config_digest, self)

    def into(self, folder: Path) -> questions.One:
        """The question as the oracle reads it, whose answer goes into `folder`."""
        if self.probe:
            return questions.One(out=str(folder), probe=True)
        given = self.prompt is None
        return questions.One(
            out=str(folder),
            prompt=self.prompt,
            tokens=self.tokens if given else None,
            prompt_tokens=self.prompt_tokens if given else None,
            steps=self.steps,
            chunks=self.chunks,
            taps=tuple(self.taps),
            all_rows=self.all_rows,
        )


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
    """The folders for a question and for the model's probe; None for a probe that cannot be had."""
    (found,), probed = ask_all([question], probe, fresh=fresh)
    return told(found), probed


def ask_pairs(
    pairs: Sequence[tuple[Question, Question | None]],
) -> list[tuple[Answer, Answer | None]]:
    """As `ask_both` of each pair, whatever model it is about, by one process of the oracle."""
    require_torch()
    wanted = {one.digest: one for pair in pairs for one in pair if one is not None}
    answers = _in_turn(wanted, fresh=False)
    return [(told(answers[one.digest]), _probed(answers, probe)) for one, probe in pairs]


def told(answer: Answer | str) -> Answer:
    """An answer; why there is none the oracle has said."""
    if isinstance(answer, str):
        raise AlreadySaid
    return answer


def _probed(answers: Mapping[str, Answer | str], probe: Question | None) -> Answer | None:
    found = None if probe is None else answers.get(probe.digest)
    return found if isinstance(found, Answer) else None


def ask_all(
    asked: Sequence[Question], probe: Question | None, *, fresh: bool = False
) -> tuple[list[Answer | str], Answer | None]:
    """The folders for questions about one model, and for its probe; None for one that cannot be
    had, and for a question that the oracle refused why it did.

    One process makes those that are not kept, each whole as it is finished: what is there when it
    is interrupted is kept. What it took stands with each that it made.
    """
    require_torch()
    wanted = {one.digest: one for one in asked}
    if probe is not None:  # with the first ones, and locked last
        wanted = {(its := probe.digest): probe} | {k: v for k, v in wanted.items() if k != its}
    answers = _in_turn(wanted, fresh=fresh)
    return [answers[one.digest] for one in asked], _probed(answers, probe)


def _in_turn(wanted: Mapping[str, Question], *, fresh: bool) -> dict[str, Answer | str]:
    """Answers by their digests, so many at a time as one process is asked for."""
    asked, answers = list(wanted.items()), dict[str, Answer | str]()
    for first in range(0, len(asked), _AT_ONCE):
        answers |= _answers(dict(asked[first : first + _AT_ONCE]), fresh=fresh)
    return answers


def _answers(wanted: Mapping[str, Question], *, fresh: bool) -> dict[str, Answer | str]:
    """Answers by their digests, each locked while it is looked for and made."""
    answers, missing = dict[str, Answer | str](), dict[str, _Place]()
    # Everybody takes locks in one order, so that no two wait for one another. A probe comes last:
    # whoever waits for one holds nothing that its maker asks for.
    in_order = sorted(wanted, key=lambda digest: (wanted[digest].probe, digest))
    with ExitStack() as locks:
        for digest in in_order:
            with ExitStack() as lock:
                place = lock.enter_context(_alone(wanted[digest], digest))
                hold(place.folder)
                found = None if fresh else place.kept()
                if found is not None:
                    answers[digest] = found
                    stays.add(stays.ANSWERS, 1)
                    continue
                locks.enter_context(lock.pop_all())
                missing[digest] = place
        asked = [missing[digest] for digest in wanted if digest in missing]
        return answers | (_made(sorted(asked, key=_is_probe)) if asked else {})


def _is_probe(place: _Place) -> bool:
    return place.question.probe


def expected(asked: Sequence[Question], probe: Question | None) -> tuple[Estimate, list[bool]]:
    """What answers would take, nothing computed; and which of them are kept, the probe's last.

    The estimate is that of the missing ones alone, but its plans are those of all.
    """
    every = [*asked, *([probe] if probe is not None else [])]
    kept = [_place(one, one.digest).kept() is not None for one in every]
    with process.scratch() as room:
        whole = _estimate(every, room)
        missing = [one for one, there in zip(every, kept, strict=True) if not there]
        if len(missing) == len(every):
            return whole, kept
        if missing:
            found = _estimate(missing, room)
        else:
            found = msgspec.structs.replace(
                whole, seconds=0.0, memory_bytes=0, disk_bytes=0, converted_bytes=0
            )
    return msgspec.structs.replace(found, plans=whole.plans), kept


def _estimate(asked: Sequence[Question], room: Path) -> Estimate:
    file, printed = room / "questions.json", room / "estimate.json"
    places = {room / str(i): one for i, one in enumerate(asked)}
    questions.write(file, _file(places))
    process.start(["oracle", "many", str(file), "--dry-run"], stdout=printed)
    return questions.read_estimate(printed)


def _file(asked: Mapping[Path, Question]) -> questions.Asked:
    """The file of questions about one model, by the folders for their answers."""
    first = next(iter(asked.values()))
    return questions.Asked(
        model=first.checkpoint.source,
        revision=first.checkpoint.revision,
        ignore_keys=first.checkpoint.without,
        dtype=first.dtype,
        threads=first.threads,
        questions=tuple(one.into(folder) for folder, one in asked.items()),
    )


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
def _alone(question: Question, digest: str) -> Iterator[_Place]:
    """The place of a question's answer, which no other process makes or looks for meanwhile."""
    place = _place(question, digest)
    with _locked(digest):
        yield place


def _place(question: Question, digest: str) -> _Place:
    return _Place(question, part("oracle") / digest[:32], digest)


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


def _made(places: Sequence[_Place]) -> dict[str, Answer | str]:
    """Answers by their questions' digests, made by one process, a model after the other; or why it
    refused one of several about one model.

    A probe that the oracle cannot measure is not among them; why not, the oracle has said.
    """
    folders, finished, refused = {one.folder: one.question for one in places}, None, {}
    with process.scratch() as room:
        printed, models = room / "made.txt", _by_model(places)
        files = [room / f"{i}.json" for i in range(len(models))]
        for file, some in zip(files, models, strict=True):
            questions.write(file, _file({one.folder: one.question for one in some}))
        try:
            finished = process.start(["oracle", "many", *map(str, files)], stdout=printed)
        except AlreadySaid:
            refused = questions.read_refusals(printed, folders) if len(models) == 1 else {}
            if not refused and any(not one.question.probe for one in places):
                raise
        finally:
            stays.add(stays.ANSWERS, sum(folder.exists() for folder in folders))
    found = dict[str, Answer | str]()
    for one in places:
        if one.folder in refused:
            found[one.digest] = refused[one.folder]
            continue
        hold(one.folder)
        if not one.question.probe or one.kept() is not None:
            found[one.digest] = one.answer(finished)
    return found


def _by_model(places: Sequence[_Place]) -> list[list[_Place]]:
    """Those about one model together, in their order."""
    found: dict[tuple[object, ...], list[_Place]] = {}
    for one in places:
        asked, model = one.question, one.question.checkpoint
        key = model.source, model.fingerprint, model.config_digest, asked.dtype, asked.threads
        found.setdefault(key, []).append(one)
    return list(found.values())


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
    folder = part("texts") / digest[:32]
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
    folder = part("suspects") / run_folder.suspects_digest(manifest, plan)[:32]
    hold(folder)
    return folder


def make_suspects(
    checkpoint: Checkpoint, folder: Path, out: Path, *, plan: str
) -> process.Finished:
    """Writes the usual suspects of a run folder into `out`.

    These are truths of a model with one usual mistake each, at the borders of `plan`'s calls too.
    `checkpoint` is what the folder was made with.
    """
    source = [checkpoint.source, *_revision(checkpoint), "--plan", plan]
    took = process.start(["oracle", "suspects", str(folder), *source, "--out", str(out)])
    hold(out)
    return took


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

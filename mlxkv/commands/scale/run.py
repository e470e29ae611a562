"""`mlxkv reports --only scale`: models are made, compared, and a fault in each located."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlxkv.commands.scale import cases, faulty, page, result, same
from mlxkv.commands.scale.cases import Case
from mlxkv.commands.scale.measured import measured
from mlxkv.commands.scale.result import Fault, Model, Place, Result, Worst
from mlxkv.engines import process
from mlxkv.engines.progress import announce, say
from mlxkv.report.text import pretty
from oracle.formats import disk, run_folder, strict_json
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint, resolve

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
PAGE = "scale.md"
MODEL, MADE = "model", "made.txt"
WORK = ("cache", "narrow", "small", "port", "prompt.txt", "faulty.py")
"""What a case has in its folder: its model, with a line on how it was made, and the rest."""


def write(
    out: Path, named: Iterable[str] = (), *, device: str, room: Path | None, keep: bool
) -> Iterator[Path]:
    """Makes the named cases, or all: the file of each when it is done, and the page of those that
    are there. What an earlier run made of other cases stays.
    """
    known = cases.everything()
    chosen = [known[name] for name in known if name in set(named) or not set(named)]
    # A file that cannot be read would keep the page from being made, hours later.
    found(out, without={case.name for case in chosen})
    for case in chosen:
        announce(f"scale: {case.name}", case.estimate)
        with _room(case, room, keep=keep) as place:
            done = run(case, place, device=device)
        yield from publish(out, done)


def publish(out: Path, done: Result) -> Iterator[Path]:
    """Writes a case's file and the page; each one's path when it is there."""
    path = out / f"{done.case}.json"
    disk.write_text(path, pretty(result.to_json(done)))
    yield path
    disk.write_text(out / PAGE, page.markdown(found(out)))
    yield out / PAGE


def found(out: Path, *, without: Container[str] = ()) -> list[Result]:
    """The cases that are there, but those of some names, in the order of their names."""
    return [result.read(p) for p in sorted(out.glob("*.json")) if p.stem not in without]


@contextmanager
def _room(case: Case, room: Path | None, *, keep: bool) -> Iterator[Path]:
    """The folder that a case works in: in `room`, or in the cache folder, and removed at the end.

    With `keep` it stays, and the model that is in it is not made again.
    """
    if room is None:
        if keep:
            what = "no --room, expected the folder in which the models are to stay"
            raise Refusal(what, where="--keep", remedy="give one")
        with process.scratch() as made:
            yield made
        return
    place = room / case.name
    with disk.writing(place):
        place.mkdir(parents=True, exist_ok=True)
        _remove(place, WORK)
    try:
        yield place
    finally:
        if not keep:
            _remove(place, (MODEL, *WORK))
            with suppress(OSError):  # somebody has put something else there
                place.rmdir()


def _remove(place: Path, names: Iterable[str]) -> None:
    """Of a folder that a person named only what we have put there."""
    for path in (place / name for name in names):
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)


def run(case: Case, room: Path, *, device: str) -> Result:
    """A case in the folder `room`, where nothing of the oracle's is kept yet."""
    require_disk(case, room)
    checkpoint, cache = _model(case, room), room / "cache"
    words = [str(checkpoint.folder), *_options(case, checkpoint, room, device)]
    say(f"scale: {case.name}, cold")
    cold, verdict = measured(["compare", *words], cache=cache)
    warm = logits = None
    if case.again:
        say(f"scale: {case.name}, warm")
        warm, _ = measured(["compare", *words], cache=cache)
    if case.narrow is not None:
        say(f"scale: {case.name}, beside {case.of}")
        small = case.narrow(room / "narrow")
        answer = _answer(cache, checkpoint)
        logits = same.beside(checkpoint, answer, small, room, of=case.of, device=device)
    say(f"scale: {case.name}, with a fault")
    fault = _located(case, words, room, cache)
    runs = {"cold": cold, "warm": warm, "same": logits, "fault": fault}
    return _result(case, checkpoint, verdict, runs)


def require_disk(case: Case, room: Path) -> None:
    """Refuses a case that would fill the disk."""
    free = shutil.disk_usage(room).free
    if free < case.disk:
        what = f"{result.gigabytes(free)} free, expected {result.gigabytes(case.disk)}"
        remedy = "free some space or name another folder with --room"
        raise Refusal(f"{what} for {case.name}", where=room, remedy=remedy)


def _model(case: Case, room: Path) -> Checkpoint:
    """The case's model, made in `room` unless one that was made so is there."""
    made, line = room / MODEL, room / MODEL / MADE
    if not (line.is_file() and disk.read_text(line) == case.made):
        say(f"scale: {case.name}, its model")
        line.unlink(missing_ok=True)
        if (found := case.make(made)) != made:
            return resolve(str(found))
        disk.write_text(line, case.made)
    return resolve(str(made))


def _options(case: Case, checkpoint: Checkpoint, room: Path, device: str) -> list[str]:
    found = case.sequence.options(checkpoint.folder, room, steps=case.steps)
    found += [f"--steps={case.steps}", f"--dtype={case.dtype}", f"--device={device}"]
    return found + (["--quick"] if case.quick else [])


def _answer(cache: Path, checkpoint: Checkpoint) -> Path:
    """The oracle's folder over the case's sequence, which `compare` has left in its cache."""
    for folder in sorted((cache / "oracle").iterdir()):
        manifest = run_folder.read_manifest(folder)
        if not manifest.probe and manifest.fingerprint == checkpoint.fingerprint:
            return folder
    what = "no answer of the oracle's, expected the one that was compared with"
    raise Refusal(what, where=cache / "oracle")


def _located(case: Case, words: Sequence[str], room: Path, cache: Path) -> Fault:
    """What `mlxkv locate` says of the port with the case's fault in it."""
    file = room / "faulty.py"
    disk.write_text(file, faulty.text(case.fault))
    quick = [] if case.quick else ["--quick"]
    ran, value = measured(["locate", *words, *quick, f"--engine={file}:load"], cache=cache)
    place = None
    if value["outcome"] == "located":
        place = Place(value["layer"], value["tap"], value["head"], value["position"])
    reasons = "; ".join([value["outcome"], *value["reasons"]])
    return Fault(case.fault.words, case.fault.place, place, reasons, value["hint"], ran)


def _result(
    case: Case, checkpoint: Checkpoint, verdict: Mapping[str, Any], runs: Mapping[str, Any]
) -> Result:
    subject = verdict["subject"]
    n = len(subject["tokens"])
    return Result(
        case=case.name,
        about=case.about,
        model=Model(
            made=case.made,
            fingerprint=checkpoint.fingerprint,
            parameters=checkpoint.parameters,
            in_memory=checkpoint.parameters * ITEMSIZE[case.dtype],
            on_disk=sum(t.stop - t.start for t in checkpoint.tensors.values()),
        ),
        dtype=case.dtype,
        tokens=n,
        prompt_tokens=subject["prompt_tokens"],
        rows=f"{len(verdict['by_position']['positions']):,} of {n:,}",
        outcome=verdict["outcome"],
        scopes=verdict["scopes"],
        gates=worst(verdict["gates"]),
        reasons=[*verdict["reasons"], *verdict["notes"]],
        not_exercised=verdict["not_exercised"],
        seconds=dict(case.seconds),
        environment=verdict["environment"],
        sources=sources(),
        machine=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        **runs,
    )


def worst(gates: Sequence[Mapping[str, Any]]) -> list[Worst]:
    """Of each gate that ran the plan that did worst, in the order of the gates."""
    found: dict[str, Worst] = {}
    for gate in gates:
        one = Worst(gate["name"], gate["plan"], gate["value"], gate["limit"])
        if gate["ran"] and (one.name not in found or one.badness > found[one.name].badness):
            found[one.name] = one
    return list(found.values())


def sources() -> str:
    """A digest of the code of both packages."""
    package = Path(__file__).parents[2]
    ours = {str(p.relative_to(package)): disk.sha256(p) for p in sorted(package.rglob("*.py"))}
    text = strict_json.encode({"mlxkv": ours, "oracle": run_folder.sources()})
    return hashlib.sha256(text.encode()).hexdigest()

"""Many sequences on one model: followed in batches, each judged and gone before the next begins.

One process of the oracle answers all. The engine loads its weights once a batch, and a batch is as
many sequences as leave MOST bytes of traces on the disk, which is all of them where they are short.
If the run breaks off, the batches that are judged, and the lanes that are finished, are kept for
the next one.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mlxkv.commands.compare.ask import Answer, Answers, Request, Untold, ask
from mlxkv.commands.compare.follow import Engine, Runs, find, followed, lanes_of, probed
from mlxkv.engines import estimate, lanes
from mlxkv.engines.lanes import Lane, Room
from mlxkv.engines.progress import bar
from oracle.formats import disk, strict_json
from oracle.formats.errors import Refusal

MOST = 2 * 10**9
"""Bytes of traces of a batch. Of the default model 25 prompts of 24 tokens leave as many, and the
engine's start, which each batch costs once, takes 2 s of about a minute."""

FILES = 25
"""Files that a sequence may hold open: its traces and its oracle folder, of which 38 prompts held
616, and the handle that keeps the folder.
"""

_FILE = "judged.msgpack"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Batch:
    """Some of the sequences: each one's name and answer. `part` tells its folders from others'."""

    sequences: tuple[tuple[str, Answer], ...]
    part: str
    lanes: Mapping[str, Lane]

    def digest(self, *about: str) -> str | None:
        """Of all that judging it depends on; None where that cannot be known."""
        digests = [lane.digest for lane in self.lanes.values()]
        if None in digests:
            return None
        cases = [(name, of.case.manifest.inputs, str(of.folder)) for name, of in self.sequences]
        text = strict_json.encode([digests, cases, list(about)])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def batches(
    requests: Sequence[Request],
    judge: Callable[[str, Runs, bool], T],
    *,
    kind: type[T],
    about: Sequence[str] = (),
) -> Generator[T | Untold, None, None]:
    """What `judge` makes of each request's runs, in order; its name, and whether it is the longest,
    are given too. Those that the oracle refused come first.

    `kind` is what it makes, and `about` what that depends on beside the runs and our sources.
    """
    engine = replace(find(requests[0]), several=True)
    disk.allow_open(FILES * (len(requests) + 4))
    answers = ask(requests)
    yield from answers.refused
    named = _named(requests, answers)
    longest = max(named, key=lambda one: one[1].case.length)[0]
    with lanes.room() as room:
        cut = _cut(engine, named, answers.probe, room.folder)
        probe = probed(engine, answers, room) if len(cut) > 1 else None
        for some in cut:
            digest = some.digest(longest, *about)
            place = room.folder / f"judged{some.part}"
            made: list[Any] = _resumed(room, digest, place, kind)
            yield from made
            if not made:
                asked = Answers(tuple(of for _, of in some.sequences), answers.probe)
                asked = asked if probe is None else replace(asked, probe=None)
                runs = followed(engine, asked, room, part=some.part, probe=probe)
                with bar("judging", len(runs)) as advance:
                    for (name, _), one in zip(some.sequences, runs, strict=True):
                        made.append(_judged(judge, name, one, longest=name == longest))
                        advance(1)
                        yield made[-1]
                _finish(room, digest, place, made)
            for lane in some.lanes.values():
                room.drop(lane)


def _named(requests: Sequence[Request], answers: Answers) -> list[tuple[str, Answer]]:
    """The answers by their requests' names, in order."""
    refused = [one.name for one in answers.refused]
    answered = (str(one.name) for one in requests if str(one.name) not in refused)
    return list(zip(answered, answers.each, strict=True))


def _resumed(room: Room, digest: str | None, place: Path, kind: type[T]) -> list[T]:
    """What a run that broke off had made; nothing where it had not."""
    if not room.resumed(digest, place):
        return []
    made = _read(place, kind)
    room.finish(digest, place, judged=len(made))
    return made


def _finish(room: Room, digest: str | None, place: Path, made: Sequence[object]) -> None:
    """Keeps a batch for the next run; one of which not all could be judged is tried again."""
    if not any(isinstance(one, Untold) for one in made):
        _write(place, made)
        room.finish(digest, place, judged=len(made))


def _judged(
    judge: Callable[[str, Runs, bool], T], name: str, runs: Runs, *, longest: bool
) -> T | Untold:
    why = runs.refused
    try:
        if not why:
            return judge(name, runs, longest)
    except Refusal as error:
        why = str(error)
    manifest = runs.case.manifest
    return Untold(name, why, tuple(manifest.tokens), manifest.prompt_tokens)


def _cut(
    engine: Engine,
    named: Sequence[tuple[str, Answer]],
    probe: Answer | None,
    out: Path,
) -> list[_Batch]:
    """The sequences in batches whose traces are MOST bytes each, the probe's in the only one."""
    sizes = [_disk(lanes_of(engine, Answers((of,), None), out)) for _, of in named]
    groups = grouped(sizes)
    several = len(groups) > 1
    found = []
    for i, places in enumerate(groups):
        some = [named[place] for place in places]
        part = f"-{i}" if several else ""
        asked = Answers(tuple(of for _, of in some), None if several else probe)
        found.append(_Batch(tuple(some), part, lanes_of(engine, asked, out, part=part)))
    return found


def grouped(sizes: Sequence[int]) -> list[list[int]]:
    """The places of sequences, in batches, by the bytes that each leaves."""
    groups: list[list[int]] = []
    room = 0
    for place, size in enumerate(sizes):
        if not groups or size > room:
            groups.append([])
            room = MOST
        groups[-1].append(place)
        room -= size
    return groups


def _disk(found: Mapping[str, Lane]) -> int:
    return sum(estimate.disk_of(lane.job, lane.checkpoint) for lane in found.values())


def _write(place: Path, made: Sequence[object]) -> None:
    """Packed as msgpack, which has the numbers that JSON lacks."""
    place.mkdir()
    packed = msgspec.msgpack.encode(made, enc_hook=lambda number: number.item())
    (place / _FILE).write_bytes(packed)


def _read(place: Path, kind: type[T]) -> list[T]:
    """What was made; nothing where the file is damaged, so that it is made again."""
    of: Any = list[kind]  # type: ignore[valid-type]
    try:
        found: list[T] = msgspec.msgpack.decode((place / _FILE).read_bytes(), type=of)
        return found
    except (OSError, msgspec.DecodeError):
        shutil.rmtree(place)
        return []

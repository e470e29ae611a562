"""`mlxkv store`: what is kept in the cache folder, and how it is cleared.

Only names that mlxkv gives are looked at, and no link is followed. What a running process holds is
left alone: a process holds the entries that it uses (`oracle.model.cache_folder.hold`), the files
that it is writing, its scratch folders, and the answer that it is making. Locks are empty files and
stay.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxkv.report.text import clip, columns, quoted
from oracle.formats import disk, strict_json
from oracle.formats.errors import Refusal
from oracle.model import default
from oracle.model.cache_folder import cache_dir

_HEX = "[0-9a-f]{32}"
_WEIGHTS = r"[0-9a-f]{64}-(float32|float16|bfloat16)(-[0-9a-f]{16})?\.safetensors"
_NAMES = {
    "models": rf"{re.escape(default.FOLDER)}|gguf-\d+-{_HEX}",
    "converted": rf"{_WEIGHTS}|\.{_WEIGHTS}\.[a-z0-9_]{{8}}\.part",
    "oracle": _HEX,
    "suspects": _HEX,
    "texts": _HEX,
    "fingerprints": rf"{_HEX}\.json",
    "lanes": _HEX,
}
_FILES = ("converted", "fingerprints")
KINDS = (*_NAMES, "runs")
"""Converted models; weights in another dtype than their files'; the oracle's answers; the usual
suspects of an answer; the truths of texts; hashes of weights; what runs that broke off had finished
(the next one takes it up); and what runs work in, or have left where they were killed."""
_SCRATCH = r"\.({})\.[0-9a-f]{{8}}(\.part|\.old)?"
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that is kept: `name` is its path within the cache folder.

    `about` says what it is of, "" where it does not tell.
    """

    kind: str
    name: str
    bytes: int
    age_seconds: float
    about: str
    in_use: bool


def listing(*, as_json: bool) -> str:
    """What `store list` prints: the newest last, and the total."""
    entries = found()
    total = sum(entry.bytes for entry in entries)
    if as_json:
        kinds = {kind: _sum(entries, kind) for kind in KINDS}
        value = {"format": "mlxkv-store/1", "folder": str(cache_dir()), "bytes": total}
        value |= {"kinds": kinds, "entries": [asdict(entry) for entry in entries]}
        return json.dumps(value, indent=1) + "\n"
    rows = [_row(entry) for entry in entries if entry.kind != "fingerprints"]
    lines = columns(("kind", "size", "age", "name", "about"), rows, left={0, 3, 4}) if rows else []
    hashes = _sum(entries, "fingerprints")
    if hashes["entries"]:
        size, files = _size(hashes["bytes"]), _entries(hashes["entries"])
        lines.append(f"fingerprints: {files} with hashes of weights, {size}")
    total_of = f"{_entries(len(entries))}, {_size(total)} ({total:,} bytes)"
    return "\n".join([*lines, f"total: {total_of} in {cache_dir()}"]) + "\n"


def _sum(entries: Sequence[Entry], kind: str) -> dict[str, int]:
    sizes = [entry.bytes for entry in entries if entry.kind == kind]
    return {"entries": len(sizes), "bytes": sum(sizes)}


def _row(entry: Entry) -> tuple[str, ...]:
    name = entry.name + (" (in use)" if entry.in_use else "")
    return entry.kind, _size(entry.bytes), _age(entry.age_seconds), name, entry.about


def clearing(kinds: Collection[str], older_than: str | None) -> list[Entry]:
    """What `clear` would take: of these kinds (of all, if none is named) what is older than that.

    An age is a number and a unit, as in 90m, 12h, 30d and 2w; a Refusal for anything else.
    """
    given = re.fullmatch(r"(\d{1,9})([smhdw])", "0s" if older_than is None else older_than)
    if given is None:
        what = "expected an age such as 90m, 12h, 30d or 2w"
        raise Refusal(what, where=f"--older-than {older_than!r}", remedy="take one of these units")
    least = int(given[1]) * (_UNITS | {"w": 7 * 86400})[given[2]]
    wanted = kinds or KINDS
    return [entry for entry in found() if entry.kind in wanted and entry.age_seconds >= least]


def question(entries: Sequence[Entry]) -> str:
    """What a person is asked before they are removed."""
    sizes = [entry.bytes for entry in entries if not entry.in_use]
    return f"remove {_entries(len(sizes))}, {_size(sum(sizes))}, from {cache_dir()}"


def clear(entries: Sequence[Entry]) -> tuple[str, int]:
    """Removes what nobody holds; what was freed, and the exit code: 2 where one cannot be removed.

    An entry is renamed first, so that nothing half removed is ever taken for a whole one.
    """
    freed, removed, left, failed = 0, 0, [], []
    for entry in entries:
        try:
            with _free(entry.kind, cache_dir() / entry.name) as free:
                if not free:
                    left.append(f"left: {entry.name} is in use by a running process\n")
                    continue
                _remove(cache_dir() / entry.name)
        except OSError as error:
            failed.append(f"left: {entry.name} cannot be removed ({error.strerror or error})\n")
            continue
        removed, freed = removed + 1, freed + entry.bytes
    of = f"removed {removed} of {_entries(len(entries))}"
    done = f"{of}, freed {_size(freed)} ({freed:,} bytes) in {cache_dir()}\n"
    return "".join([*left, *failed, done]), 2 if failed else 0


def _remove(path: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not path.name.startswith((".", "tmp")):
        doomed = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        path = path.rename(doomed)
    shutil.rmtree(path)


def found() -> list[Entry]:
    """Everything of ours below the cache folder, the newest last."""
    if (folder := cache_dir()).exists() and not folder.is_dir():
        what = "it is a file, expected a folder"
        raise Refusal(what, where=folder, remedy="name the cache folder in MLXKV_CACHE")
    now, entries = time.time(), []
    for kind, path in _ours():
        with suppress(FileNotFoundError), _free(kind, path) as free:
            age = round(max(0.0, now - path.stat().st_mtime), 3)
            about = clip(_about(kind, path, free), 60)
            name = str(path.relative_to(cache_dir()))
            entries.append(Entry(kind, name, _bytes(path), age, about, not free))
    return sorted(entries, key=lambda entry: -entry.age_seconds)


def _ours() -> Iterator[tuple[str, Path]]:
    """Kind and path of what bears one of our names, and is no link."""
    for kind, name in _NAMES.items():
        is_ours = stat.S_ISREG if kind in _FILES else stat.S_ISDIR
        yield from ((kind, path) for path in _matching(cache_dir() / kind, name, is_ours))
        scratch = _matching(cache_dir() / kind, _SCRATCH.format(name), stat.S_ISDIR)
        yield from (("runs", path) for path in scratch)
    runs = _matching(cache_dir() / "runs", "tmp[0-9a-f]{8}", stat.S_ISDIR)
    yield from (("runs", path) for path in runs)


def _matching(folder: Path, name: str, is_ours: Any) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        with suppress(FileNotFoundError):
            if re.fullmatch(name, path.name) and is_ours(path.lstat().st_mode):
                yield path


@contextmanager
def _free(kind: str, path: Path) -> Iterator[bool]:
    """Whether nobody holds the entry, which is ours within the block then."""
    # A file that is being written is not locked itself; whoever writes it holds the folder.
    half = path.suffix == ".part" and kind in _FILES
    locks = [] if kind == "fingerprints" else [path.parent if half else path]
    locks += [cache_dir() / "locks" / path.name] if kind in ("oracle", "texts") else []
    with ExitStack() as stack:
        yield all(stack.enter_context(disk.unheld(lock)) for lock in locks)


def _about(kind: str, path: Path, free: bool) -> str:
    """What an entry is of, as far as it tells."""
    if kind == "models":
        name = default.NOTE if path.name == default.FOLDER else ""
        with suppress(OSError):
            name = (path / "note.txt").read_text(encoding="utf-8", errors="replace").strip()
        return name
    if kind == "oracle":
        with suppress(Refusal, KeyError, TypeError):
            m = strict_json.read(path / "manifest.json", remedy="")
            text = f" {quoted(m['prompt'])}" if m["prompt"] is not None else ""
            text = " (the probe)" if m.get("probe") else text
            return f"{m['name']}, {m['dtype']}, {len(m['tokens'])} tokens{text}"
    if kind == "texts":
        with suppress(Refusal, KeyError, TypeError):
            m = strict_json.read(path / "text.json", remedy="")
            return f"{m['name']}, {len(m['tokens'])} tokens of text, {len(m['stored'])} caches"
    if kind == "converted":
        half = ", left half written" if free and path.suffix == ".part" else ""
        return f"weights in {path.name.split('-')[1].split('.')[0]}{half}"
    if kind == "lanes":
        return "finished by a run that broke off"
    scratch = "left over from a killed run" if free else "of a running process"
    return scratch if kind == "runs" else ""


def _bytes(path: Path) -> int:
    """The bytes of a file, or of all files in a folder; what vanishes meanwhile counts nothing."""
    if not path.is_dir():
        return path.stat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _entries(count: int) -> str:
    return f"{count} entr{'y' if count == 1 else 'ies'}"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"


def _age(seconds: float) -> str:
    unit = next((name for name, size in _UNITS.items() if seconds >= size), "s")
    return f"{seconds / _UNITS[unit]:.0f} {unit}"


def confirmed(entries: Sequence[Entry], *, yes: bool) -> bool:
    """Whether they may be removed: `yes`, or a person at the terminal says so."""
    if yes or not any(not entry.in_use for entry in entries):
        return True
    if not sys.stdin.isatty():
        what = f"would {question(entries)}, expected --yes, as there is no terminal to ask at"
        raise Refusal(what, where="store clear", remedy="add it, or see `mlxkv store list` first")
    import click

    return click.confirm(f"mlxkv: {question(entries)}?", err=True)

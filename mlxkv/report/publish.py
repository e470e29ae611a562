"""From rendered files to a folder, which is claimed before the work and filled all at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from oracle.formats import disk


@dataclass(frozen=True, slots=True)
class Report:
    """What a command has to say: its files by name, the text for a terminal, what `--json` prints
    instead, and the exit code.

    The files are renamed into place in the order given. `stale` are names of files that an earlier
    run may have left, to be removed.
    """

    files: Mapping[str, str]
    text: str
    json: str
    exit_code: int
    stale: tuple[str, ...] = ()


def publish(out: Path, make: Callable[[], Report]) -> Report:
    """Makes a report and writes its files into `out`, which is claimed before the work."""
    claim(out)
    report = make()
    write(out, report.files)
    for name in report.stale:
        (out / name).unlink(missing_ok=True)
    return report


def claim(folder: Path) -> None:
    """Proves that the output folder can be made and written; leaves nothing behind."""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise disk.unwritable(folder, error) from error
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Text files by their names below `folder`: all of them or, where one cannot be written, none.

    They are renamed in the order given, so a file that links to others should come after them.
    """
    with ExitStack() as stack:
        parts = [(stack.enter_context(disk.part(folder / name)), folder / name) for name in files]
        try:
            for (part, _), text in zip(parts, files.values(), strict=True):
                # A path may hold bytes that are no text.
                part.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise disk.unwritable(folder, error) from error
        for part, path in parts:
            part.replace(path)

"""From rendered files to a folder, which is claimed before the work and filled all at once."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
    with _left_as_it_was(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))  # on a full disk an empty file can still be made


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Text files by their names below `folder`: all of them or, where one cannot be written, none.

    They are renamed in the order given, so a file that links to others should come after them.
    """
    paths = [folder / name for name in files]
    with ExitStack() as stack:
        for place in (folder, *(path.parent for path in paths)):
            stack.enter_context(_left_as_it_was(place))
        parts = [stack.enter_context(disk.part(path)) for path in paths]
        for part, text in zip(parts, files.values(), strict=True):
            # A path may hold bytes that are no text.
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
        for path in paths:
            if path.is_dir():
                raise disk.unwritable(path, IsADirectoryError(errno.EISDIR, "is a folder"))
        _rename(parts, paths)


def _rename(parts: Sequence[Path], paths: Sequence[Path]) -> None:
    """All of them or, where one cannot be renamed, none."""
    for i, (part, path) in enumerate(zip(parts, paths, strict=True)):
        try:
            part.replace(path)
        except OSError:
            for renamed in paths[:i]:
                renamed.unlink()
            raise


@contextmanager
def _left_as_it_was(folder: Path) -> Iterator[None]:
    """Turns an OSError into a Refusal, and removes folders that the block made and left empty."""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        yield
    except OSError as error:
        raise disk.unwritable(folder, error) from error
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()

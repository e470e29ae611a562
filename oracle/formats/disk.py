"""What lies on disk: files that are whole or not there, their digests, folders and locks of one process.

Locks are the system's (flock), which go with the process however it ends. Where a file system has none, nothing is swept.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from oracle.formats.errors import Refusal


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """A regular file's bytes; OSError for anything else: reading a pipe or a device may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open("rb") as file:
        yield file


def read_bytes(path: Path) -> bytes:
    """A regular file whole."""
    with opened(path) as file:
        return file.read()


@contextmanager
def part(path: Path) -> Iterator[Path]:
    """An empty file beside `path` under a temporary name, to be renamed to it; removed at the end where it was not."""
    made = claim_part(path)
    try:
        yield made
    finally:
        made.unlink(missing_ok=True)


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, renamed to it if the block succeeds and removed if it does not."""
    with part(path) as made:
        try:
            yield made
            made.replace(path)
        except OSError as error:
            raise unwritable(path, error) from error


def write_text(path: Path, text: str) -> None:
    """A text file that is either whole or not there."""
    with atomic(path) as made:
        # A path may hold bytes that are no text.
        made.write_text(text, encoding="utf-8", errors="backslashreplace")


def unwritable(path: Path, error: OSError) -> Refusal:
    """The one line for an output that could not be written."""
    return Refusal(
        f"{path}: cannot be written ({error.strerror or error}); choose another folder or free some space"
    )


def claim_part(path: Path) -> Path:
    """An empty file beside `path`, under a temporary name."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
    except OSError as error:
        raise unwritable(path, error) from error
    os.chmod(name, 0o644)
    return Path(name)


def sha256(path: Path) -> str:
    """Of a file's bytes, read in pieces."""
    try:
        with opened(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Refusal(f"{path}: cannot be read ({error.strerror}); check the path") from error


@contextlib.contextmanager
def own_folder(base: Path, *, prefix: str, suffix: str = "") -> Iterator[Path]:
    """A new folder in `base`, removed at the end; and before, those of the same pattern that killed processes left.

    OSError where none can be made.
    """
    for left in base.glob(f"{glob.escape(prefix)}????????{glob.escape(suffix)}"):
        _sweep(left)
    with contextlib.ExitStack() as stack:
        while (folder := _claimed(base / f"{prefix}{secrets.token_hex(4)}{suffix}", stack)) is None:
            pass
        yield folder


@contextlib.contextmanager
def alone(path: Path, *, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock file `path` meanwhile. Where another process does, `waiting` is called and this one waits for its end."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _locked(handle):
            waiting()
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _claimed(folder: Path, stack: contextlib.ExitStack) -> Path | None:
    """The folder, made and locked until the stack ends; None where a sweeper took it before it was locked."""
    if folder.exists():
        return None
    # Before it is there: a signal that comes as soon as it is must find who removes it.
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, handle)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        # A sweeper that saw the folder before it was locked has removed it by now.
        if folder.exists():
            return folder
    return None


def _sweep(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if _locked(handle):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

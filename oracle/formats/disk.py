"""Files that are either whole or not there, their digests, and the folders and locks of a process.

Locks are the system's (flock). They go with their process however it ends, and a folder can be
locked itself, so that no lock file stays behind. If a file system has no locks, nothing is swept.
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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from oracle.formats.errors import Refusal, one_line

# A file written to again within a tick of the clock keeps its times; kernels tick every 10 ms.
_TICK_NS = 50_000_000
_HASHED: dict[tuple[int, ...], str] = {}


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """A regular file's bytes; OSError for anything else, since reading a pipe may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open("rb") as file:
        yield file


def read_bytes(path: Path) -> bytes:
    """A regular file whole."""
    with opened(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """A UTF-8 text file whole; a Refusal if it is none."""
    try:
        return path.read_bytes().decode()  # a pipe too
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot be read as UTF-8 text ({one_line(error)})"
        raise Refusal(what, where=path, remedy="check the path") from error


@contextmanager
def reading(path: Path, remedy: str = "check the path") -> Iterator[None]:
    """Turns an OSError of the block into the Refusal that `path` cannot be read."""
    try:
        yield
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        raise Refusal(why, where=path, remedy=remedy) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of the block into the Refusal that `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


@contextmanager
def part(path: Path) -> Iterator[Path]:
    """An empty file beside `path` under a temporary name; removed at the end unless renamed."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        os.chmod(name, 0o644)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`: renamed to it if the block succeeds, else removed."""
    with part(path) as made, writing(path):
        yield made
        made.replace(path)


def linked(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has no links."""
    with writing(target):
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)


def allow_open(files: int) -> None:
    """Lets this process hold so many files open, or as many as the system allows at all.

    A map keeps its file open. macOS allows 256 until it is asked for more.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = files if hard == resource.RLIM_INFINITY else min(files, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def write_text(path: Path, text: str) -> None:
    """A text file that is either whole or not there."""
    with atomic(path) as made:
        # A path may hold bytes that are no text.
        made.write_text(text, encoding="utf-8", errors="backslashreplace")


def unwritable(path: Path, error: OSError) -> Refusal:
    """The one line for an output that could not be written."""
    why = f"cannot be written ({error.strerror or error})"
    return Refusal(why, where=path, remedy="choose another folder or free some space")


def sha256(path: Path) -> str:
    """Of a file's bytes, read in pieces."""
    with reading(path), opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file is written to or replaced: device, inode, size, times in ns."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def hash_once(path: Path) -> str:
    """The sha256 of a file's bytes, not read again in this process while its stat is the same."""
    with reading(path):
        now, begun = _stamp(path), time.time_ns()
        if now in _HASHED:
            return _HASHED[now]
        digest = sha256(path)
        if settled(max(now[-2:]), begun) and _stamp(path) == now:
            _HASHED[now] = digest
        return digest


def settled(mtime_ns: int, begun_ns: int) -> bool:
    """Whether another write since reading began would show in the file's times."""
    return begun_ns - mtime_ns > _TICK_NS


@contextlib.contextmanager
def own_folder(base: Path, *, prefix: str, suffix: str = "") -> Iterator[Path]:
    """A new folder in `base`, removed at the end; folders that killed processes left go first.

    Those are the folders of the same prefix and suffix that no process has locked. OSError where no
    folder can be made.
    """
    for left in base.glob(f"{glob.escape(prefix)}????????{glob.escape(suffix)}"):
        _sweep(left)
    with contextlib.ExitStack() as stack:
        while (folder := _claimed(base / f"{prefix}{secrets.token_hex(4)}{suffix}", stack)) is None:
            pass
        yield folder


@contextlib.contextmanager
def alone(path: Path, *, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock file `path`; if another process does, calls `waiting`, then waits for it."""
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
    """The folder, made and locked until the stack ends; None if it was swept before the lock."""
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


@contextmanager
def unheld(path: Path) -> Iterator[bool]:
    """Whether no process holds the lock of a file or folder, which is ours within the block then.

    What is not there is held by nobody.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        yield isinstance(error, FileNotFoundError)
        return
    try:
        yield _locked(handle)
    finally:
        os.close(handle)


def held(folder: Path) -> int:
    """A handle that keeps `unheld` from any process's hands while it is open, beside others'."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def _sweep(folder: Path) -> None:
    with unheld(folder) as free:
        if free:
            shutil.rmtree(folder, ignore_errors=True)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

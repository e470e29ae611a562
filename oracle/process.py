"""A process's life: the folders that are its own while it runs, what it does alone, and that it ends with its parent.

Locks are the system's (flock), which go with the process however it ends. Where a file system has none, nothing is swept.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PARENT = "MLXKV_PARENT"
"""The environment variable in which mlxkv tells a process who started it."""


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


def end_with_parent() -> None:
    """Has this process terminated once the one named in MLXKV_PARENT is gone; nothing where none is named."""
    parent = os.environ.get(PARENT, "")
    if parent.isdecimal():
        threading.Thread(target=_watch, args=[int(parent)], daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


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

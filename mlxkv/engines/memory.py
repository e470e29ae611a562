"""What memory our processes take while they run, that of their files not counted.

The system tells a process's largest resident size when it ends, mapped files included, which it can
drop and read again. What it cannot drop is memory that no file stands behind, shared memory and
what was swapped out (RssAnon, RssShmem and VmSwap of Linux's /proc). It is sampled ten times a
second by a thread. Other systems do not tell it.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

EVERY = 0.1
"""Seconds between two samples; a layer's weights, which come and go, stay for longer in a model
whose memory matters."""
_FIELDS = re.compile(rb"^(?:RssAnon|RssShmem|VmSwap):\s*(\d+) kB$", re.MULTILINE)
_NOW: dict[int, int] = {}
_MOST = {"together": 0}


class Watch:
    """Samples a process and its children, in a thread, from `begin` to `end`."""

    def __init__(self) -> None:
        self.most: int | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, pid: int) -> None:
        self._thread = threading.Thread(target=self._watch, args=[pid], daemon=True)
        self._thread.start()

    def end(self) -> int | None:
        """The most bytes that a sample found; None where there was none."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        return self.most

    def _watch(self, pid: int) -> None:
        while (found := anonymous(pid)) is not None:
            self.most = max(found, self.most or 0)
            _NOW[pid] = found
            now = sum(_NOW.copy().values()) + (anonymous() or 0)
            _MOST["together"] = max(_MOST["together"], now)
            if self._ended.wait(EVERY):
                break
        _NOW.pop(pid, None)


def together() -> int | None:
    """The most that this process and those that it started took at one moment; None: not known."""
    return _MOST["together"] or None


def anonymous(pid: int | None = None) -> int | None:
    """Bytes of a process and its children (None: of this one alone) that cannot be dropped, now.

    None where the system does not tell, or the process is gone.
    """
    mine = os.getpid()
    found = [held(mine)] if pid is None else [held(one) for one in tree(pid) if one != mine]
    known = [one for one in found if one is not None]
    return sum(known) if known else None


def held(pid: int) -> int | None:
    """Bytes of one process that cannot be dropped, now; None where the system does not tell."""
    with suppress(OSError):
        told = _FIELDS.findall(Path(f"/proc/{pid}/status").read_bytes())
        return 1024 * sum(map(int, told)) if told else None
    return None


def tree(pid: int) -> Iterator[int]:
    """A process and its descendants, by what the system lists under each of their threads."""
    yield pid
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                for child in Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split():
                    yield from tree(int(child))

"""What memory our processes take while they run, that of their files not counted.

The system tells a process's largest resident size when it ends, mapped files included, which it can
drop and read again. What cannot be dropped (RssAnon of Linux's /proc) is sampled ten times a second
by a thread. Other systems do not tell it.
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
_ANONYMOUS = re.compile(rb"^RssAnon:\s*(\d+) kB$", re.MULTILINE)
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
    """Bytes of a process (None: of this one alone) and its children that are no file's, now.

    None where the system does not tell, or the process is gone.
    """
    found = [_own("self")] if pid is None else [_own(str(one)) for one in _family(pid)]
    known = [one for one in found if one is not None]
    return sum(known) if known else None


def _own(name: str) -> int | None:
    with suppress(OSError):
        told = _ANONYMOUS.search(Path("/proc", name, "status").read_bytes())
        return int(told[1]) * 1024 if told else None
    return None


def _family(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_bytes().split():
            if int(child) != os.getpid():
                yield from _family(int(child))

"""What a process and all that it starts hold in memory and on disk, watched while they run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mlxkv.engines.memory import held, tree

INTERVAL = 0.05
"""Seconds between two looks at memory. A look at four processes takes 0.5 ms."""
DISK_INTERVAL = 1.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Peaks in bytes: of all processes `together`, at one time, and of `each` by its name.

    They are the largest of `samples` looks; what came and went between two was not seen.
    """

    together: int
    each: dict[str, int]
    samples: int


class Watch:
    """Looks at a process and its descendants, and at a folder, from the `with` on until its end.

    `disk` is the largest size of each entry of the folder `room`, in bytes.
    """

    def __init__(self, pid: int, room: Path | None = None, *, interval: float = INTERVAL) -> None:
        self.pid, self.room, self.interval = pid, room, interval
        self.disk: dict[str, int] = {}
        self._together, self._samples = 0, 0
        self._each: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    @property
    def memory(self) -> Memory | None:
        """None where the system does not tell, as macOS does not."""
        if not self._samples:
            return None
        return Memory(self._together, dict(sorted(self._each.items())), self._samples)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        disk_at = 0.0
        while not self._ended.is_set():
            self._look_at_memory()
            if self.room is not None and time.monotonic() >= disk_at:
                for kind, size in on_disk(self.room).items():
                    self.disk[kind] = max(size, self.disk.get(kind, 0))
                disk_at = time.monotonic() + DISK_INTERVAL
            self._ended.wait(self.interval)

    def _look_at_memory(self) -> None:
        found = holding(self.pid)
        if not found:
            return
        self._samples += 1
        self._together = max(self._together, sum(size for _, size in found))
        for name, size in found:
            self._each[name] = max(size, self._each.get(name, 0))


def holding(pid: int) -> list[tuple[str, int]]:
    """Name and bytes of a process and of all its descendants; empty where nothing is known."""
    found: list[tuple[str, int]] = []
    if not Path(f"/proc/{pid}/task/{pid}/children").exists():
        return found  # not Linux, or one that does not tell whose child a process is
    for one in tree(pid):
        with suppress(OSError):  # it has ended meanwhile
            size = held(one)
            if size is not None:  # one that has ended and that nobody has waited for has none
                line = Path(f"/proc/{one}/cmdline").read_bytes().decode(errors="replace")
                found.append((named(line.split("\0")), size))
    return found


def named(line: Sequence[str]) -> str:
    """The module that a process of ours runs and the command, or of an engine its job's folder: as
    in `oracle run` and `port float64`. A fork has the name of what it is a fork of.
    """
    words = list(line[line.index("-m") + 1 :]) if "-m" in line else [Path(line[0]).name]
    name, *rest = words[0].removeprefix("mlxkv.engines."), *words[1:2]
    job = Path(rest[0]) if rest else None
    if job is None or rest[0].startswith("-"):
        return name
    return f"{name} {job.parent.name if job.name == 'job.json' else job.name}"


def on_disk(folder: Path) -> dict[str, int]:
    """The bytes that each entry of a folder takes on disk, by its name."""
    with suppress(OSError):
        return {path.name: _taken(path) for path in folder.iterdir()}
    return {}


def _taken(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # it is gone meanwhile
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total

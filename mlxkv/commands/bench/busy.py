"""Whether others use this machine, before a run and during it."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MOST = 0.25
"""Cores that others may use: on two, half of one is a quarter of what decoding gets."""
_WINDOW = 0.5  # seconds
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class Busy:
    """Cores that others used, on average: `before` the run, and `during` it.

    The second is None where the system does not tell.
    """

    before: float
    during: float | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """What is to be warned of."""
        return tuple(_warnings(self))


def _warnings(busy: Busy) -> Iterable[str]:
    remedy = "close other programs and run again"
    for when, cores in (("before", busy.before), ("during", busy.during)):
        if cores is not None and cores > MOST:
            yield f"others used {cores:.1f} of {os.cpu_count()} cores {when} the run; {remedy}"


class Watch:
    """From its making on."""

    def __init__(self) -> None:
        """Looks at the machine for half a second, in which this process sleeps."""
        begun = _used()
        if begun is not None:
            time.sleep(_WINDOW)
        now = _used()
        if begun is None or now is None:
            self.before = os.getloadavg()[0]  # of the last minute
        else:
            self.before = max(0.0, now - begun) / _WINDOW
        self._begun, self._own, self._clock = now, _own(), time.perf_counter()

    def end(self) -> Busy:
        """Once this process's children have ended; what they used is not others'."""
        now, passed = _used(), time.perf_counter() - self._clock
        if now is None or self._begun is None or passed < _WINDOW:
            return Busy(self.before)
        others = (now - self._begun) - (_own() - self._own)
        return Busy(self.before, max(0.0, others) / passed)


def _used() -> float | None:
    """Seconds of all cores since the machine started, idle ones not; None where it is not told."""
    if not _STAT.exists():
        return None
    # user, nice, system, idle, iowait, irq, softirq
    ticks = [int(n) for n in _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:8]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    """CPU seconds of this process and of its children that have ended."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, whose))

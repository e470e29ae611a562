"""Lanes: the jobs of one run, side by side where memory allows it, and kept if the run breaks off.

A run is in a scratch folder of its own, and what it holds goes when it ends. If it ends without a
result (interrupted, killed by the system for its memory, refused), a lane that was finished moves
into the cache folder under the digest of all that its traces depend on, and the next run of the
same digest takes it out again. A lane of code that is a person's own, or on other hosts, is never
kept: what it depends on cannot be known.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from mlxkv.engines import estimate, kinds, machine, process, stays
from mlxkv.engines.job import Job
from mlxkv.engines.process import Finished, Process
from mlxkv.engines.progress import about, say
from oracle.formats import run_folder, strict_json
from oracle.formats.errors import Refusal
from oracle.model import measured
from oracle.model.cache_folder import cache_dir, part
from oracle.model.checkpoint import Checkpoint

_OURS = Path(__file__).parents[1]  # this package
_READ = ("MLX_", "MLXKV_BLAS", "OMP_", "OPENBLAS_", "BLIS_", "MKL_")  # by MLX or a BLAS
_ROWS: dict[str, estimate.Rows] = {process.OWN: "all", process.MLX_LM: "some"}
KEPT_DAYS = 7
"""Days after which what a broken-off run left is removed: nobody resumes it then."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A job on a checkpoint's model, and the module whose process follows it."""

    job: Job
    module: str
    checkpoint: Checkpoint

    @property
    def bytes(self) -> int:
        """About the memory that its process takes, that of files not counted."""
        return estimate.bytes_of(self.job, self.checkpoint, rows=_ROWS.get(self.module, "kept"))

    @property
    def key(self) -> str:
        """Under what the speed of such lanes is remembered."""
        job = self.job
        threads = job.threads or os.cpu_count() or 1
        module = process.RANKS if job.ranks or job.hostfile else self.module
        of = module, job.dtype, job.device, threads
        return measured.key(*of, parameters=self.checkpoint.parameters)

    @property
    def seconds(self) -> float:
        """About how long it takes, by what the last such lane on this machine took."""
        return measured.corrected(self.key, estimate.seconds_of(self.job, self.checkpoint))

    @property
    def digest(self) -> str | None:
        """Of all that its traces depend on; None where that cannot be known."""
        job = self.job
        if job.custom or job.hostfile or kinds.executed(job.caches.values()):
            return None
        asked = msgspec.to_builtins(job, enc_hook=str)
        value = {
            "job": {name: of for name, of in asked.items() if name not in ("out", "folder")},
            "module": self.module,
            "model": [self.checkpoint.fingerprint, self.checkpoint.config_digest],
            "cores": os.cpu_count(),
            "versions": {name: machine.version(name) for name in ("mlx", "mlx-lm", "numpy")},
            "host": machine.host(),
            "libraries": machine.libraries(),
            "environment": {n: of for n, of in os.environ.items() if n.startswith(_READ)},
            "sources": [run_folder.sources(), run_folder.sources(_OURS)],
        }
        return hashlib.sha256(strict_json.encode(value).encode()).hexdigest()[:32]


@dataclass(slots=True)
class Room:
    """The folder of one run, and what in it a later run may go on with, by digest."""

    folder: Path
    done: dict[str, Path] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    judged: dict[str, int] = field(default_factory=dict)

    def resumed(self, digest: str | None, place: Path) -> bool:
        """Whether what a run that broke off had finished under this digest now lies at `place`."""
        if digest is None:
            return False
        kept = cache_dir() / "lanes" / digest
        if not kept.exists():
            return False
        try:
            kept.rename(place)
        except OSError:
            return False
        self.done[digest] = place
        self.taken.add(digest)
        return True

    def finish(self, digest: str | None, place: Path, *, judged: int = 0) -> None:
        """What lies at `place` is whole: a lane, or what was made of so many prompts."""
        if digest is not None:
            self.done[digest] = place
            if judged:
                self.judged[digest] = judged

    def drop(self, lane: Lane) -> None:
        """Removes a lane's traces, which are not needed any longer."""
        self.done = {k: place for k, place in self.done.items() if place != lane.job.out}
        shutil.rmtree(lane.job.out, ignore_errors=True)

    def keep(self, *, fresh: bool) -> None:
        """Moves what is finished to where the next run looks; if `fresh`, what this run made."""
        kept = part("lanes")
        for digest, place in self.done.items():
            if fresh and digest in self.taken:
                continue  # it may be what the run failed by
            with suppress(OSError):
                shutil.rmtree(kept / digest, ignore_errors=True)
                place.rename(kept / digest)
                os.utime(kept / digest)
                stays.add(stays.RUNS, 0 if digest in self.judged else 1)
                stays.add(stays.PROMPTS, self.judged.get(digest, 0))
        if self.done and fresh:  # else the line on the interrupt says it
            say("what was finished is kept for the next run; `mlxkv store list` shows it")


@contextmanager
def room() -> Iterator[Room]:
    """A run's folder, removed at the end; what was finished is kept unless the block succeeds."""
    _sweep()
    with process.scratch() as folder:
        found = Room(folder)
        try:
            yield found
        except BaseException as error:
            found.keep(fresh=isinstance(error, Exception))
            raise


def _sweep() -> None:
    kept = cache_dir() / "lanes"
    for path in kept.iterdir() if kept.is_dir() else ():
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > KEPT_DAYS * 86400:
                shutil.rmtree(path)


def beside(lanes: Mapping[str, Lane]) -> bool:
    """Whether they run side by side."""
    return machine.holds_together(sum(lane.bytes for lane in lanes.values()))


def follow(lanes: Mapping[str, Lane], run: Room) -> dict[str, Finished | None]:
    """Follows the lanes to their ends; what each took, None where it had been finished before.

    The second and later ones say nothing unless they fail, if they run beside the first.
    """
    digests = {name: lane.digest for name, lane in lanes.items()}
    missing = {n: e for n, e in lanes.items() if not run.resumed(digests[n], e.job.out)}
    took: dict[str, Finished | None] = dict.fromkeys(lanes)
    together = beside(missing)
    _announce(missing, together)
    groups = [missing] if together else [{name: lane} for name, lane in missing.items()]
    for group in groups:
        with ExitStack() as stack:
            running = {
                name: stack.enter_context(_begun(lane, aside=i > 0))
                for i, (name, lane) in enumerate(group.items())
            }
            for name, lane in group.items():
                took[name] = made = _end(lane, running[name])
                run.finish(digests[name], lane.job.out)
                _remember(lane, made)
    return took


def _begun(lane: Lane, *, aside: bool) -> Process:
    return lane.job.begin(lane.module, aside=aside)


def _end(lane: Lane, running: Process) -> Finished:
    """Waits for a lane's end. Of several sequences one in which its process dies is left out, and
    another process follows the rest.
    """
    try:
        return lane.job.end(running)
    except Refusal as died:
        left = lane.job.after(died)
        if left is None:
            raise
        say(f"{running.name}: {died.what}; the other prompts are followed in a new process")
    with left.begin(lane.module) as again:
        return _end(replace(lane, job=left), again)


def _remember(lane: Lane, made: Finished) -> None:
    measured.remember(lane.key, estimate.seconds_of(lane.job, lane.checkpoint), made.seconds)


def _announce(lanes: Mapping[str, Lane], together: bool) -> None:
    if not sys.stderr.isatty() or not lanes:
        return
    seconds = [lane.seconds for lane in lanes.values()]
    whole = max(seconds) if together else sum(seconds)
    how = " beside " if together else ", then "
    say(f"{how.join(lanes)}: about {about(whole)}")

"""A job: what an engine's own process is asked to do, and how that process is started and heard."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from mlxkv.engines import kinds, machine
from mlxkv.engines.process import RANKS, Finished, Process
from oracle.formats import strict_json
from oracle.formats.disk import write_text
from oracle.formats.errors import Refusal
from oracle.formats.exits import DEBUG, end_with_parent
from oracle.formats.plan import Plan
from oracle.formats.trace import Meta

if TYPE_CHECKING:
    from oracle.model.checkpoint import Checkpoint


_AGAIN = "start it again"
_NOW, _REFUSED = "now.txt", ".refused.txt"  # the plan that is followed; why one could not be


@dataclass(frozen=True, slots=True)
class Job:
    """Plans to follow on the model in `folder`; one trace per plan is written into `out`.

    Those named in `repeat` are followed once more after all, with a trace of their own. Of those
    in `shared` one may take its first call from a longer one of another (the port only). `threads`
    are those of the BLAS, None for one per core. `caches` says by a plan's name which other cache
    it runs on than the engine's usual one: a `Kind.text`, or on the port one of another dtype.
    `dither` is the seed of `oracle.formats.dither`, 0 for none. `masks` keeps the port's masks.
    `custom` is the FILE.py:load of a person's own, for its engine alone. `taps` are the places
    inside a layer to record too; where `truth` names the truth's trace, each plan is followed again
    with every layer fed the truth's input. `ranks`, or the hosts in `hostfile`, are the processes
    that share the model, 0 and "" for one process that has it whole. With `several` the plans are
    of several sequences: one that cannot be followed is written down, and the others are followed.
    """

    folder: str
    plans: tuple[Plan, ...]
    out: Path
    dtype: str
    weights_dtype: str
    device: str = "auto"
    guarded: bool = True
    threads: int | None = None
    caches: Mapping[str, str] = field(default_factory=dict)
    masks: bool = False
    taps: tuple[str, ...] = ()
    truth: str | None = None
    ignore_keys: tuple[str, ...] = ()
    custom: str = ""
    repeat: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    dither: int = 0
    ranks: int = 0
    hostfile: str = ""
    several: bool = False

    @classmethod
    def on(
        cls,
        checkpoint: Checkpoint,
        plans: Iterable[Plan],
        out: Path,
        *,
        dtype: str,
        weights_dtype: str | None = None,
        **more: Any,
    ) -> Self:
        """A job on a checkpoint's model; `weights_dtype` None: the dtype computed in."""
        folder, keys, rounded = str(checkpoint.folder), checkpoint.without, weights_dtype or dtype
        return cls(folder, tuple(plans), out, dtype, rounded, ignore_keys=keys, **more)

    def trace(self, plan: Plan) -> Path:
        return self.out / f"{plan.name}.safetensors"

    def repeated(self, plan: Plan) -> Path:
        """Where the trace goes of the second time that a plan was followed."""
        return self.out / f"{plan.name}-repeated.safetensors"

    def isolated(self, plan: Plan) -> Path:
        """Where the trace goes of the layers fed the truth's input."""
        return self.out / f"{plan.name}-isolated.safetensors"

    def refused(self, plan: Plan) -> str:
        """Why the plan could not be followed; "" if it was."""
        file = self.out / f"{plan.name}{_REFUSED}"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    @contextmanager
    def alone(self, plan: Plan) -> Iterator[None]:
        """Follows a plan within the block: of `several` sequences its failure ends it alone."""
        if not self.several:
            yield
            return
        write_text(self.out / _NOW, plan.name)
        try:
            yield
        except Exception as error:
            if not isinstance(error, Refusal):
                traceback.print_exc()
            self._refuse(plan.name, str(error) or type(error).__name__)

    def _refuse(self, plan: str, why: str) -> None:
        write_text(self.out / f"{plan}{_REFUSED}", " ".join(why.split()))

    def after(self, died: Refusal) -> Job | None:
        """The plans that are left, once the one in which the process died is written down; None
        where it did not die in one. The others of its sequence are left out.
        """
        now = self.out / _NOW
        if not now.exists():
            return None
        broken = now.read_text(encoding="utf-8")
        self._refuse(broken, str(died))
        now.unlink()
        others = (plan for plan in self.plans if _sequence(plan.name) != _sequence(broken))
        return replace(self, plans=tuple(plan for plan in others if not self._done(plan)))

    def _done(self, plan: Plan) -> bool:
        """Whether nothing is left of it; both times must be in one process."""
        last = self.repeated(plan) if plan.name in self.repeat else self.trace(plan)
        return bool(self.refused(plan)) or last.exists()

    def prepare(self, device: str) -> tuple[dict[str, Any], Checkpoint]:
        """Sets this process up for MLX, and finds the job's model.

        Gives what a report must say of the process, and the checkpoint.
        """
        environment = machine.prepare(device, threads=self.threads)
        from oracle.model.checkpoint import resolve

        return environment, resolve(self.folder, ignore_keys=self.ignore_keys)

    def meta(
        self,
        checkpoint: Checkpoint,
        environment: Mapping[str, Any],
        *,
        engine: str,
        version: str,
        probes: Mapping[str, float] | None = None,
    ) -> Meta:
        """What every trace of the job says; plan and outcomes are put in for each."""
        return Meta(
            plan=self.plans[0],
            engine=engine,
            engine_version=version,
            dtype=self.dtype,
            weights_dtype=self.weights_dtype,
            device=environment["device"],
            fingerprint=checkpoint.fingerprint,
            config_digest=checkpoint.config_digest,
            environment=dict(environment),
            probes=dict(probes or {}),
        )

    def write_seconds(self, forward: float) -> None:
        """Writes down the seconds spent in forward calls, for `end`."""
        write_text(self.out / "forward.txt", f"{forward}\n")

    def begin(self, module: str, *, aside: bool = False) -> Process:
        """The engine's process on this job, to be entered.

        One that runs aside of another says nothing unless it fails.
        """
        kept = self.out / "stderr.txt" if aside else None
        file = os.path.basename(self.custom) or kinds.executed(self.caches.values())
        words = [module, str(self.save())]
        if self.ranks or self.hostfile:
            words = [RANKS, words[1], module]
        return Process(words, stderr=kept, file=file)

    def end(self, process: Process) -> Finished:
        """Waits for the process's end; raises what `Process.wait` does."""
        finished = process.wait()
        try:
            forward = (self.out / "forward.txt").read_text(encoding="utf-8")
        except FileNotFoundError:
            what = "its process ended with exit code 0 before it was done, expected a result"
            raise Refusal(what, where=process.name, remedy=process.cause) from None
        return replace(finished, forward=float(forward))

    def save(self) -> Path:
        """Writes the job's file, which the engine's process reads."""
        path = self.out / "job.json"
        write_text(path, msgspec.json.encode(self, enc_hook=str).decode())
        return path


def _sequence(plan: str) -> str:
    """What the names of plans over one of several sequences begin with."""
    return plan.rpartition("-")[0]


def repeated(plans: Iterable[Plan]) -> Plan:
    """Of the plans over one sequence that which is followed a second time."""
    return max(plans, key=lambda plan: sum(1 for _ in plan.calls()))


def longest_first(plans: Iterable[Plan]) -> tuple[Plan, ...]:
    """By the tokens of their first calls, so that one is there for those that begin with fewer."""
    return tuple(sorted(plans, key=lambda plan: -next(plan.calls()).fed))


def read(path: Path) -> Job:
    """The job in a file, which `Job.save` of the same version wrote."""
    return decoded(strict_json.read(path, remedy=_AGAIN), path.parent, where=path)


def decoded(value: Any, out: Path, *, where: object) -> Job:
    """The job that was written as this JSON value, its traces in `out`."""
    # The folder may have been moved, and a path is no JSON.
    return strict_json.typed(value | {"out": out}, Job, where=where, remedy=_AGAIN)


def serve(follow: Callable[[Job], None]) -> None:
    """The main of an engine's process, which follows the job in the file that it is given."""
    answer(lambda: follow(read(Path(sys.argv[1]))))


def answer(work: Callable[[], None], who: str = "") -> None:
    """Does a process's work: a refusal is one line and exit code 2, an interrupt 130.

    Under --debug the line comes after its traceback. `who` stands before what is refused.
    """
    end_with_parent()
    try:
        work()
    except ValueError as error:
        if os.environ.get(DEBUG):
            traceback.print_exc()
        print(f"error: {who}{': ' if who else ''}{error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

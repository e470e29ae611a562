"""A job: what an engine's own process is asked to do, and how that process is started and heard."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxkv.engines import AlreadySaid
from oracle.plan import Plan, Refusal, from_json
from oracle.process import PARENT, end_with_parent
from oracle.trace import Meta, write_text

if TYPE_CHECKING:
    from oracle.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Job:
    """Plans to follow on the model in `folder`; one trace per plan is written into `out`.

    `caches` says by a plan's name which other caches it runs on than the engine's usual ones: a class of mlx-lm's (a
    RotatingKVCache has its size behind a colon), or on the port one of another dtype. `masks` keeps the port's masks.
    `custom` is the FILE.py:load of a person's own, for its engine alone.
    `taps` are the places inside a layer to record too; where `truth` names the truth's trace, each plan is followed a
    second time with every layer fed the truth's input.
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

    def trace(self, plan: Plan) -> Path:
        """Where a plan's trace goes."""
        return self.out / f"{plan.name}.safetensors"

    def isolated(self, plan: Plan) -> Path:
        """Where the trace goes of the layers fed the truth's input."""
        return self.out / f"{plan.name}-isolated.safetensors"

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

    def report(self, forward: float) -> None:
        """Leaves word of the seconds spent in forward calls."""
        write_text(self.out / "forward.txt", f"{forward}\n")

    def begin(self, module: str, *, aside: bool = False) -> Process:
        """Starts the engine's process on this job; one that runs aside of another says nothing unless it fails."""
        return Process([module, str(self.save())], stderr=self.out / "stderr.txt" if aside else None)

    def end(self, process: Process) -> Finished:
        """Waits for it."""
        return replace(process.wait(), forward=float((self.out / "forward.txt").read_text(encoding="utf-8")))

    def save(self) -> Path:
        """The job's file, which the engine's process reads."""
        path = self.out / "job.json"
        value = {
            "folder": self.folder,
            "plans": [p.to_json() for p in self.plans],
            "dtype": self.dtype,
            "weights_dtype": self.weights_dtype,
            "device": self.device,
            "guarded": self.guarded,
            "threads": self.threads,
            "caches": dict(self.caches),
            "masks": self.masks,
            "taps": self.taps,
            "truth": self.truth,
            "ignore_keys": list(self.ignore_keys),
            "custom": self.custom,
        }
        write_text(path, json.dumps(value))
        return path


def read(path: Path) -> Job:
    """The job in a file, which `Job.save` of the same version wrote."""
    value = json.loads(path.read_text(encoding="utf-8"))
    plans = tuple(from_json(p) for p in value.pop("plans"))
    taps, ignore_keys = tuple(value.pop("taps")), tuple(value.pop("ignore_keys"))
    return Job(plans=plans, out=path.parent, taps=taps, ignore_keys=ignore_keys, **value)


@dataclass(frozen=True, slots=True)
class Finished:
    """What the system counted for a process that ended well; `forward` is the part spent in the engine's forward calls."""

    seconds: float
    peak_bytes: int
    forward: float = 0.0


class Process:
    """`python -m ...` in a process of its own, whose stderr is ours, or kept and shown only if it fails."""

    def __init__(self, arguments: list[str], *, stderr: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        self.environment = dict(environment or {})
        self.name = arguments[0]
        self.command = [sys.executable, "-m", *arguments]
        self.kept = stderr
        self.popen: subprocess.Popen[bytes] | None = None

    def wait(self) -> Finished:
        """Its end. A refusal has been said on stderr when this raises; an interrupt is passed on."""
        assert self.popen is not None
        _, status, usage = os.wait4(self.popen.pid, 0)
        code = self.popen.returncode = os.waitstatus_to_exitcode(status)
        if code != 0 and self.kept:
            sys.stderr.write(self.kept.read_text(encoding="utf-8", errors="replace"))
        if code == 2:
            raise AlreadySaid
        if code in (130, -signal.SIGINT):
            raise KeyboardInterrupt
        if code != 0:
            died = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise Refusal(f"{self.name}: its process {died}, expected a result; there may be too little memory, or it is a fault of ours")
        # ru_maxrss counts bytes on macOS and kilobytes elsewhere.
        peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return Finished(time.perf_counter() - self.begun, peak)

    def __enter__(self) -> Process:
        with open(self.kept, "wb") if self.kept else nullcontext() as errors:
            try:
                with _signals_held():
                    self.begun = time.perf_counter()
                    # A group of its own: an interrupt at the terminal reaches us alone, and we pass it on once. A second
                    # one would break off what the process does to leave nothing half written.
                    self.popen = subprocess.Popen(
                        self.command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                        process_group=0,
                        env=os.environ | self.environment | {PARENT: str(os.getpid())},
                    )
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self.popen is not None and self.popen.returncode is None:
            # Not an interrupt, which Python answers with a traceback while it is still importing.
            self.popen.terminate()
            self.popen.wait()


@contextmanager
def _signals_held() -> Iterator[None]:
    """What would stop us waits until the block is over: within Popen it could leave a process that nobody knows."""
    came: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    before = {sign: signal.signal(sign, lambda n, _: came.append(n)) for sign in (signal.SIGINT, signal.SIGTERM) if main}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
    for number in came:
        signal.raise_signal(number)


def start(arguments: list[str], *, environment: Mapping[str, str] | None = None) -> Finished:
    """Runs `python -m ...` to its end."""
    with Process(arguments, environment=environment) as process:
        return process.wait()


def serve(follow: Callable[[Job], None]) -> None:
    """An engine process's main: refusals are one line and exit code 2, an interrupt is 130."""
    end_with_parent()
    try:
        follow(read(Path(sys.argv[1])))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

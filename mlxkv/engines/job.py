"""A job: what an engine's own process is asked to do, and how that process is started and heard."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mlxkv.engines import AlreadySaid
from oracle.plan import Plan, Refusal, from_json
from oracle.trace import write_text


@dataclass(frozen=True, slots=True)
class Job:
    """Plans to follow on the model in `folder`; one trace per plan is written into `out`."""

    folder: str
    plans: tuple[Plan, ...]
    out: Path
    dtype: str
    weights_dtype: str
    device: str = "auto"
    guarded: bool = True

    def trace(self, plan: Plan) -> Path:
        """Where a plan's trace goes."""
        return self.out / f"{plan.name}.safetensors"

    def report(self, forward: float) -> None:
        """Leaves word of the seconds spent in forward calls."""
        write_text(self.out / "forward.txt", f"{forward}\n")

    def run(self, module: str) -> Finished:
        """Starts the engine's process on this job and waits for its end."""
        finished = start([module, str(self.save())])
        return replace(finished, forward=float((self.out / "forward.txt").read_text(encoding="utf-8")))

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
        }
        write_text(path, json.dumps(value))
        return path


def read(path: Path) -> Job:
    """The job in a file, which `Job.save` of the same version wrote."""
    value = json.loads(path.read_text(encoding="utf-8"))
    plans = tuple(from_json(p) for p in value.pop("plans"))
    return Job(plans=plans, out=path.parent, **value)


@dataclass(frozen=True, slots=True)
class Finished:
    """What the system counted for a process that ended well; `forward` is the part spent in the engine's forward calls."""

    seconds: float
    peak_bytes: int
    forward: float = 0.0


def start(arguments: list[str], *, quiet: bool = False) -> Finished:
    """Runs `python -m ...` to its end. Its stderr is ours, so its refusal has been read when it exits with 2."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if quiet else None,
    )
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begun
    if process.returncode == 2:
        raise AlreadySaid
    if process.returncode in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if process.returncode != 0:
        died = f"ended by signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
        raise Refusal(f"{arguments[0]}: its process failed ({died}); run `python -m {' '.join(arguments)}` to see why")
    # ru_maxrss counts bytes on macOS and kilobytes elsewhere.
    return Finished(seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def serve(follow: Callable[[Job], None]) -> None:
    """An engine process's main: refusals are one line and exit code 2, an interrupt is 130."""
    try:
        follow(read(Path(sys.argv[1])))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

"""A process of ours: how it is started, heard and ended, and the folder that its files lie in meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from oracle.formats import disk
from oracle.formats.errors import AlreadySaid, Refusal
from oracle.formats.exits import PARENT
from oracle.model.cache_folder import cache_dir

PORT, MLX_LM, OWN = "mlxkv.engines.port", "mlxkv.engines.mlx_lm", "mlxkv.engines.own"


@dataclass(frozen=True, slots=True)
class Finished:
    """What the system counted for a process that ended well; `forward` is the part spent in the engine's forward calls."""

    seconds: float
    peak_bytes: int
    forward: float = 0.0


class Process:
    """`python -m ...` in a process of its own, whose stderr is ours, or kept and shown only if it fails."""

    def __init__(
        self,
        arguments: list[str],
        *,
        stderr: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
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
            raise Refusal(
                f"{self.name}: its process {died}, expected a result; there may be too little memory, or it is a fault of ours"
            )
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
    before = {
        sign: signal.signal(sign, lambda n, _: came.append(n))
        for sign in (signal.SIGINT, signal.SIGTERM)
        if main
    }
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


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for traces beside the caches (they are too large for some systems' /tmp), removed at the end."""
    base = cache_dir() / "runs"
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(disk.own_folder(base, prefix="tmp"))
        except OSError as error:
            raise disk.unwritable(base, error) from error
        yield folder

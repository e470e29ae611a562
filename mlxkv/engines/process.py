"""A process of ours: how it is started and ended, and the folder of its files meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mlxkv.engines.memory import Watch
from oracle.formats import child, disk
from oracle.formats.errors import AlreadySaid, Refusal
from oracle.formats.exits import DEBUG, PARENT
from oracle.model.cache_folder import cache_dir

PORT, MLX_LM, OWN = "mlxkv.engines.port", "mlxkv.engines.mlx_lm", "mlxkv.engines.own"
"""The modules that follow a job, each in a process of its own."""
RANKS = "mlxkv.engines.ranks"
"""The module whose process has one of them run on several ranks."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What the system counted for a process that ended well.

    `seconds` are by the clock, `forward` those of them spent in the engine's forward calls.
    `peak_bytes` is the largest resident size, pages of mapped files included; `anonymous_bytes` the
    largest found without them by ten samples a second (None: the system does not tell).
    """

    seconds: float
    peak_bytes: int
    forward: float = 0.0
    anonymous_bytes: int | None = None


class Process:
    """A module of ours in a process of its own, from the `with` on.

    Its stderr is ours, or kept in the file `stderr` and shown only if the process fails. What it
    prints is dropped, except under --debug, which sends both to our stderr at once. What is still
    running at the end of the `with` is terminated.
    """

    def __init__(
        self,
        arguments: list[str],
        *,
        stderr: Path | None = None,
        stdout: Path | None = None,
        environment: Mapping[str, str] | None = None,
        file: str = "",
    ) -> None:
        """`file` is the FILE.py:load that the process executes, if it is a person's own.

        What it prints goes into the file `stdout`, if that is given.
        """
        self.debug = bool(os.environ.get(DEBUG))
        self.environment = {PARENT: str(os.getpid()), **(environment or {})}
        self.environment |= {"PYTHONUNBUFFERED": "1"} if self.debug else {}
        self.name, self.cause = arguments[0], "it is a fault of ours"
        if file:
            more = "" if self.debug else "; run again with --debug to see what it prints"
            self.name, self.cause = file, f"the file ends its own process{more}"
        self.command = child.command(*arguments)
        self.kept = None if self.debug else stderr
        self.stdout = stdout
        self.watch = Watch()
        self.popen: subprocess.Popen[bytes] | None = None

    def wait(self) -> Finished:
        """Waits for its end.

        Raises AlreadySaid where it has refused and said why on stderr, KeyboardInterrupt where it
        was interrupted, and Refusal where it ended in another way.
        """
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
                f"its process {died}, expected a result",
                where=self.name,
                remedy=f"there may be too little memory, or {self.cause}",
            )
        # ru_maxrss counts bytes on macOS and kilobytes elsewhere.
        peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        seconds = time.perf_counter() - self.begun
        return Finished(seconds, peak, anonymous_bytes=self.watch.end())

    def __enter__(self) -> Process:
        with _opened(self.kept) as errors, _opened(self.stdout) as printed:
            try:
                with _signals_held():
                    self.begun = time.perf_counter()
                    # A group of its own: an interrupt at the terminal reaches us alone, and we pass
                    # it on once. A second one would break off what the process does to leave
                    # nothing half written.
                    self.popen = subprocess.Popen(
                        self.command,
                        stdin=subprocess.DEVNULL,
                        stdout=printed or (2 if self.debug else subprocess.DEVNULL),
                        stderr=errors,
                        process_group=0,
                        env=os.environ | self.environment,
                    )
                    self.watch.begin(self.popen.pid)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self.popen is not None and self.popen.returncode is None:
            # Not an interrupt, which Python answers with a traceback while it is still importing.
            self.popen.terminate()
            self.popen.wait()
        self.watch.end()


def _opened(path: Path | None) -> AbstractContextManager[IO[bytes] | None]:
    return nullcontext() if path is None else path.open("wb")


@contextmanager
def _signals_held() -> Iterator[None]:
    """Holds back what would stop us until the block is over.

    A signal within Popen could leave a process that nobody knows of.
    """
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


def start(
    arguments: list[str],
    *,
    environment: Mapping[str, str] | None = None,
    stdout: Path | None = None,
) -> Finished:
    """Runs a module of ours with its arguments to its end; raises what `Process.wait` does."""
    with Process(arguments, environment=environment, stdout=stdout) as process:
        return process.wait()


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for traces, removed at the end; beside the caches, as /tmp is too small on some."""
    base = cache_dir() / "runs"
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(disk.own_folder(base, prefix="tmp"))
        except OSError as error:
            raise disk.unwritable(base, error) from error
        yield folder

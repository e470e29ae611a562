"""mlx.launch that waits where there is nothing to do, and keeps what ssh says: `python -m
mlxkv.engines.launch WORDS`.

It asks whether its ranks can be written to, which they always can, and so turns in circles: beside
three ranks that slept it took 1.4 of two cores.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from oracle.formats.errors import Refusal
from oracle.formats.exits import PARENT, end_with_parent

WAIT = 0.05
"""Seconds after which it looks again."""
SSH = "ssh.txt"
"""The file in TMPDIR that ssh's own words go to; what a rank says comes by its terminal."""
_ANSWERS = "-o ServerAliveInterval=15 -o ServerAliveCountMax=4"  # a host that is gone ends ssh


def command() -> EntryPoint:
    """The command mlx.launch, to be loaded; a Refusal where this MLX has none."""
    for found in entry_points(group="console_scripts", name="mlx.launch"):
        return found
    what = "this MLX has no mlx.launch, expected MLX 0.32 or another that has it"
    raise Refusal(what, where="ranks", remedy="install a newer MLX")


def _waiting(reads: list[int], _: list[int], errors: list[int], seconds: float) -> Any:
    """As select.select, for ranks to which nothing is written, from a stdin that is empty."""
    return select.select([file for file in reads if file != 0], [], errors, min(seconds, WAIT))


def _begun(command: Any, *given: Any, **named: Any) -> Any:
    """As subprocess.Popen, for a ssh that says why it fails, and that a host is gone."""
    quiet = "ssh -tt -o LogLevel=QUIET "
    if isinstance(command, str) and command.startswith(quiet):
        told = shlex.quote(os.path.join(os.environ.get("TMPDIR", "."), SSH))
        words = command.removeprefix(quiet)
        command = f"exec ssh -tt -o LogLevel=ERROR {_ANSWERS} {words} 2>> {told}"
    return subprocess.Popen(command, *given, **named)


def _end_all(*_: object) -> None:
    """Nothing is to run on; the ranks are in this process's group."""
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    signal.signal(signal.SIGTERM, _end_all)
    end_with_parent()
    os.environ[PARENT] = str(os.getpid())  # which is that of the ranks here
    program: Callable[[], None] = command().load()
    names = vars(sys.modules[program.__module__])
    if names.get("select") is select.select:
        names["select"] = _waiting
    if names.get("Popen") is subprocess.Popen:
        names["Popen"] = _begun
    sys.argv[0] = "mlx.launch"
    program()


if __name__ == "__main__":
    main()

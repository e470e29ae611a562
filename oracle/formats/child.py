"""How a process of ours is started: by one command line, which every command uses."""

from __future__ import annotations

import sys


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of ours in a process of its own.

    `-P` keeps the working folder out of its sys.path. `-m` alone would put that first, and a
    `random.py` in the folder of a checkpoint would be executed in place of Python's own.
    """
    return [sys.executable, "-P", "-m", module, *arguments]

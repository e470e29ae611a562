"""`mlxkv` in a process of its own, whose oracle is the warm one of the tests."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1]))

import warm

from mlxkv.cli import main
from mlxkv.engines import process
from oracle.formats import child


def command(module, *arguments):
    if module == "oracle":
        return warm.command(os.environ["MLXKV_TEST_ROOM"], "-m", module, *arguments)
    return child.command(module, *arguments)


process.child = SimpleNamespace(command=command)
main()

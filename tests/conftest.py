"""Two processes under one command: the oracle's tests have torch, the port's MLX and its BLAS.

A BLAS loaded for MLX changes torch's numbers, so the two never share a process. `pytest` over both
folders runs them side by side and exits with the worse code; over one folder it is ordinary. Both
share a room, MLXKV_TEST_ROOM, for what is slow to make, a warm oracle among it; name a folder there
to keep it from one run to the next.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

FOLDERS = ("oracle", "mlxkv")
LONGEST = ("default_model", "mlx_lm", "cli", "cost", "candle", "robust", "ranks", "reports")
LONGEST += (
    "locate_own",
    "lanes",
    "cache_behaves",
    "cause",
    "walls",
    "faults",
    "custom",
    "selftest",
)
"""The files that take longest, which must not be begun when all others are done."""
_HERE = Path(__file__).parent
_ROOM = "MLXKV_TEST_ROOM"
_FUZZ = "MLXKV_FUZZ"
_OWN = pytest.StashKey["tempfile.TemporaryDirectory[str]"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also the tests that take minutes")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: runs only with --nightly")
    if config.option.nightly:
        os.environ.setdefault(_FUZZ, "10")
    if _ROOM not in os.environ:
        # In the environment, so that all workers of a half have the same.
        config.stash[_OWN] = tempfile.TemporaryDirectory(prefix="mlxkv-tests-")
        os.environ[_ROOM] = config.stash[_OWN].name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = [f"test_{name}" for name in LONGEST]
    items.sort(key=lambda item: names.index(s) if (s := item.path.stem) in names else len(names))
    if config.option.nightly:
        return
    left = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def pytest_unconfigure(config: pytest.Config) -> None:
    if _OWN in config.stash:
        config.stash[_OWN].cleanup()
        os.environ.pop(_ROOM, None)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Runs both halves when both are asked for; else leaves it to pytest."""
    halves = [_paths(config, folder) for folder in FOLDERS]
    if not all(halves) or config.option.help or config.option.version:
        return None
    options = _options(config.invocation_params.args, config.option.file_or_dir or [])
    with (
        tempfile.TemporaryDirectory(prefix="mlxkv-tests-") as scratch,
        tempfile.TemporaryFile() as aside,
    ):
        environment = {_ROOM: scratch} | os.environ
        # At once, since both wait a lot; the oracle's half is the shorter one, and shown last.
        outputs = [{"stdout": aside, "stderr": subprocess.STDOUT}, {}]
        commands = [[*options, *halves[0]], [*options, *_workers(config), *halves[1]]]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "pytest", *command],
                cwd=config.invocation_params.dir,
                env=environment,
                **output,
            )
            for command, output in zip(commands, outputs, strict=True)
        ]
        try:
            codes = [process.wait() for process in reversed(processes)]
        except KeyboardInterrupt:
            for process in processes:
                process.wait()
            return pytest.ExitCode.INTERRUPTED
        aside.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(aside.read())
        return combined(codes)


def _workers(config: pytest.Config) -> list[str]:
    """The port's half is the longer one and waits for processes: three workers or more share it."""
    alone = (
        config.option.usepdb
        or config.option.capture == "no"
        or getattr(config.option, "numprocesses", None) is not None
    )
    if alone or not config.pluginmanager.hasplugin("xdist"):
        return []
    workers = str(min(4, max(3, (os.cpu_count() or 1) // 2)))
    return ["-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"]


def combined(codes: Sequence[int]) -> int:
    """The worst exit code; a signal is a failure.

    A half in which nothing was selected counts only if it was so in both.
    """
    told = [code for code in codes if code != pytest.ExitCode.NO_TESTS_COLLECTED]
    return max(
        (128 - code if code < 0 else code for code in told),
        default=pytest.ExitCode.NO_TESTS_COLLECTED,
    )


def _paths(config: pytest.Config, folder: str) -> list[str]:
    """The requested paths within one folder, or the folder where a path above it was requested."""
    found = []
    for arg in config.args:
        name, _, test = str(arg).partition("::")
        path = Path(config.invocation_params.dir, name).resolve()
        if path.is_relative_to(_HERE / folder):
            found.append(f"{path}::{test}" if test else str(path))
        elif (_HERE / folder).is_relative_to(path):
            found.append(str(_HERE / folder))
    return found


def _options(args: Sequence[str], paths: Sequence[str]) -> list[str]:
    """The arguments that are no paths; what stands after an option may be its value."""
    left, kept = list(paths), []
    for before, arg in zip(("", *args), args, strict=False):
        value = args.count(arg) > paths.count(arg) and before.startswith("-")
        if arg in left and not value:
            left.remove(arg)
        else:
            kept.append(arg)
    return kept


@pytest.fixture(scope="session")
def room() -> Path:
    """The folder that both halves, and all workers of a half, share."""
    folder = Path(os.environ[_ROOM])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def _torch_and_mlx_never_meet() -> Iterator[None]:
    _require_apart()  # before a test too, which would only show odd numbers
    yield
    _require_apart()


def _require_apart() -> None:
    if {"torch", "mlx.core"} <= sys.modules.keys():
        pytest.fail(
            "torch and mlx.core are loaded in one process: "
            "a BLAS loaded for MLX changes torch's numbers"
        )

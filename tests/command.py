"""A command line run in this process, with what it and its child processes print.

Stands in tests where a process of its own would show nothing more: it takes 0.3 s less, and an
oracle that it starts is the warm one. Signals, a full disk, a missing package and the walls need
true processes.

`torch_python` and `mlx_lm_python` are command lines of processes that have imported at once.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import warm

ROOT = Path(__file__).resolve().parents[1]
Done = subprocess.CompletedProcess[str]


def run(
    program: str,
    invoke: Callable[[Sequence[str]], int],
    arguments: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
) -> Done:
    """As `subprocess.run` of the program: its exit code, stdout and stderr; `env` is added."""
    words = _words(arguments)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with _environment(env or {}), _argv([program, *words]), _into(1, out), _into(2, err):
            code = invoke(words)
        return subprocess.CompletedProcess([program, *words], code, _text(out), _text(err))


def mlxkv(*arguments: object, env: Mapping[str, str] | None = None) -> Done:
    """`mlxkv ARGUMENTS` in this process; in one of its own where Python itself reads `env`."""
    if any(name.startswith("PYTHON") for name in env or {}):
        line = [sys.executable, "-m", "mlxkv", *_words(arguments)]
        environment = os.environ | dict(env or {})
        if "PYTHONPATH" in environment:  # in front of the sources
            environment["PYTHONPATH"] += os.pathsep + str(ROOT)
        return subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment)

    from mlxkv import cli

    return run("mlxkv", cli.invoke, arguments, env=env)


def oracle(*arguments: object, env: Mapping[str, str] | None = None) -> Done:
    """`mlxkv-oracle ARGUMENTS` in this process: only where torch may be loaded."""
    from oracle import cli

    return run("mlxkv-oracle", cli.invoke, arguments, env=env)


def torch_python(*arguments: str) -> list[str]:
    """What to start in place of `python ARGUMENTS`, such as `-m oracle run ...`."""
    return warm.command(os.environ["MLXKV_TEST_ROOM"], *arguments)


def mlx_lm_python(*arguments: str) -> list[str]:
    """The same for a process that imports mlx-lm, and never torch."""
    return warm.command(os.environ["MLXKV_TEST_ROOM"], *arguments, kind="mlx")


def refused(done: Done, *words: str, notes: str | None = None) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that holds all the words.

    With `notes` other lines may stand before it, each of which holds that text.
    """
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    *before, line = done.stderr.splitlines()
    assert line.startswith("error: "), done.stderr
    assert all(notes is not None and notes in note for note in before), done.stderr
    for word in words:
        assert word in line, line


def kept(cache: Path) -> tuple[list[Path], list[Path]]:
    """The oracle's folders in a cache folder: those over a prompt, and the probes."""
    found = sorted((cache / "oracle").iterdir())
    probes = [p for p in found if json.loads((p / "manifest.json").read_text())["probe"]]
    return [path for path in found if path not in probes], probes


def _words(arguments: Sequence[object]) -> list[str]:
    return [str(argument) for argument in arguments]


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _argv(words: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _into(number: int, file: io.IOBase) -> Iterator[None]:
    """What is written to the stream of that number goes to the file, from child processes too."""
    (sys.stdout if number == 1 else sys.stderr).flush()
    kept = os.dup(number)
    os.dup2(file.fileno(), number)
    redirected = redirect_stdout if number == 1 else redirect_stderr
    try:
        with (
            open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as stream,
            redirected(stream),
        ):
            yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def _text(file: io.IOBase) -> str:
    file.seek(0)
    return file.read().decode()  # type: ignore[no-any-return]

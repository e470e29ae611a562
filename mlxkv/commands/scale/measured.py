"""A command of ours as a process of its own, with what it printed, took and held."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxkv.commands.scale.memory import Watch
from mlxkv.commands.scale.result import Ran
from oracle.formats import child, strict_json
from oracle.formats.errors import AlreadySaid, Refusal

INTERRUPTED = (130, -2)


def measured(words: Sequence[str], *, cache: Path) -> tuple[Ran, dict[str, Any]]:
    """Runs `mlxkv WORDS --json` with a cache folder of its own; what it took, and its JSON.

    Its stderr is ours. AlreadySaid where it refused, Refusal where it ended in another way.
    """
    line, name = child.command("mlxkv", *words, "--json"), f"mlxkv {words[0]}"
    environment = os.environ | {"MLXKV_CACHE": str(cache)}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryDirectory() as report:
        begun = time.perf_counter()
        with subprocess.Popen(
            [*line, "--out", report], stdin=subprocess.DEVNULL, stdout=out, env=environment
        ) as popen:
            try:
                with Watch(popen.pid, cache) as watch:
                    code = popen.wait()
            finally:
                popen.terminate()  # does nothing to one that has ended
        seconds = time.perf_counter() - begun
        out.seek(0)
        printed = out.read()
    if code in INTERRUPTED:
        raise KeyboardInterrupt
    if not printed and code == 2:
        raise AlreadySaid
    value = _decoded(printed, code, name)
    took = {of: one["seconds"] for of, one in (value.get("took") or {}).items() if one}
    return Ran(shown(words), seconds, took, watch.memory, watch.disk), value


def _decoded(printed: bytes, code: int, name: str) -> dict[str, Any]:
    try:
        value = strict_json.decode(printed)
    except ValueError as error:
        what = f"ended with exit code {code} and printed no JSON, expected its report"
        raise Refusal(what, where=name, remedy="there may be too little memory") from error
    if not isinstance(value, dict):
        raise Refusal(f"printed {type(value).__name__}, expected an object", where=name)
    return value


def shown(words: Sequence[str]) -> str:
    """The command line for a report: of a path, which could name its owner, its last part only."""
    return shlex.join(["mlxkv", *(_last(word) for word in words)])


def _last(word: str) -> str:
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if value.startswith("/") else word

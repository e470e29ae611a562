"""Counts and times everything that is asked for."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxkv.commands.bench import count, grid, models, page, picture, turns
from mlxkv.commands.bench.ask import PACKED, Lists, Request
from mlxkv.commands.bench.busy import Watch
from mlxkv.commands.bench.grid import Block
from mlxkv.commands.bench.result import Bench, Cell
from mlxkv.engines import machine, process
from mlxkv.engines.progress import announce, say, steps
from mlxkv.report import plots, publish
from mlxkv.report.text import pretty
from oracle.formats import disk
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint

NAME = "bench"


def report(request: Request, exports: dict[str, Path], *, as_json: bool, command: str) -> str:
    """What is printed; `exports` are the files that are asked for, by "json", "md" and "svg"."""
    for path in exports.values():
        publish.claim(path.parent)
        if path.is_dir():
            raise disk.unwritable(path, IsADirectoryError(errno.EISDIR, "is a folder"))
    if "svg" in exports:
        plots.load()
    done = run(request)
    for kind, path in exports.items():
        publish.write(path.parent, {path.name: _exported(kind, done, exports, command)})
    return pretty(done.to_json()) if as_json else page.console(done)


def _exported(kind: str, done: Bench, exports: dict[str, Path], command: str) -> str:
    if kind == "svg":
        return picture.ratios(done)
    if kind == "json":
        return pretty(done.to_json())
    svg = exports.get("svg")
    link = None if svg is None else Path(os.path.relpath(svg, exports["md"].parent)).as_posix()
    return page.markdown(done, commands=[command], svg=link)


def files(done: Bench, *, commands: list[str]) -> dict[str, str]:
    """The picture, the JSON, and the page, which links to the picture, last."""
    svg = {f"{NAME}.svg": picture.ratios(done)}
    text = page.markdown(done, commands=commands, svg=f"{NAME}.svg")
    return svg | {f"{NAME}.json": pretty(done.to_json()), f"{NAME}.md": text}


def run(request: Request) -> Bench:
    machine.require_device(request.device)
    machine.require_mlx_lm()
    checkpoint = request.checkpoint(steps())
    lists = request.lists(checkpoint)
    with process.scratch() as room:
        watch = Watch()
        blocks = list(_blocks(request, checkpoint, lists, room))
        if not blocks:
            raise Refusal("nothing to time", remedy="give --prefill, --decode or --overhead")
        announce("bench", sum(grid.seconds(block, request) for block in blocks))
        say("bench: counting what a GPU would run")
        counted = tuple(count.counted(block, request.device) for block in blocks)
        cells: list[Cell] = []
        left_out: list[str] = []
        facts: dict[str, Any] = {}
        for block in blocks:
            with turns.pair(block, request.device) as engines:
                facts = facts or {key: engines[0].ask(key) for key in ("environment", "copy")}
                timed = turns.Timed(block, engines, request)
            cells += timed.cells
            left_out += timed.left_out
    return Bench(
        model=checkpoint.name,
        source=checkpoint.source,
        fingerprint=checkpoint.fingerprint,
        cells=tuple(cells),
        left_out=tuple(left_out),
        steps=counted,
        busy=watch.end(),
        **facts,
    )


def _blocks(request: Request, checkpoint: Checkpoint, lists: Lists, room: Path) -> Iterator[Block]:
    """What each pair of processes has to do; models are made in the folder `room`."""
    places = grid.places(request, lists)
    for dtype in lists.dtypes if places else ():
        of = checkpoint
        if dtype == PACKED:
            say(f"bench: packing {checkpoint.name} in 4 bits")
            of = models.packed(checkpoint, room / PACKED)
        yield Block("", of, dtype, places)
    if request.with_overhead:
        places = tuple(grid.Place(1, length, False, True) for length in models.LENGTHS)
        made = models.overhead(room / "overhead")
        yield Block(models.OVERHEAD, made, "float32", places)

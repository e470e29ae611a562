"""Counts and times everything that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint

NAME = "bench"


def report(request: Request, exports: dict[str, Path], *, as_json: bool, command: str) -> str:
    """What is printed; `exports` are the files that are asked for, by "json", "md" and "svg"."""
    for path in exports.values():
        publish.claim(path.parent)
    done = run(request)
    link = exports["svg"].name if "svg" in exports else None
    made: dict[str, Callable[[], str]] = {
        "svg": lambda: picture.ratios(done),
        "json": lambda: pretty(done.to_json()),
        "md": lambda: page.markdown(done, commands=[command], svg=link),
    }
    for kind, render in made.items():
        if kind in exports:
            publish.write(exports[kind].parent, {exports[kind].name: render()})
    return made["json"]() if as_json else page.console(done)


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
    plots.load_aside()
    with _blocks(request, checkpoint, lists) as blocks:
        announce("bench", sum(grid.seconds(block, request) for _, block in blocks))
        watch = Watch()
        say("bench: counting what a GPU would run")
        counted = tuple(
            count.counted(block.checkpoint, block.dtype, request.device, name=name)
            for name, block in blocks
        )
        cells: list[Cell] = []
        facts: dict[str, Any] = {}
        for name, block in blocks:
            with turns.pair(block, request.device) as engines:
                facts = facts or {
                    "environment": engines[0].ask("environment"),
                    "copy": engines[0].ask("copy"),
                }
                cells += turns.cells(block, engines, request, name)
    return Bench(
        model=checkpoint.name,
        source=checkpoint.source,
        fingerprint=checkpoint.fingerprint,
        cells=tuple(cells),
        steps=counted,
        busy=watch.end(),
        **facts,
    )


@contextmanager
def _blocks(
    request: Request, checkpoint: Checkpoint, lists: Lists
) -> Iterator[list[tuple[str, Block]]]:
    """What each pair of processes has to do, with a name for a model that is not the one at hand.

    Models that are made are gone at the end.
    """
    places = grid.places(request, lists)
    with process.scratch() as room:
        found = []
        for dtype in lists.dtypes if places else ():
            of = checkpoint
            if dtype == PACKED:
                say(f"bench: packing {checkpoint.name} in 4 bits")
                of = models.packed(checkpoint, room / PACKED)
            found.append(("", Block(of, dtype, places)))
        if request.with_overhead:
            made = models.overhead(room / "overhead")
            at = (grid.Place(1, length, False, True) for length in models.LENGTHS)
            found.append((models.OVERHEAD, Block(made, "float32", tuple(at))))
        if not found:
            raise Refusal("nothing to time", remedy="give --prefill, --decode or --overhead")
        yield found

"""Both engines take turns, so that a machine whose speed drifts slows both alike.

What counts is the ratio of a pair of turns, not a single figure.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlxkv.commands.bench import bandwidth, grid
from mlxkv.commands.bench.ask import Request, computes_in
from mlxkv.commands.bench.grid import Block, Place
from mlxkv.commands.bench.result import Cell, Side
from mlxkv.engines.progress import say
from oracle.formats import child
from oracle.formats.errors import AlreadySaid, Refusal

Pair = tuple["Worker", "Worker"]
WARM = 2
"""Tokens decoded before a cell's first turn: the first calls of a shape are slower."""


class Worker:
    """An engine's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, *question: Any) -> Any:
        """Its answer; a Refusal where it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise ended(self._process.wait())
        return json.loads(answer)


def ended(code: int) -> Exception:
    """What is to be raised where an engine's process has ended too soon."""
    if code == 2:
        return AlreadySaid()
    return Refusal(f"bench: an engine's process ended with exit code {code}; see above")


@contextmanager
def pair(block: Block, device: str) -> Iterator[Pair]:
    """The port's process and mlx-lm's, which load the same model."""
    checkpoint = block.checkpoint
    given = (str(checkpoint.folder), computes_in(block.dtype), device, *checkpoint.without)
    with _worker("mlxkv", *given) as first, _worker("mlx-lm", *given) as second:
        yield first, second


@contextmanager
def _worker(*given: str) -> Iterator[Worker]:
    command = child.command("mlxkv.commands.bench.worker", *given)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Worker(process)
    finally:
        process.terminate()
        process.wait()


def cells(block: Block, engines: Pair, request: Request) -> Iterator[Cell]:
    """Each place's prefill, then its decode, as they are measured."""
    _fill(engines, Place(1, 2, True, True), WARM)
    for place in block.places:
        yield from _of(block, engines, place, request)


def _of(block: Block, engines: Pair, place: Place, request: Request) -> Iterator[Cell]:
    room = place.length + (request.steps if place.decode else 0)
    labels = (block.name, block.dtype, place.batch)
    say(f"bench: {block.title}, batch {place.batch}, {place.length:,} tokens")
    if place.prefill:
        asked = ("prefill", place.length, place.batch, room)
        sides = _measured(engines, asked, place.batch * place.length, request.rounds)
        yield Cell(*labels, "prefill", place.length, *sides)
    else:
        _fill(engines, place, room)
    if place.decode:
        for engine in engines:
            engine.ask("decode", min(WARM, request.steps))
        tokens = place.batch * request.steps
        sides = _measured(engines, ("decode", request.steps), tokens, request.rounds)
        # On the way half of what is decoded is held.
        held = place.length + request.steps / 2
        dtype = computes_in(block.dtype)
        read = bandwidth.read_by_step(block.checkpoint, dtype, place.batch, held)
        yield Cell(*labels, "decode", place.length, *sides, read)


def _fill(engines: Pair, place: Place, room: int) -> None:
    for engine in engines:
        engine.ask("prefill", place.length, place.batch, room)


def _measured(
    engines: Pair, question: tuple[Any, ...], tokens: int, asked: int | None
) -> tuple[Side, Side]:
    """Rounds of turns; who is first in one is second in the next."""
    turns: tuple[list[Any], list[Any]] = ([], [])
    wanted, done = 1, 0
    while done < wanted:
        begun = time.perf_counter()
        for i in (0, 1) if done % 2 == 0 else (1, 0):
            turns[i].append(engines[i].ask(*question))
        done += 1
        if done == 1:
            wanted = grid.rounds(asked, time.perf_counter() - begun)
    first, second = (
        Side(tokens, tuple(turn["seconds"] for turn in some), max(turn["peak"] for turn in some))
        for some in turns
    )
    return first, second

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


class Timed:
    """What was measured with a pair: `cells`, and the names of those that were `left_out`."""

    def __init__(self, block: Block, engines: Pair, request: Request) -> None:
        self.cells: list[Cell] = []
        self.left_out: list[str] = []
        self._block, self._engines, self._request = block, engines, request
        self._fill(Place(1, 2, True, True), WARM)
        token = 0.0  # seconds of both engines, by the longest prompt so far
        for place in block.places:
            if token * place.tokens > grid.LONGEST and not request.chosen:
                self.left_out.append(f"{block.title}, batch {place.batch}: {place.length:,} tokens")
                continue
            say(f"bench: {block.title}, batch {place.batch}, {place.length:,} tokens")
            token = self._prefill(place) / place.tokens
            if place.decode:
                self._decode(place)

    def _prefill(self, place: Place) -> float:
        """The seconds of a turn of both."""
        room = place.length + (self._request.steps if place.decode else 0)
        if not place.prefill:
            return self._fill(place, room)
        asked = ("prefill", place.length, place.batch, room)
        port, other = _measured(self._engines, asked, place.tokens, self._request.rounds)
        self._add(place, "prefill", port, other)
        return max(port.seconds) + max(other.seconds)

    def _fill(self, place: Place, room: int) -> float:
        asked = ("prefill", place.length, place.batch, room)
        return sum(float(engine.ask(*asked)["seconds"]) for engine in self._engines)

    def _decode(self, place: Place) -> None:
        steps, dtype = self._request.steps, computes_in(self._block.dtype)
        for engine in self._engines:
            engine.ask("decode", min(WARM, steps))
        asked, tokens = ("decode", steps), place.batch * steps
        port, other = _measured(self._engines, asked, tokens, self._request.rounds)
        held = place.length + steps / 2  # on the way, on average
        read = bandwidth.read_by_step(self._block.checkpoint, dtype, place.batch, held)
        self._add(place, "decode", port, other, read)

    def _add(
        self, place: Place, what: str, port: Side, other: Side, read: int | None = None
    ) -> None:
        labels = (self._block.name, self._block.dtype, place.batch, what, place.length)
        self.cells.append(Cell(*labels, port, other, read))


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

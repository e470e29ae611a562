"""From what is asked to the cells that are timed, in the order in which they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlxkv.commands.bench.ask import MOST_BATCHED, Lists, Request
from oracle.model.checkpoint import Checkpoint

LEAST, MOST = 3, 15
"""Rounds of a cell: of fewer a median says little, and more do not narrow the range of one that a
quiet machine gives."""
BUDGET = 12.0
"""Seconds after which a cell has enough rounds, if it has had LEAST: short turns spread more."""


LONGEST = 240.0
"""Seconds of one turn of both engines, beyond which a length of ours is left out: MLX's CPU kernels
multiply float16 so slowly that a prompt of 4,096 tokens takes the default model a quarter of an
hour in each engine."""


@dataclass(frozen=True, slots=True)
class Place:
    """Prompts of one length, of so many sequences: whether filling is timed, and decoding after."""

    batch: int
    length: int
    prefill: bool
    decode: bool

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return self.batch * self.length


@dataclass(frozen=True, slots=True)
class Block:
    """All that is timed with one pair of loaded models; `name` is "" for the one at hand."""

    name: str
    checkpoint: Checkpoint
    dtype: str
    places: tuple[Place, ...]

    @property
    def title(self) -> str:
        """What tells it from the other blocks of a run."""
        return self.name or self.dtype


def places(request: Request, lists: Lists) -> tuple[Place, ...]:
    """Batch by batch, from the shortest to the longest."""
    return tuple(_places(request, lists))


def _places(request: Request, lists: Lists) -> Iterator[Place]:
    for batch in lists.batches:
        for length in sorted({*lists.prefill, *lists.decode}):
            if batch == 1 or request.chosen or batch * length <= MOST_BATCHED:
                yield Place(batch, length, length in lists.prefill, length in lists.decode)


def rounds(asked: int | None, seconds: float) -> int:
    """How many rounds a cell gets whose first took so many seconds."""
    return asked or min(MOST, max(LEAST, int(BUDGET / max(seconds, 1e-9))))


PREFILLED = {"float32": 1e-10, "float16": 6e-9, "bfloat16": 1.5e-9, "4bit": 3e-9}
DECODED = {"float32": 7e-10, "float16": 4e-8, "bfloat16": 1e-8, "4bit": 1e-8}
"""Seconds that both engines together take for each parameter and token, on two cores. In float32
from the default model's 134,515,008 at 150 and 21 tokens a second; by how much the others are
slower from 6 layers of its width, on a machine that was not quiet."""


def seconds(block: Block, request: Request) -> float:
    """About how long a block takes on two cores, its rounds as `rounds` has them."""
    size, total = block.checkpoint.parameters, 10.0
    for place in block.places:
        filled = PREFILLED[block.dtype] * size * place.tokens
        if filled > LONGEST and not request.chosen:
            continue
        decoded = DECODED[block.dtype] * size * place.batch**0.5 * request.steps
        total += filled * (rounds(request.rounds, filled) if place.prefill else 1)
        total += decoded * rounds(request.rounds, decoded) if place.decode else 0
    return total

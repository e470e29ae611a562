"""What is asked to be timed, and what of it is refused before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint, Named

PACKED = "4bit"
DTYPES = ("float32", "float16", "bfloat16", PACKED)
"""What both compute in; the last is MLX's affine 4 bits, in groups of 64, with float32 beside."""

MOST_BATCHED = 8192
"""Tokens that a batch of more than one is prefilled with, unless its lengths are given: at 1,024
for 8 sequences each turn takes two cores as long as one sequence of 8,000 does."""


def computes_in(dtype: str) -> str:
    """The dtype of the arithmetic: beside packed weights float32, as in MLX's CPU kernel anyway."""
    return "float32" if dtype == PACKED else dtype


@dataclass(frozen=True, slots=True)
class Lists:
    """Lengths of prompts, lengths after which is decoded, dtypes and batches."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    dtypes: tuple[str, ...]
    batches: tuple[int, ...]


DEFAULT = Lists((128, 1024), (128, 1024, 4096), ("float32",), (1,))
FULL = Lists((128, 1024, 4096), (128, 1024, 4096, 8000), DTYPES, (1, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Named):
    """Which cells to time; what is left None is chosen by `full`.

    `steps` tokens are decoded in a turn, by each sequence of a batch. `rounds` of None adapts to
    how long a turn takes. `overhead` is the model that is bound by the number of its kernels; None
    leaves it out where lengths are given.
    """

    dtypes: tuple[str, ...] = ()
    device: str = "auto"
    prefill: tuple[int, ...] | None = None
    decode: tuple[int, ...] | None = None
    batches: tuple[int, ...] | None = None
    steps: int = 32
    rounds: int | None = None
    full: bool = False
    overhead: bool | None = None

    def __post_init__(self) -> None:
        lists = {"--prefill": self.prefill, "--decode": self.decode, "--batch": self.batches}
        for name, given in lists.items():
            for value in given or ():
                if value < 1:
                    raise Refusal(f"{value}, expected whole numbers from 1", where=name)

    @property
    def chosen(self) -> bool:
        """Whether the lengths are a person's."""
        return self.prefill is not None or self.decode is not None

    @property
    def with_overhead(self) -> bool:
        return not self.chosen if self.overhead is None else self.overhead

    def lists(self, checkpoint: Checkpoint) -> Lists:
        """What is timed of this model.

        Raises Refusal for lengths that are given and longer than the model's sequences; our own are
        left out then.
        """
        ours, most = FULL if self.full else DEFAULT, checkpoint.max_positions
        prefill, decode = self.prefill or (), self.decode or ()
        if self.chosen:
            _require_fits("--prefill", prefill, 0, checkpoint)
            _require_fits("--decode", decode, self.steps, checkpoint)
        else:
            prefill = _fitting(ours.prefill, most)
            decode = _fitting(ours.decode, most - self.steps)
        dtypes = tuple(dict.fromkeys(self.dtypes)) or ours.dtypes
        if checkpoint.packed and PACKED in dtypes:
            if self.dtypes:
                what = f"{checkpoint.name} is packed already, expected a model that is not"
                raise Refusal(what, where=f"--dtype {PACKED}", remedy="leave it out")
            dtypes = tuple(name for name in dtypes if name != PACKED)
        batches = tuple(dict.fromkeys(self.batches or ours.batches))
        return Lists(prefill, decode, dtypes, batches)


def _fitting(lengths: Sequence[int], most: int) -> tuple[int, ...]:
    """Those that a model of so many positions takes; half of them where it takes none."""
    found = tuple(length for length in lengths if length <= most)
    return found or ((most // 2,) if most > 1 else ())


def _require_fits(option: str, lengths: Sequence[int], more: int, checkpoint: Checkpoint) -> None:
    longest, most = max(lengths, default=0), checkpoint.max_positions
    if lengths and longest + more > most:
        after = f" and {more} after them" if more else ""
        what = f"{longest} tokens{after}, expected at most {most} in all"
        what += f" (max_position_embeddings of {checkpoint.name})"
        raise Refusal(what, where=f"{option} {longest}", remedy="give smaller ones")

"""A checkpoint's tensors in float64, one at a time, after rounding to the run's dtype.

The weights are rounded first so that arithmetic is judged and not their rounding. Of packed weights
the scales and biases are what is stored and rounded. What they unpack to is left exact, since every
engine rounds that in its own way or not at all: it is arithmetic, and the pool's rounding of it is
part of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint
from oracle.model.packing import Packed
from oracle.truth import unpack
from oracle.truth.config import Config

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
BLOCK = 2**18
"""Numbers that are converted at once: 2 MB in float64, which stays in the processor's cache."""

Rows = Tensor | slice
"""Some rows of a tensor: their numbers, or from one up to another."""

HEAD_BLOCK = 2**25
"""Numbers of a head that are multiplied at once: 256 MB in float64, and all of SmolLM2's. In
smaller blocks torch adds up in other orders, which changes the last bits."""


def row_blocks(rows: int, columns: int, most: int = BLOCK) -> Iterator[slice]:
    """The rows of a tensor in pieces of about so many numbers."""
    step = max(1, most // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


class Weights:
    """The tensors of a checkpoint by name."""

    def __init__(self, checkpoint: Checkpoint, *, dtype: str) -> None:
        self.checkpoint, self.dtype = checkpoint, dtype
        self._files: dict[Path, Any] = {}

    def __call__(self, name: str, *, rows: Rows | None = None, out: Tensor | None = None) -> Tensor:
        """One tensor, or only some of its rows; nothing else of its size is held meanwhile.

        Rows from one up to another, or all, are written into the first ones of `out`, if given: the
        system takes eight times as long to hand out new memory as it takes to fill it.
        """
        packed = self.checkpoint.packed.get(name)
        names = [name] if packed is None else [name, packed.scales, packed.biases]
        parts = [self.stored(part) for part in names]
        if isinstance(rows, Tensor):
            return self._exact(name, parts, rows)
        shape = parts[0].shape if packed is None else packed.shape
        first, stop, _ = (rows or slice(None)).indices(shape[0])
        found = torch.empty(stop - first, *shape[1:], dtype=torch.float64) if out is None else out
        for block in row_blocks(stop - first, math.prod(shape[1:])):
            at = slice(first + block.start, first + block.stop)
            found[block] = self._exact(name, parts, at)
        return found[: stop - first]

    def stored(self, name: str) -> Tensor:
        """One tensor as stored, mapped from its file."""
        path = self.checkpoint.tensors[name].file
        if path not in self._files:
            self._files[path] = safe_open(str(path), framework="pt")
        tensor: Tensor = self._files[path].get_tensor(name)
        return tensor

    def _exact(self, name: str, parts: Sequence[Tensor], rows: Rows) -> Tensor:
        """Rows of a tensor, of which these are the stored ones."""
        words, *beside = parts
        if not beside:
            return self._rounded(name, words, rows)
        packed = self.checkpoint.packed[name]
        scales, biases = beside
        scales = self._rounded(packed.scales, scales, rows)
        biases = self._rounded(packed.biases, biases, rows)
        return self._unpacked(packed, words[rows], scales, biases)

    def _rounded(self, name: str, stored: Tensor, rows: Rows) -> Tensor:
        rounded = stored[rows].to(DTYPES[self.dtype]).to(torch.float64)
        # The sum of numbers is a number, and that of one that is none is none: one pass.
        if not math.isfinite(float(rounded.sum())):
            raise not_finite(self.checkpoint, name, self.dtype)
        return rounded

    def _unpacked(self, packed: Packed, words: Tensor, scales: Tensor, biases: Tensor) -> Tensor:
        arrays = words.numpy(), scales.numpy(), biases.numpy()
        found = unpack.weight(*arrays, bits=packed.bits, group_size=packed.group_size)
        return torch.from_numpy(found)

    def layer(
        self, config: Config, i: int, *, into: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """One layer's tensors by the rest of their names.

        They are written over those of another layer in `into`, if that is given.
        """
        prefix, room = f"model.layers.{i}.", {} if into is None else into
        for name in config.shapes():
            if name.startswith(prefix):
                rest = name.removeprefix(prefix)
                room[rest] = self(name, out=room.get(rest))
        return room

    def head(self, config: Config) -> Tensor:
        """The matrix that makes logits, (V, E)."""
        return self(head_name(config))

    def head_blocks(self, config: Config) -> Iterator[Tensor]:
        """The same in blocks of its rows, each of which is written over the one before."""
        room = None
        for rows in row_blocks(config.vocab_size, config.hidden, HEAD_BLOCK):
            block = self(head_name(config), rows=rows, out=room)
            room = block if room is None else room
            yield block


def head_name(config: Config) -> str:
    """The name of the matrix that makes logits."""
    return EMBEDDING if config.tied else HEAD


def not_finite(checkpoint: Checkpoint, name: str, dtype: str) -> Refusal:
    """The refusal of a tensor that holds NaN, or infinity in the run's dtype."""
    return Refusal(
        f"{name}: not finite in {dtype}, expected finite weights",
        where=checkpoint.folder,
        remedy="use other weights or another --dtype",
    )

"""A checkpoint's tensors in float64, one at a time, after rounding to the run's dtype.

The weights are rounded first so that arithmetic is judged and not their rounding. Of packed weights
the scales and biases are what is stored and rounded. What they unpack to is left exact, since every
engine rounds that in its own way or not at all: it is arithmetic, and the pool's rounding of it is
part of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

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
BLOCK = 2**22
"""Numbers that are converted at once: 32 MB in float64."""

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

    def __call__(self, name: str, *, rows: Rows | None = None) -> Tensor:
        """One tensor, or only some of its rows; nothing else of its size is held meanwhile."""
        if rows is not None:
            return self._some(name, rows)
        packed = self.checkpoint.packed.get(name)
        shape = self.checkpoint.tensors[name].shape if packed is None else packed.shape
        whole = torch.empty(*shape, dtype=torch.float64)
        for block in row_blocks(shape[0], math.prod(shape[1:])):
            whole[block] = self._some(name, block)
        return whole

    def stored(self, name: str) -> Tensor:
        """One tensor as stored, mapped from its file."""
        with safe_open(str(self.checkpoint.tensors[name].file), framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        return tensor

    def _some(self, name: str, rows: Rows) -> Tensor:
        packed = self.checkpoint.packed.get(name)
        return self._rounded(name, rows) if packed is None else self._unpacked(name, packed, rows)

    def _rounded(self, name: str, rows: Rows) -> Tensor:
        rounded = self.stored(name)[rows].to(DTYPES[self.dtype]).to(torch.float64)
        # The sum of numbers is a number, and that of one that is none is none: one pass.
        if not math.isfinite(float(rounded.sum())):
            raise not_finite(self.checkpoint, name, self.dtype)
        return rounded

    def _unpacked(self, name: str, packed: Packed, rows: Rows) -> Tensor:
        words = self.stored(name)[rows].numpy()
        scales, biases = (self._rounded(n, rows).numpy() for n in (packed.scales, packed.biases))
        bits, size = packed.bits, packed.group_size
        return torch.from_numpy(unpack.weight(words, scales, biases, bits=bits, group_size=size))

    def layer(self, config: Config, i: int) -> dict[str, Tensor]:
        """One layer's tensors by the rest of their names."""
        prefix = f"model.layers.{i}."
        names = [name for name in config.shapes() if name.startswith(prefix)]
        return {name.removeprefix(prefix): self(name) for name in names}

    def head(self, config: Config) -> Tensor:
        """The matrix that makes logits, (V, E)."""
        return self(head_name(config))

    def head_blocks(self, config: Config) -> Iterator[Tensor]:
        """The same in blocks of its rows, one after another."""
        blocks = row_blocks(config.vocab_size, config.hidden, HEAD_BLOCK)
        return (self(head_name(config), rows=rows) for rows in blocks)


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

"""A checkpoint's safetensors -> a Llama's parameters: no tensor missing, none left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_unflatten

from mlxkv.port import ops, shard
from mlxkv.port.config.llama import ConfigError, LlamaConfig
from mlxkv.port.joint import arrange
from mlxkv.port.llama import Llama, parameters
from mlxkv.port.packed import install, unpacked
from mlxkv.port.part import Part, require_splits
from mlxkv.port.stored import require_floats, require_same_head, weights_of
from oracle.formats import disk
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint, resolve

Rows = slice | npt.NDArray[np.integer]
"""Which rows of a weight: a piece of them, or those of these numbers."""

_NUMPY: dict[str, Any] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4"}


def load(
    path: str | Path | None = None,
    dtype: str = "float32",
    *,
    rounded_to: str | None = None,
    ignore_keys: Sequence[str] = (),
) -> Llama:
    """A Llama from a folder, a GGUF file, a hub id, or (None) the default model.

    `rounded_to` rounds the stored weights to that dtype first: a float64 run judges the arithmetic
    of a float16 one only if both compute with the same weights. `ignore_keys` are unknown keys of
    config.json that are known to change nothing. Raises Refusal, a ValueError, for a model that
    cannot be had or followed exactly; its subclass ConfigError where config.json is the reason.
    """
    checkpoint = resolve(None if path is None else str(path), ignore_keys=ignore_keys)
    return from_checkpoint(checkpoint, dtype, rounded_to=rounded_to)


def from_checkpoint(
    checkpoint: Checkpoint,
    dtype: str = "float32",
    *,
    rounded_to: str | None = None,
    group: mx.distributed.Group | None = None,
) -> Llama:
    """A Llama from a resolved checkpoint; packed weights stay packed, except in float64.

    With a group this rank's part of it, which is all that is read.
    """
    filling = Filling(checkpoint, dtype, rounded_to=rounded_to, group=group)
    filling.fill()
    return filling.model


class Filling:
    """A checkpoint's `model`, whose weights are in memory from when they are asked for.

    A model that is too large to be there whole is filled and emptied a layer at a time.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str = "float32",
        *,
        rounded_to: str | None = None,
        group: mx.distributed.Group | None = None,
    ) -> None:
        config = LlamaConfig.of(checkpoint)
        if group is not None:
            require_splits(checkpoint, group.size())
        self._names = _shapes(config)
        _check(checkpoint, self._names, tied=config.tie_word_embeddings)
        self.model = Llama(config)
        self._dtype, first = ops.dtype_of(dtype), ops.dtype_of(rounded_to or dtype)
        if self._dtype != mx.float64:
            install(self.model, checkpoint)
        # Of the random weights only the shapes were wanted; without this they would be made beside
        # the real ones.
        self.empty("")
        if group is not None:
            shard.install(self.model, group)
        self.model.eval()
        self._stored = _Stored(checkpoint, first, self.model.part)
        # Rounded weights are other weights.
        rounded = "" if first == self._dtype else f" in {rounded_to}"
        self.model.fingerprint = checkpoint.fingerprint + rounded

    def fill(self, first: str = "") -> None:
        """Reads the weights whose names begin with `first`, one after the other.

        Those of a whole model are then put where they are read fastest.
        """
        names = [name for name in self._names if name.startswith(first)]
        for name in sorted(names, key=self._stored.file):
            self._put(self._read(name))
        if not first:
            arrange(self.model)

    def empty(self, first: str) -> None:
        """Lets go of the weights whose names begin with `first`."""
        held = [name for name in parameters(self.model) if name.startswith(first)]
        self._put({name: mx.zeros((0,)) for name in held})

    def rows(self, name: str, rows: Rows) -> mx.array:
        """Some rows of a weight (out, in), which are all that is read of it. In float64 only."""
        return self._read(name, rows)[name]

    def _read(self, name: str, rows: Rows = slice(None)) -> dict[str, mx.array]:
        with ops.stream(self._dtype):
            read = self._stored.whole if self._dtype == mx.float64 else self._stored.parts
            found = read(name, rows)
            # One at a time: float64 copies beside all their float32 sources would not fit.
            made = {n: self._cast(array) for n, array in found.items()}
            mx.eval(made)
        return made

    def _cast(self, array: mx.array) -> mx.array:
        return array if array.dtype == mx.uint32 else array.astype(self._dtype)

    def _put(self, arrays: Mapping[str, mx.array]) -> None:
        named = [(name.removeprefix("model."), array) for name, array in arrays.items()]
        self.model.update(tree_unflatten(named))


class _Stored:
    """A checkpoint's tensors, read whenever they are asked for and not kept.

    Floats are rounded to a dtype and refused where they are not finite in it. Of a rank's `part`
    only its rows and columns are read.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, part: Part | None = None) -> None:
        self.checkpoint, self.dtype, self.part = checkpoint, dtype, part

    def file(self, name: str) -> Path:
        return self.checkpoint.tensors[name].file

    def parts(self, name: str, rows: Rows = slice(None)) -> dict[str, mx.array]:
        """A weight as it is stored; a packed one with its scales and biases."""
        packed = self.checkpoint.packed.get(name)
        if packed is None:
            return {name: self._rounded(name, rows)}
        affine = {part: self._rounded(part, rows) for part in (packed.scales, packed.biases)}
        return {name: self._read(name, rows)} | affine

    def whole(self, name: str, rows: Rows = slice(None)) -> dict[str, mx.array]:
        """A weight unpacked in float64, or as it is stored."""
        parts, packed = self.parts(name, rows), self.checkpoint.packed.get(name)
        if packed is None:
            return parts
        scales, biases = (parts[part].astype(mx.float64) for part in (packed.scales, packed.biases))
        sizes = {"bits": packed.bits, "group_size": packed.group_size}
        return {name: unpacked(parts[name], scales, biases, **sizes)}

    def _rounded(self, name: str, rows: Rows) -> mx.array:
        # Rounding keeps the order of magnitudes, so the largest says it of all.
        largest = mx.array(self.checkpoint.largest[name], mx.float32).astype(self.dtype)
        if not mx.isfinite(largest).item():
            what = f"{name} holds NaN or infinity in {ops.name_of(self.dtype)}"
            where = self.file(name)
            raise Refusal(f"{what}, expected finite weights", where=where, remedy="check the file")
        return self._read(name, rows).astype(self.dtype)

    def _read(self, name: str, rows: Rows) -> mx.array:
        """Rows of a tensor, copied out of a memory map that is there for the moment."""
        tensor = self.checkpoint.tensors[name]
        kind = _NUMPY[tensor.dtype]
        with disk.reading(tensor.file, "check the file"):
            mapped: npt.NDArray[Any] = np.memmap(tensor.file, kind, "r", tensor.start, tensor.shape)
        if self.part is not None:
            mapped = mapped[self.part.place(name, mapped.shape)]
        # A tensor may begin anywhere in its file; and of some columns MLX would keep whole rows.
        array = mx.array(np.require(mapped[rows], requirements=["A", "C"]))
        return array.view(mx.bfloat16) if tensor.dtype == "BF16" else array


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape, by name.

    They are those of a model of one layer, so that a config that does not fit its weights costs
    nothing.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, array in parameters(Llama(replace(config, num_hidden_layers=1))).items():
        layers = config.num_hidden_layers if name.startswith("model.layers.0.") else 1
        found |= {name.replace(".layers.0.", f".layers.{i}."): array.shape for i in range(layers)}
    return found


def _check(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
    """Refuses a tensor that is missing, left over, of another shape, or of a dtype MLX lacks."""
    where = checkpoint.folder
    found = set(weights_of(checkpoint))  # a tied head may be stored once more
    if tied:
        found -= {"lm_head.weight"}
        require_same_head(checkpoint)
    missing, more = sorted(set(expected) - found), sorted(found - set(expected))
    if missing:
        what, remedy = f"tensor {missing[0]} is missing", "the weights do not fit config.json"
        raise Refusal(f"{what} ({len(missing)} in all)", where=where, remedy=remedy)
    if more:
        what = f"tensor {more[0]} is not part of this Llama ({len(more)} such)"
        raise Refusal(what, where=where, remedy="see config.json")
    for name, shape in expected.items():
        found_shape = checkpoint.weights[name]
        if found_shape != shape:
            how = f"{list(found_shape)}{' unpacked' if name in checkpoint.packed else ''}"
            what = f"{name} has shape {how}, expected {list(shape)} by config.json"
            raise Refusal(what, where=where)
        require_floats(checkpoint, name)


__all__ = ["ConfigError", "from_checkpoint", "load"]

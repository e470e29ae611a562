"""A checkpoint's safetensors -> a Llama's parameters: no tensor missing, none left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map, tree_unflatten

from mlxkv.port import ops, shard
from mlxkv.port.config.llama import ConfigError, LlamaConfig
from mlxkv.port.llama import Llama, parameters
from mlxkv.port.packed import install, unpacked
from mlxkv.port.part import Part, require_splits
from mlxkv.port.stored import require_floats, require_same_head, weights_of
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint, resolve


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

    With a group this rank's part of it: no rank holds more than one whole tensor of what is split.
    """
    config = LlamaConfig.of(checkpoint)
    if group is not None:
        require_splits(checkpoint, group.size())
    expected = _shapes(config)
    _check(checkpoint, expected, tied=config.tie_word_embeddings)
    model = Llama(config)
    target, first = ops.dtype_of(dtype), ops.dtype_of(rounded_to or dtype)
    if target != mx.float64:
        install(model, checkpoint)
    # Of the random weights only the shapes were wanted; without this they would be made beside the
    # real ones.
    model.update(tree_map(lambda _: mx.zeros((0,)), model.parameters()))
    if group is not None:
        shard.install(model, group)
    stored = _Stored(checkpoint, first, model.part)
    for name in sorted(expected, key=lambda n: checkpoint.tensors[n].file):
        with ops.stream(target):
            arrays = stored.whole(name) if target == mx.float64 else stored.parts(name)
            # One at a time: float64 copies beside all their float32 sources would not fit.
            made = {n: a if a.dtype == mx.uint32 else a.astype(target) for n, a in arrays.items()}
            mx.eval(made)
        model.update(tree_unflatten([(n.removeprefix("model."), a) for n, a in made.items()]))
    model.eval()
    # Rounded weights are other weights.
    model.fingerprint = checkpoint.fingerprint + ("" if first == target else f" in {rounded_to}")
    return model


class _Stored:
    """A checkpoint's tensors, each read once, when asked for, and then let go.

    Floats are rounded to a dtype and refused where they are not finite in it. Of a rank's `part`
    only its rows and columns are kept.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, part: Part | None = None) -> None:
        self.checkpoint, self.dtype, self.part = checkpoint, dtype, part
        self._arrays: dict[str, mx.array] = {}
        # MLX reads an array of a file when it is evaluated, so this reads headers only. The parts
        # of a packed weight may lie in several files.
        for file in sorted({tensor.file for tensor in checkpoint.tensors.values()}):
            self._arrays |= mx.load(str(file))  # type: ignore[arg-type]

    def parts(self, name: str) -> dict[str, mx.array]:
        """A weight as it is stored; a packed one with its scales and biases."""
        packed = self.checkpoint.packed.get(name)
        if packed is None:
            return {name: self._rounded(name)}
        affine = {part: self._rounded(part) for part in (packed.scales, packed.biases)}
        return {name: self._taken(name)} | affine

    def whole(self, name: str) -> dict[str, mx.array]:
        """A weight unpacked in float64, or as it is stored."""
        parts, packed = self.parts(name), self.checkpoint.packed.get(name)
        if packed is None:
            return parts
        scales, biases = (parts[part].astype(mx.float64) for part in (packed.scales, packed.biases))
        sizes = {"bits": packed.bits, "group_size": packed.group_size}
        return {name: unpacked(parts[name], scales, biases, **sizes)}

    def _taken(self, name: str) -> mx.array:
        return shard.cut(name, self._arrays.pop(name), self.part)

    def _rounded(self, name: str) -> mx.array:
        rounded = self._taken(name).astype(self.dtype)
        if not mx.isfinite(rounded).all().item():
            what = f"{name} holds NaN or infinity in {ops.name_of(self.dtype)}"
            file = self.checkpoint.tensors[name].file
            raise Refusal(f"{what}, expected finite weights", where=file, remedy="check the file")
        return rounded


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

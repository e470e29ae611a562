"""A checkpoint's safetensors -> a Llama's parameters, strict both ways: no tensor missing, none left over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map, tree_unflatten

from mlxkv.port.config.llama import ConfigError, LlamaConfig
from mlxkv.port.llama import Llama, parameters
from mlxkv.port.ops import dtype_of, name_of
from mlxkv.port.packed import install, unpacked
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint, resolve

STORED = ("F32", "F16", "BF16")
"""What MLX reads as floats; it reads no F64. Integers are weights only where the checkpoint says how they are packed."""


def load(
    path: str | Path | None = None,
    dtype: str = "float32",
    *,
    rounded_to: str | None = None,
    ignore_keys: Sequence[str] = (),
) -> Llama:
    """A Llama from a folder, a GGUF file, a hub id, or (None) the default model.

    `rounded_to` rounds the stored weights to that dtype first: a float64 run judges the arithmetic of a float16 one only
    if both compute with the same weights. `ignore_keys` are unknown keys of config.json that are known to change nothing.
    """
    checkpoint = resolve(None if path is None else str(path), ignore_keys=ignore_keys)
    return from_checkpoint(checkpoint, dtype, rounded_to=rounded_to)


def from_checkpoint(
    checkpoint: Checkpoint, dtype: str = "float32", *, rounded_to: str | None = None
) -> Llama:
    """A Llama from a checkpoint that has been resolved already; packed weights stay packed, but in float64."""
    config = LlamaConfig.of(checkpoint)
    expected = _shapes(config)
    names = _names(checkpoint, expected, tied=config.tie_word_embeddings)
    model = Llama(config)
    target, first = dtype_of(dtype), dtype_of(rounded_to or dtype)
    if target != mx.float64:
        install(model, checkpoint)
    # Shapes are all that is wanted of the random weights; without this they would be made beside the real ones.
    model.update(tree_map(lambda _: mx.zeros((0,)), model.parameters()))
    stored = _Stored(checkpoint, first)
    if config.tie_word_embeddings:
        stored.check_tied()
    for name in sorted(names, key=lambda n: checkpoint.tensors[n].file):
        with mx.stream(mx.cpu if target == mx.float64 else mx.default_device()):
            arrays = stored.whole(name) if target == mx.float64 else stored.parts(name)
            # One at a time: a float64 copy beside its float32 source, of every tensor at once, would not fit.
            made = {n: a if a.dtype == mx.uint32 else a.astype(target) for n, a in arrays.items()}
            mx.eval(made)
        model.update(tree_unflatten([(n.removeprefix("model."), a) for n, a in made.items()]))
    model.eval()
    # Rounded weights are other weights.
    model.fingerprint = checkpoint.fingerprint + ("" if first == target else f" in {rounded_to}")
    return model


class _Stored:
    """A checkpoint's tensors, read when asked for and then let go, floats rounded to a dtype and known to be finite."""

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype) -> None:
        self.checkpoint, self.dtype = checkpoint, dtype
        self._arrays: dict[str, mx.array] = {}
        # MLX reads an array of a file when it is evaluated, so this reads headers only. A packed weight may lie in several files.
        for file in sorted({tensor.file for tensor in checkpoint.tensors.values()}):
            self._arrays |= mx.load(str(file))  # type: ignore[arg-type]

    def check_tied(self) -> None:
        """A tied head may be stored once more, but then it is the embedding; which of two would count differs by engine."""
        for part in ("weight", "scales", "biases"):
            head, embedding = (
                self._arrays.get(f"{module}.{part}") for module in ("lm_head", "model.embed_tokens")
            )
            if head is not None and (
                embedding is None
                or head.dtype != embedding.dtype
                or not mx.array_equal(head, embedding).item()
            ):
                where, name = self.checkpoint.folder, f"lm_head.{part}"
                raise Refusal(
                    f"{where}: {name} differs from model.embed_tokens.{part} though tie_word_embeddings is true; correct config.json"
                )

    def parts(self, name: str) -> dict[str, mx.array]:
        """A weight as it is stored; a packed one with its scales and biases."""
        packed = self.checkpoint.packed.get(name)
        if packed is None:
            return {name: self._rounded(name)}
        return {name: self._arrays.pop(name)} | {
            part: self._rounded(part) for part in (packed.scales, packed.biases)
        }

    def whole(self, name: str) -> dict[str, mx.array]:
        """A weight unpacked in float64, or as it is stored."""
        parts, packed = self.parts(name), self.checkpoint.packed.get(name)
        if packed is None:
            return parts
        scales, biases = (parts[part].astype(mx.float64) for part in (packed.scales, packed.biases))
        return {
            name: unpacked(
                parts[name], scales, biases, bits=packed.bits, group_size=packed.group_size
            )
        }

    def _rounded(self, name: str) -> mx.array:
        rounded = self._arrays.pop(name).astype(self.dtype)
        if not mx.isfinite(rounded).all().item():
            file, dtype = self.checkpoint.tensors[name].file, name_of(self.dtype)
            raise Refusal(
                f"{file}: {name} holds NaN or infinity in {dtype}, expected finite weights; check the file"
            )
        return rounded


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape; from one layer, so that a config that does not fit its weights costs nothing."""
    found: dict[str, tuple[int, ...]] = {}
    for name, array in parameters(Llama(replace(config, num_hidden_layers=1))).items():
        layers = config.num_hidden_layers if name.startswith("model.layers.0.") else 1
        found |= {name.replace(".layers.0.", f".layers.{i}."): array.shape for i in range(layers)}
    return found


def _names(
    checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]], *, tied: bool
) -> list[str]:
    found = {n for n in checkpoint.weights if not n.endswith("rotary_emb.inv_freq")}
    if tied:
        found.discard("lm_head.weight")
    for name in sorted(set(expected) - found):
        raise Refusal(
            f"{checkpoint.folder}: tensor {name} is missing ({len(set(expected) - found)} in all); the weights do not fit config.json"
        )
    for name in sorted(found - set(expected)):
        raise Refusal(
            f"{checkpoint.folder}: tensor {name} is not part of this Llama ({len(found - set(expected))} such); see config.json"
        )
    for name, shape in expected.items():
        found_shape, stored = checkpoint.weights[name], checkpoint.tensors[name].dtype
        if found_shape != shape:
            how = " unpacked" if name in checkpoint.packed else ""
            raise Refusal(
                f"{checkpoint.folder}: {name} has shape {list(found_shape)}{how}, expected {list(shape)} by config.json"
            )
        if stored not in STORED and name not in checkpoint.packed:
            raise Refusal(
                f"{checkpoint.folder}: {name} is stored as {stored}, expected one of {', '.join(STORED)}; convert it first"
            )
    return list(expected)


__all__ = ["ConfigError", "from_checkpoint", "load"]

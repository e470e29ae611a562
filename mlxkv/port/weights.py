"""A checkpoint's safetensors -> a Llama's parameters, strict both ways: no tensor missing, none left over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_unflatten

from mlxkv.port.config import ConfigError, LlamaConfig
from mlxkv.port.llama import Llama, parameters
from mlxkv.port.ops import dtype_of
from oracle.checkpoint import Checkpoint, resolve
from oracle.plan import Refusal

STORED = ("F32", "F16", "BF16")
"""What MLX reads as floats. Quantised integers would be cast without their scales, and it reads no F64."""


def load(
    path: str | Path | None = None, dtype: str = "float32", *, rounded_to: str | None = None, ignore_keys: Sequence[str] = ()
) -> Llama:
    """A Llama from a folder, a GGUF file, a hub id, or (None) the default model.

    `rounded_to` rounds the stored weights to that dtype first: a float64 run judges the arithmetic of a float16 one only
    if both compute with the same weights. `ignore_keys` are unknown keys of config.json that are known to change nothing.
    """
    checkpoint = resolve(None if path is None else str(path), ignore_keys=ignore_keys)
    return from_checkpoint(checkpoint, dtype, rounded_to=rounded_to)


def from_checkpoint(checkpoint: Checkpoint, dtype: str = "float32", *, rounded_to: str | None = None) -> Llama:
    """A Llama from a checkpoint that has been resolved already."""
    config = LlamaConfig.of(checkpoint)
    expected = _shapes(config)
    names = _names(checkpoint, expected, tied=config.tie_word_embeddings)
    model = Llama(config)
    target, first = dtype_of(dtype), dtype_of(rounded_to or dtype)
    # Shapes are all that is wanted of the random weights; without this they would be made beside the real ones.
    model.update(tree_unflatten([(n.removeprefix("model."), mx.zeros((0,))) for n in expected]))
    for file in sorted({checkpoint.tensors[n].file for n in names}):
        arrays: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
        for name in (n for n in names if checkpoint.tensors[n].file == file):
            with mx.stream(mx.cpu if target == mx.float64 else mx.default_device()):
                rounded = arrays.pop(name).astype(first)
                array, finite = rounded.astype(target), mx.isfinite(rounded).all()
            # One at a time: a float64 copy beside its float32 source, of every tensor at once, would not fit.
            mx.eval(array, finite)
            if not finite.item():
                raise Refusal(f"{file}: {name} holds NaN or infinity in {rounded_to or dtype}, expected finite weights; check the file")
            model.update(tree_unflatten([(name.removeprefix("model."), array)]))
    model.eval()
    # Rounded weights are other weights.
    model.fingerprint = checkpoint.fingerprint + ("" if first == target else f" in {rounded_to}")
    return model


def _shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape; from one layer, so that a config that does not fit its weights costs nothing."""
    found: dict[str, tuple[int, ...]] = {}
    for name, array in parameters(Llama(replace(config, num_hidden_layers=1))).items():
        layers = config.num_hidden_layers if name.startswith("model.layers.0.") else 1
        found |= {name.replace(".layers.0.", f".layers.{i}."): array.shape for i in range(layers)}
    return found


def _names(checkpoint: Checkpoint, expected: dict[str, tuple[int, ...]], *, tied: bool) -> list[str]:
    found = {n for n in checkpoint.tensors if not n.endswith("rotary_emb.inv_freq")}
    if tied:
        # transformers ties lm_head to the embedding whatever the file says.
        found.discard("lm_head.weight")
    for name in sorted(set(expected) - found):
        raise Refusal(
            f"{checkpoint.folder}: tensor {name} is missing ({len(set(expected) - found)} in all); the weights do not fit config.json"
        )
    for name in sorted(found - set(expected)):
        raise Refusal(f"{checkpoint.folder}: tensor {name} is not part of this Llama ({len(found - set(expected))} such); see config.json")
    for name, shape in expected.items():
        stored = checkpoint.tensors[name]
        if stored.shape != shape:
            raise Refusal(f"{checkpoint.folder}: {name} has shape {list(stored.shape)}, expected {list(shape)} by config.json")
        if stored.dtype not in STORED:
            raise Refusal(f"{checkpoint.folder}: {name} is stored as {stored.dtype}, expected one of {', '.join(STORED)}; convert it first")
    return list(expected)


__all__ = ["ConfigError", "from_checkpoint", "load"]

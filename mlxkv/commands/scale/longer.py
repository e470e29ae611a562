"""The first layers of a Llama with room for a longer sequence, by RoPE of type llama3.

Real weights, since random ones attend to nothing in particular. What such a model says means
nothing; its logits are as exact as those of any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oracle.formats.disk import linked
from oracle.model import written
from oracle.model.checkpoint import resolve

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def longer(model: str | None, out: Path, *, layers: int, positions: int) -> Path:
    """The folder of the model's first `layers` with that many positions; its tokenizer beside."""
    checkpoint = resolve(model)
    if checkpoint.packed:
        raise ValueError(f"{checkpoint.name}: packed weights, expected plain ones")
    if not 1 <= layers <= checkpoint.config["num_hidden_layers"]:
        raise ValueError(f"layers: {layers}, expected 1 to the model's own")
    config = stretched(checkpoint.config, layers=layers, positions=positions)
    kept = {f"model.layers.{i}" for i in range(layers)}
    tensors = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if not name.startswith("model.layers.") or ".".join(name.split(".")[:3]) in kept
    }
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    written.save(out, config, shapes, lambda name: written.read(tensors[name]))
    for name in _TOKENIZER:
        if (checkpoint.folder / name).exists():
            linked(checkpoint.folder / name, out / name)
    return out


def stretched(config: Mapping[str, Any], *, layers: int, positions: int) -> dict[str, Any]:
    """The config: the wavelengths of Llama 3.1 at the model's own length and beyond it."""
    if config.get("rope_scaling") or config.get("rope_parameters"):
        raise ValueError("a model whose RoPE is scaled already, expected one of type default")
    length = config["max_position_embeddings"]
    scaling = {
        "rope_type": "llama3",
        "factor": positions / length,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": length,
    }
    return dict(config) | {
        "num_hidden_layers": layers,
        "max_position_embeddings": positions,
        "rope_scaling": scaling,
    }

"""What selftest and calibrate run on: MODEL or the default, and small random Llamas."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oracle.formats.disk import atomic, write_text
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Named
from oracle.model.written import VALUES, drawn, save, shapes_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "gqa": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "mqa": {"num_key_value_heads": 1, "tie_word_embeddings": False},
}
STDS = (0.02, 0.2)
"""Standard deviations of the weights: as models are initialised, and ten times that, where
attention is sharp."""
COMMON: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


WIDE = (
    *((width, "bfloat16") for width in (64, 256, 1024, 2048, 4096, 8192)),
    *((1024, values) for values in VALUES if values != "bfloat16"),
    *((4096, values) for values in VALUES if values != "bfloat16"),
    (8192, "float32"),
)
"""Widths of wide models, and how their weights are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(Named):
    """The models to run on: MODEL (None: the default one) if `real`, random ones if `tiny`."""

    tiny: bool = True
    real: bool = True
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not (self.real or self.tiny):
            what = "no model to run on, expected the default or the random ones"
            raise Refusal(what, where="--no-real and --no-tiny", remedy="leave one out")


@dataclass(frozen=True, slots=True)
class Tiny:
    """A head layout, the standard deviation of the initial weights, and a seed."""

    layout: str
    std: float
    seed: int

    @property
    def name(self) -> str:
        """As in `gqa-0.02-1`."""
        return f"{self.layout}-{self.std:g}-{self.seed}"

    def save(self, folder: Path) -> Path:
        """Writes config.json and model.safetensors, the same bytes every time; the folder."""
        import safetensors.numpy

        config = COMMON | LAYOUTS[self.layout]
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "config.json", json.dumps(config, indent=1))
        with atomic(folder / "model.safetensors") as part:
            safetensors.numpy.save_file(self._weights(config), part)
        return folder

    def _weights(self, config: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
        random = np.random.default_rng([self.seed, *self.layout.encode(), round(1000 * self.std)])
        made = {}
        for name, shape in shapes_of(config).items():
            array = random.standard_normal(shape) * (self.std if len(shape) > 1 else 0.1)
            array += len(shape) == 1
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                # The usual initial weights make attention nearly flat, and faults of RoPE, mask
                # and cache shrink with it.
                array *= max(1.0, math.sqrt(3 / (self.std * math.sqrt(shape[1]))))
            made[name] = array.astype(np.float32)
        return made


@dataclass(frozen=True, slots=True)
class Wide:
    """One layer of a real model's width and little else, its weights stored as `values` says.

    Long sums are what width changes: a row of 8,192 squares has other roundings than one of 64, and
    squares of few bits others than those of many.
    """

    width: int
    values: str
    seed: int = 0

    @property
    def name(self) -> str:
        """As in `wide-2048-bfloat16`."""
        return f"wide-{self.width}-{self.values}"

    @property
    def config(self) -> dict[str, Any]:
        heads = max(1, self.width // 128)
        return COMMON | {
            "hidden_size": self.width,
            "intermediate_size": max(64, self.width // 4),
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 8),
            "head_dim": min(128, self.width),
            "tie_word_embeddings": True,
        }

    def save(self, folder: Path) -> Path:
        """Writes config.json and model.safetensors, the same bytes every time; the folder."""
        shapes = shapes_of(self.config)
        weights = drawn(shapes, self.seed, self.width)
        return save(folder, self.config, shapes, weights, values=self.values)

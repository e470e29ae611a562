"""Makes a Llama r times as wide that computes the same logits, in a file of any kind.

usage: python -m mlxkv.commands.scale.widen TIMES OUT [MODEL] [--values VALUES]

A wide model with the statistics of a trained one (SmolLM2 where MODEL is left out). Every hidden
channel stands TIMES times, a power of two: the embedding's columns, the norms, every matrix's
outputs, so that query heads, KV heads and the MLP's width grow as whole blocks. A matrix's inputs
are repeated too and divided among the copies by shares that are powers of two and add up to 1. A
tied head has no shares: its last norm is divided by TIMES. It is written tensor by tensor, so that
any size can be made. VALUES are float32, float16, bfloat16 or 4-bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oracle.model import written
from oracle.model.checkpoint import resolve

Array = npt.NDArray[Any]
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_GROWN = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)


def widen(model: str | None, out: Path, *, times: int, values: str = "float32") -> Path:
    """The folder of the model made `times` as wide."""
    checkpoint = resolve(model)
    if times < 1 or times & (times - 1):
        raise ValueError(f"times: {times}, expected a power of two")
    if checkpoint.packed:
        raise ValueError(f"{checkpoint.name}: packed weights, expected plain ones")
    tensors, tied = checkpoint.tensors, _HEAD not in checkpoint.tensors
    config = wider(checkpoint.config, times)
    shapes = {name: _shape(name, tensor.shape, times) for name, tensor in tensors.items()}
    return written.save(
        out,
        config,
        shapes,
        lambda name: _wide(name, written.read(tensors[name]), times, tied=tied),
        values=values,
    )


def wider(config: Mapping[str, Any], times: int) -> dict[str, Any]:
    """The config of the wider model; head_dim stays, and is written down."""
    heads = config["num_attention_heads"]
    full = {
        "num_key_value_heads": heads,
        "head_dim": config["hidden_size"] // heads,
    } | {key: value for key, value in config.items() if value is not None}
    return full | {key: times * full[key] for key in _GROWN}


def shares(times: int) -> list[float]:
    """Powers of two that add up to 1, one for each copy: 1/2, 1/4, 1/8, 1/8 for four."""
    return [2.0 ** -min(i + 1, times - 1) for i in range(times)] if times > 1 else [1.0]


def _shape(name: str, shape: tuple[int, ...], times: int) -> tuple[int, ...]:
    if name in (_EMBEDDING, _HEAD):
        return shape[0], shape[1] * times
    return tuple(size * times for size in shape)


def _wide(name: str, array: Array, times: int, *, tied: bool) -> Array:
    if name == _EMBEDDING:
        return np.tile(array, (1, times))
    if array.ndim == 1:
        return np.tile(array, times) / (times if tied and name == _NORM else 1)
    divided = np.concatenate([array * np.float32(share) for share in shares(times)], axis=1)
    return divided if name == _HEAD else np.tile(divided, (times, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--values", choices=written.VALUES, default="float32")
    given = parser.parse_args()
    print(widen(given.model, given.out, times=given.times, values=given.values))


if __name__ == "__main__":
    main()

"""Tiny Hugging Face folders of three arrays, whole or in shards."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from oracle.formats.errors import Refusal
from oracle.model.checkpoint import resolve

CONFIG = {"model_type": "llama", "vocab_size": 11, "max_position_embeddings": 32}
INDEX = "model.safetensors.index.json"


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (11, 4),
        "model.norm.weight": (4,),
        "lm_head.weight": (11, 4),
    }
    return {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


def folder_of(
    path: Path, shards: dict[str, list[str]] | None = None, config: object = CONFIG
) -> Path:
    """A folder with the arrays in model.safetensors, or in shards under an index."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if shards is None:
        save_file(arrays(), path / "model.safetensors")
        return path
    for file, names in shards.items():
        save_file({n: arrays()[n] for n in names}, path / file)
    where = {n: file for file, names in shards.items() for n in names}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


SHARDS = {
    "a.safetensors": ["lm_head.weight", "model.norm.weight"],
    "b.safetensors": ["model.embed_tokens.weight"],
}


def aged(folder: Path, seconds: float = 10) -> Path:
    for file in folder.iterdir():
        os.utime(file, (time.time() - seconds, time.time() - seconds))
    return folder


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The one line with which a call is refused."""
    with pytest.raises(Refusal) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused(model: object, **options: Any) -> str:
    """Why there is no checkpoint of that name."""
    return refusal(resolve, str(model), **options)

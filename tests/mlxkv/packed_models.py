"""Tiny Llamas quantised as mlx-lm writes them: every matrix by `mx.quantize`, and what it did in config.json, twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

BITS = (2, 3, 4, 5, 6, 8)


def quantised(
    source: Path, to: Path, *, bits: int = 4, group_size: int = 32, stored: mx.Dtype = mx.float32, named: Mapping[str, Any] | None = None
) -> Path:
    """The model of a folder with its matrices packed; `stored` is the dtype of scales, biases and norms.

    `named` are modules with bits and a group size of their own, or False for one that stays as it is.
    """
    usual, named = {"group_size": group_size, "bits": bits, "mode": "affine"}, dict(named or {})
    tensors: dict[str, mx.array] = {}
    for name, array in mx.load(str(source / "model.safetensors")).items():  # type: ignore[union-attr]
        path = name.removesuffix(".weight")
        options = named.get(path, usual)
        if array.ndim < 2 or options is False:
            tensors[name] = array.astype(stored)
        else:
            how = {key: options[key] for key in ("group_size", "bits")}
            parts = mx.quantize(array.astype(stored), **how)
            tensors |= dict(zip((f"{path}.{part}" for part in ("weight", "scales", "biases")), parts, strict=True))
    to.mkdir(parents=True)
    mx.save_safetensors(str(to / "model.safetensors"), tensors, metadata={"format": "mlx"})
    said = usual | named
    config = json.loads((source / "config.json").read_text()) | {"quantization": said, "quantization_config": said}
    (to / "config.json").write_text(json.dumps(config))
    return to

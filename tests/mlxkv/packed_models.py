"""Tiny Llamas quantised as mlx-lm writes them: the matrices by `mx.quantize`, and what it did in
config.json, twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map


def quantised(
    source: Path,
    to: Path,
    *,
    bits: int = 4,
    group_size: int = 32,
    stored: mx.Dtype = mx.float32,
    named: Mapping[str, Any] | None = None,
) -> Path:
    """The model of a folder with its matrices packed, but those whose rows are no whole groups;
    `stored` is every float's dtype.

    `named` are modules with bits and a group size of their own, or False for one that stays as it
    is.
    """
    usual, named = {"group_size": group_size, "bits": bits, "mode": "affine"}, dict(named or {})
    tensors: dict[str, mx.array] = {}
    plain: dict[str, mx.array] = mx.load(str(source / "model.safetensors"))  # type: ignore[assignment]
    for name, array in tree_map(lambda a: a.astype(stored), plain).items():
        path = name.removesuffix(".weight")
        options = named.get(path, usual)
        if array.ndim < 2 or options is False or array.shape[1] % options["group_size"]:
            tensors[name] = array
        else:
            parts = mx.quantize(array, group_size=options["group_size"], bits=options["bits"])
            tensors |= dict(
                zip(
                    (f"{path}.{part}" for part in ("weight", "scales", "biases")),
                    parts,
                    strict=True,
                )
            )
    to.mkdir(parents=True)
    mx.save_safetensors(str(to / "model.safetensors"), tensors, metadata={"format": "mlx"})
    said = usual | named
    config = json.loads((source / "config.json").read_text()) | {
        "quantization": said,
        "quantization_config": said,
    }
    (to / "config.json").write_text(json.dumps(config))
    return to

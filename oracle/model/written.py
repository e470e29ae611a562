"""A Llama's folder, its weights in a file of any kind, written one tensor at a time.

So a model of any size needs no more memory than its largest tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oracle.formats import header
from oracle.formats.disk import atomic, write_text
from oracle.formats.header import Tensor

Array = npt.NDArray[Any]
VALUES = ("float32", "float16", "bfloat16", "4-bit")
"""How weights may be stored. "4-bit" is as mlx-lm packs matrices, all else in bfloat16."""
GROUP = 64

_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_BITS = 4
_WORD = 32 // _BITS  # numbers in a word


def save(
    folder: Path,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    weight: Callable[[str], Array],
    *,
    values: str = "float32",
) -> Path:
    """Writes config.json and model.safetensors into the folder, and returns it.

    `weight(name)` gives a tensor in float32, of the shape that `shapes` has for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    packing = {"group_size": GROUP, "bits": _BITS, "mode": "affine"}
    said = dict.fromkeys(("quantization", "quantization_config"), packing)
    config = dict(config) | (said if values == "4-bit" else {})
    write_text(folder / "config.json", json.dumps(config, indent=1))
    entries, _ = header.declare(
        {part: kind for name in shapes for part, kind in _parts(name, shapes[name], values)}
    )
    with atomic(folder / "model.safetensors") as path, path.open("wb") as file:
        file.write(header.encoded(entries, {"format": "pt"}))
        for name, shape in shapes.items():
            array = np.asarray(weight(name), np.float32)
            if array.shape != shape:
                raise ValueError(f"{name}: shape {array.shape}, expected {shape}")
            for part in _stored(array, values):
                file.write(np.ascontiguousarray(part).tobytes())
    return folder


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama without biases, by name; the config must name head_dim and heads."""
    names = ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    E, inner, V, D = (config[name] for name in names)
    q, kv = (config[n] * D for n in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, E),
        "model.norm.weight": (E,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, E)
    parts: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q, E),
        "self_attn.k_proj": (kv, E),
        "self_attn.v_proj": (kv, E),
        "self_attn.o_proj": (E, q),
        "mlp.gate_proj": (inner, E),
        "mlp.up_proj": (inner, E),
        "mlp.down_proj": (E, inner),
        "input_layernorm": (E,),
        "post_attention_layernorm": (E,),
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{part}.weight": shape for part, shape in parts.items()}
    return shapes


def drawn(shapes: Mapping[str, tuple[int, ...]], *seed: int) -> Callable[[str], Array]:
    """Random weights for `save`, the same for the same seed; norms are ones.

    Queries and keys are larger than as models are initialised, where attention is nearly flat.
    """
    places = {name: i for i, name in enumerate(shapes)}
    usual = {"embed_tokens": 0.03, "q_proj": 0.05, "k_proj": 0.05}

    def weight(name: str) -> Array:
        if len(shapes[name]) == 1:
            return np.ones(shapes[name], np.float32)
        random = np.random.default_rng([*seed, places[name]])
        std = np.float32(usual.get(name.split(".")[-2], 0.02))
        return random.standard_normal(shapes[name], np.float32) * std

    return weight


def read(tensor: Tensor) -> Array:
    """A stored tensor in float32."""
    raw = np.fromfile(tensor.file, np.uint8, tensor.stop - tensor.start, offset=tensor.start)
    if tensor.dtype == "BF16":
        wide = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        wide = raw.view({"F32": np.float32, "F16": np.float16}[tensor.dtype])
    return wide.astype(np.float32).reshape(tensor.shape)


def _packs(shape: tuple[int, ...], values: str) -> bool:
    return values == "4-bit" and len(shape) == 2 and shape[1] % GROUP == 0


def _parts(
    name: str, shape: tuple[int, ...], values: str
) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """The tensors that stand in the file for one weight, each with its dtype and shape."""
    if not _packs(shape, values):
        yield name, (_NAMES.get(values, "BF16"), shape)
        return
    rows, columns = shape
    yield name, ("U32", (rows, columns // _WORD))
    for part in ("scales", "biases"):
        yield name.removesuffix("weight") + part, ("BF16", (rows, columns // GROUP))


def _stored(array: Array, values: str) -> Iterator[Array]:
    if _packs(array.shape, values):
        yield from _packed(array)
    elif values == "float32":
        yield array
    else:
        yield array.astype(np.float16) if values == "float16" else bfloat16(array)


def bfloat16(array: Array) -> npt.NDArray[np.uint16]:
    """The bits of float32 values rounded to bfloat16, half to even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _packed(array: Array) -> tuple[Array, Array, Array]:
    """Words, scales and biases of a matrix: in each group of a row 16 levels from its least."""
    rows, columns = array.shape
    groups = array.reshape(rows, columns // GROUP, GROUP)
    least, most = groups.min(-1), groups.max(-1)
    biases, scales = (bfloat16(a) for a in (least, (most - least) / (2**_BITS - 1)))
    b, s = ((a.astype(np.uint32) << 16).view(np.float32)[..., None] for a in (biases, scales))
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.nan_to_num(np.round((groups - b) / s), posinf=0, neginf=0)
    levels = np.clip(levels, 0, 2**_BITS - 1).astype(np.uint32).reshape(rows, -1, _WORD)
    words = (levels << (_BITS * np.arange(_WORD, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    return words, scales, biases

"""GGUF files of tiny Llamas, written from arrays under Hugging Face's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType


def stored(name: str, array: np.ndarray, head_dim: int) -> tuple[str, np.ndarray]:
    """GGUF's name and rows: of each head of q and k, row 2i is the first half's row i, row 2i + 1
    the second half's.
    """
    if "q_proj" in name or "k_proj" in name:
        order = [
            h * head_dim + i + half * head_dim // 2
            for h in range(len(array) // head_dim)
            for i in range(head_dim // 2)
            for half in (0, 1)
        ]
        array = array[order]
    words = [
        ("model.layers.", "blk."),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
    ]
    for hf, ours in words:
        name = name.replace(hf, ours)
    return name, array


def write(
    path: Path,
    arrays: dict[str, np.ndarray],
    metadata: dict[str, Any],
    *,
    head_dim: int,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
) -> Path:
    """A file of arrays under Hugging Face's names; `extra` go into it as they are."""
    out = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            out.add_bool(key, value)
        elif isinstance(value, int):
            out.add_uint32(key, value)
        elif isinstance(value, float):
            out.add_float32(key, value)
        elif isinstance(value, list):
            out.add_array(key, value)
        elif value is not None:
            out.add_string(key, value)
    ours = [stored(*item, head_dim) for item in arrays.items()]
    for name, array in [*ours, *(extra or {}).items()]:
        used = kind if array.ndim == 2 else GGMLQuantizationType.F32
        out.add_tensor(name, gguf.quants.quantize(array, used), raw_dtype=used)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path

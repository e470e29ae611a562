"""A GGUF file of Llama architecture -> a Hugging Face folder in float32.

GGUF stores the rows of q and k pairwise within each head, Hugging Face in split halves: they are put back, each with its
own head count. Weights go out one tensor at a time, in the layout that `safetensors` itself writes. What config.json
cannot say is refused by name, never dropped.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle.formats import header, strict_json
from oracle.formats.errors import Refusal
from oracle.model.gguf import Gguf, dequantised, main_type, read
from oracle.model.safetensors import Progress

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Metadata of the architecture that is used below.
_USED = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
}
# Metadata that would change the model, at the values that leave it alone.
_NEUTRAL = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.type": "none",
    "rope.scale_linear": 1.0,
}


@dataclass(frozen=True, slots=True)
class _Target:
    name: str
    shape: tuple[int, ...]
    heads: int = 0  # whose rows are stored pairwise


def convert(source: Path, folder: Path, *, progress: Progress) -> tuple[str, str]:
    """Writes config.json, model.safetensors (float32) and, for a vocabulary that is known here, tokenizer.json.

    Returns the type that most weights were quantised to, and the sha256 of model.safetensors.
    """
    gguf = read(source)
    config = config_of(gguf)
    digest = _write_weights(gguf, _targets(gguf, config), folder / "model.safetensors", progress)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tokenizer = tokenizer_of(gguf.metadata)
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(
            json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8"
        )
    return main_type(gguf), digest


def config_of(gguf: Gguf) -> dict[str, Any]:
    """config.json from the metadata; float32 values in their shortest spelling."""
    architecture = gguf.metadata.get("general.architecture")
    if architecture != "llama":
        raise Refusal(
            f"{gguf.path}: general.architecture is {architecture!r}, expected 'llama'; give a Llama model"
        )
    _refuse_unknown(gguf)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding[0]) != 2:
        raise Refusal(
            f"{gguf.path}: no token_embd.weight of two axes, expected one; download it again"
        )
    heads = _whole(gguf, "attention.head_count")
    head_dim = _head_dim(gguf, heads)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": _whole(gguf, "embedding_length"),
        "intermediate_size": _whole(gguf, "feed_forward_length"),
        "num_hidden_layers": _whole(gguf, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(gguf, "attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "vocab_size": embedding[0][0],
        "max_position_embeddings": _whole(gguf, "context_length"),
        "rms_norm_eps": _real(gguf, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _real(gguf, "rope.freq_base", default=10000.0),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }
    for key in ("bos_token_id", "eos_token_id"):
        if isinstance(gguf.metadata.get(f"tokenizer.ggml.{key}"), int):
            config[key] = gguf.metadata[f"tokenizer.ggml.{key}"]
    config |= {"attention_bias": False, "mlp_bias": False, "torch_dtype": "float32"}
    if "rope_freqs.weight" in gguf.tensors:
        config["rope_scaling"] = _llama3_scaling(gguf, config["rope_theta"], head_dim)
    return config


def _refuse_unknown(gguf: Gguf) -> None:
    for key, value in gguf.metadata.items():
        name = key.removeprefix("llama.")
        if name == key or name in _USED or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        expected = (
            f"expected {_NEUTRAL[name]!r}"
            if name in _NEUTRAL
            else "which config.json's Llama cannot express here"
        )
        raise Refusal(
            f"{gguf.path}: {key} is {str(value)[:40]!r}, {expected}; use the model's Hugging Face folder instead"
        )


def _whole(gguf: Gguf, name: str, *, default: int | None = None) -> int:
    value = gguf.metadata.get(f"llama.{name}", default)
    if type(value) is not int or value < 1:
        raise Refusal(
            f"{gguf.path}: llama.{name} is {str(value)[:40]}, expected one positive whole number; download it again"
        )
    return value


def _real(gguf: Gguf, name: str, *, default: float | None = None) -> float:
    import numpy as np

    value = gguf.metadata.get(f"llama.{name}", default)
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise Refusal(
            f"{gguf.path}: llama.{name} is {str(value)[:40]}, expected one positive number; download it again"
        )
    return float(str(np.float32(value))) if float(np.float32(value)) == value else value


def _head_dim(gguf: Gguf, heads: int) -> int:
    head_dim = _whole(
        gguf, "attention.key_length", default=max(1, _whole(gguf, "embedding_length") // heads)
    )
    for name in ("attention.value_length", "rope.dimension_count"):
        other = _whole(gguf, name, default=head_dim)
        if other != head_dim:
            raise Refusal(
                f"{gguf.path}: llama.{name} is {other}, expected the keys' {head_dim}; use the model's Hugging Face folder instead"
            )
    if head_dim % 2:
        raise Refusal(
            f"{gguf.path}: its heads have {head_dim} dimensions, expected an even number; download it again"
        )
    return head_dim


def _llama3_scaling(gguf: Gguf, theta: float, head_dim: int) -> dict[str, Any]:
    """The divisors of the inverse frequencies, as llama3's parameters; refused where those of Llama 3 do not give them."""
    import numpy as np

    name = "rope_freqs.weight"
    if gguf.tensors[name][0] != (head_dim // 2,):
        raise Refusal(
            f"{gguf.path}: {name} has shape {list(gguf.tensors[name][0])}, expected [{head_dim // 2}]; download it again"
        )
    divisors = np.asarray(dequantised(gguf, name), np.float64)
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1)
    # The stored ones were blended in float32: right to 1e-5; another set of parameters is off by more than 1e-2.
    if not np.allclose(divisors, 1 / ((1 - blend) / factor + blend), rtol=1e-4, atol=0):
        raise Refusal(
            f"{gguf.path}: {name} is not llama3 scaling by {factor:g} with factors 1 and 4 over 8192 positions, "
            "expected that; use the model's Hugging Face folder instead"
        )
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
    }
    return scaling | {"original_max_position_embeddings": original}


def _targets(gguf: Gguf, config: dict[str, Any]) -> dict[str, _Target]:
    """GGUF's name -> Hugging Face's and the shape that the config gives it. Every tensor must be there, and no other."""
    hidden, inner, heads, kv_heads = (
        config[k]
        for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    q, kv, table = (
        heads * config["head_dim"],
        kv_heads * config["head_dim"],
        (config["vocab_size"], hidden),
    )
    shapes: dict[str, tuple[tuple[int, ...], int]] = {
        "attn_norm": ((hidden,), 0),
        "attn_q": ((q, hidden), heads),
        "attn_k": ((kv, hidden), kv_heads),
        "attn_v": ((kv, hidden), 0),
        "attn_output": ((hidden, q), 0),
        "ffn_norm": ((hidden,), 0),
        "ffn_gate": ((inner, hidden), 0),
        "ffn_up": ((inner, hidden), 0),
        "ffn_down": ((hidden, inner), 0),
    }
    targets = {"token_embd.weight": _Target("model.embed_tokens.weight", table)}
    targets["output_norm.weight"] = _Target("model.norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        targets["output.weight"] = _Target("lm_head.weight", table)
    layers = config["num_hidden_layers"]
    if layers > len(gguf.tensors):
        raise Refusal(
            f"{gguf.path}: llama.block_count is {layers} with {len(gguf.tensors)} tensors, expected fewer; download it again"
        )
    for i in range(layers):
        for part, (shape, n) in shapes.items():
            targets[f"blk.{i}.{part}.weight"] = _Target(
                f"model.layers.{i}.{_PARTS[part]}.weight", shape, n
            )
    odd = sorted((set(gguf.tensors) - {"rope_freqs.weight"}) ^ set(targets))
    if odd:
        how = "unknown" if odd[0] in gguf.tensors else "missing"
        raise Refusal(
            f"{gguf.path}: {how} tensor {odd[0]} (of {len(odd)}), expected a Llama's {len(targets)}; give a Llama model"
        )
    for name, target in targets.items():
        if gguf.tensors[name][0] != target.shape:
            raise Refusal(
                f"{gguf.path}: {name} has shape {list(gguf.tensors[name][0])}, expected {list(target.shape)} by its metadata; "
                "download it again"
            )
    return targets


def _write_weights(gguf: Gguf, targets: dict[str, _Target], path: Path, progress: Progress) -> str:
    order = sorted(targets, key=lambda name: targets[name].name)
    entries, _ = header.declare({targets[n].name: ("F32", targets[n].shape) for n in order})
    first = header.encoded(entries, {"format": "pt"})
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for i, name in enumerate(["", *order]):
            piece = _split_halves(dequantised(gguf, name), targets[name].heads) if name else first
            file.write(piece)
            digest.update(piece)
            progress(f"converting {gguf.path.name}", i, len(order))
    return digest.hexdigest()


def _split_halves(rows: Any, heads: int) -> bytes:
    if heads:
        rows = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1]).swapaxes(1, 2)
    out: bytes = rows.astype("<f4").tobytes()
    return out


def tokenizer_of(metadata: dict[str, Any]) -> dict[str, Any] | None:
    """tokenizer.json of a SmolLM vocabulary, or None for any other: text cannot be given then, only ids."""
    tokens, merges, kinds = (
        metadata.get(f"tokenizer.ggml.{key}", []) for key in ("tokens", "merges", "token_type")
    )
    normal, control = 1, 3
    known = (
        metadata.get("tokenizer.ggml.model") == "gpt2"
        and metadata.get("tokenizer.ggml.pre") == "smollm"
    )
    adds = metadata.get("tokenizer.ggml.add_bos_token") or metadata.get(
        "tokenizer.ggml.add_eos_token"
    )
    lists = (
        strict_json.fits([tokens, merges], list[list[str]])
        and strict_json.fits(kinds, list[int])
        and tokens
        and merges
    )
    if (
        not known
        or adds
        or not lists
        or len(kinds) != len(tokens)
        or not set(kinds) <= {normal, control}
    ):
        return None
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    split = {"type": "Digits", "individual_digits": True}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": tokens[i]} | plain
            for i, kind in enumerate(kinds)
            if kind == control
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }

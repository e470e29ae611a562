"""Tiny random Llamas as Hugging Face folders: every head layout, both RoPE types, tied or not, with
and without biases.

q and k are scaled up: the default init makes attention nearly flat, and RoPE, mask and cache faults
shrink to 1e-3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Array = npt.NDArray[Any]
SHARP = 3.0

_COMMON = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": True},
    "gqa": {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False},
    # head_dim is not hidden_size / heads here, and every projection has a bias.
    "mqa": {
        "num_key_value_heads": 1,
        "head_dim": 12,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama3": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "rope_scaling": LLAMA3,
    },
}


def config(layout: str = "gqa", **changes: Any) -> dict[str, Any]:
    """A config.json's content."""
    return _COMMON | LAYOUTS[layout] | changes


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its Hugging Face name."""
    E, inner, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, E),
        "model.norm.weight": (E,),
    }
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (V, E)
    attention = {"q_proj": (q, E), "k_proj": (kv, E), "v_proj": (kv, E), "o_proj": (E, q)}
    mlp = {"gate_proj": (inner, E), "up_proj": (inner, E), "down_proj": (E, inner)}
    for i in range(config["num_hidden_layers"]):
        for part, matrices in (("self_attn", attention), ("mlp", mlp)):
            biased = config.get("attention_bias" if part == "self_attn" else "mlp_bias")
            for name, shape in matrices.items():
                found[f"model.layers.{i}.{part}.{name}.weight"] = shape
                if biased:
                    found[f"model.layers.{i}.{part}.{name}.bias"] = shape[:1]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{norm}.weight"] = (E,)
    return found


def weights(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Random float32 weights; norms lie around 1, so that one left out would be seen."""
    random = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes(config).items():
        array = random.standard_normal(shape)
        if "norm" in name:
            array = 1 + 0.2 * array
        elif name.endswith("bias"):
            array = 0.3 * array
        elif "embed" not in name:
            array *= shape[1] ** -0.5
        if "q_proj.weight" in name or "k_proj.weight" in name:
            array *= SHARP**0.5
        found[name] = array.astype(np.float32)
    return found


def save(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Array] | None = None
) -> Path:
    """A folder with config.json and one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(weights(config) if tensors is None else tensors), folder / "model.safetensors")
    return folder


def ids(n: int, *, seed: int = 0, vocab: int = 40) -> list[int]:
    """Random token ids."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab, n)]


SEQUENCE = ids(24, seed=5)
"""What most comparisons in the tests run over, of which PROMPT tokens are the prompt."""
PROMPT = 5


def forward(
    config: Mapping[str, Any], weights: Mapping[str, Array], tokens: list[int]
) -> npt.NDArray[np.float64]:
    """(L, V): logits of every position in float64 numpy, without a cache: the formulas, written
    down once more.
    """
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    L, D = len(tokens), config["head_dim"]
    turns = np.exp(1j * np.arange(L)[:, None, None] * _frequencies(config))  # [L, 1, D/2]

    def linear(name: str, x: Array) -> Array:
        return np.asarray(x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0))

    def norm(name: str, x: Array) -> Array:
        return np.asarray(
            x
            / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
            * w[f"{name}.weight"]
        )

    def turned(x: Array) -> Array:
        pairs = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * turns
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = norm(f"{layer}.input_layernorm", x)
        q, k, v = (linear(f"{layer}.self_attn.{n}_proj", h).reshape(L, -1, D) for n in "qkv")
        k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (turned(k), v))
        scores = np.einsum("ihd,jhd->hij", turned(q), k) / D**0.5 + np.triu(
            np.full((L, L), -np.inf), 1
        )
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), v)
        x = x + linear(f"{layer}.self_attn.o_proj", mixed.reshape(L, -1))
        h = norm(f"{layer}.post_attention_layernorm", x)
        gate = linear(f"{layer}.mlp.gate_proj", h)
        x = x + linear(
            f"{layer}.mlp.down_proj", gate / (1 + np.exp(-gate)) * linear(f"{layer}.mlp.up_proj", h)
        )
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    found: npt.NDArray[np.float64] = norm("model.norm", x) @ w[f"{head}.weight"].T
    return found


def _frequencies(config: Mapping[str, Any]) -> Array:
    plain: Array = config["rope_theta"] ** (
        -np.arange(0, config["head_dim"], 2) / config["head_dim"]
    )
    scaling = config.get("rope_scaling")
    if not scaling:
        return plain
    turns = scaling["original_max_position_embeddings"] * plain / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    blend = (turns - low) / (high - low)
    between = (1 - blend) * plain / scaling["factor"] + blend * plain
    return np.asarray(
        np.where(turns > high, plain, np.where(turns < low, plain / scaling["factor"], between))
    )

"""Tiny random Llamas as Hugging Face folders.

q and k are scaled up, since with flat attention a wrong position would not show; embeddings are
small, since otherwise a wrong eps would not.
"""

import json
import os
from pathlib import Path
from typing import Any

# Threads that spin while they wait make a busy machine many times slower; read when torch is
# imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from safetensors.torch import save_file

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "mha": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "gqa": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rope_theta": 100000.0,
    },
    "mqa": {"num_attention_heads": 4, "num_key_value_heads": 1, "rms_norm_eps": 1e-6},
    "llama3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3,
    },
}
VOCAB = 61


def config_of(layout: str = "gqa", **changes: Any) -> dict[str, Any]:
    """A config.json; a change to None takes the key out."""
    plain = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }
    merged = plain | LAYOUTS[layout] | changes
    return {key: value for key, value in merged.items() if value is not None}


def tensors_of(
    config: dict[str, Any], *, seed: int = 0, sharp: float = 4.0
) -> dict[str, torch.Tensor]:
    """Random weights for a config, in float32."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv = (
        config["num_attention_heads"],
        config.get("num_key_value_heads", config["num_attention_heads"]),
    )
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // heads)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (
            torch.randn(shape, generator=generator)
            * scale
            * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0)
        )

    made = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=0.1 * hidden**0.5),
        "model.norm.weight": 1 + normal(hidden, scale=0.2),
    }
    if not config["tie_word_embeddings"]:
        made["lm_head.weight"] = normal(config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        sizes = {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv * head_dim, hidden),
        }
        sizes |= {
            "self_attn.v_proj": (kv * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
        }
        sizes |= {
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        for name, shape in sizes.items():
            made[f"{layer}{name}.weight"] = normal(
                *shape, scale=sharp**0.5 if name[-6:] in ("q_proj", "k_proj") else 1.0
            )
            if config["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                made[f"{layer}{name}.bias"] = normal(shape[0], scale=0.3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{layer}{name}.weight"] = 1 + normal(hidden, scale=0.2)
    return made


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def make(
    folder: Path, layout: str = "gqa", *, seed: int = 0, sharp: float = 4.0, **changes: Any
) -> Path:
    """The folder of a tiny model."""
    config = config_of(layout, **changes)
    return write(folder, config, tensors_of(config, seed=seed, sharp=sharp))


def tokens(n: int, *, seed: int = 1) -> list[int]:
    """Random ids of the tiny vocabulary."""
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()

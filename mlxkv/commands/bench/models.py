"""The models that are made for a run: the one at hand in 4 bits, and one bound by overhead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oracle.formats.errors import Refusal
from oracle.model import written
from oracle.model.checkpoint import Checkpoint, resolve

WIDTH, LAYERS = 64, 30
OVERHEAD = f"{LAYERS} layers of {WIDTH}"
"""As many layers as the default model has, each so narrow that calling a kernel takes longer than
what it computes."""
LENGTHS = (128,)
"""After so many tokens it decodes."""


def packed(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """The model in MLX's affine 4 bits, in groups of 64, as mlx-lm's own `convert -q` packs it.

    Raises Refusal where no matrix of it has whole groups.
    """
    tensors = checkpoint.tensors
    shapes = {name: tensor.shape for name, tensor in tensors.items() if _is_weight(name)}
    if not any(len(s) == 2 and s[1] % written.GROUP == 0 for s in shapes.values()):
        what = f"no matrix has a multiple of {written.GROUP} columns, expected one to pack"
        raise Refusal(what, where=checkpoint.name, remedy="leave --dtype 4bit out")
    made = written.save(
        folder, checkpoint.config, shapes, lambda name: written.read(tensors[name]), values="4-bit"
    )
    return resolve(str(made))


def _is_weight(name: str) -> bool:
    return not name.endswith("rotary_emb.inv_freq")


def overhead(folder: Path) -> Checkpoint:
    """A random Llama whose decoding takes as long as its kernels are many."""
    config = overhead_config()
    shapes = written.shapes_of(config)
    return resolve(str(written.save(folder, config, shapes, written.drawn(shapes, 0))))


def overhead_config(layers: int = LAYERS) -> dict[str, Any]:
    """config.json of the model that is bound by overhead."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": WIDTH // 4,
        "vocab_size": 256,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    }

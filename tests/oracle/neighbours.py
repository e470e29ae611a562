"""Tiny random models of other architectures than Llama, made by transformers; and as a program each
with its run folder:

python tests/oracle/neighbours.py ROOM

leaves ROOM/models/NAME and ROOM/runs/NAME. Queries and keys are scaled up, since with flat
attention a wrong position would not show.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# Threads that spin while they wait make a busy machine many times slower; read when torch is
# imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers

VOCAB, PROMPT = 61, 5
TOKENS = [(5 + 7 * i * i + 3 * i) % VOCAB for i in range(20)]
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES |= {
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {"head_dim": 12, "query_pre_attn_scalar": 12}
# The class's name, and what it is told beside the sizes. "windowed" are models whose window is
# shorter than the sequence.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gemma2": ("Gemma2", WIDE),
    "phi3": ("Phi3", {}),
    "windowed": ("Mistral", {"sliding_window": 8}),
}


def make(folder: Path, name: str, **changes: Any) -> Path:
    """The folder of one model; `rope_theta` stands in its config also where older readers look for
    it.
    """
    kind, extra = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | extra | changes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            # A norm of Gemma is one plus what it stores.
            around = 0.0 if key.endswith("bias") or kind == "Gemma2" else 1.0
            sharp = 2.0 if any(part in key for part in ("q_proj", "k_proj", "qkv_proj")) else 1.0
            matrix = weight.ndim > 1
            weight.copy_(
                torch.randn_like(weight) * (sharp * weight.shape[-1] ** -0.5 if matrix else 0.1)
                + (0.0 if matrix else around)
            )
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    write_config(folder, values | {"rope_theta": values["rope_parameters"]["rope_theta"]})
    return folder


def write_config(folder: Path, values: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(values))


def main(room: Path) -> None:
    from oracle import folder

    for name in MODELS:
        made = make(room / "models" / name, name)
        folder.run(
            str(made),
            out=room / "runs" / name,
            tokens=TOKENS,
            prompt_tokens=PROMPT,
            steps=0,
            threads=1,
            keep_pool=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

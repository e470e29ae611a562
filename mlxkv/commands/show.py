"""Small commands that look at things: generate, inspect, doctor."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from mlxkv.engines import machine as runtime
from oracle.formats.errors import Refusal
from oracle.model.cache_folder import cache_dir
from oracle.model.checkpoint import Checkpoint, require_llama, resolve


def generate(
    model: str | None, prompt: str, steps: int, *, dtype: str, device: str, **source: Any
) -> Iterator[str]:
    """Greedy text, piece by piece; ends early at the model's own end-of-text token."""
    from oracle.model import tokenizer as tokenizers

    checkpoint = _llama(model, **source)
    tokenizer = tokenizers.load(checkpoint.folder)
    if tokenizer is None:
        raise Refusal(f"{checkpoint.folder}: no tokenizer.json, expected one for --prompt")
    ids = tokenizer.encode(prompt)
    most = checkpoint.max_positions
    tokenizers.check_ids(ids, vocab_size=checkpoint.vocab_size, max_positions=most)
    if len(ids) + steps - 1 > most:
        raise Refusal(
            f"--steps {steps}: {len(ids)} tokens and {steps - 1} after them, expected at most {most} (max_position_embeddings); take fewer"
        )
    runtime.prepare(device)
    import mlx.core as mx

    from mlxkv.port.cache import Cache
    from mlxkv.port.weights import from_checkpoint

    port = from_checkpoint(checkpoint, dtype)
    cache = Cache(port.config, dtype=dtype, max_length=len(ids) + steps - 1)
    ends = checkpoint.config.get("eos_token_id")
    stops = {end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)}
    chosen: list[int] = []
    shown = ""
    fed = ids
    yield prompt
    for _ in range(steps):
        chosen.append(int(mx.argmax(port([fed], cache=cache)[0]).item()))  # type: ignore[arg-type]
        if chosen[-1] in stops:
            break
        fed = chosen[-1:]
        # Decoded as a whole: a character may be spread over several tokens.
        text = tokenizer.decode(chosen)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text


def inspect(model: str | None, *, as_json: bool, **source: Any) -> str:
    """What a checkpoint is, and what its cache takes."""
    from mlxkv.port.config.llama import LlamaConfig
    from mlxkv.port.rope import span

    checkpoint = _llama(model, **source)
    config = LlamaConfig.of(checkpoint)
    stored = sorted({t.dtype for t in checkpoint.tensors.values()})
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    facts: dict[str, Any] = {
        "model": checkpoint.name,
        "source": checkpoint.source + (f" @ {checkpoint.revision}" if checkpoint.revision else ""),
        "note": checkpoint.note,
        "fingerprint": checkpoint.fingerprint,
        "config digest": checkpoint.config_digest,
        "tensors": f"{len(checkpoint.tensors)}, stored as {', '.join(stored)}",
        "layers": config.num_hidden_layers,
        "query heads": config.num_attention_heads,
        "KV heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "vocabulary": config.vocab_size,
        "lm_head": "tied to the embedding" if config.tie_word_embeddings else "its own weights",
        "max positions": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "RoPE": config.rope.words,
        "RoPE tables": f"cos and sin, each ({span(config)}, {config.head_dim // 2})",
        "cache per layer": f"keys and values, each (1, {config.num_key_value_heads}, length, {config.head_dim})",
        "cache per token": f"{4 * row} bytes in float32, {2 * row} in half precision",
        "filled in": dict(config.defaults),
        "notes": list(config.notes),
    }
    if as_json:
        return json.dumps(facts, indent=1) + "\n"
    width = max(map(len, facts))
    lines = [
        f"{name:<{width}}  {value}"
        for name, value in facts.items()
        if name not in ("filled in", "notes") and value != ""
    ]
    filled = ", ".join(f"{key} {json.dumps(value)}" for key, value in config.defaults)
    lines += (
        [f"{'filled in':<{width}}  {filled} (absent in config.json, as in transformers)"]
        if filled
        else []
    )
    return "\n".join(lines + [f"{'note':<{width}}  {note}" for note in config.notes]) + "\n"


def doctor() -> tuple[str, int]:
    """What is here, a line each, and the exit code: 0 when both engines can run."""
    packages = (
        "mlxkv",
        "mlx",
        "mlx-lm",
        "torch",
        "transformers",
        "numpy",
        "safetensors",
        "tokenizers",
    )
    lines = [f"{name:<14}{runtime.version(name)}" for name in packages]
    good = all(
        runtime.version(name) != "not installed" for name in ("mlx", "torch", "transformers")
    )
    try:
        found = runtime.prepare()
        lines += [
            f"{name:<14}{found[name]}"
            for name in ("device", "device_name", "blas", "threads", "os", "python")
        ]
        lines.append(f"{'TF32':<14}off (MLX_ENABLE_TF32={found['MLX_ENABLE_TF32']})")
        if sys.platform == "linux" and found["blas"].startswith("reference"):
            lines.append(
                "advice        a faster BLAS makes MLX up to 40 times faster: install Debian's libblis4-pthread or PyPI's mkl"
            )
    except Refusal as error:
        lines.append(f"{'device':<14}none: {error}")
        good = False
    lines.append(
        f"{'cache':<14}{cache_dir()}{'' if os.access(_existing(cache_dir()), os.W_OK) else ' (cannot be written)'}"
    )
    if not good:
        lines.append(
            "advice        pip install 'mlxkv[all]' brings both engines; [port] and [oracle] bring one"
        )
    return "\n".join(lines) + "\n", 0 if good else 2


def _existing(path: Any) -> Any:
    return path if path.exists() or path.parent == path else _existing(path.parent)


def _llama(model: str | None, **source: Any) -> Checkpoint:
    checkpoint = resolve(model, **source)
    require_llama(checkpoint)
    return checkpoint

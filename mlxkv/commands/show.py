"""The commands that look at things: generate, inspect, doctor."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxkv.engines import machine
from oracle.formats.errors import Refusal
from oracle.model import tokenizer
from oracle.model.cache_folder import cache_dir
from oracle.model.checkpoint import Checkpoint, require_llama, resolve

if TYPE_CHECKING:
    from mlxkv.port.config.llama import LlamaConfig
    from mlxkv.port.llama import Llama

PACKAGES = ("mlxkv", "mlx", "mlx-lm", "torch", "transformers", "numpy", "safetensors", "tokenizers")
HOST = ("device", "device_name", "blas", "threads", "os", "python")


def generate(
    model: str | None,
    prompt: str,
    steps: int,
    *,
    dtype: str,
    device: str,
    revision: str | None = None,
    ignore_keys: tuple[str, ...] = (),
) -> Iterator[str]:
    """Greedy text, piece by piece; ends early at the model's own end-of-text token."""
    checkpoint = _llama(model, revision, ignore_keys)
    words = tokenizer.load(checkpoint.folder)
    if words is None:
        raise Refusal(f"{checkpoint.folder}: no tokenizer.json, expected one for --prompt")
    ids, most = words.encode(prompt), checkpoint.max_positions
    tokenizer.check_ids(ids, vocab_size=checkpoint.vocab_size, max_positions=most)
    if len(ids) + steps - 1 > most:
        raise Refusal(
            f"--steps {steps}: {len(ids)} tokens and {steps - 1} after them, expected at most "
            f"{most} (max_position_embeddings); take fewer"
        )
    machine.prepare(device)
    from mlxkv.port.weights import from_checkpoint

    port = from_checkpoint(checkpoint, dtype)
    yield prompt
    chosen, shown = [], ""
    for token in _greedy(port, ids, steps, checkpoint.config.get("eos_token_id")):
        chosen.append(token)
        # Decoded as a whole: a character may be spread over several tokens.
        text = words.decode(chosen)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text


def _greedy(port: Llama, ids: list[int], steps: int, ends: Any) -> Iterator[int]:
    """The tokens that the port chooses after `ids`, up to one of `ends`, as config.json has it."""
    import mlx.core as mx

    from mlxkv.port.cache import Cache

    cache = Cache(port.config, dtype=port.dtype, max_length=len(ids) + steps - 1)
    stops = {end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)}
    fed = ids
    for _ in range(steps):
        token = int(mx.argmax(port([fed], cache=cache)[0]).item())  # type: ignore[arg-type]
        if token in stops:
            return
        yield token
        fed = [token]


def inspect(
    model: str | None,
    *,
    as_json: bool,
    revision: str | None = None,
    ignore_keys: tuple[str, ...] = (),
) -> str:
    from mlxkv.port.config.llama import LlamaConfig

    checkpoint = _llama(model, revision, ignore_keys)
    config = LlamaConfig.of(checkpoint)
    facts = _of_checkpoint(checkpoint) | _of_config(config)
    if as_json:
        more = {"filled in": dict(config.defaults), "notes": list(config.notes)}
        return json.dumps(facts | more, indent=1) + "\n"
    lines = [(name, value) for name, value in facts.items() if value != ""]
    filled = ", ".join(f"{key} {json.dumps(value)}" for key, value in config.defaults)
    if filled:
        lines.append(("filled in", f"{filled} (absent in config.json, as in transformers)"))
    lines += [("note", note) for note in config.notes]
    width = max(map(len, facts))
    return "".join(f"{name:<{width}}  {value}\n" for name, value in lines)


def _of_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    stored = sorted({t.dtype for t in checkpoint.tensors.values()})
    revision = f" @ {checkpoint.revision}" if checkpoint.revision else ""
    return {
        "model": checkpoint.name,
        "source": checkpoint.source + revision,
        "note": checkpoint.note,
        "fingerprint": checkpoint.fingerprint,
        "config digest": checkpoint.config_digest,
        "tensors": f"{len(checkpoint.tensors)}, stored as {', '.join(stored)}",
    }


def _of_config(config: LlamaConfig) -> dict[str, Any]:
    from mlxkv.port.rope import span

    K, D = config.num_key_value_heads, config.head_dim
    row = 2 * config.num_hidden_layers * K * D
    return {
        "layers": config.num_hidden_layers,
        "query heads": config.num_attention_heads,
        "KV heads": K,
        "head_dim": D,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "vocabulary": config.vocab_size,
        "lm_head": "tied to the embedding" if config.tie_word_embeddings else "its own weights",
        "max positions": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "RoPE": config.rope.words,
        "RoPE tables": f"cos and sin, each ({span(config)}, {D // 2})",
        "cache per layer": f"keys and values, each (1, {K}, length, {D})",
        "cache per token": f"{4 * row} bytes in float32, {2 * row} in half precision",
    }


def doctor() -> tuple[str, int]:
    """What is here, a line each, and the exit code: 0 when both engines can run, else 2."""
    lines = [(name, machine.version(name)) for name in PACKAGES]
    missing = {name for name, version in lines if version == "not installed"}
    good = not missing & {"mlx", "torch", "transformers"}
    try:
        found = machine.prepare()
    except Refusal as error:
        lines.append(("device", f"none: {error}"))
        good = False
    else:
        lines += [(name, found[name]) for name in HOST]
        lines.append(("TF32", f"off (MLX_ENABLE_TF32={found['MLX_ENABLE_TF32']})"))
        if sys.platform == "linux" and found["blas"].startswith("reference"):
            faster = "install Debian's libblis4-pthread or PyPI's mkl"
            lines.append(("advice", f"a faster BLAS makes MLX up to 40 times faster: {faster}"))
    writable = os.access(_existing(cache_dir()), os.W_OK)
    lines.append(("cache", f"{cache_dir()}{'' if writable else ' (cannot be written)'}"))
    if not good:
        install = "pip install 'mlxkv[all]' brings both engines; [port] and [oracle] bring one"
        lines.append(("advice", install))
    return "".join(f"{name:<14}{value}\n" for name, value in lines), 0 if good else 2


def _existing(path: Path) -> Path:
    return path if path.exists() or path.parent == path else _existing(path.parent)


def _llama(model: str | None, revision: str | None, ignore_keys: tuple[str, ...]) -> Checkpoint:
    checkpoint = resolve(model, revision=revision, ignore_keys=ignore_keys)
    require_llama(checkpoint)
    return checkpoint

"""The commands that look at things: generate, inspect, doctor."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxkv.engines import machine, progress
from mlxkv.report.text import clip, quoted
from oracle.formats.errors import Refusal, install
from oracle.model import tokenizer
from oracle.model.cache_folder import cache_dir
from oracle.model.checkpoint import Checkpoint, Named

if TYPE_CHECKING:
    from mlxkv.port.config.llama import LlamaConfig
    from mlxkv.port.llama import Llama

PACKAGES = ("mlxkv", "mlx", "mlx-lm", "torch", "transformers", "numpy", "safetensors", "tokenizers")
HOST = ("device", "device_name", "blas", "threads", "os", "python")
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


def generate(named: Named, prompt: str, steps: int, *, dtype: str, device: str) -> Iterator[str]:
    """Greedy text, piece by piece; ends early at any of the model's own end-of-text tokens."""
    checkpoint = named.checkpoint(progress.steps())
    words = tokenizer.load(checkpoint.folder)
    if words is None:
        what = "no tokenizer.json, expected one, as generate starts from text and prints text"
        remedy = "copy the tokenizer.json of the model that it was made from beside config.json"
        raise Refusal(what, where=checkpoint.folder, remedy=remedy)
    ids, most, ends = words.encode(prompt), checkpoint.max_positions, checkpoint.eos_ids
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
    yield from words.stream(ids, _greedy(port, ids, steps, ends))


def _greedy(port: Llama, ids: list[int], steps: int, ends: frozenset[int]) -> Iterator[int]:
    """The tokens that the port chooses after `ids`, up to one of `ends`."""
    import mlx.core as mx

    from mlxkv.port.cache import Cache

    cache = Cache(port.config, dtype=port.dtype, max_length=len(ids) + steps - 1)
    fed = ids
    for _ in range(steps):
        token = int(mx.argmax(port([fed], cache=cache)[0]).item())  # type: ignore[arg-type]
        if token in ends:
            return
        yield token
        fed = [token]


def inspect(named: Named, *, as_json: bool) -> str:
    """A model's facts; a Refusal for one that cannot be run, as of the commands that run it."""
    from mlxkv.port.config.llama import LlamaConfig
    from mlxkv.port.stored import require_usable

    checkpoint = named.checkpoint(progress.steps())
    config = LlamaConfig.of(checkpoint)
    require_usable(checkpoint, tied=config.tie_word_embeddings)
    facts = _of_checkpoint(checkpoint) | _of_config(config)
    if as_json:
        return json.dumps({"format": "mlxkv-inspect/1"} | facts, indent=1) + "\n"
    return _lines([*_named(facts), *_sized(facts, config), *_read(facts)])


def _of_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    found, words = checkpoint.tensors.values(), tokenizer.load(checkpoint.folder)
    ends = sorted(checkpoint.eos_ids)
    return {
        "model": checkpoint.name,
        "source": checkpoint.source,
        "revision": checkpoint.revision,
        "note": checkpoint.note,
        "fingerprint": checkpoint.fingerprint,
        "config_digest": checkpoint.config_digest,
        "tensors": len(found),
        "stored_dtypes": sorted({tensor.dtype for tensor in found}),
        "stored_bytes": sum(tensor.stop - tensor.start for tensor in found),
        "has_tokenizer": words is not None,
        "eos_token_ids": ends,
        "eos_tokens": [words.token_text(id) for id in ends] if words else [],
    }


def _of_config(config: LlamaConfig) -> dict[str, Any]:
    from mlxkv.port.config.rope import Rope
    from mlxkv.port.rope import span

    sizes, usual = asdict(config), asdict(Rope(theta=0.0))
    names = ("rope", "defaults", "ignored", "notes")
    rope, filled, ignored, notes = (sizes.pop(name) for name in names)
    rows = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return sizes | {
        "rope": {k: v for k, v in rope.items() if k == "rope_type" or v != usual[k]},
        "rope_table_shape": [span(config), config.head_dim // 2],
        "cache_bytes_per_token": {dtype: rows * size for dtype, size in SIZES.items()},
        "filled_in": dict(filled),
        # What ends a text is no part of a comparison; `eos_token_ids` says it.
        "ignored_keys": {key: why for key, why in sorted(ignored) if key != "eos_token_id"},
        "notes": list(notes),
    }


def _named(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines on where a model comes from and what its files hold."""
    yield "model", facts["model"]
    yield "source", facts["source"] + (f" @ {facts['revision']}" if facts["revision"] else "")
    yield "note", facts["note"]
    yield "fingerprint", facts["fingerprint"]
    yield "config digest", facts["config_digest"]
    stored, size = ", ".join(facts["stored_dtypes"]), facts["stored_bytes"]
    yield "tensors", f"{facts['tensors']}, stored as {stored}, {size:,} bytes"
    yield "tokenizer", "tokenizer.json" if facts["has_tokenizer"] else "none: give token ids"
    texts = [f" {clip(quoted(text), 40)}" for text in facts["eos_tokens"]]
    ends = zip(facts["eos_token_ids"], texts or [""] * len(facts["eos_token_ids"]), strict=True)
    yield "ends at", ", ".join(f"{id}{text}" for id, text in ends) or "no token"


def _sized(facts: Mapping[str, Any], config: LlamaConfig) -> Iterator[tuple[str, str]]:
    """The lines on the model's shape, and on what its cache takes."""
    shape, takes = facts["rope_table_shape"], facts["cache_bytes_per_token"]
    heads = f"(1, {config.num_key_value_heads}, length, {config.head_dim})"
    yield "layers", str(config.num_hidden_layers)
    yield "query heads", str(config.num_attention_heads)
    yield "KV heads", str(config.num_key_value_heads)
    yield "head_dim", str(config.head_dim)
    yield "hidden", str(config.hidden_size)
    yield "intermediate", str(config.intermediate_size)
    yield "vocabulary", str(config.vocab_size)
    yield "lm_head", "tied to the embedding" if config.tie_word_embeddings else "its own weights"
    biased = [name for name in ("attention_bias", "mlp_bias") if facts[name]]
    yield "biases", ", ".join(biased)
    yield "max positions", str(config.max_position_embeddings)
    yield "rms_norm_eps", str(config.rms_norm_eps)
    yield "RoPE", config.rope.words
    yield "RoPE tables", f"cos and sin, each ({shape[0]}, {shape[1]})"
    yield "cache per layer", f"keys and values, each {heads}"
    half = f"{takes['float16']} in half precision"
    yield "cache per token", f"{takes['float32']} bytes in float32, {half}"


def _read(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The lines on how config.json was read."""
    filled = ", ".join(f"{key} {json.dumps(value)}" for key, value in facts["filled_in"].items())
    yield "filled in", f"{filled} (absent in config.json, as in transformers)" if filled else ""
    for key, reason in facts["ignored_keys"].items():
        yield "ignored", f"{key}: {reason}"
    for note in facts["notes"]:
        yield "note", note


def doctor(*, as_json: bool = False) -> tuple[str, int]:
    """What is here, and the exit code: 0 when both engines can run, else 2."""
    facts = _found_here()
    code = facts["exit_code"]
    if as_json:
        return json.dumps({"format": "mlxkv-doctor/1"} | facts, indent=1) + "\n", code
    lines = [(name, found or "not installed") for name, found in facts["packages"].items()]
    if facts["device_error"] is not None:
        lines.append(("device", f"none: {facts['device_error']}"))
    else:
        lines += [(name, str(facts[name])) for name in HOST]
        lines.append(("TF32", f"off (MLX_ENABLE_TF32={facts['mlx_enable_tf32']})"))
    cache = facts["cache"]
    lines.append(("cache", cache["folder"] + ("" if cache["writable"] else " (cannot be written)")))
    lines += [("advice", line) for line in facts["advice"]]
    return _lines(lines), code


def _found_here() -> dict[str, Any]:
    versions = {name: machine.version(name) for name in PACKAGES}
    packages = {name: None if v == "not installed" else v for name, v in versions.items()}
    can_run = all(packages[name] for name in ("mlx", "torch", "transformers"))
    host: dict[str, Any] = dict.fromkeys((*HOST, "mlx_enable_tf32"))
    advice, failed = [], None
    try:
        found = machine.prepare()
    except Refusal as error:
        failed, can_run = str(error), False
    else:
        host = {name: found[name] for name in HOST}
        host["mlx_enable_tf32"] = int(found["MLX_ENABLE_TF32"])
        if sys.platform == "linux" and found["blas"].startswith("reference"):
            faster = "install Debian's libblis4-pthread or PyPI's mkl"
            advice.append(f"a faster BLAS makes MLX up to 40 times faster: {faster}")
    if not can_run:
        advice.append(f"{install('all')} brings both engines; [port] and [oracle] bring one")
    writable = os.access(_existing(cache_dir()), os.W_OK)
    cache = {"folder": str(cache_dir()), "writable": writable}
    rest = {"device_error": failed, "cache": cache, "advice": advice}
    return {"packages": packages, **host, **rest, "exit_code": 0 if can_run else 2}


def _existing(path: Path) -> Path:
    return path if path.exists() or path.parent == path else _existing(path.parent)


def _lines(facts: list[tuple[str, str]]) -> str:
    """A line for each fact that says something, its name before it."""
    width = max(len(name) for name, _ in facts)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in facts if value)

"""A GGUF file of Llama architecture -> a Hugging Face folder in float32.

GGUF stores the rows of q and k pairwise within each head, Hugging Face in split halves: they are
put back, each with its own head count. Weights go out one tensor at a time, in the layout that
`safetensors` itself writes. What config.json cannot say is refused by name, never dropped.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oracle.formats import header
from oracle.formats.errors import Refusal, brief
from oracle.formats.progress import Progress
from oracle.model import gguf_tokenizer
from oracle.model.gguf import Gguf, dequantised, main_type, read

# Metadata of the architecture that is used below.
_USED = """block_count context_length embedding_length feed_forward_length vocab_size
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon rope.dimension_count rope.freq_base rope.scale_linear
    rope.scaling.type rope.scaling.factor rope.scaling.original_context_length
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.finetuned"""
# Metadata that would change the model, at the values that leave it alone. Both names of the layout
# are that of every Llama's GGUF: llama.cpp does not read the key.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "tensor_data_layout": ("Meta AI original pth", "reference"),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_AGAIN = "download it again"
_FOLDER = "use the model's Hugging Face folder instead"
_FREQUENCIES = "rope_freqs.weight"
_BIAS = re.compile(r"blk\.\d+\.(attn|ffn)_(?:q|k|v|output|gate|up|down)\.bias")


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor's name in Hugging Face's files, its shape, and the heads whose rows are paired."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0


def convert(source: Path, folder: Path, *, progress: Progress) -> tuple[str, str]:
    """Writes config.json, model.safetensors and, for a vocabulary known here, tokenizer.json.

    Returns the type that most weights were quantised to, and the sha256 of model.safetensors.
    """
    gguf = read(source)
    config = config_of(gguf)
    digest = _write_weights(gguf, _targets(gguf, config), folder / "model.safetensors", progress)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tokenizer = gguf_tokenizer.tokenizer_of(gguf.metadata)
    if tokenizer is not None:
        text = json.dumps(tokenizer, ensure_ascii=False)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return main_type(gguf), digest


def config_of(gguf: Gguf) -> dict[str, Any]:
    """config.json from the metadata; float32 values in their shortest spelling."""
    architecture = gguf.metadata.get("general.architecture")
    if architecture != "llama":
        what = f"general.architecture is {architecture!r}, expected 'llama'"
        raise Refusal(what, where=gguf.path, remedy="give a Llama model")
    _refuse_unknown(gguf)
    vocab_size = _vocab_size(gguf)
    heads = _whole(gguf, "attention.head_count")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": _whole(gguf, "embedding_length"),
        "intermediate_size": _whole(gguf, "feed_forward_length"),
        "num_hidden_layers": _whole(gguf, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(gguf, "attention.head_count_kv", default=heads),
        "head_dim": _head_dim(gguf, heads),
        "vocab_size": vocab_size,
        "max_position_embeddings": _whole(gguf, "context_length"),
        "rms_norm_eps": _real(gguf, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _real(gguf, "rope.freq_base", default=10000.0),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }
    for key in ("bos_token_id", "eos_token_id"):
        if isinstance(gguf.metadata.get(f"tokenizer.ggml.{key}"), int):
            config[key] = gguf.metadata[f"tokenizer.ggml.{key}"]
    biased = {found[1] for name in gguf.tensors if (found := _BIAS.fullmatch(name))}
    config |= {"attention_bias": "attn" in biased, "mlp_bias": "ffn" in biased}
    config["torch_dtype"] = "float32"
    scaling = _scaling(gguf)
    if _FREQUENCIES in gguf.tensors:
        if scaling is not None:
            what = f"{_FREQUENCIES} beside {scaling['rope_type']} scaling, expected one of them"
            raise Refusal(what, where=gguf.path, remedy=_FOLDER)
        scaling = _llama3_scaling(gguf, config["rope_theta"], config["head_dim"])
    return config | ({} if scaling is None else {"rope_scaling": scaling})


def _vocab_size(gguf: Gguf) -> int:
    shape = gguf.tensors["token_embd.weight"][0] if "token_embd.weight" in gguf.tensors else ()
    if len(shape) != 2:
        what = "no token_embd.weight of two axes, expected one"
        raise Refusal(what, where=gguf.path, remedy=_AGAIN)
    return shape[0]


def _refuse_unknown(gguf: Gguf) -> None:
    for key, value in gguf.metadata.items():
        name = key.removeprefix("llama.")
        neutral = _NEUTRAL.get(name, ())
        if name == key or name in _USED.split() or value in neutral:
            continue
        expected = "which config.json's Llama cannot express here"
        if neutral:
            expected = f"expected {neutral[0]!r}"
        raise Refusal(f"{key} is {str(value)[:40]!r}, {expected}", where=gguf.path, remedy=_FOLDER)


def _whole(gguf: Gguf, name: str, *, default: int | None = None) -> int:
    value = gguf.metadata.get(f"llama.{name}", default)
    if type(value) is not int or value < 1:
        raise _odd(gguf, name, value, "one positive whole number")
    return value


def _real(gguf: Gguf, name: str, *, default: float | None = None) -> float:
    import numpy as np

    value = gguf.metadata.get(f"llama.{name}", default)
    if not isinstance(value, float) or not 0 < value < math.inf:
        raise _odd(gguf, name, value, "one positive number")
    return float(str(np.float32(value))) if float(np.float32(value)) == value else value


def _odd(gguf: Gguf, name: str, value: object, expected: str) -> Refusal:
    what = f"llama.{name} is {str(value)[:40]}, expected {expected}"
    return Refusal(what, where=gguf.path, remedy=_AGAIN)


def _head_dim(gguf: Gguf, heads: int) -> int:
    usual = max(1, _whole(gguf, "embedding_length") // heads)
    head_dim = _whole(gguf, "attention.key_length", default=usual)
    for name in ("attention.value_length", "rope.dimension_count"):
        other = _whole(gguf, name, default=head_dim)
        if other != head_dim:
            what = f"llama.{name} is {other}, expected the keys' {head_dim}"
            raise Refusal(what, where=gguf.path, remedy=_FOLDER)
    if head_dim % 2:
        what = f"its heads have {head_dim} dimensions, expected an even number"
        raise Refusal(what, where=gguf.path, remedy=_AGAIN)
    return head_dim


def _scaling(gguf: Gguf) -> dict[str, Any] | None:
    """rope_scaling as llama.cpp reads the metadata, where a factor without a type is linear."""
    kind = gguf.metadata.get("llama.rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        what = f"llama.rope.scaling.type is {brief(kind)}, expected 'none', 'linear' or 'yarn'"
        raise Refusal(what, where=gguf.path, remedy=_FOLDER)
    old = _real(gguf, "rope.scale_linear", default=1.0)
    factor = _real(gguf, "rope.scaling.factor", default=old)
    if factor < 1:
        raise _odd(gguf, "rope.scaling.factor", factor, "a number from 1")
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        length = _whole(gguf, "context_length")
        original = _whole(gguf, "rope.scaling.original_context_length", default=length)
        scaling["original_max_position_embeddings"] = original
        for key, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            scaling[key] = _real(gguf, f"rope.scaling.yarn_{key}", default=usual)
    return scaling


def _llama3_scaling(gguf: Gguf, theta: float, head_dim: int) -> dict[str, Any]:
    """llama3's parameters, from the divisors of the inverse frequencies that the file stores.

    They are refused if Llama 3's own parameters do not give them (the formula is that of
    `apply_scaling` in Meta's llama-models; llama.cpp's converter stores its result).
    """
    import numpy as np

    shape = gguf.tensors[_FREQUENCIES][0]
    if shape != (head_dim // 2,):
        what = f"{_FREQUENCIES} has shape {list(shape)}, expected [{head_dim // 2}]"
        raise Refusal(what, where=gguf.path, remedy=_AGAIN)
    divisors = np.asarray(next(dequantised(gguf, _FREQUENCIES)), np.float64)
    factor, low, high, original = float(divisors.max()), 1.0, 4.0, 8192
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1)
    # The stored ones were blended in float32, which is right to 1e-5. Another set of parameters
    # is off by more than 1e-2.
    if not np.allclose(divisors, 1 / ((1 - blend) / factor + blend), rtol=1e-4, atol=0):
        parameters = f"{factor:g} with factors 1 and 4 over 8192 positions"
        what = f"{_FREQUENCIES} is not llama3 scaling by {parameters}, expected that"
        raise Refusal(what, where=gguf.path, remedy=_FOLDER)
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _targets(gguf: Gguf, config: dict[str, Any]) -> dict[str, _Target]:
    """GGUF's name of each tensor -> where it goes. All must be there, and no other."""
    layers, n = config["num_hidden_layers"], len(gguf.tensors)
    if layers > n:
        what = f"llama.block_count is {layers} with {n} tensors, expected fewer"
        raise Refusal(what, where=gguf.path, remedy=_AGAIN)
    hidden = config["hidden_size"]
    table = (config["vocab_size"], hidden)
    targets = {
        "token_embd.weight": _Target("model.embed_tokens.weight", table),
        "output_norm.weight": _Target("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        targets["output.weight"] = _Target("lm_head.weight", table)
    for i in range(layers):
        for part, t in _layer(config).items():
            targets[f"blk.{i}.{part}"] = replace(t, name=f"model.layers.{i}.{t.name}")
    _require_exactly(gguf, targets)
    return targets


def _layer(config: dict[str, Any]) -> dict[str, _Target]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q, kv = heads * config["head_dim"], kv_heads * config["head_dim"]
    weights = {
        "attn_norm": _Target("input_layernorm", (hidden,)),
        "attn_q": _Target("self_attn.q_proj", (q, hidden), heads),
        "attn_k": _Target("self_attn.k_proj", (kv, hidden), kv_heads),
        "attn_v": _Target("self_attn.v_proj", (kv, hidden)),
        "attn_output": _Target("self_attn.o_proj", (hidden, q)),
        "ffn_norm": _Target("post_attention_layernorm", (hidden,)),
        "ffn_gate": _Target("mlp.gate_proj", (inner, hidden)),
        "ffn_up": _Target("mlp.up_proj", (inner, hidden)),
        "ffn_down": _Target("mlp.down_proj", (hidden, inner)),
    }
    targets = {}
    for part, t in weights.items():
        targets[f"{part}.weight"] = replace(t, name=f"{t.name}.weight")
        block = t.name.split(".")[0]
        if config.get({"self_attn": "attention_bias", "mlp": "mlp_bias"}.get(block, "")):
            targets[f"{part}.bias"] = replace(t, name=f"{t.name}.bias", shape=t.shape[:1])
    return targets


def _require_exactly(gguf: Gguf, targets: dict[str, _Target]) -> None:
    odd = sorted((set(gguf.tensors) - {_FREQUENCIES}) ^ set(targets))
    if odd:
        how = "unknown" if odd[0] in gguf.tensors else "missing"
        what = f"{how} tensor {odd[0]} (of {len(odd)}), expected a Llama's {len(targets)}"
        partly = how == "missing" and _BIAS.fullmatch(odd[0])
        why = (
            "it has biases in a part of its projections only, which no Llama has; it cannot be run"
        )
        raise Refusal(what, where=gguf.path, remedy=why if partly else "give a Llama model")
    for name, target in targets.items():
        shape = gguf.tensors[name][0]
        if shape != target.shape:
            expected = f"expected {list(target.shape)} by its metadata"
            what = f"{name} has shape {list(shape)}, {expected}"
            raise Refusal(what, where=gguf.path, remedy=_AGAIN)


def _write_weights(gguf: Gguf, targets: dict[str, _Target], path: Path, progress: Progress) -> str:
    """Writes the tensors in float32, sorted by name; returns the file's sha256."""
    order = sorted(targets, key=lambda name: targets[name].name)
    entries, _ = header.declare({targets[n].name: ("F32", targets[n].shape) for n in order})
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def write(piece: Any) -> None:
            file.write(piece)
            digest.update(piece)

        write(header.encoded(entries, {"format": "pt"}))
        for i, name in enumerate(order):
            progress(f"converting {gguf.path.name}", i, len(order))
            for piece in _pieces(gguf, name, targets[name]):
                write(piece)
    progress(f"converting {gguf.path.name}", len(order), len(order))
    return digest.hexdigest()


def _pieces(gguf: Gguf, name: str, target: _Target) -> Iterator[Any]:
    """A tensor's rows in float32, block by block, those of each head in split halves."""
    import numpy as np

    head = target.shape[0] // target.heads if target.heads else 1
    for rows in dequantised(gguf, name, together=head):
        if not np.isfinite(rows).all():
            what = f"{name} holds NaN or infinity, expected finite weights"
            raise Refusal(what, where=gguf.path, remedy=_AGAIN)
        pairs = rows.reshape(-1, head // 2, 2, *rows.shape[1:]) if target.heads else None
        yield np.ascontiguousarray(rows if pairs is None else pairs.swapaxes(1, 2), "<f4")

"""config.json -> LlamaConfig. Every key is used, ignored by name with a reason, or refused by name.

The names are Hugging Face's, since this is the border; the model has shorter ones. Where a key is absent and
transformers' LlamaConfig would fill in a value silently, the same value is taken and `defaults` says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxkv.port.config.rope import ORIGINAL, Rope, read_rope
from mlxkv.port.config.values import ConfigError, Values

if TYPE_CHECKING:
    from oracle.model.checkpoint import Checkpoint

SIZES = {
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 10_000,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**24,
    "num_key_value_heads": 10_000,
    "head_dim": 2**16,
}
"""The largest of each that is believed: what a damaged or hostile file says must not be made, nor looped over."""

_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias")
USED = (
    *SIZES,
    *_FLAGS,
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    ORIGINAL,
    "rms_norm_eps",
    "hidden_act",
    "model_type",
)

IGNORED = {
    "architectures": "model_type decides",
    "torch_dtype": "weights are cast to the run's dtype",
    "dtype": "weights are cast to the run's dtype",
    "use_cache": "the cache given to a call decides",
    "attention_dropout": "dropout acts in training only",
    "initializer_range": "used when weights are made, not when they are loaded",
    "pretraining_tp": "only splits the same products",
    "sliding_window": "Llama has none, in transformers too",
    "bos_token_id": "the tokenizer decides",
    "eos_token_id": "greedy runs have a fixed length",
    "pad_token_id": "there is no padding",
    "is_llama_config": "a mark that changes nothing",
    "transformers_version": "says who wrote the file",
    "unsloth_version": "says who wrote the file",
    "unsloth_fixed": "says who wrote the file",
    "transformers.js_config": "for another runtime",
    "_name_or_path": "says where the file came from",
    "_attn_implementation_autoset": "chooses an implementation, not a result",
    "chunk_size_feed_forward": "only splits the same products",
    "is_encoder_decoder": "false for every Llama",
    "output_attentions": "asks for more output",
    "output_hidden_states": "asks for more output",
    "return_dict": "the form of transformers' output",
    "id2label": "labels of classifiers",
    "label2id": "labels of classifiers",
    "num_labels": "labels of classifiers",
    "problem_type": "labels of classifiers",
    "tokenizer_class": "the tokenizer decides",
    "max_length": "for generation",
    "temperature": "for generation",
    "top_k": "for generation",
    "top_p": "for generation",
}

# Keys that a Llama may carry only with a value that changes nothing.
HARMLESS: dict[str, Any] = {
    "rope_interleaved": False,
    "rope_traditional": False,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
}


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a Llama. `defaults` are the values filled in for absent keys, `notes` the keys ignored, and why."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    defaults: tuple[tuple[str, Any], ...] = field(default=(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> LlamaConfig:
        """The port's own reading of a checkpoint's config."""
        return cls.from_json(
            checkpoint.model_config,
            where=str(checkpoint.folder / "config.json"),
            without=checkpoint.without,
        )

    @classmethod
    def from_file(cls, path: Path) -> LlamaConfig:
        """The config in a file, or a ConfigError."""
        try:
            value = json.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror}); a model folder holds a config.json"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not JSON ({' '.join(str(error).split())})") from error
        return cls.from_json(value, where=str(path))

    @classmethod
    def from_json(
        cls, value: Mapping[str, Any], *, where: str = "config.json", without: Iterable[str] = ()
    ) -> LlamaConfig:
        """The config in a decoded config.json, or a ConfigError that starts with `where`.

        `without` names keys that a person took out of it; refused where the model depends on one.
        """
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a JSON object, got {type(value).__name__}")
        for key in without:
            if key in USED or key in HARMLESS:
                raise ConfigError(
                    f"{where}: {key}: expected it to be read, got --ignore-key {key}; the model depends on it"
                )
        values = Values(value, where)
        _check_keys(values)
        return _read(values)


def _check_keys(values: Values) -> None:
    if values.value.get("model_type") != "llama":
        raise values.error(
            "model_type",
            "'llama' (the port knows no other architecture)",
            values.value.get("model_type"),
        )
    if values.value.get("hidden_act") is None:
        values.filled("hidden_act", "silu")
    elif values.value["hidden_act"] != "silu":
        raise values.error("hidden_act", "'silu'", values.value["hidden_act"])
    for key, value in values.value.items():
        if key in HARMLESS:
            alike = (
                isinstance(value, bool) == isinstance(HARMLESS[key], bool)
                and value == HARMLESS[key]
            )
            if value is not None and not alike:
                raise values.error(key, f"{HARMLESS[key]} (another value changes the model)", value)
        elif key in IGNORED:
            if key == "sliding_window" and value is not None:
                values.remarks.append(f"{key} {value!r:.40} ignored: {IGNORED[key]}")
        elif key not in USED and value is not None and value is not False:
            raise values.error(
                key, "no such key in a Llama config (it may change the model)", value
            )


def _read(values: Values) -> LlamaConfig:
    required = {key: values.size(key, most=SIZES[key]) for key in list(SIZES)[:6]}
    hidden, heads = required["hidden_size"], required["num_attention_heads"]
    kv_heads = values.size("num_key_value_heads", most=SIZES["num_key_value_heads"], default=heads)
    if heads % kv_heads:
        raise values.error(
            "num_key_value_heads", f"a divisor of num_attention_heads {heads}", kv_heads
        )
    head_dim = _head_dim(values, hidden, heads)
    eps = values.value.get("rms_norm_eps")
    return LlamaConfig(
        **required,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=values.number(
            "rms_norm_eps", values.filled("rms_norm_eps", 1e-6) if eps is None else eps, above=0.0
        ),
        rope=read_rope(
            values, max_positions=required["max_position_embeddings"], head_dim=head_dim
        ),
        tie_word_embeddings=values.flag("tie_word_embeddings"),
        attention_bias=values.flag("attention_bias"),
        mlp_bias=values.flag("mlp_bias"),
        defaults=tuple(values.defaults),
        notes=tuple(values.remarks),
    )


def _head_dim(values: Values, hidden: int, heads: int) -> int:
    if values.value.get("head_dim") is None and hidden % heads:
        raise values.error(
            "head_dim",
            f"a value, since hidden_size {hidden} is no multiple of num_attention_heads {heads}",
            None,
        )
    head_dim = values.size("head_dim", most=SIZES["head_dim"], default=hidden // heads)
    if head_dim % 2:
        raise values.error("head_dim", "an even number (RoPE turns pairs)", head_dim)
    return head_dim


__all__ = ["HARMLESS", "IGNORED", "SIZES", "USED", "ConfigError", "LlamaConfig", "Rope"]

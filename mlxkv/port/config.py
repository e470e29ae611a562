"""config.json -> LlamaConfig. Every key is used, ignored by name with a reason, or refused by name.

The names are Hugging Face's, since this is the border; the model has shorter ones. Where a key is absent and
transformers' LlamaConfig would fill in a value silently, the same value is taken and `notes` says so.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oracle.plan import Refusal

ROPE_TYPES = ("default", "llama3")

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim")
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias")
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
USED = (*_SIZES, *_OPTIONAL_SIZES, *_FLAGS, *_ROPE_KEYS, "rms_norm_eps", "hidden_act", "model_type")

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
_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),
    "rope_traditional": (False,),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (1.0,),
}


class ConfigError(Refusal):
    """A config.json that the port cannot follow exactly; one line that names file, key, expected and found."""


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE's parameters. The last four are used by rope_type llama3 only."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a Llama. `notes` says which values were filled in and which keys were ignored, with the reason."""

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
    notes: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def from_file(cls, path: Path) -> LlamaConfig:
        """The config in a file, or a ConfigError."""
        try:
            value = json.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); a model folder holds a config.json") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not JSON ({' '.join(str(error).split())})") from error
        return cls.from_json(value, where=str(path))

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, where: str = "config.json") -> LlamaConfig:
        """The config in a decoded config.json, or a ConfigError that starts with `where`."""
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a JSON object, got {type(value).__name__}")
        return _Reader(value, where).config()


class _Reader:
    """Reads one config.json; collects notes."""

    def __init__(self, value: Mapping[str, Any], where: str) -> None:
        self.value = value
        self.where = where
        self.notes: list[str] = []

    def config(self) -> LlamaConfig:
        self._check_keys()
        sizes = {key: self._size(key) for key in _SIZES}
        hidden, inner, layers, heads, vocab, positions = sizes.values()
        kv_heads = self._size("num_key_value_heads", default=heads)
        head_dim = self._head_dim(hidden, heads)
        if heads % kv_heads:
            raise self._error("num_key_value_heads", f"a divisor of num_attention_heads {heads}", kv_heads)
        return LlamaConfig(
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            max_position_embeddings=positions,
            rms_norm_eps=self._positive("rms_norm_eps", default=1e-6),
            rope=self._rope(),
            tie_word_embeddings=self._flag("tie_word_embeddings"),
            attention_bias=self._flag("attention_bias"),
            mlp_bias=self._flag("mlp_bias"),
            notes=tuple(self.notes),
        )

    def _check_keys(self) -> None:
        if self.value.get("model_type") != "llama":
            raise self._error("model_type", "'llama' (the port knows no other architecture)", self.value.get("model_type"))
        if self.value.get("hidden_act", "silu") != "silu":
            raise self._error("hidden_act", "'silu'", self.value["hidden_act"])
        for key, value in self.value.items():
            if key in _HARMLESS_VALUES:
                if value not in (None, *_HARMLESS_VALUES[key]):
                    raise self._error(key, f"{_HARMLESS_VALUES[key][0]} (another value changes the model)", value)
            elif key in IGNORED:
                if key == "sliding_window" and value is not None:
                    self.notes.append(f"{key} {value} ignored: {IGNORED[key]}")
            elif key not in USED and value is not None and value is not False:
                raise self._error(key, "no such key in a Llama config (it may change the model)", value)

    def _head_dim(self, hidden: int, heads: int) -> int:
        if self.value.get("head_dim") is None and hidden % heads:
            raise self._error("head_dim", f"a value, since hidden_size {hidden} is no multiple of num_attention_heads {heads}", None)
        head_dim = self._size("head_dim", default=hidden // heads, quiet=True)
        if head_dim % 2:
            raise self._error("head_dim", "an even number (RoPE turns pairs)", head_dim)
        return head_dim

    def _rope(self) -> Rope:
        old, new = self._object("rope_scaling"), self._object("rope_parameters")
        theta = self._agreed("rope_theta", self.value.get("rope_theta"), new.get("rope_theta"), old.get("rope_theta"))
        if theta is None:
            self.notes.append("rope_theta absent: 10000, as transformers fills in")
            theta = 10000.0
        theta = self._number("rope_theta", theta, above=1.0)
        names = [part.get(k) for part in (new, old) for k in ("rope_type", "type")]
        rope_type = self._agreed("rope_type", *names)
        scaling = {k: v for part in (old, new) for k, v in part.items() if k not in ("rope_type", "type", "rope_theta")}
        for key in set(old) & set(new):
            self._agreed(key, old[key], new[key])
        if rope_type is None:
            if scaling:
                raise self._error("rope_scaling", f"a rope_type beside {', '.join(sorted(scaling))}", dict(old or new))
            rope_type = "default"
        if rope_type not in ROPE_TYPES:
            raise self._error("rope_type", f"one of {', '.join(ROPE_TYPES)}", rope_type)
        return self._scaled(rope_type, theta, scaling)

    def _scaled(self, rope_type: str, theta: float, scaling: Mapping[str, Any]) -> Rope:
        expected = _LLAMA3_KEYS if rope_type == "llama3" else ()
        for key in scaling:
            if key not in expected and scaling[key] is not None:
                raise self._error(key, f"no such key for rope_type {rope_type}", scaling[key])
        if rope_type == "default":
            return Rope(theta)
        values = {key: self._number(key, scaling.get(key), above=0.0) for key in expected}
        if values["factor"] < 1:
            raise self._error("factor", "a number from 1", values["factor"])
        if not values["low_freq_factor"] < values["high_freq_factor"]:
            raise self._error("low_freq_factor", f"a number below high_freq_factor {values['high_freq_factor']}", values["low_freq_factor"])
        original = values.pop("original_max_position_embeddings")
        if original != int(original):
            raise self._error("original_max_position_embeddings", "a whole number", original)
        return Rope(theta, rope_type, **values, original_max_position_embeddings=int(original))

    def _object(self, key: str) -> Mapping[str, Any]:
        value = self.value.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._error(key, "a JSON object or null", value)
        return value

    def _agreed(self, key: str, *values: Any) -> Any:
        given = [v for v in values if v is not None]
        if any(v != given[0] for v in given):
            raise self._error(key, "one value", " and ".join(map(repr, given)) + " in different places")
        return given[0] if given else None

    def _size(self, key: str, *, default: int | None = None, quiet: bool = False) -> int:
        value = self.value.get(key)
        if value is None and default is not None:
            if not quiet:
                self.notes.append(f"{key} absent: {default}, as transformers fills in")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(key, "a whole number from 1", value)
        if value >= 2**31:
            raise self._error(key, "a whole number below 2147483648 (MLX's largest axis)", value)
        return value

    def _flag(self, key: str) -> bool:
        value = self.value.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._error(key, "true or false", value)
        return bool(value)

    def _positive(self, key: str, *, default: float) -> float:
        if self.value.get(key) is None:
            self.notes.append(f"{key} absent: {default:g}, as transformers fills in")
            return default
        return self._number(key, self.value[key], above=0.0)

    def _number(self, key: str, value: Any, *, above: float) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not above < value <= sys.float_info.max:
            raise self._error(key, f"a number above {above:g}", value)
        return float(value)

    def _error(self, key: str, expected: str, found: Any) -> ConfigError:
        shown = found if isinstance(found, str) and " in different places" in found else repr(found)
        return ConfigError(f"{self.where}: {key}: expected {expected}, got {shown[:120]}")

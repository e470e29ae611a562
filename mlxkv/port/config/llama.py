"""config.json -> LlamaConfig. Every key is used, ignored by name with a reason, or refused by name.

The names are Hugging Face's, since this is the border; the model has shorter ones. Where a key is
absent and transformers' LlamaConfig would fill in a value silently, the same value is taken and
`defaults` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxkv.port.config.keys import (
    DEFAULTS,
    HARMLESS,
    IGNORED,
    KNOWN,
    NEUTRAL,
    SIZES,
    USED,
    is_one_of,
)
from mlxkv.port.config.rope import Rope, read_rope
from mlxkv.port.config.values import ConfigError, Values
from oracle.model.safetensors import read_object

if TYPE_CHECKING:
    from oracle.model.checkpoint import Checkpoint

OF_READING = ("defaults", "ignored", "notes")
"""The fields of a LlamaConfig that say how it was read; nothing is computed from them."""


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a Llama.

    `defaults` are the values filled in for keys that are absent or null, `ignored` the other keys
    that change nothing, each with the reason, and `notes` say what of both a reader might miss.
    """

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
    ignored: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> LlamaConfig:
        """The port's own reading of a checkpoint's config; raises ConfigError."""
        where = str(checkpoint.folder / "config.json")
        return cls.from_json(checkpoint.model_config, where=where, without=checkpoint.without)

    @classmethod
    def from_file(cls, path: Path) -> LlamaConfig:
        return cls.from_json(read_object(path), where=str(path))

    @classmethod
    def from_json(
        cls, value: Mapping[str, Any], *, where: str = "config.json", without: Iterable[str] = ()
    ) -> LlamaConfig:
        """The config in a decoded config.json, or a ConfigError that starts with `where`.

        `without` names keys that a person took out of it; refused if the model depends on one.
        """
        if not isinstance(value, Mapping):
            what = f"expected a JSON object, got {type(value).__name__}"
            raise ConfigError(what, where=where)
        for key in without:
            if key in USED or key in HARMLESS:
                what = f"expected it to be read, got --ignore-key {key}"
                remedy = "the model depends on it"
                raise ConfigError(what, where=f"{where}: {key}", remedy=remedy)
        values = Values(value, where)
        _check_keys(values)
        return _read(values)


def _check_keys(values: Values) -> None:
    given = values.value
    if given.get("model_type") != "llama":
        expected = "'llama' (the port knows no other architecture)"
        raise values.error("model_type", expected, given.get("model_type"))
    for key, default in DEFAULTS.items():
        if key in given and given[key] is None:
            raise values.error(key, f"a value, or no such key, which stands for {default!r}", None)
    if given.get("hidden_act") is None:
        values.filled("hidden_act", "silu")
    elif not is_one_of(given["hidden_act"], ("silu", "swish")):  # transformers' two names of it
        raise values.error("hidden_act", "'silu'", given["hidden_act"])
    unknown = {key: value for key, value in given.items() if key not in KNOWN}
    if unknown:
        keys, found = ", ".join(unknown), ", ".join(f"{v!r:.60}" for v in unknown.values())
        expected = "no such key in a Llama config (it may change the model)"
        ignoring = " ".join(f"--ignore-key {key}" for key in unknown)
        raise values.refusal(keys, expected, found, remedy=f"{ignoring} if it does not")
    for key, value in given.items():
        if key in HARMLESS:
            if value is not None and not is_one_of(value, HARMLESS[key]):
                expected = f"{HARMLESS[key][0]} (another value changes the model)"
                raise values.error(key, expected, value)
            values.ignored[key] = NEUTRAL
        elif key in IGNORED:
            values.ignored[key] = IGNORED[key]
            if key == "sliding_window" and value is not None:
                values.remarks.append(f"{key} {value!r:.40} ignored: {IGNORED[key]}")


def _read(values: Values) -> LlamaConfig:
    missing = [key for key in list(SIZES)[:5] if values.value.get(key) is None]
    if len(missing) > 1:
        raise values.refusal(", ".join(missing), "a whole number from 1 for each", "none")
    required = {key: values.size(key, most=SIZES[key]) for key in list(SIZES)[:6]}
    layer_types = ["full_attention"] * required["num_hidden_layers"]
    if values.value.get("layer_types", layer_types) not in (layer_types, None):
        expected = f"'full_attention' for each of {len(layer_types)} layers"
        raise values.error("layer_types", expected, values.value["layer_types"])
    hidden, heads = required["hidden_size"], required["num_attention_heads"]
    kv_heads = values.size("num_key_value_heads", most=SIZES["num_key_value_heads"], default=heads)
    if heads % kv_heads:
        divisor = f"a divisor of num_attention_heads {heads}"
        raise values.error("num_key_value_heads", divisor, kv_heads)
    head_dim, positions = _head_dim(values, hidden, heads), required["max_position_embeddings"]
    return LlamaConfig(
        **required,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=values.number("rms_norm_eps", values.get("rms_norm_eps"), above=0.0),
        rope=read_rope(values, max_positions=positions, head_dim=head_dim),
        tie_word_embeddings=values.flag("tie_word_embeddings"),
        attention_bias=values.flag("attention_bias"),
        mlp_bias=values.flag("mlp_bias"),
        defaults=tuple(values.defaults),
        ignored=tuple(values.ignored.items()),
        notes=tuple(values.remarks),
    )


def _head_dim(values: Values, hidden: int, heads: int) -> int:
    if values.value.get("head_dim") is None and hidden % heads:
        why = f"hidden_size {hidden} is no multiple of num_attention_heads {heads}"
        raise values.error("head_dim", f"a value, since {why}", None)
    head_dim = values.size("head_dim", most=SIZES["head_dim"], default=hidden // heads)
    if head_dim % 2:
        raise values.error("head_dim", "an even number (RoPE turns pairs)", head_dim)
    return head_dim


__all__ = ["ConfigError", "LlamaConfig", "Rope"]

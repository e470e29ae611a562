"""Another architecture than Llama: what can be said and refused of its checkpoint without transformers' code.

No truth is written out for it: the oracle follows transformers' own class in several ways and measures by their mean
(`mean.py`). Which keys of the config that class knows, and whether it takes every tensor, `neighbour_model.py` asks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oracle.formats.errors import Refusal
from oracle.truth.config import STORED
from oracle.truth.rope import show

if TYPE_CHECKING:
    from oracle.model.checkpoint import Checkpoint

# Each names a file of code beside the weights, which its readers would run in the place of their own.
CODE = ("auto_map", "model_file")
_FIXED_AT_ONCE = ("longrope", "su")


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What the oracle needs to know of the model before transformers does.

    `shapes` are those of the stored tensors; `cache_width` is about how many numbers a token leaves in the cache;
    `original` is the length at which longrope changes its factors.
    """

    model_type: str
    vocab_size: int
    max_positions: int
    shapes: Mapping[str, tuple[int, ...]]
    cache_width: int
    original: int | None = None


def neighbour_of(checkpoint: Checkpoint) -> Neighbour:
    """The oracle's reading, or a Refusal that names the key or the tensor."""
    config, where = checkpoint.config, str(checkpoint.folder / "config.json")
    for key in CODE:
        if config.get(key) is not None:
            what = f"{key} ({show(config[key])}) names code of the checkpoint, which is never run"
            raise Refusal(
                f"{where}: {what}; --ignore-key {key} if transformers' own {config['model_type']} is the same model"
            )
    if checkpoint.packed:
        raise Refusal(
            f"{where}: quantization says that weights are packed, expected plain ones; of {config['model_type']} no others can be judged"
        )
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype not in STORED:
            raise Refusal(
                f"{tensor.file}: {name} is {tensor.dtype}, expected {', '.join(STORED)}; quantised weights cannot be run"
            )
    return Neighbour(
        model_type=config["model_type"],
        vocab_size=checkpoint.vocab_size,
        max_positions=checkpoint.max_positions,
        shapes={name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()},
        cache_width=_cache_width(config),
        original=_original(config),
    )


def _cache_width(config: Mapping[str, Any]) -> int:
    """For an estimate; 0 where the config has other names for it."""
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    kv, hidden = config.get("num_key_value_heads") or heads, config.get("hidden_size")
    if not all(type(size) is int and size > 0 for size in (layers, heads, kv, hidden)):
        return 0
    head_dim = config.get("head_dim") if type(config.get("head_dim")) is int else hidden // heads  # type: ignore[operator]
    return int(2 * layers * kv * head_dim)  # type: ignore[operator]


def _original(config: Mapping[str, Any]) -> int | None:
    """The length at which the model's RoPE changes all frequencies at once, so that keys cached before it are of another kind."""
    for rope in (config.get("rope_parameters"), config.get("rope_scaling")):
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in _FIXED_AT_ONCE:
            found = config.get(
                "original_max_position_embeddings", rope.get("original_max_position_embeddings")
            )
            return found if type(found) is int else None
    return None

"""Another architecture than Llama: what is read and refused of its checkpoint without transformers.

No truth is written out for it: the oracle follows transformers' own class in several ways and
measures by their mean (`mean.py`). Which keys of the config that class knows, and whether it takes
every tensor, `neighbour_model.py` asks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oracle.formats.errors import Refusal, brief
from oracle.truth.config import require_plain

if TYPE_CHECKING:
    from oracle.model.checkpoint import Checkpoint

_FIXED_AT_ONCE = ("longrope", "su")


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What the oracle needs to know of the model before transformers does.

    `stored` are the shapes of the tensors; `cache_width` is about how many numbers a token leaves
    in the cache; `original` is the length beyond which longrope has other factors.
    """

    vocab_size: int
    max_positions: int
    stored: Mapping[str, tuple[int, ...]]
    cache_width: int
    original: int | None = None

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of the checkpoint, and its shape."""
        return self.stored


def neighbour_of(checkpoint: Checkpoint) -> Neighbour:
    """The oracle's reading, or a Refusal that names the key or the tensor."""
    config, where = checkpoint.config, checkpoint.where
    name = config["model_type"]
    # Each names a file of code beside the weights, which readers would run in place of their own.
    for key in ("auto_map", "model_file"):
        if config.get(key) is not None:
            what = f"{key} ({brief(config[key])}) names code of the checkpoint, which is never run"
            remedy = f"--ignore-key {key} if transformers' own {name} is the same model"
            raise Refusal(what, where=where, remedy=remedy)
    if checkpoint.packed:
        what = "quantization says that weights are packed, expected plain ones"
        raise Refusal(what, where=where, remedy=f"of {name} no others can be judged")
    for tensor_name, tensor in checkpoint.tensors.items():
        require_plain(tensor_name, tensor.dtype, tensor.file)
    return Neighbour(
        vocab_size=checkpoint.vocab_size,
        max_positions=checkpoint.max_positions,
        stored={name: tensor.shape for name, tensor in checkpoint.tensors.items()},
        cache_width=_cache_width(config),
        original=_original(config),
    )


def _cache_width(config: Mapping[str, Any]) -> int:
    """For an estimate; 0 if the config has other names for it."""
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    kv, hidden = config.get("num_key_value_heads") or heads, config.get("hidden_size")
    sizes = [size for size in (layers, heads, kv, hidden) if type(size) is int and size > 0]
    if len(sizes) < 4:
        return 0
    head_dim = config.get("head_dim")
    width: int = head_dim if type(head_dim) is int else sizes[3] // sizes[1]
    return 2 * sizes[0] * sizes[2] * width


def _original(config: Mapping[str, Any]) -> int | None:
    """The length at which RoPE changes all frequencies, and keys cached before it no longer fit."""
    for rope in (config.get("rope_parameters"), config.get("rope_scaling")):
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in _FIXED_AT_ONCE:
            key = "original_max_position_embeddings"
            found = config.get(key, rope.get(key))
            return found if type(found) is int else None
    return None

"""transformers' own class for another architecture than Llama, built as strictly as a stranger can be.

A key that the class does not know, a tensor that it would drop, a parameter that would stay random or is not finite: each
is refused by name. Nothing of the checkpoint but its config and its safetensors is looked at, and no code of it is run.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint
from oracle.pool.neighbour import neighbour_of
from oracle.truth.config import IGNORED
from oracle.truth.rope import show

# A class knows these by its fields, or by the one field that they end up in.
_ROPE = {"rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"}
# Not "special tokens" and "other models": a padding token is checked against the vocabulary, a sliding window is the model's.
_DROPPED = {
    key
    for group in ("training", "text generation", "book-keeping")
    for key in IGNORED[group].split()
}
_HARMLESS = {key for keys in IGNORED.values() for key in keys.split()} - {"sliding_window"}
_NAMES = {"model_type", "architectures"}
_VERSION = f"transformers {transformers.__version__}"


def build(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """The model with eager attention, every parameter of it from the checkpoint; a Refusal by name where that cannot be."""
    neighbour_of(checkpoint)
    config_class, model_class = _classes(checkpoint)
    _check_keys(checkpoint, config_class)
    given = {key: value for key, value in checkpoint.config.items() if key not in _DROPPED}
    # A mixture's grouped product exists in float32 and narrower alone; its plain loop has the float64 form that vouches for the mean.
    experts = (
        {"experts_implementation": "eager"}
        if hasattr(model_class, "set_experts_implementation")
        else {}
    )
    model, told = model_class.from_pretrained(
        None,
        config=config_class.from_dict(copy.deepcopy(given)),
        state_dict=dict(tensors),
        dtype=dtype,
        attn_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
        **experts,
    )
    _check_loaded(checkpoint, model, told)
    _check_values(checkpoint, model, tensors)
    return model


def kinds(model: Any) -> tuple[Literal["eager", "sdpa"], ...]:
    """The kinds of attention that the class says it has here, its own last."""
    return ("sdpa", "eager") if model._supports_sdpa else ("eager",)


def _classes(checkpoint: Checkpoint) -> tuple[Any, Any]:
    where, name = checkpoint.folder / "config.json", checkpoint.config["model_type"]
    # Both import a class when it is looked up, and only then; their `get` does not.
    known = name in CONFIG_MAPPING
    if not known or CONFIG_MAPPING[name] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        lacks = "has no causal language model of it" if known else "does not know it"
        raise Refusal(
            f"{where}: model_type is {name!r}, and {_VERSION} {lacks}; take a version that has one, or another model"
        )
    config_class = CONFIG_MAPPING[name]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    architectures = checkpoint.config.get("architectures") or [model_class.__name__]
    if model_class.__name__ not in architectures:
        raise Refusal(
            f"{where}: architectures is {show(architectures)}, expected {model_class.__name__}; only that can be run"
        )
    taken = inspect.signature(model_class.forward).parameters
    if not {"cache", "past_key_values"} & set(taken) or "logits_to_keep" not in taken:
        raise Refusal(
            f"{where}: {model_class.__name__} of {_VERSION} takes no cache of keys and values; judge another model"
        )
    return config_class, model_class


def _check_keys(checkpoint: Checkpoint, config_class: Any) -> None:
    where, fields = (
        checkpoint.folder / "config.json",
        set(inspect.signature(config_class).parameters),
    )
    # Some are made from others and written with them, as a pattern of windows: a config made of defaults has them too.
    own = fields | set(config_class.attribute_map) | set(config_class().to_dict()) | _NAMES
    own |= _ROPE if {"rope_parameters", "rope_theta"} & fields else set()
    for key in checkpoint.without:
        if key in own - _HARMLESS:
            raise Refusal(
                f"{where}: --ignore-key {key} would change the model, expected a key that does not; leave the option out"
            )
    for key, value in checkpoint.config.items():
        if key not in own and key not in _HARMLESS and value is not None and value is not False:
            what = f"unknown key {key!r} ({show(value)}), which may change the logits"
            raise Refusal(
                f"{where}: {what}, as {config_class.__name__} has no such field; --ignore-key if it does not"
            )


def _check_loaded(checkpoint: Checkpoint, model: Any, told: Mapping[str, Any]) -> None:
    """A parameter that the checkpoint lacks would be random, a tensor that the class lacks would be dropped."""
    where, name = checkpoint.folder, type(model).__name__
    dropped = [
        n
        for n in checkpoint.tensors
        if any(re.search(p, n) for p in model._keys_to_ignore_on_load_unexpected or ())
    ]
    for odd, words in (
        (told["missing_keys"], "the checkpoint has no tensor for its {}, which would be random"),
        ([*told["unexpected_keys"], *dropped], "it has no use for the checkpoint's {}"),
        (
            [key[0] for key in told["mismatched_keys"]],
            "its {} has another shape than the checkpoint's",
        ),
    ):
        if odd:
            raise Refusal(
                f"{where}: {_VERSION} {name} and the checkpoint disagree: {words.format(min(odd))}; {len(odd)} such"
            )


def _check_values(checkpoint: Checkpoint, model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Finite, equal to the tensor of the same name where there is one, and a tied head the embedding indeed."""
    where = checkpoint.folder
    for name, parameter in model.state_dict().items():
        if not bool(torch.isfinite(parameter).all()):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise Refusal(
                f"{where}: {name}: not finite in {dtype}, expected finite weights; use other weights or another --dtype"
            )
        stored = tensors.get(name)
        if (
            stored is not None
            and stored.shape == parameter.shape
            and not torch.equal(stored.to(parameter.dtype), parameter)
        ):
            raise Refusal(
                f"{where}: {name}: {_VERSION} has other values than the checkpoint stores; take another version or model"
            )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # What becomes of a head that is stored beside the embedding differs by version, and by engine.
    if (
        model.config.tie_word_embeddings
        and head is not None
        and not torch.equal(embedding.weight, head.weight)
    ):
        raise Refusal(
            f"{where}: the head's weights differ from the embedding's though tie_word_embeddings is true; correct config.json"
        )

"""transformers' own class for another architecture than Llama, built as strictly as possible.

A key that the class does not know, a tensor that it would drop, a parameter that would stay random
or is not finite: each is refused by name. Nothing of the checkpoint but its config and its
safetensors is looked at, and no code of it is run.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from oracle.formats.errors import Refusal, brief
from oracle.model.checkpoint import Checkpoint
from oracle.pool.neighbour import neighbour_of
from oracle.truth.config import IGNORED, refuse_taken_out
from oracle.truth.weights import not_finite

# A class knows these by its fields, or by the one field that they end up in.
_ROPE = {"rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor"}
_NAMES = {"model_type", "architectures"}
# What says nothing to a Llama may say something to another model.
_HARMLESS = {key for kind in IGNORED.keys() - {"other models"} for key in IGNORED[kind].split()}
# transformers is given the special tokens: it checks a padding token against the vocabulary.
_DROPPED = _HARMLESS - set(IGNORED["special tokens"].split())
_VERSION = f"transformers {transformers.__version__}"
_OTHER_MODEL = "judge another model"


def build(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """The model with eager attention, every parameter from the checkpoint; else a Refusal."""
    neighbour_of(checkpoint)
    config_class, model_class = _classes(checkpoint)
    _check_keys(checkpoint, config_class)
    given = {key: value for key, value in checkpoint.config.items() if key not in _DROPPED}
    # A mixture's grouped product exists in float32 and narrower alone. Its plain loop has the
    # float64 form that vouches for the mean.
    mixture = hasattr(model_class, "set_experts_implementation")
    model, loaded = model_class.from_pretrained(
        None,
        config=config_class.from_dict(copy.deepcopy(given)),
        state_dict=dict(tensors),
        dtype=dtype,
        attn_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
        **({"experts_implementation": "eager"} if mixture else {}),
    )
    _check_loaded(checkpoint, model, loaded)
    _check_values(checkpoint, model, tensors)
    return model


def kinds(model: Any) -> tuple[str, ...]:
    """The kinds of attention that the class says it has here, its own last."""
    return ("sdpa", "eager") if model._supports_sdpa else ("eager",)


def _classes(checkpoint: Checkpoint) -> tuple[Any, Any]:
    where, name = checkpoint.where, checkpoint.config["model_type"]
    # Both import a class when it is looked up, and only then; their `get` does not.
    known = name in CONFIG_MAPPING
    if not known or CONFIG_MAPPING[name] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        lacks = "has no causal language model of it" if known else "does not know it"
        what = f"model_type is {name!r}, and {_VERSION} {lacks}"
        raise Refusal(what, where=where, remedy="take a version that has one, or another model")
    config_class = CONFIG_MAPPING[name]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    own = model_class.__name__
    architectures = checkpoint.config.get("architectures") or [own]
    if own not in architectures:
        what = f"architectures is {brief(architectures)}, expected {own}"
        raise Refusal(what, where=where, remedy="only that can be run")
    taken = inspect.signature(model_class.forward).parameters
    if not {"cache", "past_key_values"} & set(taken) or "logits_to_keep" not in taken:
        what = f"{own} of {_VERSION} takes no cache of keys and values"
        raise Refusal(what, where=where, remedy=_OTHER_MODEL)
    return config_class, model_class


def _check_keys(checkpoint: Checkpoint, config_class: Any) -> None:
    fields = set(inspect.signature(config_class).parameters)
    # Some are made from others and written with them, as a pattern of windows is. A config made of
    # defaults has them too.
    own = fields | set(config_class.attribute_map) | set(config_class().to_dict()) | _NAMES
    own |= _ROPE if {"rope_parameters", "rope_theta"} & fields else set()
    refuse_taken_out(checkpoint.without, own - _HARMLESS, checkpoint.where)
    for key, value in checkpoint.config.items():
        if key not in own and key not in _HARMLESS and value is not None and value is not False:
            lacks = f"as {config_class.__name__} has no such field"
            what = f"unknown key {key!r} ({brief(value)}), which may change the logits, {lacks}"
            raise Refusal(what, where=checkpoint.where, remedy="--ignore-key if it does not")


def _check_loaded(checkpoint: Checkpoint, model: Any, loaded: Mapping[str, Any]) -> None:
    """A parameter that the checkpoint lacks would be random, an unknown tensor be dropped."""
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    dropped = [n for n in checkpoint.tensors if any(re.search(p, n) for p in ignored)]
    lacks = "the checkpoint has no tensor for its {}, which would be random"
    shape = "its {} has another shape than the checkpoint's"
    for odd, words in (
        (loaded["missing_keys"], lacks),
        ([*loaded["unexpected_keys"], *dropped], "it has no use for the checkpoint's {}"),
        ([key[0] for key in loaded["mismatched_keys"]], shape),
    ):
        if odd:
            both = f"{_VERSION} {type(model).__name__} and the checkpoint disagree"
            what, count = f"{both}: {words.format(min(odd))}", f"{len(odd)} such"
            raise Refusal(what, where=checkpoint.folder, remedy=count)


def _check_values(checkpoint: Checkpoint, model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Every parameter is finite and equal to the tensor of its name; a tied head is tied indeed."""
    where = checkpoint.folder
    for name, parameter in model.state_dict().items():
        if not bool(torch.isfinite(parameter).all()):
            raise not_finite(checkpoint, name, str(parameter.dtype).removeprefix("torch."))
        stored = tensors.get(name)
        if stored is None or stored.shape != parameter.shape:
            continue
        if not torch.equal(stored.to(parameter.dtype), parameter):
            what = f"{name}: {_VERSION} has other values than the checkpoint stores"
            raise Refusal(what, where=where, remedy="take another version or model")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = model.config.tie_word_embeddings and head is not None
    # What becomes of a head that is stored beside the embedding differs by version, and by engine.
    if tied and not torch.equal(embedding.weight, head.weight):
        differ = "the head's weights differ from the embedding's"
        what = f"{differ} though tie_word_embeddings is true"
        raise Refusal(what, where=where, remedy="correct config.json")

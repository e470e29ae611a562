"""Configs that both readers of config.json are held to: each takes a case, or each refuses it.

The port reads config.json in `mlxkv.port.config`, the oracle in `oracle.truth.config`, and neither
knows the other: a model that one of them runs and the other refuses could not be judged.
"""

from __future__ import annotations

import json
from typing import Any

BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 6,
    "long_factor": [2.0] * 6,
    "original_max_position_embeddings": 32,
}
# What a PretrainedConfig of transformers 4.44 adds when it is saved whole.
DUMP: dict[str, Any] = json.loads("""
    {"add_cross_attention": false, "bad_words_ids": null, "begin_suppress_tokens": null,
    "chunk_size_feed_forward": 0, "cross_attention_hidden_size": null, "do_sample": false,
    "decoder_start_token_id": null, "diversity_penalty": 0.0, "early_stopping": false,
    "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": null, "finetuning_task":
    null, "forced_bos_token_id": null, "forced_eos_token_id": null, "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0}, "is_decoder": false, "is_encoder_decoder": false, "length_penalty":
    1.0, "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1,
    "num_beams": 1, "prefix": null, "num_return_sequences": 1, "output_attentions": false,
    "output_hidden_states": false, "output_scores": false, "problem_type": null, "pruned_heads": {},
    "return_dict": true, "remove_invalid_values": false, "repetition_penalty": 1.0, "sep_token_id":
    null, "return_dict_in_generate": false, "suppress_tokens": null, "temperature": 1.0,
    "task_specific_params": null, "tf_legacy_loss": false, "tie_encoder_decoder": false,
    "tokenizer_class": null, "top_k": 50, "top_p": 1.0, "torchscript": false, "typical_p": 1.0,
    "use_bfloat16": false, "_name_or_path": "", "transformers_version": "4.44.2"}
""")

TAKEN: dict[str, dict[str, Any]] = {
    "as it is": {},
    "swish, the other name of silu": {"hidden_act": "swish"},
    "no hidden_act": {"hidden_act": ...},
    "hidden_act null": {"hidden_act": None},
    "flags null": {"attention_bias": None, "mlp_bias": None},
    "no rms_norm_eps": {"rms_norm_eps": ...},
    "no max_position_embeddings": {"max_position_embeddings": ...},
    "no rope_theta": {"rope_theta": None},
    "all that transformers 4.44 writes": DUMP,
    "an early conversion's name": {"architectures": ["LLaMAForCausalLM"]},
    "no architectures": {"architectures": None},
    "a model that was saved without its head": {"architectures": ["LlamaModel"]},
    "full attention in every layer": {"layer_types": ["full_attention"] * 3},
    "no layer types": {"layer_types": None},
    "causal, and said so": {"is_causal": True},
    "of another's tools": {"_commit_hash": "a1", "_attn_implementation": "sdpa"},
    "flash attention": {"_flash_attn_2_enabled": True},
    "lengths that nothing reads": {"max_sequence_length": 16384, "seq_length": 8},
    "the tokenizer's length": {"model_max_length": 8, "max_window_layers": 2},
    "a sliding window": {"sliding_window": 8},
    "plain RoPE by type": {"rope_scaling": {"type": "default"}},
    "plain RoPE, not partial": {"rope_scaling": {"type": "default", "partial_rotary_factor": 1}},
    "RoPE's keys empty": {"rope_scaling": {}, "rope_parameters": {}},
    "RoPE's keys null": {"rope_scaling": {"factor": None, "rope_type": None}},
    "linear": {"rope_scaling": LINEAR},
    "linear twice": {"rope_scaling": LINEAR, "rope_parameters": LINEAR},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": YARN},
    "yarn, a key of another type null": {"rope_scaling": YARN | {"low_freq_factor": None}},
    "yarn, finetuned": {"rope_scaling": YARN | {"finetuned": True}},
    "llama3": {"rope_parameters": LLAMA3 | {"rope_theta": 10000.0}},
    "llama3, truncate off": {"rope_scaling": LLAMA3 | {"truncate": False}},
    "longrope": {"rope_scaling": LONGROPE},
    "the original length outside": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "original_max_position_embeddings": 32,
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "another model": {"model_type": "mistral"},
    "no model_type": {"model_type": None},
    "a classifier": {"architectures": ["LlamaForSequenceClassification"]},
    "another activation": {"hidden_act": "gelu"},
    "not causal": {"is_causal": False},
    "an unknown key": {"sliding_windows": 8},
    "an unknown key that is false": {"use_rope": False},
    "an unknown key that is null": {"attention_sinks": None},
    "an unknown key that is empty": {"attention_sinks": {}},
    "quantised by another": {"quantization_config": {"bits": 4}},
    "cross attention": {"cross_attention_hidden_size": 48},
    "pruned heads": {"pruned_heads": {"0": [1]}},
    "interleaved RoPE": {"rope_interleaved": True},
    "partial RoPE": {"partial_rotary_factor": 0.5},
    "max_position_embeddings null": {"max_position_embeddings": None},
    "rms_norm_eps null": {"rms_norm_eps": None},
    "a sliding layer": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "types of too few layers": {"layer_types": ["full_attention"] * 2},
    "layer types that are no list": {"layer_types": "full_attention"},
    "a size that is text": {"vocab_size": "61"},
    "a size that is a flag": {"num_attention_heads": True},
    "heads that cannot be shared": {"num_key_value_heads": 3},
    "an odd head_dim": {"head_dim": 7},
    "an eps of nothing": {"rms_norm_eps": 0},
    "an eps that is no number": {"rms_norm_eps": float("nan")},
    "a flag that is text": {"tie_word_embeddings": "true"},
    "theta below 1": {"rope_theta": 0.5},
    "theta said twice": {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}},
    "theta where nothing reads it": {
        "rope_theta": None,
        "rope_scaling": LINEAR,
        "rope_parameters": LINEAR | {"rope_theta": 5.0},
    },
    "RoPE of an unknown type": {"rope_scaling": {"rope_type": "proportional", "factor": 4.0}},
    "RoPE without a type": {"rope_scaling": {"factor": 4.0}},
    "RoPE without a type beside one with": {
        "rope_scaling": LINEAR,
        "rope_parameters": {"factor": 4.0},
    },
    "RoPE of two types": {"rope_scaling": LINEAR | {"type": "dynamic"}},
    "RoPE said twice": {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 8.0}},
    "RoPE by layer": {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
    "linear with an unknown key": {"rope_scaling": LINEAR | {"x": 1}},
    "linear with an unknown key that is null": {"rope_scaling": LINEAR | {"x": None}},
    "linear with an unknown key that is false": {"rope_scaling": LINEAR | {"x": False}},
    "linear with llama3's key": {"rope_scaling": LINEAR | {"low_freq_factor": 1.0}},
    "linear without a factor": {"rope_scaling": {"rope_type": "linear"}},
    "a factor below 1": {"rope_scaling": LINEAR | {"factor": 0.5}},
    "plain RoPE with an original length": {"original_max_position_embeddings": 32},
    "yarn, truncate null": {"rope_scaling": YARN | {"truncate": None}},
    "yarn, its bounds reversed": {"rope_scaling": YARN | {"beta_fast": 0.5}},
    "yarn, two original lengths": {
        "rope_scaling": YARN,
        "original_max_position_embeddings": 64,
    },
    "llama3, its bounds reversed": {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}},
    "longrope, too few factors": {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 5}},
}
ONLY_THE_ORACLE_TAKES: dict[str, dict[str, Any]] = {
    # Both objects describe the same RoPE, since either mscale alone says nothing and 32 is what
    # beta_fast is if absent. The oracle compares what they describe, the port what they say.
    "an mscale without effect in one object of two": {
        "rope_scaling": YARN,
        "rope_parameters": YARN | {"mscale": 0.7},
    },
    "a default in one object of two": {
        "rope_scaling": YARN,
        "rope_parameters": YARN | {"beta_fast": 32},
    },
}
"""The difference that is known."""


def made(changes: dict[str, Any]) -> dict[str, Any]:
    """The base config with these changes; a key that is `...` is left out."""
    return {key: value for key, value in (BASE | changes).items() if value is not ...}

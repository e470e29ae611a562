"""The keys of a Llama's config.json: those that are used, and those that are not, each with why.

Every other key is refused by name, whatever its value.
"""

from __future__ import annotations

from typing import Any

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
"""The largest of each that is believed: what a damaged or hostile file says must not be made, nor
looped over."""

USED = (
    *SIZES,
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    "rms_norm_eps",
    "hidden_act",
    "model_type",
    "layer_types",
)

_IGNORED = {
    "weights are cast to the run's dtype": "torch_dtype dtype use_bfloat16",
    "the cache given to a call decides": "use_cache",
    "acts in training only": """attention_dropout hidden_dropout embd_pdrop resid_pdrop
        gradient_checkpointing""",
    "used when weights are made, not when they are loaded": "initializer_range",
    "only splits the same products": "pretraining_tp chunk_size_feed_forward",
    "Llama has none, in transformers too": "sliding_window max_window_layers",
    "max_position_embeddings decides, in transformers too": """max_sequence_length seq_length
        model_max_length""",
    "the tokenizer decides": """bos_token_id sep_token_id tokenizer_class prefix
        decoder_start_token_id""",
    "greedy runs have a fixed length": "eos_token_id",
    "there is no padding": "pad_token_id",
    "says where the file came from": """_name_or_path name_or_path _commit_hash transformers_version
        unsloth_version unsloth_fixed is_llama_config""",
    "for another runtime": "transformers.js_config torchscript tf_legacy_loss",
    "chooses an implementation, not a result": """_attn_implementation _attn_implementation_autoset
        _flash_attn_2_enabled""",
    "asks for another form of the output": """output_attentions output_hidden_states output_scores
        return_dict return_dict_in_generate""",
    "of classifiers": """id2label label2id num_labels problem_type finetuning_task
        task_specific_params""",
    "for generation": """max_length min_length max_new_tokens do_sample early_stopping num_beams
        num_beam_groups temperature top_k top_p typical_p diversity_penalty repetition_penalty
        length_penalty exponential_decay_length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens
        forced_bos_token_id forced_eos_token_id num_return_sequences remove_invalid_values""",
}
IGNORED = {key: reason for reason, keys in _IGNORED.items() for key in keys.split()}
"""Keys that change nothing whatever they say, each with the reason."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "architectures": (["LlamaForCausalLM"], ["LLaMAForCausalLM"], ["LlamaModel"], []),
    "is_causal": (True,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "use_sliding_window": (False,),
    "pruned_heads": ({}, []),
    "rope_interleaved": (False,),
    "rope_traditional": (False,),
    "partial_rotary_factor": (1.0, 1),
}
"""Keys that a Llama may carry only with one of these values, or null: they change nothing."""

NEUTRAL = "changes nothing at this value; another is refused"
"""The reason why a key of HARMLESS is ignored."""

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
"""What transformers takes where the key is absent; null says nothing that could be followed."""

KNOWN = {*USED, *IGNORED, *HARMLESS}


def is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether it is one of these values, of the same type: 1 is not true, nor 1.0."""
    return any(type(value) is type(one) and value == one for one in values)

"""config.json: every key used, ignored by name, or refused by name; nothing filled in without a
word.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import config_cases
import models
import numpy as np
import pytest
from configs import (
    LINEAR,
    LLAMA2_7B,
    LLAMA3_ROPE,
    LLAMA32_1B,
    RESAVED,
    SMOLLM2,
    TINYLLAMA,
    YARN,
    read,
    refusal,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxkv.port import rope
from mlxkv.port.config.keys import HARMLESS, IGNORED, USED
from mlxkv.port.config.llama import ConfigError, LlamaConfig, Rope
from mlxkv.port.config.rope import KEYS
from oracle.formats.errors import Refusal
from oracle.truth import config as truth
from oracle.truth.config import read_config

ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
ROPE_KEYS = sorted({"type", "rope_type", "rope_theta"}.union(*KEYS.values()))


def test_smollm2() -> None:
    assert read(SMOLLM2) == LlamaConfig(
        576, 1536, 30, 9, 3, 64, 49152, 8192, 1e-5, Rope(100000.0), tie_word_embeddings=True
    )
    assert read(SMOLLM2).notes == ()


def test_llama_3_2_1b() -> None:
    assert read(LLAMA32_1B) == LlamaConfig(
        2048, 8192, 16, 32, 8, 64, 128256, 131072, 1e-5, LLAMA3_ROPE, tie_word_embeddings=True
    )
    assert read(LLAMA32_1B).notes == ()


def test_tinyllama() -> None:
    assert read(TINYLLAMA) == LlamaConfig(
        2048, 5632, 22, 32, 4, 64, 32000, 2048, 1e-5, Rope(10000.0)
    )


def test_llama_2_7b_whose_file_leaves_much_to_transformers() -> None:
    found = read(LLAMA2_7B)

    assert found == LlamaConfig(4096, 11008, 32, 32, 32, 128, 32000, 4096, 1e-5, Rope(10000.0))
    assert found.defaults == (
        ("head_dim", 128),
        ("rope_theta", 10000.0),
        ("attention_bias", False),
        ("mlp_bias", False),
    )


def test_a_linear_one() -> None:
    assert read(LINEAR) == LlamaConfig(
        4096, 11008, 32, 32, 32, 128, 32000, 16384, 1e-5, Rope(10000.0, "linear", 4.0)
    )


def test_a_yarn_one() -> None:
    rope = Rope(10000.0, "yarn", 16.0, original_max_position_embeddings=4096)
    assert read(YARN) == LlamaConfig(4096, 11008, 32, 32, 32, 128, 32000, 65536, 1e-5, rope)
    assert read(YARN).defaults[1:5] == (
        ("rope_theta", 10000.0),
        ("beta_fast", 32.0),
        ("beta_slow", 1.0),
        ("truncate", True),
    )


@pytest.mark.parametrize("value", [..., None, 2, [128001, 128008, 128009], []])
def test_the_end_of_text_is_not_the_configs_business(value: Any) -> None:
    assert read(LLAMA32_1B, eos_token_id=value) == read(LLAMA32_1B)


def test_the_same_model_saved_by_transformers_5_is_the_same_config() -> None:
    assert read(RESAVED) == read(LLAMA32_1B)
    assert read(RESAVED).notes == ()


# Sizes and flags, each dropped or of a wrong kind.

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
OPTIONAL = {"num_key_value_heads": 9, "head_dim": 64}


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [..., None, "8", -1, 0, 8.0, True, [8]])
def test_a_size_that_is_no_positive_whole_number_is_refused_by_name(key: str, value: Any) -> None:
    shown, expected = repr(None if value is ... else value), "a whole number from 1"
    if key == "max_position_embeddings" and value is ...:
        return  # the one size that transformers has a usual default for
    if key == "max_position_embeddings" and value is None:
        expected = "a value, or no such key, which stands for 2048"

    assert (
        refusal(SMOLLM2, **{key: value}) == f"config.json: {key}: expected {expected}, got {shown}"
    )


def test_absent_positions_are_those_of_transformers_and_that_is_said() -> None:
    found = read(SMOLLM2, max_position_embeddings=...)

    assert found.max_position_embeddings == 2048
    assert ("max_position_embeddings", 2048) in found.defaults


def test_all_sizes_that_are_missing_are_named_at_once() -> None:
    found = refusal(SMOLLM2, vocab_size=..., hidden_size=None)

    expected = "hidden_size, vocab_size: expected a whole number from 1 for each, got none"
    assert found == f"config.json: {expected}"


def test_all_unknown_keys_are_named_at_once_with_their_remedy() -> None:
    found = refusal(SMOLLM2, use_rope=False, attention_sinks=None, x={"a": "b"})

    assert (
        found
        == "config.json: use_rope, attention_sinks, x: expected no such key in a Llama config "
        "(it may change the model), got False, None, {'a': 'b'}; --ignore-key use_rope "
        "--ignore-key attention_sinks --ignore-key x if it does not"
    )


def test_layer_types_of_full_attention_are_taken_and_no_others() -> None:
    n = SMOLLM2["num_hidden_layers"]

    assert read(SMOLLM2, layer_types=["full_attention"] * n) == read(SMOLLM2)
    for value in (["full_attention"] * (n - 1), ["sliding_attention"] * n, [], "full_attention"):
        found = refusal(SMOLLM2, layer_types=value)
        assert found.startswith(
            f"config.json: layer_types: expected 'full_attention' for each of {n} layers, got "
        )


MOST = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "head_dim": 65_536,
    "hidden_size": 1_048_576,
    "intermediate_size": 16_777_216,
    "vocab_size": 16_777_216,
    "max_position_embeddings": 16_777_216,
}


@pytest.mark.parametrize("key", MOST)
@pytest.mark.parametrize("more", [1, 10**9, 10**400])
def test_a_size_far_above_every_llama_is_refused_by_name_and_at_once(key: str, more: int) -> None:
    began, value = time.perf_counter(), MOST[key] + more

    expected = (
        f"config.json: {key}: expected at most {MOST[key]} (no Llama comes near it), got "
        f"{repr(value)[:120]}"
    )
    assert refusal(SMOLLM2, **{key: value}) == expected
    assert time.perf_counter() - began < 0.5


def test_sizes_at_those_bounds_are_read() -> None:
    found = read(SMOLLM2, **MOST)

    assert all(getattr(found, key) == value for key, value in MOST.items())


@pytest.mark.parametrize("key", OPTIONAL)
@pytest.mark.parametrize("value", ["8", -1, 0, 8.0, True])
def test_an_optional_size_of_a_wrong_kind_is_refused_by_name(key: str, value: Any) -> None:
    assert (
        refusal(SMOLLM2, **{key: value})
        == f"config.json: {key}: expected a whole number from 1, got {value!r}"
    )


@pytest.mark.parametrize("value", [..., None])
def test_absent_kv_heads_are_the_query_heads_and_that_is_said(value: Any) -> None:
    found = read(SMOLLM2, num_key_value_heads=value)

    assert found.num_key_value_heads == 9
    assert ("num_key_value_heads", 9) in found.defaults
    assert "num_key_value_heads" not in dict(read(SMOLLM2).defaults)


@pytest.mark.parametrize("value", [..., None, 64])
def test_an_absent_head_dim_is_hidden_size_over_heads(value: Any) -> None:
    assert read(SMOLLM2, head_dim=value) == read(SMOLLM2)


def test_head_dim_need_not_be_hidden_size_over_heads() -> None:
    found = read(
        SMOLLM2, hidden_size=1792, num_attention_heads=24, num_key_value_heads=8, head_dim=128
    )

    assert (found.head_dim, found.hidden_size) == (128, 1792)


def test_a_head_dim_that_cannot_be_worked_out_is_refused() -> None:
    expected = (
        "config.json: head_dim: expected a value, since hidden_size 577 is no multiple of "
        "num_attention_heads 9, got None"
    )
    assert refusal(SMOLLM2, hidden_size=577) == expected


def test_an_odd_head_dim_is_refused() -> None:
    assert (
        refusal(SMOLLM2, head_dim=7)
        == "config.json: head_dim: expected an even number (RoPE turns pairs), got 7"
    )


def test_query_heads_must_be_a_multiple_of_kv_heads() -> None:
    expected = (
        "config.json: num_key_value_heads: expected a divisor of num_attention_heads 9, got 4"
    )
    assert refusal(SMOLLM2, num_key_value_heads=4) == expected


def test_an_absent_eps_is_that_of_transformers_and_that_is_said() -> None:
    assert read(SMOLLM2, rms_norm_eps=...).rms_norm_eps == 1e-6
    assert ("rms_norm_eps", 1e-6) in read(SMOLLM2, rms_norm_eps=...).defaults
    assert (
        refusal(SMOLLM2, rms_norm_eps=None)
        == "config.json: rms_norm_eps: expected a value, or no such key, which stands for 1e-06, "
        "got None"
    )


@pytest.mark.parametrize("value", ["8", -1, 0, True, float("nan"), float("inf"), 10**310])
def test_a_wrong_eps_is_refused_by_name(value: Any) -> None:
    assert (
        refusal(SMOLLM2, rms_norm_eps=value)
        == f"config.json: rms_norm_eps: expected a number above 0, got {repr(value)[:120]}"
    )


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_flags_are_false_when_absent_and_refused_when_no_flag(key: str) -> None:
    for absent in (..., None, False):
        assert getattr(read(SMOLLM2, **{key: absent}), key) is False
    assert getattr(read(SMOLLM2, **{key: True}), key) is True
    for value in ("8", -1, 0, 1):
        assert (
            refusal(SMOLLM2, **{key: value})
            == f"config.json: {key}: expected true or false, got {value!r}"
        )


@pytest.mark.parametrize("value", [..., None, "mistral", "qwen2", 8])
def test_another_architecture_is_refused(value: Any) -> None:
    shown = repr(None if value is ... else value)

    expected = (
        f"config.json: model_type: expected 'llama' (the port knows no other architecture), got "
        f"{shown}"
    )
    assert refusal(SMOLLM2, model_type=value) == expected


def test_another_activation_is_refused() -> None:
    assert read(SMOLLM2, hidden_act=...) == read(SMOLLM2)
    for value in ("gelu", "8", -1, 0):
        assert (
            refusal(SMOLLM2, hidden_act=value)
            == f"config.json: hidden_act: expected 'silu', got {value!r}"
        )


# Keys that the port does not use.

IGNORED_KEYS = """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled
    _name_or_path attention_dropout bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing hidden_dropout id2label initializer_range is_llama_config label2id
    length_penalty max_length max_new_tokens max_sequence_length max_window_layers min_length
    model_max_length name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
    pretraining_tp problem_type remove_invalid_values repetition_penalty resid_pdrop return_dict
    return_dict_in_generate sep_token_id seq_length sliding_window suppress_tokens
    task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unsloth_fixed
    unsloth_version use_bfloat16 use_cache
"""
VALUES: list[Any] = [8, "x", True, None, [], {"a": 1}]


def test_no_key_is_both_used_and_left_alone() -> None:
    assert len({*USED, *IGNORED, *HARMLESS}) == len(USED) + len(IGNORED) + len(HARMLESS)


EVERY_KEY = sorted({*config_cases.BASE, *config_cases.DUMP, *USED, *IGNORED, *HARMLESS, "x"})


@given(key=st.sampled_from(EVERY_KEY), value=st.deferred(lambda: ODD))
@settings(max_examples=400, deadline=500)
def test_every_key_is_used_or_listed_as_ignored_or_refused_by_name(key: str, value: Any) -> None:
    found = read_or_refused(config_cases.made({key: value}))

    if isinstance(found, str):
        assert key in found or key in ROPE_OBJECTS
    else:
        listed = dict(found.ignored)
        assert (key in listed) is (key not in USED), key
        assert all(len(reason) > 10 for reason in listed.values())


@pytest.mark.parametrize("key", config_cases.DUMP)
def test_every_key_of_a_whole_dump_is_used_or_listed_as_ignored(key: str) -> None:
    found = LlamaConfig.from_json(config_cases.made(config_cases.DUMP))

    assert (key in dict(found.ignored)) is (key not in USED)


@pytest.mark.parametrize("value", ["is_causal", "is_decoder", "pruned_heads", "architectures"])
def test_a_key_that_is_null_is_listed_as_ignored_too(value: str) -> None:
    assert value in dict(LlamaConfig.from_json(config_cases.made({value: None})).ignored)


def test_both_readers_know_the_same_keys() -> None:
    ignored = {key for keys in truth.IGNORED.values() for key in keys.split()}
    known = {*truth._USED, *truth._NEUTRAL, *ignored}

    assert known == {*USED, *IGNORED, *HARMLESS}
    assert len(known) == len(truth._USED) + len(truth._NEUTRAL) + len(ignored)


NULLS = {
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 12,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize("key", NULLS)
def test_a_null_is_filled_in_and_that_is_said(key: str) -> None:
    found = LlamaConfig.from_json(config_cases.made({key: None}))
    absent = LlamaConfig.from_json(config_cases.made({key: ...}))

    assert (found, found.defaults) == (absent, absent.defaults)
    assert (key, NULLS[key]) in found.defaults
    said = f"{key} null counts as absent: {json.dumps(NULLS[key])} filled in"
    assert (found.notes, absent.notes) == ((said,), ())


def test_no_key_is_ignored_but_those_listed_here_and_each_for_a_reason() -> None:
    assert sorted(IGNORED) == IGNORED_KEYS.split()
    assert all(len(reason) > 10 for reason in IGNORED.values())


@pytest.mark.parametrize("key", sorted(set(IGNORED_KEYS.split()) - {"sliding_window"}))
def test_keys_of_no_effect_are_let_through_whatever_they_say(key: str) -> None:
    for value in VALUES:
        assert read(SMOLLM2, **{key: value}) == read(SMOLLM2)
        assert read(SMOLLM2, **{key: value}).notes == ()


@pytest.mark.parametrize("value", [8, "x", True, 0, 0.0, "", [], {}, None, False])
def test_an_unknown_key_is_refused_by_name(value: Any) -> None:
    expected = (
        f"config.json: sliding_windows: expected no such key in a Llama config (it may change "
        f"the model), got {value!r}; --ignore-key sliding_windows if it does not"
    )
    assert refusal(SMOLLM2, sliding_windows=value) == expected


@pytest.mark.parametrize("key", ["rope_interleaved", "rope_traditional"])
def test_interleaved_rope_is_refused(key: str) -> None:
    for harmless in (False, None):
        assert read(SMOLLM2, **{key: harmless}) == read(SMOLLM2)
    for value in (True, 1, 0, 0.0, "8", []):
        assert (
            refusal(SMOLLM2, **{key: value})
            == f"config.json: {key}: expected False (another value changes the model), got "
            f"{value!r}"
        )


def test_a_partial_rotation_is_refused() -> None:
    assert (
        read(SMOLLM2, partial_rotary_factor=1.0)
        == read(SMOLLM2, partial_rotary_factor=1)
        == read(SMOLLM2)
    )
    for value in (0.5, True, [1.0]):
        expected = (
            f"config.json: partial_rotary_factor: expected 1.0 (another value changes the "
            f"model), got {value!r}"
        )
        assert refusal(SMOLLM2, partial_rotary_factor=value) == expected
        inner = {"type": "default", "partial_rotary_factor": value}
        expected = expected.replace("config.json: ", "config.json: rope_scaling.")
        assert refusal(SMOLLM2, rope_scaling=inner) == expected


def test_an_encoder_decoder_is_refused() -> None:
    expected = (
        "config.json: is_encoder_decoder: expected False (another value changes the model), got "
        "True"
    )
    assert refusal(SMOLLM2, is_encoder_decoder=True) == expected


def test_a_sliding_window_is_ignored_as_in_transformers_and_that_is_said() -> None:
    assert read(SMOLLM2, sliding_window=8) == read(SMOLLM2)
    assert read(SMOLLM2, sliding_window=8).notes == (
        "sliding_window 8 ignored: Llama has none, in transformers too",
    )
    assert read(SMOLLM2, sliding_window=None).notes == ()


# Keys that a person takes out.


def test_an_unknown_key_that_was_taken_out_is_no_matter() -> None:
    assert LlamaConfig.from_json(SMOLLM2, without=("auto_map",)) == read(SMOLLM2)


@pytest.mark.parametrize("key", [*USED, *HARMLESS])
def test_no_key_that_the_model_depends_on_can_be_taken_out(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LlamaConfig.from_json(SMOLLM2, without=("auto_map", key))

    assert (
        str(caught.value)
        == f"config.json: {key}: expected it to be read, got --ignore-key {key}; the model "
        f"depends on it"
    )


# Whatever a file may say.

ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.sampled_from([0, 1, 2, 10**9, 2**31, 1e308, 5e-324])
    | st.floats()
    | st.sampled_from(
        [
            "",
            "8",
            "default",
            "linear",
            "dynamic",
            "yarn",
            "llama3",
            "longrope",
            "proportional",
            "x" * 300,
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*ROPE_KEYS, "x"]), inner, max_size=4)
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=500)
@given(
    base=st.sampled_from([SMOLLM2, LLAMA32_1B, RESAVED, LLAMA2_7B, YARN]),
    changes=st.dictionaries(st.sampled_from([*USED, "x"]), ODD, max_size=3),
)
def test_any_values_make_a_config_or_one_short_line(
    base: dict[str, Any], changes: dict[str, Any]
) -> None:
    found = read_or_refused(base | changes)

    if isinstance(found, str):
        assert "\n" not in found
        assert len(found) < 400
    else:
        assert np.isfinite(rope.inverse_frequencies(found.rope, found.head_dim)).all()
        assert 0 < rope.attention_factor(found.rope) < np.inf


def read_or_refused(value: dict[str, Any], reader: Any = LlamaConfig.from_json) -> Any:
    """What a reader makes of it, or its refusal."""
    try:
        return reader(value)
    except Refusal as error:
        return str(error)


# The same files as the oracle's reader.


@pytest.mark.parametrize("case", config_cases.TAKEN)
def test_what_both_readers_take_is_taken(case: str) -> None:
    assert isinstance(read_or_refused(config_cases.made(config_cases.TAKEN[case])), LlamaConfig)


@pytest.mark.parametrize("case", [*config_cases.REFUSED, *config_cases.ONLY_THE_ORACLE_TAKES])
def test_what_both_readers_refuse_is_refused(case: str) -> None:
    changes = (config_cases.REFUSED | config_cases.ONLY_THE_ORACLE_TAKES)[case]
    assert isinstance(read_or_refused(config_cases.made(changes)), str)


# The known difference: a key that changes nothing, in one object of two.
KNOWN_DIFFERENCE = "expected it in both rope_scaling and rope_parameters, got "


@settings(max_examples=400, deadline=500)
@given(
    base=st.sampled_from([SMOLLM2, LLAMA32_1B, RESAVED, LLAMA2_7B, YARN]),
    changes=st.dictionaries(st.sampled_from([*USED, *IGNORED, *HARMLESS, "x"]), ODD, max_size=3),
    change=st.dictionaries(st.sampled_from(ROPE_KEYS), ODD, max_size=2),
)
def test_both_readers_accept_alike_or_both_refuse(
    base: dict[str, Any], changes: dict[str, Any], change: dict[str, Any]
) -> None:
    value = base | changes
    for key in ("rope_scaling", "rope_parameters"):
        if change and isinstance(value.get(key), dict):
            value[key] = value[key] | change
    port, oracle = read_or_refused(value), read_or_refused(value, read_config)
    if isinstance(port, str) or isinstance(oracle, str):
        known = isinstance(port, str) and KNOWN_DIFFERENCE in port
        assert isinstance(port, str) is isinstance(oracle, str) or known, (port, oracle)
        return
    assert (port.hidden_size, port.intermediate_size) == (oracle.hidden, oracle.mlp)
    assert (port.num_attention_heads, port.num_key_value_heads) == (
        oracle.n_heads,
        oracle.n_kv_heads,
    )
    assert (port.num_hidden_layers, port.head_dim) == (oracle.n_layers, oracle.head_dim)
    assert (port.vocab_size, port.max_position_embeddings) == (
        oracle.vocab_size,
        oracle.max_positions,
    )
    assert (port.rms_norm_eps, port.rope.theta) == (oracle.eps, oracle.theta)
    assert port.tie_word_embeddings == oracle.tied
    assert (port.attention_bias, port.mlp_bias) == (oracle.attention_bias, oracle.mlp_bias)
    scaling = oracle.scaling
    assert port.rope.rope_type == (type(scaling).__name__.lower() if scaling else "default")


# Files.


def test_a_file_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "config.json").write_text(json.dumps(SMOLLM2), encoding=encoding)
        assert LlamaConfig.from_file(tmp_path / "config.json") == read(SMOLLM2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "a JSON list, expected an object"),
        (b"8", "a JSON int, expected an object"),
        (b"null", "a JSON NoneType, expected an object"),
        (
            b"{",
            "not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char "
            "1))",
        ),
        (b"", "not JSON (Expecting value: line 1 column 1 (char 0))"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused_by_its_path(
    content: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)

    with pytest.raises(Refusal) as caught:
        LlamaConfig.from_file(path)

    assert str(caught.value) == f"{path}: {message}; correct it or download it again"


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000])
def test_a_file_of_garbage_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)

    with pytest.raises(
        Refusal, match=r"config.json: not JSON \([^\n]+\); correct it or download it again$"
    ):
        LlamaConfig.from_file(path)


def test_a_missing_file_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "config.json"

    with pytest.raises(Refusal) as caught:
        LlamaConfig.from_file(path)

    assert (
        str(caught.value)
        == f"{path}: cannot be read (No such file or directory); correct it or download it again"
    )


def test_a_refusal_names_the_file_and_stays_one_short_line() -> None:
    with pytest.raises(Refusal) as caught:
        LlamaConfig.from_json(SMOLLM2 | {"weird": "x\ny" * 1000}, where="/models/a/config.json")

    assert str(caught.value).startswith("/models/a/config.json: weird: expected no such key")
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", models.LAYOUTS)
def test_every_layout_of_the_tiny_models_is_read(layout: str) -> None:
    found = LlamaConfig.from_json(models.config(layout))

    assert (found.num_key_value_heads, found.head_dim) == {
        "mha": (4, 8),
        "gqa": (2, 8),
        "mqa": (1, 12),
        "llama3": (2, 8),
    }[layout]
    assert found.notes == ()

"""The oracle's reading of config.json: used, ignored or refused by name."""

import json
import math

import config_cases
import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.formats.errors import Refusal
from oracle.formats.trace import TAPS
from oracle.model.checkpoint import resolve
from oracle.truth import llama as truth
from oracle.truth.config import Config, check_weights, effective, read_config
from oracle.truth.rope import Dynamic, Linear, Llama3, LongRope, Yarn

SCALING = models.LLAMA3
READ = Llama3(8.0, 1.0, 4.0, 32)
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 32,
}


def refused(**changes):
    with pytest.raises(Refusal) as caught:
        read_config(models.config_of("mha", **changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_size_and_constant_is_read():
    config = read_config(models.config_of("gqa", tie_word_embeddings=False, mlp_bias=True))
    assert (
        config.n_layers,
        config.hidden,
        config.mlp,
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
    ) == (3, 48, 72, 6, 2, 10)
    assert (config.vocab_size, config.max_positions, config.eps, config.theta, config.scaling) == (
        61,
        128,
        1e-5,
        100000.0,
        None,
    )
    assert (config.tied, config.attention_bias, config.mlp_bias, config.interleaved) == (
        False,
        False,
        True,
        False,
    )


def test_what_is_absent_gets_transformers_own_default():
    absent = (
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "hidden_act",
    )
    config = read_config(models.config_of("mha", **dict.fromkeys((*absent, "architectures"))))
    assert (config.n_kv_heads, config.head_dim, config.eps, config.theta) == (4, 12, 1e-6, 10000.0)
    assert (config.tied, config.attention_bias, config.mlp_bias) == (False, False, False)


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": SCALING}, 5e5, READ),
        ({"rope_theta": None, "rope_parameters": SCALING | {"rope_theta": 5e5}}, 5e5, READ),
        (
            {
                "rope_theta": 5e5,
                "rope_parameters": SCALING | {"rope_theta": 5e5},
                "rope_scaling": SCALING,
            },
            5e5,
            READ,
        ),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 7, "rope_type": "default"}},
            7.0,
            None,
        ),
        ({"rope_theta": 7, "rope_scaling": {"type": "default"}}, 7.0, None),
        (
            {
                "rope_scaling": {k: v for k, v in SCALING.items() if k != "rope_type"}
                | {"type": "llama3"}
            },
            10000.0,
            READ,
        ),
        ({"rope_scaling": {}, "rope_parameters": {}}, 10000.0, None),
        (
            {
                "partial_rotary_factor": 1.0,
                "rope_parameters": {"partial_rotary_factor": 1.0, "rope_type": "default"},
            },
            10000.0,
            None,
        ),
    ],
)
def test_both_generations_of_rope_keys_are_read(changes, theta, scaling):
    config = read_config(models.config_of("mha", **changes))
    assert (config.theta, config.scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral', expected 'llama'"),
        ({"model_type": None}, "no model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, "unknown key 'quantization_config'"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "unknown key 'auto_map'"),
        ({"attention_multiplier": 2.0}, "unknown key 'attention_multiplier'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "61"}, "vocab_size is '61'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size 48 is no multiple"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings is 'true'"),
        ({"rope_scaling": [1]}, "rope_scaling is [1]"),
        (
            {"rope_scaling": {"rope_type": "proportional", "factor": 4.0}},
            "rope_type is 'proportional', expected one of 'default', 'linear'",
        ),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 4.0}}, "rope_type is ['linear']"),
        (
            {"rope_scaling": LINEAR | {"original_max_position_embeddings": 32}},
            "unknown key 'original_max_position_embeddings'",
        ),
        ({"rope_scaling": LINEAR | {"factor": 0.5}}, "factor is 0.5, expected a number from 1"),
        ({"rope_scaling": LINEAR | {"factor": True}}, "factor is True"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "factor is missing"),
        ({"rope_scaling": YARN | {"factor": None}}, "factor is missing"),
        (
            {"rope_scaling": YARN | {"truncate": None}},
            "truncate is missing, expected true or false",
        ),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate is 1, expected true or false"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": None}},
            "original_max_position_embeddings is missing",
        ),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 2**25}},
            "expected at most 16777216",
        ),
        ({"rope_scaling": YARN | {"beta_fast": 0}}, "beta_fast is 0"),
        (
            {"rope_scaling": YARN | {"beta_fast": 0.5}},
            "beta_fast is 0.5, expected at least beta_slow 1.0",
        ),
        ({"rope_scaling": YARN | {"mscale": []}}, "mscale is []"),
        ({"rope_scaling": YARN | {"mscale_all_dim": -1}}, "mscale_all_dim is -1"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor is 0"),
        ({"rope_scaling": YARN | {"attention_factor": 10**400}}, "attention_factor is 1000"),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 64},
            "original_max_position_embeddings is 32, but 64 outside of it",
        ),
        (
            {"original_max_position_embeddings": 64},
            "unknown key 'original_max_position_embeddings' (64) for rope_type 'default'",
        ),
        (
            {"rope_scaling": LONGROPE | {"long_factor": [1.0] * 5}},
            "expected a list of 6 numbers, one for each pair of head_dim",
        ),
        ({"rope_scaling": LONGROPE | {"short_factor": None}}, "short_factor is missing"),
        ({"rope_scaling": LONGROPE | {"short_factor": [1.0] * 5 + ["1"]}}, "short_factor is '1'"),
        (
            {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 5 + [1e-9]}},
            "short_factor is 1e-09, expected numbers above 1e-06",
        ),
        (
            {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 1}},
            "expected a whole number from 2",
        ),
        ({"rope_theta": 1.0}, "rope_theta is 1.0, expected a number above 1"),
        (
            {
                "rope_theta": None,
                "rope_scaling": LINEAR,
                "rope_parameters": LINEAR | {"rope_theta": 5e5},
            },
            "rope_theta is in rope_parameters alone",
        ),
        ({"partial_rotary_factor": True}, "partial_rotary_factor is True"),
        (
            {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected at most 10000"),
        (
            {"num_attention_heads": 10**9},
            "num_attention_heads is 1000000000, expected at most 10000",
        ),
        (
            {"num_key_value_heads": 10**9},
            "num_key_value_heads is 1000000000, expected at most 10000",
        ),
        ({"head_dim": 10**9}, "head_dim is 1000000000, expected at most 65536"),
        ({"hidden_size": 10**400}, "hidden_size is 1000"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648, expected at most 16777216"),
        (
            {"max_position_embeddings": 2**60},
            "max_position_embeddings is 1152921504606846976, expected at most 16777216",
        ),
        ({"rope_scaling": {"type": "foo"}}, "rope_type is 'foo'"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_type is None"),
        (
            {"rope_scaling": SCALING | {"type": "linear"}},
            "rope_type is 'llama3' but type is 'linear'",
        ),
        ({"rope_scaling": SCALING | {"beta": 1}}, "unknown key 'beta'"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "unknown key 'factor'"),
        ({"rope_scaling": SCALING | {"factor": "8"}}, "factor is '8'"),
        ({"rope_scaling": SCALING | {"low_freq_factor": None}}, "low_freq_factor is missing"),
        ({"rope_scaling": SCALING | {"low_freq_factor": 4.0}}, "low_freq_factor is 4.0"),
        (
            {"rope_scaling": SCALING | {"original_max_position_embeddings": None}},
            "original_max_position_embeddings is missing",
        ),
        (
            {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}},
            "rope_theta says 10000.0 but rope_parameters.rope_theta says 5.0",
        ),
        (
            {"rope_scaling": SCALING, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling says Llama3",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_type is None"),
    ],
)
def test_what_would_change_the_logits_is_refused_by_name(changes, named):
    message = refused(**changes)
    assert named in message
    assert message.startswith("config.json: ")


FEWER = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope_scaling": LINEAR}, Linear(4.0)),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, Dynamic(4.0)),
        ({"rope_scaling": YARN}, Yarn(4.0, 32, 32.0, 1.0, True, 0.1 * math.log(4) + 1)),
        (
            {"rope_scaling": YARN | {"finetuned": True, "low_freq_factor": None}},
            Yarn(4.0, 32, 32.0, 1.0, True, 0.1 * math.log(4) + 1),
        ),
        ({"rope_scaling": FEWER}, Yarn(4.0, 128, 32.0, 1.0, True, 0.1 * math.log(4) + 1)),
        (
            {"rope_scaling": FEWER, "original_max_position_embeddings": 32},
            Yarn(4.0, 32, 32.0, 1.0, True, 0.1 * math.log(4) + 1),
        ),
        (
            {
                "rope_parameters": YARN
                | {
                    "beta_fast": 16,
                    "beta_slow": 2,
                    "truncate": False,
                    "attention_factor": 1.3,
                    "mscale": 2,
                }
            },
            Yarn(4.0, 32, 16.0, 2.0, False, 1.3),
        ),
        (
            {"rope_scaling": YARN | {"mscale": 0.7}},
            Yarn(4.0, 32, 32.0, 1.0, True, 0.1 * math.log(4) + 1),
        ),
        (
            {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0}},
            Yarn(4.0, 32, 32.0, 1.0, True, 0.1 * math.log(4) + 1),
        ),
        (
            {"rope_scaling": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}},
            Yarn(4.0, 32, 32.0, 1.0, True, (1 + 0.2 * math.log(4)) / (1 + 0.05 * math.log(4))),
        ),
        (
            {"rope_scaling": LONGROPE},
            LongRope(tuple(SHORT), tuple(LONG), 32, math.sqrt(1 + math.log(4) / math.log(32))),
        ),
        (
            {"rope_scaling": LONGROPE | {"factor": 1.0}},
            LongRope(tuple(SHORT), tuple(LONG), 32, 1.0),
        ),
        (
            {"rope_scaling": LONGROPE | {"attention_factor": 1.5}},
            LongRope(tuple(SHORT), tuple(LONG), 32, 1.5),
        ),
    ],
)
def test_every_type_is_read_with_transformers_own_defaults(changes, scaling):
    found = read_config(models.config_of("mha", **changes)).scaling
    assert type(found) is type(scaling)
    for name in scaling.__slots__:
        expected = getattr(scaling, name)
        assert getattr(found, name) == (
            pytest.approx(expected, rel=1e-15) if name == "attention" else expected
        ), name


# As the hub has them; what is left out is left to transformers.
PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "model_type": "llama",
    "pretraining_tp": 1,
    "use_cache": True,
}
LLAMA2 = PLAIN | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "torch_dtype": "float16",
    "tie_word_embeddings": False,
    "transformers_version": "4.31.0.dev0",
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMOLLM2 = PLAIN | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "is_llama_config": True,
    "rope_interleaved": False,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.041666666666666664,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
}
LLAMA32 = SMOLLM2 | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "head_dim": 64,
    "rope_theta": 500000.0,
    "eos_token_id": [128001, 128008, 128009],
    "rope_scaling": SCALING | {"factor": 32.0, "original_max_position_embeddings": 8192},
}
TINYLLAMA = LLAMA2 | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.35.0",
}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            SMOLLM2,
            Config(30, 576, 1536, 9, 3, 64, 49152, 8192, 1e-5, 100000.0, None, True, False, False),
        ),
        (
            LLAMA32,
            Config(
                16,
                2048,
                8192,
                32,
                8,
                64,
                128256,
                131072,
                1e-5,
                500000.0,
                Llama3(32.0, 1.0, 4.0, 8192),
                True,
                False,
                False,
            ),
        ),
        (
            TINYLLAMA,
            Config(
                22, 2048, 5632, 32, 4, 64, 32000, 2048, 1e-5, 10000.0, None, False, False, False
            ),
        ),
        (
            LLAMA2,
            Config(
                32, 4096, 11008, 32, 32, 128, 32000, 4096, 1e-5, 10000.0, None, False, False, False
            ),
        ),
        (
            LLAMA2 | {"rope_scaling": {"factor": 4.0, "type": "linear"}},
            Config(
                32,
                4096,
                11008,
                32,
                32,
                128,
                32000,
                4096,
                1e-5,
                10000.0,
                Linear(4.0),
                False,
                False,
                False,
            ),
        ),
    ],
)
def test_what_the_hub_holds_is_read(values, expected):
    assert read_config(values) == expected
    for end in (2, [2, 3], None, []):
        assert read_config(values | {"eos_token_id": end}) == expected
    assert read_config({k: v for k, v in values.items() if k != "eos_token_id"}) == expected


@pytest.mark.parametrize(
    "values",
    [SMOLLM2, LLAMA32, LLAMA2, LLAMA2 | {"rope_scaling": {"factor": 4.0, "type": "linear"}}],
)
def test_what_transformers_5_saves_of_it_is_read_as_the_same(values, tmp_path):
    from transformers import LlamaConfig

    LlamaConfig.from_dict(effective(values) | {"torch_dtype": "bfloat16"}).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved
    assert "rope_scaling" not in saved
    assert read_config(saved) == read_config(values)


@pytest.mark.parametrize("case", [*config_cases.TAKEN, *config_cases.ONLY_THE_ORACLE_TAKES])
def test_what_both_readers_take_is_taken(case):
    changes = (config_cases.TAKEN | config_cases.ONLY_THE_ORACLE_TAKES)[case]
    assert isinstance(read_or_refused(config_cases.made(changes)), Config)


@pytest.mark.parametrize("case", config_cases.REFUSED)
def test_what_both_readers_refuse_is_refused(case):
    assert isinstance(read_or_refused(config_cases.made(config_cases.REFUSED[case])), str)


def test_a_key_that_was_taken_out_must_be_one_that_does_not_matter():
    config = models.config_of("mha")
    assert read_config(config, without=("auto_map",)) == read_config(config)
    for key in (
        "rope_scaling",
        "head_dim",
        "rope_interleaved",
        "model_type",
        "original_max_position_embeddings",
    ):
        with pytest.raises(Refusal, match=f"--ignore-key {key} would change the model"):
            read_config(config, without=("auto_map", key))


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
        | st.dictionaries(
            st.sampled_from([*YARN, *LONGROPE, *SCALING, "truncate", "x"]), inner, max_size=4
        )
    ),
    max_leaves=6,
)
KEYS = [*SMOLLM2, "head_dim", "rope_parameters", "original_max_position_embeddings", "x"]


@settings(max_examples=400, deadline=500)
@given(
    base=st.sampled_from([SMOLLM2, LLAMA32, LLAMA2, LLAMA2 | {"rope_scaling": YARN}]),
    changes=st.dictionaries(st.sampled_from(KEYS), ODD, max_size=3),
)
def test_any_values_make_a_config_or_one_short_line(base, changes):
    found = read_or_refused(base | changes)
    if isinstance(found, str):
        assert "\n" not in found
        assert len(found) < 400
    else:
        assert all(bool(torch.isfinite(table).all()) for table in truth.rope_tables(found, 3))


def read_or_refused(values):
    try:
        return read_config(values)
    except Refusal as error:
        return str(error)


def test_what_cannot_change_a_logit_is_ignored_and_not_given_to_transformers():
    other = {
        "sliding_window": 8,
        "attention_dropout": 0.1,
        "transformers.js_config": {"a": 1},
        "pad_token_id": 128004,
    }
    config = models.config_of("mha") | other
    assert read_config(config) == read_config(models.config_of("mha"))
    assert set(effective(config)) == set(models.config_of("mha"))


def test_the_weights_must_be_those_of_the_config(tmp_path):
    config = models.config_of("mqa")
    good = models.tensors_of(config)
    gate = "model.layers.1.mlp.gate_proj.weight"
    for i, (tensors, named) in enumerate(
        [
            ({k: v for k, v in good.items() if k != gate}, f"no tensor {gate}, expected 29"),
            (
                good
                | {"model.layers.0.self_attn.q_norm.weight": good["model.norm.weight"].clone()},
                "unknown tensor model.layers.0.self_attn.q_norm",
            ),
            (
                good | {gate: good[gate][:-1].clone()},
                f"{gate} has shape [71, 48], expected [72, 48]",
            ),
            (
                good | {gate: good[gate].char()},
                f"{gate} is I8, expected F32, BF16, F16; save it in F32",
            ),
            (
                good | {gate: good[gate].long()},
                f"{gate} is I64, expected F32, BF16, F16; save it in F32",
            ),
        ]
    ):
        checkpoint = resolve(str(models.write(tmp_path / str(i), config, tensors)))
        with pytest.raises(Refusal) as caught:
            check_weights(read_config(config), checkpoint)
        assert named in str(caught.value)


def test_the_frequencies_that_old_checkpoints_carry_are_ignored(tmp_path):
    config = models.config_of("mqa")
    tensors = models.tensors_of(config)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"][
        :6
    ].clone()
    check_weights(read_config(config), resolve(str(models.write(tmp_path / "m", config, tensors))))


def test_the_taps_are_those_of_the_trace_format_in_its_order():
    assert tuple(read_config(models.config_of("gqa")).taps(1)) == TAPS


@pytest.mark.parametrize("key", ["attention_bias", "hidden_act", "rope_theta", "head_dim"])
def test_a_null_is_an_absent_key_to_transformers_too(key):
    from transformers import LlamaConfig, LlamaForCausalLM

    values = models.config_of("mha") | {key: None}
    given = LlamaConfig.from_dict(effective(values))
    assert LlamaForCausalLM(given).config.to_dict() == given.to_dict()
    assert read_config(values) == read_config({k: v for k, v in values.items() if k != key})

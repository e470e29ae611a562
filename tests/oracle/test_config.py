"""The oracle's reading of config.json: used, ignored or refused by name."""

import models
import pytest

from oracle.checkpoint import resolve
from oracle.config import Llama3, check_weights, effective, read_config
from oracle.plan import Refusal

SCALING = models.LLAMA3
READ = Llama3(8.0, 1.0, 4.0, 32)


def refused(**changes):
    with pytest.raises(Refusal) as caught:
        read_config(models.config_of("mha", **changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_size_and_constant_is_read():
    config = read_config(models.config_of("gqa", tie_word_embeddings=False, mlp_bias=True))
    assert (config.n_layers, config.hidden, config.mlp, config.n_heads, config.n_kv_heads, config.head_dim) == (3, 48, 72, 6, 2, 10)
    assert (config.vocab_size, config.max_positions, config.eps, config.theta, config.scaling) == (61, 128, 1e-5, 100000.0, None)
    assert (config.tied, config.attention_bias, config.mlp_bias, config.interleaved) == (False, False, True, False)


def test_what_is_absent_gets_transformers_own_default():
    absent = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act")
    config = read_config(models.config_of("mha", **dict.fromkeys((*absent, "architectures"))))
    assert (config.n_kv_heads, config.head_dim, config.eps, config.theta) == (4, 12, 1e-6, 10000.0)
    assert (config.tied, config.attention_bias, config.mlp_bias) == (False, False, False)


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": SCALING}, 5e5, READ),
        ({"rope_theta": None, "rope_parameters": SCALING | {"rope_theta": 5e5}}, 5e5, READ),
        ({"rope_theta": 5e5, "rope_parameters": SCALING | {"rope_theta": 5e5}, "rope_scaling": SCALING}, 5e5, READ),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 7, "rope_type": "default"}}, 7.0, None),
        ({"rope_theta": 7, "rope_scaling": {"type": "default"}}, 7.0, None),
        ({"rope_scaling": {k: v for k, v in SCALING.items() if k != "rope_type"} | {"type": "llama3"}}, 10000.0, READ),
        ({"rope_scaling": {}, "rope_parameters": {}}, 10000.0, None),
        ({"partial_rotary_factor": 1.0, "rope_parameters": {"partial_rotary_factor": 1.0, "rope_type": "default"}}, 10000.0, None),
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
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope_type is 'linear'"),
        ({"rope_scaling": {"type": "foo"}}, "rope_type is 'foo'"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_type is None"),
        ({"rope_scaling": SCALING | {"type": "linear"}}, "rope_type is 'llama3' but type is 'linear'"),
        ({"rope_scaling": SCALING | {"beta": 1}}, "unknown key 'beta'"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "unknown key 'factor'"),
        ({"rope_scaling": SCALING | {"factor": "8"}}, "factor is '8'"),
        ({"rope_scaling": SCALING | {"low_freq_factor": None}}, "low_freq_factor is missing"),
        ({"rope_scaling": SCALING | {"low_freq_factor": 4.0}}, "low_freq_factor is 4.0"),
        ({"rope_scaling": SCALING | {"original_max_position_embeddings": None}}, "original_max_position_embeddings is missing"),
        (
            {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}},
            "rope_theta says 10000.0 but rope_parameters.rope_theta says 5.0",
        ),
        ({"rope_scaling": SCALING, "rope_parameters": {"rope_type": "default"}}, "rope_scaling says Llama3"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_type is None"),
    ],
)
def test_what_would_change_the_logits_is_refused_by_name(changes, named):
    message = refused(**changes)
    assert named in message
    assert message.startswith("config.json: ")


def test_what_cannot_change_a_logit_is_ignored_and_not_given_to_transformers():
    other = {"sliding_window": 8, "attention_dropout": 0.1, "transformers.js_config": {"a": 1}, "pad_token_id": 128004, "foo": None}
    config = models.config_of("mha") | other
    assert read_config(config) == read_config(models.config_of("mha"))
    assert set(effective(config)) == set(models.config_of("mha")) | {"foo"}


def test_the_weights_must_be_those_of_the_config(tmp_path):
    config = models.config_of("mqa")
    good = models.tensors_of(config)
    gate = "model.layers.1.mlp.gate_proj.weight"
    for i, (tensors, named) in enumerate(
        [
            ({k: v for k, v in good.items() if k != gate}, f"no tensor {gate}, expected 29"),
            (
                good | {"model.layers.0.self_attn.q_norm.weight": good["model.norm.weight"].clone()},
                "unknown tensor model.layers.0.self_attn.q_norm",
            ),
            (good | {gate: good[gate][:-1].clone()}, f"{gate} has shape [71, 48], expected [72, 48]"),
            (good | {gate: good[gate].char()}, f"{gate} is I8, expected F32, BF16, F16"),
        ]
    ):
        checkpoint = resolve(str(models.write(tmp_path / str(i), config, tensors)))
        with pytest.raises(Refusal) as caught:
            check_weights(read_config(config), checkpoint)
        assert named in str(caught.value)


def test_the_frequencies_that_old_checkpoints_carry_are_ignored(tmp_path):
    config = models.config_of("mqa")
    tensors = models.tensors_of(config)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"][:6].clone()
    check_weights(read_config(config), resolve(str(models.write(tmp_path / "m", config, tensors))))

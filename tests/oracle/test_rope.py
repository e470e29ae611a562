"""Every type of RoPE: the truth's frequencies against transformers' own, and whole models by the
truth's second proof.
"""

import copy
import dataclasses
import itertools
import math

import models
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from oracle import folder
from oracle.formats.errors import Refusal
from oracle.formats.proofs import TRUTH as PROOF_LIMITS
from oracle.model.checkpoint import resolve
from oracle.pool import reference
from oracle.truth import llama as truth
from oracle.truth.config import effective, read_config
from oracle.truth.weights import Weights

ORIGINAL = 16
PAIRS = 8
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(PAIRS)],
    "long_factor": [2.0 + 3 * i for i in range(PAIRS)],
    "original_max_position_embeddings": ORIGINAL,
}
TYPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": models.LLAMA3 | {"original_max_position_embeddings": ORIGINAL},
    "yarn": YARN,
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, its own attention": YARN | {"attention_factor": 1.2},
    "yarn, two mscales": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3},
    "yarn, one mscale": YARN | {"mscale": 0.7},
    "yarn, equal betas": YARN
    | {"beta_slow": 4.0, "truncate": False, "original_max_position_embeddings": 128},
    "yarn, plain betas": {k: v for k, v in YARN.items() if k != "beta_fast"},
    "yarn, its original length left out": {
        k: v for k, v in YARN.items() if k != "original_max_position_embeddings"
    },
    "longrope": LONGROPE,
    "longrope, its own factor": LONGROPE | {"factor": 2.0},
    "longrope, its own attention": LONGROPE | {"attention_factor": 1.2},
}
SPELLINGS = ("rope_scaling", "rope_parameters", "outside")


def described(scaling, spelling="rope_scaling"):
    """A config.json of some spelling; so small a theta that so few pairs lie on both sides of every
    bound.
    """
    scaling, outer = dict(scaling), {}
    if spelling == "outside" and "original_max_position_embeddings" in scaling:
        outer["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
    if spelling == "rope_parameters":
        return models.config_of(
            "gqa",
            head_dim=2 * PAIRS,
            rope_theta=None,
            rope_parameters=scaling | {"rope_theta": 10.0},
        )
    return (
        models.config_of("gqa", head_dim=2 * PAIRS, rope_theta=10.0, rope_scaling=scaling) | outer
    )


@pytest.mark.parametrize("n", [12, 40, 128])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", TYPES)
def test_frequencies_and_tables_are_those_of_transformers(name, spelling, n):
    values = described(TYPES[name], spelling)
    config = read_config(values)
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(copy.deepcopy(effective(values))))
    cos, sin = theirs(torch.zeros(1), torch.arange(n)[None])
    np.testing.assert_allclose(theirs.inv_freq, truth.inverse_frequencies(config, n), rtol=5e-7)
    for found, expected in zip((cos, sin), truth.rope_tables(config, n), strict=True):
        np.testing.assert_allclose(found[0, :, :PAIRS], expected, rtol=0, atol=n * 3e-7)


def test_dynamic_changes_its_frequencies_beyond_the_model_which_is_why_nothing_beyond_is_judged():
    values = described(TYPES["dynamic"])
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(copy.deepcopy(effective(values))))
    plain = theirs.inv_freq.clone()
    theirs(torch.zeros(1), torch.arange(129)[None])
    assert float((theirs.inv_freq / plain - 1).abs().max()) > 1e-3


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    reference.set_up(1)
    root = tmp_path_factory.mktemp("models")
    made = {}
    for i, (name, scaling) in enumerate(TYPES.items()):
        config = described(scaling)
        made[name] = resolve(str(models.write(root / str(i), config, models.tensors_of(config))))
    return made


def proof(checkpoint, n, config=None):
    """The second proof's value for n tokens."""
    config = config or read_config(checkpoint.config)
    weights, tokens = Weights(checkpoint, dtype="float32"), models.tokens(n)
    out = np.zeros((n, config.vocab_size))
    streams = truth.follow(weights, config, tokens, segments={"full": [n]})
    truth.write_logits(streams, weights.head_blocks(config), out)
    error = reference.Reference(checkpoint).double(tokens) - out
    return math.sqrt((error * error).mean()) / np.abs(out).max()


@pytest.mark.parametrize("n", [12, 40])
@pytest.mark.parametrize("name", TYPES)
def test_whole_models_pass_the_second_proof_on_both_sides_of_the_original_length(
    checkpoints, name, n
):
    assert 0 < proof(checkpoints[name], n) <= PROOF_LIMITS["transformers_double"]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("linear", {"factor": 4.001}),
        ("yarn", {"factor": 4.001}),
        ("yarn", {"attention": 1.139}),
        ("yarn", {"beta_fast": 1.0}),
        ("yarn", {"beta_slow": 0.5}),
        ("yarn", {"truncate": False}),
        ("yarn", {"original_max_position_embeddings": 32}),
        ("longrope", {"long": tuple(LONGROPE["short_factor"])}),
        ("longrope", {"attention": 1.0}),
        ("longrope", {"original_max_position_embeddings": 40}),
    ],
)
def test_a_wrong_constant_of_each_type_breaks_the_second_proof(checkpoints, name, wrong):
    config = read_config(checkpoints[name].config)
    config = dataclasses.replace(config, scaling=dataclasses.replace(config.scaling, **wrong))
    assert proof(checkpoints[name], 40, config) > PROOF_LIMITS["transformers_double"]


def test_the_types_differ_from_each_other(checkpoints):
    alike = ("dynamic", "yarn, one mscale", "yarn, plain betas")
    configs = {name: read_config(c.config) for name, c in checkpoints.items() if name not in alike}
    for (a, one), (b, other) in itertools.combinations(configs.items(), 2):
        assert not torch.allclose(
            *(truth.rope_tables(c, 40)[0] for c in (one, other)), rtol=0, atol=1e-3
        ), (a, b)


# Sequences.


def ask(checkpoint, tmp_path, *, tokens, prompt, steps=0, **more):
    given = {"tokens": models.tokens(tokens), "steps": steps, "threads": 1} | (
        {"prompt_tokens": prompt} if not steps else {}
    )
    return folder.run(str(checkpoint.folder), out=tmp_path / "out", **given, **more)


@pytest.mark.parametrize(
    ("tokens", "prompt", "steps"), [(16, 5, 0), (8, 8, 9), (40, 30, 0), (30, 30, 5)]
)
def test_longrope_is_judged_where_every_call_lies_on_one_side(
    checkpoints, tmp_path, tokens, prompt, steps
):
    made = ask(checkpoints["longrope"], tmp_path, tokens=tokens, prompt=prompt, steps=steps)
    folder.check(tmp_path / "out")
    assert made.proofs["truth_agreement"] < 1e-12
    assert made.proofs["transformers_double"] <= PROOF_LIMITS["transformers_double"]
    assert made.proofs["reference_step_full_max"] < 1e-4


@pytest.mark.parametrize(
    ("tokens", "prompt", "chunks", "steps", "named"),
    [
        (17, 5, None, 0, "plan step begins with 5 of 17"),
        (40, 16, None, 0, "plan step begins with 16 of 40"),
        (40, 20, None, 0, "plan chunked begins with 12 of 40"),
        (40, 30, [16, 14], 0, "plan chunked begins with 16 of 40"),
        (8, 8, None, 10, "plan step begins with 8 of 17"),
    ],
)
def test_longrope_across_its_original_length_is_refused_with_both_numbers(
    checkpoints, tmp_path, tokens, prompt, chunks, steps, named
):
    with pytest.raises(Refusal) as caught:
        ask(
            checkpoints["longrope"],
            tmp_path,
            tokens=tokens,
            prompt=prompt,
            steps=steps,
            chunks=chunks,
        )
    rest = (
        "expected both on one side of 16, up to which longrope has short factors (transformers "
        "would change them in the middle); "
        "take a longer first chunk or fewer tokens"
    )
    assert str(caught.value) == f"tokens: {named}, {rest}"


def test_transformers_does_mix_longropes_factors_in_a_cache_that_grows_across(
    checkpoints, monkeypatch, tmp_path
):
    monkeypatch.setattr("oracle.question.Question._check_sides", lambda *_: None)
    made = ask(checkpoints["longrope"], tmp_path, tokens=40, prompt=5)
    assert made.proofs["truth_agreement"] < 1e-12
    assert made.proofs["reference_step_full_max"] > 0.01


def test_dynamic_beyond_the_model_is_refused_and_why(checkpoints, tmp_path):
    with pytest.raises(Refusal) as caught:
        ask(checkpoints["dynamic"], tmp_path, tokens=128, prompt=128, steps=3)
    expected = (
        "tokens: 128 and 2 more, expected at most 128 (max_position_embeddings, beyond which "
        "dynamic RoPE has other frequencies at every "
        "length, and cached keys differ from uncached ones); take fewer steps"
    )
    assert str(caught.value) == expected


# Keys that are taken out.


def test_an_ignored_key_is_in_the_manifest_and_changes_the_inputs(tmp_path):
    config = models.config_of("mha")
    tensors = models.tensors_of(config)
    plain = resolve(str(models.write(tmp_path / "plain", config, tensors)))
    odd = resolve(
        str(models.write(tmp_path / "odd", config | {"auto_map": {"A": "b.C"}}, tensors)),
        ignore_keys=["auto_map"],
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    one = ask(plain, tmp_path / "a", tokens=8, prompt=5)
    with pytest.raises(Refusal, match="unknown key 'auto_map'"):
        ask(odd, tmp_path / "b", tokens=8, prompt=5)
    other = ask(odd, tmp_path / "b", tokens=8, prompt=5, ignore_keys=["auto_map"])

    assert (odd.note, odd.without, "auto_map" in odd.config) == (
        "ignoring auto_map in config.json",
        ("auto_map",),
        False,
    )
    assert odd.config_digest == plain.config_digest != resolve(str(odd.folder)).config_digest
    assert other.ignored_keys == ["auto_map"]
    assert one.ignored_keys == []
    assert other.note == "ignoring auto_map in config.json"
    with pytest.raises(
        Refusal, match=r"config\.json: no key 'autp_map', expected one as --ignore-key says"
    ):
        resolve(str(odd.folder), ignore_keys=["autp_map"])

"""The strict float64 forward: its two proofs, and that they break where they must."""

import dataclasses
import itertools
import math

import models
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oracle.formats import trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import judged_plans
from oracle.formats.proofs import TRUTH as PROOF_LIMITS
from oracle.model.checkpoint import resolve
from oracle.pool import reference
from oracle.question import ask
from oracle.truth import llama as truth
from oracle.truth import record
from oracle.truth.config import Config, checked, read_config
from oracle.truth.rope import Llama3
from oracle.truth.weights import Weights

N = 24
TOKENS = models.tokens(N)
LAYOUTS = sorted(models.LAYOUTS)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    reference.set_up(1)
    root = tmp_path_factory.mktemp("models")
    untied = {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}
    made = {name: models.make(root / name, name) for name in LAYOUTS}
    made |= {
        f"{name} untied, biased": models.make(root / f"{name}-untied", name, **untied)
        for name in ("mha", "gqa")
    }
    return {name: resolve(str(folder)) for name, folder in made.items()}


class Changed(Weights):
    """Weights of which each tensor goes through `change(name, tensor)`."""

    change = staticmethod(lambda name, tensor: tensor)

    def __call__(self, name, **rows):
        return self.change(name, super().__call__(name, **rows))


def logits(
    checkpoint,
    config=None,
    *,
    tokens=TOKENS,
    segments=None,
    shared=0,
    dtype="float32",
    change=None,
):
    """(n, V) logits, and how far any way of following the tokens is from the first."""
    config = config or read_config(checkpoint.config)
    weights = Changed(checkpoint, dtype=dtype)
    weights.change = change or weights.change
    segments = segments or {"full": [len(tokens)]}
    streams = truth.follow(weights, config, tokens, segments=segments, shared=shared)
    out = np.zeros((len(tokens), config.vocab_size))
    most, apart = truth.write_logits(streams, weights.head_blocks(config), out)
    assert most == np.abs(out).max()
    return out, apart


def proof(checkpoint, config=None, **kwargs):
    """The second proof's value: rms distance from transformers' float64, in units of max |T|."""
    out, _ = logits(checkpoint, config, **kwargs)
    error = reference.Reference(checkpoint).double(TOKENS) - out
    return math.sqrt((error * error).mean()) / np.abs(out).max()


@given(cuts=st.sets(st.integers(1, N - 1)))
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_segmentation_gives_the_same_logits(checkpoints, cuts):
    edges = [0, *sorted(cuts), N]
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    out, apart = logits(checkpoints["llama3"], segments={"full": [N], "cut": sizes})
    assert apart <= 1e-12 * np.abs(out).max()


@pytest.mark.parametrize("name", [*LAYOUTS, "mha untied, biased", "gqa untied, biased"])
def test_transformers_in_float64_is_within_the_proof(checkpoints, name):
    value = proof(checkpoints[name])
    assert 0 < value <= PROOF_LIMITS["transformers_double"]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gqa", lambda c: {"eps": 1.1e-5}),
        ("gqa", lambda c: {"theta": c.theta * 1.0001}),
        ("mqa", lambda c: {"interleaved": True}),
        ("llama3", lambda c: {"scaling": None}),
        ("llama3", lambda c: {"scaling": dataclasses.replace(c.scaling, factor=8.001)}),
    ],
)
def test_a_wrong_constant_breaks_the_second_proof(checkpoints, name, wrong):
    config = read_config(checkpoints[name].config)
    assert (
        proof(checkpoints[name], dataclasses.replace(config, **wrong(config)))
        > PROOF_LIMITS["transformers_double"]
    )


def test_one_matrix_rounded_to_float16_breaks_the_second_proof(checkpoints):
    def change(name, tensor):
        return tensor.half().double() if name == "model.layers.1.mlp.up_proj.weight" else tensor

    assert proof(checkpoints["mha"], change=change) > PROOF_LIMITS["transformers_double"]


def test_a_mask_off_by_one_breaks_the_second_proof(checkpoints, monkeypatch):
    right = truth.hides
    monkeypatch.setattr(
        truth, "hides", lambda start, rows, columns: right(start + 1, rows, columns)
    )
    assert proof(checkpoints["mha"]) > 1e-3


def test_kv_heads_interleaved_instead_of_repeated_break_the_second_proof(checkpoints, monkeypatch):
    right = truth.attend

    def wrong(queries, keys, values, **rest):
        groups = len(queries) // len(keys)
        order = torch.arange(len(queries)).view(groups, -1).T.flatten()
        return right(queries[order], keys, values, **rest)

    monkeypatch.setattr(truth, "attend", wrong)
    assert proof(checkpoints["gqa"]) > 1e-3


def forgetful_mask(start, rows, columns, right=truth.hides):
    return right(start + 1 if start == 3 else start, rows, columns)


def stale_row(queries, keys, values, *, start, seen=None, right=truth.attend):
    return right(
        queries,
        torch.cat((keys[:, 1:2], keys[:, 1:]), dim=1) if start else keys,
        values,
        start=start,
        seen=seen,
    )


def swapped_positions(x, cos, sin, *, interleaved, right=truth.rotate):
    return right(x, *(t.flip(0) if len(t) == 2 else t for t in (cos, sin)), interleaved=interleaved)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("hides", forgetful_mask), ("attend", stale_row), ("rotate", swapped_positions)],
)
def test_a_fault_of_the_cache_breaks_the_first_proof(checkpoints, monkeypatch, name, wrong):
    monkeypatch.setattr(truth, name, wrong)
    out, apart = logits(checkpoints["gqa"], segments={"full": [N], "chunked": [3, 2, N - 5]})
    assert apart > 1e-4 * np.abs(out).max()


@pytest.mark.parametrize("wrong", [None, forgetful_mask, stale_row, swapped_positions])
def test_a_way_that_begins_in_the_middle_is_held_to_the_whole_one(checkpoints, monkeypatch, wrong):
    names = {forgetful_mask: "hides", stale_row: "attend", swapped_positions: "rotate"}
    if wrong is not None:
        monkeypatch.setattr(truth, names[wrong], wrong)
    ways = {"full": [N], "chunked": [3, 2, 1, N - 6]}
    out, apart = logits(checkpoints["gqa"], segments=ways, shared=3)
    assert (apart > 1e-4 * np.abs(out).max()) == (wrong is not None)
    assert apart > 0  # computed, not copied


def test_the_frequencies_are_the_formula_in_float64():
    config = Config(1, 64, 1, 4, 4, 16, 1, 1, 1e-5, 500000.0, None, True, False, False)
    expected = [1, 0.193923, 0.037606, 0.00729266, 0.00141421, 0.000274248, 5.318e-5, 1.0313e-5]
    np.testing.assert_allclose(truth.inverse_frequencies(config), expected, rtol=1e-4)
    np.testing.assert_allclose(
        truth.inverse_frequencies(config),
        [500000.0 ** -(i / 16) for i in range(0, 16, 2)],
        rtol=1e-15,
    )


def test_llama3_keeps_fast_pairs_slows_slow_ones_and_blends_between():
    scaling = Llama3(8.0, 1.0, 4.0, 32)
    config = Config(1, 64, 1, 4, 4, 16, 1, 1, 1e-5, 10.0, scaling, True, False, False)
    plain = [10.0 ** -(i / 16) for i in range(0, 16, 2)]
    expected = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        blend = (32 / wavelength - 1) / 3
        expected.append(
            frequency
            if wavelength < 8
            else frequency / 8
            if wavelength > 32
            else blend * frequency + (1 - blend) * frequency / 8
        )
    assert expected[0] == plain[0]
    assert expected[-1] == plain[-1] / 8
    np.testing.assert_allclose(truth.inverse_frequencies(config), expected, rtol=1e-15)


def test_angles_keep_float64_at_far_positions():
    config = Config(1, 64, 1, 4, 4, 16, 1, 9000, 1e-5, 100000.0, None, True, False, False)
    cos, sin = truth.rope_tables(config, 8192)
    angles = np.arange(8192.0)[:, None] * 100000.0 ** -(np.arange(0, 16, 2) / 16)
    assert np.abs(cos.numpy() - np.cos(angles)).max() < 4e-12
    assert np.abs(sin.numpy() - np.sin(angles)).max() < 4e-12


def test_the_mask_hides_what_comes_after_each_position():
    assert truth.hides(3, 2, 5).int().tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]


def test_with_one_key_attention_returns_its_value():
    random = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn((h, 1, 4), generator=random, dtype=torch.float64) for h in (6, 2, 2)
    )
    mixed = truth.attend(queries, keys, values, start=0)
    assert torch.equal(mixed, values.repeat_interleave(3, dim=0).flatten()[None])


def test_attention_in_blocks_equals_attention_at_once(monkeypatch):
    random = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn((h, 9, 4), generator=random, dtype=torch.float64) for h in (4, 2, 2)
    )
    seen = {"scores": None}
    whole = truth.attend(queries, keys, values, start=0)
    monkeypatch.setattr(truth, "_BLOCK", 4 * 9 * 2)
    torch.testing.assert_close(
        truth.attend(queries, keys, values, start=0, seen=seen), whole, rtol=0, atol=1e-15
    )
    scores = (queries @ keys.repeat_interleave(2, dim=0).transpose(1, 2) / 2).tril()
    torch.testing.assert_close(seen["scores"], scores, rtol=0, atol=1e-15)


def test_another_token_leaves_every_earlier_row_as_it_was(checkpoints):
    changed = [*TOKENS[:10], (TOKENS[10] + 1) % models.VOCAB, *TOKENS[11:]]
    first, _ = logits(checkpoints["gqa"])
    second, _ = logits(checkpoints["gqa"], tokens=changed)
    assert np.array_equal(first[:10], second[:10])
    assert np.abs(first[10:] - second[10:]).max(axis=1).min() > 1e-3


def test_weights_are_rounded_to_the_runs_dtype_first(checkpoints, tmp_path):
    config = checkpoints["gqa"].config
    rounded = {name: tensor.bfloat16() for name, tensor in models.tensors_of(config).items()}
    stored = resolve(str(models.write(tmp_path / "m", config, rounded)))
    expected, _ = logits(stored)
    assert np.array_equal(logits(checkpoints["gqa"], dtype="bfloat16")[0], expected)
    assert np.abs(logits(checkpoints["gqa"])[0] - expected).max() > 1e-3


def test_a_weight_that_is_not_finite_in_its_dtype_is_named(tmp_path):
    config = models.config_of("mha")
    tensors = models.tensors_of(config)
    tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = 1e6
    checkpoint = resolve(str(models.write(tmp_path / "m", config, tensors)))
    name = r"model\.layers\.2\.mlp\.up_proj\.weight"
    with pytest.raises(Refusal, match=rf"{name}: not finite in float16"):
        logits(checkpoint, dtype="float16")


def test_a_tied_head_that_is_stored_again_must_be_the_same(tmp_path):
    config = models.config_of("mha")
    tensors = models.tensors_of(config)
    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    other = same | {"lm_head.weight": tensors["model.embed_tokens.weight"] * 1.001}
    found = resolve(str(models.write(tmp_path / "same", config, same)))
    checked(found)
    logits(found)
    place = models.write(tmp_path / "other", config, other)
    with pytest.raises(Refusal) as caught:
        checked(resolve(str(place)))
    differs = "lm_head.weight differs from model.embed_tokens.weight though tie_word_embeddings is"
    remedy = "correct tie_word_embeddings in config.json, or take the head out"
    assert str(caught.value) == f"{place}/model.safetensors: {differs} true; {remedy}"
    half = same | {"lm_head.weight": same["lm_head.weight"].bfloat16()}
    with pytest.raises(Refusal, match=r"lm_head\.weight differs from"):
        checked(resolve(str(models.write(tmp_path / "half", config, half))))


def test_the_trace_holds_every_tap_asked_for(checkpoints, tmp_path):
    checkpoint = checkpoints["gqa"]
    config = read_config(checkpoint.config)
    plan = judged_plans(TOKENS, prompt=5)["full"]
    shapes = config.taps(N)
    weights = Weights(checkpoint, dtype="float32")
    record.write(
        tmp_path / "t.safetensors",
        weights,
        config,
        plan=plan,
        segments={"full": [N]},
        taps=frozenset(shapes),
    )
    made = trace.read(tmp_path / "t.safetensors")
    assert (made.meta.engine, made.meta.dtype, made.meta.weights_dtype) == (
        "truth",
        "float64",
        "float32",
    )
    assert (made.meta.fingerprint, made.meta.config_digest) == (
        checkpoint.fingerprint,
        checkpoint.config_digest,
    )
    assert {name: made.arrays[f"tap/002/{name}"].shape for name in shapes} == shapes
    tap = {
        i: {name: torch.tensor(made.arrays[f"tap/{i:03d}/{name}"]) for name in shapes}
        for i in range(3)
    }
    keys, values = made.kv("a", 2)
    assert np.array_equal(keys, tap[2]["k_rope"])
    assert np.array_equal(values, tap[2]["v"])
    torch.testing.assert_close(
        tap[1]["hidden"] + tap[2]["o_proj"] + tap[2]["down"], tap[2]["hidden"], rtol=0, atol=1e-14
    )
    torch.testing.assert_close(
        tap[2]["q"].norm(dim=-1), tap[2]["q_rope"].norm(dim=-1), rtol=1e-13, atol=0
    )
    assert torch.equal(tap[2]["scores"].triu(1), torch.zeros(6, N, N, dtype=torch.float64))
    final = truth.rms_norm(tap[2]["hidden"], weights("model.norm.weight"), config.eps)
    torch.testing.assert_close(
        final @ weights.head(config).T, torch.tensor(made.logits), rtol=0, atol=1e-14
    )


def test_the_trace_has_the_very_tables_that_the_sequence_was_followed_with(
    checkpoints, tmp_path, monkeypatch
):
    right, made = record.llama.rope_tables, []

    def tables(config, n):
        made.append(right(config, n))
        return made[-1]

    monkeypatch.setattr(record.llama, "rope_tables", tables)
    weights = Weights(checkpoints["gqa"], dtype="float32")
    config, plan = checked(checkpoints["gqa"]), judged_plans(TOKENS, prompt=5)["full"]
    record.write(tmp_path / "t.safetensors", weights, config, plan=plan, segments={"full": [N]})
    ((cos, sin),) = made
    stored = trace.read(tmp_path / "t.safetensors").arrays
    np.testing.assert_array_equal(stored["rope/cos"], cos)
    np.testing.assert_array_equal(stored["rope/sin"], sin)


def test_a_weight_that_its_dtype_cannot_hold_is_refused_before_anything_runs(tmp_path):
    config = models.config_of("mha")
    tensors = models.tensors_of(config)
    tensors["model.norm.weight"][3] = -65520.0
    place = str(models.write(tmp_path / "m", config, tensors))
    for dtype in ("float32", "bfloat16"):
        ask(place, tokens=(1, 2), dtype=dtype)
    with pytest.raises(Refusal) as caught:
        ask(place, tokens=(1, 2), dtype="float16")
    what = "model.norm.weight holds 65520, which is infinite in float16, expected finite weights"
    assert str(caught.value) == f"{place}/model.safetensors: {what}; use another --dtype"
    tensors["model.norm.weight"][3] = 65519.0
    ask(str(models.write(tmp_path / "n", config, tensors)), tokens=(1, 2), dtype="float16")

"""transformers' Llama as the reference: it follows every step of a plan, and says what it cannot
express.
"""

import dataclasses

import models
import numpy as np
import pytest
import torch

from oracle.formats import trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, Clone, Crop, Greedy, New, Plan, Reset, judged_plans
from oracle.model.checkpoint import resolve
from oracle.pool import converted, reference
from oracle.truth import llama as truth
from oracle.truth.config import read_config
from oracle.truth.weights import Weights

N = 16
TOKENS = models.tokens(N)
PROMPT = tuple(TOKENS[:5])
NOISE = 2e-5  # of float32 on these models: measured 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.make(tmp_path_factory.mktemp("models") / "gqa", "gqa", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def model(folder):
    reference.set_up(1)
    return reference.Reference(resolve(str(folder)))


def run(model, *steps, rows="all"):
    return model.run(Plan("test", steps, rows))


def cached(made, name="a"):
    return made.kv(name, 0)[0].shape[1] if made.kv(name, 0) else 0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["step", "chunked"])
def test_cached_and_uncached_logits_are_close_and_sit_at_the_same_positions(model, attention, name):
    plans = judged_plans(TOKENS, prompt=5)
    full, other = (model.run(plans[n], attention=attention) for n in ("full", name))
    assert full.positions.tolist() == other.positions.tolist() == list(range(N))
    assert full.arrays["steps"].tolist() == [1] * N
    assert other.arrays["steps"].tolist()[-3:] == [len(plans[name].steps) - i for i in (3, 2, 1)]
    assert np.abs(full.logits - other.logits).max() < NOISE
    assert np.abs(full.kv("a", 2)[0] - other.kv("a", 2)[0]).max() < NOISE


def test_prefixes_keep_one_row_a_call_and_nothing_in_a_cache(model):
    plans = judged_plans(TOKENS, prompt=5)
    made, full = model.run(plans["prefixes"]), model.run(plans["full"])
    assert made.positions.tolist() == list(range(4, N))
    assert not [name for name in made.arrays if name.startswith("kv/")]
    assert np.abs(made.logits - full.logits[4:]).max() < NOISE


def test_greedy_takes_the_highest_logit_and_does_not_feed_the_last_token(model):
    made = run(model, New("a"), Greedy("a", PROMPT, 0, 6))
    chosen = made.meta.outcomes[1].tokens
    assert chosen == made.logits[4:].argmax(-1).tolist()
    assert made.positions.tolist() == list(range(10))
    assert cached(made) == 10
    again = run(model, New("a"), Call("a", (*PROMPT, *chosen[:5])))
    assert again.logits[4:].argmax(-1).tolist() == chosen


def test_a_clone_and_its_source_never_see_each_others_tokens(model):
    a, b = tuple(TOKENS[5:8]), tuple(TOKENS[8:12])
    made = run(
        model,
        New("x"),
        Call("x", PROMPT),
        Clone("x", "y"),
        Call("x", a),
        Call("y", b),
        Call("x", (1,)),
    )
    alone = run(model, New("x"), Call("x", PROMPT), Call("x", b))
    assert (cached(made, "x"), cached(made, "y")) == (9, 9)
    rows = made.arrays["steps"] == 4
    assert np.array_equal(made.logits[rows], alone.logits[5:])
    assert made.positions[rows].tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("length", [0, 3, 5])
def test_cropping_equals_never_having_had_the_tokens(model, length):
    made = run(
        model, New("a"), Call("a", PROMPT), Call("a", (7, 8)), Crop("a", length), Call("a", (9,))
    )
    fresh = run(model, New("a"), *([Call("a", PROMPT[:length])] if length else []), Call("a", (9,)))
    assert cached(made) == length + 1
    assert made.positions[-1] == length
    assert np.abs(made.logits[-1] - fresh.logits[-1]).max() < NOISE


def test_a_crop_beyond_the_end_is_an_error_and_changes_nothing(model):
    made = run(model, New("a"), Call("a", PROMPT), Crop("a", 6), Call("a", (9,), 5))
    assert made.meta.outcomes[2].error == "crop: length is 6, expected at most the 5 tokens cached"
    assert made.positions.tolist() == [0, 1, 2, 3, 4, 5]


def test_after_a_reset_everything_is_as_on_a_fresh_cache(model):
    made = run(model, New("a"), Call("a", PROMPT), Reset("a"), Call("a", PROMPT, 0))
    assert np.array_equal(made.logits[:5], made.logits[5:])
    assert cached(made) == 5


def test_a_position_other_than_the_caches_length_cannot_be_expressed(model):
    made = run(model, New("a"), Call("a", PROMPT), Call("a", (9,), 0), Call("a", (9,), 5))
    assert made.meta.outcomes[2].error == (
        "cannot be expressed: index_pos 0 with 5 tokens cached, as transformers takes the "
        "position from its cache"
    )
    assert made.meta.outcomes[3].error is None
    assert made.positions.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("advance", "chosen"), [("right", 3), ("zero", 1), ("by_calls", 1)])
def test_a_caller_that_advances_wrongly_is_stopped_after_the_first_token(model, advance, chosen):
    outcome = run(model, New("a"), Greedy("a", PROMPT, 0, 3, advance)).meta.outcomes[1]
    assert len(outcome.tokens) == chosen
    assert (outcome.error is None) == (chosen == 3)


def test_a_second_prompt_without_a_position_goes_on_silently(model):
    made = run(model, New("a"), Call("a", PROMPT), Call("a", PROMPT), New("a"), Call("a", PROMPT))
    assert made.positions.tolist() == [*range(10), *range(5)]
    assert np.abs(made.logits[5:10] - made.logits[10:]).max() > 0.1


def test_without_a_cache_the_context_is_lost(model):
    made = run(
        model, New("a", use_kv_cache=False), Call("a", PROMPT), Call("a", (9,)), Call("a", (9,), 6)
    )
    alone = run(model, New("a"), Call("a", (9,)))
    assert made.positions.tolist() == [0, 1, 2, 3, 4, 0, 0]
    assert np.abs(made.logits[-2:] - alone.logits[-1]).max() < NOISE


def test_a_first_call_may_stand_anywhere_even_beyond_the_models_positions(model):
    """RoPE is relative: the logits are those of a start at 0, and the keys are not."""
    made = run(
        model, New("a"), Call("a", PROMPT), New("b"), Call("b", PROMPT, 1000), Call("b", (9,), 1005)
    )
    assert made.meta.outcomes[3].error is None
    assert np.abs(made.logits[5:] - made.logits[:5]).max() < 20 * NOISE
    assert np.abs(made.arrays["kv/a/000/keys"] - made.arrays["kv/b/000/keys"]).max() > 0.1
    assert made.meta.outcomes[4].error.startswith(
        "cannot be expressed: index_pos 1005 with 5 tokens cached"
    )


def test_an_id_out_of_the_vocabulary_is_that_steps_error(model):
    made = run(model, New("a"), Call("a", PROMPT), Call("a", (models.VOCAB,)), Call("a", (9,)))
    assert "index out of range" in made.meta.outcomes[2].error
    assert made.positions.tolist() == [0, 1, 2, 3, 4, 5]


def test_last_rows_equal_the_last_rows_of_all(model):
    steps = New("a"), Call("a", PROMPT), Greedy("a", (3, 4), None, 3)
    every, last = run(model, *steps), run(model, *steps, rows="last")
    assert last.positions.tolist() == [4, 6, 7, 8]
    assert np.abs(last.logits - every.logits[[4, 6, 7, 8]]).max() < NOISE
    assert last.meta.plan.digest == every.meta.plan.digest


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_half_precision_is_widened_exactly(folder, dtype, torch_dtype):
    half = reference.Reference(resolve(str(folder)), dtype=dtype)
    made = half.run(judged_plans(TOKENS, prompt=5)["step"])
    assert made.meta.dtype == made.meta.weights_dtype == dtype
    for name in ("logits", "kv/a/001/keys"):
        assert made.arrays[name].dtype == np.float32
        tensor = torch.tensor(made.arrays[name])
        assert torch.equal(tensor.to(torch_dtype).float(), tensor)


def test_a_trace_survives_being_written(model, tmp_path):
    made = model.run(judged_plans(TOKENS, prompt=5)["step"])
    trace.write(tmp_path / "t.safetensors", made.meta, made.arrays)
    found = trace.read(tmp_path / "t.safetensors")
    assert found.meta == made.meta
    assert found.meta.fingerprint == model.checkpoint.fingerprint
    assert found.meta.environment["attention"] == "sdpa"
    assert {name: array.tolist() for name, array in found.arrays.items()} == {
        name: array.tolist() for name, array in made.arrays.items()
    }


def test_a_sliding_window_in_the_config_does_not_shorten_the_cache(model, folder, tmp_path):
    config = models.config_of("gqa", tie_word_embeddings=False, sliding_window=4)
    windowed = reference.Reference(
        resolve(str(models.write(tmp_path / "m", config, models.tensors_of(config))))
    )
    plan = judged_plans(TOKENS, prompt=5)["step"]
    assert np.array_equal(windowed.run(plan).logits, model.run(plan).logits)
    assert cached(windowed.run(plan)) == N


def test_what_transformers_refuses_is_said_to_be_its_refusal(model, monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("The hidden size (56)\nis not a multiple of the heads (6).")

    monkeypatch.setattr(reference.LlamaForCausalLM, "from_pretrained", refuse)
    with pytest.raises(
        Refusal,
        match=r"gqa: transformers \d\S* refuses this model \(The hidden size \(56\) is not a "
        r"multiple",
    ):
        reference.Reference(model.checkpoint)


def test_a_parameter_that_the_checkpoint_lacks_is_never_left_random(model, monkeypatch):
    shapes = type(read_config(model.checkpoint.config)).shapes
    monkeypatch.setattr(
        "oracle.truth.config.Config.shapes",
        lambda self: {k: v for k, v in shapes(self).items() if k != "model.norm.weight"},
    )
    tensors = converted.tensors

    def fewer(*given, **options):
        return {k: v for k, v in tensors(*given, **options).items() if k != "model.norm.weight"}

    monkeypatch.setattr(converted, "tensors", fewer)
    monkeypatch.setattr(reference, "checked", lambda *args: None)
    with pytest.raises(Refusal, match=r"disagree on model\.norm\.weight"):
        reference.Reference(model.checkpoint)


def test_reduced_float32_precision_is_refused(monkeypatch):
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    with pytest.raises(Refusal, match="ONEDNN_DEFAULT_FPMATH_MODE is BF16, expected STRICT"):
        reference.set_up(1)


def distance(folder, **wrong):
    """rms distance of the truth from transformers in float64, in units of max |T|."""
    checkpoint = resolve(str(folder))
    config = dataclasses.replace(read_config(checkpoint.config), **wrong)
    weights = Weights(checkpoint, dtype="float32")
    streams = truth.follow(weights, config, TOKENS, segments={"full": [N]})
    out = np.zeros((N, config.vocab_size))
    most, _ = truth.write_logits(streams, weights.head_blocks(config), out)
    error = reference.Reference(checkpoint).double(TOKENS) - out
    return float(np.sqrt(np.mean(error**2))) / most


@pytest.mark.parametrize(("layers", "std"), [(3, 0.1), (40, 0.3), (3, 3.0)])
def test_in_float64_no_part_of_transformers_is_float32(tmp_path, layers, std):
    """Deep and large models make much of one rounding: by .double() alone they read up to 1e-5."""
    config, seeded = models.config_of("gqa", num_hidden_layers=layers), torch.manual_seed(0)
    tensors = {
        name: tensor if tensor.ndim == 1 else std * torch.randn(tensor.shape, generator=seeded)
        for name, tensor in models.tensors_of(config).items()
    }
    made = models.write(tmp_path / "m", config, tensors)
    assert 0 < distance(made) < 1e-12
    assert distance(made, eps=1.1e-5) > 1e-8
    assert distance(made, theta=config["rope_theta"] * 1.0001) > 1e-8

"""Other architectures than Llama: transformers' own class follows the plans, their mean stands
where the truth would.
"""

import json
import shutil
from pathlib import Path

import neighbours
import numpy as np
import pytest
import torch
from folders import refusal
from neighbours import MODELS, PROMPT, TOKENS, VOCAB
from safetensors.torch import load_file, save_file

from oracle import folder
from oracle.formats import proofs, run_folder, trace
from oracle.formats.disk import alone
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import require_llama, resolve
from oracle.pool import mean, reference

FIVE = [name for name in MODELS if name != "windowed"]
EAGER = ["eager-full", "eager-step", "eager-chunked", "sequential-full"]
BOTH = ["sdpa-full", "sdpa-step", *EAGER]


@pytest.fixture(scope="session")
def made(room):
    """ROOM/models and ROOM/runs, made by whichever half of the tests is first."""
    place = room / "neighbours"
    with alone(room / "neighbours.lock", waiting=lambda: None):
        if not (place / "runs" / "windowed" / "manifest.json").exists():
            neighbours.main(place)
    return place


@pytest.fixture
def copied(made, tmp_path):
    """A model to change."""

    def copy(name: str = "qwen2", **changes: object) -> Path:
        place = shutil.copytree(made / "models" / name, tmp_path / name)
        neighbours.write_config(place, json.loads((place / "config.json").read_text()) | changes)
        return place

    return copy


def asked(place: Path, tmp_path: Path, **more: object) -> run_folder.Manifest:
    more = {"tokens": TOKENS, "prompt_tokens": PROMPT, "steps": 0, "threads": 1} | more
    return folder.run(str(place), out=tmp_path / "run", **more)


def refused(place: Path, **more: str) -> str:
    """Why transformers is not built from it, in one line."""
    return refusal(lambda: reference.Reference(resolve(str(place), **more)))


def pool(run: Path) -> dict[str, trace.Trace]:
    names = run_folder.read_manifest(run).pool
    files = {
        n: run / f"{'reference-' + n[6:] if n.startswith('eager') else 'pool-' + n}.safetensors"
        for n in run_folder.ordinary(names)
    }
    return {name: trace.read(path) for name, path in files.items()}


@pytest.mark.parametrize("name", FIVE)
def test_a_neighbours_folder_says_that_it_has_no_truth(made, name):
    manifest = folder.check(made / "runs" / name)
    assert (manifest.has_truth, manifest.measure) == (False, "mean.safetensors")
    # sdpa does not know Gemma 2's soft capping, and transformers says so.
    assert manifest.pool == (EAGER if name == "gemma2" else BOTH)
    assert manifest.pool_distinct == len(manifest.pool) - 1
    assert manifest.left_out == {}
    assert {n for n in manifest.files if n.startswith("reference")} == {
        f"reference-{p}.safetensors" for p in ("full", "step", "chunked")
    }
    assert 1e-9 < manifest.proofs["members_apart"] < 2e-6
    assert 1e-9 < manifest.proofs["mean_double"] < 2e-6
    shown = folder.show(made / "runs" / name)
    runs = ", ".join(run_folder.ordinary(manifest.pool))
    assert f"\nmeasure      the mean of transformers' {runs} (" in shown
    assert shown.count("\nproof        ") == 2


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_the_measure_is_the_mean_of_the_members_and_the_floors_are_their_deviations(made, name):
    run = made / "runs" / name
    members, found = pool(run), trace.read(run / "mean.safetensors")
    assert (found.meta.engine, found.meta.dtype, found.meta.plan.name) == (
        "transformers' mean",
        "float64",
        "full",
    )
    for array in ("logits", "kv/a/001/keys", "kv/a/001/values"):
        np.testing.assert_allclose(
            found.arrays[array],
            np.mean([m.arrays[array].astype(np.float64) for m in members.values()], axis=0),
        )
    _, floors = run_folder.read_floors(run / "floors.safetensors")
    for m, member in enumerate(members.values()):
        error = member.logits - found.logits
        error -= error.mean(1, keepdims=True)
        np.testing.assert_allclose(
            floors["rms"][m], np.sqrt((error**2).mean(1)), rtol=1e-9, atol=1e-18
        )
        keys = member.kv("a", 1)[0] - found.kv("a", 1)[0]
        np.testing.assert_allclose(
            floors["keys"][m, 1], np.sqrt((keys**2).mean(-1)), rtol=1e-9, atol=1e-18
        )


def test_runs_that_are_bitwise_equal_count_once(made, tmp_path):
    members = pool(made / "runs" / "qwen2")
    doubled = {"a": members["sdpa-full"], "b": members["eager-step"], "c": members["sdpa-full"]}
    found = mean.write(
        tmp_path / "mean.safetensors", members["sdpa-full"].meta.plan, doubled, environment={}
    )
    np.testing.assert_allclose(
        found.logits,
        (members["sdpa-full"].logits.astype(np.float64) + members["eager-step"].logits) / 2,
    )
    same = {"a": members["sdpa-full"], "b": members["sdpa-full"]}
    with pytest.raises(Refusal, match="all 2 runs are bitwise equal, expected noise to measure by"):
        mean.write(
            tmp_path / "mean.safetensors", members["sdpa-full"].meta.plan, same, environment={}
        )


def test_a_member_that_computes_something_else_fails_the_proof(made):
    members, run = pool(made / "runs" / "qwen2"), made / "runs" / "qwen2"
    found = trace.read(run / "mean.safetensors")
    right, limits = mean.proofs(found, members, np.asarray(found.logits)), proofs.MEAN["float32"]
    assert right["members_apart"] <= limits["members_apart"]
    wrong = trace.Trace(
        members["eager-step"].meta, {"logits": members["eager-step"].logits * np.float32(1.0001)}
    )
    odd = mean.proofs(found, members | {"eager-step": wrong}, found.logits * 1.0001)
    assert odd["members_apart"] > limits["members_apart"]
    assert odd["mean_double"] > limits["mean_double"]


def test_a_kind_of_attention_that_is_not_the_models_own_is_left_out(copied, tmp_path, monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    right = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def blunt(*args, scaling, **kwargs):
        return right(*args, scaling=scaling * 1.0001, **kwargs)

    # As older versions had it for a soft capping that sdpa did not know.
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", blunt)
    manifest = asked(copied("qwen2"), tmp_path)
    assert manifest.pool == EAGER
    assert list(manifest.left_out) == ["sdpa"]
    assert manifest.left_out["sdpa"] > 1e-6
    assert not [name for name in manifest.files if "sdpa" in name]
    folder.check(tmp_path / "run")


def test_a_cache_that_drops_rows_is_not_kept(made):
    run = made / "runs" / "windowed"
    found = trace.read(run / "mean.safetensors")
    assert found.meta.no_cache == f"layer 0 of transformers' cache keeps 7 of {len(TOKENS)} tokens"
    assert not [name for name in found.arrays if name.startswith("kv/")]
    folder.check(run)


def test_greedy_tokens_are_the_models_own(copied, tmp_path):
    manifest = asked(copied("gemma2"), tmp_path, tokens=TOKENS[:6], prompt_tokens=6, steps=4)
    assert manifest.tokens[:6] == TOKENS[:6]
    assert manifest.tokens[6:] == manifest.generated[:3]
    logits = trace.read(tmp_path / "run" / "reference-full.safetensors").logits
    assert logits[5:].argmax(1).tolist() == manifest.generated


def test_half_precision_has_its_own_limits(copied, tmp_path):
    measured = asked(copied("qwen3"), tmp_path, dtype="bfloat16").proofs
    limits = proofs.MEAN["bfloat16"]
    assert 1e-4 < measured["members_apart"] <= limits["members_apart"] == 5e-2
    folder.check(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model_type": "not-there"}, "config.json: model_type is 'not-there', and transformers "),
        (
            {"model_type": "siglip"},
            "has no causal language model of it; take a version that has one, or another model",
        ),
        (
            {"architectures": ["Qwen2ForSequenceClassification"]},
            "expected Qwen2ForCausalLM; only that can be run",
        ),
        (
            {"rope_traditional": True},
            "key 'rope_traditional' (True), which may change the logits, as Qwen2Config has no "
            "such field",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": "own.Model"}},
            "names code of the checkpoint, which is never run; --ignore-key auto_map",
        ),
        (
            {"model_file": "own.py"},
            "config.json: model_file ('own.py') names code of the checkpoint, which is never run",
        ),
        ({"quantization": {"bits": 4}}, "quantization: group_size is None, expected one of"),
        (
            {"num_hidden_layers": 3, "layer_types": None},
            "the checkpoint has no tensor for its model.layers.2.",
        ),
        (
            {"num_hidden_layers": 1, "layer_types": None},
            "it has no use for the checkpoint's model.layers.1.",
        ),
        ({"num_hidden_layers": 1}, "refuses this model"),
        ({"intermediate_size": 71}, "refuses this model"),
        ({"vocab_size": None}, "vocab_size is None, expected a whole number from 1"),
        (
            {"tie_word_embeddings": True},
            "the head's weights differ from the embedding's though tie_word_embeddings is true",
        ),
    ],
)
def test_what_the_class_does_not_know_is_refused_by_name(copied, changes, line):
    assert line in refused(copied(**changes))


def test_a_key_that_would_change_the_model_cannot_be_ignored(copied):
    place = copied(rope_traditional=True)
    reference.Reference(resolve(str(place), ignore_keys=["rope_traditional"]))
    assert "--ignore-key rms_norm_eps would change the model" in refused(
        place, ignore_keys=["rms_norm_eps", "rope_traditional"]
    )
    assert "--ignore-key rope_theta would change the model" in refused(
        place, ignore_keys=["rope_theta", "rope_traditional"]
    )


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        (
            "model.norm.weight",
            lambda w: w.index_fill(0, torch.tensor([3]), float("nan")),
            "model.norm.weight holds NaN, expected finite weights",
        ),
        (
            "model.extra.weight",
            lambda w: torch.ones(3),
            "it has no use for the checkpoint's model.extra.weight",
        ),
        (
            "model.norm.weight",
            lambda w: torch.ones(w.shape, dtype=torch.int8),
            "model.norm.weight is I8, expected F32, BF16, F16",
        ),
        ("model.norm.weight", lambda w: w[:-1].clone(), "refuses this model"),
    ],
)
def test_a_tensor_that_cannot_be_right_is_refused_by_name(copied, name, change, line):
    place = copied()
    tensors = load_file(place / "model.safetensors")
    save_file(tensors | {name: change(tensors.get(name))}, place / "model.safetensors")
    assert line in refused(place)


def test_no_code_of_a_checkpoint_is_run_and_no_pickle_opened(copied, tmp_path):
    place = copied(auto_map={"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"})
    (place / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\nclass Model: ...\n"
    )
    (place / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert "auto_map" in refused(place)
    assert asked(place, tmp_path, ignore_keys=["auto_map"]).ignored_keys == ["auto_map"]
    assert not (tmp_path / "ran").exists()


def test_what_is_only_known_of_a_llama_is_refused(copied, tmp_path):
    place = copied("phi3")
    with pytest.raises(
        Refusal,
        match="model_type is 'phi3', expected 'llama'; judge mlx-lm on it with `mlxkv compare "
        "--engine mlx-lm`",
    ):
        require_llama(resolve(str(place)))
    with pytest.raises(Refusal, match=r"taps: 'q', expected some of hidden$"):
        asked(place, tmp_path, taps=["q"])
    with pytest.raises(Refusal, match="model_type is 'phi3', expected 'llama'"):
        folder.follow(str(place), plan_files=[], out=tmp_path)
    with pytest.raises(Refusal, match="expected at most 64 "):
        asked(place, tmp_path, tokens=TOKENS, prompt_tokens=None, steps=60)


def test_both_sides_of_longropes_length_are_refused(copied, tmp_path):
    rope = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    place = copied(
        "phi3", rope_scaling=rope, original_max_position_embeddings=10, rope_parameters=None
    )
    with pytest.raises(
        Refusal, match="plan step begins with 5 of 20, expected both on one side of 10"
    ):
        asked(place, tmp_path)


def test_tokens_outside_the_vocabulary_are_refused(copied, tmp_path):
    with pytest.raises(Refusal, match=f"{VOCAB}"):
        asked(copied(), tmp_path, tokens=[VOCAB, *TOKENS])

"""The usual suspects: which there are for a config, and that each is the truth of a model with that
very mistake.
"""

import json

import command
import models
import numpy as np
import pytest
import torch

import oracle
from oracle.formats import disk, run_folder, trace
from oracle.formats.errors import Refusal
from oracle.truth import suspects
from oracle.truth.config import read_config

F32 = frozenset({"F32"})


def listed(layout="gqa", *, dtype="float32", stored=F32, **changes):
    return {
        s.name: s
        for s in suspects.usual(
            read_config(models.config_of(layout, **changes)), dtype=dtype, stored=stored
        )
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Model, run folder and suspects of a tiny model with a head of its own and stretched RoPE."""
    room = tmp_path_factory.mktemp("suspects")
    model = models.make(room / "model", "llama3", tie_word_embeddings=False)
    oracle.run(
        str(model), out=room / "run", tokens=models.tokens(40), steps=0, prompt_tokens=5, threads=1
    )
    suspects.write(room / "run", room / "out")
    return model, room / "run", room / "out"


def truth_of(room, config, weights):
    """The truth's first rows of another model on the same tokens."""
    model = models.write(room / "model", config, weights)
    oracle.run(
        str(model), out=room / "run", tokens=models.tokens(40), steps=0, prompt_tokens=5, threads=1
    )
    return trace.read(room / "run" / "truth.safetensors").logits[:32]


def logits_of(out, name):
    (entry,) = [
        s for s in json.loads((out / "suspects.json").read_text())["suspects"] if s["name"] == name
    ]
    assert disk.sha256(out / entry["file"]) == entry["sha256"]
    found = trace.read(out / entry["file"])
    assert found.positions.tolist() == list(range(32))
    return found.logits


def test_what_the_config_says_itself_is_no_suspect():
    rounded = [
        f"{to}-{group}"
        for to in ("float16", "bfloat16")
        for group in ("all", "attention", "mlp", "embedding")
    ]
    assert list(listed("gqa")) == [
        *(
            "rope_theta-10000",
            "rope_theta-500000",
            "rope_theta-1000000",
            "rms_norm_eps-1e-6",
            "rms_norm_eps-1e-8",
            "interleaved",
            "paired-rows",
        ),
        *rounded,
    ]
    assert list(listed("llama3", rms_norm_eps=1e-8, tie_word_embeddings=False))[:-8] == [
        *(
            "rope_theta-10000",
            "rope_theta-1000000",
            "rms_norm_eps-1e-6",
            "rms_norm_eps-1e-5",
            "interleaved",
            "paired-rows",
        ),
        *("scaling-lost", "rope-lost", "head-tied"),
    ]
    assert list(listed(dtype="bfloat16", stored=frozenset({"F16"})))[7:] == []
    assert list(listed(dtype="float16", stored=frozenset({"F16", "BF16"})))[7:] == rounded[4:]


def test_suspects_are_named_in_words():
    assert {
        name: s.words
        for name, s in listed("llama3", tie_word_embeddings=False).items()
        if "float16" not in name
    } == {
        "rope_theta-10000": "rope_theta 10000 instead of 500000",
        "rope_theta-1000000": "rope_theta 1000000 instead of 500000",
        "rms_norm_eps-1e-6": "rms_norm_eps 1e-6 instead of 1e-5",
        "rms_norm_eps-1e-8": "rms_norm_eps 1e-8 instead of 1e-5",
        "interleaved": "interleaved RoPE: pairs (2i, 2i + 1) turned instead of split halves",
        "paired-rows": "q and k rows of each head in the order 0, head_dim / 2, 1, ... of Meta's "
        "and GGUF files, not undone",
        "scaling-lost": "RoPE scaling lost: the type is default",
        "rope-lost": "RoPE lost whole: type default, and rope_theta 10000 instead of 500000",
        "head-tied": "lm_head tied to the embedding, its own weights lost",
    }
    assert listed()["bfloat16-mlp"].words == "mlp weights rounded to bfloat16"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("rope_theta-10000", {"rope_theta": 10000.0}),
        ("rms_norm_eps-1e-8", {"rms_norm_eps": 1e-8}),
        ("scaling-lost", {"rope_scaling": None}),
        ("rope-lost", {"rope_scaling": None, "rope_theta": 10000.0}),
    ],
)
def test_a_suspect_is_the_truth_of_the_other_config(made, tmp_path, name, changes):
    _, run, out = made
    weights = models.tensors_of(models.config_of("llama3", tie_word_embeddings=False))
    expected = truth_of(
        tmp_path, models.config_of("llama3", tie_word_embeddings=False, **changes), weights
    )
    right = trace.read(run / "truth.safetensors").logits[:32]
    found = logits_of(out, name)
    assert np.abs(found - expected).max() < 1e-12 * np.abs(expected).max()
    assert np.abs(found - right).max() > 1e-6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("group", "parts"),
    [
        ("all", ("",)),
        ("attention", (".self_attn.",)),
        ("mlp", (".mlp.",)),
        ("embedding", ("embed_tokens", "lm_head")),
    ],
)
def test_rounded_weights_are_those_of_the_group_alone(made, tmp_path, dtype, group, parts):
    _, _, out = made
    config = models.config_of("llama3", tie_word_embeddings=False)
    weights = models.tensors_of(config)
    for name, tensor in weights.items():
        if any(part in name for part in parts):
            weights[name] = tensor.to(getattr(torch, dtype)).float()
    expected = truth_of(tmp_path, config, weights)
    assert (
        np.abs(logits_of(out, f"{dtype}-{group}") - expected).max() < 1e-12 * np.abs(expected).max()
    )


def test_a_tied_head_is_the_embedding(made, tmp_path):
    _, _, out = made
    config = models.config_of("llama3", tie_word_embeddings=False)
    weights = models.tensors_of(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    expected = truth_of(tmp_path, config, weights)
    assert np.abs(logits_of(out, "head-tied") - expected).max() < 1e-12 * np.abs(expected).max()


def test_interleaved_rope_is_split_halves_on_reordered_rows(made, tmp_path):
    _, _, out = made
    config = models.config_of("llama3", tie_word_embeddings=False)
    weights = models.tensors_of(config)
    D = config["hidden_size"] // config["num_attention_heads"]
    order = torch.cat([torch.arange(0, D, 2), torch.arange(1, D, 2)])
    for name, tensor in weights.items():
        if "q_proj" in name or "k_proj" in name:
            weights[name] = tensor.view(-1, D, tensor.shape[1])[:, order].reshape(tensor.shape)
    expected = truth_of(tmp_path, config, weights)
    assert np.abs(logits_of(out, "interleaved") - expected).max() < 1e-12 * np.abs(expected).max()


def test_rows_in_pairs_order_are_a_suspect_with_their_biases_too(made, tmp_path):
    _, _, out = made
    config = models.config_of("llama3", tie_word_embeddings=False)
    weights = models.tensors_of(config)
    D = config["hidden_size"] // config["num_attention_heads"]
    order = torch.arange(D).view(2, D // 2).T.flatten()
    assert order.tolist()[:4] == [0, D // 2, 1, D // 2 + 1]
    for name, tensor in weights.items():
        if "q_proj" in name or "k_proj" in name:
            weights[name] = tensor.view(-1, D, tensor.shape[1])[:, order].reshape(tensor.shape)
    expected = truth_of(tmp_path, config, weights)
    assert np.abs(logits_of(out, "paired-rows") - expected).max() < 1e-12 * np.abs(expected).max()
    change, bias = listed("gqa")["paired-rows"].change, torch.arange(20.0)
    assert change("model.layers.0.self_attn.k_proj.bias", bias).tolist()[:3] == [0.0, 5.0, 1.0]
    assert change("model.layers.0.self_attn.v_proj.bias", bias).tolist() == bias.tolist()


def test_the_list_says_of_which_inputs_it_is(made):
    _, run, out = made
    value, manifest = json.loads((out / "suspects.json").read_text()), run_folder.read_manifest(run)
    assert (value["format"], value["inputs"], value["fingerprint"]) == (
        "mlxkv-suspects/1",
        run_folder.suspects_digest(manifest),
        manifest.fingerprint,
    )
    assert sorted(p.name for p in out.iterdir()) == sorted(
        ["suspects.json", *(s["file"] for s in value["suspects"])]
    )


@pytest.mark.parametrize(
    ("changes", "seed", "word"), [({"rope_theta": 10000.0}, 0, "config"), ({}, 1, "weights")]
)
def test_another_model_than_the_run_folders_is_refused(made, tmp_path, changes, seed, word):
    _, run, _ = made
    other = models.make(
        tmp_path / "other", "llama3", seed=seed, tie_word_embeddings=False, **changes
    )
    with pytest.raises(
        Refusal,
        match=f"{word} .*, expected .* as in the run folder; name the model it was made with",
    ):
        suspects.write(run, tmp_path / "out", model=str(other))
    assert not (tmp_path / "out").exists()


def test_a_mistake_that_makes_infinities_is_left_out(tmp_path):
    config = models.config_of("mha")
    weights = models.tensors_of(config)
    weights["model.norm.weight"][3] = 1e5
    model = models.write(tmp_path / "model", config, weights)
    oracle.run(str(model), out=tmp_path / "run", tokens=models.tokens(6), steps=0, threads=1)
    suspects.write(tmp_path / "run", tmp_path / "out")
    names = [
        s["name"] for s in json.loads((tmp_path / "out" / "suspects.json").read_text())["suspects"]
    ]
    assert "float16-all" not in names
    assert {"float16-mlp", "bfloat16-all"} <= set(names)
    assert sorted(p.stem for p in (tmp_path / "out").iterdir()) == sorted([*names, "suspects"])


def test_the_command_prints_the_folder_and_takes_the_model_from_the_run_folder(made, tmp_path):
    model, run, out = made
    for where, arguments in ((tmp_path / "a", []), (tmp_path / "b", [model])):
        done = command.oracle("suspects", run, "--out", where, *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{where}\n", "")
        assert (where / "suspects.json").read_text() == (out / "suspects.json").read_text()
    done = command.oracle("suspects", run, "--out", tmp_path / "c", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)

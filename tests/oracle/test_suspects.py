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
from oracle.formats import disk, run_folder, tensors, trace
from oracle.formats.errors import Refusal
from oracle.truth import mistakes, suspects
from oracle.truth.config import read_config

F32 = frozenset({"F32"})


def listed(layout="gqa", *, dtype="float32", stored=F32, **changes):
    return {
        s.name: s
        for s in mistakes.usual(
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
    """The truth's rows, keys and values of another model on the same tokens."""
    model = models.write(room / "model", config, weights)
    oracle.run(
        str(model), out=room / "run", tokens=models.tokens(40), steps=0, prompt_tokens=5, threads=1
    )
    return trace.read(room / "run" / "truth.safetensors")


def require_same(made, name, expected, *, rows=slice(None)):
    """That what is kept of a suspect is what another model's truth is, and its errors.

    `rows` puts that model's keys into the order of the suspect's.
    """
    _, run, out = made
    value = json.loads((out / "suspects.json").read_text())
    (i,) = [i for i, s in enumerate(value["suspects"]) if s["name"] == name]
    assert value["sha256"] == disk.sha256(out / "suspects.safetensors")
    _, arrays = tensors.read(out / "suspects.safetensors")
    assert arrays["columns"].tolist() == list(range(61))
    right = trace.read(run / "truth.safetensors")
    most = np.abs(expected.logits).max()
    assert np.abs(arrays["logits"][i] - expected.logits).max() < 1e-7 * most
    error = expected.logits - right.logits
    shift = error.mean(1)
    error -= shift[:, None]
    by_position = {"rms": np.sqrt((error**2).mean(1)), "shift": shift, "peak": np.abs(error).max(1)}
    for kind, its in by_position.items():
        assert np.abs(arrays[kind][i] - its).max() < 1e-12 * most
    for layer in range(3):
        for kind in (0, 1):
            mine, its = (t.kv("a", layer)[kind] for t in (expected, right))
            mine = mine if kind else mine[..., rows]
            rms = np.sqrt(((mine - its) ** 2).mean(-1))
            apart = np.abs(arrays["cache"][i, kind, layer] - rms).max()
            assert apart <= 1e-6 * rms.max() + 1e-12 * np.abs(its).max()
    return arrays["rms"][i]


SCALES = ["scale-1", "scale-1/head_dim"]
NORMS = ["norms-1+w", "norms-without-w", "final-norm-without-w"]
CACHES = ["cache-float16", "cache-bfloat16", "cache-8-bit"]


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
            "kv-heads-tiled",
        ),
        *(*SCALES, "scale-1/sqrt(hidden_size/heads)", *NORMS, *rounded, *CACHES),
    ]
    assert list(listed("llama3", rms_norm_eps=1e-8, tie_word_embeddings=False)) == [
        *(
            "rope_theta-10000",
            "rope_theta-1000000",
            "rms_norm_eps-1e-6",
            "rms_norm_eps-1e-5",
            "interleaved",
            "paired-rows",
            "kv-heads-tiled",
        ),
        *("scaling-lost", "rope-lost", "head-tied", *SCALES, *NORMS, *rounded, *CACHES),
    ]
    half = list(listed(dtype="bfloat16", stored=frozenset({"F16"})))
    assert half == [*list(listed())[:14], "cache-8-bit"]
    half = list(listed(dtype="float16", stored=frozenset({"F16", "BF16"})))
    assert half == [*list(listed())[:14], *rounded[4:], "cache-bfloat16", "cache-8-bit"]
    assert "kv-heads-tiled" not in {*listed("mha"), *listed("mqa")}
    biases = [name for name in listed(attention_bias=True, mlp_bias=True) if "biases" in name]
    assert biases == ["dropped-biases", "dropped-attention-biases", "dropped-mlp-biases"]
    assert [name for name in listed(mlp_bias=True) if "biases" in name] == ["dropped-biases"]


def test_suspects_are_named_in_words():
    assert {
        name: s.words
        for name, s in listed("llama3", tie_word_embeddings=False).items()
        if "float16-" not in name
    } == {
        "rope_theta-10000": "rope_theta 10000 instead of 500000",
        "rope_theta-1000000": "rope_theta 1000000 instead of 500000",
        "rms_norm_eps-1e-6": "rms_norm_eps 1e-6 instead of 1e-5",
        "rms_norm_eps-1e-8": "rms_norm_eps 1e-8 instead of 1e-5",
        "interleaved": "interleaved RoPE (pairs 2i and 2i + 1 turned instead of halves)",
        "paired-rows": "q and k rows of each head in the order of Meta's and GGUF files",
        "kv-heads-tiled": "key/value heads tiled over the query heads instead of repeated",
        "scaling-lost": "lost RoPE scaling",
        "rope-lost": "lost RoPE (no scaling and rope_theta 10000 instead of 500000)",
        "head-tied": "lm_head tied to the embedding (its own weights lost)",
        "scale-1": "attention's scale 1 instead of 1 / sqrt(head_dim)",
        "scale-1/head_dim": "attention's scale 1 / head_dim instead of 1 / sqrt(head_dim)",
        "norms-1+w": "norms' weights taken as 1 + weight",
        "norms-without-w": "norms without their weights",
        "final-norm-without-w": "the final norm without its weight",
        "cache-float16": "a cache in float16 precision",
        "cache-bfloat16": "a cache in bfloat16 precision",
        "cache-8-bit": "a cache in 8-bit precision",
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
    weights = models.tensors_of(models.config_of("llama3", tie_word_embeddings=False))
    expected = truth_of(
        tmp_path, models.config_of("llama3", tie_word_embeddings=False, **changes), weights
    )
    assert require_same(made, name, expected).max() > 1e-6


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
    config = models.config_of("llama3", tie_word_embeddings=False)
    weights = models.tensors_of(config)
    for name, tensor in weights.items():
        if any(part in name for part in parts):
            weights[name] = tensor.to(getattr(torch, dtype)).float()
    expected = truth_of(tmp_path, config, weights)
    require_same(made, f"{dtype}-{group}", expected)


def test_a_tied_head_is_the_embedding(made, tmp_path):
    config = models.config_of("llama3", tie_word_embeddings=False)
    weights = models.tensors_of(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    expected = truth_of(tmp_path, config, weights)
    require_same(made, "head-tied", expected)


def test_interleaved_rope_is_split_halves_on_reordered_rows(made, tmp_path):
    config = models.config_of("llama3", tie_word_embeddings=False)
    weights = models.tensors_of(config)
    D = config["hidden_size"] // config["num_attention_heads"]
    order = torch.cat([torch.arange(0, D, 2), torch.arange(1, D, 2)])
    for name, tensor in weights.items():
        if "q_proj" in name or "k_proj" in name:
            weights[name] = tensor.view(-1, D, tensor.shape[1])[:, order].reshape(tensor.shape)
    expected = truth_of(tmp_path, config, weights)
    require_same(made, "interleaved", expected, rows=torch.argsort(order).numpy())


def test_rows_in_pairs_order_are_a_suspect_with_their_biases_too(made, tmp_path):
    config = models.config_of("llama3", tie_word_embeddings=False)
    weights = models.tensors_of(config)
    D = config["hidden_size"] // config["num_attention_heads"]
    order = torch.arange(D).view(2, D // 2).T.flatten()
    assert order.tolist()[:4] == [0, D // 2, 1, D // 2 + 1]
    for name, tensor in weights.items():
        if "q_proj" in name or "k_proj" in name:
            weights[name] = tensor.view(-1, D, tensor.shape[1])[:, order].reshape(tensor.shape)
    expected = truth_of(tmp_path, config, weights)
    require_same(made, "paired-rows", expected)
    suspect, name, bias = (
        listed("gqa")["paired-rows"],
        "model.layers.0.self_attn",
        torch.arange(20.0),
    )
    change = suspect.changes(f"{name}.k_proj.bias")
    assert change("", bias).tolist()[:3] == [0.0, 5.0, 1.0]
    assert suspect.changes(f"{name}.v_proj.bias") is None


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("scale-1", "q_proj", lambda t: t * 12**0.5),
        ("scale-1/head_dim", "q_proj", lambda t: t / 12**0.5),
        ("norms-1+w", "norm", lambda t: t + 1),
        ("norms-without-w", "norm", torch.ones_like),
        ("final-norm-without-w", "model.norm.", torch.ones_like),
    ],
)
def test_a_changed_scale_is_that_of_changed_weights(made, tmp_path, name, part, change):
    config = models.config_of("llama3", tie_word_embeddings=False)
    weights = models.tensors_of(config)
    for key, tensor in weights.items():
        if part in key:
            weights[key] = change(tensor.double()).float()
    expected = truth_of(tmp_path, config, weights)
    if "without" not in name:
        # Weights are float32 in a file, so these are not exact in one.
        found = logits_of(made, name)
        assert np.abs(found - expected.logits).max() < 1e-5 * np.abs(expected.logits).max()
    else:
        require_same(made, name, expected)


def logits_of(made, name):
    value = json.loads((made[2] / "suspects.json").read_text())
    (i,) = [i for i, s in enumerate(value["suspects"]) if s["name"] == name]
    return tensors.read(made[2] / "suspects.safetensors")[1]["logits"][i]


def test_tiled_heads_are_repeated_ones_in_another_order(made, tmp_path):
    config = models.config_of("llama3", tie_word_embeddings=False)
    weights = models.tensors_of(config)
    for name, tensor in weights.items():
        if "q_proj" in name:  # heads 0, 2 read the first key/value head, 1 and 3 the second
            weights[name] = tensor.view(4, 12, -1)[[0, 2, 1, 3]].reshape(tensor.shape)
        if "o_proj" in name:
            order = tensor.view(-1, 4, 12)[:, [0, 2, 1, 3]]
            weights[name] = order.reshape(tensor.shape).contiguous()
    require_same(made, "kv-heads-tiled", truth_of(tmp_path, config, weights))


def test_the_list_says_of_which_inputs_it_is(made):
    _, run, out = made
    value, manifest = json.loads((out / "suspects.json").read_text()), run_folder.read_manifest(run)
    assert (value["format"], value["inputs"], value["fingerprint"]) == (
        "mlxkv-suspects/2",
        run_folder.suspects_digest(manifest, "full"),
        manifest.fingerprint,
    )
    assert sorted(p.name for p in out.iterdir()) == ["suspects.json", "suspects.safetensors"]


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


def test_few_positions_are_followed_as_part_of_the_whole_sequence(tmp_path, monkeypatch):
    # The whole is beyond 32, so longrope has its long factors, in a beginning of it too.
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.5] * 6}
    rope |= {"factor": 2.0, "original_max_position_embeddings": 32}
    tokens = models.tokens(40)
    rows = {}
    for eps in (1e-5, 1e-6):
        model = models.make(
            tmp_path / str(eps) / "model", "llama3", rope_scaling=rope, rms_norm_eps=eps
        )
        run = tmp_path / str(eps) / "run"
        given = {"tokens": tokens, "steps": 0, "prompt_tokens": 36, "threads": 1}
        oracle.run(str(model), out=run, chunks=[33, 3], **given)
        rows[eps] = trace.read(run / "truth.safetensors").logits[:16]
    monkeypatch.setattr(suspects, "MOST", 16)
    monkeypatch.setattr(suspects, "LEAST", 16)
    suspects.write(tmp_path / "1e-05" / "run", tmp_path / "out", plan="step")
    listed = json.loads((tmp_path / "out" / "suspects.json").read_text())["suspects"]
    names = [s["name"] for s in listed]
    _, arrays = tensors.read(tmp_path / "out" / "suspects.safetensors")
    error = rows[1e-6] - rows[1e-5]
    expected = np.sqrt(((error - error.mean(1)[:, None]) ** 2).mean(1))
    found = arrays["rms"][names.index("rms_norm_eps-1e-6")]
    assert found.shape == (16,)
    assert np.abs(found - expected).max() < 1e-12
    # A call of 36 tokens is cut, so what later ones would change in the first 16 is not known.
    assert not any(s["plan"] for s in listed)


def test_a_mistake_at_the_borders_of_calls_is_listed_for_its_plan_alone(made, tmp_path):
    _, run, out = made
    suspects.write(run, tmp_path / "out", plan="chunked")
    full, chunked = (
        json.loads((folder / "suspects.json").read_text())["suspects"]
        for folder in (out, tmp_path / "out")
    )
    masks = [f"{name}-full" for name in ("no-mask", "mask-ahead", "mask-behind")]
    assert [s["name"] for s in full if s["plan"]] == masks
    assert [s["name"] for s in chunked if s["plan"] == "full"] == masks
    assert [s["name"] for s in chunked if s["plan"] == "chunked"] == [
        *(f"{name}-chunked" for name in ("no-mask", "mask-ahead", "mask-behind")),
        *(f"{name}-chunked" for name in ("mask-offset", "no-later-mask", "later-mask-behind")),
        *(f"position-{name}-chunked" for name in ("high", "low", "zero")),
        *(f"cache-held-{to}-chunked" for to in ("float16", "bfloat16", "8-bit")),
    ]
    # The later call has two tokens, so with either mistake its first sees the second.
    (words,) = (s["words"] for s in chunked if s["name"] == "no-later-mask-chunked")
    assert words == (
        "no mask in a call of several tokens after the first, or a mask off by one in a call after "
        "the first (each token sees the next)"
    )


def test_what_changes_no_number_is_no_mistake_and_what_is_the_same_twice_is_one(tmp_path):
    # Biases of zeros, norms of ones, and attention of few tokens that is the same with either mask.
    config = models.config_of("mha", attention_bias=True)
    weights = models.tensors_of(config)
    for name, tensor in weights.items():
        if name.endswith(".bias"):
            weights[name] = torch.zeros_like(tensor)
        if "norm" in name:
            weights[name] = torch.ones_like(tensor)
    model = models.write(tmp_path / "model", config, weights)
    oracle.run(str(model), out=tmp_path / "run", tokens=models.tokens(2), steps=0, threads=1)
    suspects.write(tmp_path / "run", tmp_path / "out")
    listed = json.loads((tmp_path / "out" / "suspects.json").read_text())["suspects"]
    names = {s["name"] for s in listed}
    assert not names & {"dropped-biases", "norms-without-w", "final-norm-without-w"}
    # Of two tokens the first sees the second with no mask, and with one that is off by one.
    assert {"no-mask-full", "mask-ahead-full"} & names == {"no-mask-full"}


def test_the_command_prints_the_folder_and_takes_the_model_from_the_run_folder(made, tmp_path):
    model, run, out = made
    for where, arguments in ((tmp_path / "a", []), (tmp_path / "b", [model])):
        done = command.oracle("suspects", run, "--out", where, *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{where}\n", "")
        assert (where / "suspects.json").read_text() == (out / "suspects.json").read_text()
    done = command.oracle("suspects", run, "--out", tmp_path / "c", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)

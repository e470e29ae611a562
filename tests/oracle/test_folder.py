"""The run folder: whole or not there, checked to the last byte; and the default model's goldens."""

import dataclasses
import json
import shutil
import subprocess
import sys

import models
import numpy as np
import pytest
from folders import refusal

import oracle
from oracle import folder
from oracle.formats import disk, plan, run_folder, trace
from oracle.model.checkpoint import resolve
from oracle.pool import reference
from oracle.question import ask
from oracle.truth import llama, record

PROMPT = "The capital of France is"
GENERATED = [
    7042,
    30,
    198,
    198,
    504,
    2988,
    314,
    42,
    216,
    34,
    32,
    33,
    40,
    29,
    32,
    33,
    29,
    34,
    34,
    216,
]
FILES = [
    "floors.safetensors",
    "plans/chunked.json",
    "plans/full.json",
    "plans/mixed.json",
    "plans/prefixes.json",
    "plans/step.json",
]
FILES += [
    "reference-chunked.safetensors",
    "reference-full.safetensors",
    "reference-step.safetensors",
    "truth.safetensors",
]
PROBE_FILES = [
    "floors.safetensors",
    "manifest.json",
    "plans/chunked.json",
    "plans/full.json",
    "reference-chunked.safetensors",
    "reference-full.safetensors",
    "truth.safetensors",
]
ALL = [*FILES, "manifest.json", *(f"probe/{name}" for name in PROBE_FILES)]
MEMBERS = ["eager-full", "eager-step", "sdpa-full", "sdpa-step", "sdpa-chunked", "sequential-full"]
POOL = [f"pool-{name}.safetensors" for name in MEMBERS if not name.startswith("sdpa")]


@pytest.fixture(scope="module")
def kept(model, tmp_path_factory):
    """A tiny run folder with its whole pool."""
    out = tmp_path_factory.mktemp("oracle") / "run"
    oracle.run(
        model,
        out=out,
        tokens=models.tokens(7),
        steps=6,
        chunks=(2, 4, 1),
        threads=1,
        keep_pool=True,
    )
    return out


def test_the_greedy_run_is_the_runs_of_the_step_plan(kept, model):
    """The reference of the step plan is that run, and no second one of the same calls."""
    stored = trace.read(kept / "reference-step.safetensors")
    reference.set_up(1)  # as `kept` was made: with the threads of another test the bits may differ
    fresh = reference.Reference(resolve(model)).run(stored.meta.plan, attention="sdpa")
    assert fresh.meta.outcomes == stored.meta.outcomes
    assert fresh.arrays.keys() == stored.arrays.keys()
    for name, array in fresh.arrays.items():
        np.testing.assert_array_equal(array, stored.arrays[name], err_msg=name)


def names(path):
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())


def test_the_default_models_greedy_tokens_and_sizes_are_the_goldens(default_run):
    out, manifest = default_run
    assert manifest.generated == GENERATED
    assert manifest.tokens == [504, 3575, 282, 4649, 314, *GENERATED[:19]]
    assert (manifest.prompt, manifest.prompt_tokens, manifest.texts[:5]) == (
        PROMPT,
        5,
        ["The", " capital", " of", " France", " is"],
    )
    assert names(out) == sorted(ALL)
    assert sorted(manifest.files) == FILES
    step = trace.read(out / "reference-step.safetensors")
    assert step.logits.shape == (24, 49152)
    assert step.logits.dtype == np.float32
    assert step.kv("a", 29)[0].shape == (3, 24, 64)
    assert step.kv("a", 30) is None


def test_the_default_models_distances_are_those_known(default_run):
    out, manifest = default_run
    assert manifest.proofs["truth_max"] == pytest.approx(38.246, abs=5e-4)
    assert manifest.proofs["truth_agreement"] < 1e-13
    assert manifest.proofs["transformers_double"] < 1e-13
    assert 3e-5 < manifest.proofs["reference_step_full_max"] < 9e-5
    true = trace.read(out / "truth.safetensors")
    assert true.arrays["tap/029/hidden"].shape == (24, 576)
    assert true.logits.dtype == np.float64
    error = trace.read(out / "reference-full.safetensors").logits[4:] - true.logits[4:]
    assert 5e-6 < np.sqrt((error * error).mean()) < 2e-5
    assert true.logits[4:].argmax(-1).tolist() == GENERATED


def test_the_default_folder_checks_and_shows(default_run):
    out, manifest = default_run
    assert folder.check(out) == manifest
    text = folder.show(out)
    assert "model        SmolLM2-135M-Instruct (wheel, Q4_1 dequantised), float32" in text
    assert "sequence     24 tokens: 'The capital of France is', 5 tokens, and 19 after them" in text
    assert text.endswith(
        "to the machine with MLX and run there: mlxkv compare --oracle default-oracle\n"
    )


def test_the_floors_are_the_formulas(kept):
    pool, floors = run_folder.read_floors(kept / "floors.safetensors")
    assert (pool.members, pool.kinds) == (MEMBERS, ["eager", "sdpa"])
    files = [
        f"reference-{name[5:]}" if name.startswith("sdpa") else f"pool-{name}" for name in MEMBERS
    ]
    members = {
        name: trace.read(kept / f"{file}.safetensors")
        for name, file in zip(MEMBERS, files, strict=True)
    }
    ordinary = [members[name].logits.tobytes() for name in MEMBERS[:5]]
    assert pool.distinct == len(set(ordinary)) >= 3
    assert members[MEMBERS[5]].logits.tobytes() not in ordinary
    assert pool.widest == 48
    true = trace.read(kept / "truth.safetensors")
    for m, name in enumerate(MEMBERS):
        error = members[name].logits.astype(np.float64) - true.logits
        shift = error.mean(1)
        centred = error - shift[:, None]
        np.testing.assert_allclose(floors["shift"][m], shift, rtol=0, atol=1e-16)
        np.testing.assert_allclose(floors["rms"][m], np.sqrt((centred**2).mean(1)), rtol=1e-12)
        np.testing.assert_allclose(floors["peak"][m], np.abs(centred).max(1), rtol=1e-12)
        for i in range(3):
            for kind, mine, ours in zip(
                ("keys", "values"), members[name].kv("a", i), true.kv("a", i), strict=True
            ):
                expected = np.sqrt(((mine.astype(np.float64) - ours) ** 2).mean(-1))
                np.testing.assert_allclose(floors[kind][m, i], expected, rtol=1e-12)
    for k, kind in enumerate(("eager", "sdpa")):
        apart = members[f"{kind}-step"].logits.astype(np.float64) - members[f"{kind}-full"].logits
        np.testing.assert_allclose(floors["cached"][k], np.sqrt((apart**2).mean(1)), rtol=1e-12)


def test_the_manifest_has_measured_proofs_and_no_limits(kept):
    """Their limits are the reader's own, whatever a folder says."""
    proved = {"truth_agreement", "transformers_double", "truth_max", "float32_parts"}
    assert run_folder.read_manifest(kept).proofs.keys() == proved | {"reference_step_full_max"}


def test_the_pools_noise_is_float32s(kept):
    _, floors = run_folder.read_floors(kept / "floors.safetensors")
    assert 1e-9 < floors["rms"].min() < floors["rms"].max() < 1e-5
    assert floors["keys"].max() < 1e-5


def test_the_floors_are_the_same_in_blocks(kept, tmp_path, monkeypatch):
    monkeypatch.setattr("oracle.pool.errors._BLOCK", 4 * models.VOCAB)
    from oracle.pool import errors as floors

    assert floors.blocks(np.zeros((10, models.VOCAB))) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    pooled = ["eager-full", "eager-step", "sequential-full"]
    members = {name: trace.read(kept / f"pool-{name}.safetensors") for name in pooled}
    for name in ("full", "step", "chunked"):
        members[f"sdpa-{name}"] = trace.read(kept / f"reference-{name}.safetensors")
    true = trace.read(kept / "truth.safetensors")
    floors.write(tmp_path / "f.safetensors", true, members, widest=48)
    whole, pieces = (
        run_folder.read_floors(kept / "floors.safetensors"),
        run_folder.read_floors(tmp_path / "f.safetensors"),
    )
    assert whole[0] == pieces[0]
    for name, array in whole[1].items():
        np.testing.assert_allclose(pieces[1][name], array, rtol=1e-12, atol=1e-18)


def test_the_pool_is_kept_when_asked(kept):
    probes = "probe/pool-sequential-full.safetensors"
    assert names(kept) == sorted([*ALL, *POOL, probes])
    folder.check(kept)


def test_the_plans_are_those_asked_for(kept):
    manifest = run_folder.read_manifest(kept)
    chunked = json.loads((kept / "plans" / "chunked.json").read_text())
    assert [len(s["tokens"]) for s in chunked["steps"][1:]] == [2, 4, 1, 1, 1, 1, 1, 1]
    assert manifest.tokens == models.tokens(7) + manifest.generated[:5]
    assert (manifest.prompt, manifest.texts, manifest.note) == (None, [], "")


def test_a_one_token_prompt_has_no_chunked_run(model, tmp_path):
    manifest = oracle.run(model, out=tmp_path / "out", tokens=[5], steps=4, threads=1)
    assert sorted(manifest.plans) == ["full", "prefixes", "step"]
    assert "reference-chunked.safetensors" not in manifest.files
    assert run_folder.read_floors(tmp_path / "out" / "floors.safetensors")[0].members == [
        *MEMBERS[:4],
        MEMBERS[5],
    ]
    folder.check(tmp_path / "out")


def test_prefixes_that_would_feed_too_much_are_left_out(model, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "PREFIXES_MOST", 4 + 5 + 6)
    for steps, plans in (
        (3, ["chunked", "full", "mixed", "prefixes", "step"]),
        (4, ["chunked", "full", "mixed", "step"]),
    ):
        manifest = oracle.run(
            model, out=tmp_path / str(steps), tokens=[5, 9, 2, 7], steps=steps, threads=1
        )
        assert sorted(manifest.plans) == plans
        folder.check(tmp_path / str(steps))


@pytest.mark.parametrize(
    ("given", "prompt", "steps", "length"),
    [(9, 4, 0, 9), (9, None, 0, 9), (1, None, 0, 1), (6, 6, 1, 6), (6, None, 3, 8)],
)
def test_a_sequence_may_be_given_whole(model, tmp_path, given, prompt, steps, length):
    ids = models.tokens(given)
    manifest = oracle.run(
        model, out=tmp_path / "out", tokens=ids, prompt_tokens=prompt, steps=steps, threads=1
    )
    assert manifest.tokens[:given] == ids
    assert (len(manifest.tokens), manifest.prompt_tokens) == (length, prompt or given)
    assert len(manifest.generated) == steps
    folder.check(tmp_path / "out")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_are_judged_on_rounded_weights(model, tmp_path, dtype):
    manifest = oracle.run(
        model, out=tmp_path / "out", tokens=models.tokens(5), steps=4, threads=1, dtype=dtype
    )
    folder.check(tmp_path / "out")
    assert manifest.dtype == dtype
    assert manifest.proofs["transformers_double"] < 1e-13
    _, floors = run_folder.read_floors(tmp_path / "out" / "floors.safetensors")
    assert floors["rms"].min() > 1e-4


def test_more_taps_are_recorded_when_asked_for(model, tmp_path):
    oracle.run(
        model,
        out=tmp_path / "out",
        tokens=models.tokens(5),
        steps=1,
        threads=1,
        taps=("hidden", "scores"),
    )
    true = trace.read(tmp_path / "out" / "truth.safetensors")
    assert true.arrays["tap/002/scores"].shape == (6, 5, 5)
    assert true.arrays["tap/002/hidden"].shape == (5, 48)


@pytest.mark.parametrize("name", [*FILES, "pool-eager-step.safetensors"])
def test_a_changed_byte_is_found_by_file(copy, name):
    with (copy / name).open("r+b") as file:
        file.seek(-3, 2)
        old = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([old[0] ^ 1]))
    assert refusal(folder.check, copy).startswith(f"{copy / name}: sha256 is ")


def test_a_missing_file_is_not_a_pass(copy):
    (copy / "floors.safetensors").unlink()
    assert refusal(folder.check, copy).startswith(f"{copy / 'floors.safetensors'}: cannot be read")


def edited(path, **changes):
    """The folder with another manifest, whose hashes fit what is there."""
    manifest = run_folder.read_manifest(path)
    run_folder.write_manifest(path, dataclasses.replace(manifest, **changes))
    return manifest


def rehashed(path, name):
    value = json.loads((path / "manifest.json").read_text())
    value["files"][name] = disk.sha256(path / name)
    (path / "manifest.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda m: {"files": {k: v for k, v in m.files.items() if k != "truth.safetensors"}},
            "no truth.safetensors in manifest.json",
        ),
        (lambda m: {"fingerprint": "0" * 64}, "fingerprint is"),
        (lambda m: {"config_digest": "0" * 64}, "config digest is"),
        (lambda m: {"dtype": "bfloat16"}, "dtype is float32, expected bfloat16"),
        (
            lambda m: {"tokens": [*m.tokens[:-1], m.tokens[-1] ^ 1]},
            "manifest.json: plan full is ",
        ),
        (lambda m: {"plans": m.plans | {"step": m.plans["full"]}}, "manifest.json: plan step is "),
        (
            lambda m: {"proofs": m.proofs | {"transformers_double": 2e-6}},
            "transformers_double is 2e-06, expected at most 1e-10",
        ),
        (
            lambda m: {"proofs": m.proofs | {"truth_agreement": 2e-10}},
            "truth_agreement is 2e-10, expected at most 1e-10",
        ),
        (lambda m: {"proofs": {}}, "proof truth_agreement is None"),
    ],
)
def test_a_manifest_that_says_something_else_is_refused(copy, change, named):
    edited(copy, **change(run_folder.read_manifest(copy)))
    assert named in refusal(folder.check, copy)


def test_a_trace_of_another_plan_is_refusal(copy):
    shutil.copy(copy / "reference-step.safetensors", copy / "reference-full.safetensors")
    rehashed(copy, "reference-full.safetensors")
    assert "reference-full.safetensors: plan digest is" in refusal(folder.check, copy)


def test_a_number_that_is_not_finite_is_found(copy):
    path = copy / "reference-step.safetensors"
    made = trace.read(path)
    arrays = {name: array.copy() for name, array in made.arrays.items()}
    arrays["logits"][7, 3] = np.inf
    trace.write(path, made.meta, arrays)
    rehashed(copy, path.name)
    assert refusal(folder.check, copy).startswith(f"{path}: logits is not finite at position 7")


@pytest.mark.parametrize(
    "asked", [{"steps": 6}, {"steps": 6, "taps": ("hidden",), "dtype": "float32"}]
)
def test_the_digest_of_the_inputs_is_known_before_the_run(model, kept, asked):
    question = ask(model, tokens=models.tokens(7), chunks=(2, 4, 1), threads=1, **asked)
    found = question.checkpoint
    digest = run_folder.inputs_digest(found.fingerprint, found.config_digest, question)
    assert digest == run_folder.read_manifest(kept).inputs


def test_the_digest_of_the_inputs_needs_no_torch():
    code = "import sys; from oracle.formats.run_folder import Inputs, inputs_digest\n"
    code += "inputs_digest('', '', Inputs(tokens=(1,), prompt_tokens=1, dtype='float32'))\n"
    code += "sys.exit(any(n in sys.modules for n in ('torch', 'transformers', 'mlx')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_input_changes_the_digest():
    weights = {"fingerprint": "f", "config_digest": "c"}
    inputs = {
        "tokens": [1, 2],
        "prompt_tokens": 2,
        "steps": 3,
        "chunks": None,
    }
    inputs |= {"dtype": "float32", "threads": 2}
    other = {
        "fingerprint": "g",
        "config_digest": "d",
        "tokens": [1, 3],
        "prompt_tokens": 1,
        "steps": 4,
        "chunks": [1, 1],
    }
    other |= {"dtype": "float16", "threads": 1, "taps": ["hidden", "q"]}

    def digest(**change):
        changed = (weights | inputs | change).items()
        about = {key: value for key, value in changed if key not in weights}
        model = {key: value for key, value in changed if key in weights}
        return run_folder.inputs_digest(**model, inputs=run_folder.Inputs(**about))

    other |= {"probe": True}
    digests = {digest(), *(digest(**{key: value}) for key, value in other.items())}
    assert len(digests) == 1 + len(other)


def test_an_existing_folder_is_replaced_only_by_force(model, copy, monkeypatch):
    before = (copy / "manifest.json").read_bytes()
    assert "replace them with --force" in refusal(
        oracle.run, model, out=copy, tokens=[1, 2], steps=2, threads=1
    )
    assert (copy / "manifest.json").read_bytes() == before
    oracle.run(model, out=copy, tokens=[1, 2], steps=4, threads=1, force=True)
    assert folder.check(copy).tokens[:2] == [1, 2]
    assert names(copy) == sorted(ALL)
    assert [p.name for p in copy.parent.iterdir()] == ["copy"]


def test_a_damaged_folder_of_ours_can_be_replaced(model, copy):
    (copy / "manifest.json").write_text("{")
    oracle.run(model, out=copy, tokens=[1, 2], steps=2, threads=1, force=True)
    folder.check(copy)


def test_somebody_elses_folder_is_never_replaced(model, copy):
    (copy / "thesis.tex").write_text("years of work")
    assert f"{copy}: holds thesis.tex" in refusal(
        oracle.run, model, out=copy, tokens=[1, 2], steps=2, force=True
    )
    assert (copy / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_a_run_that_is_stopped_leaves_nothing_new_and_the_old_folder_as_it_was(
    model, copy, monkeypatch, error
):
    def stop(*args, **kwargs):
        raise error

    before = {name: (copy / name).read_bytes() for name in names(copy)}
    monkeypatch.setattr(record, "write", stop)
    for out in (copy, copy.parent / "new"):
        with pytest.raises(error):
            oracle.run(model, out=out, tokens=[1, 2], steps=2, threads=1, force=True)
    assert {name: (copy / name).read_bytes() for name in names(copy)} == before
    assert [p.name for p in copy.parent.iterdir()] == ["copy"]


def test_a_failed_proof_is_written_down_and_fails_the_check(model, tmp_path, monkeypatch):
    right = llama.rms_norm
    monkeypatch.setattr(llama, "rms_norm", lambda x, weight, eps: right(x, weight, 1.1 * eps))
    manifest = oracle.run(model, out=tmp_path / "out", tokens=models.tokens(6), steps=3, threads=1)
    assert manifest.proofs["truth_agreement"] < 1e-13
    assert manifest.proofs["transformers_double"] > 3e-6
    assert "FAILS" in folder.show(tmp_path / "out")
    assert "transformers_double is" in refusal(folder.check, tmp_path / "out")


def test_weights_that_are_not_finite_are_refused_and_nothing_is_written(tmp_path):
    config = models.config_of("mha")
    tensors = models.tensors_of(config)
    tensors["model.layers.1.self_attn.v_proj.weight"][0, 0] = float("nan")
    model = models.write(tmp_path / "m", config, tensors)
    line = refusal(oracle.run, str(model), out=tmp_path / "out", tokens=[1, 2], steps=0, threads=1)
    name = "model.layers.1.self_attn.v_proj.weight"
    what = f"{name} holds NaN, expected finite weights; download or save it again"
    assert line == f"{model}/model.safetensors: {what}"
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_run_of_the_pool_that_is_not_finite_is_refused(model, tmp_path, monkeypatch):
    right = reference.Reference.run

    def run(self, plan, *, attention="sdpa"):
        made = right(self, plan, attention=attention)
        if attention == "eager":
            made.logits[3, 4] = np.inf
        return made

    monkeypatch.setattr(reference.Reference, "run", run)
    line = refusal(oracle.run, model, out=tmp_path / "x", tokens=models.tokens(6), steps=0)
    assert line.startswith("transformers trace of plan 'full': logits is not finite at position 3")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        assert str(out) in refusal(oracle.run, "no such model", out=out, tokens=[1, 2])


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, "neither text nor token ids"),
        ({"tokens": [1], "prompt": "x"}, "text and token ids"),
        ({"prompt": "x"}, "no tokenizer.json"),
        ({"tokens": []}, "tokens: none"),
        ({"tokens": [1, 61]}, "id 61 at place 1, expected 0 to 60"),
        ({"tokens": [1] * 110}, "110 and 19 more, expected at most 128"),
        ({"tokens": [1] * 129, "steps": 0}, "129 of them, expected at most 128"),
        ({"tokens": [1, 2], "steps": -1}, "steps: -1"),
        ({"tokens": [1, 2], "dtype": "float64"}, "dtype: 'float64'"),
        ({"tokens": [1, 2], "threads": 0}, "threads: 0"),
        ({"tokens": [1, 2], "chunks": [1, 2]}, "chunks 1,2 do not add up"),
        ({"tokens": [1, 2], "taps": ["foo"]}, "taps: 'foo'"),
        ({"tokens": [1, 2], "prompt_tokens": 1}, "expected steps 0"),
        ({"tokens": [1, 2], "prompt_tokens": 3, "steps": 0}, "prompt-tokens: 3"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused_before_torch_is_needed(model, asked, named):
    assert named in refusal(ask, model, **asked)


@pytest.mark.parametrize(
    ("asked", "segments"),
    [
        ({"steps": 5}, {"full": [9], "step": [5, 1, 1, 1, 1], "chunked": [3, 2, 4]}),
        (
            {"steps": 5, "chunks": [1, 1, 3]},
            {"full": [9], "step": [5, 1, 1, 1, 1], "chunked": [1, 1, 3, 4]},
        ),
        ({"steps": 0}, {"full": [5], "chunked": [3, 2]}),
        (
            {"steps": 0, "prompt_tokens": 2},
            {"full": [5], "step": [2, 1, 1, 1], "chunked": [1, 1, 3]},
        ),
        (
            {"steps": 0, "prompt_tokens": 1},
            {"full": [5], "step": [1, 1, 1, 1, 1], "chunked": [1, 4]},
        ),
    ],
)
def test_the_truth_follows_the_sequence_whole_in_chunks_and_by_steps(model, asked, segments):
    question = ask(model, tokens=models.tokens(5), **asked)
    segments |= {"mixed": plan.mixed_sizes(question.length)}
    assert question.segments(question.plans([0] * 5)) == segments


def test_the_estimate_names_length_time_and_size(model):
    question = ask(model, tokens=models.tokens(7), steps=6)
    assert question.estimate().startswith("oracle: 12 tokens, about 8 s and ")

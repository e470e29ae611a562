"""The probe beside a run folder: what it holds, when it is made, and when it is left out."""

import dataclasses
import json
import shutil

import models
import numpy as np
import pytest
from folders import refusal

import oracle
from oracle import folder
from oracle.formats import disk, plan, run_folder, tensors, trace
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import resolve
from oracle.pool import reference
from oracle.question import ask
from oracle.truth import record
from oracle.truth.config import checked
from oracle.truth.weights import Weights

IDS = plan.probe_tokens(models.VOCAB, 128)
ASKED = {"tokens": [5, 6, 7, 8, 9], "steps": 3, "threads": 1}


@pytest.fixture(scope="module")
def kept(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("oracle") / "run"
    oracle.run(model, out=out, **ASKED)
    return out


def test_the_probe_holds_the_models_own_tokens_in_two_plans_and_some_rows(kept):
    manifest = run_folder.read_manifest(kept / "probe")
    assert (tuple(manifest.tokens), manifest.prompt_tokens, manifest.probe) == (IDS, 106, True)
    assert (manifest.prompt, manifest.generated) == (None, [])
    made = plan.probe_plans(IDS)
    assert manifest.plans == {name: each.digest for name, each in made.items()}
    rows = list(plan.probe_rows(128))
    for name in ("truth", "reference-full", "reference-chunked"):
        found = trace.read(kept / "probe" / f"{name}.safetensors")
        assert found.positions.tolist() == rows
        assert found.logits.shape == (42, models.VOCAB)
        assert found.kv("a", 2)[0].shape == (2, 128, 10)
    assert not run_folder.read_manifest(kept).probe


def test_the_probes_truth_is_the_truth_of_all_rows_at_those_kept(model, kept, tmp_path):
    checkpoint = resolve(model)
    whole = dataclasses.replace(plan.probe_plans(IDS)["full"], rows="all")
    path = tmp_path / "whole.safetensors"
    weights, config = Weights(checkpoint, dtype="float32"), checked(checkpoint)
    record.write(path, weights, config, plan=whole, segments={"full": [128]}, taps=frozenset())
    every, some = trace.read(path), trace.read(kept / "probe" / "truth.safetensors")
    np.testing.assert_allclose(every.logits[some.positions], some.logits, rtol=0, atol=1e-14)
    for mine, its in zip(every.kv("a", 1), some.kv("a", 1), strict=True):
        np.testing.assert_array_equal(mine, its)


def test_the_probes_floors_have_a_column_a_row_and_a_column_a_position(kept):
    pool, floors = run_folder.read_floors(kept / "probe" / "floors.safetensors")
    assert pool.members[:2] == ["sdpa-full", "sdpa-chunked"]
    assert pool.kinds == ["sdpa"]
    members = len(pool.members)
    shapes = dict.fromkeys(("rms", "shift", "peak"), (members, 42)) | {"cached": (1, 42)}
    shapes |= dict.fromkeys(("keys", "values"), (members, 3, 2, 128))
    assert {name: array.shape for name, array in floors.items()} == shapes
    true = trace.read(kept / "probe" / "truth.safetensors").logits
    full, chunked = (
        trace.read(kept / "probe" / f"reference-{name}.safetensors").logits.astype(np.float64)
        for name in ("full", "chunked")
    )
    error = chunked - true - (chunked - true).mean(1, keepdims=True)
    np.testing.assert_allclose(floors["rms"][1], np.sqrt((error**2).mean(1)), rtol=1e-12)
    apart = np.sqrt(((chunked - full) ** 2).mean(1))
    np.testing.assert_allclose(floors["cached"][0], apart, rtol=1e-12)


def test_the_probe_has_both_proofs_and_they_can_fail(model, kept, tmp_path, monkeypatch):
    proofs = run_folder.read_manifest(kept / "probe").proofs
    assert 0 < proofs["truth_agreement"] < 1e-13
    assert 0 < proofs["transformers_double"] < 1e-6
    right = record.llama.rms_norm
    wrong = lambda x, weight, eps: right(x, weight, 1.1 * eps)  # noqa: E731
    monkeypatch.setattr(record.llama, "rms_norm", wrong)
    made = folder.probe(model, out=tmp_path / "p", threads=1)
    assert made.proofs["transformers_double"] > 3e-6
    assert "transformers_double is" in refusal(folder.check, tmp_path / "p")


def test_a_mask_wrong_from_position_100_on_breaks_the_probes_proof(model, tmp_path, monkeypatch):
    right = record.llama.hides

    def wrong(start, rows, columns):
        return right(start + 1 if start + rows > 107 and start > 0 else start, rows, columns)

    monkeypatch.setattr(record.llama, "hides", wrong)
    made = folder.probe(model, out=tmp_path / "p", threads=1)
    assert made.proofs["truth_agreement"] > 1e-6


def test_the_probe_may_be_left_out_apart_or_alone_and_is_the_same(model, kept, tmp_path):
    oracle.run(model, out=tmp_path / "without", probe=False, **ASKED)
    assert not (tmp_path / "without" / "probe").exists()
    folder.check(tmp_path / "without")
    oracle.run(model, out=tmp_path / "a", probe_out=tmp_path / "apart", **ASKED)
    assert not (tmp_path / "a" / "probe").exists()
    folder.probe(model, out=tmp_path / "alone", threads=1)
    found = [tmp_path / "apart", tmp_path / "alone", kept / "probe"]
    manifests = [dataclasses.asdict(folder.check(path)) for path in found]
    assert manifests[0] == manifests[1] == manifests[2]
    for name in ("manifest.json", "truth.safetensors", "floors.safetensors"):
        assert len({(path / name).read_bytes() for path in found}) == 1


def test_the_probes_digest_is_known_before_any_run_and_is_its_own(model, kept):
    checkpoint = resolve(model)
    sizes = checkpoint.vocab_size, checkpoint.max_positions
    inputs = run_folder.probe_inputs(*sizes, dtype="float32", threads=1)
    weights = checkpoint.fingerprint, checkpoint.config_digest
    digest = run_folder.inputs_digest(*weights, inputs)
    assert digest == run_folder.read_manifest(kept / "probe").inputs
    same = {"prompt_tokens": inputs.prompt_tokens, "steps": 0, "threads": 1, "taps": ()}
    question = ask(model, tokens=IDS, **same)
    assert run_folder.inputs_digest(*weights, question) != digest
    assert ask(model, tokens=[3], threads=1).probed() == ask(model, **ASKED).probed()


def test_a_model_for_one_token_has_no_probe_and_one_for_two_has():
    how = {"dtype": "float32", "threads": 1}
    assert run_folder.probe_inputs(61, 1, **how) is None
    assert run_folder.probe_inputs(61, 2, **how).tokens == (0, 60)


def test_a_probe_that_cannot_be_measured_is_left_out_and_said(model, tmp_path, monkeypatch):
    right = reference.Reference.run

    def run(self, plan, **how):
        made = right(self, plan, **how)
        if plan.name == "chunked" and len(made.logits) == 42:
            made.logits[3, 4] = np.inf
        return made

    monkeypatch.setattr(reference.Reference, "run", run)
    for place in ({}, {"probe_out": tmp_path / "apart"}):
        notes = []
        oracle.run(model, out=tmp_path / "x", force=True, note=notes.append, **place, **ASKED)
        assert notes[1].startswith("warning: no probe, as it cannot be measured: transformers")
        assert notes[1].count("not finite at position 3") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["x"]
        assert not (tmp_path / "x" / "probe").exists()
        folder.check(tmp_path / "x")
    line = refusal(folder.probe, model, out=tmp_path / "alone", threads=1)
    assert "not finite at position 3" in line
    assert not (tmp_path / "alone").exists()


def test_a_truth_of_the_probe_that_is_not_finite_leaves_the_answer(model, tmp_path, monkeypatch):
    right = record.llama.write_logits

    def write(streams, head, out, *, positions):
        if positions[-1] == 127:
            streams = {name: hidden * np.inf for name, hidden in streams.items()}
        return right(streams, head, out, positions=positions)

    monkeypatch.setattr(record.llama, "write_logits", write)
    notes = []
    oracle.run(model, out=tmp_path / "x", note=notes.append, **ASKED)
    assert "logits of full at positions from 0 on are not finite" in notes[1]
    assert not (tmp_path / "x" / "probe").exists()


def test_the_check_reads_the_probe_too(copy):
    path = copy / "probe" / "truth.safetensors"
    with path.open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"?")
    assert refusal(folder.check, copy).startswith(f"{path}: sha256 is ")
    assert refusal(folder.show, copy).startswith(f"{path}: sha256 is ")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fingerprint": "0" * 64}, "fingerprint is "),
        ({"config_digest": "0" * 64}, "config_digest is "),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', expected 'float32' as beside its run folder"),
        ({"probe": False}, "probe is False, expected True"),
    ],
)
def test_a_probe_of_another_model_is_refused(copy, changes, says):
    found = run_folder.read_manifest(copy / "probe")
    run_folder.write_manifest(copy / "probe", dataclasses.replace(found, **changes))
    line = refusal(folder.check, copy)
    assert line.startswith(f"{copy}/probe/manifest.json: {says}")


def test_a_probe_whose_pool_added_up_other_rows_is_refused(copy):
    path = copy / "probe" / "floors.safetensors"
    pool, arrays = run_folder.read_floors(path)
    arrays = {name: np.array(array) for name, array in arrays.items()}
    with tensors.writer(path, {n: (a.dtype.type, a.shape) for n, a in arrays.items()}) as out:
        for name, array in arrays.items():
            out.arrays[name][...] = array
        out.finish(run_folder.Pool(pool.members, pool.kinds, pool.distinct, 10**6).to_json())
    found = run_folder.read_manifest(copy)
    probe = json.loads((copy / "probe" / "manifest.json").read_text())
    probe["files"]["floors.safetensors"] = disk.sha256(path)
    (copy / "probe" / "manifest.json").write_text(json.dumps(probe))
    says = "the sequential member added up rows of 1000000, expected 48 as in its run folder"
    assert says in refusal(folder.check, copy)
    with pytest.raises(Refusal, match=says):
        run_folder.probe_of(copy, found)


def test_a_run_folder_may_lose_its_probe(copy):
    shutil.rmtree(copy / "probe")
    folder.check(copy)
    assert "probe" not in folder.show(copy)


def test_a_probe_of_fewer_plans_or_rows_fails_the_check(copy):
    path = copy / "probe"
    found = run_folder.read_manifest(path)
    full = json.loads((path / "plans" / "full.json").read_text())
    (path / "plans" / "full.json").write_text(json.dumps(full | {"rows": full["rows"][:-1]}))
    other = plan.read(path / "plans" / "full.json")
    files = found.files | {"plans/full.json": disk.sha256(path / "plans" / "full.json")}
    plans = found.plans | {"full": other.digest}
    run_folder.write_manifest(path, dataclasses.replace(found, files=files, plans=plans))
    assert f"manifest.json: plan full is {other.digest[:12]}" in refusal(folder.check, copy)


def test_the_place_of_the_probe_is_refused_before_any_work(model, tmp_path):
    out = tmp_path / "out"
    for place in (out, out / "there", tmp_path):
        line = refusal(oracle.run, "no such model", out=out, probe_out=place, tokens=[1, 2])
        assert line.startswith(f"probe-out: {place}, expected {out / 'probe'} or a folder apart")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    for place in ({"probe_out": tmp_path / "full"}, {"out": tmp_path / "full"}):
        line = refusal(oracle.run, "no such model", **({"out": out} | place), tokens=[1, 2])
        assert "holds thesis.tex" in line
    oracle.run(model, out=out, **ASKED)
    (out / "probe" / "thesis.tex").write_text("years of work")
    assert "holds thesis.tex" in refusal(oracle.run, model, out=out, force=True, **ASKED)


def test_a_stop_in_the_probe_leaves_both_folders_as_they_were(model, kept, tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    shutil.copytree(kept / "probe", tmp_path / "apart")
    before = (tmp_path / "apart" / "manifest.json").read_bytes()
    monkeypatch.setattr("oracle.answer._manifest", stop)
    with pytest.raises(KeyboardInterrupt):
        oracle.run(model, out=tmp_path / "x", probe_out=tmp_path / "apart", force=True, **ASKED)
    assert [path.name for path in tmp_path.iterdir()] == ["apart"]
    assert (tmp_path / "apart" / "manifest.json").read_bytes() == before


def test_the_estimate_has_the_probe(model):
    question = ask(model, **ASKED)
    assert question.estimate().startswith("oracle: 7 tokens, about 8 s and ")
    both = question.estimate(question.probed())
    assert both.startswith("oracle: 7 tokens and a probe of 128 tokens, about 8 s and ")


def test_longrope_has_no_probe_where_its_chunks_would_lie_on_both_sides(tmp_path):
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 5, "long_factor": [2.0] * 5}
    for original, has in ((32, True), (110, False)):
        changes = {"rope_scaling": scaling, "original_max_position_embeddings": original}
        made = models.make(tmp_path / str(original), "gqa", **changes)
        question = ask(str(made), tokens=list(range(40)), steps=0, chunks=[36, 4], threads=1)
        assert ("mixed" in question.plans([])) is (original > 40)
        if has:
            question.probed()
            continue
        with pytest.raises(Refusal, match="both on one side of 110"):
            question.probed()


def test_a_folder_of_version_0_1_is_refused_with_the_command_that_makes_it_anew(copy):
    path = copy / "manifest.json"
    value = json.loads(path.read_text())
    old = {key: of for key, of in value.items() if key not in ("original", "probe")}
    old |= {"format": "mlxkv-oracle/1"}
    begun = f"{path}: format is 'mlxkv-oracle/1', of version 0.1, expected 'mlxkv-oracle/2'; "
    source = old["source"]
    tail = f"--dtype float32 --out {copy} --force"
    for change, command in (
        ({}, f"{source} --tokens 5,6,7,8,9 --steps 3 {tail}"),
        ({"source": "default", "prompt": "it's"}, f"""--prompt 'it'"'"'s' --steps 3 {tail}"""),
        ({"generated": [], "prompt_tokens": 7}, f"{source} --tokens 5,6,7,8,9,"),
        ({"prompt": "a\nb", "revision": "abc"}, f"{source} --revision abc --tokens 5,6,7"),
        ({"ignored_keys": ["x"]}, "--dtype float32 --ignore-key=x --out"),
    ):
        path.write_text(json.dumps(old | change))
        line = refusal(run_folder.read_manifest, copy)
        assert line.startswith(f"{begun}make it anew: mlxkv-oracle run ")
        assert command in line
    path.write_text(json.dumps(old | {"generated": [], "prompt_tokens": 3}))
    assert " --prompt-tokens 3 --steps 0 " in refusal(run_folder.read_manifest, copy)
    path.write_text(json.dumps(old | {"tokens": 5}))
    line = refusal(run_folder.read_manifest, copy)
    assert line == f"{begun}make the folder anew with `mlxkv-oracle run --out {copy} --force`"


def test_a_probe_without_its_manifest_names_the_command_that_makes_probes(copy):
    (copy / "probe" / "manifest.json").unlink()
    line = refusal(run_folder.read_manifest, copy / "probe")
    assert f"`mlxkv-oracle probe --out {copy / 'probe'} --force`" in line

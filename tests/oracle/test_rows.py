"""Of a long sequence a sample of rows is kept: which, and that the run folder is whole with it."""

import json
from itertools import pairwise

import models
import neighbours
import numpy as np
import pytest

import oracle
from oracle import folder as folders
from oracle.formats import contents, plan, rows, run_folder, tensors, trace
from oracle.formats.disk import sha256
from oracle.formats.errors import Refusal
from oracle.truth import suspects

LONG, N, PROMPT = 70, 120, 100
SIZES = [(1025, 1000, None), (4103, 4083, None), (8191, 8000, [2000, 3000, 3000])]
SIZES += [(32_768, 32_748, None), (32_768, 1, None), (3000, 3000, None)]


def judged(n, prompt, chunks=None, **more):
    made = plan.judged_plans(range(n), prompt=prompt, chunks=chunks, **more)
    assert all(made[name].rows == "last" for name in made if name == "prefixes")
    return {name: one for name, one in made.items() if name != "prefixes"}


@pytest.mark.parametrize(("n", "prompt", "chunks"), SIZES)
def test_the_sample_has_every_border_and_leaves_no_stretch_out(n, prompt, chunks):
    made = judged(n, prompt, chunks)
    kept = made["full"].rows
    borders = [c.held for p in made.values() for c in p.calls() if c.width > 1 and c.held]
    borders += [c.held + c.width for p in made.values() for c in p.calls() if c.width > 1]
    borders += [*range(rows.BLOCK, n, rows.BLOCK), prompt]
    near = {b + by for b in borders for by in (-1, 0, 1) if b + by < n}

    assert {one.rows for one in made.values()} == {kept}
    assert list(kept) == sorted(set(kept))
    assert kept[: rows.FIRST] == tuple(range(rows.FIRST))
    assert kept[-1] == n - 1
    assert near <= set(kept)
    assert max(b - a for a, b in pairwise(kept)) < rows.BLOCK
    decoded = range(prompt, n)
    if len(decoded) <= rows.DECODED:
        assert set(decoded) <= set(kept)
    assert len(kept) <= 64 + 3 * n / rows.BLOCK + 250 + min(len(decoded), rows.DECODED)


def test_the_sample_is_a_fixed_function():
    assert len(judged(4103, 4083)["step"].rows) == 190
    assert judged(1100, 1080)["step"].rows[60:80] == (
        *range(60, 65),
        *(70, 76, 83, 91, 99, 108, 117, 127, 128, 129, 140, 152, 166, 181, 197),
    )  # fmt: skip


def test_short_sequences_and_all_rows_keep_every_row():
    for made in (judged(rows.WHOLE, 1000), judged(4103, 4083, all_rows=True)):
        assert {one.rows for one in made.values()} == {"all"}


def test_eager_leaves_a_long_pool_unless_it_is_the_class_s_own():
    long = rows.WHOLE + 1
    plans = ("full", "step", "chunked", "mixed")

    assert contents.kinds_of(rows.WHOLE) == ("eager", "sdpa")
    assert contents.kinds_of(long) == ("sdpa",)
    assert contents.kinds_of(long, ("sdpa", "eager")) == ("sdpa", "eager")
    assert contents.kinds_of(long, ("eager",)) == ("eager",)
    assert contents.members_of(plans, length=long) == [
        "sdpa-full",
        "sdpa-step",
        "sdpa-chunked",
        "sequential-full",
    ]
    assert len(contents.members_of(plans)) == 6


@pytest.fixture(autouse=True)
def _long(request, monkeypatch):
    if "kept" in request.fixturenames:
        monkeypatch.setattr(rows, "WHOLE", LONG)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny model, and its run folders of a long sequence: with a sample, and with all rows."""
    room = tmp_path_factory.mktemp("rows")
    model = str(models.make(room / "model", max_position_embeddings=256))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "WHOLE", LONG)
        for name in ("sample", "whole"):
            given = {"tokens": models.tokens(PROMPT), "steps": N - PROMPT + 1, "probe": False}
            oracle.run(model, out=room / name, all_rows=name == "whole", **given)
    return room


@pytest.fixture
def kept(made):
    return made / "sample"


def test_a_folder_with_a_sample_is_whole_and_says_so(kept):
    manifest = folders.check(kept)
    found = contents.read(kept)
    n = len(found.measure.positions)

    assert (manifest.all_rows, len(manifest.tokens)) == (False, N)
    assert n < N
    assert found.measure.positions.tolist() == list(
        run_folder.read_plans(kept, manifest)["full"].rows
    )
    assert {name: len(run.logits) for name, run in found.references.items()} == dict.fromkeys(
        ("full", "step", "chunked"), n
    )
    assert found.pool.members == ["sdpa-full", "sdpa-step", "sdpa-chunked", "sequential-full"]
    assert f"rows         {n} of {N} of logits; keys and values of every position" in folders.show(
        kept
    )


def test_a_sample_is_of_the_same_numbers_as_the_whole(kept, made):
    sample, whole = (contents.read(made / name) for name in ("sample", "whole"))
    at = sample.measure.positions

    assert sample.manifest.generated == whole.manifest.generated
    assert whole.manifest.all_rows
    assert np.array_equal(whole.measure.positions, np.arange(N))
    np.testing.assert_allclose(sample.measure.logits, whole.measure.logits[at], rtol=0, atol=1e-12)
    for name, array in sample.measure.arrays.items():
        if name.startswith(("kv/", "tap/")):
            assert np.array_equal(array, whole.measure.arrays[name])
    for name, run in sample.references.items():
        other = whole.references[name]
        np.testing.assert_allclose(run.logits, other.logits[at], rtol=0, atol=1e-5)
        assert run.kv("a", 1)[0].shape == other.kv("a", 1)[0].shape


def test_a_sample_that_says_it_were_all_rows_is_refused(kept, copy):
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"all_rows": false', '"all_rows": true'))

    with pytest.raises(Refusal, match=r"plan full is .*, expected .* of the 120 tokens"):
        contents.read(copy)


def test_other_rows_than_those_of_the_tokens_are_refused(kept, copy):
    """A folder's plans are made anew from its tokens, whatever rows it names itself."""
    manifest = run_folder.read_manifest(copy)
    for name, one in run_folder.read_plans(copy, manifest).items():
        if name != "prefixes":
            fewer = plan.Plan(name, one.steps, one.rows[:40])
            (copy / "plans" / f"{name}.json").write_text(json.dumps(fewer.to_json()))
            manifest.plans[name] = fewer.digest
    for name in manifest.files:
        manifest.files[name] = sha256(copy / name)
    run_folder.write_manifest(copy, manifest)

    with pytest.raises(Refusal, match="plan full is"):
        contents.read(copy)


def test_suspects_are_followed_over_the_rows_before_the_first_gap(kept, tmp_path):
    suspects.write(kept, tmp_path / "out")
    _, arrays = tensors.read(tmp_path / "out" / "suspects.safetensors")

    assert arrays["rms"].shape[1] == rows.FIRST + 1
    right = trace.read(kept / "truth.safetensors")
    assert right.positions[: rows.FIRST + 1].tolist() == list(range(rows.FIRST + 1))


def test_a_long_pool_without_a_truth_keeps_its_class_s_own_eager(kept, tmp_path):
    model = neighbours.make(tmp_path / "model", "qwen3", max_position_embeddings=256)
    ids = [(5 + 7 * i * i + 3 * i) % neighbours.VOCAB for i in range(PROMPT)]
    made = oracle.run(str(model), out=tmp_path / "run", tokens=ids, steps=21, probe=False)
    found = contents.read(tmp_path / "run")

    assert [name for name in made.pool if name.startswith("eager")] == [
        "eager-full",
        "eager-step",
        "eager-chunked",
    ]
    assert len(found.measure.logits) < N

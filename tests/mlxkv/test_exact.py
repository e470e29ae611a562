"""The port in float64 a layer at a time: the numbers of the whole model, and one layer's memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_files
import mlx.core as mx
import models
import numpy as np
import pytest
from caches import settled
from gguf.constants import GGMLQuantizationType
from packed_models import quantised
from test_gguf import CONFIG as GGUF_CONFIG
from test_gguf import METADATA
from test_rope_types import TYPES, described

from mlxkv.engines import exact, port, recorder
from mlxkv.engines.job import Job, longest_first
from mlxkv.port import llama
from mlxkv.port.cache import Cache
from mlxkv.port.llama import Block, parameters
from mlxkv.port.weights import Filling, load
from oracle.formats.plan import (
    Call,
    Clone,
    Crop,
    Greedy,
    New,
    Plan,
    Reset,
    fewer_prefixes,
    judged_plans,
    probe_plans,
)
from oracle.formats.trace import CACHES, SHARED, TAPS, Meta, Trace, read, write
from oracle.model.checkpoint import resolve

JobOf = Callable[..., Job]
TOKENS = models.ids(24)


@pytest.fixture
def job_of(tmp_path: Path) -> JobOf:
    def job(folder: Path, plans: Sequence[Plan], *, rounded: str = "float32", **more: Any) -> Job:
        return Job(str(folder), tuple(plans), tmp_path / "out", "float64", rounded, "cpu", **more)

    return job


def judged(tokens: list[int], prompt: int = 7) -> tuple[Plan, ...]:
    return longest_first(map(fewer_prefixes, judged_plans(tokens, prompt=prompt).values()))


def followed(job: Job) -> dict[str, Trace]:
    """The job's traces by plan, as its process would leave them."""
    checkpoint = resolve(job.folder)
    filling = Filling(checkpoint, "float64", rounded_to=job.weights_dtype)
    meta = job.meta(checkpoint, {"device": "cpu"}, engine="mlxkv", version="")
    exact.follow(job, filling, meta, "")
    assert all(array.size == 0 for array in parameters(filling.model).values() if array.ndim > 1)
    return {plan.name: read(job.trace(plan)) for plan in job.plans}


def require_same(job: Job) -> None:
    """Each trace is that of the whole model, plan by plan."""
    model = load(job.folder, "float64", rounded_to=job.weights_dtype)
    for name, found in followed(job).items():
        expected = port.run(model, next(plan for plan in job.plans if plan.name == name))
        assert found.meta.outcomes == expected.meta.outcomes
        assert found.meta.environment[CACHES] == expected.meta.environment[CACHES]
        assert found.arrays.keys() == expected.arrays.keys()
        top = np.abs(expected.logits).max(initial=1)
        for key, array in expected.arrays.items():
            assert found.arrays[key].dtype == array.dtype
            apart = np.abs(found.arrays[key] - array).max(initial=0)
            assert apart <= (1e-13 * top if key == "logits" else 0), (name, key)


@pytest.mark.parametrize("rounded", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", models.LAYOUTS)
def test_the_traces_are_those_of_the_whole_model(
    layout: str, rounded: str, job_of: JobOf, tmp_path: Path
) -> None:
    config = models.config(layout)
    stored = {"gqa": np.float16}.get(layout, np.float32)
    weights = {name: array.astype(stored) for name, array in models.weights(config).items()}
    folder = models.save(tmp_path / "model", config, weights)

    require_same(job_of(folder, judged(TOKENS), rounded=rounded))


@pytest.mark.parametrize("n", [12, 40])
@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "longrope"])
def test_so_are_those_of_other_ropes_and_lengths(
    name: str, n: int, job_of: JobOf, tmp_path: Path
) -> None:
    folder = models.save(tmp_path / "model", described(TYPES[name]))

    require_same(job_of(folder, judged(models.ids(n))))


@pytest.mark.parametrize("tied", [True, False])
def test_so_are_those_of_packed_weights(tied: bool, job_of: JobOf, tmp_path: Path) -> None:
    config = models.config("gqa", hidden_size=64, intermediate_size=96, tie_word_embeddings=tied)
    plain = models.save(tmp_path / "plain", config)
    packed = quantised(plain, tmp_path / "packed", stored=mx.bfloat16)

    require_same(job_of(packed, judged(TOKENS)))


def test_so_are_those_of_a_gguf_file(
    job_of: JobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "cache"))
    kind, size = GGMLQuantizationType.Q8_0, GGUF_CONFIG["head_dim"]
    arrays = models.weights(GGUF_CONFIG)
    path = tmp_path / "tiny.gguf"
    gguf_files.write(path, arrays, METADATA, head_dim=size, kind=kind)

    require_same(job_of(path, judged(TOKENS)))


def test_a_head_in_many_blocks_is_the_head(
    job_of: JobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.save(tmp_path / "model", models.config("gqa"))
    monkeypatch.setattr(exact, "HEAD", 7 * 32)  # of 40 ids the last block has 5

    require_same(job_of(folder, judged(TOKENS)))


def test_rows_and_refused_steps_are_as_they_were(job_of: JobOf, tmp_path: Path) -> None:
    folder = models.save(tmp_path / "model", models.config("gqa"))
    ids = tuple(TOKENS)
    odd = (New("a"), Call("a", ids[:4]), Call("a", (99,)), Call("a", (3,), 2), Call("a", (5, 6)))
    odd += (New("b"), Call("b", (1,) * 65), New("a"), Call("a", (7,)), New("b", use_kv_cache=False))
    plans = [
        Plan("odd", (*odd, Call("b", (3, 4)), Call("b", (3,), 1))),
        Plan("last", (New("a"), Call("a", ids[:9], 0), Call("a", ids[9:12], 9)), "last"),
        Plan("some", (New("a"), Call("a", ids[:9]), Call("a", ids[9:]), Call("a", (1,))), (3, 8)),
        Plan("none", (New("a"),)),
        Plan("unkept", (New("a"), Call("a", ids[:3]), Call("a", ids[3:5])), (4,)),
    ]

    require_same(job_of(folder, plans))
    found = followed(job_of(folder, plans))
    assert [bool(o.error) for o in found["odd"].meta.outcomes] == [
        *(False, False, True, True, False, False, True),
        *(False, False, False, False, True),
    ]
    assert found["odd"].positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 1]
    assert found["some"].positions.tolist() == [3, 8]


def test_a_plan_may_be_followed_twice(job_of: JobOf, tmp_path: Path) -> None:
    folder = models.save(tmp_path / "model", models.config("gqa"))
    job = job_of(folder, judged(TOKENS), repeat=("step",))

    found = followed(job)["step"]

    again = read(job.repeated(found.meta.plan))
    assert (found.meta.repeat, again.meta.repeat) == (0, 1)
    assert all(np.array_equal(found.arrays[name], again.arrays[name]) for name in found.arrays)


def test_a_first_call_that_two_plans_share_is_computed_once(
    job_of: JobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.save(tmp_path / "model", models.config("gqa"))
    full, chunked = probe_plans(models.ids(60)).values()
    chunked = replace(chunked, rows=chunked.rows[1::2])
    names = full.name, chunked.name
    alone = followed(job_of(folder, [full, chunked]))[chunked.name]
    widths: list[int] = []
    real = Block.__call__

    def call(self: Block, x: mx.array, *given: Any) -> mx.array:
        widths.append(x.shape[1])
        return real(self, x, *given)

    monkeypatch.setattr(Block, "__call__", call)
    found = followed(job_of(folder, [full, chunked], shared=names))

    layers = models.config("gqa")["num_hidden_layers"]
    assert widths == [60, 1, 1, 8] * layers  # chunked's first call has 50
    trace = found[chunked.name]
    assert trace.meta.environment[SHARED] == full.name
    assert SHARED not in found[full.name].meta.environment
    first = trace.arrays["steps"] == 1
    same = np.isin(found[full.name].positions, trace.positions[first])
    assert np.array_equal(trace.logits[first], found[full.name].logits[same])
    np.testing.assert_allclose(trace.logits, alone.logits, rtol=0, atol=1e-12)
    for name, array in alone.arrays.items():
        np.testing.assert_allclose(trace.arrays[name], array, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["gqa", "mqa"])
def test_taps_are_those_of_the_whole_model_and_so_are_fed_layers(
    layout: str, job_of: JobOf, tmp_path: Path
) -> None:
    folder = models.save(tmp_path / "model", models.config(layout))
    plan = judged(TOKENS[:12])[-1]
    model = load(folder, "float64")
    meta = Meta(plan, "x", "1", "float64")
    truth, _ = recorder.run(model, plan, meta)
    shifted = {n: a + 0.1 if n.endswith("hidden") else a for n, a in truth.arrays.items()}
    write(tmp_path / "truth.safetensors", truth.meta, shifted)
    fed = read(tmp_path / "truth.safetensors")
    alone, _ = recorder.run(model, plan, meta, truth=fed)
    job = job_of(folder, [plan], taps=TAPS, truth=str(tmp_path / "truth.safetensors"))
    assert exact.serves(job)

    found = followed(job)[plan.name], read(job.isolated(plan))

    for mine, expected in zip(found, (truth, alone), strict=True):
        assert mine.meta.outcomes == expected.meta.outcomes
        assert mine.arrays.keys() == expected.arrays.keys()
        for name, array in expected.arrays.items():
            np.testing.assert_allclose(mine.arrays[name], array, rtol=1e-13, atol=1e-13)
    assert not np.allclose(found[0].logits, found[1].logits)


def test_plans_that_are_too_many_at_once_go_in_groups(
    job_of: JobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.save(tmp_path / "model", models.config("gqa"))
    job = job_of(folder, judged(TOKENS), shared=("step", "mixed"))
    monkeypatch.setattr(exact, "STATES", 32 * 2 * 24)
    groups = [[run[0].name for run in group] for group in exact.groups_of(job, 32)]
    assert groups == [["step", "mixed"], ["full"], ["prefixes"], ["chunked"]]

    require_same(job)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"guarded": False},
        {"masks": True},
        {"dither": 1},
        {"caches": {"full": "float32"}},
        {"plans": (Plan("p", (New("a"), Greedy("a", (1,), 0, 2))),)},
        {"plans": (Plan("p", (New("a"), Call("a", (1,)), Clone("a", "b"))),)},
        {"plans": (Plan("p", (New("a"), Call("a", (1,)), Crop("a", 0))),)},
        {"plans": (Plan("p", (New("a"), Reset("a"))),)},
        {"plans": (Plan("p", (New("a"), Call("a", ((1, 2),)))),)},
    ],
)
def test_what_cannot_be_known_before_it_is_computed_goes_plan_by_plan(
    changes: dict[str, Any], job_of: JobOf, tmp_path: Path
) -> None:
    job = job_of(tmp_path, judged(TOKENS))

    assert exact.serves(job)
    assert not exact.serves(replace(job, **changes))


# Memory.


def wide(folder: Path, *, layers: int, **changes: Any) -> tuple[Path, int]:
    """A model whose layers are most of it, and how many numbers one layer has."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": layers}
    config = models.config("gqa", **sizes, vocab_size=4096, **changes)
    shapes = models.shapes(config)
    of_layer = [shape for name, shape in shapes.items() if ".layers.0." in name]
    return models.save(folder, config), sum(int(np.prod(shape)) for shape in of_layer)


def test_no_more_than_a_layer_is_in_memory(
    job_of: JobOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, layer = wide(tmp_path / "model", layers=12)
    monkeypatch.setattr(exact, "HEAD", 2**16)
    job, checkpoint = job_of(folder, judged(TOKENS[:12], 5)), resolve(str(folder))
    meta = job.meta(checkpoint, {"device": "cpu"}, engine="mlxkv", version="")
    before = settled()
    mx.reset_peak_memory()
    tracemalloc.start()

    exact.follow(job, Filling(checkpoint, "float64", rounded_to="float32"), meta, "")

    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A matrix as it is stored beside its float64, and the keys and values of a layer in five
    # caches, which grow by 256 rows of 128 bytes.
    beside = 512 * 128 * 4 + 5 * 2 * 256 * 2 * 8 * 8
    assert 8 * layer < mx.get_peak_memory() - before < 8 * layer + beside + 2**18
    # 44 rows of 4,096 logits are 1.4 MB; they, keys and values are only in the mapped file.
    assert most < 2**20


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_long_call_computes_its_parts_one_after_the_other(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = models.config("mqa", max_position_embeddings=1024, intermediate_size=2048)
    model = load(models.save(tmp_path, config), dtype)

    def called() -> tuple[Any, int]:
        cache = Cache(model.config, dtype=dtype)
        held = settled()
        mx.reset_peak_memory()
        logits = np.array(model([models.ids(1000)], cache=cache, places=[0, 499, 999])[0])
        return logits, mx.get_peak_memory() - held

    whole, most = called()
    monkeypatch.setattr(llama, "SCORES", 2**16)
    monkeypatch.setattr(llama, "ROWS", 64)
    parts, fewer = called()

    np.testing.assert_allclose(parts, whole, atol=1e-4 if dtype == "float32" else 1e-12)
    size = 8 if dtype == "float64" else 4
    assert most > 4 * 1000 * 256 * 8 * size
    assert fewer < 1.25 * 2**20 * size

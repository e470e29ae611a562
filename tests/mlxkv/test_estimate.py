"""What a job is said to take against what its process takes."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import models
import numpy as np
import pytest
from caches import settled

from mlxkv.engines import estimate, port
from mlxkv.engines.job import Job
from mlxkv.port import llama
from mlxkv.port.weights import Filling
from oracle.formats.plan import in_calls, judged_plans
from oracle.model.checkpoint import resolve

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 30 MB in float32, of which a layer is 9 MB in float64."""
    config = models.config("gqa", **SIZES)
    shapes = models.shapes(config).items()
    zeros = {name: np.full(shape, 1e-3, np.float32) for name, shape in shapes}
    return models.save(tmp_path_factory.mktemp("middle"), config, zeros)


def peak(job: Job) -> int:
    """The most memory that following the job takes, in bytes: MLX's arrays and Python's objects."""
    checkpoint, rounded = resolve(job.folder), job.weights_dtype
    meta = job.meta(checkpoint, {"device": "cpu"}, engine="mlxkv", version="")
    before = settled()
    mx.reset_peak_memory()
    tracemalloc.start()
    filling = Filling(checkpoint, job.dtype, rounded_to=rounded)
    port.follow_on(job, filling, meta)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most + mx.get_peak_memory() - before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("n", [24, 700])
def test_memory_is_within_half_of_what_is_measured(
    n: int, dtype: str, folder: Path, tmp_path: Path
) -> None:
    plans = judged_plans(models.ids(n, vocab=8192), prompt=n - 5)
    some = [replace(plans["full"], rows=(0, n - 1))]
    checkpoint = resolve(str(folder))
    rounded = "float32" if dtype == "float64" else dtype
    job = Job.on(checkpoint, some, tmp_path, dtype=dtype, weights_dtype=rounded, device="cpu")

    said, measured = estimate.bytes_of(job, checkpoint) - estimate.BASE, peak(job)

    print(said >> 20, measured >> 20, n, dtype)
    assert measured / 1.5 < said < measured * 1.5


def test_time_grows_with_the_work(folder: Path, tmp_path: Path) -> None:
    checkpoint = resolve(str(folder))

    def seconds(n: int, dtype: str = "float32", singles: int = 0) -> float:
        plan = in_calls("p", tuple(models.ids(n)), [n - singles, *[1] * singles])
        job = Job.on(checkpoint, [plan], tmp_path, dtype=dtype)
        return estimate.seconds_of(job, checkpoint)

    assert estimate.START < seconds(10) < seconds(100) < seconds(1000) < seconds(4000)
    assert seconds(4000) > 4 * (seconds(1000) - estimate.START)
    assert seconds(100) < seconds(100, "float64") < seconds(100, "bfloat16")
    assert seconds(100) < seconds(100, singles=50)


def test_an_engine_that_computes_every_row_takes_more(folder: Path, tmp_path: Path) -> None:
    checkpoint = resolve(str(folder))
    plan = replace(judged_plans(models.ids(2000), prompt=1990)["full"], rows=(1999,))
    job = Job.on(checkpoint, [plan], tmp_path, dtype="float32")

    kept = estimate.bytes_of(job, checkpoint)

    assert estimate.bytes_of(job, checkpoint, rows="all") - kept == 2000 * 8192 * 4
    assert estimate.bytes_of(job, checkpoint, rows="some") - kept == 2000 * 8192 * 4
    plan = replace(judged_plans(models.ids(4000), prompt=3990)["full"], rows=(3999,))
    job = replace(job, plans=(plan,))
    kept = estimate.bytes_of(job, checkpoint)
    some = estimate.LEAST + 1
    assert estimate.bytes_of(job, checkpoint, rows="some") - kept == some * 8192 * 4


def test_the_ports_own_blocks_are_those_that_are_counted() -> None:
    assert (estimate.SCORES, estimate.ROWS) == (llama.SCORES, llama.ROWS)

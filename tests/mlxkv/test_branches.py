"""What branches of a prefix cost, by MLX's count, and that each is what its own run would be."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import models
import numpy as np
import pytest
from caches import LAYOUTS, buffers, fresh, same

from mlxkv.commands.pitfalls import memory as branches
from mlxkv.engines.job import Job
from mlxkv.port.cache import BLOCK, Cache
from mlxkv.port.llama import Llama
from mlxkv.port.weights import load
from oracle.formats.child import command
from oracle.formats.errors import Refusal

ModelOf = Callable[..., Llama]
LONG = 4 * BLOCK


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer and many positions."""
    folder = tmp_path_factory.mktemp("long")
    return models.save(
        folder, models.config("gqa", num_hidden_layers=1, head_dim=64, max_position_embeddings=LONG)
    )


@pytest.mark.parametrize(
    ("context", "capacity"), [(300, 2 * BLOCK), (BLOCK, 2 * BLOCK), (BLOCK - 1, BLOCK)]
)
def test_a_clone_costs_nothing_until_its_first_write_and_then_one_copy(
    context: int, capacity: int, long: Path, tmp_path: Path
) -> None:
    """In a process of its own: MLX counts what other tests still hold or let go, too."""
    row = 2 * 2 * 64 * 4

    finished = measured(long, tmp_path, context, 4, 1, dtype="float32")
    assert finished.returncode == 0, finished.stderr
    value = json.loads((tmp_path / "branches.json").read_text())
    found = SimpleNamespace(**value)

    assert (found.context_tokens, found.branches, found.steps) == (context, 4, 1)
    assert (found.rows, found.buffers) == (context * row, -(-context // BLOCK) * BLOCK * row)
    assert found.birth == 0
    assert found.branch_buffers == capacity * row
    assert found.first_write == found.branch_buffers
    assert found.active == 4 * found.branch_buffers
    assert found.per_branch == found.branch_buffers
    # What a single step needs besides, for a model this small.
    assert found.active <= found.peak < found.active + found.branch_buffers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_branch_decoded_in_turn_is_its_own_run(layout: str, model_of: ModelOf) -> None:
    model = model_of(layout)
    parent = branches.prefill(model, 20)
    before = [np.array(b) for b in buffers(parent)]
    clones = [parent.clone() for _ in range(5)]

    last = branches.decode(model, clones, 7)

    assert [len(clone) for clone in clones] == [27] * 5
    assert len(parent) == 20
    assert same([np.array(b) for b in buffers(parent)], before)
    for i, clone in enumerate(clones):
        alone = fresh(model)
        model([branches.tokens(20, 40)], cache=alone)
        logits = [
            np.array(model([[id]], cache=alone)[0]) for id in branches.tokens(7, 40, start=11 + i)
        ]
        assert np.array_equal(last[i], logits[-1])
        assert same([np.array(b) for b in buffers(clone)], [np.array(b) for b in buffers(alone)])


def test_a_prefix_in_chunks_is_the_whole_one(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(long, "float64")
    monkeypatch.setattr(branches, "CHUNK", 33)
    whole = Cache(model.config, dtype="float64")
    model([branches.tokens(100, 40)], cache=whole)

    for found, expected in zip(buffers(branches.prefill(model, 100)), buffers(whole), strict=True):
        np.testing.assert_allclose(np.array(found), np.array(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("given", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (60, 2, 5)])
def test_what_cannot_be_measured_is_refused(given: tuple[int, int, int], model_of: ModelOf) -> None:
    context, n, steps = given

    with pytest.raises(Refusal) as caught:
        branches.measure(model_of(), context=context, branches=n, steps=steps)

    asked = f"context {context}, branches {n}, steps {steps}"
    assert (
        str(caught.value)
        == f"branches: {asked}, expected each from 1 and at most 64 tokens in all; ask for fewer"
    )


def measured(
    model: Path, out: Path, *figures: int, dtype: str = "float16"
) -> subprocess.CompletedProcess[str]:
    """The process that measures, as pitfalls starts it."""
    asked = Job(str(model), (), out, dtype=dtype, weights_dtype=dtype, device="cpu")
    line = command("mlxkv.commands.pitfalls.memory", str(asked.save()), *map(str, figures))
    return subprocess.run(
        line, capture_output=True, text=True, env=os.environ | {"MLXKV_BLAS": "none"}
    )


def test_the_process_writes_the_figures_and_where_they_were_made(
    long: Path, tmp_path: Path
) -> None:
    finished = measured(long, tmp_path, 300, 3, 2)

    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
    value = json.loads((tmp_path / "branches.json").read_text())
    environment, peak = value.pop("environment"), value.pop("peak")
    size = 2 * 2 * 64 * 2 * 2 * BLOCK
    assert (environment["device"], environment["blas"]) == ("cpu", "reference (from MLX)")
    # Attention widens the one layer's keys and values to float32.
    assert 3 * size <= peak < 6 * size
    assert value == {
        "format": "mlxkv-branches/1",
        "model": long.name,
        "dtype": "float16",
        "context_tokens": 300,
        "branches": 3,
        "steps": 2,
        "rows": 300 * 2 * 2 * 64 * 2,
        "buffers": size,
        "birth": 0,
        "first_write": size,
        "active": 3 * size,
        "per_branch": size,
        "branch_buffers": size,
    }


def test_the_process_refuses_in_one_line(long: Path, tmp_path: Path) -> None:
    finished = measured(long, tmp_path, LONG, 8, 16)

    asked = f"context {LONG}, branches 8, steps 16"
    expected = f"expected each from 1 and at most {LONG} tokens in all; ask for fewer"
    line = f"error: branches: {asked}, {expected}\n"
    assert (finished.returncode, finished.stdout, finished.stderr) == (2, "", line)
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]

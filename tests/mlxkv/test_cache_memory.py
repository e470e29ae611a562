"""What a cache costs: clones until one writes, growth over blocks, thousands of steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import models
import numpy as np
import pytest
from caches import LAYOUTS, buffers, config, extend, fresh, rows, run, settled

from mlxkv.port.cache import BLOCK, Cache
from mlxkv.port.weights import load


@pytest.fixture(autouse=True)
def _no_buffers_of_others() -> Iterator[None]:
    """MLX would serve a buffer with a freed one that is up to two pages larger, and count that."""
    before = mx.set_cache_limit(0)
    mx.clear_cache()
    yield
    mx.set_cache_limit(before)


def test_10_clones_share_memory_until_one_writes() -> None:
    shape, random = config("mha", num_hidden_layers=1, head_dim=64), np.random.default_rng(2)
    parent = Cache(shape)
    extend(parent, [rows(random, shape, 200)])
    size = sum(b.nbytes for b in buffers(parent))
    assert size == 2 * 4 * BLOCK * 64 * 4

    alone = settled(parent)
    clones = [parent.clone() for _ in range(5)]
    assert settled(parent, *clones) == alone

    for written, clone in enumerate(clones, start=1):
        extend(clone, [rows(random, shape, 1)])
        assert settled(parent, *clones) == alone + written * size

    # A clone that has its own rows writes in place again.
    extend(clones[0], [rows(random, shape, 1)])
    assert settled(parent, *clones) == alone + 5 * size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_17_growing_over_a_block_boundary_changes_nothing(
    layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = models.config(layout, max_position_embeddings=2 * BLOCK + 8)
    model = load(models.save(tmp_path, long), "float64")
    tokens, cache = models.ids(BLOCK + 6), fresh(model)

    found = run(model, cache, tokens[: BLOCK - 3], *([t] for t in tokens[BLOCK - 3 :]))

    assert [b.shape[2] for b in buffers(cache)] == [2 * BLOCK] * 6
    np.testing.assert_allclose(found, run(model, fresh(model), tokens), atol=1e-10, rtol=0)
    row = 2 * long["num_key_value_heads"] * long["head_dim"] * 8
    assert cache.nbytes == 3 * row * (BLOCK + 6)


def test_17_five_thousand_steps_take_the_caches_bytes_and_nothing_else(tmp_path: Path) -> None:
    changes = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "max_position_embeddings": 5120,
    }
    model = load(models.save(tmp_path, models.config("gqa", **changes)))
    cache = fresh(model)
    mx.eval(model([[1, 2]], cache=cache))
    before = settled(cache) - sum(b.nbytes for b in buffers(cache))

    for i in range(5000):
        # Only the logits are asked for, as a generation loop does.
        mx.eval(model([[i % 40]], cache=cache))

    size = sum(b.nbytes for b in buffers(cache))
    assert (len(cache), size) == (5002, 2 * 2 * 5120 * 8 * 4)
    mx.synchronize()
    assert mx.get_active_memory() - before <= size + 4096


LOOP = """
import sys

import mlx.core as mx

from mlxkv.port.cache import Cache
from mlxkv.port.weights import load

mx.set_default_device(mx.cpu)
folder, kept, guarded = sys.argv[1:]
model = load(folder)
cache = Cache(model.config, dtype=model.dtype, guarded=guarded == "guarded")
base, evaluate = mx.get_active_memory(), mx.eval
mx.reset_peak_memory()
mx.eval = mx.async_eval = None  # no call evaluates by itself
asked = []
for i in range(1000):
    logits = model([[i % 40]], cache=cache)
    asked = asked if kept == "kept" else []
    asked.append(logits)
evaluate(asked)
# The rows that were asked for are the asker's.
print(mx.get_peak_memory() - base - sum(a.nbytes for a in asked), cache.nbytes)
"""


@pytest.mark.parametrize("kept", ["kept", "dropped"])
@pytest.mark.parametrize("guarded", ["guarded", "unguarded"])
def test_17_steps_that_are_evaluated_at_the_end_take_no_copies_of_the_cache(
    kept: str, guarded: str, tmp_path: Path
) -> None:
    changes = {"num_hidden_layers": 2, "max_position_embeddings": 2048}
    models.save(tmp_path, models.config("gqa", **changes))

    done = subprocess.run(
        [sys.executable, "-c", LOOP, str(tmp_path), kept, guarded],
        capture_output=True,
        text=True,
        check=True,
    )

    peak, size = map(int, done.stdout.split())
    assert size == 1000 * 2 * 2 * 2 * 8 * 4
    assert peak <= 2 * size


def test_17_a_lone_cache_is_written_in_place() -> None:
    shape, random = config("mha", num_hidden_layers=1, head_dim=64), np.random.default_rng(3)
    cache = Cache(shape)
    extend(cache, [rows(random, shape, 2)])
    held_before = settled(cache)

    mx.reset_peak_memory()
    for _ in range(20):
        extend(cache, [rows(random, shape, 1)])
        mx.eval(list(buffers(cache)))

    # A copy of either buffer would show in the peak.
    assert mx.get_peak_memory() - held_before < 4 * BLOCK * 64 * 4

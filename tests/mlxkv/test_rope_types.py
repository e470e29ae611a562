"""Every type of RoPE, whole models: the port in float64 against the oracle's truth, and what a
cache made for one refuses.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
import numpy.typing as npt
import pytest
from caches import refused, run, settled
from command import torch_python

from mlxkv.engines import port
from mlxkv.port.cache import Cache, CacheError
from mlxkv.port.config.llama import LlamaConfig
from mlxkv.port.llama import Llama
from mlxkv.port.weights import load
from oracle.formats.plan import Call, New, Plan, judged_plans

Array = npt.NDArray[Any]

ORIGINAL = 16
SHORT, LONG = [1.0 + i / 8 for i in range(8)], [2.0 + 3 * i for i in range(8)]
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": ORIGINAL,
}
BANDS = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0} | BANDS,
    "yarn": YARN,
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, its own attention": YARN | {"attention_factor": 1.2},
    "yarn, two mscales": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3},
    "yarn, its original length left out": {
        k: v for k, v in YARN.items() if k != "original_max_position_embeddings"
    },
    "longrope": LONGROPE,
    "longrope, its own factors": LONGROPE | {"factor": 2.0, "attention_factor": 1.2},
}
LENGTHS = (12, 40)
"""On both sides of the original length."""

TRUTH = """
import json, sys
import numpy as np
from oracle.model.checkpoint import resolve
from oracle.truth import llama as truth
from oracle.truth.config import config_of
from oracle.truth.weights import Weights
for name, folder, tokens, out in json.load(sys.stdin):
    checkpoint = resolve(folder)
    config = config_of(checkpoint)
    weights = Weights(checkpoint, dtype="float32")
    segments = {"full": [len(tokens)], "step": [5] + [1] * (len(tokens) - 5)}
    streams = truth.follow(weights, config, tokens, segments=segments)
    logits = np.zeros((len(tokens), config.vocab_size))
    most, apart = truth.write_logits(streams, weights.head_blocks(config), logits)
    assert apart <= 1e-12 * most, name
    np.save(out, logits)
"""


def described(scaling: dict[str, Any]) -> dict[str, Any]:
    # So small a theta that the pairs of so small a head lie on both sides of every bound.
    return models.config("gqa", head_dim=16, rope_theta=10.0, rope_scaling=scaling)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ropes")
    return {
        name: models.save(root / str(i), described(scaling))
        for i, (name, scaling) in enumerate(TYPES.items())
    }


@pytest.fixture(scope="module")
def truths(
    made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], Array]:
    """The oracle's truth of each type and length, all by one process of its own."""
    root = tmp_path_factory.mktemp("truths")
    asked = [
        (f"{name} {n}", str(folder), models.ids(n), str(root / f"{folder.name}-{n}.npy"))
        for name, folder in made.items()
        for n in LENGTHS
    ]
    done = subprocess.run(
        torch_python("-c", TRUTH), input=json.dumps(asked), text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    return lambda name, n: np.load(root / f"{made[name].name}-{n}.npy")


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", TYPES)
def test_the_port_in_float64_is_the_truth_in_every_plan(
    name: str, n: int, made: dict[str, Path], truths: Callable[[str, int], Array]
) -> None:
    model, true = load(made[name], "float64"), truths(name, n)

    for plan in judged_plans(models.ids(n), prompt=5).values():
        found = port.run(model, plan)
        assert [o.error for o in found.meta.outcomes if o.error] == []
        apart = np.abs(found.logits - true[found.positions]).max() / np.abs(true).max()
        assert apart <= 1e-12, plan.name  # the lane's limit is 1e-10


@pytest.mark.parametrize("name", [name for name in TYPES if name not in ("default", "dynamic")])
def test_each_type_computes_something_of_its_own(
    name: str, truths: Callable[[str, int], Array]
) -> None:
    others = [
        other for other in TYPES if other not in (name, "dynamic" if name == "default" else name)
    ]
    for other in others:
        apart = np.abs(truths(name, 40) - truths(other, 40)).max() / np.abs(truths(name, 40)).max()
        assert apart > 1e-4, other


# Caches.


def test_longrope_chooses_once_and_refuses_to_cross_with_both_numbers(
    made: dict[str, Path],
) -> None:
    model = load(made["longrope"])
    short, long = Cache(model.config), Cache(model.config, max_length=40)
    run(model, short, models.ids(15))
    run(model, long, models.ids(15))

    expected = (
        "cache: position 17 (index_pos 15, 3 tokens) is beyond the 16 rows of the RoPE tables; "
        "longrope turns keys by its short factors up "
        "to 16 tokens and all of them by its long ones beyond; make the cache with max_length=18 "
        "or more"
    )
    assert refused(lambda: model([[1, 2, 3]], cache=short), short) == expected
    assert len(run(model, long, [1, 2, 3])) == 3
    assert not np.array_equal(
        run(model, short, [1]),
        run(model, Cache(model.config, max_length=40), [*models.ids(15), 1])[-1:],
    )
    assert not np.allclose(np.array(short.cos), np.array(long.cos)[:16], atol=0.1)
    assert (repr(short).split(",")[0], repr(long).split(",")[0]) == (
        "Cache(16 of 16 tokens",
        "Cache(18 of 40 tokens",
    )


@pytest.mark.parametrize("length", [16, 17, 40])
def test_longrope_is_the_same_cached_and_uncached(length: int, made: dict[str, Path]) -> None:
    model, ids = load(made["longrope"], "float64"), models.ids(length)
    step, whole = (Cache(model.config, dtype="float64", max_length=length) for _ in range(2))
    none = Cache(model.config, dtype="float64", use_kv_cache=False, max_length=length)

    stepped = run(model, step, ids[:5], *([i] for i in ids[5:]))

    np.testing.assert_allclose(stepped, run(model, whole, ids), rtol=0, atol=1e-12)
    for end in (5, length):
        np.testing.assert_allclose(
            run(model, none, ids[:end])[-1], stepped[end - 1], rtol=0, atol=1e-12
        )


def test_a_clone_and_a_cropped_cache_keep_the_length_they_were_made_for(
    made: dict[str, Path],
) -> None:
    model = load(made["longrope"])
    cache = Cache(model.config, max_length=40)
    run(model, cache, models.ids(20))
    branch = cache.clone()
    cache.crop(3)
    cache.reset()

    assert (branch.max_length, cache.max_length) == (40, 40)
    assert np.array_equal(
        run(model, cache, models.ids(20)),
        run(model, Cache(model.config, max_length=40), models.ids(20)),
    )


def test_dynamic_says_why_it_ends_where_it_does(made: dict[str, Path]) -> None:
    model = load(made["dynamic"])
    cache = Cache(model.config)
    run(model, cache, models.ids(64))

    expected = (
        "cache: position 64 (index_pos 64, 1 tokens) is beyond the 64 rows of the RoPE tables; "
        "max_position_embeddings is 64, and beyond "
        "it dynamic RoPE has other frequencies at every length: cached keys and uncached ones "
        "would differ"
    )
    assert refused(lambda: model([[1]], cache=cache), cache) == expected


def test_a_cache_may_be_made_shorter_than_the_model(made: dict[str, Path]) -> None:
    model = load(made["yarn"])
    cache, whole = Cache(model.config, max_length=10), Cache(model.config)

    assert cache.cos.shape == (10, 8)
    assert np.array_equal(run(model, cache, models.ids(10)), run(model, whole, models.ids(10)))
    expected = (
        "cache: position 10 (index_pos 10, 1 tokens) is beyond the 10 rows of the RoPE tables; "
        "the cache was made with max_length=10; "
        "make the cache with max_length=11 or more"
    )
    assert refused(lambda: model([[1]], cache=cache), cache) == expected


@pytest.mark.parametrize("length", [0, -1, 65, True, 4.0, "4"])
def test_a_length_that_cannot_be_is_refused(length: Any) -> None:
    with pytest.raises(CacheError) as caught:
        Cache(LlamaConfig.from_json(models.config()), max_length=length)

    assert (
        str(caught.value) == f"cache: max_length is {length!r}, expected a whole number from 1 to "
        f"max_position_embeddings 64"
    )


def test_tables_that_would_fill_the_memory_are_refused_before_they_are_made() -> None:
    config = LlamaConfig.from_json(models.config(head_dim=65536, max_position_embeddings=2**24))
    before = settled()

    with pytest.raises(CacheError) as caught:
        Cache(config)

    expected = (
        "cache: RoPE tables of 16777216 rows take 4398046511104 bytes, expected at most "
        "4294967296; give a smaller max_length"
    )
    assert str(caught.value) == expected
    assert settled() == before
    assert len(Cache(config, max_length=4).cos) == 4


# The engine makes every cache of a plan for the plan's longest sequence.


def test_a_plan_that_goes_past_the_model_is_followed_as_far_as_it_goes(
    made: dict[str, Path],
) -> None:
    model: Llama = load(made["longrope"])

    found = port.run(
        model,
        Plan("p", (New("a"), Call("a", tuple(models.ids(60))), Call("a", tuple(models.ids(9))))),
    )

    assert [bool(o.error) for o in found.meta.outcomes] == [False, False, True]

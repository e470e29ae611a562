"""`mlxkv cost`: its figures, its known answers, and planted mistakes, which move it away from them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import models
import numpy as np
import pytest
from command import mlxkv, refused

from mlxkv.commands.cost import ask, metrics, page, picture, probe, run, scoring, variants
from mlxkv.commands.cost.metrics import Known, Value
from mlxkv.commands.cost.probe import Probe
from mlxkv.commands.cost.result import Cost
from mlxkv.commands.cost.rows import Rows
from mlxkv.engines import oracle
from oracle.formats import stored, text
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint, resolve

N, LENGTH, VOCAB = 400, 300, 300
TOKENS = tuple(np.random.default_rng(5).integers(0, VOCAB, N).tolist())
HEADS = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
OWN = Path(__file__).with_name("mistaken_caches.py")  # which imports mlx_lm, and so torch
SPECS = (
    "float16",
    "bfloat16",
    "affine:bits=8,group_size=64",
    "affine:bits=4,group_size=64",
    "affine:keys=8,values=4,group_size=64",
    "affine:keys=4,values=8,group_size=64",
    "window:size=64",
    "window:size=64,keep=4",
    "window:size=1000",
)

RIGHT = [
    ("StoredKVCache:dtype=float16", "float16"),
    ("StoredKVCache:dtype=bfloat16", "bfloat16"),
    ("QuantizedKVCache:bits=8", "affine:bits=8,group_size=64"),
    ("QuantizedKVCache:bits=4", "affine:bits=4,group_size=64"),
    ("SplitKVCache", "affine:keys=8,values=4,group_size=64"),
    ("SplitKVCache:keys=4,values=8", "affine:keys=4,values=8,group_size=64"),
    ("RotatingKVCache:size=64", "window:size=64"),
    ("RotatingKVCache:size=1000", "window:size=1000"),
    (f"{OWN}:quantised", "affine:bits=8,group_size=64"),
    (f"{OWN}:window", "window:size=64"),
    (f"{OWN}:sinks", "window:size=64,keep=4"),
]
WRONG = [
    (f"{OWN}:stale_scale", "affine:bits=8,group_size=64"),
    (f"{OWN}:keys_bits_for_values", "affine:keys=8,values=4,group_size=64"),
    ("SplitKVCache:keys=4,values=8", "affine:keys=8,values=4,group_size=64"),
    (f"{OWN}:window_one_short", "window:size=64"),
    (f"{OWN}:sinks_overwritten", "window:size=64,keep=4"),
]
SINKS = "RotatingKVCache:size=64,keep=4"
CACHES = dict.fromkeys(["KVCache", SINKS, *(cache for cache, _ in RIGHT + WRONG)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A tiny model whose heads are as wide as a group."""
    folder = tmp_path_factory.mktemp("cost") / "model"
    config = models.config("gqa", **HEADS, vocab_size=VOCAB, max_position_embeddings=1500)
    return resolve(str(models.save(folder, config)))


@pytest.fixture(scope="module")
def truth(checkpoint: Checkpoint, room: Path) -> Path:
    return oracle.text_folder(checkpoint, TOKENS, SPECS, fresh=False)


Read = Callable[[str], Rows]


@pytest.fixture(scope="module")
def read(checkpoint: Checkpoint, truth: Path, tmp_path_factory: pytest.TempPathFactory) -> Read:
    """What a cache reads on the text, by the name that --cache takes; all in one process."""
    room = tmp_path_factory.mktemp("rows")
    named = {name: variants.Variant(name, name) for name in CACHES}
    job = scoring.Job(str(checkpoint.folder), str(truth), str(room), named, LENGTH, 64)
    numbers = {name: str(i) for i, name in enumerate(CACHES)}
    job = replace(job, variants={numbers[name]: one for name, one in named.items()})
    assert run._process(job, room / "job.json") == ""

    def rows(name: str) -> Rows:
        facts = run._facts(scoring.facts_file(room, numbers[name]))
        assert facts.failed == ""
        with np.load(scoring.rows_file(room, numbers[name])) as arrays:
            return Rows(**arrays)

    return rows


@pytest.fixture(scope="module")
def known(truth: Path, read: Read) -> Callable[[str, str], Known]:
    """How a cache stands to what a SPEC says."""

    def compared(name: str, spec: str) -> Known:
        answer = np.asarray(text.read(truth).stored[stored.parse(spec).name].kl)
        return metrics.known(spec, answer, read(name), read("KVCache"))

    return compared


# Known answers, and planted mistakes.


@pytest.mark.parametrize(
    ("cache", "spec"),
    RIGHT,
)
def test_a_cache_costs_what_the_oracle_computes_for_one_that_keeps_just_that(
    cache: str, spec: str, known: Callable[[str, str], Known]
) -> None:
    found = known(cache, spec)
    assert found.met, found
    assert spec == "window:size=1000" or abs(found.ratio - 1) < 0.1


@pytest.mark.parametrize(
    ("cache", "spec"),
    WRONG,
)
def test_a_planted_mistake_moves_the_cost_away_from_its_known_answer(
    cache: str, spec: str, known: Callable[[str, str], Known]
) -> None:
    found = known(cache, spec)
    print(found)
    assert not found.met
    assert found.errors > 3


def test_the_sinks_that_mlx_lms_mask_hides_in_a_chunk_are_seen(
    known: Callable[[str, str], Known],
) -> None:
    found = known(SINKS, "window:size=64,keep=4")
    assert not found.met
    assert found.apart > 1000 * found.most_apart

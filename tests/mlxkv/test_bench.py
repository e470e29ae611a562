"""`mlxkv bench`: the figures are those of the turns that were taken."""

from __future__ import annotations

import json
import time
from pathlib import Path

import models
import pytest
from command import mlxkv, refused

from mlxkv.commands import bench

MODEL = Path(__file__).parents[1] / "golden" / "tiny" / "gqa"


def test_speeds_are_tokens_over_seconds_and_ratios_the_ports_over_mlx_lms() -> None:
    begun = time.perf_counter()
    turns = ["--prefill", "8,16", "--decode", "2", "--rounds", "1"]
    done = mlxkv("bench", MODEL, *turns, "--json")
    passed = time.perf_counter() - begun
    assert done.returncode == 0, done.stderr
    speeds = json.loads(done.stdout)["speeds"]
    assert [(s["what"], len(s["ratios"])) for s in speeds] == [
        ("prefill 8", 1),
        ("decode after 8", 1),
        ("prefill 16", 1),
        ("decode after 16", 1),
    ]
    for speed, tokens in zip(speeds, (8, 2, 16, 2), strict=True):
        assert speed["ratio"] == pytest.approx(speed["port"] / speed["other"])
        assert 0 < tokens / speed["port"] + tokens / speed["other"] < passed
    # All turns follow each other, within the time that the command took.
    seconds = (
        tokens / speed[engine]
        for engine in ("port", "other")
        for speed, tokens in zip(speeds, (8, 2, 16, 2), strict=True)
    )
    assert sum(seconds) < passed


def test_turns_longer_than_the_model_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = models.config("gqa", max_position_embeddings=64)
    folder = models.save(tmp_path / "short", config, models.weights(config))
    done = mlxkv("bench", folder, "--prefill", "63", "--decode", "1", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(bench, "speeds", lambda *_: pytest.fail("it runs"))
    done = mlxkv("bench", folder, "--prefill", "8,61", "--decode", "4")
    refused(done, "error: --prefill 61 --decode 4: 61 tokens and 4 after them, expected at most 64")

"""`mlxkv pitfalls --cache` on a tiny model: caches really run, each engine in its process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
from command import Done, mlxkv

OWN = Path(__file__).parent / "own_caches.py"
TALKS = ("--tokens", "3,7,11,2,19", "--other-tokens", "3,7,11,5,19", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, which groups of 64 fit; room for 264 tokens."""
    config = models.config("gqa", head_dim=64, vocab_size=96, max_position_embeddings=512)
    return models.save(tmp_path_factory.mktemp("caches") / "model", config)


def tried(model: Path, out: Path, *caches: str) -> tuple[Done, dict[str, Any]]:
    given = [word for cache in caches for word in ("--cache", cache)]
    done = mlxkv("pitfalls", model, *TALKS, *given, "--out", out)
    path = out / "caches.json"
    return done, json.loads(path.read_text()) if path.exists() else {}


def test_built_in_caches_behave_as_is_known(model: Path, tmp_path: Path) -> None:
    """One of each kind: right, wrong in a known way, a window, bits, a batch, the port."""
    names = ("KVCache", "ConcatenateKVCache", "RotatingKVCache:size=10", "QuantizedKVCache")
    done, value = tried(model, tmp_path, *names, "BatchRotatingKVCache:size=10", "port")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("6 caches, ")
    assert value["surprises"] == []
    lives = {one["cache"]: one["lives"] for one in value["caches"]}
    assert {life["behaviour"] for life in lives["KVCache"].values()} == {
        "right",
        "cannot be expressed",
    }
    trim = lives["ConcatenateKVCache"]["trim"]
    assert (trim["behaviour"], trim["finding"]) == (
        "silently wrong",
        "ConcatenateKVCache.trim forgets nothing",
    )
    assert trim["worst"] > 1e3
    rotating = lives["RotatingKVCache:size=10,keep=0"]
    assert rotating["wide"]["behaviour"] == "lossy by design"
    assert rotating["wide"]["worst"] > 1e3 > 4 > rotating["wide"]["apart"]
    bits = lives["QuantizedKVCache:bits=8,group_size=64"]
    assert bits["blocks"]["behaviour"] == "lossy by design"
    ragged = lives["BatchRotatingKVCache:size=10"]["ragged"]
    assert ragged["behaviour"] == "lossy by design"
    page = (tmp_path / "caches.md").read_text()
    assert "not exercised: batches of more than two rows; " in done.stdout
    assert "batches of more than two rows" in value["not_exercised"]
    assert "- what its format must cost: `mlxkv cost --known SPEC` says" in page
    assert "| a new one |" in page
    assert "## What is not right" in page
    assert "## What the lossy ones lose" in page


def test_a_format_of_ones_own_that_depends_on_its_calls(model: Path, tmp_path: Path) -> None:
    """Said to be so it is right; said to be quantised only, it is told what it could be."""
    own = ["--cache", f"{OWN.parent / 'own_formats.py'}:running", "--lossy"]
    done = mlxkv("pitfalls", model, *TALKS, *own, "depends", "--out", tmp_path / "so")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| reset() |" in (tmp_path / "so" / "caches.md").read_text()
    done = mlxkv("pitfalls", model, *TALKS, *own, "quantised", "--out", tmp_path / "not")
    assert done.returncode == 1, done.stdout + done.stderr
    (one,) = json.loads((tmp_path / "not" / "caches.json").read_text())["caches"]
    assert "--lossy depends" in one["hint"]
    assert (
        "- hint: own_formats.py:running: wrong only" in (tmp_path / "not" / "caches.md").read_text()
    )
    for line in done.stdout.splitlines()[:-1]:
        assert len(line) <= 100, line
    assert "hint: own_formats.py:running: wrong only where it is fed in other calls" in done.stdout


def test_a_lossy_cache_whose_calls_fail_says_why(model: Path, tmp_path: Path) -> None:
    own = ["--cache", f"{OWN.parent / 'own_formats.py'}:fails", "--lossy", "window"]
    done = mlxkv("pitfalls", model, *TALKS, *own, "--out", tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "tokens: its ends were not tried; what its format must cost: `mlxkv cost" in said
    assert "RuntimeError: boom: the table" in said
    assert "(own_formats.py:" in said
    page = (tmp_path / "caches.md").read_text()
    assert "RuntimeError: boom: the table" in page
    assert "(own_formats.py:" in page


def test_ones_own_cache_is_right_or_found_wrong(model: Path, tmp_path: Path) -> None:
    done, value = tried(model, tmp_path / "right", f"{OWN}:make")
    assert done.returncode == 0, done.stdout + done.stderr
    done, value = tried(model, tmp_path / "wrong", f"{OWN}:make_untrimmed")
    assert done.returncode == 1, done.stdout + done.stderr
    (one,) = value["caches"]
    wrong = {name for name, life in one["lives"].items() if life["behaviour"] == "silently wrong"}
    assert {"trim", "draft", "nothing", "broken"} <= wrong
    assert not wrong & {"singles", "chunks", "batch", "blocks", "saved"}
    assert "news: trim on own_caches.py:make_untrimmed: silently wrong" in done.stdout


def test_a_window_of_ones_own_is_measured(model: Path, tmp_path: Path) -> None:
    """Nobody says that it is 6; its ends are tried all the same."""
    done = mlxkv(
        "pitfalls", model, *TALKS, "--cache", f"{OWN}:make_window", "--lossy", "window",
        "--out", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (one,) = json.loads((tmp_path / "caches.json").read_text())["caches"]
    for name in ("ends", "ends-chunks", "wide", "late"):
        assert one["lives"][name]["behaviour"] == "lossy by design"
    undeclared, _ = tried(model, tmp_path / "undeclared", f"{OWN}:make_window")
    assert undeclared.returncode == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cache", "KVCachee"), "--cache: 'KVCachee', expected FILE.py:make"),
        (("--cache", "all", "--lossy", "window"), "--lossy window with --cache all"),
        (("--lossy", "window"), "--lossy window: expected it beside --cache"),
        (("--cache", "KVCache", "--steps", "13"), "--steps 13 with --cache: expected at least 14"),
        (("--cache", "QuantizedKVCache:group_size=128"), "which divides head_dim 64"),
        (("--cache", "KVCache", "--lossy", "window"), "KVCache is known"),
        (("--cache", f"{OWN}:make_nothing"), "gave 0 caches, expected a list of 3"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_one_line(
    model: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    done = mlxkv("pitfalls", model, *TALKS, *options, "--out", tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_transformers_own_caches(model: Path, tmp_path: Path) -> None:
    done, value = tried(model, tmp_path, "StaticCache:size=300", "DynamicSlidingCache:size=10")
    assert done.returncode == 0, done.stdout + done.stderr
    static, sliding = (one["lives"] for one in value["caches"])
    assert static["more"]["finding"] == "StaticCache.crop goes below zero"
    assert sliding["ends-chunks"]["behaviour"] == "lossy by design"
    assert sliding["ragged"]["behaviour"] == "lossy by design"

"""The main job on the real model: the port agrees with the oracle, four faults do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from command import mlxkv

from mlxkv.commands.selftest import run as selftesting
from mlxkv.commands.selftest.faults import FAULTS
from mlxkv.commands.selftest.trial import RIGHTS
from oracle.model.checkpoint import Checkpoint


def test_the_default_model_agrees(default_oracle: Path, tmp_path: Path) -> None:
    done = mlxkv("compare", "--oracle", default_oracle, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("agree (algebra, logits, cache)")
    verdict = json.loads((tmp_path / "compare.json").read_text())
    assert [g["name"] for g in verdict["gates"] if not g["ran"] or g["failed"]] == []
    assert max(g["value"] for g in verdict["gates"] if g["name"] == "sigma") < 3
    assert max(g["value"] for g in verdict["gates"] if g["name"] == "algebra (float64)") < 1e-12
    assert {
        (p["top1_equal"], p["rows"]) for table in verdict["tables"].values() for p in table
    } == {(20, 20)}
    assert f"{verdict['tables']['cached'][0]['max_abs_ref']:.3f}" == "38.246"


FOUR = (
    "attention scale times 1.001",
    "one stale key row, middle layer",
    "a chunk's positions +1",
    "eps times 1.1 in one norm",
)


def test_four_faults_are_found_in_their_place_and_no_right_run_is_accused() -> None:
    done = selftesting.run(selftesting.Request(faults=FOUR, tiny=False))
    (trials,) = done.trials.values()
    assert [t.fault for t in trials] == [*RIGHTS[:2], *(f.name for f in FAULTS if f.name in FOUR)]
    assert [(t.fault, t.why) for t in trials if not t.passed] == []
    assert done.exit_code == 0


def test_a_slightly_wrong_config_differs_although_every_top_1_is_right(
    default_oracle: Path, default_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = tmp_path / "wrong"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(default_checkpoint.folder / "model.safetensors")
    shutil.copy(default_checkpoint.folder / "tokenizer.json", folder)
    (folder / "config.json").write_text(
        json.dumps(default_checkpoint.config | {"rope_theta": 100100.0})
    )
    done = mlxkv("compare", folder, "--oracle", default_oracle, "--out", tmp_path / "out")
    assert done.returncode == 1, done.stdout + done.stderr
    verdict = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert verdict["first_wrong"]["position"] == 1
    assert {g["name"] for g in verdict["gates"] if g["failed"]} >= {"algebra (float64)", "sigma"}
    assert all(p["top1_equal"] == p["rows"] for table in verdict["tables"].values() for p in table)

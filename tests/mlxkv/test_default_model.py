"""The main job on the real model: the port agrees with the oracle, faults do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import mlxkv

from mlxkv.commands.selftest import run as selftesting
from mlxkv.commands.selftest.faults import FAULTS
from mlxkv.commands.selftest.trial import RIGHTS
from mlxkv.port.weights import load
from mlxkv.testing import assert_agrees
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


PAIRS = [
    ("one stale key row, middle layer", "eps times 1.1 in one norm"),
    ("attention scale times 1.001", "a chunk's positions +1"),
]


@pytest.mark.nightly
@pytest.mark.parametrize("pair", PAIRS)
def test_two_faults_are_found_in_their_place_and_no_right_run_is_accused(
    pair: tuple[str, str],
) -> None:
    done = selftesting.run(selftesting.Request(faults=pair, tiny=False))
    (trials,) = done.trials.values()
    assert [t.fault for t in trials] == [*RIGHTS[:2], *(f.name for f in FAULTS if f.name in pair)]
    assert [(t.fault, t.why) for t in trials if not t.passed] == []
    assert done.exit_code == 0


def test_a_slightly_wrong_config_differs_although_every_top_1_is_right(
    default_oracle: Path, default_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").symlink_to(default_checkpoint.folder / "model.safetensors")
    config = default_checkpoint.config | {"rope_theta": 100100.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = []
    for dtype in ("float32", "float64"):
        with pytest.raises(AssertionError) as differs:
            assert_agrees(load(tmp_path, dtype), default_oracle, plans=["full"])
        said.append(str(differs.value))
    assert "; gates: sigma, worst position, " in said[0]
    assert "differ (algebra): first wrong position 1 " in said[1]
    assert "; gates: algebra (float64)" in said[1]
    (line,) = (line for line in said[0].splitlines() if line.startswith("full  "))
    assert line.split()[-1] == "20/20"

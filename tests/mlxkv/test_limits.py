"""The limits are what was measured: who changes one must measure again."""

from __future__ import annotations

import json
from pathlib import Path

from mlxkv.judge import limits
from oracle.formats import noise, proofs

ROOT = Path(__file__).parents[2]


def test_the_limits_are_those_of_the_committed_calibration() -> None:
    (path,) = ROOT.glob("reports/*/linux-x86_64-cpu/calibration.json")
    calibration = json.loads(path.read_text())
    assert limits.current_limits() == calibration["limits"]
    gates = {r["gate"]: r["limit"] for r in calibration["readings"]}
    for name, limit in proofs.TRUTH.items():
        assert limit == gates[f"proof {name}"]
    assert gates["noise floor over max |truth|"] == limits.FLOOR_MOST["float32"]
    assert gates["control: stored errors of the kept runs"] == noise.STORED

"""What correct runs read at each gate, from the judge's own gates, pooled.

Nothing is found good where one reading is beyond its limit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from synthetic import MEMBERS, changed, make_algebra, make_candidates, make_case

from mlxkv.cli import cli
from mlxkv.commands.selftest import calibrate as calibrating
from mlxkv.commands.selftest import calibration_page as pages
from mlxkv.commands.selftest import readings
from mlxkv.commands.selftest.calibrate import Calibration
from mlxkv.commands.selftest.readings import MEMBERS as HELD
from mlxkv.commands.selftest.readings import (
    MLX_LM,
    ORACLE,
    ORDERS,
    PLAIN,
    PORT,
    Range,
    Reading,
    joined,
    ranges,
)
from mlxkv.judge.verdict import judge
from oracle.formats.run_folder import ordinary

ORDINARY = ordinary(MEMBERS)
CASE = make_case()
VERDICT = judge(CASE, make_candidates(CASE), algebra=make_algebra(CASE))
READ = readings.read(CASE, VERDICT)
CACHE = [f"{kind} {what}" for kind in ("keys", "values") for what in ("median", "95%", "worst row")]


def of(whose: str, gate: str, found: list[Reading] | None = None) -> list[Reading]:
    return [r for r in found or READ if (r.whose, r.gate) == (whose, gate)]


def test_every_gate_of_the_verdict_is_read_on_every_plan() -> None:
    assert [(r.gate, r.plan, r.value, r.limit) for r in READ if r.whose == PORT] == [
        (g.name, g.plan, g.value, g.limit) for g in VERDICT.gates
    ]
    assert len({r.gate for r in READ if r.whose == PORT}) == 15


def test_each_member_is_held_out_as_the_control_holds_out_one() -> None:
    assert [r.plan for r in of(HELD, "sigma")] == ORDINARY
    assert {r.gate for r in READ if r.whose == HELD} == {
        "sigma",
        "worst position",
        "peak",
        "shift",
        *CACHE,
    }
    (step,) = [r for r in of(HELD, "sigma") if r.plan == "sdpa-step"]
    assert step.value == pytest.approx(VERDICT.controls[0].value, rel=1e-6)


def test_a_member_far_off_does_not_raise_the_floor_that_it_is_judged_by() -> None:
    floors = dict(CASE.floors) | {name: np.array(CASE.floors[name]) for name in ("rms", "keys")}
    floors["rms"][0] *= 100
    floors["keys"][0] *= 100
    found = readings.of_members(replace(CASE, floors=floors))
    for gate in ("sigma", "keys median"):
        values = {r.plan: r.value for r in of(HELD, gate, found)}
        assert values[ORDINARY[0]] > 50
        assert max(values[name] for name in ORDINARY[1:]) < 1


def test_the_proofs_and_the_floor_are_read_too() -> None:
    assert [r.gate for r in READ if r.whose == ORACLE] == [
        "proof truth_agreement",
        "proof transformers_double",
        "noise floor over max |truth|",
        "control: stored errors of the kept runs",
        "control: sequential-full beside them",
        "control: noise of the pool",
    ]
    assert of(ORACLE, "proof transformers_double") == [
        Reading(ORACLE, "proof transformers_double", "-", 5.5e-16, 1e-10)
    ]
    (floor,) = of(ORACLE, "noise floor over max |truth|")
    assert 1e-7 < floor.value < 1e-6


def reading(value: float, plan: str = "step") -> Reading:
    return Reading(PORT, "sigma", plan, value, 8.0)


RUNS = [
    ("seed 0", [reading(1.0), reading(2.0, "full")]),
    ("seed 1", [reading(4.0), reading(0.5, "full")]),
]
A, B = ranges("a", RUNS), ranges("b", [("seed 0", [reading(3.0)])])


def test_a_range_names_the_run_that_was_worst_and_the_worst_model_speaks_for_all() -> None:
    (first,) = A
    assert first == Range("a", PORT, "sigma", 4, 0.5, 1.5, 4.0, 8.0, "seed 1", "step")
    assert joined([*A, *B]) == Range("a", PORT, "sigma", 5, 0.5, 2.25, 4.0, 8.0, "seed 1", "step")
    assert (first.within, first.headroom) == (True, 2.0)


def test_what_is_not_a_number_is_beyond_every_limit_and_the_worst_of_all() -> None:
    (bad,) = ranges("c", [("seed 0", [reading(1.0), reading(float("nan"), "full")])])
    assert (bad.within, bad.headroom, bad.plan) == (False, None, "full")
    assert joined([*A, bad]).model == "c"


def result(*found: Range, accused: tuple[str, ...] = ()) -> Calibration:
    return Calibration(
        "float32", 2, found, accused, {"a": ["f" * 64]}, {"mlx": "0.32.4"}, {"torch": "2.13.0"}
    )


def test_one_reading_beyond_its_limit_or_one_run_accused_is_a_failure() -> None:
    beyond = replace(A[0], largest=8.1)
    assert result(*A).exit_code == 0
    assert result(beyond).exit_code == 1
    assert result(*A, accused=("a, seed 0: cannot tell: why",)).exit_code == 1
    assert pages.failures([beyond], ["a, seed 0: cannot tell: why"]) == [
        "a, seed 1: port: sigma (step) is 8.1, limit 8",
        "a, seed 0: cannot tell: why",
    ]
    value = json.loads(json.dumps(result(beyond).to_json(), allow_nan=False))
    assert (value["format"], value["exit_code"], value["readings"][0]["within"]) == (
        "mlxkv-calibrate/1",
        1,
        False,
    )


def test_the_console_shows_largest_beside_limit_and_headroom() -> None:
    held = replace(A[0], whose=HELD, largest=8.001, plan="eager-full")
    assert (
        pages.console([*A, *B, held], [], dtype="float32", report="x.md")
        == """\
The port, float32
gate   median  largest  limit  headroom  on
sigma    2.25     4.00   8.00      2.0x  a, seed 1, step

Transformers, each member held out, float32
gate   median  largest  limit  headroom  on
sigma    1.50    8.001  8.000      1.0x  a, seed 1, eager-full

failed: a, seed 1: members: sigma (eager-full) is 8, limit 8
correct runs on 2 models: beyond a limit 1, accused 0    report: x.md
"""
    )
    assert (
        pages.sentence([*A, *B], []) == "every correct run on 2 models is within every limit; "
        "the tightest limit is that of sigma, 2.0x on a"
    )


def test_what_is_far_below_its_limit_is_shown_with_an_exponent() -> None:
    tiny = Range("a", PORT, "algebra (float64)", 4, 1e-15, 2e-15, 3e-15, 1e-3, "seed 0", "full")
    console = pages.console([tiny], [], dtype="float32", report="x.md")
    assert (
        console.splitlines()[2]
        == "algebra (float64)  2.0e-15  3.0e-15  0.001    3e+11x  a, seed 0, full"
    )
    assert "every correct run on a is within every limit" in console


def test_the_report_has_every_gate_by_model() -> None:
    text = pages.markdown([*A, *B], [], result(*A, *B).to_json(), commands=["mlxkv calibrate"])
    assert "| largest |    a |    b |\n| ------- | ---: | ---: |\n| sigma   | 4.00 | 3.00 |" in text
    assert "```sh\nmlxkv calibrate\n```" in text


def test_a_wrong_run_is_not_lost_among_right_ones() -> None:
    runs = make_candidates(CASE)
    runs["step"] = changed(runs["step"], "logits", lambda x: x * np.float32(1.001))
    found = ranges("a", [("seed 0", READ), ("seed 1", readings.read(CASE, judge(CASE, runs)))])
    (sigma,) = [r for r in found if (r.whose, r.gate) == (PORT, "sigma")]
    assert (sigma.within, sigma.run, sigma.plan) == (False, "seed 1", "step")


def test_the_command_measures_a_random_model_in_both_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrating, "LAYOUTS", ("gqa",))
    monkeypatch.setattr(calibrating, "STDS", (0.02,))
    monkeypatch.setattr(calibrating, "WIDE", ((64, "bfloat16"),))
    both = ["gqa-0.02", "wide-64-bfloat16"]
    ran = CliRunner().invoke(
        cli,
        ["calibrate", "--no-real", "--seeds", "1", "--dtype", "float16", "--out", str(tmp_path)],
    )
    assert ran.exit_code == 0, ran.output
    value = json.loads((tmp_path / "calibration.json").read_text())
    port = {r["gate"]: r for r in value["readings"] if r["whose"] == PORT}
    whose = {name: {r["whose"] for r in value["readings"] if r["model"] == name} for name in both}
    assert whose[both[0]] == {PORT, ORDERS, HELD, ORACLE}
    assert whose[both[1]] == {PORT, PLAIN, MLX_LM, HELD, ORACLE}
    assert (value["dtype"], list(value["models"]), port["sigma"]["readings"]) == (
        "float16",
        both,
        5,
    )
    assert port["algebra (float64)"]["largest"] < 1e-13
    assert all(r["within"] for r in value["readings"])
    assert "# Calibration" in (tmp_path / "calibration.md").read_text()

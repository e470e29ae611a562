"""The selftest on small models: every fault found in its place, in float32 and half precision.

And what the package has measured is of today's faults and limits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from synthetic import make_candidates, make_case

from mlxkv.commands import reports
from mlxkv.commands.selftest import page as pages
from mlxkv.commands.selftest import run as selftesting
from mlxkv.commands.selftest.faults import FAULTS, applies
from mlxkv.commands.selftest.models import COMMON, LAYOUTS, Tiny
from mlxkv.commands.selftest.trial import BRANCH, RIGHT, RIGHTS, Trial, unseen
from mlxkv.commands.selftest.worker import Experiment, Ports
from mlxkv.judge import power
from mlxkv.judge.case import read_case
from mlxkv.judge.limits import current_limits
from mlxkv.judge.verdict import judge
from mlxkv.port import cache
from mlxkv.port.config.llama import LlamaConfig
from mlxkv.port.llama import Llama
from oracle.formats.errors import Refusal
from oracle.formats.run_folder import read_plans
from oracle.formats.trace import Meta

ROOT = Path(__file__).parents[2]
NAMES = [fault.name for fault in FAULTS]
LIMITS = current_limits()


def of_layout(layout: str) -> LlamaConfig:
    return LlamaConfig.from_json(COMMON | LAYOUTS[layout])


@pytest.mark.parametrize(
    ("layout", "std", "dtype"),
    [
        ("gqa", 0.02, "float32"),
        pytest.param("mqa", 0.2, "bfloat16", marks=pytest.mark.nightly),
    ],
)
def test_every_fault_is_found_in_its_place_and_no_correct_run_accused(
    layout: str, std: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftesting, "TINY", (Tiny(layout, std, 0),))
    done = selftesting.run(selftesting.Request(real=False, dtype=dtype))
    ((name, trials),) = done.trials.items()
    of = of_layout(layout)
    rights = RIGHTS if sys.platform == "linux" else RIGHTS[:2]
    assert [t.fault for t in trials] == [
        *rights,
        *(f.name for f in FAULTS if applies(f, of, dtype)),
    ]
    assert [(t.fault, t.why) for t in trials if not t.passed] == []
    hints = {t.fault: t.hint or "" for t in trials}
    assert (
        dtype != "float32"
        or "calls of several tokens are noisier than single ones" in hints["TF32-like matmul"]
    )
    assert (done.exit_code, name, done.to_json()["dtype"]) == (0, f"{layout}-{std:g}-0", dtype)


def test_a_branch_that_writes_into_its_parent_is_accused(
    answer: Path, model_of: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = read_case(answer)
    plans = read_plans(answer, case.manifest)
    models = {dtype: model_of("gqa", dtype) for dtype in ("float32", "float64")}
    meta = Meta(
        plans["step"],
        "mlxkv",
        "0",
        "float32",
        fingerprint=case.manifest.fingerprint,
        config_digest=case.manifest.config_digest,
    )
    experiment = Experiment(case, plans, Ports(models, meta, {"tanh": 0.0}))
    assert experiment.correct(BRANCH).why == ""
    put = cache._put

    def careless(buffer: Any, rows: Any, at: int) -> Any:
        """Writes where others look."""
        if buffer is None or at + rows.shape[2] > buffer.shape[2]:
            return put(buffer, rows, at)
        buffer[:, :, at : at + rows.shape[2]] = rows
        return buffer

    monkeypatch.setattr(cache, "_put", careless)
    found = experiment.correct(BRANCH)
    assert (found.outcome, found.position) == ("differ", 5)
    assert found.why.startswith("differ: ")


def test_what_a_right_port_does_in_a_dtype_is_no_fault_there() -> None:
    gqa, wide = of_layout("gqa"), "ids of 16 bits"
    absent = {
        dtype: [f.name for f in FAULTS if not applies(f, gqa, dtype)]
        for dtype in ("float32", "float16", "bfloat16")
    }
    assert absent == {
        "float32": [wide],
        "float16": [
            "cache stored in float16",
            "TF32-like matmul",
            "rows in float16 from 128 on",
            wide,
        ],
        "bfloat16": [
            "TF32-like matmul",
            "cos and sin in bfloat16",
            "cache stored in bfloat16",
            "logits rounded to bfloat16",
            "weights through bfloat16",
            wide,
        ],
    }


def trial(fault: str, *, seen: bool, passed: bool = True) -> Trial:
    return Trial(
        fault,
        "differ",
        passed,
        "" if passed else "layer 1, expected 0",
        0.5,
        1e-3,
        "sigma",
        0,
        0,
        "keys",
        None,
        seen,
    )


TRIALS = {
    "a": [
        trial(RIGHT, seen=False),
        trial("stale", seen=False),
        trial("lost", seen=True),
        trial("scale", seen=False),
    ],
    "b": [
        trial("stale", seen=False),
        trial("lost", seen=False),
        trial("scale", seen=True, passed=False),
    ],
}


def test_the_faults_that_lane_b_lets_pass_end_the_report() -> None:
    assert unseen(TRIALS) == {"stale": ["a", "b"], "scale": ["a"], "lost": ["b"]}
    last = [
        "- unseen in float16 outside lane A: stale (every model)",
        "- unseen in float16 outside lane A: scale (a)",
        "- unseen in float16 outside lane A: lost (b)",
    ]
    sentence = "5 of 6 faults found in their place, 0 of 1 correct runs accused"
    lines = pages.console(TRIALS, dtype="float16", report="x.md").splitlines()
    assert lines[-5:] == [
        "failed: b: scale: layer 1, expected 0",
        *last,
        f"{sentence}    report: x.md",
    ]
    models = {name: {"fingerprint": "f" * 64, "tokens": 39} for name in TRIALS}
    value = {
        "dtype": "float16",
        "limits": LIMITS,
        "models": models,
        "environment": {"port": {}, "oracle": {}},
    }
    lines = pages.markdown(TRIALS, value, commands=["mlxkv selftest"]).splitlines()
    assert lines[-5:] == ["## What lane B alone would let pass in float16", "", *last]


def test_the_note_names_what_passes_and_is_out_of_date_when_a_limit_was_changed(
    tmp_path: Path,
) -> None:
    path, models = tmp_path / "power.json", {}
    for name, some in (("a", ["x", "y"]), ("b", ["y", "z"])):
        models[name] = {"fingerprint": name * 64, "faults": 30, "unseen": some}
    power.write(path, "bfloat16", {"a": models["a"]}, limits=LIMITS)
    power.write(path, "float16", models, limits=LIMITS)
    assert sorted(power.read(path)) == ["bfloat16", "float16"]
    said = (
        "in float16 lane B alone lets 3 of 30 seeded faults pass "
        "(on every model: y; on some: x, z; measured on a, b)"
    )
    assert power.note(power.read(path), "float16", LIMITS) == said
    how = "`mlxkv selftest --dtype float16 --power FILE` measures it"
    assert power.note(power.read(path), "float16", LIMITS | {"SIGMA": 9.0}) == (
        f"{said}; out of date: measured with other limits (SIGMA), {how}"
    )
    assert (
        power.note({}, "float16", LIMITS)
        == f"how many faults lane B lets pass in float16 was not measured; {how}"
    )
    assert power.note(power.read(path), "float32", LIMITS) is None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": "other", "dtypes": {}}', '{"format": "mlxkv-power/1"}']
)
def test_a_file_that_is_no_measurement_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "power.json").write_text(text)
    with pytest.raises(Refusal, match=r"power\.json: .* make it with `mlxkv selftest --power`"):
        power.read(tmp_path / "power.json")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_comparison_in_half_precision_says_what_the_package_has_measured(dtype: str) -> None:
    case = make_case(dtype=dtype)
    notes = judge(case, make_candidates(case)).notes
    assert notes[-1] == power.note(power.read(), dtype, LIMITS)
    assert notes[-1].startswith(f"in {dtype} lane B alone lets ")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_package_has_measured_today_s_faults_by_today_s_limits(dtype: str) -> None:
    measured = power.read()[dtype]
    remedy = f"run `mlxkv selftest --dtype {dtype} --no-real --power mlxkv/judge/power.json`"
    assert measured["limits"] == LIMITS, remedy
    tried = {
        layout: sum(applies(f, of_layout(layout), dtype) for f in FAULTS)
        for layout in ("gqa", "mqa")
    }
    for name, model in measured["models"].items():
        assert set(model["unseen"]) <= set(NAMES), remedy
        assert model["faults"] == tried.get(name.split("-")[0], model["faults"]), remedy
    assert {name.split("-")[0] for name in measured["models"]} >= {"gqa", "mqa"}, remedy


def stale(value: Mapping[str, Any]) -> list[str]:
    """Where a committed selftest.json is not of today's faults and limits."""
    tried: Sequence[Sequence[Mapping[str, Any]]] = list(value["trials"].values())
    found = {t["fault"] for some in tried for t in some} - set(RIGHTS)
    expected = {f.name for f in FAULTS if value["dtype"] not in f.none_in}
    said = [f"fault {name!r} is in one of list and report" for name in sorted(found ^ expected)]
    said += [
        f"limit {name} is another"
        for name, limit in LIMITS.items()
        if value["limits"].get(name) != limit
    ]
    said += [
        f"model {name} was not tried"
        for name in (one.name for one in selftesting.TINY)
        if name not in value["trials"]
    ]
    said += (
        []
        if len(value["trials"]) > len(selftesting.TINY)
        else ["no model but random ones was tried"]
    )
    return said + [f"{t['fault']} failed" for some in tried for t in some if not t["passed"]]


COMMITTED = sorted(ROOT.glob("reports/*/*/selftest.json"))


def test_the_committed_selftest_covers_the_faults_and_limits_of_today() -> None:
    assert COMMITTED
    for path in COMMITTED:
        assert stale(json.loads(path.read_bytes())) == [], "run `mlxkv reports --only selftest`"


def test_a_selftest_of_other_faults_or_limits_is_seen() -> None:
    trials = [{"fault": name, "passed": True} for name in (RIGHT, *NAMES)]
    models: dict[str, Any] = dict.fromkeys(
        ("real", *(one.name for one in selftesting.TINY)), trials
    )
    value: dict[str, Any] = {"dtype": "float32", "limits": LIMITS, "trials": models}
    assert stale(value) == []
    assert stale(value | {"trials": dict.fromkeys(models, trials[:-1])}) == [
        f"fault {NAMES[-1]!r} is in one of list and report"
    ]
    assert stale(value | {"limits": LIMITS | {"PEAK": 7.0}}) == ["limit PEAK is another"]
    assert stale(
        value | {"trials": models | {"real": [{"fault": RIGHT, "passed": False}, *trials]}}
    ) == [f"{RIGHT} failed"]
    last = selftesting.TINY[-1].name
    without = {name: of for name, of in models.items() if name != last}
    assert stale(value | {"trials": without}) == [
        f"model {last} was not tried",
        "no model but random ones was tried",
    ]


def test_the_index_of_reports_says_how_selftest_and_calibration_went(tmp_path: Path) -> None:
    folder = tmp_path / "model" / "machine"
    folder.mkdir(parents=True)
    trials = {"a": [{"fault": RIGHT, "passed": True}, {"fault": "stale", "passed": False}]}
    (folder / "selftest.json").write_text(json.dumps({"trials": trials}))
    (folder / "calibration.json").write_text(json.dumps({"readings": [], "exit_code": 0}))
    rows = [line for line in reports.index(tmp_path).splitlines() if line.startswith("| [")]
    assert rows == [
        "| [calibration](model/machine/calibration.md) | model | machine "
        "| every correct run within every limit |",
        "| [selftest](model/machine/selftest.md) | model | machine | 1 of 2 runs judged wrongly |",
    ]

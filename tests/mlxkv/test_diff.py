"""`mlxkv reports --check`: what may move, what another CPU may move, and what may not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mlxkv.commands import diff

HOST = {"cpu": "one, 2 cores", "cpu_capability": "X86_V3", "blas_kernel": "zen3"}
OLD: dict[str, Any] = {
    "outcome": "agree",
    "generated": [7042, 30, 198],
    "errors": [],
    "gates": [
        {
            "name": "sigma",
            "plan": "step",
            "value": 1.5,
            "failed": False,
            "position": 4,
            "headroom": 5.3,
        }
    ],
    "environment": {"port": HOST, "oracle": {"host": "one", "cpu_capability": "AVX2"}},
}


def changed(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(OLD) | changes


def gate(**changes: Any) -> list[dict[str, Any]]:
    return [OLD["gates"][0] | changes]


@pytest.mark.parametrize(
    "new",
    [
        changed(),
        changed(gates=gate(value=2.9)),
        changed(gates=gate(value=0.8)),
        changed(gates=gate(position=7, headroom=1.0)),
        changed(environment={"port": {"cpu": "another", "os": "x"}}),
    ],
)
def test_what_may_move(new: dict[str, Any]) -> None:
    assert diff.files(OLD, new) == diff.Checked(())


@pytest.mark.parametrize(
    ("new", "line"),
    [
        (changed(outcome="differ"), ".outcome: agree committed, differ now"),
        (changed(generated=[7042, 30, 199]), ".generated[2]: 198 committed, 199 now"),
        (changed(generated=[7042, 30]), ".generated: [7042, 30, 198] committed, [7042, 30] now"),
        (changed(errors=[{"step": 1}]), '.errors: [] committed, [{"step": 1}] now'),
        (
            changed(gates=gate(value=3.1)),
            ".gates[0].value: 1.5 committed, 3.1 now, more than a factor of 2 apart",
        ),
        (
            changed(gates=gate(value=0.7)),
            ".gates[0].value: 1.5 committed, 0.7 now, more than a factor of 2 apart",
        ),
        (
            changed(gates=gate(value=-1.5)),
            ".gates[0].value: 1.5 committed, -1.5 now, more than a factor of 2 apart",
        ),
        (
            changed(gates=gate(value=0.0)),
            ".gates[0].value: 1.5 committed, 0 now, more than a factor of 2 apart",
        ),
        (changed(gates=gate(value=None)), ".gates[0].value: 1.5 committed, null now"),
        (changed(gates=gate(failed=True)), ".gates[0].failed: false committed, true now"),
        (changed(gates=gate(failed=0)), ".gates[0].failed: false committed, 0 now"),
        (changed(more=1), ".more: only in the new file"),
    ],
)
def test_what_may_not_move(new: dict[str, Any], line: str) -> None:
    assert diff.files(OLD, new) == diff.Checked((line,))


def test_a_key_that_has_gone_is_a_difference() -> None:
    new = changed()
    del new["errors"]
    assert diff.files(OLD, new) == diff.Checked((".errors: only in the committed file",))


CALIBRATION = {
    "format": "mlxkv-calibrate/1",
    "readings": [{"gate": "sigma", "largest": 1.5, "run": "seed 1", "plan": "prefixes"}],
}
OVERVIEW = {
    "format": "mlxkv-prompts/1",
    "worst": "code",
    "prompts": [{"name": "code", "gates": [{"name": "sigma", "plan": "prefixes", "value": 1.5}]}],
}


def test_another_run_or_plan_may_be_the_worst_where_only_the_worst_is_shown() -> None:
    new: dict[str, Any] = copy.deepcopy(CALIBRATION)
    new["readings"][0] |= {"largest": 1.6, "run": "seed 3", "plan": "full"}
    assert diff.files(CALIBRATION, new) == diff.Checked(())
    other: dict[str, Any] = copy.deepcopy(OVERVIEW) | {"worst": "prose"}
    other["prompts"][0]["gates"][0] |= {"plan": "full", "value": 1.6}
    assert diff.files(OVERVIEW, other) == diff.Checked(())
    assert diff.files(OLD, changed(gates=gate(plan="full"))) == diff.Checked(
        (".gates[0].plan: step committed, full now",)
    )


def on_another_cpu(**changes: Any) -> dict[str, Any]:
    port = {"port": HOST | {"blas_kernel": "skx"}}
    return changed(environment=OLD["environment"] | port, **changes)


def test_numbers_apart_are_another_cpus_where_it_chose_other_kernels() -> None:
    found = diff.files(OLD, on_another_cpu(gates=gate(value=15.0), notes=["noisier"]))
    where = "another CPU (blas_kernel of port zen3 committed, skx now)"
    what = ".gates[0].value: 1.5 committed, 15 now, more than a factor of 2 apart"
    assert found == diff.Checked((".notes: only in the new file",), (f": {where}: {what}",))
    assert (found.exit_code, diff.files(OLD, on_another_cpu()).lines) == (1, ())
    assert diff.files(OLD, on_another_cpu(gates=gate(value=15.0))).exit_code == 0


@pytest.mark.parametrize(
    "side", [{"cpu": "two, 2 cores"}, {"cpu_capability": "X86_V4"}, {"blas_kernel": "skx"}]
)
def test_each_name_of_a_cpu_and_its_kernels_tells_another_one(side: dict[str, str]) -> None:
    new = changed(gates=gate(value=15.0), environment={"port": HOST | side})
    assert diff.files(OLD, new).differences == ()
    assert len(diff.files(OLD, new).remarks) == 1


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"outcome": "differ"}, ".outcome: agree committed, differ now"),
        ({"generated": [7042, 30, 199]}, ".generated[2]: 198 committed, 199 now"),
        ({"gates": gate(failed=True)}, ".gates[0].failed: false committed, true now"),
        ({"gates": gate(value=None)}, ".gates[0].value: 1.5 committed, null now"),
        ({"gates": gate(name="peak")}, ".gates[0].name: sigma committed, peak now"),
        ({"errors": ["x"]}, '.errors: [] committed, ["x"] now'),
    ],
)
def test_no_cpu_is_an_excuse_for_another_outcome_pass_or_token(
    changes: dict[str, Any], line: str
) -> None:
    assert diff.files(OLD, on_another_cpu(**changes)) == diff.Checked((line,))


def test_another_cpu_may_count_otherwise_and_name_another_gate_but_has_the_same_limits() -> None:
    trial = {"passed": True, "gate": "sigma", "top1_equal": 20, "limit": 8.0, "hint": None}
    old = OLD | {"trials": [trial], "limits": {"SIGMA": 8.0}}
    odd = trial | {"gate": "peak", "top1_equal": 19, "hint": "the mask"}
    assert diff.files(old, on_another_cpu(trials=[odd], limits={"SIGMA": 8.0})).exit_code == 0
    assert diff.files(old, old | {"trials": [odd]}).exit_code == 1
    new = on_another_cpu(trials=[trial | {"limit": 80.0}], limits={"SIGMA": 80.0})
    assert [line.split(":")[0] for line in diff.files(old, new).differences] == [
        ".limits.SIGMA",
        ".trials[0].limit",
    ]


def test_what_an_older_report_does_not_say_of_its_cpu_is_no_excuse() -> None:
    old = OLD | {"environment": {"port": {"cpu": "one, 2 cores"}}}
    apart = changed(gates=gate(value=15.0))
    assert diff.files(old, apart).exit_code == 1
    old["environment"]["port"]["cpu"] = "two, 2 cores"
    assert diff.files(old, apart).exit_code == 0


def test_files_missing_or_unreadable_are_differences(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    names = [Path("a.json"), Path("b.json"), Path("c.svg"), Path("d.md")]
    for folder in (old, new):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(json.dumps(OLD))
    (old / "d.md").write_text("| gate | plan     |\n| ---- | -------- |\n")
    (new / "d.md").write_text("| gate | plan    |\n| ---- | ------- |\n")
    assert diff.folders(old, new, names) == diff.Checked(())
    (new / "a.json").write_text(json.dumps(on_another_cpu(gates=gate(value=15.0))))
    (remark,) = diff.folders(old, new, names).remarks
    assert remark.startswith("a.json: another CPU (blas_kernel of port")
    (old / "a.json").write_text("{")
    (old / "b.json").unlink()
    (old / "c.svg").unlink()
    (old / "d.md").unlink()
    found = diff.folders(old, new, names)
    assert [line.split(":")[0] for line in found.differences] == [
        "a.json",
        "b.json",
        "c.svg",
        "d.md",
    ]
    assert found.remarks == ()

"""What a long command says before it begins, and what it refuses before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command import mlxkv, refused

from mlxkv.commands import reports
from mlxkv.commands.cost import run as cost
from mlxkv.commands.cost.ask import Request as Asked
from mlxkv.commands.pitfalls import run as pitfalls
from mlxkv.commands.selftest import calibrate
from mlxkv.commands.selftest import run as selftest
from mlxkv.commands.selftest.faults import FAULTS
from mlxkv.engines import machine, oracle, progress
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Named

TWO = {"tokens": (1, 2, 3, 4), "other_tokens": (1, 2, 5, 6)}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines for a person, up to the first question to the oracle, which is refused."""

    def ask(*_: object, **__: object) -> None:
        raise Refusal("asked")

    lines: list[str] = []
    monkeypatch.setattr(progress, "say", lines.append)
    for name in ("ask", "ask_all", "ask_both", "ask_pairs", "text_folder"):
        monkeypatch.setattr(oracle, name, ask)
    return lines


def test_long_commands_say_what_will_be_done_and_about_how_long_it_takes(
    said: list[str], folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = str(folder_of("gqa"))
    with pytest.raises(Refusal, match="asked"):
        pitfalls.run(pitfalls.Request(model=tiny, **TWO))  # type: ignore[arg-type]
    name = Named(model=tiny).checkpoint().name
    assert said.pop() == f"pitfalls: 18 scenarios on 4 systems, {name}: about 30 s on two cores"
    with pytest.raises(Refusal, match="asked"):
        selftest.run(selftest.Request(model=tiny))
    models = f"{name} and 12 small random models"
    assert said.pop() == f"selftest: {len(FAULTS)} faults in {models}: about 80 s on two cores"
    with pytest.raises(Refusal, match="asked"):
        selftest.run(selftest.Request(model=tiny, faults=(FAULTS[0].name,), tiny=False))
    assert said.pop() == f"selftest: 1 fault in {name}: about 10 s on two cores"
    with pytest.raises(Refusal, match="asked"):
        calibrate.run(calibrate.Request(model=tiny))
    models = f"{name} and 6 kinds of small random models, and on 13 wide ones"
    assert said.pop() == f"calibrate: 5 correct runs on each of {models}: about 8 min on two cores"
    with pytest.raises(Refusal, match="asked"):
        cost.run(Asked(model=tiny, tokens=(1, 2, 3, 4)))
    assert said.pop() == "cost: 16 variants: about 10 s on two cores"


def test_reports_say_their_parts_and_the_sum_of_their_times(
    said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(reports.SECONDS) == {*reports.PARTS, reports.SCALE}
    for part in reports.PARTS:
        made = reports.Made("m", {}, {})
        monkeypatch.setitem(reports.PARTS, part, lambda *_, made=made: made)
    list(reports.write(tmp_path / "all"))
    parts = "compare, pitfalls, caches, prompts, long, cost, selftest, calibration"
    assert said[0] == f"reports: {parts}: about 50 min on two cores"
    list(reports.write(tmp_path / "one", only=["compare"]))
    assert said[-1] == "reports: compare: about 40 s on two cores"
    list(reports.write(tmp_path / "named", only=["bench"]))
    assert said[-1] == "reports: bench: about 60 min on two cores"


def test_nothing_is_said_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    progress.announce("selftest", 10)
    assert capsys.readouterr() == ("", "")


def test_a_fault_of_no_such_name_is_refused_before_anything_runs(
    said: list[str], tmp_path: Path
) -> None:
    done = mlxkv("selftest", "--fault", "nosuch", "--out", tmp_path / "out")
    refused(done, "error: --fault 'nosuch': no such fault, expected one of ")
    for fault in FAULTS:
        assert repr(fault.name) in done.stderr
    assert said == []
    refused(mlxkv("selftest", "--fault", "one stale key row", "--no-real"), "'one stale key row, ")


@pytest.mark.parametrize("command", ["pitfalls", "selftest", "calibrate"])
@pytest.mark.parametrize("package", ["torch", "mlx_lm"])
def test_a_remedy_is_one_that_the_command_has(
    command: str,
    package: str,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if package == "mlx_lm" and command != "pitfalls":
        command = "bench"  # the others do not run it
    has = machine.has
    monkeypatch.setattr(machine, "has", lambda name: name != package and has(name))
    out = () if command == "bench" else ("--out", tmp_path / "out")
    done = mlxkv(command, *out)
    refused(done, f"{package.replace('_', '-')} is not installed")
    assert "--oracle" not in done.stderr
    assert said == []


def test_no_model_at_all_is_refused_before_anything_runs(said: list[str]) -> None:
    for command in ("selftest", "calibrate"):
        done = mlxkv(command, "--no-real", "--no-tiny")
        refused(done, "--no-real and --no-tiny", "leave one out")
    assert said == []

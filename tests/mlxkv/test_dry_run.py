"""`compare --dry-run`: what it says is what a run then does, and nothing is run or written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Done, mlxkv, refused

from mlxkv.commands.compare import batches
from mlxkv.engines import machine
from mlxkv.engines.job import Job
from oracle.formats import trace
from oracle.model import measured

TOKENS = ("--tokens", "3,7,11,2,19", "--steps", "6")


@pytest.fixture(scope="module")
def tiny(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("gqa")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def dry(tiny: Path, out: Path, *given: object) -> Done:
    return mlxkv("compare", tiny, *given, "--dry-run", "--out", out)


def told(tiny: Path, out: Path, *given: object) -> dict[str, Any]:
    done = dry(tiny, out, *given, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_nothing_runs_and_the_plans_are_those_that_are_followed_then(
    tiny: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    value = told(tiny, out, *TOKENS)
    assert (value["format"], value["engine"], value["dtype"]) == (
        "mlxkv-dry-run/1",
        "port",
        "float32",
    )
    assert not out.exists()
    assert list((cache / "oracle").iterdir()) == list((cache / "runs").iterdir()) == []
    assert [(one["name"], one["kept"]) for one in value["sequences"]] == [
        ("sequence", False),
        ("probe", False),
    ]
    assert [one["name"] for one in value["processes"]] == ["oracle", "port", "port float64"]
    assert all(one["seconds"] > 0 < one["disk_bytes"] for one in value["processes"])

    found: list[tuple[str, int, int, int]] = []
    sizes: dict[str, int] = {}
    end = Job.end

    def looked(job: Job, process: Any) -> Any:
        made = end(job, process)
        sizes[job.dtype] = sum(path.stat().st_size for path in job.out.glob("*.safetensors"))
        for plan in job.plans if job.dtype == "float32" else ():
            calls = list(plan.calls())
            rows = len(trace.read(job.trace(plan)).positions)
            found.append((plan.name, len(calls), sum(call.fed for call in calls), rows))
        return made

    monkeypatch.setattr(Job, "end", looked)
    assert mlxkv("compare", tiny, *TOKENS, "--out", out).returncode == 0
    said = [
        (f"{'probe-' * (one['name'] == 'probe')}{p['plan']}", p["calls"], p["tokens"], p["rows"])
        for one in value["sequences"]
        for p in one["plans"]
    ]
    assert sorted(said) == sorted(found)
    for name, dtype in (("port", "float32"), ("port float64", "float64")):
        (its,) = (one["disk_bytes"] for one in value["processes"] if one["name"] == name)
        assert its == pytest.approx(sizes[dtype], rel=0.5)  # these traces are half headers

    again = told(tiny, tmp_path / "other", *TOKENS)
    assert [one["kept"] for one in again["sequences"]] == [True, True]
    assert again["processes"][0] == {
        "name": "oracle",
        "seconds": 0.0,
        "memory_bytes": 0,
        "disk_bytes": 0,
        "measured": False,
    }
    assert [one["kept"] for one in told(tiny, out, *TOKENS, "--fresh")["sequences"]] == [False] * 2
    other = told(tiny, out, "--tokens", "1,2", "--steps", "3")
    assert [one["kept"] for one in other["sequences"]] == [False, True]
    assert [one["kept"] for one in told(tiny, out, *TOKENS, "--quick")["sequences"]] == [True]


def test_a_person_reads_plans_processes_and_what_of_them_fits(
    tiny: Path, answer: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = dry(tiny, tmp_path / "out", "--oracle", answer).stdout.splitlines()
    assert lines[0] == "dry run, nothing was run: port on gqa, float32, 24 tokens"
    rows = [line.split() for line in lines]
    assert ["full", "1", "24", "24"] in rows
    assert ["step", "20", "24", "24"] in rows
    assert ["probe", "full", "1", "64", "32"] in rows
    assert ["oracle", "-", "-", "-"] in rows
    assert "oracle: 2 of 2 answers kept" in lines
    assert [line.split(":")[0] for line in lines[-3:]] == ["time", "memory", "disk"]
    monkeypatch.setattr(machine, "memory_bytes", lambda: 10**6)
    apart = dry(tiny, tmp_path / "out", "--oracle", answer).stdout
    assert "one after the other, as they do not fit in half of 1 MB" in apart


def test_prompts_are_summed_and_cut_into_batches(
    tiny: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"tokens": [1, 2, 3], "name": "a"}\n{"tokens": [4, 5], "name": "b"}\n')
    given = ("--prompts", path, "--steps", "3", "--engine", "mlx-lm")
    value = told(tiny, tmp_path / "out", *given)
    assert [one["name"] for one in value["sequences"]] == ["a", "b", "probe"]
    assert ([one["name"] for one in value["processes"]], value["batches"]) == (
        ["oracle", "mlx-lm"],
        1,
    )
    monkeypatch.setattr(batches, "MOST", 1)
    text = dry(tiny, tmp_path / "out", *given).stdout
    assert "2 prompts" in text.splitlines()[0]
    assert ["full", "2", "9", "9"] in [line.split() for line in text.splitlines()]
    assert "the engine follows the prompts in 2 batches" in text


def test_what_a_comparison_refuses_before_it_runs_a_dry_run_refuses(
    tiny: Path, cache: Path, tmp_path: Path
) -> None:
    refused(dry(tiny, tmp_path / "out", "--tokens", "1,40"), "id 40 at place 1")
    refused(dry(tiny, tmp_path / "out", *TOKENS, "--chunks", "3,3"), "chunks 3,3 do not add up")


def test_the_last_runs_speed_corrects_the_next_estimate(
    tiny: Path, cache: Path, tmp_path: Path
) -> None:
    before = told(tiny, tmp_path / "out", *TOKENS)["processes"]
    assert {one["measured"] for one in before} == {False}
    key = measured.key("mlxkv.engines.port", "float64", "cpu", 1, parameters=20_000)
    measured.remember(key, 10.0, measured.LEAST - 0.1)  # too short to say anything
    assert not measured.known(key)
    measured.remember(key, 10.0, 30.0)
    for one, old in zip(told(tiny, tmp_path / "out", *TOKENS)["processes"], before, strict=True):
        times = 3 if (one["name"], one["measured"]) == ("port float64", True) else 1
        assert one["seconds"] == pytest.approx(times * old["seconds"])
    assert measured.known(key)
    (cache / "measured.json").write_text("damaged")
    assert measured.corrected(key, 10.0) == 10.0

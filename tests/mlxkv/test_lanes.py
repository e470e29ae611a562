"""Lanes: side by side where they fit; a run that broke off goes on where a part is finished."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
from command import Done, mlxkv, refused

from mlxkv.commands.compare import batches, many
from mlxkv.commands.compare.follow import Engine, of_plans
from mlxkv.engines import lanes, machine, memory, oracle, process
from mlxkv.engines.job import Job
from mlxkv.engines.lanes import Lane
from oracle.formats import questions, run_folder
from oracle.formats.plan import judged_plans
from oracle.model.checkpoint import Checkpoint, resolve


@pytest.fixture(scope="module")
def tiny(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("gqa")


@pytest.fixture(scope="module")
def checkpoint(tiny: Path) -> Checkpoint:
    return resolve(str(tiny))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of the lanes whose processes were begun, one after the other."""
    found: list[str] = []
    begin = Job.begin

    def recorded(job: Job, module: str, *, aside: bool = False) -> process.Process:
        found.append(job.out.name)
        return begin(job, module, aside=aside)

    monkeypatch.setattr(Job, "begin", recorded)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 0)
    return found


def of(checkpoint: Checkpoint, out: Path = Path("x"), **engine: Any) -> dict[str, Lane]:
    plans = tuple(judged_plans(models.SEQUENCE, prompt=models.PROMPT).values())
    about = {"name": "port", "module": process.PORT, "device": "cpu"} | engine
    return of_plans(Engine(**about), checkpoint, [plans], (), out, "float32")


def test_lanes_run_side_by_side_where_half_of_memory_holds_them(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other each has all cores, side by side they share them."""
    needed = sum(lane.bytes for lane in of(checkpoint).values())
    half = max(1, (os.cpu_count() or 1) // 2)
    for there, together, threads in ((2 * needed, True, half), (2 * needed - 2, False, None)):
        monkeypatch.setattr(machine, "memory_bytes", lambda there=there: there)
        found = of(checkpoint)
        assert lanes.beside(found) is together
        assert {lane.job.threads for lane in found.values()} == {threads}


@pytest.mark.parametrize("together", [True, False])
def test_one_lane_begins_when_another_ends_where_they_do_not_fit(
    checkpoint: Checkpoint, cache: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    came: list[str] = []

    @contextmanager
    def begin(job: Job, *_: Any, aside: bool = False) -> Iterator[str]:
        came.append(f"begin {job.dtype}{' aside' if aside else ''}")
        yield job.dtype

    def end(job: Job, _: object) -> process.Finished:
        came.append(f"end {job.dtype}")
        return process.Finished(1.0, 1)

    monkeypatch.setattr(Job, "begin", begin)
    monkeypatch.setattr(Job, "end", end)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 2**60 if together else 0)
    with lanes.room() as room:
        took = lanes.follow(of(checkpoint, room.folder), room)
    assert list(took) == ["port", "port float64"]
    beside = ["begin float32", "begin float64 aside", "end float32", "end float64"]
    apart = ["begin float32", "end float32", "begin float64", "end float64"]
    assert came == (beside if together else apart)


def test_a_change_of_anything_that_traces_depend_on_changes_a_lanes_digest(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = of(checkpoint)["port"]
    job = lane.job
    assert lane.digest is not None
    elsewhere = replace(job, out=Path("y"), folder="moved")
    assert replace(lane, job=elsewhere).digest == lane.digest
    first = job.plans[0]
    jobs = [
        replace(job, threads=77),
        replace(job, device="gpu"),
        replace(job, dtype="bfloat16"),
        replace(job, weights_dtype="float16"),
        replace(job, repeat=()),
        replace(job, plans=job.plans[1:]),
        replace(job, plans=(replace(first, rows="last"), *job.plans[1:])),
        replace(job, dither=1),
        replace(job, ranks=2),
    ]
    others = [replace(lane, job=job) for job in jobs]
    others += [replace(lane, checkpoint=replace(checkpoint, fingerprint="0"))]
    others += [replace(lane, checkpoint=replace(checkpoint, config_digest="0"))]
    others += [replace(lane, module=process.MLX_LM)]
    assert len({lane.digest, *(other.digest for other in others)}) == 1 + len(others)
    for owner, name, value in (
        (machine, "version", lambda _: "9.9"),
        (machine, "libraries", lambda: ["blas"]),
        (run_folder, "sources", lambda *_: {"a.py": "0"}),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            changed = lane.digest
        assert changed != lane.digest, name
    monkeypatch.setenv("MLXKV_BLAS", "another")
    assert lane.digest != changed
    monkeypatch.delenv("MLXKV_BLAS")
    assert lane.digest not in (changed, replace(lane, module="x").digest)


def test_what_code_of_a_persons_own_computes_is_never_kept(checkpoint: Checkpoint) -> None:
    own = of(checkpoint, name="mine.py", module=process.OWN, source="/x/mine.py:load")
    assert [lane.digest for lane in own.values()] == [None]
    assert [lane.digest is None for lane in of(checkpoint, hostfile="h").values()] == [True, False]


def compare(tiny: Path, answer: Path, out: Path, *more: str) -> Done:
    return mlxkv("compare", tiny, "--oracle", answer, "--device", "cpu", *more, "--out", out)


def interrupted(monkeypatch: pytest.MonkeyPatch, name: str) -> pytest.MonkeyPatch:
    """An interrupt from the terminal comes as soon as the lane of this folder has begun."""
    begin = Job.begin

    def interrupt(job: Job, module: str, *, aside: bool = False) -> process.Process:
        if job.out.name == name:
            os.kill(os.getpid(), signal.SIGINT)
        return begin(job, module, aside=aside)

    monkeypatch.setattr(Job, "begin", interrupt)
    return monkeypatch


def test_a_lane_that_was_finished_before_an_interrupt_is_not_followed_again(
    tiny: Path, answer: Path, cache: Path, tmp_path: Path, begun: list[str]
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert compare(tiny, answer, whole).returncode == 0
    assert begun == ["run", "float64"]
    with pytest.MonkeyPatch.context() as patch:
        interrupted(patch, "float64")
        done = compare(tiny, answer, out)
    said = "interrupted: 1 run of the engine is kept; the same command goes on from there\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)
    assert not out.exists()
    assert list((cache / "runs").iterdir()) == []
    (kept,) = (cache / "lanes").iterdir()
    shown = json.loads(mlxkv("store", "list", "--json").stdout)["entries"]
    assert [entry["name"] for entry in shown if entry["kind"] == "lanes"] == [f"lanes/{kept.name}"]

    begun.clear()
    other = compare(tiny, answer, out, "--quick")  # another question takes nothing of it
    assert (other.returncode, begun) == (0, ["run", "float64"])
    assert list((cache / "lanes").iterdir()) == [kept]

    begun.clear()
    done = compare(tiny, answer, out, "--json")
    assert (done.returncode, begun) == (0, ["float64"])
    took = json.loads(done.stdout)["took"]
    assert (took["port"], took["port float64"]["seconds"] > 0) == (None, True)
    assert (out / "compare.json").read_bytes() == (whole / "compare.json").read_bytes()
    assert list((cache / "lanes").iterdir()) == []


def test_a_kept_lane_by_which_a_run_fails_is_not_kept_again(
    tiny: Path, answer: Path, cache: Path, tmp_path: Path, begun: list[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        interrupted(patch, "float64")
        assert compare(tiny, answer, tmp_path / "out").returncode == 130
    (kept,) = (cache / "lanes").iterdir()
    path = kept / "step.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    refused(compare(tiny, answer, tmp_path / "out"), "step.safetensors")
    begun.clear()
    done = compare(tiny, answer, tmp_path / "out")
    assert (done.returncode, begun) == (0, ["run"])  # that in float64 was finished since


def test_what_a_run_that_broke_off_left_goes_after_a_week(cache: Path) -> None:
    for name, days in (("a" * 32, 8), ("b" * 32, 6)):
        folder = cache / "lanes" / name
        folder.mkdir(parents=True)
        then = folder.stat().st_mtime - days * 86400
        os.utime(folder, (then, then))
    with lanes.room():
        pass
    assert [path.name for path in (cache / "lanes").iterdir()] == ["b" * 32]


def prompts(folder: Path, n: int, *, different: int) -> Path:
    """A file of n prompts, of which so many differ."""
    some = [models.ids(2 + i % 3, seed=i) for i in range(different)]
    lines = (json.dumps({"name": f"p{i}", "tokens": some[i % different]}) for i in range(n))
    path = folder / f"{n}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pictures of single prompts, which take most of the time."""
    monkeypatch.setattr(many.page.plots, "error_by_position", lambda *_, **__: "<svg/>")


@contextmanager
def few_open_files(more: int) -> Iterator[None]:
    """So many files may be opened beside those that are, until somebody asks for more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + more, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_hundred_prompts_take_one_oracle_and_no_more_memory_than_ten(
    tiny: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: None
) -> None:
    started: list[str] = []
    start = process.start

    def count(arguments: list[str], **more: Any) -> process.Finished:
        started.append(" ".join(arguments[:2]))
        return start(arguments, **more)

    monkeypatch.setattr(oracle.process, "start", count)
    peaks = {}
    for n in (10, 100):
        shutil.rmtree(cache, ignore_errors=True)
        memory._MOST["together"] = 0
        started.clear()
        lines = tmp_path / "lines.jsonl"
        given = ("--prompts", prompts(tmp_path, n, different=10), "--steps", "1", "--quick")
        options = ("--json", "--jsonl", lines, "--out", tmp_path / "out")
        with few_open_files(300):
            done = mlxkv("compare", tiny, *given, *options)
        assert done.returncode == 0, done.stderr
        assert started == ["oracle many"]
        value = json.loads(done.stdout)
        assert value["took"]["p0"]["port"]["anonymous_bytes"] != 0
        peaks[n] = value["together_bytes"]
        told = [json.loads(line) for line in lines.read_text().splitlines()]
        assert [one["name"] for one in told] == [f"p{i}" for i in range(n)]
        assert {one["outcome"] for one in told} == {"agree"}
        assert all(0 < one["ratio"] < 1 for one in told)
    if peaks[10] is not None:
        assert peaks[100] <= 1.2 * peaks[10]


def test_prompts_that_were_judged_before_an_interrupt_are_not_judged_again(
    tiny: Path, cache: Path, tmp_path: Path, begun: list[str], drawn: None
) -> None:
    """The interrupt comes in float64 in the second of three batches."""
    out, lines = tmp_path / "out", tmp_path / "lines.jsonl"
    given = ["--prompts", prompts(tmp_path, 3, different=3), "--steps", "2", "--device", "cpu"]
    given += ["--jsonl", lines, "--out", out]
    whole = mlxkv("compare", tiny, *given)
    assert whole.returncode == 0, whole.stderr
    report = (out / "compare.json").read_bytes()
    shutil.rmtree(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "MOST", 1)
        interrupted(patch, "float64-1")
        begun.clear()
        done = mlxkv("compare", tiny, *given)
    kept = "4 answers of the oracle and 3 runs of the engine and 1 judged prompt are kept"
    said = f"interrupted: {kept}; the same command goes on from there\n"
    assert (done.returncode, done.stderr) == (130, said)
    assert begun == ["run-probe", "float64-probe", "run-0", "float64-0", "run-1"]
    assert not out.exists()
    assert len(lines.read_text().splitlines()) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "MOST", 1)
        begun.clear()
        done = mlxkv("compare", tiny, *given)
    assert (done.returncode, done.stdout) == (0, whole.stdout)
    assert begun == ["float64-1", "run-2", "float64-2"]
    assert (out / "compare.json").read_bytes() == report
    assert len(lines.read_text().splitlines()) == 3
    assert list((cache / "lanes").iterdir()) == []


def test_a_run_that_is_refused_leaves_the_lines_of_the_last_one(tiny: Path, tmp_path: Path) -> None:
    lines, given = tmp_path / "lines.jsonl", tmp_path / "prompts.jsonl"
    lines.write_text("of the last run\n")
    given.write_text(json.dumps({"name": "one", "tokens": [10**6]}) + "\n")
    done = mlxkv("compare", tiny, "--prompts", given, "--jsonl", lines, "--out", tmp_path / "out")
    refused(done, "prompt one: tokens: id 1000000")
    assert lines.read_text() == "of the last run\n"


def test_lines_of_json_stand_beside_prompts_alone(tiny: Path, tmp_path: Path) -> None:
    done = mlxkv("compare", tiny, "--tokens", "1,2", "--jsonl", tmp_path / "x", "--out", tmp_path)
    refused(done, "--jsonl", "expected it beside --prompts")


def test_prompts_that_the_oracle_answered_before_an_interrupt_are_not_asked_again(
    tiny: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: None
) -> None:
    """The interrupt comes as soon as the first answer of three is there."""
    asked: list[list[str]] = []
    wait = process.Process.wait
    given = ("--prompts", prompts(tmp_path, 3, different=3), "--steps", "1", "--quick")

    def interrupt(self: process.Process) -> process.Finished:
        while not list(cache.glob("oracle/[0-9a-f]*/manifest.json")):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)
        return wait(self)

    write = questions.write

    def told(path: Path, file: questions.Asked) -> None:
        asked.append([Path(one.out).name for one in file.questions])
        write(path, file)

    monkeypatch.setattr(oracle.questions, "write", told)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process.Process, "wait", interrupt)
        done = mlxkv("compare", tiny, *given, "--out", tmp_path / "out")
    assert done.returncode == 130
    said = "interrupted: [1-3] answers? of the oracle (is|are) kept; the same command goes on .*"
    assert re.fullmatch(said, done.stderr.splitlines()[-1])
    made = {path.parent.name for path in cache.glob("oracle/[0-9a-f]*/manifest.json")}
    assert [path for path in (cache / "oracle").iterdir() if path.name not in made] == []
    assert mlxkv("compare", tiny, *given, "--out", tmp_path / "out").returncode == 0
    assert len(asked[0]) == 3
    assert made
    assert asked[1:] == [[name for name in asked[0] if name not in made]]

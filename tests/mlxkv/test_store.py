"""`mlxkv store`: what is kept is listed with size and age, and cleared unless somebody holds it."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from command import mlxkv, refused

from oracle.formats import disk
from oracle.model import cache_folder
from oracle.model.default import FOLDER

HEX = "0123456789abcdef" * 2
MODEL, GGUF = f"models/{FOLDER}", f"models/gguf-1-{HEX}"
ANSWER, SUSPECTS, HASHES = f"oracle/{HEX}", f"suspects/{HEX}", f"fingerprints/{HEX}.json"
WEIGHTS, LANE = f"converted/{HEX * 2}-bfloat16.safetensors", f"lanes/{HEX}"
RUN, UNFINISHED = "runs/tmp01234567", f"oracle/.{HEX}.01234567.part"
OURS = {MODEL: 700, GGUF: 600, ANSWER: 500, SUSPECTS: 400, HASHES: 300, RUN: 200, UNFINISHED: 100}
"""Each with its bytes and, which is the same number, its age in minutes."""
FOREIGN = ["models/mine", "oracle/notes.txt", f"oracle/{HEX}x", "runs/tmp", "else/where", "README"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with one of everything, and with what is not ours."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MLXKV_CACHE", str(folder))
    for name, size in OURS.items():
        path = folder / name
        inner = path if path.suffix == ".json" else path / "sub" / "file"
        inner.parent.mkdir(parents=True, exist_ok=True)
        inner.write_bytes(b"x" * size)
    for name in FOREIGN:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not ours")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("not ours")
    (folder / "oracle" / HEX[::-1]).symlink_to(tmp_path / "outside")
    (folder / "locks").mkdir()
    (folder / "locks" / HEX).touch()
    for name, minutes in OURS.items():
        then = time.time() - 60 * minutes
        os.utime(folder / name, (then, then))
    return folder


def left(cache: Path) -> set[str]:
    """What of ours is still there; whatever else was there must be."""
    assert all((cache / name).exists() for name in [*FOREIGN, f"locks/{HEX}"])
    assert (cache / "oracle" / HEX[::-1] / "file").read_text() == "not ours"
    names = [cache / kind for kind in ("models", "oracle", "suspects", "fingerprints", "runs")]
    found = {str(p.relative_to(cache)) for folder in names for p in folder.iterdir()}
    return found - {*FOREIGN, f"oracle/{HEX[::-1]}"}


def listed() -> dict[str, Any]:
    done = mlxkv("store", "list", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_everything_of_ours_is_listed_the_newest_last_with_size_age_and_total(cache: Path) -> None:
    value = listed()
    assert (value["format"], value["folder"]) == ("mlxkv-store/1", str(cache))
    assert [(e["name"], e["bytes"]) for e in value["entries"]] == list(OURS.items())
    for entry in value["entries"]:
        assert entry["age_seconds"] == pytest.approx(60 * entry["bytes"], abs=30)
        assert entry["in_use"] is False
    assert value["bytes"] == sum(OURS.values())
    assert value["kinds"]["runs"] == {"entries": 2, "bytes": 300}
    lines = mlxkv("store", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("kind", "models", "models", "oracle", "suspects", "runs", "runs"),
        *("fingerprints:", "total:"),
    ]
    assert lines[1].split()[1:6] == ["700", "bytes", "12", "h", MODEL]
    assert lines[-1] == f"total: 7 entries, 2.8 kB (2,800 bytes) in {cache}"


def test_an_answer_says_what_it_is_of(cache: Path) -> None:
    manifest = {"name": "tiny", "dtype": "float32", "tokens": [1, 2, 3], "prompt": "a\x1b[31m"}
    (cache / ANSWER / "manifest.json").write_text(json.dumps(manifest))
    (cache / GGUF / "note.txt").write_text("GGUF Q4_K_M")
    about = {entry["name"]: entry["about"] for entry in listed()["entries"]}
    assert about[ANSWER] == 'tiny, float32, 3 tokens "a\\u001b[31m"'
    assert (about[GGUF], about[RUN]) == ("GGUF Q4_K_M", "left over from a killed run")


def test_clear_removes_all_of_ours_and_says_what_it_freed(cache: Path) -> None:
    done = mlxkv("store", "clear", "--yes")
    freed = f"removed 7 of 7 entries, freed 2.8 kB (2,800 bytes) in {cache}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, freed, "")
    assert left(cache) == set()
    assert mlxkv("store", "clear").stdout.startswith("removed 0 of 0 entries")


def test_clear_by_kind_and_by_age(cache: Path) -> None:
    assert mlxkv("store", "clear", "--kind", "runs", "--kind", "models", "--yes").returncode == 0
    assert left(cache) == {ANSWER, SUSPECTS, HASHES}
    assert mlxkv("store", "clear", "--older-than", "390m", "--yes").returncode == 0
    assert left(cache) == {HASHES}
    done = mlxkv("store", "clear", "--older-than", "1d", "--yes")
    assert (done.returncode, left(cache)) == (0, {HASHES})
    for age in ("x", "12", "-1d", "1.5h", ""):
        refused(mlxkv("store", "clear", f"--older-than={age}", "--yes"), "30d or 2w")


def test_nothing_goes_without_a_word(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    done = mlxkv("store", "clear")
    refused(done, "would remove 7 entries, 2.8 kB", "expected --yes", "no terminal")
    assert left(cache) == set(OURS)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, names in (("n", set(OURS)), ("y", set[str]())):
        monkeypatch.setattr("click.confirm", lambda *_, a=answer, **__: a == "y")
        done = mlxkv("store", "clear")
        assert (done.returncode, left(cache)) == (0, names)
        assert (done.stdout == "nothing removed\n") == bool(names)


@contextmanager
def process(code: str) -> Iterator[None]:
    """A process that runs the code, says so, and lives until the block ends."""
    line = [sys.executable, "-c", f"{code}\nprint('ready', flush=True)\ninput()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        yield
        running.communicate("\n")


def test_what_a_running_process_uses_is_left_alone_and_the_rest_of_its_kind_goes(
    cache: Path,
) -> None:
    other = f"oracle/{'ab' * 16}"
    (cache / other).mkdir()
    (cache / WEIGHTS).parent.mkdir()
    (cache / WEIGHTS).write_bytes(b"x")
    kept = {MODEL, ANSWER, SUSPECTS, WEIGHTS}
    code = "from pathlib import Path\nfrom oracle.model.cache_folder import hold, in_use\n"
    code += f"in_use('oracle')\n[hold(Path({str(cache)!r}) / name) for name in {sorted(kept)}]"
    with process(code), process(code):
        in_use = {entry["name"] for entry in listed()["entries"] if entry["in_use"]}
        done = mlxkv("store", "clear", "--yes")
        assert (done.returncode, in_use, left(cache)) == (0, kept, kept - {WEIGHTS})
        assert (cache / WEIGHTS).exists()
        said = {f"left: {name} is in use by a running process" for name in kept}
        assert set(done.stdout.splitlines()[:-1]) == said
    mlxkv("store", "clear", "--yes")
    assert left(cache) == set()
    assert not (cache / WEIGHTS).exists()


def test_an_entry_that_was_made_anew_is_held_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path))
    entry = cache_folder.part("oracle") / HEX
    cache_folder.hold(entry)  # which is not there
    for _ in range(2):
        entry.mkdir()
        cache_folder.hold(entry)
        with disk.unheld(entry) as free:
            assert not free
        entry.rename(tmp_path / os.urandom(4).hex())


@pytest.mark.parametrize("command", ["list", "clear"])
def test_a_cache_folder_that_is_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "file"))
    refused(mlxkv("store", command), f"{tmp_path / 'file'}: it is a file, expected a folder")


def test_scratch_folders_and_an_answer_in_the_making_are_left_to_their_process(cache: Path) -> None:
    for name, lock in ((RUN, RUN), (UNFINISHED, UNFINISHED), (ANSWER, f"locks/{HEX}")):
        handle = disk.held(cache / lock)
        with closing(os.fdopen(handle)) if (cache / lock).is_file() else _closed(handle):
            entries = {entry["name"]: entry for entry in listed()["entries"]}
            assert [name for name in entries if entries[name]["in_use"]] == [name]
            assert mlxkv("store", "clear", "--yes").returncode == 0
            assert left(cache) == {name}
        mlxkv("store", "clear", "--yes")
        assert left(cache) == set()
        for again, size in OURS.items():
            if (cache / again).suffix != ".json":
                (cache / again).mkdir()
                (cache / again / "file").write_bytes(b"x" * size)


@contextmanager
def _closed(handle: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(handle)


def test_a_comparison_holds_what_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path))
    folder = cache_folder.in_use("oracle")
    with disk.unheld(folder) as free:
        assert not free
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "other"))
    cache_folder.in_use("oracle")  # this process has gone on to another folder
    with disk.unheld(folder) as free:
        assert free


def test_threads_that_go_on_to_another_folder_close_each_handle_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    slow = threading.Barrier(2)

    def held(folder: Path) -> int:
        # Both threads here at once: each would go on with the handle that the other closes.
        with suppress(threading.BrokenBarrierError):
            slow.wait(timeout=0.2)
        return disk.held(folder)

    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path))
    cache_folder.in_use("models")
    monkeypatch.setattr(cache_folder, "held", held)
    monkeypatch.setattr(cache_folder.os, "close", closed.append)
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "other"))
    threads = [threading.Thread(target=cache_folder.in_use, args=("models",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert len(closed) == len(set(closed)) == 1
    os.close(closed[0])


def test_what_cannot_be_removed_is_said_and_the_rest_goes(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmtree = shutil.rmtree

    def refuses(path: Path) -> None:
        if HEX in path.name and path.parent.name == "suspects":
            raise PermissionError(13, "Permission denied")
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", refuses)
    done = mlxkv("store", "clear", "--yes")
    assert done.returncode == 2
    assert f"left: {SUSPECTS} cannot be removed (Permission denied)\n" in done.stdout
    assert [name.startswith(f"suspects/.{HEX}.") for name in left(cache)] == [True]


def test_an_empty_or_missing_cache_folder_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "none"))
    done = mlxkv("store", "list")
    assert (done.returncode, done.stdout) == (
        0,
        f"total: 0 entries, 0 bytes (0 bytes) in {tmp_path / 'none'}\n",
    )
    assert not (tmp_path / "none").exists()


def test_converted_weights_and_what_a_run_that_broke_off_had_finished_are_cleared(
    cache: Path,
) -> None:
    for name in (WEIGHTS, f"converted/.{Path(WEIGHTS).name}.a_b1c2d3.part", f"{LANE}/x"):
        (cache / name).parent.mkdir(exist_ok=True, parents=True)
        (cache / name).write_bytes(b"x" * 10)
    foreign = cache / "converted" / "mine.safetensors"
    foreign.write_text("not ours")
    entries = [e for e in listed()["entries"] if e["kind"] in ("converted", "lanes")]
    assert sorted((e["kind"], e["about"], e["bytes"]) for e in entries) == [
        ("converted", "weights in bfloat16", 10),
        ("converted", "weights in bfloat16, left half written", 10),
        ("lanes", "finished by a run that broke off", 10),
    ]
    half = next((cache / "converted").glob("*.part"))
    handle = disk.held(cache / "converted")  # as one that writes into it
    entries = [e for e in listed()["entries"] if e["in_use"]]
    assert [e["name"] for e in entries] == [str(half.relative_to(cache))]
    done = mlxkv("store", "clear", "--kind", "converted", "--older-than", "1h", "--yes")
    assert (done.stdout[:9], half.exists()) == ("removed 0", True)
    os.close(handle)
    done = mlxkv("store", "clear", "--kind", "converted", "--kind", "lanes", "--yes")
    assert done.stdout.startswith("removed 3 of 3 entries, freed 30 bytes")
    assert [path.name for path in (cache / "converted").iterdir()] == [foreign.name]

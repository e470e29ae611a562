"""What happens to a machine while `compare` runs: kills, full disks, two at once. Nothing is left.

With --nightly also runs killed at a random moment, MLXKV_KILLS of them (default 10) from
MLXKV_SEED on; MLXKV_KILLS_MODEL=default has them on the default model instead of a tiny one.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import models
import numpy as np
import pytest
from command import mlxkv, refused

from mlxkv.commands.compare.ask import Request
from mlxkv.commands.compare.run import run
from mlxkv.engines import machine
from mlxkv.engines import oracle as engine
from mlxkv.port.weights import load
from mlxkv.report import publish
from oracle.formats.errors import Refusal

TOKENS = ["--tokens", "3,7,11,2,19", "--steps", "6"]
FILES = ("compare.json", "compare.svg")


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "mlxkv", *map(str, arguments)]


def started(*arguments: str | Path, cache: Path) -> subprocess.Popen[bytes]:
    """A process of its own, in a group of its own."""
    return subprocess.Popen(
        command(*arguments),
        env=os.environ | {"MLXKV_CACHE": str(cache)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def of(folder: Path) -> list[str]:
    """The command lines of living processes that name the folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if str(folder) in line]


def gone(folder: Path, seconds: float = 20) -> None:
    """Waits until no process names the folder."""
    until = time.monotonic() + seconds
    while of(folder) and time.monotonic() < until:
        time.sleep(0.05)
    assert of(folder) == []


@pytest.fixture(scope="module")
def tiny(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("gqa")


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A room with the report, and the cache, of a run that nobody disturbed."""
    room = tmp_path_factory.mktemp("whole")
    env = {"MLXKV_CACHE": str(room / "cache")}
    done = mlxkv("compare", tiny, *TOKENS, "--out", room / "out", env=env)
    assert done.returncode == 0, done.stderr
    return room


def harmless(room: Path, model: Path, whole: Path) -> None:
    """The next run is as one that nobody disturbed, and sweeps what was left."""
    done = mlxkv(
        "compare",
        model,
        *TOKENS,
        "--out",
        room / "out",
        env={"MLXKV_CACHE": str(room / "cache")},
    )
    assert done.returncode == 0, done.stderr
    for name in FILES:
        assert (room / "out" / name).read_bytes() == (whole / "out" / name).read_bytes()
    assert list((room / "cache" / "runs").iterdir()) == []
    oracles = [path.name for path in (room / "cache" / "oracle").iterdir()]
    assert [name for name in oracles if name.startswith(".")] == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("moment", ["oracle/.*.part/plans", "oracle/.*.part/*.safetensors"])
def test_runs_killed_beside_the_oracle_leave_nothing_that_harms_the_next(
    tiny: Path, whole: Path, tmp_path: Path, moment: str
) -> None:
    cache = tmp_path / "cache"
    process = started("compare", tiny, *TOKENS, "--out", tmp_path / "out", cache=cache)
    while process.poll() is None and not list(cache.glob(moment)):
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    gone(tmp_path)
    harmless(tmp_path, tiny, whole)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_engines_end_with_a_killed_comparison_and_the_next_sweeps_its_traces(
    tiny: Path, whole: Path, tmp_path: Path
) -> None:
    cache = shutil.copytree(whole / "cache", tmp_path / "cache")
    process = started("compare", tiny, *TOKENS, "--out", tmp_path / "out", cache=cache)
    while process.poll() is None and not list(cache.glob("runs/*/float64/job.json")):
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    gone(tmp_path)
    assert len(list((cache / "runs").iterdir())) == 1
    harmless(tmp_path, tiny, whole)


@pytest.mark.nightly
def test_runs_killed_at_any_moment_leave_nothing_that_harms_the_next(
    tiny: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, most = tiny, 8.0
    if os.environ.get("MLXKV_KILLS_MODEL") == "default":
        model, most = request.getfixturevalue("default_checkpoint").folder, 60.0
    env = {"MLXKV_CACHE": str(tmp_path / "undisturbed" / "cache")}
    whole = tmp_path / "undisturbed"
    assert mlxkv("compare", model, *TOKENS, "--out", whole / "out", env=env).returncode == 0
    randomly, room = random.Random(int(os.environ.get("MLXKV_SEED", "1"))), tmp_path / "room"
    for _ in range(int(os.environ.get("MLXKV_KILLS", "10"))):
        process = started(
            *("compare", model, *TOKENS, "--fresh", "--out", room / "out"), cache=room / "cache"
        )
        time.sleep(randomly.uniform(0.2, most))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        gone(room)
    harmless(room, model, whole)


def test_two_comparisons_at_once_on_one_cache_both_agree_and_ask_the_oracle_once(
    tiny: Path, whole: Path, tmp_path: Path
) -> None:
    env = os.environ | {"MLXKV_CACHE": str(tmp_path / "cache")}
    outs = [tmp_path / "a", tmp_path / "b"]
    both = [
        subprocess.Popen(
            command("compare", tiny, *TOKENS, "--json", "--out", out),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for out in outs
    ]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted(json.loads(stdout)["took"]["oracle"] is None for stdout, _ in said) == [
        False,
        True,
    ]
    for out in outs:
        for name in FILES:
            assert (out / name).read_bytes() == (whole / "out" / name).read_bytes()
    assert list((tmp_path / "cache" / "runs").iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(
    tiny: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        command("compare", tiny, *TOKENS, "--fresh", "--out", tmp_path / "out"),
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"MLXKV_CACHE": str(tmp_path / "cache")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "cannot be written (File too large)" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "cache" / "oracle").iterdir()) == []


def test_a_refusal_leaves_no_output_folder(tiny: Path, tmp_path: Path) -> None:
    refused(mlxkv("compare", tiny, "--tokens", "99", "--out", tmp_path / "a" / "b"), "id 99")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    publish.claim(tmp_path / "kept")
    publish.claim(tmp_path / "kept" / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]


def test_a_report_that_cannot_be_written_whole_leaves_the_earlier_one(tmp_path: Path) -> None:
    publish.write(tmp_path, {"a.md": "1", "b.json": "2"})
    with pytest.raises(Refusal, match="cannot be written"):
        publish.write(tmp_path, {"a.md": "3", "x" * 300: "4"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "a.md": "1",
        "b.json": "2",
    }


def test_a_wrong_blas_is_refused_before_the_oracle_runs(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform != "linux":
        pytest.skip("MLXKV_BLAS is for Linux")
    monkeypatch.setattr(engine, "ask", lambda *_, **__: pytest.fail("the oracle was asked"))
    for path, says in (
        ("/nowhere/libblas.so", "cannot be loaded"),
        ("libm.so.6", "libm.so.6 has no cblas_sgemm, expected a BLAS library"),
    ):
        monkeypatch.setenv("MLXKV_BLAS", path)
        with (
            pytest.raises(Refusal, match=says),
            run([Request(model=str(tiny), tokens=(1, 2))]),
        ):
            pass
    monkeypatch.setenv("MLXKV_BLAS", "libm.so.6")
    with pytest.raises(Refusal, match="has no cblas_sgemm"):
        machine.load_blas()


def test_more_steps_than_positions_are_refused_with_both(
    tmp_path: Path, default_checkpoint: object
) -> None:
    refused(
        mlxkv("generate", "-n", "999999999"),
        "--steps 999999999: 5 tokens and 999999998 after them, expected at most 8192",
    )


def test_reports_that_are_not_there_are_refused_before_any_are_made(tmp_path: Path) -> None:
    begun = time.monotonic()
    refused(
        mlxkv("reports", "--check", "--out", tmp_path / "nosuch"),
        "nosuch: no reports, so there is nothing to check",
    )
    assert time.monotonic() - begun < 20  # making them takes minutes


def test_a_prompt_of_equal_tokens_says_what_it_cannot_show(tiny: Path, tmp_path: Path) -> None:
    done = mlxkv("compare", tiny, "--tokens", "5,5,5,5", "--steps", "1", "--out", tmp_path / "out")
    why = "a wrong mask or row cannot show here; only the probe has different ones"
    assert f"note: all tokens are equal: {why}" in done.stdout
    alone = mlxkv(
        *("compare", tiny, "--tokens", "5,5,5,5", "--steps", "1", "--quick"),
        *("--out", tmp_path / "alone"),
    )
    why = "a wrong mask or row cannot show; give a prompt of different ones"
    assert f"note: all tokens are equal: {why}" in alone.stdout
    assert "all tokens are equal" in (tmp_path / "out" / "compare.md").read_text()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_by_the_tensors_name(
    tmp_path: Path, value: float
) -> None:
    config = models.config("gqa")
    weights = models.weights(config)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = np.array(weights[name])
    weights[name][1, 2] = value
    folder = models.save(tmp_path / "m", config, weights)
    odd = "NaN" if np.isnan(value) else "infinity"
    with pytest.raises(Refusal, match=rf"{name} holds {odd}, expected finite weights"):
        load(folder, "float32")


def test_a_weight_too_large_for_the_runs_dtype_is_refused(tmp_path: Path) -> None:
    config = models.config("gqa")
    weights = models.weights(config)
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], 1e6)
    folder = models.save(tmp_path / "m", config, weights)
    load(folder, "float32")
    with pytest.raises(Refusal, match="holds NaN or infinity in float16"):
        load(folder, "float16")


def test_a_cache_path_that_is_no_plain_ascii(tiny: Path, tmp_path: Path) -> None:
    room = tmp_path / "größe 日本\nx"
    done = mlxkv(
        "compare",
        tiny,
        "--tokens",
        "3,7,11",
        "--steps",
        "2",
        "--out",
        room / "out",
        env={"MLXKV_CACHE": str(room / "cache")},
    )
    assert done.returncode == 0, done.stderr
    assert (room / "out" / "compare.md").is_file()


def test_an_mlx_without_its_backend_names_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "mlx.core":
                raise ImportError(
                    "libmlx.so: cannot open shared object file: No such file or directory"
                )

    monkeypatch.delitem(sys.modules, "mlx.core")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(
        Refusal,
        match=r"installed without its backend \(libmlx.so: .*\); pip install .* '\.\[port\]'",
    ):
        machine.require_mlx()

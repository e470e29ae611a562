"""The command as a person runs it: its exit code, its one line. The model is tiny, the oracle real.

Most run in the tests' own process; a true process stands where one can tell the difference.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import candle
import models
import numpy as np
import pytest
from command import Done, kept, mlxkv, oracle, refused, torch_python

from mlxkv.engines import machine
from mlxkv.judge.case import ORDER
from oracle.formats import disk, trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call
from oracle.model import checkpoint
from oracle.model.checkpoint import resolve

TOKENS = ["--tokens", "3,7,11,2,19", "--steps", "6"]


@pytest.fixture(scope="module")
def tiny(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("gqa")


@pytest.fixture(scope="module")
def answer(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An oracle folder of the tiny model."""
    folder = tmp_path_factory.mktemp("oracle") / "run"
    command = torch_python("-m", "oracle", "run", str(tiny), *TOKENS, "--out", str(folder))
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def compared(tiny: Path, answer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a comparison that went well."""
    out = tmp_path_factory.mktemp("report")
    done = mlxkv("compare", tiny, "--oracle", answer, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    (out / "stdout.txt").write_text(done.stdout)
    return out


def test_a_right_port_agrees_in_every_scope_and_writes_its_report(compared: Path) -> None:
    assert sorted(p.name for p in compared.iterdir()) == [
        "compare.json",
        "compare.md",
        "compare.svg",
        "stdout.txt",
    ]
    verdict = json.loads((compared / "compare.json").read_text())
    assert verdict["outcome"] == "agree"
    assert verdict["scopes"] == ["algebra", "logits", "cache"]
    assert verdict["plans"] == [*ORDER, "probe full", "probe chunked"]
    exact = {g["plan"] for g in verdict["gates"] if g["name"] == "algebra (float64)"}
    assert exact == {*ORDER, "probe full", "probe chunked"}
    lanes = [line for line in verdict["not_exercised"] if "float64" in line]
    assert lanes == [
        "3 of 6 growing prefixes in float64: "
        "without a cache each is a run of its own; the run's dtype had all",
        "the first call of probe chunked in float64: another plan's serves for it",
    ]
    assert [g["plan"] for g in verdict["gates"] if g["name"] == "repeat"] == ["chunked"]
    assert all(g["ran"] and not g["failed"] for g in verdict["gates"])
    last = (compared / "stdout.txt").read_text().splitlines()[-1]
    assert last == f"agree (algebra, logits, cache)    report: {compared / 'compare.md'}"


def test_the_same_run_gives_the_same_report_byte_for_byte(
    tiny: Path, answer: Path, compared: Path, tmp_path: Path
) -> None:
    assert mlxkv("compare", tiny, "--oracle", answer, "--out", tmp_path).returncode == 0
    for name in ("compare.json", "compare.svg"):
        assert (tmp_path / name).read_bytes() == (compared / name).read_bytes()
    first, second = (
        (p / "compare.md").read_text().replace(str(p), "OUT") for p in (compared, tmp_path)
    )
    assert first == second


def test_a_second_run_reuses_the_oracle_never_the_port_and_nothing_damaged(
    tiny: Path, tmp_path: Path
) -> None:
    def took() -> dict[str, Any]:
        done = mlxkv(
            "compare",
            tiny,
            *TOKENS,
            "--json",
            "--out",
            tmp_path / "out",
            env={"MLXKV_CACHE": str(tmp_path / "cache")},
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout)["took"])

    first, second = took(), took()
    assert first["oracle"]["seconds"] > 0
    assert second["oracle"] is None
    assert second["port"]["forward"] > 0
    assert second["port float64"]["forward"] > 0
    assert list((tmp_path / "cache" / "runs").iterdir()) == []
    (folder,), (probe,) = kept(tmp_path / "cache")
    made = (probe / "manifest.json").stat().st_mtime_ns
    with (folder / "truth.safetensors").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"damaged!")
    assert took()["oracle"] is not None
    manifest = json.loads((folder / "manifest.json").read_text()) | {"inputs": "0" * 64}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert took()["oracle"] is not None
    # Neither run made the probe again; gone or damaged, it is.
    assert (probe / "manifest.json").stat().st_mtime_ns == made
    shutil.rmtree(probe)
    assert took()["oracle"] is None
    with (probe / "floors.safetensors").open("r+b") as file:
        file.write(b"damaged!")
    assert took()["oracle"] is None
    assert took()["oracle"] is None
    assert kept(tmp_path / "cache") == ([folder], [probe])


def test_weights_that_differ_from_the_oracles_are_refused(answer: Path, tmp_path: Path) -> None:
    other = models.save(
        tmp_path / "other", models.config("gqa"), models.weights(models.config("gqa"), seed=1)
    )
    refused(
        mlxkv("compare", other, "--oracle", answer, "--out", tmp_path / "out"),
        "made with weights",
        "name the model",
    )
    assert not (tmp_path / "out").exists()


def test_another_config_on_the_same_weights_differs(
    tiny: Path, answer: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    (other / "config.json").write_text(json.dumps(models.config("gqa", rope_theta=10100.0)))
    done = mlxkv("compare", other, "--oracle", answer, "--out", tmp_path / "out")
    assert done.returncode == 1, done.stderr
    assert "differ (algebra" in done.stdout
    assert "first wrong position 1 " in done.stdout


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--tokens", "3,7,11,2,18"),
        ("--prompt", "x"),
        ("--dtype", "float16"),
        ("--steps", "7"),
        ("--chunks", "3,2"),
    ],
)
def test_an_oracle_folder_of_other_inputs_is_refused(
    tiny: Path, answer: Path, tmp_path: Path, option: str, value: str
) -> None:
    refused(
        mlxkv("compare", tiny, "--oracle", answer, option, value, "--out", tmp_path),
        option.strip("-"),
        "manifest.json",
    )


def test_an_oracle_folder_with_a_changed_plan_is_refused(
    tiny: Path, answer: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(answer, copy)
    plan = json.loads((copy / "plans" / "step.json").read_text())
    plan["steps"][2]["tokens"] = [1]
    (copy / "plans" / "step.json").write_text(json.dumps(plan))
    refused(
        mlxkv("compare", tiny, "--oracle", copy, "--out", tmp_path / "out"), "step.json", "sha256"
    )


def test_a_plan_that_is_not_the_manifests_is_refused_even_when_its_hash_fits(
    tiny: Path, answer: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(answer, copy)
    plan, manifest = copy / "plans" / "step.json", copy / "manifest.json"
    plan.write_text(plan.read_text().replace('"index_pos": 5', '"index_pos": 6'))
    value = json.loads(manifest.read_text())
    value["files"]["plans/step.json"] = disk.sha256(plan)
    manifest.write_text(json.dumps(value))
    refused(
        mlxkv("compare", tiny, "--oracle", copy, "--out", tmp_path / "out"), "step.json", "digest"
    )


@pytest.mark.parametrize("name", ["truth", "reference-step", "floors", "manifest"])
@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_a_damaged_oracle_folder_is_refused(
    tiny: Path, answer: Path, tmp_path: Path, name: str, how: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(answer, copy)
    path = copy / (f"{name}.safetensors" if name != "manifest" else "manifest.json")
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        middle = len(data) // 2
        path.write_bytes(
            data[:middle]
            if how == "cut"
            else data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        )
    if (name, how) == ("manifest", "flipped"):
        path.write_bytes(data.replace(b'"complete": true', b'"complete": "no"'))
    refused(mlxkv("compare", tiny, "--oracle", copy, "--out", tmp_path / "out"), path.name)


def test_a_damaged_candidate_is_refused(tiny: Path, answer: Path, tmp_path: Path) -> None:
    path = tmp_path / "candidate.safetensors"
    path.write_bytes((answer / "reference-step.safetensors").read_bytes()[:5000])
    refused(
        mlxkv("compare", tiny, "--oracle", answer, "--candidate", path, "--out", tmp_path / "out"),
        str(path),
    )


def test_a_third_engine_stands_beside_the_port_and_the_oracle(
    tiny: Path, answer: Path, tmp_path: Path
) -> None:
    third = tmp_path / "third.safetensors"
    one = trace.read(answer / "reference-step.safetensors")
    arrays = {name: one.arrays[name] for name in ("logits", "positions", "steps")}
    meta = trace.Meta(one.meta.plan, "third", "1", "float32", fingerprint=one.meta.fingerprint)
    trace.write(third, meta, arrays)
    done = mlxkv(
        "compare", tiny, "--oracle", answer, "--candidate", third, "--out", tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "out" / "compare.md").read_text()
    table = report.split("## Three engines")[1].split("##")[0]
    pairs = [
        tuple(cell.strip() for cell in line.split("|")[1:3])
        for line in table.splitlines()
        if line.startswith("| ")
    ][2:]
    assert pairs == [
        ("third cached", "mlxkv cached"),
        ("third cached", "transformers cached"),
        ("mlxkv cached", "transformers cached"),
        ("third cached", "truth full"),
        ("mlxkv cached", "truth full"),
    ]


GOLDEN = Path(__file__).parents[1] / "golden" / "tiny" / "gqa"


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, trace.Trace]:
    """An oracle folder over the tokens of candle's cached plan, and candle's rows as a trace."""
    folder = tmp_path_factory.mktemp("golden") / "run"
    rows = candle.read(GOLDEN, "cached", fingerprint=resolve(str(GOLDEN)).fingerprint)
    ids = [str(id) for step in rows.meta.plan.steps if isinstance(step, Call) for id in step.tokens]
    options = ["--tokens", ",".join(ids), "--prompt-tokens", "5", "--steps", "0"]
    command = torch_python("-m", "oracle", "run", str(GOLDEN), *options, "--out", str(folder))
    subprocess.run(command, check=True, capture_output=True)
    return folder, rows


def test_the_real_candle_is_judged_beside_the_port_and_agrees(
    golden: tuple[Path, trace.Trace], tmp_path: Path
) -> None:
    folder, rows = golden
    trace.write(tmp_path / "candle.safetensors", rows.meta, rows.arrays)
    done = mlxkv(
        "compare",
        GOLDEN,
        "--oracle",
        folder,
        "--candidate",
        tmp_path / "candle.safetensors",
        "--out",
        tmp_path / "out",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "candle: agree (logits)"
    assert (
        "By the same gates candle: **agree (logits)**."
        in (tmp_path / "out" / "compare.md").read_text()
    )
    assert (
        json.loads((tmp_path / "out" / "compare.json").read_text())["third"]["outcome"] == "agree"
    )


def test_a_wrong_candidate_differs_though_the_port_agrees(
    golden: tuple[Path, trace.Trace], tmp_path: Path
) -> None:
    folder, rows = golden
    arrays = dict(rows.arrays) | {"logits": rows.logits * np.float32(1.001)}
    trace.write(tmp_path / "candle.safetensors", rows.meta, arrays)
    done = mlxkv(
        "compare",
        GOLDEN,
        "--oracle",
        folder,
        "--candidate",
        tmp_path / "candle.safetensors",
        "--out",
        tmp_path / "out",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "\nagree (algebra, logits, cache)" in done.stdout
    *_, unseen, last = done.stdout.splitlines()
    assert unseen.endswith("the probe")
    assert "\ncandle: not exercised: positions beyond " in done.stdout
    assert last.startswith(
        "candle: differ (logits): first wrong position between 0 and 4 (plan step, sigma); "
    )
    third = json.loads((tmp_path / "out" / "compare.json").read_text())["third"]
    assert "the probe: no trace of its plans that could be compared" in third["not_exercised"]


@pytest.mark.parametrize(
    "arguments",
    [["--tokens", "3,7,11", "--steps", "1"], ["--tokens", "3,7", "--chunks", "2"]],
)
def test_plans_that_coincide_are_run_once_and_judged(
    tiny: Path, tmp_path: Path, arguments: list[str]
) -> None:
    done = mlxkv("compare", tiny, *arguments, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nagree (algebra, logits" in done.stdout


@pytest.mark.parametrize("engine", ["port", "mlx-lm"])
def test_one_token_tells_nothing_of_rope_and_masks(tiny: Path, tmp_path: Path, engine: str) -> None:
    given = ["--tokens", "3", "--steps", "1", "--engine", engine]
    done = mlxkv("compare", tiny, *given, "--out", tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "with one token nothing comes before it, so neither RoPE nor a mask" in done.stdout


def test_quick_leaves_the_probe_out_and_says_so(tiny: Path, answer: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    env, given = {"MLXKV_CACHE": str(cache)}, [*TOKENS, "--quick", "--json", "--out"]
    made = json.loads(mlxkv("compare", tiny, *given, tmp_path / "a", env=env).stdout)
    there = json.loads(
        mlxkv("compare", tiny, "--oracle", answer, *given[2 + 2 :], tmp_path / "b").stdout
    )
    assert kept(cache)[1] == []
    for verdict in (made, there):
        assert (verdict["outcome"], verdict["plans"]) == ("agree", list(ORDER))
        (line,) = [line for line in verdict["not_exercised"] if line.startswith("the probe: ")]
        assert line.startswith("the probe: left out")


def test_a_folder_without_a_probe_leaves_it_unexercised(
    tiny: Path, answer: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(answer, copy)
    shutil.rmtree(copy / "probe")
    done = mlxkv("compare", tiny, "--oracle", copy, "--json", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert any(line.startswith("the probe: ") for line in verdict["not_exercised"])


def test_a_probe_of_other_weights_is_refused(tiny: Path, answer: Path, tmp_path: Path) -> None:
    other = models.save(
        tmp_path / "other", models.config("gqa"), models.weights(models.config("gqa"), seed=1)
    )
    copy = tmp_path / "copy"
    shutil.copytree(answer, copy)
    shutil.rmtree(copy / "probe")
    line = torch_python("-m", "oracle", "probe", str(other), "--out", str(copy / "probe"))
    subprocess.run(line, check=True, capture_output=True)
    done = mlxkv("compare", tiny, "--oracle", copy, "--out", tmp_path / "out")
    refused(done, "probe/manifest.json", "fingerprint is")


def test_a_second_prompt_does_not_make_the_probe_again(tiny: Path, tmp_path: Path) -> None:
    env = {"MLXKV_CACHE": str(tmp_path / "cache")}
    for ids in ("3,7,11,2", "3,7,11,4"):
        done = mlxkv("compare", tiny, "--tokens", ids, "--out", tmp_path / "out", env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        said = [line for line in done.stderr.splitlines() if "probe" in line]
        assert len(said) == (ids[-1] == "2")
    answers, probes = kept(tmp_path / "cache")
    assert (len(answers), len(probes)) == (2, 1)
    listed = mlxkv("store", "list", env=env).stdout
    assert listed.count("gqa, float32, 64 tokens (the probe)") == 1


def test_a_third_engine_is_judged_over_the_probe_if_it_followed_it(
    tiny: Path, answer: Path, tmp_path: Path
) -> None:
    paths = []
    for name in ("reference-step", "probe/reference-full", "probe/reference-chunked"):
        one = trace.read(answer / f"{name}.safetensors")
        meta = trace.Meta(one.meta.plan, "third", "1", "float32", fingerprint=one.meta.fingerprint)
        paths.append(tmp_path / f"{name.replace('/', '-')}.safetensors")
        trace.write(paths[-1], meta, dict(one.arrays))
    given = [f"--candidate={path}" for path in paths]
    out = tmp_path / "out"
    done = mlxkv("compare", tiny, "--oracle", answer, *given, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    third = json.loads((out / "compare.json").read_text())["third"]
    assert third["plans"] == ["step", "probe full", "probe chunked"]
    judged = mlxkv("judge", answer, *paths, "--json", "--out", tmp_path / "judged")
    assert json.loads(judged.stdout)["plans"] == third["plans"]
    refused(
        mlxkv("compare", tiny, "--oracle", answer, "--quick", *given, "--out", out),
        "probe-reference-full.safetensors: plan digest is ",
        "its rows are a probe's: give a folder with that probe, and no --quick",
    )


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    refused(
        mlxkv("compare", tmp_path / "nowhere", "--out", tmp_path / "out"),
        "nowhere",
        "no such folder",
    )


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_one_of_its_files(tiny: Path, tmp_path: Path, missing: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    (copy / missing).unlink()
    refused(
        mlxkv("compare", copy, *TOKENS, "--out", tmp_path / "out"), str(copy), missing.split(".")[1]
    )


def test_truncated_weights(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[: len(data) * 9 // 10])
    refused(mlxkv("compare", copy, *TOKENS, "--out", tmp_path / "out"), "model.safetensors")


def test_a_model_that_is_not_a_llama(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    (copy / "config.json").write_text(json.dumps(models.config("gqa", model_type="qwen2")))
    refused(
        mlxkv("compare", copy, *TOKENS, "--out", tmp_path / "out"), "model_type", "qwen2", "llama"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "3,40"], ["40", "vocab"]),
        (["--tokens", "-1,3"], ["-1", "vocab"]),
        (["--tokens", ",".join(["3"] * 65)], ["65", "64", "max_position_embeddings"]),
        (["--tokens", "3,3", "--steps", "64"], ["--steps 64", "at most 64"]),
        (["--tokens", "3,3", "--chunks", "2,2"], ["chunks"]),
        (["--tokens", "3", "--prompt", "x"], ["--prompt", "--tokens"]),
        (["--prompt", "x"], ["tokenizer.json", "--tokens"]),
        (["--prompt-file", "nowhere.txt"], ["nowhere.txt"]),
        (["--tokens", "3,3", "--device", "gpu"], ["--device", "gpu"]),
    ],
)
def test_a_request_that_cannot_be_run(
    tiny: Path, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    refused(mlxkv("compare", tiny, *arguments, "--out", tmp_path / "out"), *words)


def test_an_empty_prompt(tmp_path: Path, default_checkpoint: object) -> None:
    refused(mlxkv("compare", "--prompt", "", "--out", tmp_path / "out"), "prompt", "empty")


def test_an_output_folder_that_cannot_be_made(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    refused(
        mlxkv("compare", tiny, *TOKENS, "--out", tmp_path / "file" / "out"),
        "file/out",
        "cannot be written",
    )


def test_a_cache_folder_that_cannot_be_made(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    env = {"MLXKV_CACHE": str(tmp_path / "file" / "cache")}
    refused(
        mlxkv("compare", tiny, *TOKENS, "--out", tmp_path / "out", env=env), "cannot be written"
    )


@pytest.mark.parametrize(
    ("package", "extra"), [("torch", "[oracle]"), ("transformers", "[oracle]"), ("mlx", "[port]")]
)
def test_a_missing_package_names_the_extra_that_brings_it(
    tiny: Path, tmp_path: Path, package: str, extra: str
) -> None:
    env = {"PYTHONPATH": str(without(package, tmp_path)), "MLXKV_CACHE": str(tmp_path / "cache")}
    refused(
        mlxkv("compare", tiny, *TOKENS, "--out", tmp_path / "out", env=env),
        f"{package} is not installed",
        extra,
    )


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_comparison_with_a_given_folder_needs_no_torch(
    tiny: Path, answer: Path, tmp_path: Path, package: str
) -> None:
    env = {"PYTHONPATH": str(without(package, tmp_path))}
    done = mlxkv("compare", tiny, "--oracle", answer, "--out", tmp_path / "out", env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["torch", "transformers"])
@pytest.mark.parametrize(
    ("command", "offered"),
    [
        (["compare", *TOKENS], True),
        (["locate", *TOKENS], True),
        (["compare", "--prompts", "{ids}"], False),
        (["pitfalls", "--tokens", "3,7,11,2", "--other-tokens", "3,7,5,9"], False),
        (["selftest", "--no-tiny"], False),
        (["calibrate", "--no-tiny"], False),
    ],
)
def test_an_oracle_folder_is_offered_where_one_can_be_given(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    command: list[str],
    offered: bool,
) -> None:
    has = machine.has
    monkeypatch.setattr(machine, "has", lambda name: name != package and has(name))
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"tokens": [3, 7]}')
    name, *options = (word.replace("{ids}", str(ids)) for word in command)
    done = mlxkv(name, tiny, *options, "--out", tmp_path / "out")
    install = "pip install -c constraints.txt '.[oracle]' in a clone of the repository"
    refused(done, f"{package} is not installed; {install}")
    assert ("--oracle DIR" in done.stderr) == offered


def test_ids_are_asked_for_as_the_command_takes_them(tiny: Path, tmp_path: Path) -> None:
    texts, out = tmp_path / "texts.txt", tmp_path / "out"
    texts.write_text("one\ntwo\n")
    refused(mlxkv("compare", tiny, "--out", out), "no tokenizer.json", "give the ids with --tokens")
    done = mlxkv("compare", tiny, "--prompts", texts, "--out", out)
    refused(done, "prompt line-1: ", "no tokenizer.json", '{"tokens": [1, 2]}')
    assert "--tokens" not in done.stderr


def test_nothing_is_to_be_installed_by_a_name_that_no_index_has() -> None:
    root = Path(__file__).parents[2]
    sources = [*root.glob("mlxkv/**/*.py"), *root.glob("oracle/**/*.py"), root / "README.md"]
    assert len(sources) > 100
    named = re.compile(r"pip3? install [^`\n&]*mlxkv")
    assert [path for path in sources if named.search(path.read_text(encoding="utf-8"))] == []


def without(package: str, room: Path) -> Path:
    """A folder whose sitecustomize hides a package from this process and those it starts."""
    folder = room / "hide"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    return folder


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("moment", "given"),
    [(None, False), ("cache/oracle/.*.part/plans", False), ("cache/runs/*/float64/job.json", True)],
    ids=["imports", "the oracle at work", "the engines at work"],
)
def test_an_interrupt_ends_with_130_and_leaves_nothing_half_written(
    tiny: Path, answer: Path, tmp_path: Path, moment: str | None, given: bool
) -> None:
    asked = ["--oracle", str(answer)] if given else ["--tokens", "3,7", "--steps", "62"]
    command = [sys.executable, "-m", "mlxkv", "compare", str(tiny), *asked]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")],
        env=os.environ | {"MLXKV_CACHE": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and not (
        list(tmp_path.glob(moment)) if moment else "_multiarray_umath" in maps.read_text()
    ):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.fail("the comparison was over before the interrupt; give it more to do")
    assert process.returncode in (130, -signal.SIGINT), errors
    assert "Traceback" not in errors
    said = "interrupted: nothing was finished that is kept; the same command begins anew"
    *notes, last = [line for line in errors.splitlines() if line] or [""]
    assert last == said or not (moment or last)
    assert all(note.startswith("oracle: ") for note in notes)
    assert files(tmp_path / "out") == []
    assert list((tmp_path / "cache").rglob("*.part")) == []
    assert files(tmp_path / "cache" / "runs") == []


def test_output_that_cannot_be_written_and_a_fault_of_ours_never_look_like_a_verdict(
    tiny: Path,
) -> None:
    command = [sys.executable, "-m", "mlxkv", "inspect", str(tiny)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    why = "standard output: cannot be written (No space left on device); give it somewhere to go"
    assert (done.returncode, done.stderr) == (2, f"error: {why}\n")
    reader, writer = os.pipe()
    os.close(reader)
    assert subprocess.run(command, stdout=writer, stderr=subprocess.PIPE).returncode == 2
    os.close(writer)
    code = (
        "import sys; sys.argv = ['mlxkv', 'doctor']\n"
        "from mlxkv import cli\n"
        "from mlxkv.commands import show\n"
        "show.doctor = lambda **_: 1 / 0\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_terminated_comparison_stops_its_engines_and_leaves_no_traces(
    tiny: Path, answer: Path, tmp_path: Path
) -> None:
    env = os.environ | {"MLXKV_CACHE": str(tmp_path / "cache")}
    command = [
        sys.executable,
        "-m",
        "mlxkv",
        "compare",
        str(tiny),
        "--oracle",
        str(answer),
        "--out",
        str(tmp_path / "out"),
    ]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    runs = tmp_path / "cache" / "runs"
    while process.poll() is None and not list(runs.glob("*/float64/job.json")):
        time.sleep(0.01)
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 143
    assert re.fullmatch("interrupted: .*; the same command .*\n", errors)
    assert list(runs.iterdir()) == []
    lines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert [line for line in lines if str(runs).encode() in line] == []


def test_help_names_every_command_and_exit_code() -> None:
    done = mlxkv("--help")
    assert done.returncode == 0
    for word in (
        "compare",
        "reports",
        "bench",
        "generate",
        "inspect",
        "doctor",
        "0 agree",
        "1 differ",
        "2 could not tell",
    ):
        assert word in done.stdout


@pytest.mark.parametrize("run", [mlxkv, oracle])
def test_a_bare_command_prints_its_help_as_it_is(run: Callable[..., Done]) -> None:
    bare, helped = run(), run("--help")
    # Not 0, which would be a verdict where a script's arguments got lost.
    assert (bare.returncode, bare.stdout, bare.stderr) == (2, helped.stdout, "")
    assert len(helped.stdout.splitlines()) > 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["comapre"], ["No such command 'comapre'", "--help"]),
        (["compare", "--nosuch"], ["No such option '--nosuch'", "see", "compare --help"]),
        (["compare", "--steps"], ["'--steps' requires an argument", "--help"]),
        (["compare", "--dtype", "int8"], ["'int8' is not one of", "compare --help"]),
        (["judge", "here"], ["Missing argument 'TRACE...'", "judge --help"]),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line_that_names_the_help(
    arguments: list[str], words: list[str]
) -> None:
    refused(mlxkv(*arguments), *words)


@pytest.mark.parametrize("number", ["1_0", "+1", " 1", "1 ", "01", "\uff11", "1.0", "1e1", "", "x"])
def test_numbers_are_read_strictly(number: str) -> None:
    for name in ("--tokens", "--chunks"):
        words = [f"{name}: {number!r} at place 1, expected whole numbers", "write them as 1,2,3"]
        refused(mlxkv("compare", name, f"3,{number}"), *words)
    for name in ("--steps", "--threads"):
        refused(mlxkv("compare", name, number), f"'{name}': {number!r} is not a whole number")


@pytest.mark.parametrize("command", ["compare", "locate", "inspect", "pitfalls"])
def test_a_terminal_is_told_what_is_done_before_it_is_done(
    tiny: Path, tmp_path: Path, command: str
) -> None:
    given = {
        "inspect": [],
        "pitfalls": ["--tokens", "99", "--other-tokens", "98"],
    }.get(command, ["--tokens", "99"])
    if command != "inspect":
        given += ["--out", str(tmp_path / "out")]
    environment = os.environ | {"MLXKV_CACHE": str(tmp_path / "cache")}
    line = [sys.executable, "-m", "mlxkv", command, str(tiny), *given]
    terminal, end = pty.openpty()
    try:
        subprocess.run(line, stdout=subprocess.DEVNULL, stderr=end, env=environment, timeout=120)
        said = os.read(terminal, 4096).decode().splitlines()
    finally:
        os.close(terminal)
        os.close(end)
    assert said[0] == "hashing model.safetensors"


@pytest.mark.parametrize(
    "command", ["compare", "locate", "pitfalls", "selftest", "calibrate", "bench", "generate"]
)
def test_debug_is_for_one_command_and_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    seen = []

    def fails(*_: object, **__: object) -> None:
        seen.append(os.environ.get("MLXKV_DEBUG"))
        raise Refusal("no")

    monkeypatch.setattr(checkpoint, "_found", fails)
    given = [] if command in ("bench", "generate") else ["--out", tmp_path]
    given += ["--no-tiny"] if command in ("selftest", "calibrate") else []
    loud, quiet = (mlxkv(command, "x", *given, *debug) for debug in (["--debug"], []))
    assert (seen[0], seen[1] or None) == ("1", None)
    assert loud.stderr.startswith("Traceback (most recent call last):\n")
    assert loud.stderr.splitlines()[-1] == quiet.stderr.rstrip() == "error: no"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['mlxkv', '--help']\n"
        "from mlxkv import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = 'numpy mlx torch transformers rich matplotlib huggingface_hub gguf safetensors "
        "tokenizers'.split()\n"
        "print('heavy:', [name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("heavy: []\n")


def test_generate_streams_the_golden_text(default_checkpoint: object) -> None:
    done = mlxkv("generate", "--steps", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n\nThe answer is:\n"


def test_inspect_says_what_the_cache_takes(tiny: Path) -> None:
    done = mlxkv("inspect", tiny, "--json")
    facts = json.loads(done.stdout)
    assert (facts["num_key_value_heads"], facts["head_dim"]) == (2, 8)
    assert facts["cache_bytes_per_token"] == {"float32": 384, "float16": 192, "bfloat16": 192}
    lines = mlxkv("inspect", tiny).stdout.splitlines()
    assert "cache per layer  keys and values, each (1, 2, length, 8)" in lines
    assert "cache per token  384 bytes in float32, 192 in half precision" in lines


def test_inspect_says_what_was_filled_in_and_every_parameter_of_rope(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "truncate": False}
    config = {
        k: v for k, v in models.config("gqa", rope_scaling=scaling).items() if k != "rms_norm_eps"
    }
    lines = mlxkv(
        "inspect", models.save(tmp_path / "m", config, models.weights(models.config("gqa")))
    ).stdout.splitlines()
    assert (
        "RoPE             yarn, theta 10000, factor 4.0, original_max_position_embeddings 64, "
        "truncate false" in lines
    )
    filled = (
        "rms_norm_eps 1e-06, beta_fast 32.0, beta_slow 1.0, original_max_position_embeddings 64, "
        "attention_bias false, mlp_bias false"
    )
    assert f"filled in        {filled} (absent in config.json, as in transformers)" in lines


def test_an_unknown_key_is_refused_until_it_is_ignored_and_then_that_is_shown(
    tmp_path: Path,
) -> None:
    env = {"MLXKV_CACHE": str(tmp_path / "cache")}
    odd = models.save(
        tmp_path / "odd",
        models.config("gqa") | {"auto_map": {"A": "b.C"}},
        models.weights(models.config("gqa")),
    )
    command = ("compare", odd, *TOKENS, "--json", "--out", tmp_path / "out")

    refused(
        mlxkv(*command, env=env),
        "auto_map: expected no such key in a Llama config (it may change the model)",
    )
    assert not (tmp_path / "cache" / "oracle").exists()
    done = mlxkv(*command, "--ignore-key", "auto_map", env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["note"] == "ignoring auto_map in config.json"
    assert (
        "ignoring auto_map in config.json"
        in (tmp_path / "out" / "compare.md").read_text().splitlines()[0]
    )

    # A folder made so says so by itself, and both engines must be asked the same.
    (folder,), _ = kept(tmp_path / "cache")
    given = mlxkv("compare", odd, "--oracle", folder, "--out", tmp_path / "out", env=env)
    assert given.returncode == 0, given.stderr
    refused(
        mlxkv(*command, "--ignore-key", "auto_mapp", env=env), "no key 'auto_mapp'", "--ignore-key"
    )
    refused(
        mlxkv(*command, "--ignore-key", "head_dim", env=env), "head_dim", "the model depends on it"
    )
    for other in (["inspect"], ["bench", "--prefill", "4", "--decode", "2"]):
        done = mlxkv(*other, odd, "--ignore-key", "head_dim", env=env)
        refused(done, "head_dim", "depends on it")


def test_dynamic_rope_beyond_the_model_is_refused_and_why(tmp_path: Path) -> None:
    folder = models.save(
        tmp_path / "m", models.config("gqa", rope_scaling={"type": "dynamic", "factor": 2.0})
    )
    done = mlxkv("compare", folder, *TOKENS, "--steps", "99", "--out", tmp_path / "out")
    refused(
        done,
        "expected at most 64 (max_position_embeddings, and beyond it dynamic RoPE has other "
        "frequencies at every length",
    )


def test_doctor_finds_both_engines() -> None:
    done = mlxkv("doctor")
    assert done.returncode == 0, done.stdout
    assert "torch" in done.stdout
    assert "blas" in done.stdout

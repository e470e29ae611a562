"""What README says to somebody with a port of their own works as written."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import own_llama
import pytest
from command import mlxkv

from oracle.formats import trace

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MY_PORT = """
import numpy as np

def new_cache():
    return model.make_cache()

def logits(tokens, cache):
    import mlx.core as mx
    return np.array(model(mx.array([tokens]), cache=cache)[0])
"""


@pytest.fixture
def place(
    answer: Path, folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with somebody's port and an oracle's answer, to stand in."""
    shutil.copytree(answer, tmp_path / "france")
    text = (
        Path(own_llama.__file__).read_text()
        + MY_PORT
        + f"\nmodel = load({str(folder_of('gqa'))!r}, 'float32')\n"
    )
    (tmp_path / "my_port.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_port", raising=False)
    return tmp_path


def block(language: str, word: str) -> str:
    (found,) = [
        text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if word in text
    ]
    return str(found)


def test_the_test_for_ones_own_suite_passes_and_fails(
    place: Path, folder_of: Callable[[str], Path]
) -> None:
    scope: dict[str, Callable[..., None]] = {}
    exec(block("python", "assert_agrees").replace("path/to/folder", str(folder_of("gqa"))), scope)
    scope["test_my_port_agrees_with_transformers"]()
    right, scope["load"] = scope["load"], lambda *_: sys.modules["my_port"].model
    sys.modules["my_port"].model.config["rope_theta"] = 10100.0
    with pytest.raises(AssertionError, match="\nOwnLlama: differ "):
        scope["test_my_port_agrees_with_transformers"]()
    assert right is sys.modules["my_port"].load


def test_a_trace_of_ones_own_is_a_dozen_lines_and_judged_as_written(place: Path) -> None:
    code = block("python", "trace.Meta(")
    assert len([line for line in code.splitlines() if line]) <= 14
    exec(code, {})
    assert [
        trace.read(f"mine-{name}.safetensors").positions.tolist() for name in ("full", "step")
    ] == [list(range(24))] * 2
    judge, delta = (shlex.split(line) for line in block("sh", "mlxkv delta mine").splitlines())
    done = mlxkv(*judge[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nmine: agree (logits)    report: mlxkv-report/compare.md\n" in done.stdout
    shown = mlxkv(*delta[1:])
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[:3] for line in shown.stdout.splitlines()[-3:]] == [
        ["1", "2", "24"],
        ["1", "3", "24"],
        ["2", "3", "24"],
    ]


def test_a_trace_written_by_hand_needs_no_more_than_readme_says(place: Path) -> None:
    """A file of an engine that is not Python: eight bytes of length, JSON, arrays."""
    for name in ("full", "probe/full"):
        folder, stem = (Path("france") / name).parent, Path(name).name
        known = trace.read(folder / f"reference-{stem}.safetensors")
        given = (folder / "plans" / f"{stem}.json").read_text()
        meta = block("json", "mlxkv-trace/1").replace("PLAN", given)
        written(Path(f"{name.replace('/', '-')}.safetensors"), meta, known)
    done = mlxkv("judge", "france", "full.safetensors", "probe-full.safetensors")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nmine: agree (logits)    report: " in done.stdout
    assert "plan probe chunked" in done.stdout
    alone = mlxkv("judge", "france", "full.safetensors")
    assert "; the probe\nmine: agree (logits)    report: " in alone.stdout


def written(path: Path, meta: str, known: trace.Trace) -> None:
    head: dict[str, object] = {"__metadata__": {"mlxkv": meta}}
    body = b""
    for name, kind in {"logits": "F32", "positions": "I32"}.items():
        array = known.arrays[name]
        ends = [len(body), len(body) + array.nbytes]
        head[name] = {"dtype": kind, "shape": array.shape, "data_offsets": ends}
        body += array.tobytes()
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_the_engine_that_readme_describes_is_the_one_that_help_names() -> None:
    from mlxkv.cli import cli

    assert "`mlxkv compare --engine FILE.py:load` judges your own MLX model" in README
    (engine,) = [option for option in cli.commands["compare"].params if option.name == "engine"]
    assert engine.metavar == "[port|mlx-lm|FILE.py:load]"  # type: ignore[attr-defined]


def test_the_cache_of_thirty_lines_behaves(tmp_path: Path) -> None:
    text = block("python", "class Int8Cache")
    (tmp_path / "test_mine.py").write_text(block("python", "assert_cache_behaves"))
    # As where torch is not installed: mlx-lm would import it, for seconds.
    (tmp_path / "conftest.py").write_text("import sys\n\nsys.modules['torch'] = None\n")
    command = [sys.executable, "-m", "pytest", "-q", "test_mine.py"]
    command += [f"-pno:{name}" for name in ("cacheprovider", "hypothesispytest", "xdist")]
    codes, said = [], ""
    for version in (text, text.replace("self.offset -= n", "self.offset -= n + 1")):
        (tmp_path / "mine.py").write_text(version)
        env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        codes.append(done.returncode)
        said = done.stdout
    assert codes == [0, 1]
    assert "trim" in said
    assert len(text.splitlines()) <= 32

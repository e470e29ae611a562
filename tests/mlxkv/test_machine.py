"""What an engine's process does before MLX starts, and what no other process does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import torch_python

from mlxkv.engines import machine
from oracle.formats.errors import Refusal

LIBRARIES = ("blis", "openblas", "mkl_rt")


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | env
    )


def test_without_any_blas_the_port_computes_the_same_within_the_noise(
    folder_of: Callable[[str], Path],
) -> None:
    code = (
        "from mlxkv.engines import machine\n"
        "print(machine.prepare('cpu')['blas'])\n"
        "from mlxkv import Cache, load\n"
        f"model = load({str(folder_of('gqa'))!r})\n"
        "print(*model([[3, 7, 11, 2, 19]], cache=Cache(model.config)).tolist()[0])\n"
    )
    found = [python(code, MLXKV_BLAS=blas).stdout.splitlines() for blas in ("none", "")]
    assert found[0][0] == "reference (from MLX)"
    a, b = ([float(x) for x in lines[1].split()] for lines in found)
    assert len(a) == 40
    assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-4 * max(map(abs, a))


def test_a_blas_that_is_named_but_cannot_be_loaded_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLXKV_BLAS", "/nowhere/libblas.so")
    with pytest.raises(
        Refusal,
        match=r"MLXKV_BLAS: /nowhere/libblas.so cannot be loaded .* give the path of a BLAS "
        r"library, or none",
    ):
        machine.load_blas()


def test_no_blas_is_loaded_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", object())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="beside torch"):
        machine.load_blas()
    monkeypatch.delitem(sys.modules, "torch")


def test_tf32_is_off_and_said_so_and_threads_are_those_asked_for() -> None:
    code = (
        "from mlxkv.engines import machine; f = machine.prepare('cpu', threads=1); "
        "print(f['MLX_ENABLE_TF32'], f['threads'])"
    )
    assert python(code, MLX_ENABLE_TF32="1").stdout == "0 1\n"


def test_importing_the_package_changes_nothing_in_the_process() -> None:
    code = (
        "import os; before = dict(os.environ)\n"
        "import mlxkv; mlxkv.load, mlxkv.Cache\n"
        "maps = open('/proc/self/maps').read() if os.path.exists('/proc/self/maps') else ''\n"
        f"print(before == dict(os.environ), [n for n in {LIBRARIES} if 'lib' + n in maps])\n"
    )
    assert python(code).stdout == "True []\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_that_starts_the_oracle_has_neither_mlx_nor_a_blas(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The oracle inherits an environment from it, and would inherit a preloaded library's
    variables.
    """
    code = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from mlxkv import cli\n"
        "from mlxkv.engines import process\n"
        "from oracle.formats import child\n"
        "def command(module, *arguments):\n"
        f"    warm = [*{torch_python('-m')!r}, module, *arguments]\n"
        "    return warm if module == 'oracle' else child.command(module, *arguments)\n"
        "process.child = SimpleNamespace(command=command)\n"
        f"given = ['compare', {str(folder_of('gqa'))!r}, '--tokens', '3,7', '--steps', '3']\n"
        f"code = cli.invoke([*given, '--out', {str(tmp_path / 'out')!r}])\n"
        "maps = open('/proc/self/maps').read()\n"
        "loaded = [name in sys.modules for name in ('mlx.core', 'torch')]\n"
        f"print(code, loaded, [n for n in {LIBRARIES} if '/lib' + n in maps])\n"
    )
    assert python(code).stdout.splitlines()[-1] == "0 [False, False] []"


def test_an_mlx_older_than_the_package_allows_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert allowed.count(f">={'.'.join(map(str, machine.MLX_LEAST))}") >= 2
    for found in ("0.29", "0.29.1", "0.32.4", "1.0", "0.33.0.dev20261130", "unknown"):
        monkeypatch.setattr(machine, "version", lambda _, found=found: found)
        machine.require_device("cpu")
    monkeypatch.setattr(machine, "version", lambda _: "0.24.1")
    for refused in (lambda: machine.require_device("cpu"), machine.require_mlx):
        with pytest.raises(
            Refusal,
            match=r"^mlx 0\.24\.1 is installed, expected 0\.29 or later; pip install .* "
            r"'\.\[port\]' in a",
        ):
            refused()

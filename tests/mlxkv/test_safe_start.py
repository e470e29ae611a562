"""Nothing is imported from the folder that a command is run in, however hostile that folder is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import models
import own_llama
import pytest

import mlxkv
from mlxkv.engines import machine, process
from oracle.formats import child

PACKAGES = Path(mlxkv.__file__).parent.parent
PLANTED = (
    "random.py",
    "json.py",
    "signal.py",
    "__future__.py",
    "numpy.py",
    "oracle.py",
    "torch.py",
    "safetensors.py",
    "mlx_lm/__init__.py",
)
CHILDREN = (
    process.PORT,
    process.MLX_LM,
    process.OWN,
    "oracle",
    "mlxkv",
    "mlxkv.commands.bench.count",
    "mlxkv.commands.bench.worker",
    "mlxkv.commands.pitfalls.memory",
    "mlxkv.commands.selftest.worker",
)
SCRIPT = "import sys\nfrom {package}.__main__ import main\nsys.exit(main())\n"


class Trap:
    """A checkpoint's folder in which importing any planted module leaves a mark."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root, self._marks = folder, root, root / "marks"
        self._marks.mkdir()
        plant(folder, self._marks)

    @property
    def marks(self) -> list[str]:
        return sorted(mark.name for mark in self._marks.iterdir())

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
        env |= {"MLXKV_CACHE": str(self.root / "cache")} | environment
        return subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=300
        )

    def script(self, package: str) -> list[str]:
        """What pip installs as a console script, in a folder of its own as `bin` is."""
        path = self.root / "bin" / package
        path.parent.mkdir(exist_ok=True)
        path.write_text(SCRIPT.format(package=package))
        return [sys.executable, str(path)]


def plant(folder: Path, marks: Path, names: tuple[str, ...] = PLANTED) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        mark = marks / name.replace("/", "-")
        path.write_text(f"open({str(mark)!r}, 'w').close()\nraise SystemExit('caught')\n")


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(models.save(tmp_path / "checkpoint", models.config("gqa")), tmp_path)


RUN = ("--tokens", "3,7,11", "--steps", "2")


def test_the_trap_catches_who_walks_into_it(trap: Trap) -> None:
    assert trap.run(sys.executable, "-c", "import random").returncode == 1
    assert trap.run(sys.executable, "-m", "mlx_lm").returncode == 1
    assert trap.marks == ["mlx_lm-__init__.py", "random.py"]


@pytest.mark.parametrize("start", ["script", "module"])
@pytest.mark.parametrize("package", ["mlxkv", "oracle"])
def test_a_command_imports_nothing_from_the_working_folder(
    trap: Trap, start: str, package: str
) -> None:
    python = trap.script(package) if start == "script" else [sys.executable, "-m", package]
    command = {"mlxkv": ("inspect", "."), "oracle": ("show", "nothing")}[package]
    if (start, package) == ("module", "oracle"):
        # Where it stands, Python itself takes it for the module that -m names.
        (trap.folder / "oracle.py").unlink()

    done = trap.run(*python, *command)

    assert done.returncode == {"mlxkv": 0, "oracle": 2}[package], done.stderr
    assert "Traceback" not in done.stderr
    assert trap.marks == []


@pytest.mark.parametrize("module", CHILDREN)
def test_no_child_imports_anything_from_the_working_folder(trap: Trap, module: str) -> None:
    done = trap.run(*child.command(module, "nothing", "nothing", "nothing"))

    assert done.returncode != 0
    assert "caught" not in done.stderr
    assert trap.marks == []


def test_whole_comparisons_within_a_hostile_checkpoint_agree(trap: Trap) -> None:
    own = Path(own_llama.__file__).read_text()
    (trap.folder / "mine.py").write_text("import neighbour\n" + own)
    (trap.folder / "neighbour.py").write_text("")
    compare = [*trap.script("mlxkv"), "compare", ".", *RUN, "--out", str(trap.root / "out")]

    for engine in ("port", "mlx-lm", "mine.py:load"):
        done = trap.run(*compare, "--engine", engine, "--json")
        assert done.returncode == 0, done.stderr
        assert trap.marks == []
        verdict = json.loads(done.stdout)
        if engine == "mlx-lm":
            where = verdict["environment"]["mlx-lm"]["code of mlx-lm"]
            assert where.endswith("site-packages/mlx_lm")
            assert not Path(where).is_absolute()


def test_every_process_of_ours_is_started_by_the_one_command_line() -> None:
    written = {
        str(path.relative_to(PACKAGES)): path.read_text().count("sys.executable")
        for package in ("mlxkv", "oracle")
        for path in sorted((PACKAGES / package).rglob("*.py"))
    }

    # The default model's installer is uv where there is no pip, and is told which Python.
    assert {name: n for name, n in written.items() if n} == {
        "oracle/formats/child.py": 1,
        "oracle/model/default.py": 1,
    }
    assert child.command("json.tool", "x") == [sys.executable, "-P", "-m", "json.tool", "x"]


def test_an_engines_neighbours_shadow_nothing(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxkv.engines import own

    monkeypatch.setattr(sys, "path", list(sys.path))
    marks = tmp_path / "marks"
    marks.mkdir()
    plant(tmp_path, marks, ("colorsys.py", "mlx_lm/__init__.py"))
    (tmp_path / "only_here.py").write_text("FACTOR = 2\n")
    (tmp_path / "wave.py").write_text(
        "import colorsys, importlib.util, only_here\n"
        "from types import SimpleNamespace\n"
        "def load(path, dtype):\n"
        "    assert only_here.FACTOR == 2\n"
        "    return type('Model', (), {'__call__': print, 'make_cache': print})()\n"
    )

    own.load(own.find(f"{tmp_path / 'wave.py'}:load"), str(folder_of("gqa")), "float32")

    assert list(marks.iterdir()) == []
    assert sys.path[-1] == str(tmp_path)
    import wave

    assert wave.__file__ != str(tmp_path / "wave.py")


# Somebody else's module of the same name.


@pytest.mark.parametrize("name", ["oracle.py", "oracle/__init__.py"])
def test_another_oracle_than_ours_is_one_clear_line(trap: Trap, name: str) -> None:
    site = trap.root / "site"
    plant(site, trap.root / "marks", (name,))
    line = f"oracle: found {site / name}, expected the package installed beside mlxkv in {PACKAGES}"
    path = os.pathsep.join([str(site), str(PACKAGES)])

    for command in (trap.script("mlxkv"), child.command("mlxkv")):
        done = trap.run(*command, "compare", ".", *RUN, PYTHONPATH=path)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {line}; ")
        assert len(done.stderr.splitlines()) == 1
    program = trap.run(sys.executable, "-P", "-c", "import mlxkv; mlxkv.load('.')", PYTHONPATH=path)
    assert f"ImportError: {line}" in program.stderr.splitlines()[-1]
    assert trap.marks == []


def test_code_outside_its_environment_is_said_without_the_owners_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = Path(sys.prefix) / "lib" / "mlx_lm" / "__init__.py"
    for file, found in (
        (inside, "lib/mlx_lm"),
        (tmp_path / "ann" / "mlx_lm" / "__init__.py", "mlx_lm, outside this Python's environment"),
    ):
        monkeypatch.setitem(sys.modules, "mlx_lm", SimpleNamespace(__file__=str(file)))  # type: ignore[arg-type]
        assert machine.place("mlx_lm") == found


def test_another_oracle_is_run_by_pythons_own_rule_where_readme_says_so(trap: Trap) -> None:
    site = trap.root / "site"
    plant(site, trap.root / "marks", ("oracle.py",))
    path = os.pathsep.join([str(site), str(PACKAGES)])
    for command in (trap.script("oracle"), child.command("oracle")):
        assert trap.run(*command, "show", "nothing", PYTHONPATH=path).returncode == 1
        assert trap.marks == ["oracle.py"]
        (trap.root / "marks" / "oracle.py").unlink()
    # Without PYTHONPATH's help, only `python -m` looks into the working folder.
    assert trap.run(sys.executable, "-m", "oracle", PYTHONPATH=str(PACKAGES)).returncode == 1
    assert trap.marks == ["oracle.py"]
    readme = (PACKAGES / "README.md").read_text()
    assert "An `oracle.py` of somebody else's on `PYTHONPATH` is what `mlxkv-oracle`" in readme

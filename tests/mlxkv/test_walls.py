"""Who imports whom: proved on the sources and in fresh processes.

Each proof is shown an offender that it must find.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = ("oracle.formats", "oracle.model")
"""All that mlxkv may know of the oracle: formats, and where a model comes from."""
BELOW = ("mlxkv.port", "mlxkv.engines", "mlxkv.judge", "mlxkv.report", *SHARED)
"""What every command may use."""

# Room -> what its files may import of our two packages. A room's walls hold for those within it.
ROOMS: dict[str, tuple[str, ...]] = {
    "oracle": ("oracle",),
    "oracle/formats": ("oracle.formats",),
    "oracle/model": ("oracle.formats", "oracle.model"),
    "oracle/truth": ("oracle.formats", "oracle.model", "oracle.truth"),
    "oracle/pool": ("oracle.formats", "oracle.model", "oracle.truth", "oracle.pool"),
    "mlxkv": ("mlxkv", *SHARED),
    # The thing under test knows no judge, no engine, no trace; it writes files as all are written.
    "mlxkv/port": ("mlxkv.port", "oracle.formats.errors", "oracle.formats.disk", "oracle.model"),
    "mlxkv/engines": ("mlxkv.engines", "mlxkv.port", *SHARED),
    "mlxkv/judge": ("mlxkv.judge", "oracle.formats"),
    "mlxkv/report": ("mlxkv.report", "mlxkv.judge", "oracle.formats"),
    "mlxkv/commands": ("mlxkv.commands", *BELOW),
    "mlxkv/commands/compare": ("mlxkv.commands.compare", *BELOW),
    "mlxkv/commands/locate": ("mlxkv.commands.locate", "mlxkv.commands.compare", *BELOW),
    "mlxkv/commands/selftest": (
        "mlxkv.commands.selftest",
        "mlxkv.commands.locate",
        "mlxkv.commands.compare",
        *BELOW,
    ),
    "mlxkv/commands/cost": ("mlxkv.commands.cost", *BELOW),
    "mlxkv/commands/pitfalls": ("mlxkv.commands.pitfalls", *BELOW),
    "mlxkv/commands/scale": ("mlxkv.commands.scale", *BELOW),
    "mlxkv/commands/bench": ("mlxkv.commands.bench", *BELOW),
    "mlxkv/commands/diff.py": BELOW,
    "mlxkv/commands/judge.py": BELOW,
    "mlxkv/commands/show.py": BELOW,
    "mlxkv/commands/store.py": BELOW,
    "tests/oracle": ("oracle",),
    "tests/mlxkv": ("mlxkv", "oracle"),
}
FREE = ("mlxkv/commands/__init__.py", "mlxkv/commands/reports.py", "mlxkv/commands/text.txt")
"""Commands that may use any other, and a text that several read."""

# Room -> which libraries none of its files may import.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "oracle": ("mlx", "mlx_lm"),
    "oracle/formats": ("torch", "transformers"),
    "oracle/model": ("torch", "transformers"),
    "mlxkv": ("torch", "transformers"),
    # Judging and reporting work on any machine; judging with numpy alone.
    "mlxkv/judge": ("mlx", "mlx_lm", "click", "rich", "matplotlib", "safetensors", "msgspec"),
    "mlxkv/report": ("mlx", "mlx_lm"),
    "tests/oracle": ("mlx", "mlx_lm"),
    "tests/mlxkv": ("torch", "transformers"),
}


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in packages)


def imported(path: Path, package: str) -> Iterator[tuple[int, str]]:
    """The line and full dotted name of every import of a file, wherever it stands in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            base = ".".join([*parts, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            yield from (
                (node.lineno, a.value)
                for a in node.args
                if isinstance(a, ast.Constant) and isinstance(a.value, str)
            )


def breaches(root: Path, room: str) -> list[str]:
    """Every import over the room's walls."""
    place, allowed = root / room, ROOMS[room]
    return [
        f"{path.relative_to(root)}:{line}: {name}"
        for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))
        for line, name in imported(path, ".".join(path.relative_to(root).parent.parts))
        if (within(name, ("mlxkv", "oracle")) and not within(name, allowed))
        or within(name, LIBRARIES.get(room, ()))
    ]


def modules(root: Path, package: str) -> list[str]:
    """Every module of a package but the ones that run when imported."""
    paths = sorted((root / package).rglob("*.py"))
    names = (
        ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for p in paths
    )
    return [n for n in names if not n.endswith("__main__")]


def loaded_by(root: Path, *names: str) -> set[str]:
    """What a fresh process has loaded once it has imported these."""
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(*sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(root)}
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(finished.stdout.split())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources in a folder of their own, beside packages that load at once for heavy ones."""
    for package in ("mlxkv", "oracle"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("torch", "transformers", "mlx_lm"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "tests/oracle").mkdir(parents=True)
    (tmp_path / "tests/mlxkv").mkdir()
    return tmp_path


# On the sources.


@pytest.mark.parametrize("room", ROOMS)
def test_no_import_goes_over_a_wall(room: str) -> None:
    assert (ROOT / room).exists()
    assert breaches(ROOT, room) == []


def test_every_room_and_every_command_has_walls() -> None:
    rooms = [p for top in ("oracle", "mlxkv") for p in (ROOT / top).iterdir() if p.is_dir()]
    commands = list((ROOT / "mlxkv" / "commands").iterdir())
    names = {str(path.relative_to(ROOT)) for path in [*rooms, *commands]}
    assert {n for n in names if not n.endswith("__pycache__")} - {*ROOMS, *FREE} == set()


@pytest.mark.parametrize(
    ("room", "line", "name"),
    [
        ("mlxkv", "import torch", "torch"),
        ("mlxkv", "from torch import nn", "torch.nn"),
        ("mlxkv", "from transformers import LlamaConfig as C", "transformers.LlamaConfig"),
        ("mlxkv", "import oracle", "oracle"),
        ("mlxkv", "from oracle import truth as plan", "oracle.truth"),
        ("mlxkv", "import oracle.truth.llama", "oracle.truth.llama"),
        ("mlxkv", "from oracle.question import Question", "oracle.question.Question"),
        ("mlxkv", "import importlib; importlib.import_module('torch.nn')", "torch.nn"),
        ("mlxkv/port", "from mlxkv.judge import delta", "mlxkv.judge.delta"),
        ("mlxkv/port", "from ..judge import delta", "mlxkv.judge.delta"),
        ("mlxkv/port", "from mlxkv.engines import runner", "mlxkv.engines.runner"),
        ("mlxkv/port", "from oracle.formats.plan import Plan", "oracle.formats.plan.Plan"),
        ("mlxkv/port", "from oracle.formats import trace", "oracle.formats.trace"),
        ("mlxkv/port", "from oracle.truth import rope", "oracle.truth.rope"),
        ("mlxkv/engines", "from mlxkv.judge import verdict", "mlxkv.judge.verdict"),
        ("mlxkv/engines", "from mlxkv.report import page", "mlxkv.report.page"),
        ("mlxkv/engines", "from mlxkv.commands.compare import run", "mlxkv.commands.compare.run"),
        ("mlxkv/judge", "import mlx.core as mx", "mlx.core"),
        ("mlxkv/judge", "from .. import port", "mlxkv.port"),
        ("mlxkv/judge", "from oracle.model import checkpoint", "oracle.model.checkpoint"),
        ("mlxkv/judge", "import rich.table", "rich.table"),
        ("mlxkv/report", "from mlxkv.engines import port", "mlxkv.engines.port"),
        ("mlxkv/report", "from mlxkv.commands import judge", "mlxkv.commands.judge"),
        ("mlxkv/commands", "from mlxkv import cli", "mlxkv.cli"),
        ("mlxkv/commands/compare", "from mlxkv.commands import locate", "mlxkv.commands.locate"),
        ("mlxkv/commands/locate", "from ..selftest import run", "mlxkv.commands.selftest.run"),
        ("mlxkv/commands/selftest", "from .. import pitfalls", "mlxkv.commands.pitfalls"),
        ("mlxkv/commands/pitfalls", "from mlxkv.commands import bench", "mlxkv.commands.bench"),
        ("mlxkv/commands/scale", "from mlxkv.commands import selftest", "mlxkv.commands.selftest"),
        ("mlxkv/commands/bench", "from mlxkv.commands import compare", "mlxkv.commands.compare"),
        ("mlxkv/commands/diff.py", "from . import compare", "mlxkv.commands.compare"),
        ("mlxkv/commands/judge.py", "from . import compare", "mlxkv.commands.compare"),
        ("oracle", "from mlx import nn", "mlx.nn"),
        ("oracle", "from mlxkv.port import rope", "mlxkv.port.rope"),
        ("oracle", "__import__('mlx_lm')", "mlx_lm"),
        ("oracle/formats", "from oracle.model import checkpoint", "oracle.model.checkpoint"),
        ("oracle/formats", "from oracle import question", "oracle.question"),
        ("oracle/formats", "import torch", "torch"),
        ("oracle/model", "from oracle.truth import config", "oracle.truth.config"),
        ("oracle/model", "import transformers", "transformers"),
        ("oracle/truth", "from oracle.pool import errors", "oracle.pool.errors"),
        ("oracle/truth", "from oracle import folder", "oracle.folder"),
        ("oracle/pool", "from .. import answer", "oracle.answer"),
        ("tests/oracle", "import mlxkv", "mlxkv"),
        ("tests/mlxkv", "import torch.nn as nn", "torch.nn"),
    ],
)
def test_an_import_over_a_wall_is_found_wherever_it_hides(
    room: str, line: str, name: str, copy: Path
) -> None:
    spy = copy / room if room.endswith(".py") else copy / room / "spy.py"
    spy.write_text(f"def f():\n    if True:\n        {line}\n")

    assert f"{spy.relative_to(copy)}:3: {name}" in breaches(copy, room)


def test_an_import_that_only_sounds_forbidden_is_none(copy: Path) -> None:
    (copy / "mlxkv/spy.py").write_text(
        "import torchlight, oracles\nfrom oracle.formats import plan, trace\n"
    )
    (copy / "oracle/spy.py").write_text("import mlxkvs\nfrom . import formats\n")

    assert [b for room in ("mlxkv", "oracle") for b in breaches(copy, room)] == []


# In fresh processes.

HEAVY = {
    "mlx",
    "mlx.core",
    "torch",
    "transformers",
    "numpy",
    "oracle",
    "click",
    "rich",
    "matplotlib",
    "safetensors",
    "mlxkv.port",
}


def test_importing_mlxkv_loads_nothing_of_weight() -> None:
    assert loaded_by(ROOT, "mlxkv") & HEAVY == set()


def test_an_import_of_weight_is_found(copy: Path) -> None:
    with (copy / "mlxkv/__init__.py").open("a") as file:
        file.write("\nfrom mlxkv.port.cache import Cache\n")

    assert {"mlx.core", "numpy", "mlxkv.port"} <= loaded_by(copy, "mlxkv") & HEAVY


def test_importing_mlxkv_changes_nothing_in_the_process() -> None:
    code = (
        "import os; before = dict(os.environ); import mlxkv; "
        "assert dict(os.environ) == before, 'environment'"
    )
    maps = (
        "; print(sum('blas' in line or 'blis' in line for line in open('/proc/self/maps')))"
        if sys.platform == "linux"
        else "; print(0)"
    )

    finished = subprocess.run(
        [sys.executable, "-c", code + maps], capture_output=True, text=True, check=True
    )

    assert finished.stdout == "0\n"


def test_no_module_of_mlxkv_loads_torch() -> None:
    loaded = loaded_by(ROOT, *modules(ROOT, "mlxkv"))

    assert {"mlxkv.port.llama", "mlxkv.engines.port", "mlx.core"} <= loaded
    assert loaded & {"torch", "transformers", "mlx_lm"} == set()


def test_a_module_of_mlxkv_that_loads_torch_is_found(copy: Path) -> None:
    (copy / "mlxkv/judge/spy.py").write_text("import mlxkv.judge.other\n")
    (copy / "mlxkv/judge/other.py").write_text("import torch\n")

    assert "torch" in loaded_by(copy, *modules(copy, "mlxkv"))


@pytest.mark.parametrize("package", ["mlxkv.judge", "mlxkv.report"])
def test_judging_and_reporting_load_no_mlx(package: str) -> None:
    names = [n for n in modules(ROOT, "mlxkv") if within(n, (package,))]

    loaded = loaded_by(ROOT, *names)

    assert set(names) <= loaded
    assert loaded & {"mlx", "mlx.core", "torch"} == set()


def test_what_both_halves_share_loads_neither_torch_nor_mlx() -> None:
    names = [n for n in modules(ROOT, "oracle") if within(n, SHARED)]

    loaded = loaded_by(ROOT, *names)

    assert set(names) <= loaded
    assert loaded & {"torch", "transformers", "mlx", "mlx.core", "mlxkv"} == set()


def test_a_shared_module_that_loads_torch_by_way_of_another_is_found(copy: Path) -> None:
    with (copy / "oracle/model/safetensors.py").open("a") as file:
        file.write("\nimport oracle.spy\n")
    (copy / "oracle/spy.py").write_text("import torch\n")

    assert "torch" in loaded_by(copy, "oracle.model.checkpoint")


def test_no_module_of_the_oracle_loads_mlx() -> None:
    loaded = loaded_by(ROOT, *modules(ROOT, "oracle"))

    assert {"oracle.truth.llama", "oracle.pool.reference"} <= loaded
    assert loaded & {"mlx", "mlx.core", "mlx_lm", "mlxkv"} == set()


def test_a_module_of_the_oracle_that_loads_mlx_is_found(copy: Path) -> None:
    with (copy / "oracle/model/default.py").open("a") as file:
        file.write("\nimport mlx.core\n")

    assert "mlx.core" in loaded_by(copy, "oracle.model.default")


# The tests' own wall: tests/conftest.py.

spec = importlib.util.spec_from_file_location("both_halves", ROOT / "tests/conftest.py")
assert spec is not None
assert spec.loader is not None
both_halves = importlib.util.module_from_spec(spec)
spec.loader.exec_module(both_halves)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((0, 0), 0),
        ((0, 1), 1),
        ((1, 0), 1),
        ((2, 1), 2),
        ((0, 5), 0),
        ((5, 1), 1),
        ((5, 5), 5),
        ((0, -9), 137),
        ((-11, 1), 139),
    ],
)
def test_the_worse_of_the_two_codes_counts(codes: tuple[int, int], expected: int) -> None:
    assert both_halves.combined(codes) == expected


@pytest.mark.parametrize(
    ("arguments", "paths", "options"),
    [
        ("-x --tb short", "", "-x --tb short"),
        ("tests -x", "tests", "-x"),
        ("-k tests tests", "tests", "-k tests"),
        ("tests -k tests", "tests", "-k tests"),
        ("-k tests", "", "-k tests"),
        ("tests/a -q tests/b::c", "tests/a tests/b::c", "-q"),
    ],
)
def test_the_options_of_both_halves_are_the_arguments_that_are_no_paths(
    arguments: str, paths: str, options: str
) -> None:
    assert both_halves._options(arguments.split(), paths.split()) == options.split()


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    """A repository of two one-test halves under our conftest."""
    for half in ("oracle", "mlxkv"):
        (tmp_path / "tests" / half).mkdir(parents=True)
        write_half(tmp_path, half, "pass")
    shutil.copy(ROOT / "tests/conftest.py", tmp_path / "tests")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ntestpaths = tests\naddopts = -q -p no:cacheprovider\n"
    )
    return tmp_path


def write_half(root: Path, half: str, body: str) -> None:
    text = (
        "import os, sys, types\n\n"
        f"def test_{half}(room):\n"
        f"    print('RAN {half}', os.getpid(), room, room.is_dir())\n"
        f"    {body}\n"
    )
    (root / "tests" / half / f"test_{half}.py").write_text(text)


def pytest_in(
    root: Path, *arguments: str, room: Path | None = None
) -> tuple[int, list[list[str]], str]:
    """The exit code, the fields of each test's line, and the whole output."""
    environment = {k: v for k, v in os.environ.items() if k != "MLXKV_TEST_ROOM"} | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"
    }
    environment |= {"MLXKV_TEST_ROOM": str(room)} if room else {}
    command = [sys.executable, "-m", "pytest", "-s", *arguments]
    finished = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    lines = [line.split() for line in finished.stdout.splitlines() if line.startswith("RAN")]
    return finished.returncode, [line[1:] for line in lines], finished.stdout


def test_both_halves_run_in_two_processes_that_share_a_room_gone_afterwards(tests: Path) -> None:
    code, (mlxkv, oracle), _ = pytest_in(tests)

    assert (code, oracle[0], mlxkv[0]) == (0, "oracle", "mlxkv")
    assert oracle[1] != mlxkv[1]
    assert oracle[2:] == mlxkv[2:] == [oracle[2], "True"]
    assert not Path(oracle[2]).exists()


def test_single_tests_and_options_reach_their_half_and_a_named_room_is_used(tests: Path) -> None:
    room = tests / "room"

    code, ran, _ = pytest_in(
        tests, "-k", "tests", "tests/mlxkv", "tests/oracle/test_oracle.py::test_oracle", room=room
    )

    assert (code, [(half, where) for half, _, where, _ in ran]) == (
        0,
        [("mlxkv", str(room)), ("oracle", str(room))],
    )


def test_one_half_alone_runs_alone(tests: Path) -> None:
    code, ran, _ = pytest_in(tests, "tests/mlxkv")

    assert (code, [half for half, *_ in ran]) == (0, ["mlxkv"])


def test_a_half_that_is_killed_is_a_failure_and_the_other_still_runs(tests: Path) -> None:
    write_half(tests, "oracle", "sys.stdout.flush(); os.kill(os.getpid(), 9)")

    code, ran, _ = pytest_in(tests)

    assert (code, [half for half, *_ in ran]) == (137, ["mlxkv", "oracle"])


def test_torch_beside_mlx_fails_the_test_after_which_they_met_and_runs_no_other(
    tests: Path,
) -> None:
    meet = "sys.modules['torch'] = sys.modules['mlx.core'] = types.ModuleType('x')"
    write_half(tests, "mlxkv", f"{meet}\n\ndef test_next():\n    print('RAN next')")

    code, ran, output = pytest_in(tests, "tests/mlxkv")

    assert (code, [name for name, *_ in ran]) == (1, ["mlxkv"])
    failed = r"^E +Failed: torch and mlx\.core are loaded in one process: "
    assert len(re.findall(failed, output, re.MULTILINE)) == 2

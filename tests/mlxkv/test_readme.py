"""README's commands are the ones that CI runs, and its Python runs as written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_ci_calls_the_very_commands_that_readme_names() -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    (tests,) = (line for line in lines if line.endswith("&& pytest"))
    (checks,) = (line for line in lines if line.endswith("&& .ci/check"))
    assert tests.removesuffix("pytest") == checks.removesuffix(".ci/check")
    run, check = ((ROOT / ".ci" / name).read_text().splitlines() for name in ("run", "check"))
    assert run[-2:] == [f"{{ {tests}; }} || exit 1", ".ci/lint"]
    assert check[-2:] == ["pytest", ".ci/lint"]


def test_the_python_example_runs_as_written(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxkv import CacheError

    monkeypatch.chdir(tmp_path)

    (code,) = [block for block in blocks("python") if "mlxkv.load" in block]
    code = code.replace("path/to/folder", str(folder_of("gqa")))
    code = re.sub(
        r"\[\[(\d+(?:, \d+)*)\]\]", lambda m: str([[int(n) % 40 for n in m[1].split(", ")]]), code
    )
    with pytest.raises(
        CacheError, match=r"index_pos is 0, expected 5 \(the cache holds 5 tokens\)"
    ):
        exec(code, {})
    assert [p.name for p in tmp_path.iterdir()] == ["france.safetensors"]


def test_every_command_stands_in_readme() -> None:
    from mlxkv.cli import cli

    for name in cli.commands:
        assert f"`mlxkv {name}" in README

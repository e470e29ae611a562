"""`assert_cache_behaves`: right caches pass, and each planted fault is found in its lives."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import planted
import pytest

from mlxkv.commands.pitfalls import known, suite
from mlxkv.testing import assert_cache_behaves
from oracle.formats.errors import Refusal


@pytest.mark.parametrize("name", planted.RIGHT)
def test_a_right_cache_passes(name: str) -> None:
    make, lossy = planted.RIGHT[name]
    assert_cache_behaves(make, lossy=lossy)


@pytest.mark.parametrize("name", planted.PLANTED)
def test_a_planted_fault_is_found(name: str) -> None:
    make, lossy, lives = planted.PLANTED[name]
    with pytest.raises(AssertionError) as failed:
        assert_cache_behaves(make, lossy=lossy)
    first, *table = str(failed.value).splitlines()
    found = set(first.partition(": ")[2].split(", "))
    assert lives <= found
    if name != "reset keeps a row":  # which outlives each plan
        assert "singles" not in found
    assert any(line.startswith("life ") for line in table)


def test_a_lossy_cache_that_is_not_declared_is_wrong() -> None:
    make, _ = planted.RIGHT["4 bits"]
    with pytest.raises(AssertionError, match="singles"):
        assert_cache_behaves(make, scenarios=["singles"])


def test_scenarios_choose_lives_and_an_unknown_one_is_refused() -> None:
    make, _, _ = planted.PLANTED["offset not trimmed"]
    assert_cache_behaves(make, scenarios=["singles", "chunks"])
    with pytest.raises(Refusal, match="scenarios: 'singels', expected some of singles, "):
        assert_cache_behaves(make, scenarios=["singels"])
    with pytest.raises(Refusal, match="lossy: 'bits', expected '' or 'quantised' or 'depends"):
        assert_cache_behaves(make, lossy="bits")


def test_what_is_no_cache_is_refused_in_one_line() -> None:
    with pytest.raises(Refusal, match="gave 0 caches, expected a list of 2"):
        assert_cache_behaves(lambda config: [])


def test_a_model_of_ones_own_is_taken_and_left_as_it_was() -> None:
    import mlx.core as mx

    model = suite.small()
    before = mx.array(model.model.embed_tokens.weight)
    make, lossy = planted.RIGHT["8 bits"]
    assert_cache_behaves(make, lossy=lossy, model=model, scenarios=["singles", "trim"])
    assert mx.array_equal(before, model.model.embed_tokens.weight)


def test_it_needs_no_torch() -> None:
    """In a process where torch cannot be found, as in somebody's CI with mlx-lm alone."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from mlx_lm.models.cache import KVCache\n"
        "from mlxkv.testing import assert_cache_behaves\n"
        "assert_cache_behaves(lambda c: [KVCache() for _ in range(c.num_hidden_layers)])\n"
        "assert 'oracle.truth' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


MLX = [f for f in known.FINDINGS if "mlx_lm" in f.code]


@pytest.mark.parametrize("finding", MLX, ids=lambda f: f.title)
def test_the_lines_that_show_a_finding_still_show_it(
    finding: known.Finding, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they print, or how they end, stands beside them as a comment."""
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    try:
        exec(finding.code, {"print": lambda *values: said.append(" ".join(map(str, values)))})
    except AttributeError as error:
        said.append(f"AttributeError: {error}")
    comments = [line.partition("# ")[2] for line in finding.code.splitlines() if "# " in line]
    for comment, line in zip(comments, said, strict=True):
        start, _, rest = comment.partition(", expected")[0].partition(" ... ")
        assert line.startswith(start)
        assert line.endswith(rest)

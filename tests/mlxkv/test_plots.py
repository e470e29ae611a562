"""The plot is the same file for the same numbers, is whole XML, and shows its words as text."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from synthetic import make_candidates, make_case, texts

from mlxkv.judge.limits import WORST
from mlxkv.judge.result import Curve
from mlxkv.judge.verdict import judge
from mlxkv.report.plots import error_by_position, worst_first

CASE = make_case()
VERDICT = judge(CASE, make_candidates(CASE))
_SVG = "{http://www.w3.org/2000/svg}"


def words(svg: str) -> list[str]:
    return ["".join(e.itertext()).strip() for e in ElementTree.fromstring(svg).iter(f"{_SVG}text")]


def test_the_same_numbers_give_the_same_file_without_a_date() -> None:
    first, second = (
        error_by_position(VERDICT.curves, VERDICT.floor, limit=WORST, texts=CASE.manifest.texts)
        for _ in range(2)
    )
    assert first == second
    assert "<dc:date>" not in first
    assert "matplotlib v" not in first.lower()


def test_plans_floor_limit_tokens_title_and_units_are_readable_text() -> None:
    found = words(
        error_by_position(
            VERDICT.curves,
            VERDICT.floor,
            limit=WORST,
            texts=CASE.manifest.texts,
            title="SmolLM2, float32",
        )
    )
    expected = [
        "full",
        "step",
        "prefixes",
        "chunked",
        "noise floor",
        "limit, 16 floors",
        "SmolLM2, float32",
    ]
    expected += ["rms error against float64 (logits)", "token and position", '" is" 4', '" t23" 23']
    assert [e for e in expected if e not in found] == []


def test_a_long_sequence_has_positions_instead_of_tokens() -> None:
    floor = tuple([1e-5] * 41)
    found = words(
        error_by_position(
            [Curve("step", tuple(range(41)), floor)], floor, limit=16, texts=texts(41)
        )
    )
    assert "position" in found
    assert '" is" 4' not in found


def test_tokens_that_look_like_markup_or_mathematics_stand_as_they_are() -> None:
    floor, tokens = (1e-5,) * 5, ["$x_1$", "<&>", "\n", "日本", "\x1b\x00"]
    found = words(
        error_by_position([Curve("step", tuple(range(5)), floor)], floor, limit=16, texts=tokens)
    )
    assert [
        t
        for t in ('"$x_1$" 0', '"<&>" 1', '"\\n" 2', '"日本" 3', '"\\u001b\\u0000" 4')
        if t not in found
    ] == []


@pytest.mark.parametrize("rms", [(0.0, 0.0, 0.0), (float("nan"), 1e-5, float("inf"))])
def test_rows_without_a_point_on_a_logarithmic_axis_are_left_out(rms: tuple[float, ...]) -> None:
    svg = error_by_position([Curve("step", (0, 1, 2), rms)], (1e-5, 1e-5, 1e-5), limit=16)
    assert "step" in words(svg)


def test_matplotlib_is_loaded_only_for_a_plot_and_its_settings_are_left_alone() -> None:
    script = (
        "import sys, mlxkv.report.page, mlxkv.report.plots as plots\n"
        "from mlxkv.judge.result import Curve\n"
        "print('matplotlib' in sys.modules)\n"
        "plots.error_by_position([Curve('step', (0,), (1e-5,))], (1e-5,), limit=16)\n"
        "import matplotlib\n"
        "print([name in sys.modules for name in ('matplotlib.pyplot', 'mlx.core', 'torch')], "
        "matplotlib.rcParams['svg.hashsalt'])\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n")[:2] == ["False", "[False, False, False] None"]


def test_prompts_stand_in_the_order_given_and_what_has_no_number_is_said() -> None:
    svg = worst_first({"b": 9.0, "a": 0.5, "c": float("nan")}, limit=8.0, title="3 prompts")
    found = words(svg)
    assert [word for word in found if word in "abc"] == ["b", "a", "c"]
    for word in ("3 prompts", "limit, 8 floors", "within", "beyond", "no number"):
        assert word in found
    assert svg == worst_first({"b": 9.0, "a": 0.5, "c": float("nan")}, limit=8.0, title="3 prompts")
    many = words(worst_first({f"p{i}": 0.0 for i in range(41)}, limit=8.0))
    assert "p0" not in many
    assert "prompts, the worst first" in many

"""`mlxkv pitfalls` on a tiny model: every system really runs, and behaves as documented."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
from command import mlxkv

from mlxkv.commands.pitfalls import ask
from mlxkv.commands.pitfalls import run as pitfalls
from mlxkv.commands.pitfalls.scenarios import OTHER_CACHES, SYSTEMS
from oracle.formats.errors import Refusal

FIRST, SECOND = (3, 7, 11, 2, 19), (3, 7, 11, 5, 19)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report's folder; every process is told to ignore a config key that no engine knows."""
    room = tmp_path_factory.mktemp("pitfalls")
    model, out = models.save(room / "model", models.config("gqa") | {"surprise": 1}), room / "out"
    given = [
        "--tokens",
        ",".join(map(str, FIRST)),
        "--other-tokens",
        ",".join(map(str, SECOND)),
        "--steps",
        "6",
        "--device",
        "cpu",
    ]
    done = mlxkv("pitfalls", model, *given, "--ignore-key", "surprise", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stdout.splitlines()[-1]
        == f"all behaved as documented    report: {out / 'pitfalls.md'}"
    )
    return out


def test_every_system_behaves_as_documented_on_every_scenario(made: Path) -> None:
    value = json.loads((made / "pitfalls.json").read_text())
    assert value["surprises"] == []
    assert [s["name"] for s in value["scenarios"]][:6] == [
        "greedy",
        "pos0",
        "cached",
        "chunked",
        "mask",
        "reuse",
    ]
    for scenario in value["scenarios"]:
        assert set(SYSTEMS) <= set(scenario["systems"]) <= {*SYSTEMS, *OTHER_CACHES}
        for seen in scenario["systems"].values():
            assert seen["behaviour"] == seen["expected"]
            assert (seen["reason"] is None) == bool(seen["parts"])


def test_the_evidence_is_what_the_page_shows(made: Path) -> None:
    seen = {
        s["name"]: s["systems"]
        for s in json.loads((made / "pitfalls.json").read_text())["scenarios"]
    }
    assert [seen["greedy"][system]["held"][0]["shape"] for system in SYSTEMS] == [[1, 2, 10, 8]] * 4
    assert seen["reuse"]["T"]["held"][0]["shape"] == [1, 2, 20, 8]
    assert seen["reuse"]["C"]["parts"][0]["error"].startswith(
        "cannot broadcast [5, 5] to [1, 4, 5, 15]"
    )
    assert "index_pos is 0, expected 10" in seen["reuse"]["G"]["parts"][0]["error"]
    assert [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]] in seen["mask"]["C"]["masks"]
    assert [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]] in seen["mask"]["G"]["masks"]
    assert "position 64" in seen["far"]["G"]["parts"][0]["error"]
    assert seen["far"]["G"]["parts"][1]["behaviour"] == "right"
    assert "float16" in seen["dtype"]["G"]["parts"][0]["error"]
    for name, system in (
        ("pos0", "C"),
        ("reuse", "T"),
        ("reuse", "L"),
        ("reuse1", "C"),
        ("nocache1", "L"),
    ):
        assert max(p["worst"] for p in seen[name][system]["parts"]) > 1e3
    assert seen["branch"]["G"]["parts"][0]["tokens"] == seen["greedy"]["T"]["parts"][0]["tokens"]


def test_the_report_shows_the_matrix_and_marks_the_page_as_not_comparable(made: Path) -> None:
    page = (made / "pitfalls.md").read_text()
    assert "| [pos0](#pos0)" in page
    assert "on the page (other weights: not comparable)" in page
    assert "mlx-lm's other caches" in page
    assert page.count("\n## ") == 18 + 7


def test_a_clone_costs_nothing_at_birth_and_one_copy_at_its_first_write(made: Path) -> None:
    branches = json.loads((made / "pitfalls.json").read_text())["branches"]
    assert branches["context_tokens"] == 32
    assert (branches["birth"], branches["first_write"]) == (0, branches["buffers"])
    assert "| a clone, at its birth" in (made / "pitfalls.md").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tokens": FIRST}, "--tokens and --other-tokens: one is given, expected both or none"),
        (
            {"tokens": FIRST, "other_tokens": SECOND, "prompt": "a"},
            "--prompt and --tokens: expected text or ids",
        ),
    ],
)
def test_prompts_of_two_kinds_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Refusal, match=said):
        pitfalls.Request(**options)


@pytest.mark.parametrize(
    ("ids", "steps", "said"),
    [
        (((3, 7, 11, 2, 40), SECOND), 6, "40"),
        ((FIRST, FIRST), 6, "share their first 5 of 5"),
        ((FIRST, SECOND), 40, "take 90 positions, expected at most 64"),
        (None, 6, "no tokenizer.json, expected one for prompts of text"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(
    folder_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    ids: Any,
    steps: int,
    said: str,
) -> None:
    monkeypatch.setattr(ask, "rights", lambda *_: pytest.fail("the oracle was asked"))
    tokens, other = ids or (None, None)
    request = pitfalls.Request(
        model=str(folder_of("gqa")), tokens=tokens, other_tokens=other, steps=steps
    )
    with pytest.raises(Refusal, match=said):
        pitfalls.run(request)

"""`mlxkv reports --check`: what may move and what may not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mlxkv.commands import diff as recheck

OLD: dict[str, Any] = {
    "outcome": "agree",
    "generated": [7042, 30, 198],
    "errors": [],
    "gates": [
        {
            "name": "sigma",
            "plan": "step",
            "value": 1.5,
            "failed": False,
            "position": 4,
            "headroom": 5.3,
        }
    ],
    "environment": {"cpu": "one"},
}
MARKDOWN = (
    "# Report\n\n## Gates\n\n| gate | value | where |\n| sigma | 1.50 | pos 4 |\n\n"
    "## Tokens\n\n| `7042 30` |\n\n## Environment\n\n| cpu | one |\n\n## Inputs\n\n| a |\n"
)


def changed(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(OLD) | changes


def gate(**changes: Any) -> list[dict[str, Any]]:
    return [OLD["gates"][0] | changes]


@pytest.mark.parametrize(
    "new",
    [
        changed(),
        changed(gates=gate(value=2.9)),
        changed(gates=gate(value=0.8)),
        changed(gates=gate(position=7, headroom=1.0)),
        changed(environment={"cpu": "another", "os": "x"}),
    ],
)
def test_what_may_move(new: dict[str, Any]) -> None:
    assert recheck.values(OLD, new, where="r") == []


@pytest.mark.parametrize(
    ("new", "line"),
    [
        (changed(outcome="differ"), "r.outcome: agree committed, differ now"),
        (changed(generated=[7042, 30, 199]), "r.generated[2]: 198 committed, 199 now"),
        (changed(generated=[7042, 30]), "r.generated: [7042, 30, 198] committed, [7042, 30] now"),
        (changed(errors=[{"step": 1}]), 'r.errors: [] committed, [{"step": 1}] now'),
        (
            changed(gates=gate(value=3.1)),
            "r.gates[0].value: 1.5 committed, 3.1 now, more than a factor of 2 apart",
        ),
        (
            changed(gates=gate(value=0.7)),
            "r.gates[0].value: 1.5 committed, 0.7 now, more than a factor of 2 apart",
        ),
        (
            changed(gates=gate(value=-1.5)),
            "r.gates[0].value: 1.5 committed, -1.5 now, more than a factor of 2 apart",
        ),
        (
            changed(gates=gate(value=0.0)),
            "r.gates[0].value: 1.5 committed, 0 now, more than a factor of 2 apart",
        ),
        (changed(gates=gate(value=None)), "r.gates[0].value: 1.5 committed, null now"),
        (changed(gates=gate(failed=True)), "r.gates[0].failed: false committed, true now"),
        (changed(gates=gate(failed=0)), "r.gates[0].failed: false committed, 0 now"),
        (changed(more=1), "r.more: only in the new file"),
    ],
)
def test_what_may_not_move(new: dict[str, Any], line: str) -> None:
    assert recheck.values(OLD, new, where="r") == [line]


def test_a_key_that_has_gone_is_a_difference() -> None:
    new = changed()
    del new["errors"]
    assert recheck.values(OLD, new, where="r") == ["r.errors: only in the committed file"]


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("1.50 | pos 4", "1.70 | pos 9", True),
        ("| cpu | one |", "| cpu | two |", True),
        ("| sigma |", "| sigmas |", False),
        ("`7042 30`", "`7042 31`", False),
        ("| a |", "| b |", False),
        ("# Report", "# Another", False),
    ],
)
def test_markdown_may_move_in_numbers_places_and_environment_only(
    old: str, new: str, same: bool
) -> None:
    found = recheck.lines(MARKDOWN, MARKDOWN.replace(old, new), where="r.md")
    assert (found == []) is same


def test_rows_of_prompts_may_change_places_and_their_verdicts_may_not() -> None:
    old = "# All\n\n## Prompts\n\n| prompt | sigma | verdict |\n| a | 1.20 | agree |\n| b | 1.10 | agree |\n"
    new = "# All\n\n## Prompts\n\n| prompt | sigma | verdict |\n| b | 1.30 | agree |\n| a | 1.20 | agree |\n"
    assert recheck.lines(old, new, where="r.md") == []
    assert len(recheck.lines(old, new.replace("1.20 | agree", "1.20 | differ"), where="r.md")) == 1


def test_files_missing_or_unreadable_are_differences(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    names = [Path("a.json"), Path("b.json"), Path("c.svg"), Path("d.md")]
    for folder in (old, new):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(json.dumps(OLD))
    assert recheck.folders(old, new, names) == []
    (old / "a.json").write_text("{")
    (old / "b.json").unlink()
    (old / "c.svg").unlink()
    (old / "d.md").unlink()
    found = recheck.folders(old, new, names)
    assert [line.split(":")[0] for line in found] == ["a.json", "b.json", "c.svg", "d.md"]

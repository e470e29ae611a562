"""What of a comparison the oracle is asked at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest

from mlxkv.commands.compare import ask
from mlxkv.commands.selftest.run import question
from mlxkv.engines import oracle, process
from oracle.formats import questions
from oracle.formats.errors import AlreadySaid, Refusal
from oracle.model.checkpoint import resolve

FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}


class Asked(Exception):
    """The oracle was asked; nothing is computed."""


@pytest.mark.parametrize(
    ("original", "has"), [(52, True), (53, False), (63, False), (64, True), (None, True)]
)
def test_no_probe_is_asked_for_whose_cache_would_lie_on_both_sides_of_longropes_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, original: int | None, has: bool
) -> None:
    """Its first call has 53 of 64 tokens. The oracle would refuse it, at each comparison anew."""
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": original, **FACTORS}
    changes = {} if original is None else {"rope_scaling": scaling}
    folder = models.save(tmp_path / "model", models.config("gqa", **changes))
    found: list[Any] = []

    def ask_all(_: Any, probe: oracle.Question | None, **__: Any) -> None:
        found.append(probe)
        raise Asked

    monkeypatch.setattr(oracle, "ask_all", ask_all)
    monkeypatch.setattr(oracle, "require_torch", lambda **_: None)
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "cache"))
    with pytest.raises(Asked):
        ask.ask([ask.Request(model=str(folder), tokens=(1, 2, 3), steps=2)])
    assert [probe is not None for probe in found] == [has]


def test_a_prompt_that_the_oracle_refuses_is_told_apart_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers that the same process made are there."""

    def start(words: list[str], *, stdout: Path) -> None:
        asked = questions.read(Path(words[2])).questions
        stdout.write_text(questions.refusal(Path(asked[1].out), Refusal("odd", where="pool")))
        raise AlreadySaid

    def kept(place: Any, _: Any = None) -> oracle.Answer:
        return oracle.Answer(place.folder, None, None)  # type: ignore[arg-type]

    folder = models.save(tmp_path / "model", models.config("gqa"))
    monkeypatch.setattr(oracle.process, "start", start)
    monkeypatch.setattr(oracle._Place, "answer", kept)
    monkeypatch.setattr(ask, "_kept", lambda _, found: found)
    monkeypatch.setattr(oracle, "require_torch", lambda **_: None)
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "cache"))
    prompts = {"a": (1, 2), "b": (3, 4, 5), "c": (6,)}
    found = ask.ask(
        [
            ask.Request(model=str(folder), name=name, tokens=ids, steps=1, quick=True)
            for name, ids in prompts.items()
        ]
    )
    assert len(found.each) == 2
    why = "the oracle refused it: pool: odd"
    assert found.refused == (ask.Untold("b", why, (3, 4, 5), 3),)


def test_questions_about_several_models_are_answered_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "cache"))
    started: list[list[str]] = []
    start = process.start

    def count(arguments: list[str], **more: Any) -> process.Finished:
        started.append(arguments)
        return start(arguments, **more)

    monkeypatch.setattr(oracle.process, "start", count)
    pairs = []
    for layout in ("gqa", "mha"):
        made = resolve(str(models.save(tmp_path / layout, models.config(layout))))
        asked = question(made, (1, 2, 3, 4), None, dtype="float32")
        pairs.append((asked, oracle.probe_beside(asked)))
    found = oracle.ask_pairs(pairs)
    assert [words[:2] for words in started] == [["oracle", "many"]]
    for (asked, _), (answer, probe) in zip(pairs, found, strict=True):
        assert answer.manifest.inputs == asked.digest
        assert answer.manifest.fingerprint == asked.checkpoint.fingerprint
        assert probe is not None
        assert probe.manifest.probe
    assert oracle.ask_pairs(pairs[:1])[0][0].made is None
    assert len(started) == 1

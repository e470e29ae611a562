"""`mlxkv-oracle many`: a file of questions, what they would take, and a folder for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
from command import oracle, refused

from oracle import answer, many
from oracle.formats import questions
from oracle.formats.errors import Refusal
from oracle.formats.questions import Asked, One
from oracle.formats.run_folder import read_manifest, read_plans
from oracle.question import Question


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make(tmp_path_factory.mktemp("model") / "gqa")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which nothing was measured yet."""
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "cache"))


def written(folder: Path, model: Path, *asked: One) -> Path:
    path = folder / "questions.json"
    questions.write(path, Asked(str(model), "float32", 2, asked))
    return path


def test_an_estimate_has_the_plans_and_leaves_no_folder(model: Path, tmp_path: Path) -> None:
    one = One(str(tmp_path / "a"), tokens=(3, 7, 11), steps=2)
    path = written(tmp_path, model, one, One(str(tmp_path / "p"), probe=True))
    done = oracle("many", path, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "estimate.json").write_text(done.stdout)
    found = questions.read_estimate(tmp_path / "estimate.json")
    assert found.seconds > 0 < found.disk_bytes
    assert (found.converted_bytes, found.measured) == (0, False)
    assert not (tmp_path / "a").exists()
    done = oracle("many", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "a"), str(tmp_path / "p")]
    for name, plans in zip("ap", found.plans, strict=True):
        made = read_plans(tmp_path / name, read_manifest(tmp_path / name))
        fed = {plan.name: [call.fed for call in plan.calls()] for plan in plans}
        assert fed == {name: [call.fed for call in plan.calls()] for name, plan in made.items()}
    assert read_manifest(tmp_path / "p").probe


def test_a_file_that_will_not_do_is_refused_by_its_key(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "questions.json"
    path.write_text('{"format": "mlxkv-questions/1", "model": "x", "dtype": "float32"}')
    refused(oracle("many", path), str(path), "threads")
    path.write_text('{"format": "mlxkv-questions/2"}')
    refused(oracle("many", path), "expected 'mlxkv-questions/1'")
    ids = written(tmp_path, model, One(str(tmp_path / "a"), tokens=(10**6,)))
    refused(oracle("many", ids), "id 1000000 at place 0")
    text = written(tmp_path, model, One(str(tmp_path / "a"), prompt="x"))
    refused(oracle("many", text), "no tokenizer.json")


def test_the_rest_is_estimated_by_the_speed_of_what_is_done() -> None:
    """The first answer has the imports, so that it says nothing of the others."""
    assert [many._left(ends, 10) for ends in ([], [99.0], [99.0, 101.0, 103.0])] == [
        "",
        " (2 of 10)",
        " (4 of 10, about 14 s left)",
    ]


def test_one_that_is_refused_leaves_the_others_and_says_why(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = answer.one

    def one(question: Question, *given: Any, **named: Any) -> Any:
        if question.tokens[0] == 7:
            raise Refusal("its logits\nare odd", where="pool")
        return right(question, *given, **named)

    monkeypatch.setattr(answer, "one", one)
    places = {name: tmp_path / name for name in ("a", "b", "c")}
    asked = [One(str(places["a"]), tokens=(7, 3)), One(str(places["b"]), tokens=(3, 7))]
    path = written(tmp_path, model, *asked, One(str(places["c"]), tokens=(7, 7)))
    done = oracle("many", path)
    assert done.returncode == 2
    assert done.stdout.splitlines()[0] == str(places["b"])
    (tmp_path / "printed").write_text(done.stdout)
    why = {places["a"]: "pool: its logits are odd", places["c"]: "pool: its logits are odd"}
    assert questions.read_refusals(tmp_path / "printed", places.values()) == why


def test_memory_has_what_attention_takes_and_is_within_half_of_what_was_measured(
    tmp_path: Path,
) -> None:
    """Nine heads in two layers; measured as the largest of ten samples a second."""
    n, measured = 1000, 548e6
    sizes: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    sizes |= {"hidden_size": 576, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 2000, "max_position_embeddings": 9000}
    folder = models.make(tmp_path / "model", "gqa", **sizes)
    path = written(tmp_path, folder, One(str(tmp_path / "a"), tokens=(1,) * n, steps=3))
    (tmp_path / "estimate.json").write_text(many.estimate(path))
    said = questions.read_estimate(tmp_path / "estimate.json").memory_bytes
    assert measured / 1.5 < said < measured * 1.5

"""Everything under reports/ is made by one command, the same each time, and a check tells when it is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest

from mlxkv import pitfalls, reporting, session
from oracle import trace
from oracle.plan import Refusal

RUN = pitfalls.run


@pytest.fixture(scope="module", autouse=True)
def _tiny(folder_of: Callable[[str], Path]) -> Iterator[None]:
    """The default model is a tiny one here, and so is what it is asked."""
    folder, first, second = str(folder_of("gqa")), (4, 7, 11, 2, 19), (4, 7, 11, 5, 19)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "Request", partial(session.Request, model=folder, tokens=first, steps=6))
        patch.setattr(pitfalls, "Request", partial(pitfalls.Request, model=folder, ids=(first, second), steps=6))
        yield


@pytest.fixture(scope="module")
def reports(_tiny: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    reporting.write_all(folder)
    return folder


@pytest.fixture
def _known_matrix(_tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenarios are run once: each time they are six processes."""
    monkeypatch.setattr(pitfalls, "run", matrix)


@cache
def matrix(request: pitfalls.Request) -> pitfalls.Matrix:
    return RUN(request)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_writing_them_again_changes_nothing(reports: Path) -> None:
    before = contents(reports)
    names = ["README.md", "compare.json", "compare.md", "compare.svg", "pitfalls.json", "pitfalls.md"]
    assert [name.split("/")[-1] for name in before] == names
    reporting.write_all(reports)
    assert contents(reports) == before


def test_the_index_names_model_machine_and_verdict(reports: Path) -> None:
    row, other = (line for line in (reports / "README.md").read_text().splitlines() if line.startswith("| ["))
    (path,) = reports.rglob("compare.md")
    place = path.relative_to(reports)
    assert row == f"| [compare]({place}) | gqa | {place.parts[1]} | agree (algebra, logits, cache) |"
    assert place.parts[1].endswith("-cpu")
    assert other == f"| [pitfalls]({place.with_name('pitfalls.md')}) | gqa | {place.parts[1]} | all as documented |"


@pytest.mark.usefixtures("_known_matrix")
def test_the_check_is_silent_on_what_was_just_made_and_loud_on_what_was_changed(reports: Path) -> None:
    assert reporting.check(reports) == []
    (path,) = reports.rglob("compare.json")
    value = json.loads(path.read_text())
    kept = path.read_text()
    value["gates"][0]["value"] *= 3
    value["generated"][0] += 1
    path.write_text(json.dumps(value))
    (other,) = reports.rglob("pitfalls.json")
    matrix = other.read_text()
    other.write_text(matrix.replace('"refused"', '"right"', 1))
    found = reporting.check(reports)
    path.write_text(kept)
    other.write_text(matrix)
    assert len(found) == 3
    assert "gates[0].value" in found[0]
    assert "generated[0]" in found[1]
    assert "pitfalls.json" in found[2]
    assert "'refused' now" in found[2] or "refused now" in found[2]


def test_nothing_to_check_is_not_a_pass(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="nothing to check"):
        reporting.check(tmp_path)


def test_a_report_names_what_made_it(reports: Path) -> None:
    (path,) = reports.rglob("compare.md")
    report = path.read_text()
    value = json.loads(path.with_suffix(".json").read_text())
    for word in ("MLX_ENABLE_TF32", "blas", "torch", "transformers", "threads", "device", value["subject"]["fingerprint"]):
        assert word in report
    assert value["environment"]["port"]["MLX_ENABLE_TF32"] == "0"


@pytest.mark.usefixtures("_known_matrix")
def test_the_pages_values_stand_beside_ours_only_for_the_original_weights(
    reports: Path, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "on the page" not in next(reports.rglob("compare.md")).read_text()
    weights = folder_of("gqa") / "model.safetensors"
    monkeypatch.setattr(session, "ORIGINAL", (weights.stat().st_size, trace.sha256(weights)))
    reporting.write_all(tmp_path)
    lines = next(tmp_path.rglob("compare.md")).read_text().splitlines()
    (row,) = [line for line in lines if line.startswith("| mlxkv cached ") and "| mlxkv nocache" in line]
    assert row.split("|")[-2].strip() == "6.25e-05"

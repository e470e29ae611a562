"""All of reports/ is made by one command, the same each time, and a check tells when it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from mlxkv.cli import PARTS
from mlxkv.commands import diff
from mlxkv.commands import reports as parts
from mlxkv.commands.compare import prompts
from mlxkv.commands.compare.prompts import Prompt
from mlxkv.commands.cost import run as costing
from mlxkv.commands.cost.ask import Request as Measurements
from mlxkv.commands.cost.result import Cost
from mlxkv.commands.pitfalls import conform
from mlxkv.commands.pitfalls import run as pitfalls
from mlxkv.commands.pitfalls.caches import Caches
from mlxkv.commands.selftest import calibrate as calibrating
from mlxkv.commands.selftest import run as selftesting
from mlxkv.commands.selftest.faults import FAULTS
from oracle.formats import disk
from oracle.formats.errors import Refusal
from oracle.model import default


def shrink(patch: pytest.MonkeyPatch, folder_of: Callable[[str], Path]) -> None:
    """A tiny model and short sequences; the matrix, which has tests of its own, is made once."""
    model = str(folder_of("gqa"))
    patch.setattr(
        parts, "Request", partial(Request, model=model, tokens=(3, 7, 11, 2, 19), steps=6)
    )
    patch.setattr(prompts, "builtin", lambda: (Prompt("short", tokens=(5, 1, 8), steps=3),))
    patch.setattr(prompts, "LONG", 12)
    patch.setattr(prompts, "LONG_CHUNKS", (5, 3))
    patch.setattr(
        pitfalls,
        "Request",
        partial(
            Asked, model=model, tokens=(3, 7, 11, 2, 19), other_tokens=(3, 7, 11, 5, 19), steps=6
        ),
    )
    patch.setattr(pitfalls, "run", matrix)
    patch.setattr(conform, "tried", few(model))
    patch.setattr(costing, "run", costs(model))
    patch.setattr(selftesting, "run", trials(model))
    patch.setattr(calibrating, "run", calibration(model))


Request, Asked, Tried, Calibrated = (
    parts.Request,
    pitfalls.Request,
    selftesting.run,
    calibrating.run,
)
matrix = cache(pitfalls.run)
every = conform.tried
measured = costing.run


@cache
def few(model: str) -> Callable[..., Caches]:
    request = conform.CacheRequest(
        model=model,
        tokens=(3, 7, 11, 2, 19),
        other_tokens=(3, 7, 11, 5, 19),
        caches=("KVCache", "ConcatenateKVCache"),
    )
    return cache(lambda _: every(request))


@cache
def costs(model: str) -> Callable[..., Cost]:
    request = Measurements(model=model, tokens=(3, 7, 11, 2, 19), caches=("StoredKVCache",))
    return cache(lambda _: measured(request))


@cache
def trials(model: str) -> Callable[..., selftesting.Selftest]:
    request = selftesting.Request(model=model, tiny=False, faults=(FAULTS[0].name,))
    return cache(lambda _: Tried(request))


@cache
def calibration(model: str) -> Callable[..., calibrating.Calibration]:
    request = calibrating.Request(model=model, tiny=False, seeds=1)
    return cache(lambda _: Calibrated(request))


@pytest.fixture(autouse=True)
def _tiny(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch, folder_of)


@pytest.fixture(scope="module")
def reports(folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, folder_of)
        list(parts.write(folder))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def test_writing_them_again_changes_nothing(reports: Path) -> None:
    before = contents(reports)
    each = ["compare.json", "compare.md", "compare.svg"]
    inside = [
        "caches.json",
        "caches.md",
        "calibration.json",
        "calibration.md",
        *each,
        *("cost.json", "cost.md", "cost.svg"),
        *(f"long/{name}" for name in each),
        "pitfalls.json",
        "pitfalls.md",
    ]
    inside += [
        "prompts/compare.json",
        *("prompts/compare.md", "prompts/compare.svg"),
        *(f"prompts/short/{name}" for name in each),
    ]
    inside += ["selftest.json", "selftest.md"]
    assert ["/".join(name.split("/")[2:]) for name in before] == ["", *inside]
    list(parts.write(reports))
    assert contents(reports) == before


def test_the_index_names_model_machine_and_verdict(reports: Path) -> None:
    rows = [
        line for line in (reports / "README.md").read_text().splitlines() if line.startswith("| [")
    ]
    (path,) = reports.glob("*/*/compare.md")
    machine = path.parent.name
    said = {
        "caches": ("caches.md", "8 of 46 lives silently wrong, none of them news"),
        "calibration": ("calibration.md", "every correct run within every limit"),
        "compare": ("compare.md", "agree (algebra, logits, cache)"),
        "cost": ("cost.md", "0 caches away from a known answer"),
        "compare, long": ("long/compare.md", "agree (algebra, logits, cache)"),
        "pitfalls": ("pitfalls.md", "all as documented"),
        "compare, prompts": ("prompts/compare.md", "agree (algebra, logits, cache)"),
        "selftest": ("selftest.md", "0 of 3 runs judged wrongly"),
    }
    assert rows == [
        f"| [{name}](gqa/{machine}/{place}) | gqa | {machine} | {what} |"
        for name, (place, what) in said.items()
    ]
    assert machine.endswith("-cpu")


def test_a_part_is_made_by_itself_and_the_index_names_all_that_is_there(reports: Path) -> None:
    assert tuple(PARTS.choices) == (*parts.PARTS, parts.SCALE)
    before = contents(reports)
    made = [path.relative_to(reports).name for path in parts.write(reports, only=["selftest"])]
    assert made == ["selftest.json", "selftest.md", "README.md"]
    assert contents(reports) == before


def test_a_candidate_that_no_part_would_show_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="--candidate with --only long: expected the part compare"):
        list(parts.write(tmp_path, only=["long"], candidates=[tmp_path / "x.safetensors"]))
    assert list(tmp_path.iterdir()) == []


def test_the_long_report_says_what_its_tokens_are(reports: Path) -> None:
    (path,) = reports.glob("*/*/long/compare.md")
    value = json.loads(path.with_suffix(".json").read_text())
    assert (
        "- no text: 12 ids, each the sha256 of its place modulo the vocabulary; "
        "the last 4 are decoded" in path.read_text()
    )
    assert value["subject"]["tokens"] == list(prompts.drawn(12, vocab_size=40))
    assert (value["subject"]["prompt_tokens"], value["generated"]) == (
        8,
        value["subject"]["tokens"][8:],
    )
    assert [len(curve["rms"]) for curve in value["by_position"]["rms"]] == [12, 12, 5, 12, 12]


def test_the_check_is_silent_on_what_was_just_made_and_loud_on_what_was_changed(
    reports: Path,
) -> None:
    assert parts.check(reports) == diff.Checked(())
    (path,) = reports.glob("*/*/compare.md")
    shorter = path.read_text().replace("--", "-")
    path.write_text(shorter)
    index = reports / "README.md"
    index.write_text(index.read_text().replace("agree", "differ"))
    found = parts.check(reports, only=["compare"])
    list(parts.write(reports, only=["compare"]))
    assert found.differences == (
        "README.md: not the index of the reports beside it; run `mlxkv reports`",
    )
    (path,) = reports.glob("*/*/compare.json")
    value = json.loads(path.read_text())
    kept = path.read_text()
    value["gates"][0]["value"] *= 3
    value["generated"][0] += 1
    path.write_text(json.dumps(value))
    (other,) = reports.rglob("pitfalls.json")
    known = other.read_text()
    other.write_text(known.replace('"refused"', '"right"', 1))
    found = parts.check(reports, only=["compare", "pitfalls"]).differences
    path.write_text(kept)
    other.write_text(known)
    assert len(found) == 3
    assert "gates[0].value" in found[0]
    assert "generated[0]" in found[1]
    assert "pitfalls.json" in found[2]
    assert "'refused' now" in found[2] or "refused now" in found[2]


def test_nothing_to_check_is_not_a_pass(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="nothing to check"):
        parts.check(tmp_path)


def test_a_report_names_what_made_it(reports: Path) -> None:
    (path,) = reports.glob("*/*/compare.md")
    report = path.read_text()
    value = json.loads(path.with_suffix(".json").read_text())
    for word in (
        "MLX_ENABLE_TF32",
        "blas",
        "torch",
        "transformers",
        "threads",
        "device",
        value["subject"]["fingerprint"],
    ):
        assert word in report
    assert value["environment"]["port"]["MLX_ENABLE_TF32"] == "0"
    assert [value["environment"][who]["rope"] for who in ("port", "oracle")] == [
        "default, theta 10000"
    ] * 2


def test_the_pages_values_stand_beside_ours_only_for_the_original_weights(
    reports: Path, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "on the page" not in next(reports.glob("*/*/compare.md")).read_text()
    weights = folder_of("gqa") / "model.safetensors"
    monkeypatch.setattr(default, "ORIGINAL", (weights.stat().st_size, disk.sha256(weights)))
    list(parts.write(tmp_path, only=["compare"]))
    lines = next(tmp_path.glob("*/*/compare.md")).read_text().splitlines()
    (row,) = [
        line for line in lines if line.startswith("| mlxkv cached ") and "| mlxkv nocache" in line
    ]
    assert row.split("|")[-2].strip() == "6.25e-05"

"""The formats: values are read strictly, a fault is named by its key, a change is seen."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from oracle.formats import disk, run_folder, strict_json, tensors, trace
from oracle.formats.errors import Inexpressible, Refusal, brief, one_line
from oracle.formats.plan import Call, Clone, Crop, Greedy, New, Plan, Reset, Step, from_json
from oracle.formats.trace import Outcome

ROOT = Path(__file__).parents[2]
PLAN: dict[str, Any] = {
    "format": "mlxkv-plan/2",
    "name": "p",
    "steps": [{"do": "new", "cache": "a"}, {"do": "call", "cache": "a", "tokens": [1, 2]}],
}


def refusal(read: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(Refusal) as caught:
        read(*arguments, **options)
    return str(caught.value)


def test_a_refusal_has_its_parts_and_is_one_line() -> None:
    parts = Refusal("no x, expected one", where=Path("a/b"), remedy="make it again")
    assert str(parts) == "a/b: no x, expected one; make it again"
    assert (parts.where, parts.what, parts.remedy) == (
        "a/b",
        "no x, expected one",
        "make it again",
    )
    whole = Refusal("a/b: no x; make it again")
    assert (str(whole), whole.where, whole.remedy) == ("a/b: no x; make it again", "", "")
    again = pickle.loads(pickle.dumps(parts))
    assert (str(again), again.where, again.remedy) == (str(parts), "a/b", "make it again")


def test_values_and_errors_are_put_into_one_line() -> None:
    assert brief("a\nb") == "'a\\nb'"
    assert brief("x" * 99) == f"'{'x' * 56}..."
    assert one_line(ValueError(" a\n b ")) == "a b"
    assert one_line(ValueError("")) == "ValueError"


STEPS: list[tuple[Any, str]] = [
    ({"do": "call", "cache": "a", "tokens": [1, 1.0]}, "steps[1].tokens[1] is 1.0, expected int"),
    (
        {"do": "call", "cache": "a", "tokens": [[1, 2], [3]]},
        "steps[1]: tokens are rows of 1 to 2 ids, expected one length",
    ),
    ({"do": "call", "cache": "a", "tokens": [[1], 2]}, "steps[1]: tokens are ids and rows"),
    ({"do": "call", "cache": "a", "tokens": [[1], []]}, "tokens[1] is [], expected array of"),
    ({"do": "call", "cache": "a", "tokens": [[[1]]]}, "steps[1].tokens[0][0] is [1], expected int"),
    (
        {"do": "greedy", "cache": "a", "tokens": [[1]], "index_pos": 0, "n": 2},
        "steps[1].tokens[0] is [1], expected int",
    ),
    ({"do": "call", "cache": "a", "tokens": [True]}, "steps[1].tokens[0] is True, expected int"),
    ({"do": "call", "cache": "a", "tokens": [-1]}, "steps[1].tokens[0] is -1, expected int >= 0"),
    ({"do": "call", "cache": "a", "tokens": [2**31]}, "is 2147483648, expected int <= 2147483647"),
    ({"do": "call", "cache": "a", "tokens": []}, "is [], expected array of length >= 1"),
    ({"do": "call", "cache": "a", "tokens": "12"}, "steps[1].tokens is '12', expected array"),
    ({"do": "call", "tokens": [3]}, "steps[1]: object missing required field cache"),
    ({"do": "call", "cache": "a", "tokens": [1], "at": 2}, "object contains unknown field at"),
    (
        {"do": "call", "cache": "a", "tokens": [1], "index_pos": True},
        "is True, expected int | null",
    ),
    (
        {"do": "x"},
        "steps[1].do is 'x', expected one of new, call, greedy, clone, crop, trim, reset, pad, "
        "reload, recall, fail",
    ),
    ({}, "steps[1]: object missing required field do"),
    (5, "steps[1] is 5, expected object"),
    ({"do": "crop", "cache": "a", "length": -1}, "steps[1].length is -1, expected int >= 0"),
    ({"do": "new", "cache": "a b"}, "steps[1]: cache is 'a b', expected letters, digits and _"),
    ({"do": "reset", "cache": "b"}, "steps[1]: cache 'b' does not exist yet; add a `new` step"),
    ({"do": "clone", "from": "b", "to": "a"}, "steps[1]: cache 'b' does not exist yet"),
    (
        {"do": "greedy", "cache": "a", "tokens": [1], "index_pos": 0, "n": 0},
        "steps[1].n is 0, expected int >= 1",
    ),
    (
        {"do": "greedy", "cache": "a", "tokens": [1], "index_pos": 0, "n": 1, "advance": "left"},
        "steps[1].advance is 'left', expected one of by_calls, right, zero",
    ),
]


@pytest.mark.parametrize(("step", "says"), STEPS, ids=[says[:40] for _, says in STEPS])
def test_a_step_that_no_engine_could_follow_is_named(step: Any, says: str) -> None:
    value = PLAN | {"steps": [PLAN["steps"][0], step]}
    message = refusal(from_json, value, where="p.json")
    assert message.startswith("p.json: ")
    assert says in message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "mlxkv-plan/3"}, "p.json: format is 'mlxkv-plan/3', expected 'mlxkv-plan/2'"),
        ({"name": "../x"}, "p.json: plan '../x': its name becomes a file's"),
        ({"name": 3}, "p.json: name is 3, expected str"),
        ({"rows": "some"}, "p.json: rows is 'some', expected one of all, last"),
        ({"rows": [0, 0]}, "p.json: plan 'p': rows are not in rising order, each once"),
        ({"rows": [1, 0]}, "p.json: plan 'p': rows are not in rising order, each once"),
        ({"rows": []}, "p.json: rows is [], expected array of length >= 1"),
        ({"rows": [0, 2]}, "p.json: plan 'p': rows hold 2, which no call of the plan reaches"),
        ({"rows": [True]}, "p.json: rows[0] is True, expected int"),
        (
            {"rows": [0], "format": "mlxkv-plan/1"},
            "p.json: format is 'mlxkv-plan/1', expected 'mlxkv-plan/2' for a plan with rows named",
        ),
        ({"row": "all"}, "p.json: unknown key 'row'"),
        ({"steps": {}}, "p.json: steps is {}, expected array"),
    ],
)
def test_a_plan_of_odd_values_is_named_by_its_key(changes: dict[str, Any], says: str) -> None:
    assert refusal(from_json, PLAN | changes, where="p.json").startswith(says)


def test_a_plan_made_in_python_is_held_to_the_same() -> None:
    made = Plan("p", (New("a"), Call("a", [1, 2])))  # type: ignore[arg-type]
    assert made == from_json(PLAN)
    assert hash(made.steps) == hash(from_json(PLAN).steps)
    assert "steps[0].length is -1" in refusal(Plan, "p", (Crop("a", -1),))
    odd = Call("a", (np.int64(1),))  # type: ignore[arg-type]
    assert "steps[1].tokens[0] is 'np.int64(1)'" in refusal(Plan, "p", (New("a"), odd))


def test_the_calls_of_a_plan_know_what_their_caches_hold() -> None:
    steps: tuple[Step, ...] = (
        New("a"),
        Call("a", (1, 2, 3), 0),
        Clone("a", "b"),
        Greedy("b", (4, 5), None, 3),
        Crop("a", 2),
        Call("a", (6,)),
        Crop("a", 9),
        Reset("b"),
        Call("b", (7,), 5),
        New("c", use_kv_cache=False),
        Call("c", (1, 2)),
        Clone("c", "d"),
        Call("d", (1, 2)),
    )
    plan = Plan("p", steps)
    found = [(call.index, call.held, call.start, call.fed, call.keeps) for call in plan.calls()]
    assert found == [
        (1, 0, 0, 3, True),
        (3, 3, 3, 4, True),
        (5, 2, 2, 1, True),
        (8, 0, 5, 1, True),
        (10, 0, 0, 2, False),
        (12, 0, 0, 2, False),
    ]
    assert plan.longest == 7
    # The failed call fed nothing.
    assert [(c.index, c.held) for c in plan.calls(without=[1])][:3] == [(3, 0), (5, 0), (8, 0)]


def test_an_outcome_has_the_kind_of_its_error() -> None:
    assert Outcome().kind == Outcome([1]).kind == "done"
    assert Outcome(error="full").kind == "refused"
    assert Outcome.failed(ValueError("full"), [1]) == Outcome([1], "full", "refused")
    failed = Outcome.failed(Inexpressible("no trim()"))
    assert failed == Outcome(None, "cannot be expressed: no trim()", "cannot be expressed")
    assert msgspec.to_builtins(Outcome()) == {}
    written = {"error": "cannot be expressed: no trim()", "kind": "cannot be expressed"}
    assert msgspec.to_builtins(failed) == written
    for odd in ({"kind": "refused"}, {"kind": "lost", "error": "x"}):
        with pytest.raises(Refusal, match="refused"):
            strict_json.typed(odd, Outcome, where="t", remedy="")


def test_a_trace_keeps_the_kinds_of_its_outcomes_and_why_it_has_no_cache(tmp_path: Path) -> None:
    outcomes = [Outcome(), Outcome.failed(Inexpressible("no trim()"))]
    meta = trace.Meta(from_json(PLAN), "e", "1", "float32", outcomes=outcomes, no_cache="why")
    arrays = {"logits": np.zeros((0, 3), np.float32), "positions": np.zeros(0, np.int32)}
    trace.write(tmp_path / "t.safetensors", meta, arrays)
    assert trace.read(tmp_path / "t.safetensors").meta == meta


def test_floors_without_a_pool_are_refused(tmp_path: Path) -> None:
    pool = run_folder.Pool(["sdpa-step"], ["sdpa"], 1)
    for change, says in [
        ({"format": "mlxkv-floors/0"}, "format is 'mlxkv-floors/0', expected 'mlxkv-floors/1'"),
        ({"members": "all"}, "members is 'all', expected array"),
        ({"distinct": 1.5}, "distinct is 1.5, expected int"),
        ({"kind": []}, "object contains unknown field kind"),
    ]:
        with tensors.writer(tmp_path / "f.safetensors", {}) as out:
            out.finish(pool.to_json() | change)
        assert says in refusal(run_folder.read_floors, tmp_path / "f.safetensors")


def test_a_file_is_hashed_once_and_a_changed_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "f", []
    real = disk.sha256

    def counted(path: Path) -> str:
        read.append(path)
        return real(path)

    monkeypatch.setattr(disk, "sha256", counted)
    path.write_bytes(b"a")
    # Just written: a second write could leave the clock's tick as it is.
    assert disk.hash_once(path) == disk.hash_once(path)
    assert len(read) == 2
    monkeypatch.setattr(disk, "_TICK_NS", -(10**12))
    first = disk.hash_once(path)
    assert disk.hash_once(path) == first
    assert len(read) == 3
    stat = path.stat()
    path.write_bytes(b"b")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    while path.stat().st_ctime_ns == stat.st_ctime_ns:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert disk.hash_once(path) == real(path) != first


def test_every_source_of_the_package_is_part_of_the_digest(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    package = Path(shutil.copytree(ROOT / "oracle", tmp_path / "oracle", ignore=ignored))
    assert run_folder.sources() == run_folder.sources(package)
    seen = {str(run_folder.sources(package))}
    for file in (
        "answer.py",
        "formats/plan.py",
        "model/packing.py",
        "truth/llama.py",
        "pool/mean.py",
    ):
        with (package / file).open("a") as source:
            source.write("# changed\n")
        before = len(seen)
        seen.add(str(run_folder.sources(package)))
        assert len(seen) == before + 1, file


@pytest.mark.parametrize("name", ["engine", "engine_version", "device"])
def test_a_trace_cannot_steer_the_terminal_that_shows_its_engine(tmp_path: Path, name: str) -> None:
    meta = trace.Meta(from_json(PLAN), "e", "1", "float32")
    path = tmp_path / "t.safetensors"
    trace.write(path, replace(meta, **{name: "x\x1b[31m\ny"}), {})
    with pytest.raises(Refusal, match=f"{name} is .*, expected letters that can be printed"):
        trace.read(path)


def test_plans_and_traces_are_names_of_the_package_and_load_nothing_heavy() -> None:
    code = "import sys, oracle; assert not {m for m in sys.modules if m.startswith('oracle.')}\n"
    code += "from oracle import plan, trace\nplan.Plan, trace.Meta\n"
    code += "print({'torch', 'transformers', 'mlx', 'safetensors'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (run.stdout, run.stderr) == ("set()\n", "")

"""Stored traces of any engines: compared and judged again with nothing run, on a machine that has
neither MLX nor torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import command
import numpy as np
import pytest
import synthetic

from mlxkv.commands.compare import delta as stored
from mlxkv.judge import alignment as judging
from mlxkv.judge.case import Case
from oracle.formats import run_folder, trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, Clone, Crop, Greedy, New, Plan, Reset
from oracle.formats.trace import Outcome, Trace


@pytest.fixture(scope="module")
def case() -> Case:
    return synthetic.make_case()


@pytest.fixture(scope="module")
def runs(case: Case) -> dict[str, Trace]:
    return synthetic.make_candidates(case)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment without MLX, mlx-lm, torch, transformers and matplotlib."""
    room = tmp_path_factory.mktemp("bare")
    names = ("mlx", "mlx_lm", "torch", "transformers", "matplotlib")
    (room / "sitecustomize.py").write_text(
        f"import sys\nfor name in {names!r}:\n    sys.modules[name] = None\n"
    )
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(room), os.environ.get("PYTHONPATH", "")])
    }


def mlxkv(*arguments: str | Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlxkv", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def save(path: Path, one: Trace) -> Path:
    trace.write(path, one.meta, dict(one.arrays))
    return path


# delta, over numbers that can be worked out by hand.


def hand(
    plan: Plan, rows: list[list[float]], positions: list[int], *, engine: str = "mine", **more: Any
) -> Trace:
    meta = synthetic.meta(plan, engine=engine, **more)
    return Trace(
        meta, {"logits": np.array(rows, np.float32), "positions": np.array(positions, np.int32)}
    )


FULL = Plan("full", (New("a"), Call("a", (3, 4, 5), 0)))
STEP = Plan("step", (New("a"), Call("a", (3, 4), 0), Call("a", (5,), 2)))


def test_the_table_of_two_traces_is_the_pages(tmp_path: Path) -> None:
    a = save(tmp_path / "a.safetensors", hand(STEP, [[1.0, 2.0], [0.0, 4.0]], [1, 2]))
    b = save(
        tmp_path / "b.safetensors",
        hand(
            FULL, [[9.0, 9.0], [1.0, 1.5], [3.0, 0.0]], [0, 1, 2], engine="other", fingerprint=None
        ),
    )
    lines = stored.delta([a, b], as_json=False).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["run", "dtype", "rows", "weights", "file"],
        ["1", "mine", "cached", "float32", "2", "f" * 16, str(a)],
        ["2", "other", "full", "float32", "3", "undeclared", str(b)],
    ]
    assert lines[3] == ""
    assert (
        " ".join(lines[4].split())
        == "a b rows max |d| first last rms top-1 max |b| NMSE (dB) 1 - cosine KL (nats)"
    )
    # d = (0, .5), (-3, 4); rms = sqrt((.25 + 9 + 16) / 4); NMSE = 25.25 / (1 + 2.25 + 9); cosine =
    # 4 / sqrt(21 * 12.25)
    numbers = lines[5].split()
    assert numbers[:9] == [
        "1",
        "2",
        "2",
        "4.00e+00",
        "5.00e-01",
        "4.00e+00",
        "2.51e+00",
        "1/2",
        "3.000",
    ]
    assert numbers[9:11] == [
        f"{10 * np.log10(25.25 / 12.25):.1f}",
        f"{1 - 4 / np.sqrt(21 * 12.25):.2e}",
    ]
    p, q = (
        [np.exp(r) / np.exp(r).sum() for r in rows]
        for rows in (([1, 1.5], [3, 0]), ([1, 2], [0, 4]))
    )
    assert float(numbers[11]) == pytest.approx(
        np.mean([(x * np.log(x / y)).sum() for x, y in zip(p, q, strict=True)]), rel=5e-3
    )
    assert len(lines) == 6


def test_json_holds_every_pair_and_what_is_compared(tmp_path: Path, runs: dict[str, Trace]) -> None:
    files = [
        save(tmp_path / f"{name}.safetensors", runs[name]) for name in ("step", "full", "prefixes")
    ]
    value = json.loads(stored.delta(files, as_json=True))
    assert value["format"] == "mlxkv-delta/1"
    assert [(t["path"], t["plan"]["name"], t["plan_digest"]) for t in value["traces"]] == [
        (str(path), path.stem, runs[path.stem].meta.plan.digest) for path in files
    ]
    assert [(p["a"], p["b"], p["rows"]) for p in value["pairs"]] == [
        (0, 1, 24),
        (0, 2, 20),
        (1, 2, 20),
    ]
    assert value["pairs"][1]["positions"] == list(range(4, 24))
    expected = np.abs(runs["step"].logits[4:].astype(np.float64) - runs["prefixes"].logits).max()
    assert value["pairs"][1]["max_abs"] == expected
    names = (
        "a b positions rows max_abs first_max last_max rms top1_equal top5_equal max_abs_ref "
        "nmse_db cosine kl"
    )
    assert " ".join(value["pairs"][1]) == " ".join(sorted(names.split()))


def test_float32_is_summed_in_float64(case: Case, runs: dict[str, Trace]) -> None:
    a, b = runs["step"], runs["full"]
    (found,) = judging.align([a, b])
    x, y = a.logits.astype(np.float64), b.logits.astype(np.float64)
    assert found.figures.cosine == pytest.approx(
        (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()), rel=1e-14
    )
    assert found.figures.nmse_db == pytest.approx(
        10 * np.log10(((x - y) ** 2).sum() / (y * y).sum()), rel=1e-12
    )


def test_a_run_that_chose_its_tokens_stands_beside_one_that_was_fed_them() -> None:
    greedy = Plan("greedy", (New("a"), Greedy("a", (3, 4), 0, 2)))
    chosen = hand(
        greedy, [[0.0, 1.0], [1.0, 0.0]], [1, 2], outcomes=[Outcome(), Outcome(tokens=[5, 9])]
    )
    assert judging.common(chosen, hand(FULL, [[0.0, 1.0]] * 3, [0, 1, 2])) == [1, 2]
    other = hand(
        greedy, [[0.0, 1.0], [1.0, 0.0]], [1, 2], outcomes=[Outcome(), Outcome(tokens=[6, 9])]
    )
    with pytest.raises(Refusal, match="token at position 2 is 6, expected 5 as in "):
        judging.common(other, hand(FULL, [[0.0, 1.0]] * 3, [0, 1, 2]))
    # The last token chosen is not fed.
    longer = Plan("longer", (*greedy.steps, Call("a", (9,), 3)))
    assert judging.common(replace(chosen, meta=replace(chosen.meta, plan=longer)), chosen) == [1, 2]
    # Up to the last position that both have, they are the same.
    assert judging.common(other, hand(FULL, [[0.0, 1.0]] * 2, [0, 1])) == [1]


def test_clones_crops_and_resets_keep_to_the_sequence_or_not() -> None:
    news = (
        New("a"),
        Call("a", (3, 4), 0),
        Clone("a", "b"),
        Call("b", (5,), 2),
        Crop("b", 1),
        Call("b", (4,), 1),
        Reset("a"),
    )
    one = hand(Plan("one", (*news, Call("a", (3,), 0))), [[0.0, 1.0]], [2])
    assert judging.common(one, hand(FULL, [[0.0, 1.0]] * 3, [0, 1, 2])) == [2]
    several = hand(Plan("two", (*news, Call("a", (4,), 0))), [[0.0, 1.0]], [2])
    with pytest.raises(Refusal, match="its plan 'two' feeds several sequences, expected one"):
        judging.common(several, one)
    none = Plan(
        "none",
        (
            New("a", use_kv_cache=False),
            Call("a", (3,), 0),
            Clone("a", "b"),
            Call("b", (3, 4, 5), 0),
            Call("b", (3, 4), 0),
        ),
    )
    assert judging.common(hand(none, [[0.0, 1.0]], [2]), one) == [2]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda t: replace(t, meta=replace(t.meta, fingerprint="e" * 64)),
            r"fingerprint is e{16}, expected f{16} as in ",
        ),
        (
            lambda t: replace(t, arrays=dict(t.arrays) | {"logits": t.logits[:, :-1]}),
            r"vocabulary is 63, expected 64 as in ",
        ),
        (lambda t: synthetic.rows(t, [0, 1, 1]), r"more than one row for position 1, expected one"),
        (lambda t: synthetic.rows(t, []), r"no position that .* has too"),
        (
            lambda t: replace(t, meta=replace(t.meta, plan=synthetic.plans(23)["full"])),
            r"token at position 23 is None, expected 26 as in ",
        ),
        (lambda t: replace(t, meta=replace(t.meta, plan=FULL)), r"token at position 3 is None, "
                                                                r"expected 6 as in .*plan "
                                                                r"digests "),
        (lambda t: replace(t, meta=replace(t.meta, plan=Plan("x", (New("a"), Call("a", (3,), 4))))),
         r"step 1 is at index_pos 4, expected 0"),
    ],
)  # fmt: skip
def test_what_has_no_distance_is_refused_in_a_line(
    runs: dict[str, Trace], change: Callable[[Trace], Trace], line: str
) -> None:
    with pytest.raises(Refusal, match=line) as told:
        judging.align([change(runs["full"]), runs["step"]])
    assert "\n" not in str(told.value)


def test_on_the_command_line_it_needs_no_engine_and_judges_nothing(
    runs: dict[str, Trace], bare: dict[str, str], tmp_path: Path
) -> None:
    wrong = synthetic.changed(runs["full"], "logits", lambda a: a + 100)
    files = [
        save(tmp_path / "a.safetensors", runs["step"]),
        save(tmp_path / "b.safetensors", wrong),
    ]
    done = mlxkv("delta", *files, env=bare)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == stored.delta(files, as_json=False)
    one = mlxkv("delta", files[0], env=bare)
    assert (one.returncode, one.stdout, one.stderr) == (
        2,
        "",
        "error: delta: 1 traces, expected two or more; give their files\n",
    )
    gone = mlxkv("delta", files[0], tmp_path / "gone", "--json", env=bare)
    assert (gone.returncode, gone.stdout, len(gone.stderr.splitlines())) == (2, "", 1)
    assert "nothing is judged" in " ".join(mlxkv("delta", "--help", env=bare).stdout.split())


# judge, on an answer of the real oracle.


@pytest.fixture(scope="module")
def kept(
    answer: Path, model_of: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The port's traces as files, by plan, and one that is wrong."""
    from mlxkv.engines import port

    room, model = tmp_path_factory.mktemp("traces"), model_of()
    found = {
        name: port.run(model, plan)
        for name, plan in run_folder.read_plans(answer, run_folder.read_manifest(answer)).items()
    }
    files = {name: save(room / f"{name}.safetensors", one) for name, one in found.items()}
    return files | {
        "wrong": save(
            room / "wrong.safetensors",
            synthetic.changed(found["full"], "logits", lambda a: a * 1.001),
        )
    }


def test_stored_traces_are_judged_with_nothing_run(
    answer: Path, kept: dict[str, Path], bare: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "compare.svg").write_text("of an earlier run")
    plans = ("full", "step", "prefixes", "chunked")
    given = [kept[name] for name in plans]
    done = mlxkv("judge", answer, *given, "--out", tmp_path, env=bare)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert (
        done.stdout.splitlines()[-1]
        == f"agree (logits, cache)    report: {tmp_path / 'compare.md'}"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare.json", "compare.md"]
    assert json.loads((tmp_path / "compare.json").read_text())["outcome"] == "agree"
    assert "svg" not in (tmp_path / "compare.md").read_text()


def test_the_exit_code_is_the_candidates(
    answer: Path, kept: dict[str, Path], tmp_path: Path
) -> None:
    done = command.mlxkv("judge", answer, kept["wrong"], "--json", "--out", tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    value = json.loads(done.stdout)
    assert (value["outcome"], value["plans"]) == ("differ", ["full"])
    assert value == json.loads((tmp_path / "compare.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "Missing argument 'FOLDER'; see"),
        (["ORACLE"], "Missing argument 'TRACE...'; see"),
        (["ORACLE", "TRACE", "--device", "auto"], "--device"),
        (["nowhere", "TRACE"], "manifest.json: cannot be read"),
        (["ORACLE", "nowhere"], "nowhere: cannot be read"),
    ],
)
def test_what_cannot_be_judged_is_refused_and_leaves_nothing(
    answer: Path, kept: dict[str, Path], tmp_path: Path, arguments: list[str], line: str
) -> None:
    there = {"ORACLE": answer, "TRACE": kept["full"]}
    given = [there.get(one, one) for one in arguments]
    command.refused(command.mlxkv("judge", *given, "--out", tmp_path / "out"), line)
    assert not (tmp_path / "out").exists()

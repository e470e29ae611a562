"""A long sequence is judged by a sample of its rows: what is wrong is found all the same, and where
one row alone is wrong that is in no sample, the verdict says how many rows were compared.

Long is here what is longer than LONG tokens; the same at its true size runs nightly.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import numpy as np
import pytest
from command import mlxkv as command
from command import refused, torch_python
from mistaken import Engine
from synthetic import (
    VOCAB,
    cache_names,
    changed,
    make_algebra,
    make_candidates,
    make_case,
    make_probe,
)

from mlxkv.commands.locate import place as locating
from mlxkv.commands.locate.patterns import growing
from mlxkv.commands.selftest import faults
from mlxkv.commands.selftest.faults import FAULTS, Fault, Place, applies
from mlxkv.engines import oracle, port
from mlxkv.judge import cause
from mlxkv.judge.admission import by_plan
from mlxkv.judge.case import Case, read_case
from mlxkv.judge.result import Verdict
from mlxkv.judge.verdict import judge
from mlxkv.port.llama import Llama
from mlxkv.port.weights import load
from mlxkv.report import page, phrases, terminal
from oracle.formats import rows
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan, in_calls
from oracle.formats.run_folder import Inputs, inputs_digest, read_plans
from oracle.formats.trace import Trace
from oracle.model.checkpoint import resolve

LONG, N, PROMPT, CUT = 100, 300, 280, 168
ORACLE = "import sys; from oracle.formats import rows; from oracle import cli; "
LOWERED = f"{ORACLE}rows.WHOLE = {LONG}; sys.exit(cli.invoke(sys.argv[1:]))"
"""The oracle's command line, to which LONG tokens are long."""


@pytest.fixture(autouse=True)
def _long(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("nightly"):
        monkeypatch.setattr(rows, "WHOLE", LONG)


def synthetic() -> Case:
    return make_case(n=N, prompt=PROMPT)


# What is said.


def test_a_sample_is_said_wherever_the_verdict_stands() -> None:
    case = synthetic()
    verdict = judge(case, make_candidates(case), algebra=make_algebra(case), probe=make_probe())
    kept = len(case.truth.positions)

    words = f"{kept} of 300 rows compared"
    assert (verdict.outcome, 100 < kept < 150) == ("agree", True)
    assert phrases.sentence(verdict) == f"agree (algebra, logits, cache), {words}"
    assert verdict.to_json()["rows"] == {"compared": kept, "kept": kept, "of": 300}
    assert verdict.unseen[0].startswith(f"{300 - kept} of 300 rows of logits: {words}, keys and")
    sides = [phrases.oracle_side(case.manifest)] * 2
    text = terminal.console(verdict, case.manifest, sides=sides)
    assert text.splitlines()[1].endswith(f" + 20; {words}")
    assert f"not exercised: {300 - kept} of 300 rows of logits; " in text
    shown = page.markdown(verdict, case.manifest, sides=sides, commands=[])
    assert f"Of the logits {words}: the first, the prompt's end" in shown


def test_rows_that_a_trace_lacks_are_not_counted_as_compared() -> None:
    case = synthetic()
    runs = {plan: one for plan, one in make_candidates(case).items() if plan == "prefixes"}
    verdict = judge(case, runs)

    assert verdict.rows.compared == N - PROMPT + 1 < verdict.rows.kept


def test_rows_that_the_folder_does_not_keep_are_not_counted_as_compared() -> None:
    case = synthetic()
    run, kept = make_candidates(case)["full"], case.truth.positions
    logits = np.zeros((N, VOCAB), np.float32)
    logits[kept] = run.logits
    every = {"logits": logits, "positions": np.arange(N, dtype=np.int32)}
    verdict = judge(case, {"full": replace(run, arrays=dict(run.arrays) | every)})

    assert verdict.outcome == "agree"
    assert verdict.rows.compared == verdict.rows.kept == len(kept) < N


def test_of_a_short_sequence_and_of_all_rows_nothing_is_said() -> None:
    case = make_case()
    verdict = judge(case, make_candidates(case), probe=make_probe())

    assert phrases.sentence(verdict) == "agree (logits, cache)"
    assert "rows" not in verdict.to_json()
    assert not any("rows of logits" in line for line in verdict.unseen)
    assert not verdict.rows.sampled


def test_a_pool_of_one_kind_judges_and_its_controls_hold() -> None:
    case = synthetic()
    verdict = judge(case, make_candidates(case))

    assert case.pool.kinds == ["sdpa"]
    assert case.pool.members == ["sdpa-full", "sdpa-step", "sdpa-chunked", "sequential-full"]
    assert case.held_out == "sdpa-step"
    assert [c.passed for c in verdict.controls] == [True] * len(verdict.controls)


def test_a_folder_with_eager_in_a_long_pool_is_not_of_one_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rows, "WHOLE", N)
        whole = make_case(n=N, prompt=PROMPT)

    verdict = judge(whole, make_candidates(synthetic()))

    assert verdict.outcome == "cannot tell"
    assert "kinds are eager, sdpa, expected sdpa" in " / ".join(verdict.reasons)


# One row alone.


def test_a_fault_in_one_row_s_logits_is_found_or_the_sample_is_said() -> None:
    case, rng = synthetic(), np.random.default_rng(3)
    runs, kept = make_candidates(case), set(case.truth.positions.tolist())
    missed = 0
    for at in rng.permutation(N)[:40].tolist():
        plan = ("full", "step", "chunked", "mixed")[at % 4]
        wrong = dict(runs)
        if at in kept:
            row = int(np.flatnonzero(runs[plan].positions == at)[0])
            wrong[plan] = changed(runs[plan], "logits", spoiled(row, at % VOCAB))
        verdict = judge(case, wrong)
        if at in kept:
            assert (verdict.outcome, verdict.first_wrong.position) == ("differ", at)
        else:
            missed += 1
        assert f"{len(kept)} of 300 rows compared" in phrases.sentence(verdict)
    assert 8 < missed < 36


def test_a_fault_in_one_key_or_value_is_found_at_every_position() -> None:
    case, rng = synthetic(), np.random.default_rng(4)
    runs, names = make_candidates(case), cache_names()
    for at in rng.permutation(N)[:20].tolist():
        wrong = changed(runs["step"], names[at % len(names)], stale(at))
        verdict = judge(case, runs | {"step": wrong})

        assert (verdict.outcome, verdict.first_wrong.position) == ("differ", at)


def spoiled(row: int, column: int) -> Callable[[Any], Any]:
    def change(logits: Any) -> Any:
        logits[row, column] += 0.01
        return logits

    return change


def stale(at: int) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array[at % 2, at] = array[at % 2, at - 1]
        return array

    return change


# The faults of an engine.


@dataclass
class Made:
    """A tiny model and its run folder, with a sample of rows."""

    folder: Path
    out: Path
    model: Llama
    case: Case
    plans: dict[str, Plan]
    place: Place

    def runs(self) -> dict[str, Trace]:
        return {
            name: port.run(self.model, plan)
            for name, plan in self.plans.items()
            if name != "prefixes"
        }

    def judged(self) -> Verdict:
        return judge(self.case, self.runs())


def made(room: Path, ids: list[int], prompt: int, *more: str, **config: Any) -> Made:
    given = {"max_position_embeddings": 8192, "num_hidden_layers": 2} | config
    folder = models.save(room / "model", models.config("gqa", **given))
    options = ["--tokens", ",".join(map(str, ids)), "--prompt-tokens", str(prompt), *more]
    options += ["--steps", "0", "--no-probe", "--out", str(room / "run")]
    line = torch_python(*(["-c", LOWERED] if rows.WHOLE == LONG else ["-m", "oracle"]))
    subprocess.run([*line, "run", str(folder), *options], check=True, capture_output=True)
    case = read_case(room / "run")
    cut = next(case.references["chunked"].meta.plan.calls()).fed
    at = Place(given["num_hidden_layers"], prompt, cut, tuple(ids), tuple(ids))
    plans = read_plans(room / "run", case.manifest)
    return Made(folder, room / "run", load(folder, "float32"), case, plans, at)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Made:
    ids = models.ids(N)
    ids[:PROMPT] = [token % 39 for token in ids[:PROMPT]]
    ids[200] = 39  # the one token that has this id
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "WHOLE", LONG)
        return made(tmp_path_factory.mktemp("sampled"), ids, PROMPT)


def test_the_folder_keeps_a_sample_and_a_right_engine_agrees(sampled: Made) -> None:
    case, runs = sampled.case, sampled.runs()
    kept = case.truth.positions.tolist()
    verdict = judge(case, runs)

    assert case.pool.kinds == ["sdpa"]
    assert tuple(kept) == sampled.plans["mixed"].rows == rows.sampled(N, PROMPT, calls(sampled))
    assert (verdict.outcome, verdict.rows.compared) == ("agree", len(kept))
    assert case.truth.kv("a", 1)[0].shape[1] == N
    assert runs["step"].kv("a", 1)[0].shape[1] == N


def calls(of: Made) -> list[list[int]]:
    return [[call.fed for call in p.calls()] for n, p in of.plans.items() if n != "prefixes"]


LISTED = {
    "no mask after single tokens",
    "a chunk longer than what is held loses its mask's offset",
    "the mask without offset from the third chunk on",
    "attention sees 32 tokens",
    "rows in float16 from 128 on",
    "rows in 255 levels from 33 on",
    "row 256 overwritten",
    "the mask ends after 256 rows",
    "positions in bfloat16",
    "ids of 16 bits",
    "one id's embedding",
}
"""Faults that the whole sequence shows and that read "agree" where it is short."""


def planted(fault: Fault) -> Any:
    marks = [] if fault.name in LISTED else [pytest.mark.nightly]
    return pytest.param(fault, id=fault.name.replace(" ", "-"), marks=marks)


SEEN = [planted(f) for f in FAULTS if "B" in f.lanes and f.seen != "repeat"]


@pytest.mark.parametrize("fault", SEEN)
def test_a_fault_that_all_rows_show_is_found_by_the_sample(
    fault: Fault, sampled: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "WHOLE", LONG)
    monkeypatch.setattr("mlxkv.commands.selftest.faults.SHORT", 38)
    place = sampled.place
    if fault.name == "one id's embedding":
        place = replace(place, tokens=())
    assert applies(fault, sampled.model.config) or fault.name == "ids of 16 bits"
    with fault.plant(sampled.model, place):
        verdict = sampled.judged()

    start, first = fault.where.first(place), verdict.first_wrong
    assert verdict.outcome == "differ"
    following = [at for at in sampled.case.truth.positions.tolist() if at >= start]
    assert first is not None
    assert first.position <= following[0]


def test_a_call_that_is_off_now_and_then_is_found_among_the_rows_decoded(sampled: Made) -> None:
    (fault,) = (fault for fault in FAULTS if fault.seen == "repeat")
    with fault.plant(sampled.model, sampled.place):
        runs = sampled.runs()
        again = port.run(sampled.model, sampled.plans["step"])
    again = replace(again, meta=replace(again.meta, repeat=1))
    verdict = judge(sampled.case, runs, repeats={"step": again})

    assert verdict.outcome == "differ"
    assert verdict.found.startswith("results change from run to run")


# What looks into a difference.


def test_a_usual_mistake_is_named_by_the_rows_that_there_are(sampled: Made, tmp_path: Path) -> None:
    config = models.config("gqa", num_hidden_layers=2, max_position_embeddings=8192)
    line = torch_python("-c", LOWERED, "suspects", str(sampled.out), "--out", str(tmp_path / "out"))
    subprocess.run(line, check=True, capture_output=True)
    suspects = cause.read_suspects(tmp_path / "out", sampled.case.manifest.fingerprint)

    def explained(**mistake: Any) -> tuple[dict[str, Trace], Verdict]:
        # It gives a row for every position, which is more than the plan asks for.
        engine = Engine(config, models.weights(config), **mistake)
        runs = {"full": engine.follow(sampled.plans["full"])}
        return runs, judge(sampled.case, runs)

    wrong, verdict = explained(interleaved=True)
    found = cause.find(sampled.case, wrong, suspects)
    right, fine = explained()

    assert suspects.n == rows.FIRST + 1  # as many as begin the sample without a gap
    assert (verdict.outcome, fine.outcome) == ("differ", "agree")
    assert isinstance(found, cause.Cause)
    assert "interleaved" in found.words
    assert isinstance(cause.blind(sampled.case, right, fine.gates, suspects), tuple)


@pytest.mark.parametrize(
    ("name", "position", "words"),
    [
        ("logits times 1.001", 0, "every row is 1.001 times the truth's"),
        ("one stale key row, middle layer", PROMPT + 4, f"row {PROMPT + 4} of its keys in layer 1"),
        ("the mask ends after 256 rows", 256, "at 43 of 300 positions, of which 256 is the first"),
    ],
)
def test_a_place_is_named_by_positions(name: str, position: int, words: str, sampled: Made) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    with fault.plant(sampled.model, sampled.place):
        runs = sampled.runs()
    found = locating.locate(sampled.case, judge(sampled.case, runs), arithmetic=runs)

    assert (found.outcome, found.position) == ("located", position)
    assert words in (found.hint or ""), found.hint
    assert any("rows compared: a first wrong position" in note for note in found.notes)


def test_one_row_of_logits_is_named_by_its_position(sampled: Made) -> None:
    right = sampled.runs()
    row = int(np.flatnonzero(right["step"].positions == 256)[0])

    def twice(logits: Any) -> Any:
        logits[row] *= 1.5
        return logits

    runs = right | {"step": changed(right["step"], "logits", twice)}
    found = locating.locate(sampled.case, judge(sampled.case, runs), arithmetic=runs)

    assert (found.position, found.layer) == (256, None)
    assert "row 256 is 1.5 times the truth's" in (found.hint or ""), found.hint


def test_rows_wrong_from_a_position_on_are_named_by_it(sampled: Made) -> None:
    right, rng = sampled.runs(), np.random.default_rng(5)
    wrong = right["step"].positions >= 250

    def off(logits: Any) -> Any:
        logits[wrong] += 0.1 * rng.standard_normal(logits[wrong].shape).astype(np.float32)
        return logits

    runs = right | {"step": changed(right["step"], "logits", off)}
    found = locating.locate(sampled.case, judge(sampled.case, runs), arithmetic=runs)

    first = min(at for at in right["step"].positions.tolist() if at >= 250)
    assert (found.position, found.layer) == (first, 1)
    assert f"or their logits (wrong from position {first} on)" in (found.hint or ""), found.hint


@pytest.mark.parametrize(("steep_to", "grows"), [(64, False), (N - 1, True)])
def test_an_error_that_grows_does_so_over_positions_and_not_over_rows(
    steep_to: int, grows: bool
) -> None:
    """Half of the rows are those of the first 64 positions."""
    case = synthetic()
    runs = make_candidates(case)
    size = np.interp(runs["full"].positions, [0, steep_to, N], [0.01, 1.0, 1.3])

    def off(logits: Any) -> Any:
        rng = np.random.default_rng(6)
        return logits + (size[:, None] * rng.standard_normal(logits.shape)).astype(np.float32)

    verdict = judge(case, runs | {"full": changed(runs["full"], "logits", off)})

    assert growing(verdict) is grows


# What is asked.


def test_all_rows_is_another_question_and_another_command() -> None:
    given: dict[str, Any] = {"tokens": (1, 2), "prompt_tokens": 2, "dtype": "float32"}
    asked = [Inputs(**given, all_rows=every) for every in (False, True)]

    assert len({inputs_digest("f", "c", one) for one in asked}) == 2


def test_the_option_reaches_the_oracle(sampled: Made) -> None:
    def asked(*, all_rows: bool) -> bool:
        question = oracle.Question(
            checkpoint=resolve(str(sampled.folder)),
            prompt=None,
            tokens=(1, 2),
            prompt_tokens=2,
            dtype="float32",
            all_rows=all_rows,
        )
        return question.into(Path("out")).all_rows

    assert [asked(all_rows=every) for every in (False, True)] == [False, True]


def test_a_folder_with_a_sample_cannot_show_all_rows(sampled: Made, tmp_path: Path) -> None:
    given = "compare", sampled.folder, "--oracle", sampled.out, "--out", tmp_path / "out"
    done = command(*given, "--all-rows")

    refused(done, "--all-rows", "keeps a sample of rows", "make another folder", notes="oracle: ")


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (N, "its rows are a probe's: give a folder"),
        (1025, "its rows are a sample: give the folder"),
    ],
)
def test_a_trace_with_another_folder_s_rows_is_refused(length: int, words: str) -> None:
    case = synthetic()
    plan = in_calls("full", tuple(range(length)), [length], rows=(0, 1, 2))
    run = make_candidates(case)["full"]
    with pytest.raises(Refusal, match=words):
        by_plan(case.manifest, [replace(run, meta=replace(run.meta, plan=plan))])


# At the true size.


def _wrong_from(first: int, plant: str) -> Any:
    def window(mask: mx.array, at: mx.array, columns: mx.array) -> mx.array:
        return mx.where(columns <= at - first, 1, mask)

    def coarse(cos: mx.array, sin: mx.array) -> Any:
        at = mx.arange(len(cos)).astype(mx.float16).astype(mx.int32)
        at = mx.minimum(at, len(cos) - 1)
        return cos[at], sin[at]

    def wrong(cos: mx.array, sin: mx.array) -> Any:
        at = mx.minimum(mx.arange(len(cos)), first - 1)
        return cos[at], sin[at]

    return {
        "window": faults.masked(window, when=lambda sizes: True),
        "positions in float16": faults.tables(coarse),
        "RoPE": faults.tables(wrong),
    }[plant]


@pytest.fixture(scope="module")
def true_size(tmp_path_factory: pytest.TempPathFactory) -> Made:
    n, room = 4_160, tmp_path_factory.mktemp("true")
    return made(room, models.ids(n), n - 20, num_hidden_layers=1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("plant", "start"), [("window", 4096), ("positions in float16", 2049), ("RoPE", 4096)]
)
def test_a_fault_beyond_4096_is_found_by_the_sample(
    plant: str, start: int, true_size: Made
) -> None:
    assert true_size.judged().outcome == "agree"
    with _wrong_from(4096, plant)(true_size.model, true_size.place):
        verdict = true_size.judged()

    kept = true_size.case.truth.positions
    assert (len(kept), verdict.outcome) == (193, "differ")
    assert verdict.first_wrong is not None
    assert start <= verdict.first_wrong.position <= kept[kept >= start][0]

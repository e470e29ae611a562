"""Where wrong rows begin: right for faults of any size at any place, and honest where the rows do
not show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from synthetic import (
    NOISE,
    Array,
    cache_names,
    changed,
    make_algebra,
    make_candidates,
    make_case,
    make_probe,
)

from mlxkv.commands.locate import place as locating
from mlxkv.commands.locate.outside import first_wrong
from mlxkv.judge.case import Case
from mlxkv.judge.onset import Onset, onset
from mlxkv.judge.result import Verdict
from mlxkv.judge.verdict import judge
from mlxkv.report import phrases
from oracle.formats import rows
from oracle.formats.trace import Trace

N, PROMPT, LIMIT = 300, 280, 30.0


def noise(n: int, *, heads: int = 12, seed: int = 0) -> Array:
    """What correct rows read in floors, the largest of some heads: about 1.9, up to 4."""
    drawn = np.random.default_rng(seed).standard_normal((heads, n))
    return np.asarray(np.exp(0.4 * drawn).max(0))


def begin(ratios: Array, *, gate: float = 4.0) -> Onset | None:
    value = float(np.median(ratios))
    level = value if value > gate else np.inf

    def sound(before: Array) -> bool:
        return bool(np.median(before) <= gate)

    return onset(np.arange(len(ratios)), ratios, LIMIT, level=level, sound=sound)


@pytest.mark.parametrize("start", [0, 1, 30, 150, 290])
@pytest.mark.parametrize("step", [10.0, 40.0, 1e5])
def test_a_step_in_the_error_is_found_where_it_is(start: int, step: float) -> None:
    found = []
    for seed in range(20):
        ratios = noise(N, seed=seed)
        ratios[start:] *= step
        one = begin(ratios)
        assert one is not None
        found.append(one.position - start)
        assert one.about == (ratios[one.position] <= LIMIT)
    assert found.count(0) >= 17
    assert all(-2 <= off <= 2 for off in found)


def test_a_row_above_the_median_s_limit_alone_is_no_beginning() -> None:
    ratios = noise(N)
    ratios[70], ratios[140:] = 7.0, 1e3
    assert begin(ratios) == Onset(140)
    ratios[139] = 7.0  # one alone is no evidence, even beside the fault
    assert begin(ratios) == Onset(140)


def test_one_wrong_row_is_the_first() -> None:
    ratios = noise(N)
    ratios[200] = 31.0
    assert begin(ratios) == Onset(200)
    ratios[90] = np.nan
    assert begin(ratios) == Onset(90)


def test_wrong_rows_that_are_strewn_begin_nowhere() -> None:
    ratios = noise(N)
    ratios[::5] = 20.0

    def sound(before: Array) -> bool:
        return bool(np.percentile(before, 95) <= 10)

    assert onset(np.arange(N), ratios, LIMIT, level=20.0, sound=sound) is None


def test_rows_between_two_that_were_compared_may_be_the_first() -> None:
    at, ratios = np.array([0, 1, 2, 64, 128]), np.array([1.0, 1.0, 1.0, 99.0, 99.0])
    assert onset(at, ratios, LIMIT) == Onset(64, after=2)
    assert onset(at[3:], ratios[3:], LIMIT) == Onset(64, after=-1)
    assert onset(np.array([0, 2]), ratios[2:4], LIMIT) == Onset(2, after=0)
    assert onset(at[:4], ratios[:4] / 5, LIMIT) is None


# In a verdict, a report and a place.


def off(name: str, start: int, size: float, *, stop: int = N) -> Callable[[Trace], Trace]:
    """From `start` on rows of one array are off by so many floors; of logits all positions."""

    def change(trace: Trace) -> Trace:
        at = trace.positions if name == "logits" else np.arange(N)
        wrong = ((at >= start) & (at < stop)).astype(np.float32)[:, None]
        floor = NOISE["float32"] * (1 if name == "logits" else 1 / 8)
        drawn = np.random.default_rng(5).standard_normal(trace.arrays[name].shape)
        return changed(trace, name, lambda a: (a + size * floor * wrong * drawn).astype(a.dtype))

    return change


def judged(case: Case, plan: str, *changes: Callable[[Trace], Trace]) -> tuple[Any, Verdict]:
    runs = make_candidates(case)
    for change in changes:
        runs[plan] = change(runs[plan])
    return runs, judge(case, runs)


KEYS = "kv/a/001/keys"


@pytest.mark.parametrize("plan", ["full", "step", "chunked", "mixed"])
@pytest.mark.parametrize(
    ("name", "start", "size", "words"),
    [
        (KEYS, 130, 1e4, "130"),
        (KEYS, 130, 12.0, "about 130"),
        (KEYS, 0, 1e4, "0"),
        (KEYS, 299, 1e4, "299"),
        ("kv/a/000/values", 211, 60.0, "211"),
        ("logits", 130, 1e4, "130"),
        ("logits", 130, 12.0, "about 130"),
        ("logits", 0, 12.0, "0"),  # its peak is beyond a limit of one row
    ],
)
def test_a_verdict_names_where_a_fault_begins(
    name: str, start: int, size: float, words: str, plan: str
) -> None:
    case = make_case(n=N, prompt=PROMPT)
    runs, verdict = judged(case, plan, off(name, start, size))
    found = locating.locate(case, verdict, arithmetic=runs)

    first = verdict.first_wrong
    assert first is not None
    assert (verdict.outcome, first.position, first.plan) == ("differ", start, plan)
    token = f' "{case.text(start)}"'
    assert f"first wrong position {words}{token} (plan {plan}, " in phrases.sentence(verdict)
    shown = verdict.to_json()["first_wrong"]
    assert (shown["position"], shown["about"]) == (start, words.startswith("about"))
    assert (found.position, found.to_json()["about"]) == (start, words.startswith("about"))
    if name != "logits" and 0 < start < 299 and size > 100:
        assert f"from position {start} on" in (found.hint or "")


def test_a_fault_that_only_a_percentile_shows_is_placed_in_its_layer() -> None:
    case = make_case(n=N, prompt=PROMPT)
    runs, verdict = judged(case, "step", off(KEYS, 240, 12.0))
    found = locating.locate(case, verdict, arithmetic=runs)

    assert [gate.name for gate in verdict.worst if gate.failed] == ["keys 95%"]
    assert (found.position, found.layer, found.tap) == (240, 1, "keys")
    assert "from position 240 on" in (found.hint or "")


def test_a_noisy_row_before_the_fault_is_not_named() -> None:
    case = make_case(n=N, prompt=PROMPT)
    runs, verdict = judged(case, "step", off(KEYS, 70, 7.0, stop=71), off(KEYS, 130, 1e4))
    found = locating.locate(case, verdict, arithmetic=runs)

    assert next(gate.name for gate in verdict.worst if gate.failed) == "keys median"
    assert (verdict.first_wrong and verdict.first_wrong.position, found.position) == (130, 130)
    assert "from position 130 on" in (found.hint or "")


def test_the_locator_s_rows_begin_where_the_fault_does() -> None:
    ratios = np.stack([noise(N, seed=seed) / 2 for seed in range(8)]).reshape(2, 1, 4, N)
    ratios[..., 70], ratios[..., 140:] = 7.0, 1e3
    found = first_wrong(ratios)
    assert found is not None
    assert np.array_equal(found[1].any((0, 1)), np.arange(N) >= 140)


@pytest.mark.parametrize("size", [1e4, 1e-8])
def test_of_a_sample_the_first_wrong_position_is_known_between_two(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "WHOLE", 100)
    case = make_case(n=N, prompt=PROMPT)
    kept = case.truth.positions
    gap = next(i for i in range(1, len(kept)) if kept[i] - kept[i - 1] > 5)
    before, after = int(kept[gap - 1]), int(kept[gap])
    runs, exact = make_candidates(case), make_algebra(case)
    if size > 1:
        runs["full"] = off("logits", before + 2, size)(runs["full"])
    else:
        exact["full"] = off("logits", before + 2, size / NOISE["float32"])(exact["full"])
    verdict = judge(case, runs, algebra=exact, probe=make_probe())
    found = locating.locate(case, verdict, arithmetic=runs)

    where = f'between {before + 1} and {after} "{case.text(after)}"'
    assert f"first wrong position {where} (plan full, " in phrases.sentence(verdict)
    assert verdict.first_wrong is not None
    assert (verdict.first_wrong.position, verdict.first_wrong.after) == (after, before)
    assert (found.position, found.after) == (after, before)
    # Of keys every position is compared: what they show is the more exact.
    runs["step"] = off(KEYS, before + 2, 1e4)(runs["step"])
    nearer = judge(case, runs, algebra=exact).first_wrong
    assert nearer is not None
    assert (nearer.position, nearer.after) == (before + 2, None)


def test_where_no_row_is_wrong_by_itself_none_is_named() -> None:
    case = make_case(n=N, prompt=PROMPT)
    strewn = [off(KEYS, at, 15.0, stop=at + 1) for at in range(3, N, 12)]
    _, verdict = judged(case, "step", *strewn)

    assert [gate.name for gate in verdict.worst if gate.failed] == ["keys 95%"]
    assert (verdict.outcome, verdict.first_wrong) == ("differ", None)
    assert ": no position is wrong by itself; " in phrases.sentence(verdict)


# The caches of all plans.


@pytest.mark.parametrize("plan", ["full", "chunked", "mixed"])
@pytest.mark.parametrize("name", cache_names())
def test_a_wrong_row_in_the_cache_of_any_plan_is_found(plan: str, name: str) -> None:
    case = make_case()
    runs, exact = make_candidates(case), make_algebra(case)

    def stale(a: Array) -> Array:
        a[0, 10] = a[0, 9]
        return a

    verdict = judge(case, runs | {plan: changed(runs[plan], name, stale)}, algebra=exact)
    first = verdict.first_wrong
    assert first is not None
    assert (first.position, first.plan, first.layer) == (10, plan, int(name[5:8]))
    assert {g.plan for g in verdict.gates if g.failed} == {plan}

    exactly = judge(case, runs, algebra=exact | {plan: changed(exact[plan], name, stale)})
    failed = [(g.name, g.plan, g.first) for g in exactly.gates if g.failed]
    assert failed == [("algebra, cache", plan, 10)]


def test_a_plan_whose_trace_holds_no_cache_is_listed_as_not_exercised() -> None:
    case = make_case()
    runs = make_candidates(case)

    def bare(trace: Trace) -> Trace:
        own = {name: trace.arrays[name] for name in ("logits", "positions")}
        return replace(trace, arrays=own)

    def listed(*plans: str) -> list[str]:
        without = {plan: bare(runs[plan]) for plan in plans}
        verdict = judge(case, runs | without)
        assert (verdict.outcome, "cache" in verdict.scopes) == ("agree", True)
        return [line for line in verdict.unseen if line.startswith("keys and values")]

    assert listed() == []
    assert listed("mixed") == ["keys and values of plan mixed: its trace holds none"]
    assert listed("full", "chunked", "mixed") == [
        "keys and values of plans full, chunked and mixed: their traces hold none"
    ]


def test_a_trace_of_two_plans_has_its_cache_compared_once() -> None:
    case = make_case(n=24, prompt=24)  # nothing is decoded
    runs = make_candidates(case)
    verdict = judge(case, runs | {"full": runs["step"]})
    plans = [gate.plan for gate in verdict.gates if gate.name == "keys median"]
    assert (verdict.outcome, plans) == ("agree", ["step", "chunked", "mixed"])


def test_rows_that_the_folder_does_not_keep_have_no_part_in_a_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "WHOLE", 100)
    case = make_case(n=N, prompt=PROMPT)
    kept, run = case.truth.positions, make_candidates(case)["full"]
    logits = np.zeros((N, run.logits.shape[1]), np.float32)
    logits[kept] = run.logits
    every = {"logits": logits, "positions": np.arange(N, dtype=np.int32)}
    meta = replace(run.meta, environment=dict(run.meta.environment) | {"deterministic": False})
    first = replace(run, arrays=dict(run.arrays) | every, meta=meta)
    again = replace(first, meta=replace(meta, repeat=1))
    verdict = judge(case, {"full": first}, repeats={"full": again})
    (gate,) = (gate for gate in verdict.gates if gate.name == "repeat")
    assert (verdict.outcome, gate.value, gate.limit) == ("agree", 0.0, 8.0)


def test_a_cache_of_another_shape_leaves_the_verdict_open() -> None:
    case = make_case()
    runs = make_candidates(case)
    short = changed(runs["mixed"], KEYS, lambda a: a[:, :-1])
    verdict = judge(case, runs | {"mixed": short})
    assert (verdict.outcome, verdict.scopes) == ("cannot tell", ("logits",))
    assert "kv/a/001/keys has shape [2, 23, 8], expected [2, 24, 8]" in verdict.reasons[0]

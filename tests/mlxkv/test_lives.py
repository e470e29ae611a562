"""The lives of caches: what each call should be, what a trace shows, what is made of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlxkv.commands.pitfalls import cachepage, known
from mlxkv.commands.pitfalls.caches import Caches, Column
from mlxkv.commands.pitfalls.history import Fed, Walk, twins
from mlxkv.commands.pitfalls.lives import FACTS, WHAT, Life, Talks, lives
from mlxkv.commands.pitfalls.scenarios import (
    LOSSY,
    NO,
    REFUSED,
    RIGHT,
    UNSEEN,
    WRONG,
    Setting,
)
from mlxkv.commands.pitfalls.straight import Straight, Talk, left_at, noise
from mlxkv.commands.pitfalls.trial import Came, Trial
from mlxkv.engines import kinds
from oracle.formats.errors import Inexpressible, Refusal
from oracle.formats.plan import Call, Clone, Crop, Fail, New, Pad, Plan, Recall, Reset, Trim
from oracle.formats.trace import Meta, Outcome, Trace

V = 8
ONE = tuple(range(1, 25))
OTHER = (1, 2, 3, *range(40, 61))
SETTING = Setting(ONE[:5], OTHER[:5], (*ONE[5:], 0), (*OTHER[5:], 0), 512, 20)
TALKS = {"first": ONE, "second": OTHER}
RNG = np.random.default_rng(0)
ROWS = {name: RNG.standard_normal((24, V)) for name in TALKS}
TRUTHS = {
    name: Talk(tokens, np.arange(24), ROWS[name], np.full(24, 1e-6))
    for name, tokens in TALKS.items()
}
KV, Q8 = kinds.parse("KVCache"), kinds.parse("QuantizedKVCache")


def walked(*steps: Any, failed: tuple[int, ...] = ()) -> list[tuple[int, str, tuple[int, ...]]]:
    plan = Plan("a", steps)
    return [(f.step, f.talk, f.sizes) for f in Walk(plan, TALKS, failed=failed).calls()]


def test_a_call_is_known_by_the_tokens_that_its_cache_then_holds() -> None:
    """Cut back, copied, recalled, emptied; what continues no talk says nothing."""
    new, five, two = New("a"), Call("a", ONE[:5]), Call("a", OTHER[3:5])
    assert walked(new, five, Crop("a", 3), two) == [(1, "first", (5,)), (3, "second", (3, 2))]
    assert walked(new, five, two) == [(1, "first", (5,))]
    assert walked(new, five, Trim("a", 9), Call("a", OTHER[:4]))[-1] == (3, "second", (4,))
    assert walked(new, five, Clone("a", "b"), Call("b", ONE[5:6]))[-1] == (3, "first", (5, 1))
    recalled = walked(new, five, Recall("a", "b", 3), Call("b", OTHER[3:5]), Call("a", ONE[5:6]))
    assert recalled[1:] == [(3, "second", (3, 2)), (4, "first", (5, 1))]
    assert walked(new, five, Reset("a"), Call("a", OTHER[:4]))[-1] == (3, "second", (4,))


def test_a_step_that_failed_has_changed_nothing_and_a_broken_call_leaves_nothing_known() -> None:
    new, five, on = New("a"), Call("a", ONE[:5]), Call("a", ONE[5:6])
    assert walked(new, five, Crop("a", 3), on, failed=(2,))[-1] == (3, "first", (5, 1))
    assert walked(new, five, Fail("a", ONE[5:7]), on)[-1] == (3, "first", (5, 1))
    assert walked(new, five, Fail("a", ONE[5:7]), on, failed=(2,)) == [(1, "first", (5,))]
    assert walked(new, five, on, Call("a", ONE[6:7]), failed=(2,)) == [(1, "first", (5,))]
    assert walked(new, five, Recall("a", "b", 3), Call("b", OTHER[3:5]), failed=(2,))[1:] == []


def test_a_padded_row_counts_from_its_own_first_token() -> None:
    padded = (0, 0, *OTHER[:3])
    steps = (New("a"), Pad("a", (0, 2)), Call("a", (ONE[:5], padded)), Call("a", ((6,), (40,))))
    found = list(Walk(Plan("a", steps), TALKS).calls())
    assert [(f.step, f.row, f.talk, f.start, f.end, f.left) for f in found] == [
        (2, 0, "first", 0, 5, 0),
        (2, 1, "first", 0, 3, 2),
        (3, 0, "first", 5, 6, 0),
        (3, 1, "second", 3, 4, 0),
    ]


@pytest.mark.parametrize("window", [None, 4, 10])
def test_every_life_has_calls_that_can_be_compared_at_its_end(window: int | None) -> None:
    """Also if every step but the calls is refused: what is left of it is right, or unknown."""
    talks = Talks(SETTING, tuple(range(64, 64 + 264)))
    made = lives(talks, window=window)
    assert [life.name for life in made] == [
        name
        for name in WHAT
        if name not in FACTS and (window or not name.startswith(("ends", "wide", "late")))
    ]
    for life in made:
        assert life.plan is not None
        calls = list(Walk(life.plan, talks.tokens).calls())
        assert {fed.step for fed in calls} >= {
            i for i, step in enumerate(life.plan.steps[:3]) if isinstance(step, Call)
        }
        # What is trimmed of one cache must be refused of the other to say something.
        if life.name != "more":
            assert max(fed.step for fed in calls) == len(life.plan.steps) - 1


def test_twins_are_fresh_caches_in_the_same_calls() -> None:
    new, five = New("a"), Call("a", ONE[:5])
    plans = [Plan("x", (new, five, Crop("a", 3), Call("a", OTHER[3:5]), Call("a", OTHER[5:6])))]
    found = twins(plans, TALKS, {"first": "all", "second": "all"})
    assert set(found) == {
        ("first", (5,)),
        ("second", (3,)),
        ("second", (3, 2)),
        ("second", (3, 2, 1)),
    }
    twin = found["second", (3, 2)]
    assert twin == found["second", (3, 2, 1)]
    assert [call.fed for call in twin.calls()] == [3, 2, 1]


# What a trace shows.


def lived(
    life: Life,
    *,
    off: float = 0.5,
    at: int | None = None,
    errors: dict[int, Exception] | None = None,
) -> Trace:
    """A trace of a life within half a floor of the truth; `off` floors away from step `at` on."""
    assert life.plan is not None
    errors = errors or {}
    outcomes = [
        Outcome.failed(errors[i]) if i in errors else Outcome() for i in range(len(life.plan.steps))
    ]
    rows, steps, batch = [], [], []
    noise = np.tile([1.0, -1.0], V // 2) * 1e-6
    batched = life.plan.batched
    for fed in Walk(life.plan, TALKS, failed=set(errors)).calls():
        far = off if at is not None and fed.step >= at else 0.5
        true = np.concatenate([np.zeros((fed.left, V)), ROWS[fed.talk][fed.start : fed.end]])
        rows.append(true + far * noise)
        steps += [fed.step] * len(true)
        batch += [fed.row] * len(true)
    arrays = {"logits": np.concatenate(rows), "positions": np.arange(len(steps))}
    arrays |= {"steps": np.array(steps)} | ({"batch": np.array(batch)} if batched else {})
    return Trace(Meta(life.plan, "test", "1", "float32", outcomes=outcomes), arrays)


def of(name: str) -> Life:
    return next(life for life in lives(Talks(SETTING), window=10) if life.name == name)


def came(name: str, kind: kinds.Kind = KV, own: Straight | None = None, **how: Any) -> Came:
    life, trial = of(name), Trial(kind, Talks(SETTING), None, (name,))
    assert life.plan is not None
    found = trial.judge({life.plan.name: lived(life, **how)}, TRUTHS, own)
    return found[0]


@pytest.mark.parametrize("name", ["singles", "batch", "ragged", "trim", "stored", "broken"])
def test_rows_within_the_noise_are_right_and_one_far_off_is_wrong(name: str) -> None:
    assert came(name).behaviour == RIGHT
    last = len(of(name).plan.steps) - 1  # type: ignore[union-attr]
    wrong = came(name, off=40.0, at=last)
    assert wrong.behaviour == WRONG
    assert wrong.cost == pytest.approx(40.0, rel=1e-3)
    assert f"step {last}" in wrong.where
    assert came(name, off=float("nan"), at=last).cost == np.inf


def test_an_error_is_a_refusal_or_no_call_unless_something_is_wrong() -> None:
    crop = next(i for i, s in enumerate(of("trim").plan.steps) if isinstance(s, Crop))  # type: ignore[union-attr]
    assert came("trim", errors={crop: Refusal("no")}).behaviour == REFUSED
    none = came("trim", errors={crop: Inexpressible("no trim")})
    assert (none.behaviour, none.errors) == (NO, ("cannot be expressed: no trim",))
    assert came("trim", errors={crop: Refusal("no")}, off=40.0, at=1).behaviour == WRONG


def test_a_missing_row_is_wrong() -> None:
    life = of("singles")
    trace = lived(life)
    short = replace(trace, arrays={n: a[:-1] for n, a in trace.arrays.items()})
    trial = Trial(KV, Talks(SETTING), None, ("singles",))
    found = trial.judge({"singles": short}, TRUTHS, None)[0]
    assert found.behaviour == WRONG
    assert "0 rows, expected 1" in found.where


def test_a_lossy_cache_is_measured_by_itself_in_its_own_noise() -> None:
    """Far from the truth and near itself: by design; far from both: wrong; no NaN is near."""
    far = np.tile([1.0, -1.0], V // 2) * 1e-6 * 40.0
    own = Straight({name: rows + far for name, rows in ROWS.items()}, noise=1e-6)
    assert came("singles", Q8, own).behaviour == RIGHT
    lossy = came("singles", Q8, own, off=41.0, at=1)
    assert (lossy.behaviour, lossy.apart) == (LOSSY, pytest.approx(1.0, rel=1e-3))
    wrong = came("singles", Q8, own, off=60.0, at=1)
    assert (wrong.behaviour, wrong.cost) == (WRONG, pytest.approx(20.0, rel=1e-3))
    assert came("singles", Q8, own, off=float("nan"), at=1).behaviour == WRONG


def test_what_depends_on_the_calls_is_measured_by_a_fresh_cache_in_the_same_calls() -> None:
    switched = kinds.parse("SwitchedKVCache")
    far = np.tile([1.0, -1.0], V // 2) * 1e-6 * 40.0

    def own(name: str) -> Straight:
        trial = Trial(switched, Talks(SETTING), None, (name,))
        rows = {name: one + far for name, one in ROWS.items()}
        return Straight(rows, 1e-6, {way: rows[way[0]] for way in trial.ways})

    def of_switched(name: str, off: float) -> str:
        return came(name, switched, own(name), off=off, at=1).behaviour

    assert of_switched("singles", 41.0) == UNSEEN
    assert of_switched("reset", 41.0) == LOSSY
    assert of_switched("reset", 60.0) == WRONG
    assert of_switched("nothing", 60.0) == UNSEEN  # a trim undoes no switch
    assert of_switched("singles", float("nan")) == WRONG


def test_noise_is_the_largest_distance_and_never_below_the_floor() -> None:
    rows = ROWS["first"]
    up = rows + np.tile([3.0, -3.0], V // 2)
    assert noise([rows, up, rows], np.array([1e-6])) == pytest.approx(3.0)
    assert noise([rows, rows], np.array([1e-6, 2e-6])) == 2e-6


def test_a_window_is_as_long_as_its_rows_are_the_truth() -> None:
    rows = ROWS["first"].copy()
    assert left_at(rows, TRUTHS["first"]) is None
    rows[7:] += np.tile([1.0, -1.0], V // 2)
    assert left_at(rows, TRUTHS["first"]) == 7


# What is said of itself, what is expected, and how it is shown.


@pytest.mark.parametrize(
    ("said", "behaviours"),
    [
        ({"length": 13, "rows": 13, "nbytes": 512, "allocated": 600}, (RIGHT, RIGHT)),
        ({"length": 0, "rows": 13, "nbytes": 512, "allocated": 600}, (WRONG, RIGHT)),
        ({"length": 13, "rows": 12, "nbytes": 512, "allocated": 90_000}, (WRONG, WRONG)),
        ({"length": None, "rows": None, "nbytes": None, "allocated": 5}, (NO, NO)),
    ],
)
def test_lengths_and_bytes_are_held_to_what_there_is(said: Any, behaviours: Any) -> None:
    trace = lived(of("singles"))
    trace.meta.environment["caches"] = {"a": said}
    trial = Trial(KV, Talks(SETTING), None, ("singles", *FACTS))
    found = trial.judge({"singles": trace}, TRUTHS, None)
    assert tuple(one.behaviour for one in found[1:]) == behaviours


def test_what_is_expected_of_built_in_caches_and_of_ones_own() -> None:
    concatenate, rotating = (
        kinds.parse("ConcatenateKVCache"),
        kinds.parse("RotatingKVCache:size=10"),
    )
    sinks = kinds.parse("RotatingKVCache:size=10,keep=2")
    own = kinds.Kind("x.py:make", "own", "window")
    assert known.expected(concatenate, "trim") == (WRONG,)
    assert known.expected(rotating, "chunks") == (RIGHT, LOSSY, UNSEEN)
    assert known.expected(sinks, "chunks") == (WRONG,)
    larger = kinds.parse("RotatingKVCache:size=100,keep=2")
    assert known.expected(larger, "chunks") == (WRONG, RIGHT, LOSSY, UNSEEN)
    assert WRONG not in known.expected(own, "trim")
    assert not known.odd(
        own, Came("trim", REFUSED, errors=("x.py:make: trim() failed with ValueError",))
    )
    assert known.odd(own, Came("trim", REFUSED, errors=("failed with AttributeError: no x",)))
    assert known.odd(own, Came("singles", REFUSED, errors=("no",)))
    assert known.odd(own, Came("trim", WRONG))
    assert known.finding(kinds.parse("port:mode=guarded"), "broken") is None


def test_every_name_that_is_known_is_one_that_there_is() -> None:
    for name in (*known.EVERY, *known.DOCUMENTED):
        assert name.partition(":")[0] in kinds.BUILT_IN
    for finding in known.FINDINGS:
        assert set(finding.lives) <= set(WHAT)
        assert {name.partition(":")[0] for name in finding.caches} <= set(kinds.BUILT_IN)
        assert len(finding.code.strip().splitlines()) <= 18


def page(*came: Came, name: str = "ConcatenateKVCache", more: int = 0) -> Caches:
    columns = [Column(kinds.parse(name), came, {"os": "linux"})]
    columns += [Column(kinds.parse(name), came, {"os": "linux"})] * more
    return Caches("tiny", "tiny", "f" * 64, tuple(columns))


def test_a_page_shows_what_is_not_right_with_the_lines_that_show_it() -> None:
    caches = page(
        Came("singles", RIGHT, worst=0.5, rows=13),
        Came("trim", WRONG, worst=8e5, rows=9, where="step 5, 2 tokens after 3 in cache a"),
        Came("saved", WRONG, worst=9e5, rows=9, where="step 6"),
    )
    text = cachepage.markdown(caches, commands=["mlxkv pitfalls --cache ConcatenateKVCache"])
    assert "**1 cache, 3 lives: 2 silently wrong, 1 not as expected**" in text
    assert "- news: saved on ConcatenateKVCache: silently wrong, expected right (step 6)" in text
    assert "### ConcatenateKVCache.trim forgets nothing" in text
    assert "trim_prompt_cache([cache], 3)" in text
    assert "| ConcatenateKVCache | trim | silently wrong | 8e+05 | step 5, 2 tokens after" in text
    assert text.index("forgets nothing") < text.index("### Not known before")
    assert caches.exit_code == 1
    assert caches.to_json()["surprises"] == [["ConcatenateKVCache", "saved"]] or (
        caches.to_json()["surprises"] == [("ConcatenateKVCache", "saved")]
    )


def test_a_terminal_shows_one_cache_in_words_and_many_side_by_side() -> None:
    wrong = Came("trim", WRONG, worst=8e5, rows=9, where="step 5")
    one = cachepage.console(page(wrong), report="out/caches.md").splitlines()
    assert one[2] == "trim  silently wrong  8e+05  step 5"
    many = cachepage.console(page(wrong, more=3), report="out/caches.md").splitlines()
    assert many[0] == "A  mlx-lm: ConcatenateKVCache"
    assert (
        "trim  X  X  X  X  a used cache cut back to a common prefix, another end after it" in many
    )
    assert many[-1].endswith("4 silently wrong, all as expected    report: out/caches.md")
    assert all(len(line) <= 100 for line in many)


def test_a_fed_row_says_where_it_begins() -> None:
    fed = Fed(3, 0, "first", (3, 2))
    assert (fed.start, fed.end) == (3, 5)

"""Plans: what is written is read again, what a row is, and what the judged plans exercise."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.formats import plan as plans
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, Clone, Crop, Greedy, New, Plan, Reset, judged_plans

OLD_DIGESTS = {
    "full": "389dbbe287e3a37f273718adb6b84c2d64a55f88034a94d0c72720ff8b0b49f7",
    "step": "632ba30902713a2b82d09ecbd40b083bb2ff65d6e3d793dd60e7a7d0fbf3600e",
    "prefixes": "d1262038ec75f5683ea6df3652f4e3df5dd337b1f07f5767c500a576b1078e66",
    "chunked": "e121e9fbd8d75b46140419c634bcf7bc5d31e15d8722af270836e2189402056c",
}
"""Of the plans over ids 3 to 14, 5 of them the prompt, as version 0.1 computed them."""

IDS = st.integers(0, 2**31 - 1)


def in_json(steps: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"format": "mlxkv-plan/2", "name": "p", "steps": steps} | more


@st.composite
def made_plans(draw: st.DrawFn) -> Plan:
    """A plan of one to four calls, batches or not, that keeps all rows, the last or some."""
    batch = draw(st.none() | st.integers(1, 3))
    steps, held = [], 0
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 5))
        row = st.lists(IDS, min_size=n, max_size=n).map(tuple)
        tokens = row if batch is None else st.lists(row, min_size=batch, max_size=batch).map(tuple)
        steps.append(Call("a", draw(tokens), draw(st.none() | st.just(held))))
        held += n
    some = st.sets(st.integers(0, held - 1), min_size=1).map(sorted).map(tuple)
    return Plan("p", (New("a"), *steps), draw(st.sampled_from(["all", "last"]) | some))


@given(plan=made_plans())
def test_a_plan_is_read_as_it_was_written(plan: Plan) -> None:
    again = plans.from_json(plan.to_json())
    assert (again, again.digest) == (plan, plan.digest)
    assert plan.to_json()["format"] == "mlxkv-plan/2"


@pytest.mark.parametrize(
    ("prompt", "ends"), [(1, [1, 5, 9]), (5, [5, 7, 9]), (7, [7, 8, 9]), (8, [8, 9]), (9, [9])]
)
def test_of_growing_prefixes_three_are_left_where_there_are_more(
    prompt: int, ends: list[int]
) -> None:
    made = judged_plans(range(3, 12), prompt=prompt)
    few = plans.fewer_prefixes(made["prefixes"])
    assert [(call.start, call.fed, call.keeps) for call in few.calls()] == [
        (0, end, False) for end in ends
    ]
    assert (few.rows, few == made["prefixes"]) == ("last", prompt >= 7)
    others = [plan for name, plan in made.items() if name != "prefixes"]
    assert [*map(plans.fewer_prefixes, others)] == others


@given(plan=made_plans())
def test_a_call_keeps_the_rows_that_lie_at_its_positions(plan: Plan) -> None:
    kept, end = [], 0
    for feed in plan.calls():
        end = feed.held + feed.width
        mine = plan.kept(feed)
        assert all(feed.held <= position < end for position in mine)
        assert tuple(plan.kept_of(feed.held, feed.width)) == mine
        assert len(mine) == {"all": feed.width, "last": 1}.get(str(plan.rows), len(mine))
        kept += mine
    assert plan.rows not in ("all",) or kept == list(range(end))
    assert isinstance(plan.rows, str) or tuple(kept) == plan.rows


def test_the_rows_of_greedy_tokens_lie_where_the_cache_holds_them() -> None:
    steps = (New("a"), Greedy("a", (1, 2, 3), 0, 3))
    for keeps, rows, positions in (
        (True, "all", (0, 1, 2, 3, 4)),
        (True, "last", (2, 3, 4)),
        (False, "all", (0, 1, 2, 0, 0)),  # each of its calls begins at nothing
    ):
        plan = Plan("p", (New("a", keeps), *steps[1:]), rows)  # type: ignore[arg-type]
        assert [plan.kept(feed) for feed in plan.calls()] == [positions]


def test_digests_of_plans_of_the_first_version_are_as_they_were() -> None:
    ids = list(range(3, 15))
    made = judged_plans(ids, prompt=5)
    assert {name: made[name].digest for name in OLD_DIGESTS} == OLD_DIGESTS
    for plan in made.values():
        old = plan.to_json() | {"format": "mlxkv-plan/1"}
        assert plans.from_json(old) == plan


def test_the_rows_named_change_the_digest_and_a_batch_of_one_is_another_plan() -> None:
    call = Call("a", (1, 2, 3))
    found = [Plan("p", (New("a"), call), rows).digest for rows in ("all", "last", (0,), (0, 1))]
    assert len(set(found)) == 3
    assert found[0] == found[1]
    assert Plan("p", (New("a"), Call("a", ((1, 2, 3),)))).digest not in found


def test_rows_by_position_and_greedy_steps_do_not_go_together() -> None:
    with pytest.raises(Refusal, match="beside a greedy step"):
        Plan("p", (New("a"), Greedy("a", (1, 2), 0, 2)), (0,))


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ((Call("a", ((1,), (2,))), Call("a", (3,))), r"steps\[2\]: is no batch, expected a batch"),
        ((Call("a", (3,)), Call("a", ((1,),))), r"is a batch of 1, expected no batch"),
        ((Call("a", ((1,), (2,))), Call("a", ((1,),))), "is a batch of 1, expected a batch of 2"),
        ((Call("a", ((1,), (2,))), Greedy("a", (3,), None, 2)), "is no batch"),
        ((Call("a", ((1,),)), Clone("a", "b"), Call("b", (3,))), "is no batch"),
        ((Call("a", ((1,),)), Crop("a", 0), Call("a", (3,))), "is no batch"),
    ],
)
def test_a_cache_is_fed_as_many_rows_as_it_holds(steps: Any, says: str) -> None:
    with pytest.raises(Refusal, match=says):
        Plan("p", (New("a"), *steps))


def test_an_empty_cache_takes_any_batch() -> None:
    two, three = Call("a", ((1,), (2,))), Call("a", ((1,), (2,), (3,)))
    plan = Plan("p", (New("a"), two, two, Reset("a"), three, New("b"), Clone("b", "a"), two))
    assert plan.batched
    assert [(feed.held, feed.fed, len(feed.batch)) for feed in plan.calls()] == [
        (0, 1, 2),
        (1, 1, 2),
        (0, 1, 3),
        (0, 1, 2),
    ]


@given(n=st.integers(5, 400))
def test_mixed_feeds_every_token_once_in_the_shapes_that_the_other_plans_lack(n: int) -> None:
    ids = list(range(n))
    mixed = judged_plans(ids, prompt=n)["mixed"]
    calls = [(feed.held, feed.width) for feed in mixed.calls()]
    assert [id for feed in mixed.calls() for id in feed.batch[0]] == ids
    assert any(width > held > 0 for held, width in calls)
    widths = [width for _, width in calls]
    assert any(a == 1 < b for a, b in pairwise(widths))
    assert len(calls) >= 3
    if n >= 8:
        # Three chunks, a later one after a single, and the first of several tokens.
        assert sum(width > 1 for width in widths) >= 3
        assert widths[0] == 2
    if n >= 34:
        assert widths[-2] == 1 < widths[-1] < calls[-1][0]


def test_mixed_has_the_calls_of_the_case_that_chose_them() -> None:
    assert plans.mixed_sizes(24) == [2, 6, 1, 1, 1, 3, 2, 1, 7]
    plan = judged_plans(list(range(24)), prompt=5)["mixed"]
    assert [feed.width for feed in plan.calls()] == plans.mixed_sizes(24)
    assert plan.rows == "all"


def test_a_plan_that_is_left_out_says_why() -> None:
    assert "too few" in plans.left_out(4, prompt=2)["mixed"]
    assert plans.left_out(5, prompt=2) == {}
    assert "cannot be split" in plans.left_out(9, prompt=1)["chunked"]
    assert "32896 tokens" in plans.left_out(256, prompt=1)["prefixes"]
    assert "both sides of 8" in plans.left_out(9, prompt=9, original=8)["mixed"]
    assert plans.left_out(8, prompt=8, original=8) == {}
    for n, prompt, original in ((4, 2, None), (9, 1, None), (300, 5, None), (9, 9, 8)):
        made = judged_plans(list(range(n)), prompt=prompt, original=original)
        without = plans.left_out(n, prompt=prompt, original=original)
        assert {*made, *without} == {"full", "step", "prefixes", "chunked", "mixed"}
        assert not set(made) & set(without)


@given(vocab=st.integers(1, 300_000), context=st.integers(1, 5000))
def test_the_probe_spans_the_vocabulary(vocab: int, context: int) -> None:
    ids = plans.probe_tokens(vocab, context)
    assert ids == plans.probe_tokens(vocab, context)
    assert len(ids) == min(300, context)
    assert all(0 <= id < vocab for id in ids)
    assert 0 in ids
    assert vocab - 1 in ids or context == 1
    # One id of each of equal parts: no wide gap between neighbours.
    ordered = sorted(ids)
    gaps = [b - a for a, b in pairwise(ordered)]
    assert max(gaps, default=0) <= 2 * -(-vocab // len(ids))


def test_the_probe_has_odd_and_even_ids_and_is_in_no_order() -> None:
    ids = plans.probe_tokens(49152, 2048)
    assert 100 < sum(id % 2 for id in ids) < 200
    assert 100 < sum(a < b for a, b in pairwise(ids)) < 200
    assert sum(id > 32_767 for id in ids) == 100


@given(n=st.integers(2, 300))
def test_the_probes_plans_feed_it_in_two_ways_and_keep_a_sample(n: int) -> None:
    full, chunked = (plans.probe_plans(list(range(n)))[name] for name in ("full", "chunked"))
    assert [feed.width for feed in full.calls()] == [n]
    widths = [feed.width for feed in chunked.calls()]
    assert sum(widths) == n
    assert min(widths) == 1
    assert full.rows == chunked.rows
    ends = {end - 1 for end in accumulate(widths)}
    assert {0, n - 1, *ends} <= set(full.rows)
    assert len(full.rows) <= 60


def test_the_probe_of_300_is_fed_as_agreed() -> None:
    assert plans.probe_sizes(300) == [250, *[1] * 10, 40]
    rows = plans.probe_rows(300)
    assert {*range(8), 31, 32, 33, 63, 65, 127, 129, *range(249, 263), 298, 299} <= set(rows)
    assert len(rows) == 57


@pytest.mark.parametrize("n", range(1, 80))
def test_the_probes_calls_feed_each_token_once(n: int) -> None:
    sizes = plans.probe_sizes(n)
    assert sum(sizes) == n
    assert min(sizes) >= 1

"""The scenarios are the page's experiments, and candle's own plans where it has them.

Prompts that would show nothing are refused.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from candle_goldens import goldens

from mlxkv.commands.pitfalls.scenarios import (
    NO,
    OTHER_CACHES,
    SYSTEMS,
    Scenario,
    Setting,
    scenarios,
    talks,
)
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, Greedy, New, Plan, Reset

PAGE = Setting(
    first=(504, 3575, 282, 4649, 314),
    second=(504, 3575, 282, 4521, 314),
    right=(
        7042,
        30,
        198,
        198,
        504,
        2988,
        314,
        42,
        216,
        34,
        32,
        33,
        40,
        29,
        32,
        33,
        29,
        34,
        34,
        216,
    ),
    other=tuple(range(100, 120)),
    limit=8192,
    steps=20,
)


def named(setting: Setting = PAGE) -> dict[str, Scenario]:
    return {s.name: s for s in scenarios(setting)}


def test_all_of_the_pages_experiments_are_there_in_its_order() -> None:
    order = [
        "greedy",
        "pos0",
        "cached",
        "chunked",
        "mask",
        "reuse",
        "reuse1",
        "far",
        "branch",
        "crop",
        "dtype",
        "nocache",
    ]
    ours = ["by_calls", "quantized", "nocache1", "reset", "turns", "batch"]
    assert [s.name for s in scenarios(PAGE)] == [*order, *ours]


@pytest.mark.parametrize(
    "ours", ["cached", "nocache", "chunked", "pos0", "by_calls", "reuse", "far", "branch"]
)
def test_the_port_in_candles_mode_is_asked_what_candle_was_asked(ours: str) -> None:
    (golden,) = (g for g in goldens("smollm2") if g.name == ours.replace("_", "-"))
    plan = named()[ours].plans["C"]
    assert isinstance(plan, Plan)
    assert plan.digest == golden.plan.digest


def test_reuse1_and_nocache1_begin_as_candles_do() -> None:
    by_name = {g.name: g.plan for g in goldens("smollm2")}
    reuse1, nocache1 = (named()[name].plans["C"] for name in ("reuse1", "nocache1"))
    assert isinstance(reuse1, Plan)
    assert isinstance(nocache1, Plan)
    assert reuse1.steps == by_name["reuse1"].steps[:3]
    assert nocache1.steps == by_name["nocache-by-one"].steps[: len(nocache1.steps)]


def test_every_system_has_a_plan_or_a_reason_and_every_aim_a_step() -> None:
    known = set(talks(PAGE))
    for scenario in scenarios(PAGE):
        assert list(scenario.plans) == list(scenario.expected)
        assert set(SYSTEMS) <= set(scenario.plans) <= {*SYSTEMS, *OTHER_CACHES}
        for system, plan in scenario.plans.items():
            assert (scenario.expected[system] == NO) == isinstance(plan, str)
            if isinstance(plan, Plan):
                own = f"-{system}" if system in OTHER_CACHES else ""
                assert plan.name == f"{scenario.name}{own}"
                assert plan.rows == "last"
                aimed = [
                    plan.steps[aim.step] for aim in scenario.aims if aim.step < len(plan.steps)
                ]
                assert aimed
                assert all(isinstance(step, Call | Greedy) for step in aimed)
        assert {aim.talk for aim in scenario.aims} <= known
        for cache in set(scenario.plans) - set(SYSTEMS):
            plan, usual = scenario.plans[cache], scenario.plans["L"]
            assert isinstance(plan, Plan)
            assert isinstance(usual, Plan)
            assert plan.digest == usual.digest


def test_transformers_and_mlx_lm_are_never_told_a_position_that_their_caches_do_not_give() -> None:
    for scenario in scenarios(PAGE):
        for system in ("T", "L"):
            plan = scenario.plans[system]
            for i, step in enumerate(plan.steps if isinstance(plan, Plan) else ()):
                if isinstance(step, Greedy):
                    assert step.index_pos in (None, 0, PAGE.common)
                    assert step.index_pos != 0 or isinstance(plan.steps[i - 1], New | Reset)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"second": PAGE.first}, "share their first 5 of 5 and 5 tokens"),
        ({"second": (9, 3575, 282, 4521, 314)}, "share their first 0 of 5 and 5 tokens"),
        ({"second": (504, 3575, 282)}, "share their first 3 of 5 and 3 tokens"),
        ({"first": (504, 1), "second": (504, 2)}, "share their first 1 of 2 and 2 tokens"),
        ({"steps": 2}, "--steps 2: expected at least 3"),
    ],
)
def test_prompts_that_would_show_nothing_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(Refusal, match=said):
        scenarios(replace(PAGE, **changes))  # type: ignore[arg-type]

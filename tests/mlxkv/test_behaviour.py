"""What is called right, silently wrong, refused, inexpressible: on rows whose answer is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlxkv.commands.pitfalls import page as pages
from mlxkv.commands.pitfalls.behaviour import Matrix, Right, Seen, watch
from mlxkv.commands.pitfalls.scenarios import (
    NO,
    OTHER_CACHES,
    REFUSED,
    RIGHT,
    SYSTEMS,
    WRONG,
    Aim,
    Scenario,
)
from oracle.formats.errors import Inexpressible, Refusal
from oracle.formats.plan import Call, Greedy, New, Plan
from oracle.formats.trace import Meta, Outcome, Trace

V, PROMPT, N = 16, (3, 1, 4), 5
RNG = np.random.default_rng(0)
TRUTH = RNG.standard_normal((len(PROMPT) + N - 1, V))
FLOOR = np.full(len(TRUTH), 1e-6)
TOKENS = tuple(int(t) for t in TRUTH[len(PROMPT) - 1 :].argmax(1))
TALKS = {"first": Right(PROMPT, TOKENS, TRUTH, FLOOR)}
PLAN = Plan("greedy", (New("a"), Greedy("a", PROMPT, 0, N)), "last")

BRANCHES = {"context_tokens": 8, "dtype": "float32", "branches": 2, "steps": 3} | dict.fromkeys(
    ("rows", "buffers", "birth", "first_write", "active", "peak"), 1024
)


def scenario(plan: Plan = PLAN, *aims: Aim, **more: Any) -> Scenario:
    systems = (*SYSTEMS, *more.pop("others", ()))
    plans: dict[str, Plan | str] = dict.fromkeys(systems, plan)
    expected = dict.fromkeys(systems, RIGHT)
    return Scenario("greedy", "a test", plans, aims or (Aim(1, "first"),), expected, **more)


def run(
    tokens: tuple[int, ...] = TOKENS,
    *,
    off: dict[int, float] | None = None,
    error: Exception | None = None,
    rows: int = N,
) -> Trace:
    """A run of PLAN within half a floor of the truth, `off` floors away in the rows given."""
    size = np.full(N, 0.5)
    for row, floors in (off or {}).items():
        size[row] = floors
    noise = np.tile([1.0, -1.0], V // 2)[None] * size[:, None] * FLOOR[0]
    logits = (TRUTH[len(PROMPT) - 1 :] + noise)[:rows]
    arrays = {"logits": logits, "positions": np.arange(2, 2 + rows), "steps": np.full(rows, 1)}
    chosen = list(tokens) or None
    ended = Outcome.failed(error, chosen) if error else Outcome(chosen)
    return Trace(Meta(PLAN, "test", "1", "float32", outcomes=[Outcome(), ended]), arrays)


def see(trace: Trace, given: Scenario | None = None) -> Seen:
    return watch(given or scenario(), RIGHT, trace, TALKS)


def test_rows_within_the_noise_are_right() -> None:
    seen = see(run())
    assert (seen.behaviour, seen.documented, seen.cost) == (RIGHT, True, None)
    (part,) = seen.parts
    assert part.sigma == pytest.approx(0.5, rel=1e-3)
    assert (part.rows, part.parted) == (N, None)


def test_rows_decide_and_not_tokens() -> None:
    """All tokens right, one row 40 floors away; a token that parts at a tie, all rows right."""
    seen = see(run(off={2: 40.0}))
    assert (seen.behaviour, seen.documented) == (WRONG, False)
    assert seen.cost == pytest.approx(40, rel=1e-3)
    parted = (*TOKENS[:-1], TOKENS[-1] + 1)
    assert see(run(parted)).behaviour == RIGHT
    assert see(run(parted)).parts[0].parted == N - 1


def test_rows_after_another_token_are_not_compared() -> None:
    """They continue another text, so the truth of this one says nothing about them."""
    other = (TOKENS[0], TOKENS[1] + 1, *TOKENS[2:])
    seen = see(run(other, off={2: 1e6, 3: 1e6}))
    assert (seen.behaviour, seen.parts[0].rows, seen.parts[0].parted) == (RIGHT, 2, 1)
    assert see(run(other, off={1: 1e6})).behaviour == WRONG


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_wrong(bad: float) -> None:
    trace = run()
    trace.logits[1, 3] = bad
    seen = see(trace)
    assert (seen.behaviour, seen.cost) == (WRONG, float("inf"))


def test_an_error_is_a_refusal_unless_rows_before_it_were_wrong() -> None:
    assert see(run((), error=Refusal("cache: full"), rows=0)).behaviour == REFUSED
    # The kind decides, not the words.
    assert see(run((), error=Refusal("cannot be expressed"), rows=0)).behaviour == REFUSED
    assert see(run((), error=Inexpressible("index_pos 0"), rows=0)).behaviour == NO
    assert see(run(TOKENS[:2], error=Refusal("cache: full"), rows=2)).behaviour == REFUSED
    assert (
        see(run(TOKENS[:2], error=Refusal("cache: full"), rows=2, off={1: 1e3})).behaviour == WRONG
    )


def test_no_row_and_no_error_is_not_right() -> None:
    assert see(run((), rows=0)).behaviour == WRONG


def test_the_worst_part_decides_and_a_step_that_the_plan_lacks_is_left_out() -> None:
    plan = Plan("two", (New("a"), Call("a", PROMPT[:2], 0), Call("a", PROMPT[2:], 2)), "last")
    arrays = {"logits": TRUTH[1:3].copy(), "positions": np.array([1, 2]), "steps": np.array([1, 2])}
    trace = Trace(Meta(plan, "test", "1", "float32", outcomes=[Outcome()] * 3), arrays)
    given = scenario(plan, Aim(1, "first"), Aim(2, "first", 2), Aim(3, "first"))
    assert [p.behaviour for p in see(trace, given).parts] == [RIGHT, RIGHT]
    trace.logits[1] += np.tile([1.0, -1.0], V // 2)
    assert see(trace, given).behaviour == WRONG


def test_what_a_cache_held_and_its_masks_are_kept() -> None:
    trace = run()
    kept = {
        f"kv/a/{i:03d}/{kind}": np.zeros((2, 7, 4), np.float32)
        for i in range(3)
        for kind in ("keys", "values")
    }
    trace = replace(
        trace, arrays={**trace.arrays, **kept, "mask/a/1x3": np.array([[0, 0, 1]], np.uint8)}
    )
    seen = see(trace, scenario(shows_mask=True))
    assert [(h.cache, h.layers, h.shape, h.bytes) for h in seen.held] == [
        ("a", 3, (1, 2, 7, 4), 2 * 3 * 2 * 7 * 4 * 4)
    ]
    assert seen.masks == (((0, 0, 1),),)
    assert see(trace).masks == ()


def test_what_is_not_as_documented_is_said_first() -> None:
    given = scenario(others=OTHER_CACHES)
    seen = {("greedy", system): see(run()) for system in (*SYSTEMS, *OTHER_CACHES)}
    seen["greedy", "T"] = see(run(off={2: 40.0}))
    matrix = Matrix(
        model="tiny",
        source="x",
        fingerprint="f",
        scenarios=(given,),
        seen=seen,
        rights=TALKS,
        environments={"T": {"os": "Linux"}},
        branches=BRANCHES,
        comparable=False,
        text=lambda before, ids: "|".join(map(str, [len(before), *ids])),
    )
    text = pages.console(matrix, report="x/pitfalls.md")
    assert (
        "news: greedy on transformers, DynamicCache: silently wrong, documented is right\n" in text
    )
    assert text.endswith("1 of 6 did not behave as documented    report: x/pitfalls.md\n")
    page = pages.markdown(matrix, commands=["mlxkv pitfalls"])
    assert page.startswith(
        "# Pitfalls: tiny\n\n**1 of 6 did not behave as documented**\n\n- greedy on transformers"
    )
    assert "**silently wrong** (documented: right)" in page
    for talk in TALKS.values():  # a continuation's text is that after its prompt
        assert f'"{len(talk.prompt)}\\|{talk.tokens[0]}' in page
    assert all(
        line.count("|") - line.count("\\|") == 7
        for line in page.splitlines()
        if line.startswith("| [greedy]")
    )

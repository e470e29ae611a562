"""What is admitted, distances from the truth, the floors, distances between two traces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal, getcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import (
    NOISE,
    PROMPT,
    VOCAB,
    Array,
    N,
    changed,
    make_candidates,
    make_case,
    meta,
    plans,
    rows,
)

from mlxkv.commands.compare.delta import delta
from mlxkv.judge import measure as measuring
from mlxkv.judge import walk as walking
from mlxkv.judge.admission import asked, by_plan, cache_reasons, case_reasons, trace_reasons
from mlxkv.judge.case import Case, read_case
from mlxkv.judge.delta import Figures, figures, page_tables, pair, three_way
from mlxkv.judge.floors import logit_floors
from mlxkv.judge.measure import (
    cache_errors,
    difference,
    largest_error,
    measure,
    truth_rows,
    ulp,
)
from mlxkv.judge.result import plain
from mlxkv.report.phrases import figure_cells
from mlxkv.report.text import number, ordered
from oracle.formats import disk, run_folder
from oracle.formats import trace as trace_file
from oracle.formats.errors import Refusal
from oracle.formats.plan import fewer_prefixes
from oracle.formats.run_folder import SEQUENTIAL, Pool
from oracle.formats.tensors import writer
from oracle.formats.trace import Trace

CASE = make_case()
STEP = make_candidates(CASE)["step"]
ALL = list(range(N))


def small(
    logits: list[list[float]], positions: list[int] | None = None, *, dtype: str = "float32"
) -> Trace:
    """A trace of plan full with these logits."""
    stored = np.array(logits, np.float64 if dtype == "float64" else np.float32)
    at = np.arange(len(logits)) if positions is None else np.array(positions)
    return Trace(
        meta(plans()["full"], dtype=dtype), {"logits": stored, "positions": at.astype(np.int32)}
    )


BAD: dict[str, tuple[Callable[[Trace], Trace], str]] = {
    "a missing row": (
        lambda t: rows(t, [p for p in ALL if p != 9]),
        "no row for position 9, expected 20 rows",
    ),
    "a row twice": (lambda t: rows(t, [*ALL, 7]), "more than one row for position 7, expected one"),
    "a row beyond the sequence": (
        lambda t: changed(t, "positions", lambda a: np.append(a[:3] + N, a[3:])),
        "a row for position 24, 25, 26",
    ),
    "other weights": (
        lambda t: replace(t, meta=replace(t.meta, fingerprint="0" * 64)),
        "weights fingerprint is 0000000000000000, expected ffff",
    ),
    "another plan": (
        lambda t: replace(t, meta=replace(t.meta, plan=plans()["full"])),
        "plan digest is",
    ),
    "another dtype": (
        lambda t: replace(t, meta=replace(t.meta, dtype="float16")),
        "dtype is 'float16', expected 'float32'",
    ),
    "a vocabulary one short": (
        lambda t: changed(t, "logits", lambda a: a[:, :-1]),
        "logits have 63 columns, expected 64",
    ),
    "no rows": (lambda t: rows(t, []), "no row for position 4, 5, 6, 7, 8, 9 and 14 more"),
    "fewer positions than rows": (
        lambda t: changed(t, "positions", lambda a: a[:-1]),
        "logits [24, 64] and positions [23] do not pair up",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_what_cannot_be_compared_is_named(fault: str) -> None:
    change, expected = BAD[fault]
    reasons = trace_reasons(change(STEP), "step", CASE, dtype="float32")
    assert expected in " / ".join(reasons)
    assert all("\n" not in reason for reason in reasons)


def test_every_correct_run_is_admitted_and_one_that_does_not_declare_its_weights() -> None:
    undeclared = replace(STEP, meta=replace(STEP.meta, fingerprint=None))
    assert [
        trace_reasons(t, name, CASE, dtype="float32") for name, t in make_candidates(CASE).items()
    ] == [
        [],
        [],
        [],
        [],
        [],
    ]
    assert trace_reasons(undeclared, "step", CASE, dtype="float32") == []


def test_rows_of_the_last_tokens_are_enough_and_for_chunked_the_earlier_chunks_end_too() -> None:
    chunked = make_candidates(CASE)["chunked"]
    assert trace_reasons(rows(STEP, ALL[PROMPT - 1 :]), "step", CASE, dtype="float32") == []
    assert (
        trace_reasons(rows(chunked, [2, *ALL[PROMPT - 1 :]]), "chunked", CASE, dtype="float32")
        == []
    )
    assert (
        "no row for position 2"
        in trace_reasons(rows(chunked, ALL[PROMPT - 1 :]), "chunked", CASE, dtype="float32")[0]
    )
    assert asked(plans()["chunked"]) == {2, *range(4, 24)}


def test_a_failed_step_is_named_beside_the_rows_that_it_cost() -> None:
    outcomes = [trace_file.Outcome(), trace_file.Outcome(error="out of memory")]
    failed = replace(rows(STEP, ALL[:9]), meta=replace(STEP.meta, outcomes=outcomes))
    assert trace_reasons(failed, "step", CASE, dtype="float32")[0].endswith(
        "expected 20 rows; its step 1 failed: out of memory"
    )


def test_a_float64_run_stored_in_float32_is_refused() -> None:
    assert (
        "stored as float32, expected float64"
        in trace_reasons(
            replace(STEP, meta=replace(STEP.meta, dtype="float64")), "step", CASE, dtype="float64"
        )[0]
    )


def test_a_plan_that_is_not_judged_is_named() -> None:
    assert (
        "plan 'greedy' is not judged here, expected one of chunked, full, mixed, prefixes, step"
        in trace_reasons(STEP, "greedy", CASE, dtype="float32")[0]
    )


def test_traces_find_their_plan_by_digest_whatever_they_call_it() -> None:
    cached = replace(STEP, meta=replace(STEP.meta, plan=replace(plans()["step"], name="cached")))
    assert by_plan(CASE.manifest, [cached]) == {"step": cached}
    with pytest.raises(Refusal, match="a second trace of plan 'step'"):
        by_plan(CASE.manifest, [cached, STEP])
    with pytest.raises(Refusal, match="expected one of chunked"):
        by_plan(CASE.manifest, [replace(STEP, meta=replace(STEP.meta, plan=plans(8)["step"]))])


def fewer(trace: trace_file.Trace, dtype: str) -> trace_file.Trace:
    """The run of the first, the middle and the last of the growing prefixes alone."""
    few = fewer_prefixes(trace.meta.plan)
    made = rows(trace, np.flatnonzero(np.isin(trace.positions, sorted(asked(few)))))
    arrays = {n: a.astype(np.float64) if n == "logits" else a for n, a in made.arrays.items()}
    return replace(made, arrays=arrays, meta=replace(made.meta, plan=few, dtype=dtype))


def test_fewer_of_the_growing_prefixes_serve_in_float64_alone() -> None:
    run = make_candidates(CASE)["prefixes"]
    few = fewer(run, "float64")
    assert len(few.positions) == 3 < len(run.positions)
    assert by_plan(CASE.manifest, [few]) == {"prefixes": few}
    assert trace_reasons(few, "prefixes", CASE, dtype="float64") == []
    assert (
        "no row for position"
        in (trace_reasons(rows(few, [0, 1]), "prefixes", CASE, dtype="float64")[0])
    )
    assert (
        "plan digest is"
        in (trace_reasons(fewer(run, "float32"), "prefixes", CASE, dtype="float32")[0])
    )
    with pytest.raises(Refusal, match="expected one of chunked"):
        by_plan(CASE.manifest, [fewer(run, "float32")])


def test_full_and_step_coincide_where_nothing_is_decoded() -> None:
    case = make_case(n=5, prompt=5)
    trace = make_candidates(case)["full"]
    assert by_plan(case.manifest, [trace]) == {"full": trace, "step": trace}


def test_keys_and_values_are_matched_both_ways() -> None:
    fewer = replace(STEP, arrays={k: a for k, a in STEP.arrays.items() if k != "kv/a/001/keys"})
    more = replace(STEP, arrays=dict(STEP.arrays) | {"kv/a/002/keys": STEP.arrays["kv/a/001/keys"]})
    short = changed(STEP, "kv/a/001/values", lambda a: a[:, :-1])
    assert cache_reasons(STEP, CASE.truth) == []
    assert [r.split(": ", 1)[1] for r in cache_reasons(fewer, CASE.truth)] == [
        "no kv/a/001/keys, expected it as in truth trace of plan 'full'"
    ]
    assert [r.split(": ")[0] for r in cache_reasons(more, CASE.truth)] == [
        "truth trace of plan 'full'"
    ]
    assert (
        "kv/a/001/values has shape [2, 23, 8], expected [2, 24, 8]"
        in cache_reasons(short, CASE.truth)[0]
    )


BAD_CASES: dict[str, tuple[Callable[[Case], Case], str]] = {
    "members without the held-out one": (
        lambda c: replace(c, pool=Pool(["a", "b", "c", "d", "e"], c.pool.kinds, 5)),
        "members are a, b, c, d, e, expected eager-full, eager-step, sdpa-full, sdpa-step, ",
    ),
    "a member twice": (
        lambda c: replace(c, pool=Pool([*c.pool.members[1:], "sdpa-full"], c.pool.kinds, 5)),
        "sdpa-chunked, sequential-full, sdpa-full, expected eager-full, eager-step, ",
    ),
    "floors of fewer positions": (
        lambda c: replace(c, floors=dict(c.floors) | {"peak": c.floors["peak"][:, 1:]}),
        "peak has shape [6, 23], expected [6, 24]",
    ),
    "floors that are not finite": (
        lambda c: replace(c, floors=dict(c.floors) | {"rms": c.floors["rms"] * np.nan}),
        "rms holds a value that is not finite",
    ),
    "no floors of keys": (
        lambda c: replace(c, floors={k: a for k, a in c.floors.items() if k != "keys"}),
        "keys has shape none, expected [6, 2, 2, 24]",
    ),
    "no reference": (
        lambda c: replace(c, references={"full": c.references["full"]}),
        "no reference-step.safetensors, expected one for each plan",
    ),
    "truth of other weights": (
        lambda c: replace(
            c, truth=replace(c.truth, meta=replace(c.truth.meta, fingerprint="0" * 64))
        ),
        "fingerprint is 0000000000000000",
    ),
    "truth in another order": (
        lambda c: replace(c, truth=rows(c.truth, ALL[::-1])),
        "positions is [23, 22, 21",
    ),
    "truth of half a layer": (
        lambda c: replace(
            c,
            truth=replace(
                c.truth, arrays={k: a for k, a in c.truth.arrays.items() if k != "kv/a/000/values"}
            ),
        ),
        "kv/a/000/values is missing of 1 layers",
    ),
    "an unknown dtype": (
        lambda c: replace(c, manifest=replace(c.manifest, dtype="int8")),
        "dtype is 'int8', expected one of float32",
    ),
}


@pytest.mark.parametrize("fault", BAD_CASES)
def test_an_oracle_folder_that_cannot_serve_is_named(fault: str) -> None:
    change, expected = BAD_CASES[fault]
    assert expected in " / ".join(case_reasons(change(CASE)))
    assert case_reasons(CASE) == []


def test_rms_and_peak_are_about_the_shift_and_the_shift_is_the_mean() -> None:
    truth = small([[0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]], dtype="float64")
    run = measure(small([[3.0, 5.0, 3.0, 5.0], [1.0, 2.0, 3.0, 8.0]]), truth)
    assert run.positions.tolist() == [0, 1]
    assert run.shift.tolist() == [4.0, 1.0]
    assert run.rms.tolist() == [1.0, np.sqrt(3.0)]
    assert run.peak.tolist() == [1.0, 3.0]
    assert run.best.tolist() == [1, 3]
    assert measure(small([[0.0] * 4, [1.0, 2.0, 3.0, 4.0]]), truth, scale=3.0).rms.tolist() == [
        0.0,
        np.sqrt(5.0),
    ]


@given(order=st.permutations(ALL))
@settings(max_examples=20, deadline=None)
def test_the_order_of_rows_in_a_file_does_not_matter(order: list[int]) -> None:
    mixed, straight = measure(rows(STEP, order), CASE.truth), measure(STEP, CASE.truth)
    for name in ("positions", "rms", "shift", "peak", "best"):
        np.testing.assert_array_equal(getattr(mixed, name), getattr(straight, name))
    assert pair(rows(STEP, order), CASE.references["full"], CASE.rows) == pair(
        STEP, CASE.references["full"], CASE.rows
    )
    truth = truth_rows(CASE.truth)
    assert figures(rows(STEP, order), CASE.truth, truth, plan="step").rms == pytest.approx(
        figures(STEP, CASE.truth, truth, plan="step").rms
    )


@given(shift=st.integers(-64, 64), row=st.integers(0, N - 1))
@settings(max_examples=20, deadline=None)
def test_a_common_shift_of_a_row_is_all_in_its_shift(shift: int, row: int) -> None:
    exact = replace(
        CASE.truth, meta=STEP.meta
    )  # float64 logits, so that adding the shift rounds next to nothing
    moved = measure(
        changed(exact, "logits", lambda a: a + shift * (np.arange(N) == row)[:, None]), CASE.truth
    )
    assert moved.shift[row] == pytest.approx(shift, abs=1e-12)
    assert moved.rms.max() < 1e-13
    assert moved.peak.max() < 1e-13


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_spoils_its_own_row_only(bad: float) -> None:
    def spoil(a: Array) -> Array:
        a[7, 3] = bad
        return a

    run = measure(changed(STEP, "logits", spoil), CASE.truth)
    assert np.flatnonzero(~run.finite).tolist() == [7]


def test_a_long_trace_is_measured_in_blocks_to_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, table = measure(STEP, CASE.truth), pair(STEP, CASE.references["full"], CASE.rows)
    shown = figures(STEP, CASE.truth, truth_rows(CASE.truth), plan="step")
    monkeypatch.setattr(walking, "_BLOCK", 5 * VOCAB)
    np.testing.assert_array_equal(measure(STEP, CASE.truth).rms, whole.rms)
    np.testing.assert_array_equal(
        truth_rows(CASE.truth).margin, np.diff(np.sort(CASE.truth.logits)[:, -2:])[:, 0]
    )
    again = pair(STEP, CASE.references["full"], CASE.rows)
    assert replace(again, rms=table.rms) == table
    assert again.rms == pytest.approx(table.rms, rel=1e-12)
    assert figures(STEP, CASE.truth, truth_rows(CASE.truth), plan="step").kl == pytest.approx(
        shown.kl, rel=1e-9
    )


def test_cached_against_uncached_is_not_centred_and_over_common_positions() -> None:
    a, b = small([[1.0, 1.0], [2.0, 2.0], [9.0, 1.0]]), small([[5.0, 4.0], [0.0, 0.0]], [2, 0])
    at, rms = difference(a, b)
    assert at.tolist() == [0, 2]
    assert rms.tolist() == [1.0, np.sqrt(12.5)]


def test_cache_errors_keep_kind_layer_head_and_position_apart() -> None:
    def move(a: Array) -> Array:
        a[1, 9, 2] += 4.0
        return a

    exact = replace(CASE.truth, meta=STEP.meta)
    moved = changed(exact, "kv/a/001/values", move)
    rms = cache_errors(moved, CASE.truth)
    worst = cache_errors(moved, CASE.truth, measuring.worst_over)
    assert rms.shape == (2, 2, 2, N)
    assert [tuple(i) for i in np.argwhere(rms > 0).tolist()] == [(1, 1, 1, 9)]
    assert rms[1, 1, 1, 9] == pytest.approx(4 / np.sqrt(8))
    assert worst[1, 1, 1, 9] == pytest.approx(4.0)


@given(value=st.floats(2.0**-100, 2.0**100, width=32))
def test_an_ulp_is_numpys_spacing(value: float) -> None:
    assert ulp(np.array([value]), "float32")[0] == np.spacing(np.float32(value))
    if 1e-4 < value < 6e4 and np.isfinite(np.float16(value)):
        rounded = np.array([float(np.float16(value))])
        assert ulp(rounded, "float16")[0] == np.spacing(np.float16(value))


def test_the_ulps_of_38_in_the_three_dtypes() -> None:
    assert [ulp(np.array([38.246]), dtype)[0] for dtype in ("float32", "float16", "bfloat16")] == [
        2.0**-18,
        2.0**-5,
        2.0**-2,
    ]
    assert ulp(np.array([0.0]), "float32")[0] == np.spacing(np.float32(0))


def flat_floors(**spikes: tuple[int, int, float]) -> Case:
    """A case whose raw errors are 1 everywhere but at the given (member, position)."""
    floors = {name: np.ones(CASE.floors[name].shape) for name in ("rms", "peak", "shift", "cached")}
    for name, (member, position, value) in spikes.items():
        floors[name][member, position] = value
    return replace(CASE, floors=dict(CASE.floors) | floors)


def test_a_floor_looks_eight_positions_to_either_side() -> None:
    floors = logit_floors(
        flat_floors(
            rms=(0, 10, 11.0), peak=(0, 10, 7.0), shift=(0, 10, -11.0), cached=(0, 10, 5.0)
        ),
        truth_rows(CASE.truth),
    )
    near = np.abs(np.arange(N) - 10) <= 8
    window = np.array([min(N - 1, p + 8) - max(0, p - 8) + 1 for p in range(N)])
    assert floors.peak.tolist() == np.where(near, 7.0, 1.0).tolist()
    wide = np.where(near, np.sqrt((5 * window + 120) / (5 * window)), 1.0)
    own = np.where(np.arange(N) == 10, np.sqrt((4 + 121) / 5), 0.0)
    np.testing.assert_allclose(floors.shift, np.maximum(own, wide))
    apart = np.where(near, np.sqrt((2 * window + 24) / (2 * window)), 1.0)
    np.testing.assert_allclose(floors.cached, np.maximum(apart, floors.rms))
    np.testing.assert_allclose(floors.rms, np.maximum(own, wide))


def test_a_pool_whose_runs_share_their_kernels_does_not_say_that_others_do() -> None:
    """Cached and uncached runs of torch may be the same bit for bit; each is off all the same."""
    truth, same = truth_rows(CASE.truth), np.zeros_like(CASE.floors["cached"])
    found = logit_floors(replace(CASE, floors=dict(CASE.floors) | {"cached": same}), truth)
    ordinary = logit_floors(CASE, truth, without=SEQUENTIAL)
    assert np.array_equal(found.cached, ordinary.rms)


def sampled(keep: list[int]) -> Case:
    """The case with only these rows of the truth, and a column of floors for each."""
    floors = {
        name: a if name in ("keys", "values") else a[:, keep] for name, a in CASE.floors.items()
    }
    return replace(CASE, truth=rows(CASE.truth, keep), floors=floors)


def rms_of(errors: Array) -> float:
    return float(np.sqrt((errors**2).mean()))


samples = st.lists(st.sampled_from(ALL), min_size=1, unique=True).map(sorted)


@given(keep=samples, order=st.permutations(ALL))
@settings(max_examples=40, deadline=None)
def test_a_sample_of_rows_gives_the_same_errors_at_the_same_positions(
    keep: list[int], order: list[int]
) -> None:
    part, run = sampled(keep), rows(STEP, order)
    found, whole = measure(run, part.truth), measure(STEP, CASE.truth)
    assert (found.positions.tolist(), found.rows.tolist()) == (keep, list(range(len(keep))))
    for name in ("rms", "shift", "peak", "best"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name)[keep])
    at, largest = largest_error(run, part.truth)
    assert at.tolist() == keep
    np.testing.assert_array_equal(largest, largest_error(STEP, CASE.truth)[1][keep])
    np.testing.assert_array_equal(
        truth_rows(part.truth).margin, truth_rows(CASE.truth).margin[keep]
    )
    assert part.rows == [p for p in keep if p >= PROMPT - 1]


@given(keep=samples)
@settings(max_examples=40, deadline=None)
def test_floors_of_a_sample_look_at_the_rows_within_eight_positions(keep: list[int]) -> None:
    part = sampled(keep)
    truth = truth_rows(part.truth)
    floors, ulps = logit_floors(part, truth), ulp(truth.largest, "float32")
    # The sequential member, the last, makes a floor of its own; cached has a row for each kind.
    of = {name: [a[:-1], a[-1:]] for name, a in part.floors.items() if a.ndim == 2}
    of["cached"] = [part.floors["cached"]]
    for i, p in enumerate(keep):
        near = [j for j, q in enumerate(keep) if abs(p - q) <= 8]
        assert floors.peak[i] == max(ulps[i], *(a[:, near].max() for a in of["peak"]))
        wide = {name: max(rms_of(a[:, near]) for a in each) for name, each in of.items()}
        own = {name: max(rms_of(a[:, [i]]) for a in of[name]) for name in ("rms", "shift")}
        shift = max(own["shift"], wide["shift"], ulps[i])
        assert floors.shift[i] == pytest.approx(shift, rel=1e-12, abs=0)
        ordinary = of["rms"][0]
        apart = max(wide["cached"], rms_of(ordinary[:, near]), rms_of(ordinary[:, [i]]), ulps[i])
        assert floors.cached[i] == pytest.approx(apart, rel=1e-12, abs=0)
        assert floors.pool[i] == pytest.approx(max(own["rms"], wide["rms"]), rel=1e-12, abs=0)


def test_a_held_out_member_leaves_the_floor() -> None:
    case, truth = (
        flat_floors(rms=(3, 10, 1e3), peak=(3, 10, 1e3), shift=(3, 10, 1e3)),
        truth_rows(CASE.truth),
    )
    out = logit_floors(case, truth, without="sdpa-step")
    assert [a.tolist() for a in (out.rms, out.peak, out.shift)] == [[1.0] * N] * 3
    assert logit_floors(case, truth).peak.max() == 1e3


def test_a_floor_is_at_least_an_ulp_of_the_largest_logit() -> None:
    silent = replace(CASE, floors={name: np.zeros_like(a) for name, a in CASE.floors.items()})
    truth = truth_rows(CASE.truth)
    floors = logit_floors(silent, truth)
    for floor in (floors.rms, floors.peak, floors.shift, floors.cached):
        np.testing.assert_array_equal(floor, ulp(truth.largest, "float32"))


def test_a_pair_has_the_pages_figures() -> None:
    a, b = small([[0.0, 0.0], [1.0, 2.0], [5.0, 4.0]]), small([[9.0, 0.0], [1.0, 2.5], [5.0, -8.0]])
    found = pair(a, b, [1, 2])
    assert (found.max_abs, found.first_max, found.last_max, found.rms) == (
        12.0,
        0.5,
        12.0,
        np.sqrt(144.25 / 4),
    )
    assert (found.top1_equal, found.rows, found.max_abs_ref) == (2, 2, 8.0)
    assert (str(found.a), str(found.b)) == ("port full", "port full")


def test_a_pair_needs_every_position_on_both_sides() -> None:
    with pytest.raises(Refusal, match="no row for position 9"):
        pair(rows(STEP, ALL[:9]), STEP, CASE.rows)
    with pytest.raises(Refusal, match="no row for position 9"):
        pair(STEP, rows(STEP, ALL[:9]), CASE.rows)
    with pytest.raises(Refusal, match="no positions to compare"):
        pair(STEP, STEP, [])
    with pytest.raises(Refusal, match="vocabulary is 63, expected 64"):
        pair(changed(STEP, "logits", lambda a: a[:, 1:]), STEP, CASE.rows)


def test_nan_shows_in_a_pair() -> None:
    found = pair(
        changed(STEP, "logits", lambda a: np.where(np.arange(N)[:, None] == 9, np.nan, a)),
        STEP,
        CASE.rows,
    )
    assert np.isnan([found.max_abs, found.rms]).all()
    assert found.first_max == 0


def exact_kl(t: list[float], x: list[float]) -> float:
    """KL in nats, with 60 decimal digits."""
    getcontext().prec = 60
    p, q = ([Decimal(v).exp() for v in row] for row in (t, x))
    return float(
        sum(u / sum(p) * ((u / sum(p)) / (w / sum(q))).ln() for u, w in zip(p, q, strict=True))
    )


@pytest.mark.parametrize("size", [1e-7, 1e-5, 1e-2, 1.0, 30.0])
def test_kl_is_right_from_noise_to_nonsense(size: float) -> None:
    rng = np.random.default_rng(3)
    t = rng.standard_normal(16) * 4
    x = t + size * rng.standard_normal(16)
    truth = Trace(
        meta(plans()["full"], dtype="float64"),
        {"logits": t[None], "positions": np.zeros(1, np.int32)},
    )
    run = replace(truth, arrays=dict(truth.arrays) | {"logits": x[None]})
    assert figures(run, truth, truth_rows(truth), plan="full").kl == pytest.approx(
        exact_kl(t.tolist(), x.tolist()), rel=1e-6
    )


def test_the_figures_of_other_tools_by_hand() -> None:
    truth = small(
        [[6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]], dtype="float64"
    )
    found = figures(
        small([[6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0], [6.0, 7.0, 4.0, 3.0, 1.0, 2.0, 0.0]]),
        truth,
        truth_rows(truth),
        plan="full",
    )
    assert (found.rows, found.top1_equal, found.top5_equal, found.max_abs) == (2, 1, 1, 2.0)
    assert found.rms == np.sqrt(6 / 14)
    assert found.nmse_db == pytest.approx(10 * np.log10(6 / 182))
    assert found.cosine == pytest.approx((91 + 100) / np.sqrt(182 * (91 + 115)))


def test_equal_runs_have_no_distance_at_all() -> None:
    exact = replace(CASE.truth, meta=STEP.meta)
    found = figures(exact, CASE.truth, truth_rows(CASE.truth), plan="step")
    assert (found.max_abs, found.rms, found.kl, found.nmse_db) == (0.0, 0.0, 0.0, -np.inf)
    assert found.cosine == pytest.approx(1.0, abs=1e-15)
    assert figure_cells(found)[::2] == ["exact", "0"]


def test_no_rounding_puts_a_figure_beyond_its_range() -> None:
    rng, cells = np.random.default_rng(0), []
    for _ in range(300):
        t = rng.standard_normal((3, 7))
        near = t * (1 + 2e-16 * rng.integers(-1, 2, (3, 7)))
        truth, run = (small(a.tolist(), dtype="float64") for a in (t, near))
        found = figures(run, truth, truth_rows(truth), plan="full")
        assert found.cosine <= 1
        assert found.kl >= 0
        cells += figure_cells(found)[1:]
    assert len(cells) == 600
    assert not [cell for cell in cells if cell.startswith("-")]


@pytest.mark.parametrize(
    "change", [np.asarray, np.zeros_like, lambda a: a * 0.999], ids=["equal", "zero", "near"]
)
def test_tables_and_json_hold_no_infinity_and_no_negative_zero(
    tmp_path: Path, change: Callable[[Array], Array]
) -> None:
    one = changed(STEP, "logits", change)
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in paths:
        trace_file.write(path, one.meta, {name: np.array(a) for name, a in one.arrays.items()})
    words = delta(paths, as_json=False).split()
    assert "inf" not in " ".join(words)
    assert not [word for word in words if re.fullmatch(r"-[0.]+(e[-+]\d+)?", word)]
    value = delta(paths, as_json=True)
    assert not re.search(r"-0(\.0*)?[,\s]", value)
    assert '"nmse_db": null' in value


def test_a_negative_zero_is_plain_zero_in_every_cell_and_value() -> None:
    assert str(plain({"a": [-0.0, (-0.0, float("-inf"))]})) == "{'a': [0.0, [0.0, None]]}"
    assert (number(-0.0), *ordered(-0.0, 8.0)) == ("0", "0.00", "8.00")
    assert figure_cells(Figures("step", 1, 0.0, 0.0, -0.04, 1.0, -0.0, 1, 1)) == ["0.0", "0", "0"]


def test_the_pages_tables_hold_every_pair_there_is() -> None:
    tables = page_tables(CASE, make_candidates(CASE))
    assert [(str(p.a), str(p.b)) for p in tables.cached] == [
        ("transformers cached", "transformers full"),
        ("port cached", "port nocache"),
        ("port cached", "port full"),
        ("port cached", "transformers full"),
        ("port nocache", "transformers full"),
        ("port full", "transformers full"),
        ("port cached", "transformers cached"),
    ]
    assert [(str(p.a), str(p.b)) for p in tables.chunked] == [
        ("transformers chunked", "transformers cached"),
        ("port chunked", "port cached"),
        ("port chunked", "transformers full"),
        ("port chunked", "transformers chunked"),
        ("port mixed", "port cached"),
        ("port mixed", "transformers full"),
    ]
    assert {p.rows for p in tables.cached + tables.chunked} == {20}
    assert [str(p.a) for p in page_tables(CASE, {"step": STEP}).chunked] == ["transformers chunked"]


def test_a_third_engine_stands_beside_ours_transformers_and_the_truth() -> None:
    third = {
        "prefixes": replace(
            make_candidates(CASE, seed=5)["prefixes"],
            meta=meta(plans()["prefixes"], engine="candle"),
        )
    }
    found = three_way(CASE, make_candidates(CASE), third)
    assert [(str(p.a), str(p.b)) for p in found] == [
        ("candle nocache", "port nocache"),
        ("candle nocache", "transformers full"),
        ("port nocache", "transformers full"),
        ("candle nocache", "truth full"),
        ("port nocache", "truth full"),
    ]
    assert found[3].max_abs < 6 * NOISE["float32"]


def test_an_oracle_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = {"truth": CASE.truth} | {f"reference-{name}": t for name, t in CASE.references.items()}
    for name, trace in files.items():
        trace_file.write(tmp_path / f"{name}.safetensors", trace.meta, trace.arrays)
    shapes = {name: (a.dtype.type, a.shape) for name, a in CASE.floors.items()}
    with writer(tmp_path / "floors.safetensors", shapes) as out:
        for name, array in CASE.floors.items():
            out.arrays[name][...] = array
        out.finish(CASE.pool.to_json())
    digests = {path.name: disk.sha256(path) for path in tmp_path.iterdir()}
    for name, plan in plans().items():
        disk.write_text(tmp_path / "plans" / f"{name}.json", json.dumps(plan.to_json()))
        digests[f"plans/{name}.json"] = disk.sha256(tmp_path / "plans" / f"{name}.json")
    run_folder.write_manifest(tmp_path, replace(CASE.manifest, files=digests))
    found = read_case(tmp_path)
    assert case_reasons(found) == []
    assert found.manifest.tokens == CASE.manifest.tokens
    assert sorted(found.references) == ["chunked", "full", "step"]
    np.testing.assert_array_equal(found.floors["rms"], CASE.floors["rms"])
    (tmp_path / "reference-step.safetensors").unlink()
    with pytest.raises(Refusal, match=r"reference-step\.safetensors: cannot be read"):
        read_case(tmp_path)

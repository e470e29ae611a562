"""The verdict: a correct engine agrees, every fault is caught by its gate and at its place, and
doubt is never a pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import (
    LINUX,
    NOISE,
    Array,
    N,
    cache_names,
    changed,
    make_algebra,
    make_candidates,
    make_case,
    make_probe,
    meta,
    plans,
    rows,
    texts,
)

from mlxkv.judge.assign import assign
from mlxkv.judge.case import Case, Probed
from mlxkv.judge.limits import SIGMA_LEAST
from mlxkv.judge.result import Gate, Outcome, Verdict, join
from mlxkv.judge.verdict import judge
from mlxkv.report import phrases
from oracle.formats.errors import Refusal
from oracle.formats.run_folder import Pool
from oracle.formats.trace import Outcome as StepOutcome
from oracle.formats.trace import Trace

CASE = make_case()
RUNS = make_candidates(CASE)
EXACT = make_algebra(CASE)
ALL_GATES = [
    "algebra (float64)",
    "algebra, cache",
    "finite",
    "sigma",
    "worst position",
    "peak",
    "shift",
    "decisive flips",
    "cached against uncached",
    "keys median",
    "keys 95%",
    "keys worst row",
    "values median",
    "values 95%",
    "values worst row",
]


def with_step(change: Callable[[Trace], Trace]) -> dict[str, Trace]:
    return RUNS | {"step": change(RUNS["step"])}


def on_all(change: Callable[[Array], Array], *, name: str = "logits") -> dict[str, Trace]:
    return {plan: changed(t, name, change) for plan, t in RUNS.items()}


def failed(verdict: Verdict) -> list[str]:
    return [g.name for g in verdict.worst if g.failed]


def gate(verdict: Verdict, name: str) -> Gate:
    return next(g for g in verdict.worst if g.name == name)


def on_row(row: int, change: Callable[[Array], Array]) -> Callable[[Array], Array]:
    def one(a: Array) -> Array:
        a[row] = change(a[row])
        return a

    return one


def put(index: tuple[Any, ...], value: float) -> Callable[[Array], Array]:
    def one(a: Array) -> Array:
        a[index] = value
        return a

    return one


def swap_best(a: Array) -> Array:
    best, second = np.argsort(a)[::-1][:2]
    a[[best, second]] = a[[second, best]]
    return a


def stale(position: int, count: int = 1) -> Callable[[Array], Array]:
    """The rows of head 0 from `position` on hold what stood before them."""

    def one(a: Array) -> Array:
        a[0, position : position + count] = a[0, position - 1]
        return a

    return one


def test_a_correct_engine_agrees_in_every_scope_and_every_gate_is_shown() -> None:
    verdict = judge(CASE, RUNS, algebra=EXACT)
    assert (verdict.outcome, verdict.exit_code, verdict.hint, verdict.first_wrong) == (
        "agree",
        0,
        None,
        None,
    )
    assert verdict.scopes == ("algebra", "logits", "cache")
    assert verdict.plans == ("full", "step", "prefixes", "chunked", "mixed")
    assert (verdict.reasons, verdict.notes) == ((), ())
    assert [g.name for g in verdict.worst] == ALL_GATES
    assert all(g.ran and not g.failed for g in verdict.gates)
    assert all(0.9 < g.value < 1.1 for g in verdict.gates if g.name == "sigma")
    assert [c.passed for c in verdict.controls] == [True] * 5
    assert [f.top1_equal for f in verdict.figures] == [24, 24, 20, 24, 24]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_coarse_dtype_agrees_too_and_says_what_would_pass(dtype: str) -> None:
    case = make_case(dtype=dtype)
    verdict = judge(case, make_candidates(case), algebra=make_algebra(case))
    assert (verdict.outcome, verdict.scopes) == ("agree", ("algebra", "logits", "cache"))
    note, _ = verdict.notes
    seen = {"float16": "1.1", "bfloat16": "2"}[dtype]
    assert note.startswith(
        (
            f"in {dtype} logits times 1.001 pass (sigma 0.",
            f"in {dtype} logits times 1.001 pass (sigma 1.",
        )
    )
    assert note.endswith(f"unseen outside lane A; times {seen} is seen")


LOGITS = ["sigma", "worst position", "peak", "shift"]
CACHED = "cached against uncached"
Fault = tuple[Mapping[str, Trace], list[str], int, str]
FAULTS: dict[str, Fault] = {
    "one plan's logits times 1.001": (
        with_step(lambda t: changed(t, "logits", lambda a: a * np.float32(1.001))),
        [*LOGITS, CACHED],
        0,
        "step",
    ),
    "one row wrong": (
        with_step(
            lambda t: changed(
                t,
                "logits",
                on_row(9, lambda r: r + np.linspace(-0.01, 0.01, r.size, dtype=np.float32)),
            )
        ),
        ["sigma", "worst position", "peak", CACHED],
        9,
        "step",
    ),
    "every logit of every plan 0.05 too high": (
        on_all(lambda a: a + np.float32(0.05)),
        ["shift"],
        0,
        "full",
    ),
    "one logit of the last row a little wrong": (
        on_all(on_row(-1, lambda r: r + 5e-4 * (np.arange(r.size) == 7))),
        ["peak"],
        23,
        "full",
    ),
    "the best two of one row swapped": (
        with_step(lambda t: changed(t, "logits", on_row(12, swap_best))),
        ["sigma", "worst position", "peak", "decisive flips", CACHED],
        12,
        "step",
    ),
    "rows one too late": (
        with_step(lambda t: changed(t, "logits", lambda a: np.concatenate([a[:14], a[13:23]]))),
        [*LOGITS, "decisive flips", CACHED],
        14,
        "step",
    ),
    "a stale key row": (
        with_step(lambda t: changed(t, "kv/a/001/keys", stale(10))),
        ["keys worst row"],
        10,
        "step",
    ),
    "three stale value rows": (
        with_step(lambda t: changed(t, "kv/a/000/values", stale(10, 3))),
        ["values 95%", "values worst row"],
        10,
        "step",
    ),
    "keys in float16": (
        with_step(
            lambda t: changed(t, "kv/a/000/keys", lambda a: a.astype(np.float16).astype(np.float32))
        ),
        ["keys median", "keys 95%", "keys worst row"],
        0,
        "step",
    ),
    "a NaN": (
        with_step(lambda t: changed(t, "logits", put((7, 3), np.nan))),
        ["finite", "sigma", "worst position", "peak", "shift", "decisive flips", CACHED],
        7,
        "step",
    ),
    "an infinity": (
        with_step(lambda t: changed(t, "logits", put((7, 3), -np.inf))),
        ["finite", "sigma", "worst position", "peak", "shift", CACHED],
        7,
        "step",
    ),
    "a NaN in the cache": (
        with_step(lambda t: changed(t, "kv/a/001/values", put((1, 7, 3), np.nan))),
        ["values median", "values 95%", "values worst row"],
        7,
        "step",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_by_its_gates_and_at_its_place(fault: str) -> None:
    runs, gates, position, plan = FAULTS[fault]
    verdict = judge(CASE, runs, algebra=EXACT)
    assert (verdict.outcome, verdict.exit_code) == ("differ", 1)
    assert failed(verdict) == gates
    first = verdict.first_wrong
    assert first is not None
    assert (first.position, first.token, first.plan) == (position, texts()[position], plan)
    assert verdict.hint == "`mlxkv locate` says in which layer and in which operation"


def test_every_gate_that_meets_a_nan_has_its_place() -> None:
    logits, cache = judge(CASE, FAULTS["a NaN"][0]), judge(CASE, FAULTS["a NaN in the cache"][0])
    assert [gate(logits, name).first for name in ("finite", *LOGITS, CACHED)] == [7] * 6
    assert [gate(cache, f"values {what}").first for what in ("median", "95%", "worst row")] == [
        7
    ] * 3


def test_where_numbers_are_not_finite_the_gate_that_says_so_is_named_with_its_place() -> None:
    logits, cache = judge(CASE, FAULTS["a NaN"][0]), judge(CASE, FAULTS["a NaN in the cache"][0])
    finite, values = logits.nearest, cache.nearest
    assert finite is not None
    assert values is not None
    assert (finite.name, finite.plan, finite.position, finite.badness) == ("finite", "step", 7, 1.0)
    assert (values.name, values.position) == ("values worst row", 7)
    assert (values.layer, values.head, values.badness) == (1, 1, math.inf)
    right = judge(CASE, RUNS).nearest
    assert right is not None
    assert 0 < right.badness < 1


def test_the_place_in_the_cache_has_its_layer_and_head() -> None:
    runs = with_step(lambda t: changed(t, "kv/a/001/keys", stale(10)))
    found = gate(judge(CASE, runs), "keys worst row")
    assert (found.layer, found.head, found.position, found.token) == (1, 0, 10, " t10")


def test_an_error_far_below_the_noise_shows_in_algebra_only() -> None:
    algebra = EXACT | {"full": changed(EXACT["full"], "logits", on_row(6, lambda r: r + 1e-8))}
    verdict = judge(CASE, RUNS, algebra=algebra)
    assert (verdict.outcome, failed(verdict)) == ("differ", ["algebra (float64)"])
    assert verdict.first_wrong is not None
    assert (verdict.first_wrong.position, verdict.first_wrong.plan) == (6, "full")
    assert gate(verdict, "algebra (float64)").value == pytest.approx(
        1e-8 / np.abs(CASE.truth.logits).max(), rel=1e-3
    )


def test_a_wrong_row_of_the_float64_cache_shows_in_algebra_only() -> None:
    algebra = EXACT | {"step": changed(EXACT["step"], "kv/a/001/values", put((1, 13, 2), 0.5))}
    verdict = judge(CASE, RUNS, algebra=algebra)
    found = gate(verdict, "algebra, cache")
    assert (verdict.outcome, failed(verdict)) == ("differ", ["algebra, cache"])
    assert (found.layer, found.head, found.position) == (1, 1, 13)


UNTOLD: dict[str, tuple[Mapping[str, Trace], str]] = {
    "a missing row": (
        with_step(lambda t: rows(t, [p for p in range(N) if p != 9])),
        "no row for position 9",
    ),
    "a row twice": (
        with_step(lambda t: rows(t, [*range(N), 7])),
        "more than one row for position 7",
    ),
    "a row beyond the end": (
        with_step(lambda t: changed(rows(t, [*range(N), 7]), "positions", put((24,), 24))),
        "a row for position 24",
    ),
    "other weights": (
        with_step(lambda t: replace(t, meta=replace(t.meta, fingerprint="0" * 64))),
        "weights fingerprint is 0000",
    ),
    "another plan": (
        with_step(lambda t: replace(t, meta=replace(t.meta, plan=plans()["chunked"]))),
        "plan digest is",
    ),
    "a column less": (
        with_step(lambda t: changed(t, "logits", lambda a: a[:, 1:])),
        "logits have 63 columns",
    ),
    "no rows": (with_step(lambda t: rows(t, [])), "no row for position 4"),
    "no runs": ({}, "nothing to compare"),
    "two engines": (
        RUNS | {"step": replace(RUNS["step"], meta=meta(plans()["step"], engine="other"))},
        "traces of other 1.0, port 1.0, expected one engine",
    ),
    "a layer without keys": (
        with_step(
            lambda t: replace(t, arrays={k: a for k, a in t.arrays.items() if k != "kv/a/001/keys"})
        ),
        "no kv/a/001/keys",
    ),
    "a cache one row short": (
        with_step(
            lambda t: replace(
                t, arrays={k: a[:, :-1] if k.startswith("kv") else a for k, a in t.arrays.items()}
            )
        ),
        "kv/a/000/keys has shape [2, 23, 8], expected [2, 24, 8]",
    ),
}


@pytest.mark.parametrize("doubt", UNTOLD)
def test_what_cannot_be_compared_is_not_a_pass(doubt: str) -> None:
    runs, reason = UNTOLD[doubt]
    verdict = judge(CASE, runs)
    assert (verdict.outcome, verdict.exit_code, verdict.first_wrong, verdict.hint) == (
        "cannot tell",
        2,
        None,
        None,
    )
    assert reason in " / ".join(verdict.reasons)
    json.dumps(verdict.to_json(), allow_nan=False)


def test_more_exact_than_the_pool_is_no_offence_and_a_note() -> None:
    exact = with_step(lambda t: changed(t, "logits", lambda a: CASE.truth.logits.astype("f4")))
    verdict = judge(CASE, exact)
    assert (verdict.outcome, verdict.reasons) == ("agree", ())
    (note,) = [note for note in verdict.notes if "sigma" in note]
    assert note.startswith("plan step: sigma is 0.0")
    assert note.endswith(": nearer to the truth than float32 throughout is")


def test_a_run_that_differs_decides_over_one_that_cannot_be_told() -> None:
    runs = dict(FAULTS["one row wrong"][0]) | {"chunked": rows(RUNS["chunked"], [])}
    verdict = judge(CASE, runs)
    assert (verdict.outcome, len(verdict.reasons)) == ("differ", 1)


def test_a_run_bitwise_equal_to_a_pool_member_agrees() -> None:
    member = dict(CASE.references["step"].arrays)
    verdict = judge(CASE, RUNS | {"step": replace(RUNS["step"], arrays=member)})
    assert verdict.outcome == "agree"
    assert [
        g.value for g in verdict.gates if (g.name, g.plan) == ("sigma", "step")
    ] == pytest.approx([0.97], abs=0.03)


def test_nearness_to_the_truth_is_no_doubt_in_a_coarse_dtype() -> None:
    case = make_case(dtype="float16")
    near = make_candidates(case, size=NOISE["float16"] / 10)
    assert judge(case, near).outcome == "agree"


def without_cache(runs: Mapping[str, Trace]) -> dict[str, Trace]:
    keep = ("logits", "positions")
    return {name: replace(t, arrays={k: t.arrays[k] for k in keep}) for name, t in runs.items()}


def test_a_trace_without_keys_covers_logits_only_and_says_so() -> None:
    verdict = judge(CASE, without_cache(RUNS))
    assert (verdict.outcome, verdict.scopes, verdict.reasons) == ("agree", ("logits",), ())
    assert [g.reason for g in verdict.worst if not g.ran] == [
        "not run: no float64 run of this engine",
        *["not run: no keys in trace"] * 6,
    ]
    assert not gate(verdict, CACHED).failed


def test_an_engine_that_gives_last_rows_only_is_held_against_its_own_prefixes() -> None:
    runs = {
        name: rows(RUNS[name], [p - RUNS[name].positions[0] for p in range(4, N)])
        for name in ("step", "prefixes")
    }
    verdict = judge(CASE, runs)
    assert (verdict.outcome, verdict.scopes, verdict.plans) == (
        "agree",
        ("logits", "cache"),
        ("step", "prefixes"),
    )
    assert verdict.notes == ("not compared: full and chunked (no usable trace of those plans)",)
    off = judge(
        CASE,
        runs | {"step": changed(runs["step"], "logits", on_row(3, lambda r: r + np.float32(2e-4)))},
    )
    assert failed(off) == ["shift", CACHED]
    assert gate(off, CACHED).position == 7


@pytest.mark.parametrize(
    ("plan", "reason"), [("step", "no trace of plan step"), ("full", "no trace of plan prefixes")]
)
def test_a_cache_scope_needs_both_sides(plan: str, reason: str) -> None:
    runs = {name: t for name, t in RUNS.items() if name not in (plan, "prefixes")}
    verdict = judge(CASE, runs)
    assert (verdict.outcome, verdict.scopes) == ("agree", ("logits",))
    assert gate(verdict, CACHED).reason == f"not run: {reason}"


def test_a_prompt_of_one_token_has_no_chunks_and_says_so() -> None:
    case = make_case(prompt=1)
    verdict = judge(case, make_candidates(case), algebra=make_algebra(case))
    assert (verdict.outcome, verdict.plans) == ("agree", ("full", "step", "prefixes", "mixed"))
    assert verdict.notes == ("chunked was not run: a prompt of one token cannot be split",)


def test_where_nothing_is_decoded_the_cache_is_not_compared_with_itself() -> None:
    case = make_case(n=5, prompt=5)
    verdict = judge(case, make_candidates(case))
    assert (verdict.outcome, verdict.scopes) == ("agree", ("logits",))
    assert (
        gate(verdict, CACHED).reason
        == "not run: nothing was decoded, step is the same plan as full"
    )


@pytest.mark.parametrize(
    ("probes", "reason"),
    [
        (
            {"matmul": 1e-16, "exp": 3e-8},
            "cannot tell: float64 probe exp is 3e-08 off numpy, limit 1e-14",
        ),
        (
            {"matmul": math.nan, "tanh": 1e-16},
            "cannot tell: float64 probe matmul is nan off numpy, limit 1e-14",
        ),
        ({}, "not run: no float64 probes in trace"),
    ],
)
def test_float64_operations_that_are_not_float64_take_the_algebra_away(
    probes: dict[str, float], reason: str
) -> None:
    algebra = {name: replace(t, meta=replace(t.meta, probes=probes)) for name, t in EXACT.items()}
    verdict = judge(CASE, RUNS, algebra=algebra)
    assert (verdict.outcome, verdict.scopes) == ("agree", ("logits", "cache"))
    assert gate(verdict, "algebra (float64)").reason == reason
    assert not any(one.name == "algebra, cache" for one in verdict.gates)


def proofs(**values: Any) -> Case:
    return replace(
        CASE,
        manifest=replace(
            CASE.manifest,
            proofs={k: v for k, v in (CASE.manifest.proofs | values).items() if v != "absent"},
        ),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("truth_agreement", 2e-10),
        ("transformers_double", 7e-6),
        ("transformers_double", "absent"),
        ("truth_agreement", None),
    ],
)
def test_a_truth_without_its_proofs_tells_nothing(name: str, value: Any) -> None:
    wrong = proofs(**{name: value})
    off = EXACT | {"full": changed(EXACT["full"], "logits", lambda a: a + 1e-6)}
    for runs, algebra in ((RUNS, EXACT), (FAULTS["one row wrong"][0], EXACT), (RUNS, off)):
        verdict = judge(wrong, runs, algebra=algebra)
        assert (verdict.outcome, verdict.first_wrong) == ("cannot tell", None)
        assert verdict.reasons[0].startswith(f"truth's proof {name}: ")
    assert judge(wrong, FAULTS["a NaN"][0]).outcome == "differ"


def test_where_transformers_and_a_sound_truth_disagree_nobody_is_told_to_make_it_again() -> None:
    case = replace(bad_member(1.0003), manifest=proofs(transformers_double=0.31).manifest)
    verdict = judge(case, RUNS, algebra=EXACT)
    assert verdict.outcome == "cannot tell"
    assert verdict.reasons[0].endswith(
        "transformers and the truth disagree, and either may be at fault: try another version of "
        "transformers, and look in config.json for a key that one of them reads otherwise"
    )
    assert verdict.reasons[1].startswith("control 'sdpa-step, held out'")
    assert [r for r in verdict.reasons if "again" in r] == []
    # A truth that is not one even by itself is no side in a dispute.
    for broken in ({"truth_agreement": 2e-10}, {"transformers_double": "absent"}):
        case = replace(
            bad_member(1.0003), manifest=proofs(**({"transformers_double": 0.31} | broken)).manifest
        )
        found = judge(case, RUNS, algebra=EXACT).reasons
        assert any("make the oracle folder again" in reason for reason in found)


def bad_member(scale: float) -> Case:
    """The held-out member is unlike the others, in its logits and in the stored errors alike."""
    step = changed(CASE.references["step"], "logits", lambda a: a * np.float32(scale))
    error = step.logits.astype(np.float64) - CASE.truth.logits
    shift = error.mean(1)
    centred = error - shift[:, None]
    floors = {name: a.copy() for name, a in CASE.floors.items()}
    floors["rms"][3], floors["shift"][3], floors["peak"][3] = (
        np.sqrt((centred**2).mean(1)),
        shift,
        np.abs(centred).max(1),
    )
    apart = CASE.references["full"].logits.astype(np.float64) - step.logits
    floors["cached"][1] = np.sqrt((apart**2).mean(1))
    return replace(CASE, references=dict(CASE.references) | {"step": step}, floors=floors)


def test_a_pool_whose_member_does_not_agree_with_the_others_tells_nothing() -> None:
    verdict = judge(bad_member(1.0003), FAULTS["rows one too late"][0], algebra=EXACT)
    assert "sigma" in failed(verdict)
    assert (verdict.outcome, [c.passed for c in verdict.controls]) == (
        "cannot tell",
        [False, True, True, True, False],
    )
    assert verdict.reasons[0].startswith("control 'sdpa-step, held out': sigma is 2")
    algebra = EXACT | {"full": changed(EXACT["full"], "logits", lambda a: a + 1e-6)}
    assert judge(bad_member(1.0003), RUNS, algebra=algebra).outcome == "differ"


def test_floors_that_are_not_those_of_the_reference_tell_nothing() -> None:
    floors = dict(CASE.floors) | {"rms": CASE.floors["rms"] * 1.01}
    verdict = judge(replace(CASE, floors=floors), RUNS)
    assert (verdict.outcome, [c.passed for c in verdict.controls]) == (
        "cannot tell",
        [True, True, False, True, True],
    )


def test_floors_that_would_let_a_scale_of_1_001_pass_tell_nothing() -> None:
    case = make_case(noise=2e-3)
    verdict = judge(case, make_candidates(case, size=2e-3))
    assert (verdict.outcome, [c.passed for c in verdict.controls]) == (
        "cannot tell",
        [True, False, True, True, False],
    )


def test_a_floor_above_1e_4_of_the_largest_logit_tells_nothing() -> None:
    case = make_case(noise=5e-3)
    verdict = judge(case, make_candidates(case, size=5e-3))
    assert verdict.outcome == "cannot tell"
    assert verdict.reasons[0].startswith(
        "noise floor: 0.00017 of max |truth|, expected at most 0.0001 in float32"
    )


def test_a_truth_that_is_not_finite_tells_nothing() -> None:
    for name in ("logits", cache_names()[0]):
        broken = replace(
            CASE, truth=changed(CASE.truth, name, lambda a: np.where(a == a.max(), np.nan, a))
        )
        verdict = judge(broken, RUNS)
        assert (verdict.outcome, verdict.gates) == ("cannot tell", ())
        assert "not finite" in verdict.reasons[0]


def test_an_oracle_folder_that_cannot_serve_tells_nothing() -> None:
    verdict = judge(replace(CASE, pool=Pool([], CASE.pool.kinds, 0)), RUNS)
    assert (verdict.outcome, verdict.gates, verdict.scopes) == ("cannot tell", (), ())
    assert verdict.reasons[0].startswith(
        "floors.safetensors: members are none, expected eager-full, eager-step, "
    )


def of_two_members() -> Case:
    """The pool's runs are all bitwise equal to the full one or to the step."""
    members, errors = CASE.pool.members, {}
    for name, array in CASE.floors.items():
        same = [3 if "step" in member else 2 for member in members[:-1]] + [5]
        errors[name] = array[[1, 1]] if name == "cached" else array[same]
    chunked = replace(CASE.references["chunked"], arrays=dict(CASE.references["full"].arrays))
    return replace(
        CASE,
        manifest=replace(CASE.manifest, pool_distinct=2),
        references=dict(CASE.references) | {"chunked": chunked},
        pool=Pool(members, CASE.pool.kinds, 2),
        floors=errors,
    )


NOTES: dict[str, tuple[Case, Mapping[str, Trace], str]] = {
    "noisy": (CASE, make_candidates(CASE, size=3.3e-5), "agrees, noisier than usual: sigma is 3."),
    "undeclared": (
        CASE,
        with_step(lambda t: replace(t, meta=replace(t.meta, fingerprint=None))),
        "weights undeclared",
    ),
    "other config": (
        CASE,
        with_step(lambda t: replace(t, meta=replace(t.meta, config_digest="0"))),
        "config digest differs",
    ),
    "a Mac": (
        CASE,
        {
            n: replace(
                t, meta=replace(t.meta, device="gpu", environment=LINUX | {"os": "macOS 27"})
            )
            for n, t in RUNS.items()
        },
        "limits not calibrated on this device (macos gpu)",
    ),
    "alike members": (
        of_two_members(),
        RUNS,
        "the pool has 2 bitwise distinct members, usually 3 or more",
    ),
}


@pytest.mark.parametrize("note", NOTES)
def test_what_one_should_know_of_an_agreement_is_said(note: str) -> None:
    case, runs, expected = NOTES[note]
    verdict = judge(case, runs)
    assert verdict.outcome == "agree"
    assert [n for n in verdict.notes if n.startswith(expected)]


def test_the_worst_plan_decides_never_an_average() -> None:
    verdict = judge(CASE, FAULTS["one plan's logits times 1.001"][0])
    sigmas = {g.plan: g.value for g in verdict.gates if g.name == "sigma"}
    assert gate(verdict, "sigma").plan == "step"
    assert gate(verdict, "sigma").value == max(sigmas.values())
    assert sum(s > 8 for s in sigmas.values()) == 1


def test_of_several_gates_the_one_that_is_not_a_number_is_worst() -> None:
    gates = (
        Gate("sigma", "a", 1e9, 8),
        Gate("sigma", "b", math.nan, 8),
        Gate("sigma", "c", math.nan, 8, reason="not run"),
    )
    verdict = replace(judge(CASE, {}), gates=gates)
    assert [g.plan for g in verdict.worst] == ["b"]
    assert [g.failed for g in gates] == [True, True, False]


@pytest.mark.parametrize(
    ("outcomes", "joined"),
    [
        (["agree", "agree"], "agree"),
        (["agree", "differ", "cannot tell"], "differ"),
        (["agree", "cannot tell"], "cannot tell"),
        ([], "cannot tell"),
    ],
)
def test_prompts_are_joined_by_and(outcomes: list[Outcome], joined: Outcome) -> None:
    assert join(outcomes) == joined


def test_a_verdict_is_plain_json_with_finite_numbers_only() -> None:
    verdict = judge(CASE, FAULTS["a NaN"][0], algebra=EXACT)
    value = verdict.to_json()
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert (value["format"], value["outcome"], value["exit_code"], value["scopes"]) == (
        "mlxkv-verdict/1",
        "differ",
        1,
        ["algebra", "logits", "cache"],
    )
    sigma = next(g for g in value["gates"] if (g["name"], g["plan"]) == ("sigma", "step"))
    assert (sigma["value"], sigma["failed"], sigma["headroom"]) == (None, True, None)
    assert value["first_wrong"] == {
        "position": 7,
        "token": " t7",
        "plan": "step",
        "gate": "finite",
        "layer": None,
        "about": False,
        "after": None,
    }
    assert len(value["by_position"]["floor"]) == N
    assert [c["plan"] for c in value["by_position"]["rms"]] == [
        "full",
        "step",
        "prefixes",
        "chunked",
        "mixed",
    ]
    assert value["by_position"]["positions"] == list(range(N))
    assert value["not_exercised"] == list(verdict.unseen)


@given(power=st.integers(-12, 12), seed=st.integers(0, 50))
@settings(max_examples=15, deadline=None)
def test_sigma_is_the_same_when_truth_noise_and_run_are_scaled_together(
    power: int, seed: int
) -> None:
    factor = 2.0**power

    def scaled(trace: Trace) -> Trace:
        return changed(trace, "logits", lambda a: a * a.dtype.type(factor))

    floors = {
        name: a * factor if name in ("rms", "peak", "shift", "cached") else a
        for name, a in CASE.floors.items()
    }
    most = factor * CASE.manifest.proofs["truth_max"]
    case = replace(
        CASE,
        manifest=replace(CASE.manifest, proofs=CASE.manifest.proofs | {"truth_max": most}),
        truth=scaled(CASE.truth),
        references={n: scaled(t) for n, t in CASE.references.items()},
        floors=floors,
    )
    runs = make_candidates(CASE, seed=seed)
    found = judge(case, {n: scaled(t) for n, t in runs.items()})
    usual = judge(CASE, runs)
    assert [(g.name, g.plan, g.value) for g in found.gates if g.ran] == [
        (g.name, g.plan, g.value) for g in usual.gates if g.ran
    ]
    assert found.outcome == usual.outcome == "agree"


@given(order=st.permutations(list(range(N))))
@settings(max_examples=15, deadline=None)
def test_the_order_of_rows_in_a_trace_does_not_change_the_verdict(order: list[int]) -> None:
    def mixed(trace: Trace) -> Trace:
        keep = [p - int(trace.positions[0]) for p in order if p >= trace.positions[0]]
        return rows(trace, keep)

    found = judge(
        CASE,
        {n: mixed(t) for n, t in RUNS.items()},
        algebra={n: mixed(t) for n, t in EXACT.items()},
    )
    usual = judge(CASE, RUNS, algebra=EXACT)
    assert found.gates == usual.gates
    assert (found.outcome, found.tables, found.curves) == (
        usual.outcome,
        usual.tables,
        usual.curves,
    )


def test_a_pool_far_below_one_ulp_does_not_make_a_correct_engine_doubtful() -> None:
    """Flat models round less than one unit of their largest logit: the floor is then that unit, and
    sigma reads small.
    """
    noise = 1e-7
    case = make_case(noise=noise)
    verdict = judge(case, make_candidates(case, size=noise), algebra=make_algebra(case))
    assert max(g.value for g in verdict.gates if g.name == "sigma") < SIGMA_LEAST
    assert (verdict.outcome, verdict.reasons) == ("agree", ())


PROBE = make_probe()


def probed(change: Callable[[Trace], Trace], *, plan: str = "chunked") -> Probed:
    """The probe, one run of which is changed."""
    its = dict(PROBE.candidates)
    return replace(PROBE, candidates=its | {plan: change(its[plan])})


def test_the_probes_gates_join_under_their_own_plan_names() -> None:
    verdict = judge(CASE, RUNS, algebra=EXACT, probe=PROBE)
    assert (verdict.outcome, verdict.reasons, verdict.notes) == ("agree", (), ())
    assert verdict.plans == (*RUNS, "probe full", "probe chunked")
    assert [c.name for c in verdict.controls[5:]] == [
        "probe sdpa-chunked, held out",
        "probe sdpa-chunked times 1.001",
        "probe stored errors of the kept runs",
        "probe sequential-full beside them",
        "probe noise of the pool",
    ]
    ran = {(g.name, g.plan) for g in verdict.gates if g.plan.startswith("probe")}
    assert {("sigma", "probe full"), ("sigma", "probe chunked")} < ran
    assert {(name, "probe chunked") for name in (CACHED, "keys median", "algebra, cache")} < ran
    kept = len(PROBE.case.truth.positions)
    assert [f.rows for f in verdict.figures if f.plan.startswith("probe")] == [kept, kept]


def row_at(position: int) -> int:
    return PROBE.case.truth.positions.tolist().index(position)


PROBE_FAULTS: dict[str, tuple[Probed, str, int]] = {
    "row 256 of the logits": (
        probed(lambda t: changed(t, "logits", on_row(row_at(256), lambda r: r * 1.01))),
        "sigma",
        256,
    ),
    "a stale key row at a position whose logits are not kept": (
        probed(lambda t: changed(t, "kv/a/001/keys", stale(201))),
        "keys worst row",
        201,
    ),
}


@pytest.mark.parametrize("fault", PROBE_FAULTS)
def test_a_fault_that_only_the_probe_meets_differs_at_its_place(fault: str) -> None:
    probe, name, position = PROBE_FAULTS[fault]
    assert not {201} & set(PROBE.case.truth.positions.tolist())
    verdict = judge(CASE, RUNS, algebra=EXACT, probe=probe)
    first = verdict.first_wrong
    assert verdict.outcome == "differ"
    assert name in failed(verdict)
    assert first is not None
    assert (first.plan, first.position, first.token) == ("probe chunked", position, None)


def test_the_probe_of_a_fault_in_float64_shows_in_algebra() -> None:
    its = PROBE.algebra["full"]
    off = changed(its, "logits", on_row(row_at(257), lambda r: r + 1e-7))
    probe = replace(PROBE, algebra=dict(PROBE.algebra) | {"full": off})
    verdict = judge(CASE, RUNS, algebra=EXACT, probe=probe)
    assert (verdict.outcome, failed(verdict)) == ("differ", ["algebra (float64)"])
    assert verdict.first_wrong is not None
    assert (verdict.first_wrong.plan, verdict.first_wrong.position) == ("probe full", 257)


def other_manifest(**values: Any) -> Probed:
    manifest = replace(PROBE.case.manifest, **values)
    return replace(PROBE, case=replace(PROBE.case, manifest=manifest))


UNTRUE_PROBES: dict[str, tuple[Probed, str]] = {
    "a proof too large": (
        other_manifest(proofs={"truth_agreement": 1e-3, "transformers_double": 5e-8}),
        "probe: truth's proof truth_agreement: 0.001",
    ),
    "of other weights": (
        other_manifest(fingerprint="0" * 64),
        "probe: manifest.json: fingerprint is 0000",
    ),
    "no probe": (other_manifest(probe=False), "probe: manifest.json: it is not that of a probe"),
    "floors of all positions": (
        replace(
            PROBE,
            case=replace(
                PROBE.case,
                floors=dict(PROBE.case.floors) | {"rms": np.ones((2, PROBE.case.length))},
            ),
        ),
        "probe: floors.safetensors: rms has shape [2, 300], expected [3, 57]",
    ),
    "floors of another size": (
        replace(
            PROBE,
            case=replace(
                PROBE.case,
                floors=dict(PROBE.case.floors) | {"rms": PROBE.case.floors["rms"] * 1.01},
            ),
        ),
        "probe: control 'stored rms of sdpa-",
    ),
    "fewer rows than its plan keeps": (
        probed(lambda t: rows(t, list(range(len(t.positions) - 1)))),
        "no row for position 299, expected ",
    ),
    "a step that failed": (
        probed(
            lambda t: replace(
                rows(t, list(range(40))),
                meta=replace(
                    t.meta, outcomes=[StepOutcome(), StepOutcome(), StepOutcome(error="no room")]
                ),
            )
        ),
        "its step 2 failed: no room",
    ),
}


@pytest.mark.parametrize("doubt", UNTRUE_PROBES)
def test_a_probe_that_cannot_be_trusted_or_compared_is_not_a_pass(doubt: str) -> None:
    probe, reason = UNTRUE_PROBES[doubt]
    verdict = judge(CASE, RUNS, algebra=EXACT, probe=probe)
    assert verdict.outcome == "cannot tell"
    assert reason in " / ".join(verdict.reasons)
    json.dumps(verdict.to_json(), allow_nan=False)


def test_rows_that_the_probes_truth_does_not_keep_are_passed_over() -> None:
    def more(trace: Trace) -> Trace:
        logits = np.concatenate([trace.logits, np.full((1, 64), np.nan, np.float32)])
        at = np.append(trace.positions, 33 + 100).astype(np.int32)
        return replace(trace, arrays=dict(trace.arrays) | {"logits": logits, "positions": at})

    assert 133 not in PROBE.case.truth.positions
    found = judge(CASE, RUNS, algebra=EXACT, probe=probed(more))
    usual = judge(CASE, RUNS, algebra=EXACT, probe=PROBE)
    assert (found.outcome, found.gates) == ("agree", usual.gates)


def heads(verdict: Verdict) -> list[str]:
    return [line.split(": ")[0] for line in verdict.unseen]


def test_what_was_not_exercised_is_listed() -> None:
    assert judge(CASE, RUNS, algebra=EXACT).unseen == (
        "positions beyond 23: rows, masks and RoPE that go wrong there, as at 256, were not seen; "
        "give --tokens with more",
        "40 of 64 token ids: 24 were fed, the largest 26; give --tokens with others",
        "calls of other sizes: those made have 1, 2, 3, 5, 6, 7, 8, 9, up to 24 tokens; at most 5 "
        "of several tokens and 19 single ones in one cache",
        "batches, clone, crop and reset: no comparison has them; `mlxkv pitfalls` tries those of "
        "the port and of mlx-lm",
        "repeats: no call was made twice, so results that change were not looked for",
        "the probe: left out, so a long sequence, and ids that span the vocabulary, were not tried",
    )
    assert judge(CASE, RUNS, algebra=EXACT, probe=PROBE, repeats=again()).unseen == (
        "positions beyond 299: rows, masks and RoPE that go wrong there, as at 512, were not seen; "
        "give --tokens with more",
        "calls of other sizes: those made have 1, 2, 3, 5, 6, 7, 8, 9, up to 300 tokens; at most 5 "
        "of several tokens and 19 single ones in one cache",
        "batches, clone, crop and reset: no comparison has them; `mlxkv pitfalls` tries those of "
        "the port and of mlx-lm",
        "repeats of 64 of 84 calls: 20 were made twice, and a fault that comes and goes shows in "
        "those only",
    )
    twice = {plan: replace(t, meta=replace(t.meta, repeat=1)) for plan, t in RUNS.items()}
    every = judge(CASE, RUNS, repeats=twice).unseen
    assert "further repeats: each of 71 calls was made twice" in every


def test_a_probe_as_long_as_the_context_leaves_no_positions_beyond() -> None:
    short = make_probe(n=40)
    assert not any("positions beyond" in line for line in judge(CASE, RUNS, probe=short).unseen)


def test_a_candidate_without_the_probe_is_not_doubtful_for_it() -> None:
    verdict = judge(CASE, RUNS, algebra=EXACT, probe=Probed(PROBE.case, {}, {}))
    assert (verdict.outcome, verdict.reasons) == ("agree", ())
    assert verdict.unseen[-1] == "the probe: no trace of its plans that could be compared"
    full = {"full": PROBE.candidates["full"]}
    verdict = judge(CASE, RUNS, algebra=EXACT, probe=Probed(PROBE.case, full, {}))
    assert (verdict.outcome, verdict.scopes) == ("agree", ("algebra", "logits", "cache"))
    assert verdict.unseen[-2:] == (
        "plan probe chunked: no usable trace of it",
        "the probe's cache: no trace of plan chunked",
    )


def test_every_verdict_lists_what_was_not_exercised() -> None:
    broken = replace(CASE, pool=Pool([], CASE.pool.kinds, 0))
    for verdict in (judge(CASE, {}), judge(broken, RUNS), judge(CASE, {}, probe=PROBE)):
        assert verdict.outcome == "cannot tell"
        assert verdict.unseen
    assert judge(broken, RUNS).unseen == ("everything: nothing was compared",)
    assert judge(CASE, {}, algebra=EXACT).unseen[0].startswith("positions beyond 23: ")
    assert judge(CASE, FAULTS["a NaN"][0]).unseen == judge(CASE, RUNS).unseen


def test_a_trace_without_mixed_is_not_exercised_and_one_that_failed_is_a_doubt() -> None:
    older = {name: t for name, t in RUNS.items() if name != "mixed"}
    verdict = judge(CASE, older)
    assert (verdict.outcome, verdict.notes) == ("agree", ())
    assert "plan mixed: no usable trace of it" in verdict.unseen
    assert (
        "several tokens after single ones, a chunk longer than what is held and a third chunk: no "
        "plan compared has such calls" in verdict.unseen
    )
    outcomes = [StepOutcome(), StepOutcome(), StepOutcome(error="no room")]
    meta_of = replace(RUNS["mixed"].meta, outcomes=outcomes)
    lost = replace(rows(RUNS["mixed"], [0, 1]), meta=meta_of)
    verdict = judge(CASE, older | {"mixed": lost})
    assert verdict.outcome == "cannot tell"
    assert "its step 2 failed: no room" in verdict.reasons[0]


def test_a_step_that_failed_is_a_doubt_though_no_row_is_missing() -> None:
    outcomes = [StepOutcome(), StepOutcome(error="out of memory")]
    runs = with_step(lambda t: replace(t, meta=replace(t.meta, outcomes=outcomes)))
    verdict = judge(CASE, runs)
    assert verdict.outcome == "cannot tell"
    assert verdict.reasons[0].endswith("its step 1 failed: out of memory")


def test_a_fault_of_mixed_alone_differs() -> None:
    off = changed(RUNS["mixed"], "logits", on_row(12, lambda r: r[::-1].copy()))
    verdict = judge(CASE, RUNS | {"mixed": off})
    first = verdict.first_wrong
    assert first is not None
    assert (verdict.outcome, first.plan, first.position) == ("differ", "mixed", 12)


@pytest.mark.parametrize(("n", "why"), [(4, "4 tokens are too few for a chunk after a single one")])
def test_a_sequence_too_short_for_mixed_says_so(n: int, why: str) -> None:
    case = make_case(n=n, prompt=2)
    assert f"plan mixed: {why}" in judge(case, make_candidates(case)).unseen


def test_rows_that_a_plan_keeps_and_a_trace_lacks_are_said() -> None:
    runs = with_step(lambda t: rows(t, list(range(4, N))))
    verdict = judge(CASE, runs)
    assert verdict.outcome == "agree"
    line = "logits of plan step at position 0 to 3: the trace lacks 4 of 24 rows"
    assert line in verdict.unseen


@pytest.mark.parametrize("with_probe", [False, True])
def test_a_run_of_one_token_cannot_tell(with_probe: bool) -> None:
    case = make_case(n=1, prompt=1)
    runs, probe = make_candidates(case), PROBE if with_probe else None
    verdict = judge(case, runs, algebra=make_algebra(case), probe=probe)
    assert (verdict.outcome, verdict.exit_code) == ("cannot tell", 2)
    assert "neither RoPE nor a mask is seen" in " / ".join(verdict.reasons)
    off = {plan: changed(t, "logits", lambda a: a * np.float32(1.1)) for plan, t in runs.items()}
    assert judge(case, off).outcome == "differ"


def test_equal_tokens_leave_masks_to_the_probe() -> None:
    equal = make_case(tokens=[7] * N)
    runs = make_candidates(equal)
    assert judge(equal, runs).notes == (
        "all tokens are equal: a wrong mask or row cannot show; give a prompt of different ones",
    )
    assert judge(equal, runs, probe=PROBE).notes == (
        "all tokens are equal: a wrong mask or row cannot show here; only the probe has different "
        "ones",
    )


def again(**changes: Callable[[Array], Array]) -> dict[str, Trace]:
    """The plan step a second time, some arrays changed."""
    step = replace(RUNS["step"], meta=replace(RUNS["step"].meta, repeat=1))
    for name, change in changes.items():
        step = changed(step, name.replace("__", "/"), change)
    return {"step": step}


def next_up(a: Array) -> Array:
    a[13, 5] = np.nextafter(a[13, 5], np.inf, dtype=a.dtype)
    return a


def test_a_repeat_of_the_same_bits_agrees_and_one_bit_differs() -> None:
    same = judge(CASE, RUNS, repeats=again())
    found = next(g for g in same.gates if g.name == "repeat")
    assert (same.outcome, found.value, found.limit, found.plan) == ("agree", 0.0, 0.0, "step")
    for name, position in {"logits": 13, "kv__a__001__values": 9}.items():
        change = next_up if name == "logits" else put((1, 9, 2), 0.5)
        verdict = judge(CASE, RUNS, repeats=again(**{name: change}))
        assert (verdict.outcome, failed(verdict)) == ("differ", ["repeat"])
        assert verdict.first_wrong is not None
        assert (verdict.first_wrong.position, verdict.first_wrong.plan) == (position, "step")
        assert verdict.found == (
            "results change from run to run: plan step, followed twice, differs from itself "
            f"(first at position {position})"
        )


def test_a_repeat_whose_rows_stand_in_another_order_is_the_same() -> None:
    shuffled = {"step": rows(again()["step"], [*range(12, N), *range(12)])}
    assert judge(CASE, RUNS, repeats=shuffled).outcome == "agree"


def uncertain(trace: Trace) -> Trace:
    environment = LINUX | {"deterministic": False}
    return replace(trace, meta=replace(trace.meta, environment=environment))


def test_an_engine_that_says_it_is_not_deterministic_may_differ_within_the_floor() -> None:
    runs = {plan: uncertain(t) for plan, t in RUNS.items()}
    noise = make_candidates(CASE, seed=77)["step"]
    near = {"step": uncertain(replace(noise, meta=replace(noise.meta, repeat=1)))}
    verdict = judge(CASE, runs, repeats=near)
    found = next(g for g in verdict.gates if g.name == "repeat")
    assert (verdict.outcome, found.limit) == ("agree", 8.0)
    assert 0.5 < found.value < 2
    plain = {"step": replace(noise, meta=replace(noise.meta, repeat=1))}
    assert failed(judge(CASE, RUNS, repeats=plain)) == ["repeat"]
    far = {"step": changed(near["step"], "logits", on_row(13, lambda r: r + np.float32(2e-3)))}
    verdict = judge(CASE, runs, repeats=far)
    assert (verdict.outcome, failed(verdict)) == ("differ", ["repeat"])
    assert "differs from itself by more than the noise (first at position 13)" in verdict.found


def test_a_repeat_that_is_measured_by_the_floor_accuses_nobody_where_that_is_not_trusted() -> None:
    broken = replace(CASE.manifest, proofs=dict(CASE.manifest.proofs) | {"truth_agreement": 1e-3})
    case = replace(CASE, manifest=broken)
    far = changed(again()["step"], "logits", on_row(13, lambda r: r + np.float32(2e-3)))
    runs = {plan: uncertain(t) for plan, t in RUNS.items()}
    assert judge(case, runs, repeats={"step": uncertain(far)}).outcome == "cannot tell"
    assert judge(case, RUNS, repeats={"step": far}).outcome == "differ"


REPEATS: dict[str, tuple[dict[str, Trace], str]] = {
    "fewer rows": ({"step": rows(again()["step"], list(range(1, N)))}, "rows of other positions"),
    "no cache": (
        {
            name: replace(t, meta=replace(t.meta, repeat=1))
            for name, t in without_cache(again()).items()
        },
        "is in one of the two runs only",
    ),
    "the run itself": (
        {"step": RUNS["step"]},
        "says that it is followed for time 1, expected a later",
    ),
    "another version": (
        {"step": replace(again()["step"], meta=replace(again()["step"].meta, engine_version="2"))},
        "the repeat is of port 2, expected port 1.0",
    ),
    "another plan": ({"step": RUNS["chunked"]}, "repeat: port trace of plan 'chunked'"),
}


@pytest.mark.parametrize("doubt", REPEATS)
def test_a_repeat_that_cannot_be_compared_is_not_a_pass(doubt: str) -> None:
    repeats, reason = REPEATS[doubt]
    verdict = judge(CASE, RUNS, repeats=repeats)
    assert verdict.outcome == "cannot tell"
    assert reason in " / ".join(verdict.reasons)


@pytest.mark.parametrize("runs", [{}, {k: t for k, t in RUNS.items() if k != "step"}])
def test_a_repeat_without_a_first_run_is_said_in_one_line(runs: dict[str, Trace]) -> None:
    verdict = assign(CASE, [*runs.values(), *again().values()]).judge()
    assert (verdict.outcome, verdict.subject.engine) == ("cannot tell", "port")
    assert phrases.sentence(verdict).startswith(
        "cannot tell: port trace of plan 'step': a repeat (time 2) without a first run of plan "
        "step; give that trace too"
    )


def test_a_repeat_of_the_probe_is_not_left_unread() -> None:
    trace = PROBE.candidates["full"]
    twice = replace(trace, meta=replace(trace.meta, repeat=1))
    with pytest.raises(Refusal, match="a repeat of the probe's plan, expected one of the run f"):
        assign(CASE, [*RUNS.values(), twice], probe=PROBE.case)


def as_float16(a: Array) -> Array:
    return a.astype(np.float16).astype(np.float32)


def as_bfloat16(a: Array) -> Array:
    return (a.view(np.uint32) & 0xFFFF0000).view(np.float32)


def from_row(row: int, change: Callable[[Array], Array]) -> Callable[[Array], Array]:
    def one(a: Array) -> Array:
        a[row:] = change(a[row:].copy())
        return a

    return one


def nan_at(*rows: int) -> Callable[[Trace], Trace]:
    return lambda trace: changed(trace, "logits", put((list(rows), 3), np.nan))


def with_plans(changes: Mapping[str, Callable[[Trace], Trace]]) -> Mapping[str, Trace]:
    return RUNS | {plan: change(RUNS[plan]) for plan, change in changes.items()}


FOUND: dict[str, tuple[Mapping[str, Trace], str]] = {
    "a NaN": (FAULTS["a NaN"][0], "the logits of position 7 are NaN in plan step"),
    "an infinity": (FAULTS["an infinity"][0], "the logits of position 7 are infinite in plan step"),
    "NaN everywhere": (
        on_all(lambda a: a * np.float32(np.nan)),
        "the logits of position 0 and of 23 more are NaN in every plan that has them",
    ),
    "NaN in the same rows of two plans": (
        with_plans({plan: nan_at(9, 12) for plan in ("full", "chunked")}),
        "the logits of position 9 and of 1 more are NaN in plans full and chunked",
    ),
    "other rows in another plan": (
        with_plans({"full": nan_at(2, 3, 4), "step": nan_at(9, 12), "prefixes": nan_at(-1)}),
        "the logits of position 2 and of 2 more are NaN in plan full, and others are not finite in "
        "plans step and prefixes",
    ),
    "a NaN and an infinity": (
        with_step(lambda t: changed(nan_at(9)(t), "logits", put((4, 3), np.inf))),
        "the logits of position 4 and of 1 more are NaN or infinite in plan step",
    ),
    "a NaN in the cache": (
        FAULTS["a NaN in the cache"][0],
        "the values of position 7, layer 1, head 1 are NaN in the cache of plan step",
    ),
    "float16": (
        on_all(as_float16),
        "the logits of every plan hold float16 numbers only, though the run is float32",
    ),
    "bfloat16 in one plan": (
        with_step(lambda t: changed(t, "logits", as_bfloat16)),
        "the logits of plan step hold bfloat16 numbers only, though the run is float32",
    ),
    "float16 from a row on": (
        with_step(lambda t: changed(t, "logits", from_row(9, as_float16))),
        "the logits of plan step from position 9 on hold float16 numbers only, though the run is "
        "float32",
    ),
    "a cache in float16": (
        with_step(
            lambda t: replace(
                t, arrays={k: as_float16(a) if k[:2] == "kv" else a for k, a in t.arrays.items()}
            )
        ),
        "the keys and values in the cache of plan step hold float16 numbers only, though the run "
        "is float32",
    ),
    "keys of one layer in float16": (FAULTS["keys in float16"][0], ""),
    "a scale": (FAULTS["one plan's logits times 1.001"][0], ""),
}


@pytest.mark.parametrize("fault", FOUND)
def test_what_the_numbers_themselves_show_is_named(fault: str) -> None:
    runs, words = FOUND[fault]
    verdict = judge(CASE, runs, algebra=EXACT)
    assert (verdict.outcome, verdict.found) == ("differ", words)
    assert phrases.sentence(verdict).split(": ", 1)[1].startswith(words or "first wrong position")


def test_what_is_so_in_the_whole_probe_is_said_of_the_probe_alone() -> None:
    wrong = {plan: nan_at(3)(trace) for plan, trace in PROBE.candidates.items()}
    verdict = judge(CASE, RUNS, algebra=EXACT, probe=Probed(PROBE.case, wrong, PROBE.algebra))
    position = int(PROBE.case.truth.positions[3])
    assert verdict.found == f"the logits of position {position} are NaN in every plan of the probe"


def test_a_float64_run_of_float32_numbers_is_named() -> None:
    rounded = {
        plan: changed(t, "logits", lambda a: a.astype(np.float32).astype(np.float64))
        for plan, t in EXACT.items()
    }
    assert judge(CASE, RUNS, algebra=rounded).found == (
        "the logits of every plan hold float32 numbers only, though the run is float64"
    )


def test_short_rows_by_chance_are_not_taken_for_a_coarser_dtype() -> None:
    assert judge(CASE, on_all(lambda a: a * 0)).found == ""
    coarse = make_case(dtype="bfloat16")
    runs = {plan: changed(t, "logits", as_bfloat16) for plan, t in make_candidates(coarse).items()}
    off = {plan: changed(t, "logits", lambda a: a * -1) for plan, t in runs.items()}
    assert (judge(coarse, off).outcome, judge(coarse, off).found) == ("differ", "")


def test_traces_find_what_they_are_a_run_of() -> None:
    repeat = again()["step"]
    given = assign(
        CASE,
        [*RUNS.values(), repeat, *PROBE.candidates.values()],
        algebra=[*EXACT.values(), *PROBE.algebra.values()],
        probe=PROBE.case,
    )
    assert (given.candidates, given.algebra, given.repeats) == (RUNS, EXACT, {"step": repeat})
    assert given.probe == PROBE
    assert given.judge().outcome == "agree"
    assert assign(CASE, RUNS.values()).probe is None
    with pytest.raises(Refusal, match="plan digest is"):
        assign(CASE, PROBE.candidates.values())
    with pytest.raises(Refusal, match="a second trace of plan 'step'"):
        assign(CASE, [RUNS["step"], RUNS["step"]])


def test_cached_against_uncached_of_the_probe_goes_by_the_floor_of_its_position() -> None:
    wide = np.where(PROBE.case.truth.positions > 60, 1.0, PROBE.case.floors["cached"])
    case = replace(PROBE.case, floors=dict(PROBE.case.floors) | {"cached": wide})
    off = {
        plan: changed(t, "logits", on_row(row_at(33), lambda r: r + np.float32(1e-3)))
        for plan, t in PROBE.candidates.items()
        if plan == "chunked"
    }
    probe = Probed(case, dict(PROBE.candidates) | off, PROBE.algebra)
    found = next(
        g
        for g in judge(CASE, RUNS, probe=probe).gates
        if (g.name, g.plan) == (CACHED, "probe chunked")
    )
    assert (found.failed, found.position) == (True, 33)

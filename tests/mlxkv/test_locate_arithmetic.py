"""Without lane A: the layer from the cache in noise floors, and patterns over positions.

No model: see synthetic.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from synthetic import NOISE, Array, changed, make_candidates, make_case

from mlxkv.commands.locate import hints, page
from mlxkv.commands.locate import place as locate
from mlxkv.commands.locate.found import Located
from mlxkv.commands.locate.layers import EQUAL, Layer
from mlxkv.commands.locate.outside import first_wrong
from mlxkv.commands.locate.rows import rounded
from mlxkv.judge.verdict import judge
from oracle.formats.trace import Meta, Trace

CASE = make_case()
RUNS = make_candidates(CASE)


def look(runs: Mapping[str, Trace], **more: Any) -> Located:
    return locate.locate(CASE, judge(CASE, runs), arithmetic=runs, **more)


def noisier(trace: Trace, name: str, size: float, at: Any = np.s_[:]) -> Trace:
    rng = np.random.default_rng(5)

    def change(a: Array) -> Array:
        a[at] += (size * rng.standard_normal(a[at].shape)).astype(np.float32)
        return a

    return changed(trace, name, change)


def test_a_right_engine_without_lane_a_is_left_in_peace() -> None:
    found = look(RUNS)
    assert (found.outcome, found.exit_code, found.rows, found.hint) == ("nothing", 0, (), None)


def test_a_verdict_that_cannot_be_told_gives_its_reasons() -> None:
    found = look({})
    assert (found.outcome, found.exit_code) == ("cannot tell", 2)
    assert found.reasons[0].startswith("candidate: nothing to compare")


def test_a_layer_whose_keys_are_all_noisier_is_found_with_its_worst_head() -> None:
    step = noisier(RUNS["step"], "kv/a/001/keys", 100 * NOISE["float32"], at=slice(1, 2))
    found = look(RUNS | {"step": step}, cause="rope_theta 10000")
    assert (found.outcome, found.plan, found.layer, found.tap, found.head) == (
        "located",
        "step",
        1,
        "keys",
        1,
    )
    assert found.cause == "rope_theta 10000"
    assert found.hint is not None
    assert found.hint == (
        "in layer 1: its keys, at every position, while its values are right: k_proj, RoPE, or the "
        "cache"
    )
    assert found.strip is not None
    assert found.strip.unit == "keys and values, rms error in noise floors"


def test_one_stale_row_is_found_though_every_median_is_right() -> None:
    def stale(a: Array) -> Array:
        a[0, 9] = a[0, 8]
        return a

    found = look(RUNS | {"step": changed(RUNS["step"], "kv/a/001/values", stale)})
    assert (found.position, found.layer, found.tap, found.head) == (9, 1, "values", 0)
    where = "the cache: row 9 of its values in layer 1, head 0"
    assert found.hint == f"{where}, is the truth's row 8: stale"


def test_logits_alone_wrong_point_behind_the_cache() -> None:
    wrong = {
        name: changed(t, "logits", lambda a: a * np.float32(1.001)) for name, t in RUNS.items()
    }
    own = ("logits", "positions")
    bare = {name: array for name, array in wrong["full"].arrays.items() if name in own}
    found = look(wrong | {"full": replace(wrong["full"], arrays=bare)})
    kind = "a scale, an eps, weights, or a mask that shows later tokens"
    assert (found.position, found.kind, found.layer) == (0, kind, None)
    assert found.hint == (
        "by the cache of plan step, as plan full shows none; "
        "keys and values are within their limits in every layer: behind the layers: every row is "
        "1.001 times the truth's: the final norm (its mean, eps or rsqrt), or a scale of the logits"
    )


def test_without_a_cache_the_position_must_do() -> None:
    rest = {k: v for k, v in RUNS["full"].arrays.items() if not k.startswith("kv/")}
    full = noisier(replace(RUNS["full"], arrays=rest), "logits", 0.01, at=slice(1, None))
    found = look({"full": full})
    assert (found.plan, found.position, found.kind) == ("full", 1, "RoPE or the mask")
    assert found.hint is not None
    assert found.hint.endswith(
        "points to RoPE or the mask (no keys and values of plan full to read the layer from)"
    )


def test_calls_of_several_tokens_that_are_noisier_are_named() -> None:
    found = look(RUNS | {"full": noisier(RUNS["full"], "logits", 1e-2)})
    assert found.hint is not None
    assert found.hint.startswith("calls of several tokens are noisier than single ones")


def with_cache(plan: str, step: Trace) -> Trace:
    """The run of a plan, with step's keys and values."""
    rows = {name: a for name, a in step.arrays.items() if name.startswith("kv/")}
    return replace(RUNS[plan], arrays=dict(RUNS[plan].arrays) | rows)


@pytest.mark.parametrize(("size", "words"), [
    (3e-4, "in layer 0 by 0.0003 of keys and values, as matrix products with 10 bits make it "
     "(TF32, MLX_ENABLE_TF32=0)"),
    (3e-2, "in layer 0 by 0.03 of keys and values"),
])  # fmt: skip
def test_calls_of_several_tokens_are_compared_at_the_positions_of_single_ones(
    size: float, words: str
) -> None:
    rows, full = np.s_[:, CASE.manifest.prompt_tokens :], with_cache("full", RUNS["step"])
    for kind in ("keys", "values"):
        full = noisier(full, f"kv/a/000/{kind}", size, at=rows)
    hint = look(RUNS | {"full": noisier(full, "logits", 1e-2)}).hint
    assert hint == f"calls of several tokens are noisier than single ones: {words}"
    # Rows of other tokens are no measure: a prompt's may be noisier than those after it.
    step = RUNS["step"]
    for kind in ("keys", "values"):
        step = noisier(step, f"kv/a/000/{kind}", size, at=np.s_[:, : CASE.manifest.prompt_tokens])
    hint = look(RUNS | {"step": step, "full": with_cache("full", RUNS["step"])}).hint
    assert hint is not None
    assert "noisier" not in hint


def test_a_plan_that_gives_other_numbers_a_second_time_is_said_to_do_so() -> None:
    again = replace(RUNS["step"], meta=replace(RUNS["step"].meta, repeat=1))
    verdict = judge(CASE, RUNS, repeats={"step": changed(again, "logits", lambda a: a + 1e-6)})
    assert {gate.name for gate in verdict.gates if gate.failed} == {"repeat"}
    found = locate.locate(CASE, verdict, arithmetic=RUNS)
    assert (found.outcome, found.layer, found.hint) == ("located", None, locate.AGAIN)


def test_that_results_change_is_said_before_a_place_is_named() -> None:
    size = 100 * NOISE["float32"]
    step = noisier(RUNS["step"], "kv/a/001/keys", size, at=slice(1, 2))
    again = replace(step, meta=replace(step.meta, repeat=1))
    found = {}
    for name, repeat in (("same", again), ("other", changed(again, "logits", lambda a: a * 2))):
        runs = RUNS | {"step": step}
        verdict = judge(CASE, runs, repeats={"step": repeat})
        found[name] = locate.locate(CASE, verdict, arithmetic=runs)
        assert (found[name].layer, found[name].tap, found[name].head) == (1, "keys", 1)
    changes = "results change from run to run: plan step, followed twice, differs from itself "
    assert (found["same"].changes, found["other"].changes) == (
        None,
        f"{changes}(first at position 0)",
    )
    lines = page.console(found["other"], CASE.manifest, engine="x", layers=3).splitlines()
    assert lines[2] == f"repeats   {found['other'].changes}"
    assert lines[-1].startswith("located, though results change from run to run: position 0, layer")
    assert "results" not in page.console(found["same"], CASE.manifest, engine="x", layers=3)


def test_an_error_that_grows_with_the_position_is_named() -> None:
    rng = np.random.default_rng(3)

    def grow(a: Array) -> Array:
        a += (1e-4 * np.arange(len(a))[:, None] ** 2 * rng.standard_normal(a.shape)).astype(
            np.float32
        )
        return a

    found = look(
        {name: changed(t, "logits", grow) for name, t in RUNS.items() if name != "prefixes"}
    )
    assert found.hint is not None
    # What makes it grow was not measured: the keys of layer 0 are right.
    assert "the error grows with the position; keys and values are within" in found.hint
    assert "RoPE" not in found.hint


@pytest.mark.parametrize(("position", "plan", "words"), [
    (0, "step", "a scale"), (1, "full", "RoPE"), (3, "chunked", "the start of a chunk"),
    (5, "step", "the first call after the prompt"),
    (9, "step", "a stale or lost"), (3, "full", "what starts at this position"),
])  # fmt: skip
def test_the_first_wrong_position_names_the_kind(position: int, plan: str, words: str) -> None:
    first = locate.FirstWrong(position, None, plan, "sigma")
    assert locate.kind(CASE, first).startswith(words)


def test_the_first_wrong_layer_is_the_one_that_jumps() -> None:
    ratios = np.ones((2, 4, 2, 10))
    assert first_wrong(ratios) is None
    ratios[:, 1] = 3.9  # within the limit
    ratios[:, 2] = 11.0  # above it, and less than three times the layer before
    ratios[1, 3, 1] = 40.0
    assert found_in(ratios) == (3, [(1, 1)])
    ratios[0, 0, 0, 7] = np.nan
    assert found_in(ratios) == (0, [(0, 0)])


def found_in(ratios: Array) -> tuple[int, list[tuple[int, int]]]:
    """The first wrong layer, and which of its keys and values and heads hold wrong rows."""
    found = first_wrong(ratios)
    assert found is not None
    layer, wrong = found
    return layer, [(int(kind), int(head)) for kind, head in np.argwhere(wrong.any(-1))]


def test_a_single_row_of_an_earlier_layer_comes_before_a_later_layers_median() -> None:
    ratios = np.ones((2, 3, 2, 10))
    ratios[0, 0, :, 4] = 500.0
    ratios[:, 1:, :, 4:] = 900.0
    found = first_wrong(ratios)
    assert found is not None
    layer, wrong = found
    assert (layer, np.argwhere(wrong).tolist()) == (0, [[0, 0, 4], [0, 1, 4]])


# Rows of a cache, in float64.

ROWS = np.random.default_rng(0).standard_normal((1, 6, 4))


def said(held: Array) -> str:
    plan = RUNS["step"].meta.plan
    meta = Meta(plan, "x", "1", "float64")
    went_in = {"tap/000/k_rope": ROWS}
    run, truth = (
        Trace(meta, {"kv/a/000/keys": a, "kv/a/000/values": a} | went_in) for a in (held, ROWS)
    )
    layer = Layer(run, truth, 0)
    errors = layer.errors("keys")
    assert errors is not None
    row = int(np.flatnonzero(~(errors[0] <= EQUAL))[0])
    return hints.explain(layer, "keys", row, (0,)).removeprefix("the cache: ")


def test_what_a_wrong_row_holds_is_said() -> None:
    def put(row: int, value: Array) -> Array:
        held = ROWS.copy()
        held[0, row] = value
        return held

    assert (
        said(put(3, ROWS[0, 2]))
        == "row 3 of its keys in layer 0, head 0, is the truth's row 2: stale"
    )
    lost = "row 2 of its keys in layer 0, head 0, is the truth's row 3: a token was lost or moved"
    assert said(np.delete(ROWS, 2, axis=1)) == f"{lost} before it"
    assert said(ROWS[:, :5]) == "row 5 of its keys in layer 0, head 0, is missing or not a number"
    assert said(put(4, np.zeros(4))) == "row 4 of its keys in layer 0, head 0, is empty"
    for dtype in ("float32", "float16", "bfloat16"):
        assert said(put(1, rounded(ROWS[0, 1], dtype))).endswith(f"is rounded to {dtype}")
    assert said(put(0, ROWS[0, 0] + 1)).endswith(
        "is none of the truth's rows: overwritten or changed"
    )

"""Where something first goes wrong: plan and position, the layer, the tap, the head, and a hint.

With lane A (the port in float64) every layer has been fed the truth's input, so that the first tap
that is off in a layer was made wrong there. Without lane A the layer is read from the cache's keys
and values, in units of the noise floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mlxkv.commands.locate import hints, outside, patterns
from mlxkv.commands.locate import opened as opening
from mlxkv.commands.locate.found import TAP, Located, TapRow
from mlxkv.commands.locate.layers import EQUAL, HEADED, WALK, Layer, count
from mlxkv.commands.locate.opened import Opened
from mlxkv.judge import measure
from mlxkv.judge.case import ORDER, Case
from mlxkv.judge.finding import changing
from mlxkv.judge.measure import Floats
from mlxkv.judge.result import FirstWrong, Gate, GateName, Strip, Verdict
from mlxkv.report import phrases
from oracle.formats.trace import Trace

AGAIN = (
    "the same plan, followed a second time in the same process, gives other numbers, and nothing "
    "else is wrong: something in it is not deterministic, or is kept from one run to the next"
)


def failing_plan(verdict: Verdict) -> str | None:
    """Of the judged plans that lane A found wrong the one that is wrong first: to record taps of.

    Of several the first in the order of the plans.
    """
    failed = [g for g in verdict.gates if g.scope == "algebra" and g.failed and g.plan in ORDER]

    def start(gate: Gate) -> tuple[float, int]:
        return math.inf if gate.first is None else gate.first, ORDER.index(gate.plan)

    return min(failed, key=start).plan if failed else None


def locate(
    case: Case,
    verdict: Verdict,
    *,
    propagated: Trace | None = None,
    isolated: Trace | None = None,
    arithmetic: Mapping[str, Trace] | None = None,
    opened: Opened | None = None,
    cause: str | None = None,
    notes: Sequence[str] = (),
) -> Located:
    """The place that a verdict and the traces it was made from point to.

    `propagated` and `isolated` are lane A's traces with taps, of the plan that failed (any plan, if
    none did). Taps that they or `case.truth` lack are not looked at. `arithmetic` are the runs in
    the run's dtype by plan, for an engine without lane A and for what shows only there. `opened` is
    such an engine's run with the taps that it hands out.
    """
    tapped = (propagated, isolated, opened and opened.run)
    broken = tuple(dict.fromkeys(why for run in tapped if run for why in failed_steps(run)))
    base = Located("cannot tell", cause=cause, notes=(*_sample(case, verdict), *notes, *broken))
    if verdict.outcome == "cannot tell":
        return replace(base, reasons=verdict.reasons or ("no gate could run",))
    if broken:
        propagated = isolated = opened = None
        if verdict.outcome == "agree":
            return replace(base, reasons=broken, notes=(*_sample(case, verdict), *notes))
    rows: list[TapRow] = []
    if propagated is not None and isolated is not None:
        base = replace(base, strip=_hidden_strip(case.truth, propagated))
        rows = tap_rows(case.truth, propagated, isolated)
    if verdict.outcome == "agree":
        return replace(base, outcome="nothing", rows=_worst(rows))
    base = _at_position(base, case, verdict)
    if isolated is not None and any(row.wrong for row in rows):
        return _in_tap(_nearer(base, case, verdict, rows), case, rows, isolated)
    if inside := opened and opening.look(base, case.truth, opened):
        return _within(inside, case, verdict, arithmetic or {})
    return _without_taps(base, case, verdict, arithmetic or {}, rows)


def _sample(case: Case, verdict: Verdict) -> list[str]:
    """That there are positions without a row of logits, of which the first wrong one may be.

    The probe's are the same for every model.
    """
    compared = "" if case.manifest.probe else phrases.rows(verdict.rows)
    how = "a first wrong position is the first of these, or of keys and values, which are all there"
    return [f"{compared}: {how}"] if compared else []


def _within(inside: Located, case: Case, verdict: Verdict, runs: Mapping[str, Trace]) -> Located:
    """What the taps show, and beside it a pattern over calls."""
    inside = _nearer(inside, case, verdict, inside.rows)
    calls = patterns.by_calls(case, verdict, runs)
    hint = f"{calls}; {inside.hint}" if calls else inside.hint
    return replace(inside, hint=hint, strip=outside.strip(case, verdict, runs))


def _without_taps(
    base: Located, case: Case, verdict: Verdict, runs: Mapping[str, Trace], rows: Sequence[TapRow]
) -> Located:
    """What the runs in the run's dtype show; `rows` are lane A's taps, all of them right."""
    wrong = [gate for gate in verdict.gates if gate.failed]
    if {gate.name for gate in wrong} == {GateName.REPEAT}:
        return replace(base, hint=AGAIN)
    in_arithmetic = any(gate.scope != "algebra" for gate in wrong)
    if failing_plan(verdict) is None or (not rows and in_arithmetic):
        return outside.look(base, case, verdict, runs)
    right = "; each recorded tap of each layer is right when it is fed the truth's input"
    return replace(base, rows=_worst(rows), hint=base.pointed + (right if rows else ""))


def failed_steps(run: Trace) -> list[str]:
    """Of a run with taps each step that failed, for which its taps are not looked at."""
    plan = run.meta.plan.name
    return [
        f"the run with taps failed in step {i} of plan {plan}, so nothing inside the layers was "
        f"looked at: {outcome.error}"
        for i, outcome in enumerate(run.meta.outcomes)
        if outcome.error is not None
    ][:1]


def tap_rows(truth: Trace, propagated: Trace, isolated: Trace) -> list[TapRow]:
    """Every tap that all three have, layer by layer in the order of computation.

    The last row are the logits that the head makes of the truth's last hidden state.
    """
    rows = []
    layers = count(truth)
    for number in range(layers):
        alone, along = Layer(isolated, truth, number), Layer(propagated, truth, number)
        for tap in WALK:
            errors, passed = alone.errors(tap), along.errors(tap)
            if errors is not None and passed is not None:
                rows.append(_row(number, tap, errors, passed))
    largest = measure.truth_rows(truth).largest.max()
    (at, errors), (_, passed) = (measure.largest_error(t, truth) for t in (isolated, propagated))
    both = (np.atleast_2d(of) / largest for of in (errors, passed))
    row = _row(layers, "logits", *both)
    if row.first is not None:
        row = replace(row, first=int(at[row.first]))
    return [*rows, row]


def _row(layer: int, tap: str, errors: Floats, passed: Floats) -> TapRow:
    """From the errors of both runs, each (heads, n)."""
    above = ~(errors <= TAP)
    first = int(np.flatnonzero(above.any(0))[0]) if above.any() else None
    heads = tuple(np.flatnonzero(above.any(1)).tolist()) if tap in HEADED else ()
    return TapRow(layer, tap, float(errors.max()), float(passed.max()), first, heads)


def _worst(rows: Sequence[TapRow]) -> tuple[TapRow, ...]:
    """Of each tap the layer that is furthest off."""

    def off(row: TapRow) -> float:
        return math.inf if row.wrong else row.isolated or 0.0

    taps = dict.fromkeys(row.tap for row in rows)
    return tuple(max((row for row in rows if row.tap == tap), key=off) for tap in taps)


def _at_position(base: Located, case: Case, verdict: Verdict) -> Located:
    """Plan, position and what kind of fault starts there."""
    first = verdict.first_wrong
    changes = changing(verdict.gates) or None
    base = replace(base, outcome="located", plan=failing_plan(verdict), changes=changes)
    if first is None:
        return base
    at = replace(base, position=first.position, token=first.token, kind=kind(case, first))
    return replace(at, plan=base.plan or first.plan, about=first.about, after=first.after)


def _nearer(base: Located, case: Case, verdict: Verdict, rows: Sequence[TapRow]) -> Located:
    """With the first wrong position of the taps, where that is more exact.

    They have every position, and logits only some.
    """
    first, wrong = verdict.first_wrong, [row.first for row in rows if row.first is not None]
    if first is None or not wrong or not (first.about or first.after is not None):
        return base
    row = min(wrong)
    if row > first.position:
        return base
    exact = replace(first, position=row, token=case.text(row), about=False, after=None)
    at = replace(base, position=row, token=exact.token, kind=kind(case, exact))
    return replace(at, about=False, after=None)


def kind(case: Case, first: FirstWrong) -> str:
    """What a fault that starts at this position usually is."""
    if first.gate == GateName.FINITE:
        return "numbers that are not finite, whatever makes them"
    if first.position == 0:
        return "a scale, an eps, weights, or a mask that shows later tokens"
    if first.position == 1:
        return "RoPE or the mask"
    if first.plan not in ("step", "chunked"):
        return "what starts at this position: a mask, a table's end, a token"
    if first.plan == "chunked" and first.position in chunk_starts(case.references["chunked"]):
        return "the start of a chunk: index_pos or the mask's offset"
    if first.position == case.manifest.prompt_tokens:
        return "the first call after the prompt: index_pos, or a row of the cache"
    return "a stale or lost cache row"


def chunk_starts(run: Trace) -> set[int]:
    """Where calls of several tokens begin behind the first call."""
    return {call.held for call in run.meta.plan.calls() if call.held and call.fed > 1}


def _in_tap(base: Located, case: Case, rows: Sequence[TapRow], isolated: Trace) -> Located:
    """With lane A: the first wrong tap of the first wrong layer."""
    wrong, layers = [row for row in rows if row.wrong], count(case.truth)
    first = wrong[0]
    assert first.first is not None
    alone = Layer(isolated, case.truth, first.layer)
    pair = alone.pair(first.tap)
    every = pair is None or len(first.heads) == len(pair[1])
    return replace(
        base,
        layer=None if first.tap == "logits" else first.layer,
        layers=tuple(dict.fromkeys(r.layer for r in wrong if r.layer < layers)),
        tap=first.tap,
        head=None if every or not first.heads else first.heads[0],
        heads=first.heads,
        hint=_hint(alone, first),
        rows=tuple(r for r in rows if r.layer in (first.layer, layers)),
    )


def _hint(layer: Layer, first: TapRow) -> str:
    assert first.first is not None
    if first.tap != "logits":
        return hints.explain(layer, first.tap, first.first, first.heads)
    at, of_run, of_truth = measure.beside(layer.run, layer.truth)
    mine, its = layer.run.logits[of_run], layer.truth.logits[of_truth]
    near = EQUAL * float(np.abs(its).max())
    found = hints.behind(mine, its, at, near=near, dtype="float64")
    return f"behind the layers: {found or hints.HEAD}"


def _hidden_strip(truth: Trace, run: Trace) -> Strip | None:
    """Each layer's hidden states, relative to the largest value of the truth at that position."""
    strip = []
    for number in range(count(truth)):
        pair = Layer(run, truth, number).pair("hidden")
        if pair is None:
            return None
        largest = np.maximum(np.abs(pair[1][0]).max(-1), np.finfo(np.float64).tiny)
        with np.errstate(invalid="ignore", over="ignore"):
            strip.append(outside.finite(np.abs(pair[0][0] - pair[1][0]).max(-1) / largest))
    return Strip("hidden state, error relative to the position's largest value", TAP, tuple(strip))

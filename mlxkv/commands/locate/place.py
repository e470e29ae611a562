"""Where something first goes wrong: plan and position, the layer, the tap, the head, and a hint.

With lane A (the port in float64) every layer has been fed the truth's input, so that the first tap
that is off in a layer was made wrong there. Without lane A the layer is read from the cache's keys
and values, in units of the noise floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from mlxkv.commands.locate import hints
from mlxkv.commands.locate.layers import HEADED, WALK, Layer, count
from mlxkv.judge import layout, measure
from mlxkv.judge.admission import cache_reasons
from mlxkv.judge.case import CACHE, ORDER, Case
from mlxkv.judge.floors import cache_floors
from mlxkv.judge.limits import KV_WORST
from mlxkv.judge.measure import Floats
from mlxkv.judge.result import FirstWrong, Strip, Verdict, plain
from oracle.formats.trace import Trace

FORMAT = "mlxkv-locate/1"
TAP = hints.EQUAL
"""Of the largest value of a tap: limit for a layer fed the truth's input in float64."""
MEDIAN = 4.0
"""Limit for the median over positions of a layer's keys or values, in floors. Medians, since the
massive activations of one token swamp a maximum."""
STEP = 3.0
"""A layer is wrong by itself above so many times the layer before; what a wrong layer hands on
grows more slowly."""
UNEVEN = 3.0
"""So many times noisier is a pattern over positions worth naming."""

Found = Literal["nothing", "located", "cannot tell"]


@dataclass(frozen=True, slots=True)
class TapRow:
    """One tap of one layer: its largest errors, relative to the truth's largest value there.

    `isolated` is that of the layer fed the truth's input. In that run `first` is the first position
    above the limit, and `heads` are the heads above it.
    """

    layer: int
    tap: str
    isolated: float
    propagated: float
    first: int | None = None
    heads: tuple[int, ...] = ()

    @property
    def wrong(self) -> bool:
        """Above the limit, or not a number."""
        return not (self.isolated <= TAP)


@dataclass(frozen=True, slots=True)
class Located:
    """Where something first goes wrong.

    `position` is the first wrong one of all plans, `plan` the one it was looked for in. `layers`
    are all layers that are wrong by themselves, of which `layer` is the first; `heads` the wrong
    heads, of which `head` is the first, None where every head is wrong. `cause` is the usual
    mistake that explains the difference, where one was found.
    """

    outcome: Found
    plan: str | None = None
    position: int | None = None
    token: str | None = None
    kind: str | None = None
    layer: int | None = None
    layers: tuple[int, ...] = ()
    tap: str | None = None
    head: int | None = None
    heads: tuple[int, ...] = ()
    hint: str | None = None
    cause: str | None = None
    rows: tuple[TapRow, ...] = ()
    strip: Strip | None = None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 nothing stands out, 1 something is located, 2 could not tell."""
        return {"nothing": 0, "located": 1, "cannot tell": 2}[self.outcome]

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-locate/1`: plain values; numbers that are not finite are null."""
        rows = [asdict(row) | {"wrong": row.wrong} for row in self.rows]
        head = {"format": FORMAT, "exit_code": self.exit_code, "limit": TAP}
        return dict(plain(head | asdict(self) | {"rows": rows}))

    @property
    def at(self) -> tuple[int, int] | None:
        """Layer and position, where both are known."""
        if self.layer is None or self.position is None:
            return None
        return self.layer, self.position

    @property
    def pointed(self) -> str:
        """What the first wrong position alone says."""
        return f"the first wrong position points to {self.kind or 'no kind of fault'}"


def failing_plan(verdict: Verdict) -> str | None:
    """The first of the judged plans that lane A found wrong: the one to record taps of."""
    failed = {g.plan for g in verdict.gates if g.scope == "algebra" and g.failed}
    return next((plan for plan in ORDER if plan in failed), None)


def locate(
    case: Case,
    verdict: Verdict,
    *,
    propagated: Trace | None = None,
    isolated: Trace | None = None,
    arithmetic: Mapping[str, Trace] | None = None,
    cause: str | None = None,
    notes: Sequence[str] = (),
) -> Located:
    """The place that a verdict and the traces it was made from point to.

    `propagated` and `isolated` are lane A's traces with taps, of the plan that failed (any plan, if
    none did). Taps that they or `case.truth` lack are not looked at. `arithmetic` are the runs in
    the run's dtype by plan, for an engine without lane A and for what shows only there.
    """
    base = Located("cannot tell", cause=cause, notes=tuple(notes))
    if verdict.outcome == "cannot tell":
        return replace(base, reasons=verdict.reasons or ("no gate could run",))
    rows: list[TapRow] = []
    if propagated is not None and isolated is not None:
        base = replace(base, strip=_hidden_strip(case.truth, propagated))
        rows = tap_rows(case.truth, propagated, isolated)
    if verdict.outcome == "agree":
        return replace(base, outcome="nothing", rows=_worst(rows))
    base = _at_position(base, case, verdict)
    if isolated is not None and any(row.wrong for row in rows):
        return _in_tap(base, case, rows, isolated)
    if failing_plan(verdict) is None:
        return _in_arithmetic(base, case, verdict, arithmetic or {})
    right = "; each recorded tap of each layer is right when it is fed the truth's input"
    return replace(base, rows=_worst(rows), hint=base.pointed + (right if rows else ""))


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
    errors, passed = (
        np.atleast_2d(measure.largest_error(t, truth)[1]) / largest for t in (isolated, propagated)
    )
    row = _row(layers, "logits", errors, passed)
    if row.first is not None:
        row = replace(row, first=int(np.sort(isolated.positions)[row.first]))
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
        return math.inf if row.wrong else row.isolated

    taps = dict.fromkeys(row.tap for row in rows)
    return tuple(max((row for row in rows if row.tap == tap), key=off) for tap in taps)


def _at_position(base: Located, case: Case, verdict: Verdict) -> Located:
    """Plan, position and what kind of fault starts there."""
    first = verdict.first_wrong
    base = replace(base, outcome="located", plan=failing_plan(verdict))
    if first is None:
        return base
    at = replace(base, position=first.position, token=first.token, kind=kind(case, first))
    return replace(at, plan=base.plan or first.plan)


def kind(case: Case, first: FirstWrong) -> str:
    """What a fault that starts at this position usually is."""
    if first.position == 0:
        return "a scale, an eps or weights"
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
        hint=hints.explain(alone, first.tap, first.first, first.heads),
        rows=tuple(r for r in rows if r.layer in (first.layer, layers)),
    )


def _hidden_strip(truth: Trace, run: Trace) -> Strip | None:
    """Each layer's hidden states, relative to the largest value of the truth at that position."""
    strip = []
    for number in range(count(truth)):
        pair = Layer(run, truth, number).pair("hidden")
        if pair is None:
            return None
        largest = np.maximum(np.abs(pair[1][0]).max(-1), np.finfo(np.float64).tiny)
        with np.errstate(invalid="ignore", over="ignore"):
            strip.append(_finite(np.abs(pair[0][0] - pair[1][0]).max(-1) / largest))
    return Strip("hidden state, error relative to the position's largest value", TAP, tuple(strip))


def _in_arithmetic(
    base: Located, case: Case, verdict: Verdict, runs: Mapping[str, Trace]
) -> Located:
    """Without a fault in lane A: the layer from step's cache, and patterns over positions."""
    ratios = _cache_ratios(case, runs.get("step"))
    patterns = (_by_calls(case, verdict, ratios), _by_position(verdict))
    words = [pattern for pattern in patterns if pattern]
    if ratios is None:
        why = "no keys and values of plan step to read the layer from"
        return replace(base, hint="; ".join([*words, f"{base.pointed} ({why})"]))
    by_position = tuple(map(_finite, ratios.max((0, 2))))
    strip = Strip("keys and values, rms error in noise floors", KV_WORST, by_position)
    found = layer_of(ratios)
    if found is None:
        behind = "behind the last layer's keys and values, or the head"
        words += [f"the cache is within the noise in every layer: {behind}"]
        return replace(base, strip=strip, hint="; ".join(words))
    layer, tap, head, row = found
    if row is not None:
        words += [f"the cache: row {row} of its {tap} in layer {layer}, head {head}"]
    else:
        before = f" or behind the keys and values of layer {layer - 1}" if layer else ""
        words += [f"in layer {layer}{before}"] + ([base.pointed] if base.kind else [])
    place = replace(base, layer=layer, layers=(layer,), tap=tap, head=head, heads=(head,))
    return replace(place, strip=strip, hint="; ".join(words))


def _cache_ratios(case: Case, step: Trace | None) -> Floats | None:
    """(keys and values, layers, K, n) in floors; None without keys and values to read."""
    largest = measure.cache_largest(case.truth)
    if step is None or step.kv(CACHE, 0) is None or largest is None:
        return None
    step = layout.as_truth(step, case.truth)
    if cache_reasons(step, case.truth):
        return None
    return measure.cache_errors(step, case.truth)[0] / cache_floors(case, largest)


def layer_of(ratios: Floats) -> tuple[int, str, int, int | None] | None:
    """The first wrong layer, keys or values, head, and the row where single rows are wrong.

    `ratios` are (keys and values, layers, K, n) in floors.
    """
    # A single row that is not a number must not take its layer's median with it.
    finite = np.where(np.isnan(ratios), np.inf, ratios)
    medians = np.median(finite, axis=-1)  # [keys and values, layers, K]
    by_layer = medians.max((0, 2))
    for layer, median in enumerate(by_layer):
        if not (median <= MEDIAN) and not (layer and median <= STEP * by_layer[layer - 1]):
            worst = int(np.argmax(medians[:, layer]))
            kind, head = map(int, np.unravel_index(worst, medians[:, layer].shape))
            return layer, ("keys", "values")[kind], head, None
    wrong = np.argwhere(~(ratios.swapaxes(0, 1) <= KV_WORST))  # in order of layer
    if not len(wrong):
        return None
    layer, kind, head, row = map(int, wrong[0])
    return layer, ("keys", "values")[kind], head, row


def _by_calls(case: Case, verdict: Verdict, ratios: Floats | None) -> str | None:
    """Calls of several tokens much noisier than single ones.

    In the logits of the same positions, or in the first layer's rows: those depend on their own
    token alone, while later layers are read through the prompt's noisy rows, which hide most of it.
    """
    prompt = case.manifest.prompt_tokens
    curves = {c.plan: dict(zip(c.positions, c.rms, strict=True)) for c in verdict.curves}
    at, pairs = range(prompt, case.length), list[Any]()
    if at and {"full", "step"} <= curves.keys():
        pairs.append([[curves[plan][p] for p in at] for plan in ("full", "step")])
    if at and prompt > 1 and ratios is not None:
        pairs.append(np.split(ratios[:, 0], [prompt], axis=-1))
    if not any(np.median(several) > UNEVEN * np.median(single) for several, single in pairs):
        return None
    return (
        "calls of several tokens are noisier than single ones: matrix products in reduced "
        "precision (TF32, MLX_ENABLE_TF32=0)"
    )


def _by_position(verdict: Verdict) -> str | None:
    """Errors that grow all along the sequence."""
    full = next((curve for curve in verdict.curves if curve.plan == "full"), None)
    if full is None or len(full.positions) < 16:
        return None
    ratios = np.array(full.rms) / np.array(verdict.floor)[list(full.positions)]
    quarters = [float(np.median(part)) for part in np.array_split(ratios, 4)]
    if quarters != sorted(quarters) or not quarters[-1] > UNEVEN * quarters[0]:
        return None
    return "the error grows with the position: the precision of RoPE's angles or tables"


def _finite(values: Floats) -> tuple[float | None, ...]:
    return tuple(plain(values.tolist()))

"""Limits, gates and controls: from traces to a verdict.

Every limit is a constant here, with the measurement that chose it. Values are in units of the noise floor unless said
otherwise. All gates are joined by AND, and every comparison is `not (value <= limit)`, so that NaN fails. See DESIGN.md,
"Truth, noise, and the two lanes".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlxkv.judge import delta, mean, measure, power
from mlxkv.judge.case import ORDER, Case, admit, cache_reasons, case_reasons, engine_reasons, layers
from mlxkv.judge.floors import Floors, cache_floors, logit_floors
from mlxkv.judge.gates import by_position, count, in_cache, not_run, over_rows
from mlxkv.judge.measure import Floats, Measures, TruthRows
from mlxkv.judge.result import (
    SCOPES,
    Control,
    Curve,
    FirstWrong,
    Gate,
    Outcome,
    Scope,
    Verdict,
    subject,
)
from oracle.formats.plan import PREFIXES_MOST, prefixes_feed
from oracle.formats.trace import Trace

# "Port" and "members" below: the port and each held-out member of torch's pool on SmolLM2, 24 tokens, Linux, 2 cores.
# Correct engines read 0.8 to 2 (port 0.8, members 0.9 to 1.1, prototype 1.7); the weakest seeded fault 149, on a tiny model 37.
SIGMA = 8.0
SIGMA_NOISY = 3.0  # no correct engine was seen above 2: said, not judged
SIGMA_LEAST = 0.3  # float32 only: no correct engine was seen below 0.7; float16 reads 0.45 for port and members alike
WORST = 16.0  # port 1.4, members 1.6, the prototype's worst row on candle's goldens 2.3; twice sigma's limit, for one row
PEAK = 8.0  # port 1.2, members 1.1; the floor is a maximum already. One wrong weight of 134 million peaks at 30
SHIFT = 10.0  # port 4.4 (a random model 5.5), members 5.0 (float16 4.4, bfloat16 4.9); +0.05 on every logit, which sigma does not see, 5.9e3
FLIP_MARGIN = 16.0  # in peak floors: below it noise could turn top-1 over. 13 of 24 faults flip nothing: a weak gate
CACHED = (
    8.0  # port 1.4 (float16 2.9, bfloat16 2.8); a stale row from position 60 on reads sigma 709
)
KV_MEDIAN = 4.0  # port 0.9, members 1.1; a cache in float16 reads sigma 203
# Of packed weights. A row unpacked from 16 levels a group has squares that repeat; MLX's CPU adds them one after another, and
# roundings that repeat do not cancel: at 4 bits the first norm of SmolLM2 is off by 1e-6, and with it every key of layer 0. The
# port and mlx-lm read 4.4 in float32 (1.3 at 8 bits, 0.9 in bfloat16); a cache in float16 is far beyond this one too.
KV_MEDIAN_PACKED = 10.0
KV_MOST = 10.0  # 95th percentile over positions: port 1.5, members 1.6; single tokens have massive activations
# A percentile is blind to n/20 rows, and one stale row is the commonest fault of a cache. Port 3.9, members 2.3. Any key row
# replaced by the one before it reads 1.8e5 and more in float32, 22 and more in float16 (median 145), 3 in bfloat16 (median 18;
# 46 and more in the worst head, where all heads of all layers are stale together).
KV_WORST = 30.0
ALGEBRA = 1e-10  # of max |T|: port 1.2e-14, its cache 1.6e-14, prototype 1.0e-13; eps wrong in a single norm 4.4e-7
PROBE = 1e-14  # MLX's float64 matmul, tanh, sqrt, rsqrt, sums against numpy read 4e-16; its float32-accurate functions 1e-8
# Of T itself: step, chunked and full agree to 9e-15; transformers' .double() lies at 5.1e-8 on text (7.8e-8 with weights in
# float16), up to 5.1e-7 on random or repeated ids, and with eps off by 10 % at 7e-6 and more.
PROOFS = {"truth_agreement": 1e-10, "transformers_double": 1e-6}
# Pooled floor over max |T|: torch reads 2e-7 in float32, 5e-4 in float16, 8e-3 in bfloat16.
FLOOR_MOST = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 5e-2}
# A scale that a judge must see. x1.001 reads sigma 526 in float32 but 0.5 in float16 and 0.4 in bfloat16, no more than the run
# itself; these larger ones read 18 and 22. Whether x1.001 would have been seen is said.
CONTROL_SCALE = {"float32": 1.001, "float16": 1.1, "bfloat16": 2.0}
STORED = (
    1e-3  # in floors: both sides sum the same numbers in float64, in another order; reads 3e-15
)
DISTINCT_LEAST = (
    3  # members that are not bitwise equal to another: 5 of 5 in float32, 3 in bfloat16
)
CALIBRATED = {("linux", "cpu")}  # device classes on which these limits were measured


def current_limits() -> dict[str, float]:
    """Every limit that a verdict on a port with plain weights depends on, by its name here: what selftest and calibrate try."""
    one = {
        "SIGMA": SIGMA,
        "WORST": WORST,
        "PEAK": PEAK,
        "SHIFT": SHIFT,
        "FLIP_MARGIN": FLIP_MARGIN,
        "CACHED": CACHED,
    }
    return one | {
        "KV_MEDIAN": KV_MEDIAN,
        "KV_MOST": KV_MOST,
        "KV_WORST": KV_WORST,
        "ALGEBRA": ALGEBRA,
        "PROBE": PROBE,
    }


@dataclass(frozen=True, slots=True, eq=False)
class Bench:
    """What every gate measures with: the oracle folder, the truth's rows, the floors."""

    case: Case
    truth: TruthRows
    floors: Floors
    cache_largest: Floats | None


@dataclass(frozen=True, slots=True)
class _Found:
    gates: list[Gate]
    measures: dict[str, Measures]
    reasons: list[str]


def judge(
    case: Case, candidates: Mapping[str, Trace], *, algebra: Mapping[str, Trace] | None = None
) -> Verdict:
    """The verdict on an engine's runs of the judged plans, by plan name: in the run's dtype, and in float64 (lane A)."""
    about = subject(case.manifest, [*candidates.values(), *(algebra or {}).values()])
    bench, reasons = _bench(case)
    if bench is None:
        return Verdict("cannot tell", (), (), about, reasons=tuple(reasons))
    proofs, controls = _proof_reasons(case), _controls(bench)
    inside, refused = admit(case, candidates, case.manifest.dtype)
    inside_a, refused_a = admit(case, algebra or {}, "float64")
    found = _measure(bench, inside, inside_a)
    reasons = (
        proofs + _floor_reasons(bench) + [_control_reason(c) for c in controls if not c.passed]
    )
    reasons += (
        refused + refused_a + engine_reasons([*inside.values(), *inside_a.values()]) + found.reasons
    )
    if not candidates and not algebra:
        reasons.append("candidate: nothing to compare, expected a trace of one judged plan or more")
    sound = all(c.passed for c in controls if c.expected == "agree")
    outcome = _outcome(found.gates, reasons, proved=not proofs, sound=sound)
    return Verdict(
        outcome=outcome,
        scopes=_covered(found.gates),
        plans=tuple(inside or inside_a),
        subject=about,
        gates=tuple(found.gates),
        controls=tuple(controls),
        reasons=tuple(reasons),
        notes=tuple(_notes(bench, inside, found.gates, outcome)),
        first_wrong=_first_wrong(case, found.gates) if outcome == "differ" else None,
        figures=tuple(
            delta.figures(trace, case.truth, bench.truth, plan=plan)
            for plan, trace in inside.items()
        ),
        tables=delta.page_tables(case, inside),
        floor=tuple(bench.floors.rms.tolist()),
        curves=tuple(
            Curve(plan, tuple(m.positions.tolist()), tuple(m.rms.tolist()))
            for plan, m in found.measures.items()
        ),
        distinct=case.pool.distinct,
        against="truth" if case.has_truth else "transformers",
    )


def _bench(case: Case) -> tuple[Bench | None, list[str]]:
    reasons = case_reasons(case)
    if reasons:
        return None, reasons
    truth, largest = measure.truth_rows(case.truth), measure.cache_largest(case.truth)
    if (
        not np.isfinite(truth.largest).all()
        or not truth.largest.max() > 0
        or (largest is not None and not np.isfinite(largest).all())
    ):
        return None, [
            f"{case.truth.label}: holds numbers that are not finite, or only zeros; make the folder again"
        ]
    return Bench(case, truth, logit_floors(case, truth), largest), []


def logit_gates(
    bench: Bench, plan: str, run: Measures, *, floors: Floors | None = None
) -> list[Gate]:
    """The gates of scope `logits` on one run; `floors` other than the bench's where a member is held out."""
    at, floors = run.positions, bench.floors if floors is None else floors
    sigmas = run.rms / floors.rms[at]
    sigma = float(np.sqrt(np.mean(sigmas * sigmas)))
    above = at[~(sigmas <= SIGMA)]
    flipped = (run.best != bench.truth.best[at]) & (
        bench.truth.margin[at] > FLIP_MARGIN * floors.peak[at]
    )
    return [
        count(bench.case, "finite", plan, at, ~run.finite),
        Gate(
            "sigma",
            "logits",
            plan,
            sigma,
            SIGMA,
            first=int(above[0]) if not (sigma <= SIGMA) else None,
        ),
        by_position(bench.case, "worst position", "logits", plan, at, sigmas, WORST),
        by_position(bench.case, "peak", "logits", plan, at, run.peak / floors.peak[at], PEAK),
        by_position(
            bench.case, "shift", "logits", plan, at, np.abs(run.shift) / floors.shift[at], SHIFT
        ),
        count(bench.case, "decisive flips", plan, at, flipped),
    ]


def _measure(bench: Bench, inside: Mapping[str, Trace], inside_a: Mapping[str, Trace]) -> _Found:
    truth = bench.case.truth
    measures = {plan: measure.measure(trace, truth) for plan, trace in inside.items()}
    gates, reasons = _algebra_gates(bench, inside_a)
    for plan, run in measures.items():
        gates += logit_gates(bench, plan, run)
    cache_gates, cache = _cache_gates(bench, inside.get("step"))
    gates += [_cached_gate(bench, inside), *cache_gates]
    if bench.case.manifest.dtype == "float32" and bench.case.has_truth:
        reasons += [
            reason for plan, run in measures.items() for reason in _too_near(bench, plan, run)
        ]
    return _Found(gates, measures, reasons + cache)


def _too_near(bench: Bench, plan: str, run: Measures) -> list[str]:
    """Against the pool itself: a floor raised to one ulp makes a small sigma, and says nothing about the pool."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = run.rms / bench.floors.pool[run.positions]
    sigma = float(np.sqrt(np.mean(ratios * ratios)))
    if not sigma < SIGMA_LEAST:
        return []
    return [
        f"plan {plan}: sigma is {sigma:.2g}, expected at least {SIGMA_LEAST}: the pool is further from the truth than the candidate"
    ]


def _algebra_gates(bench: Bench, traces: Mapping[str, Trace]) -> tuple[list[Gate], list[str]]:
    """Lane A. Probes that fail take the lane out, without a verdict on the others."""
    name = "algebra (float64)"
    gates: list[Gate] = []
    reasons: list[str] = []
    for plan, trace in traces.items():
        why = (
            _unproved(trace) if bench.case.has_truth else "not run: no truth for this architecture"
        )
        if why is not None:
            gates.append(not_run(name, "algebra", plan, ALGEBRA, why))
            continue
        at, errors = measure.largest_error(trace, bench.case.truth)
        gates.append(
            by_position(
                bench.case, name, "algebra", plan, at, errors / bench.truth.largest.max(), ALGEBRA
            )
        )
        if plan == "step" and layers(trace) > 0:
            gate, odd = _algebra_cache(bench, trace)
            gates, reasons = [*gates, gate], reasons + odd
    return gates or [
        not_run(name, "algebra", "-", ALGEBRA, "not run: no float64 run of this engine")
    ], reasons


def _unproved(trace: Trace) -> str | None:
    bad = [
        f"{name} is {error}"
        for name, error in sorted(trace.meta.probes.items())
        if not _within(error, PROBE)
    ]
    if bad:
        return f"cannot tell: float64 probe {bad[0]} off numpy, limit {PROBE:.0e}"
    return None if trace.meta.probes else "not run: no float64 probes in trace"


def _algebra_cache(bench: Bench, trace: Trace) -> tuple[Gate, list[str]]:
    """Relative to the largest key, or value, of each layer: the layers differ in size by orders of magnitude."""
    name, odd = "algebra, cache", cache_reasons(trace, bench.case.truth)
    if odd or bench.cache_largest is None:
        return not_run(
            name,
            "algebra",
            "step",
            ALGEBRA,
            f"not run: {(odd or ['no keys in the oracle folder'])[0]}",
        ), odd
    _, errors = measure.cache_errors(trace, bench.case.truth)
    largest = np.maximum(
        bench.cache_largest.max(axis=(2, 3), keepdims=True), np.finfo(np.float64).tiny
    )
    return in_cache(bench.case, name, "algebra", errors / largest, ALGEBRA), []


def _cached_gate(bench: Bench, inside: Mapping[str, Trace]) -> Gate:
    """Cached against uncached of the same engine: step against full, or against prefixes where there is no full."""
    name, plans = "cached against uncached", bench.case.manifest.plans
    other = "full" if "full" in inside else "prefixes"
    absent = [plan for plan in ("step", other) if plan not in inside]
    if absent:
        return not_run(name, "cache", "step", CACHED, f"not run: no trace of plan {absent[0]}")
    if plans["step"] == plans["full"]:
        return not_run(
            name,
            "cache",
            "step",
            CACHED,
            "not run: nothing was decoded, step is the same plan as full",
        )
    if inside["step"].meta.engine != inside[other].meta.engine:
        return not_run(
            name, "cache", "step", CACHED, "not run: the two traces are of different engines"
        )
    at, rms = measure.difference(inside["step"], inside[other])
    return by_position(bench.case, name, "cache", "step", at, rms / bench.floors.cached[at], CACHED)


def _cache_gates(bench: Bench, step: Trace | None) -> tuple[list[Gate], list[str]]:
    """Keys and values of the step plan, per layer and head: the worst head's median, 95th percentile and worst row."""
    why, odd = _unread(bench, step)
    if step is None or bench.cache_largest is None or why is not None:
        limits = {"median": _kv_median(bench.case), "95%": KV_MOST, "worst row": KV_WORST}
        named = [
            (f"{kind} {what}", limit)
            for kind in ("keys", "values")
            for what, limit in limits.items()
        ]
        return [
            not_run(name, "cache", "step", limit, f"not run: {why}") for name, limit in named
        ], odd
    rms, _ = measure.cache_errors(step, bench.case.truth)
    return ratio_gates(bench.case, rms / cache_floors(bench.case, bench.cache_largest)), []


def _unread(bench: Bench, step: Trace | None) -> tuple[str | None, list[str]]:
    """Why keys and values cannot be measured, and what of that leaves the verdict open."""
    truth = bench.case.truth
    if bench.cache_largest is None:
        return truth.meta.no_cache or "no keys in the oracle folder", []
    if step is None or layers(step) == 0:
        return "no trace of plan step" if step is None else "no keys in trace", []
    odd = cache_reasons(step, truth)
    # How a cache of another architecture is laid out is nobody's standard; of a row that it lost its logits tell.
    return odd[0] if odd else None, odd if bench.case.has_truth else []


def ratio_gates(case: Case, ratios: Floats) -> list[Gate]:
    """The gates on keys and values, from their errors in floors (keys and values, layers, K, n)."""
    gates = []
    for kind, of in zip(("keys", "values"), ratios, strict=True):
        gates += [
            over_rows(f"{kind} median", of, np.median(of, axis=-1), _kv_median(case)),
            over_rows(f"{kind} 95%", of, np.percentile(of, 95, axis=-1), KV_MOST),
            in_cache(case, f"{kind} worst row", "cache", of[None], KV_WORST),
        ]
    return gates


def _kv_median(case: Case) -> float:
    return KV_MEDIAN_PACKED if case.manifest.packed else KV_MEDIAN


def _controls(bench: Bench) -> list[Control]:
    """One member judged by the others, the same scaled, and its stored errors against what is measured here."""
    case, dtype, name = bench.case, bench.case.manifest.dtype, bench.case.held_out
    floors = logit_floors(case, bench.truth, without=name)
    measured = measure.measure(case.references["step"], case.truth)
    scaled = measure.measure(case.references["step"], case.truth, scale=CONTROL_SCALE[dtype])
    index, at = case.pool.members.index(name), measured.positions
    stored = [(measured.rms, "rms"), (measured.shift, "shift"), (measured.peak, "peak")]
    off = float(
        np.max(
            [
                np.max(np.abs(found - case.floors[of][index][at]) / bench.floors.rms[at])
                for found, of in stored
            ]
        )
    )
    member = mean.held_out(measured, case)
    gates, gates_scaled = (
        logit_gates(bench, "step", member, floors=floors),
        logit_gates(bench, "step", scaled, floors=floors),
    )
    factor = f"{CONTROL_SCALE[dtype]:g}"
    return [
        Control(
            f"{name}, held out", "agree", not any(g.failed for g in gates), gates[1].value, SIGMA
        ),
        Control(
            f"{name} times {factor}",
            "differ",
            any(g.failed for g in gates_scaled),
            gates_scaled[1].value,
            SIGMA,
        ),
        Control(f"stored errors of {name}", "agree", off <= STORED, off, STORED, "floors apart"),
    ]


def _control_reason(control: Control) -> str:
    return (
        f"control {control.name!r}: {control.quantity} is {control.value:.3g} (limit {control.limit:g}), "
        f"expected to {control.expected}; the floors cannot be trusted, make the oracle folder again"
    )


def _proof_reasons(case: Case) -> list[str]:
    reasons, what = [], "truth" if case.has_truth else "mean"
    for name, limit in (PROOFS if case.has_truth else mean.PROOFS[case.manifest.dtype]).items():
        value = case.manifest.proofs.get(name)
        if not _within(value, limit):
            reasons.append(
                f"{what}'s proof {name}: {value}, expected at most {limit:g}; the {what} cannot be trusted"
            )
    return reasons


def _within(value: object, limit: float) -> bool:
    """For values that a file brings: what is not a number is not within."""
    return isinstance(value, int | float) and value <= limit


def _floor_reasons(bench: Bench) -> list[str]:
    dtype, what = bench.case.manifest.dtype, "truth" if bench.case.has_truth else "mean"
    floor = float(np.sqrt(np.mean(bench.floors.rms**2)) / bench.truth.largest.max())
    if floor <= FLOOR_MOST[dtype]:
        return []
    return [
        f"noise floor: {floor:.2g} of max |{what}|, expected at most {FLOOR_MOST[dtype]:g} in {dtype}; too coarse to judge anything"
    ]


def _outcome(
    gates: Sequence[Gate], reasons: Sequence[str], *, proved: bool, sound: bool
) -> Outcome:
    """A failure counts where what it was measured with can be trusted: lane A needs the truth, lane B the pool too."""
    trusted = {"algebra": proved, "logits": proved and sound, "cache": proved and sound}
    if any(g.failed and (trusted[g.scope] or g.name == "finite") for g in gates):
        return "differ"
    return "cannot tell" if reasons or not any(g.ran for g in gates) else "agree"


def _covered(gates: Sequence[Gate]) -> tuple[Scope, ...]:
    of = {scope: [g for g in gates if g.scope == scope] for scope in SCOPES}
    return tuple(scope for scope in SCOPES if of[scope] and all(g.ran for g in of[scope]))


def _first_wrong(case: Case, gates: Sequence[Gate]) -> FirstWrong | None:
    wrong = [(g.first, g) for g in gates if g.failed and g.first is not None]
    if not wrong:
        return None
    first, gate = min(wrong, key=lambda w: w[0])
    return FirstWrong(first, case.text(first), gate.plan, gate.name, gate.layer)


def _notes(
    bench: Bench, inside: Mapping[str, Trace], gates: Sequence[Gate], outcome: Outcome
) -> list[str]:
    case, notes = bench.case, mean.note(bench.case)
    sigma = max((g.value for g in gates if g.name == "sigma"), default=0.0)
    if outcome == "agree" and sigma > SIGMA_NOISY:
        notes.append(
            f"agrees, noisier than usual: sigma is {sigma:.2f}, correct engines read at most {SIGMA_NOISY:g}"
        )
    absent = [plan for plan in ORDER if plan in case.manifest.plans and plan not in inside]
    if absent and inside:
        notes.append(f"not compared: {', '.join(absent)} (no usable trace of that plan)")
    if case.manifest.packed and any(g.scope == "algebra" and g.ran for g in gates):
        notes.append(
            f"algebra ran on the unpacked weights ({case.manifest.packed}); it does not cover quantized_matmul, which the other gates judge"
        )
    fed = prefixes_feed(case.length, case.manifest.prompt_tokens)
    if fed > PREFIXES_MOST and "prefixes" not in case.manifest.plans:
        notes.append(
            f"prefixes was not run: it would feed {fed:,} tokens, the limit is {PREFIXES_MOST:,}; full and step are judged"
        )
    if "chunked" not in case.manifest.plans:
        notes.append("chunked does not apply: a prompt of one token cannot be split")
    if case.length > 1 and len(set(case.manifest.tokens)) == 1:
        notes.append(
            "all tokens are equal: a wrong mask or row cannot show; give a prompt of different ones"
        )
    if any(t.meta.fingerprint is None for t in inside.values()):
        notes.append("weights undeclared: the trace does not say of which weights it is")
    if any(
        t.meta.config_digest not in (None, case.manifest.config_digest) for t in inside.values()
    ):
        notes.append("config digest differs from the oracle's: the engine read another config.json")
    if case.pool.distinct < DISTINCT_LEAST:
        notes.append(
            f"the pool has {case.pool.distinct} bitwise distinct members, usually {DISTINCT_LEAST} or more: its floor may read low"
        )
    odd = {_device_class(t) for t in inside.values()} - CALIBRATED
    if odd:
        notes.append(
            f"limits not calibrated on this device ({', '.join(' '.join(c) for c in sorted(odd))}): they were measured on Linux CPUs"
        )
    weak = power.note(power.read(), case.manifest.dtype, current_limits())
    return notes + _blind(bench) + ([weak] if weak else [])


def _blind(bench: Bench) -> list[str]:
    """In a coarse dtype: whether lane B would have seen logits times 1.001."""
    case, usual = bench.case, CONTROL_SCALE["float32"]
    if case.manifest.dtype == "float32":
        return []
    gates = logit_gates(
        bench, "step", measure.measure(case.references["step"], case.truth, scale=usual)
    )
    if any(g.failed for g in gates):
        return []
    unseen = "unseen outside lane A" if case.has_truth else "unseen here"
    return [
        f"in {case.manifest.dtype} logits times {usual:g} pass (sigma {gates[1].value:.2f}), {unseen}; "
        f"times {CONTROL_SCALE[case.manifest.dtype]:g} is seen"
    ]


def _device_class(trace: Trace) -> tuple[str, str]:
    words = str(trace.meta.environment.get("os", "unknown")).lower().split("-")[0].split()
    return (words[0] if words else "unknown", trace.meta.device)

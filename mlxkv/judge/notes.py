"""What is said beside a verdict: what it does not cover, and what a reader should know of it."""

from __future__ import annotations

from collections.abc import Iterable

from mlxkv.judge import limits, power
from mlxkv.judge.case import ORDER, Case
from mlxkv.judge.controls import blind_to
from mlxkv.judge.gates import sigma_of
from mlxkv.judge.result import Outcome
from mlxkv.judge.sequence import Judged
from mlxkv.judge.words import listed
from oracle.formats.plan import left_out
from oracle.formats.run_folder import ordinary
from oracle.formats.trace import Trace


def notes(main: Judged, outcome: Outcome, *, probed: bool) -> list[str]:
    """Each a line, without a full stop; `probed` says whether the probe was compared too."""
    yardstick, traces, gates = main.yardstick, main.runs, main.gates
    case, sigma = yardstick.case, sigma_of(gates)
    found = [_no_truth(case)]
    if outcome == "agree" and sigma > limits.SIGMA_NOISY:
        found.append(
            f"agrees, noisier than usual: sigma is {sigma:.2f}, "
            f"correct engines read at most {limits.SIGMA_NOISY:g}"
        )
    # A trace of mixed is what an earlier version could not write: `unseen` says that it is absent.
    absent = [plan for plan in ORDER[:-1] if plan in case.manifest.plans and plan not in traces]
    if absent and traces:
        which = "that plan" if len(absent) == 1 else "those plans"
        found.append(f"not compared: {listed(absent)} (no usable trace of {which})")
    if case.manifest.packed and any(g.scope == "algebra" and g.ran for g in gates):
        found.append(
            f"algebra ran on the unpacked weights ({case.manifest.packed}); it does not cover "
            "quantized_matmul, which the other gates judge"
        )
    found += [*_of_sequence(case, probed), *_of_traces(case, traces.values())]
    weak = power.note(power.read(), case.manifest.dtype, limits.current_limits())
    return [note for note in (*found, _blind(main), weak) if note]


def _no_truth(case: Case) -> str | None:
    if case.has_truth:
        return None
    left = ", ".join(case.manifest.left_out)
    odd = f"; left out, as it computes something else in float64: {left}" if left else ""
    runs = ", ".join(ordinary(case.pool.members))
    return (
        "no truth for this architecture: the reference is the mean of transformers' own runs "
        f"({runs}), and an error that all of them share is not seen{odd}"
    )


def _of_sequence(case: Case, probed: bool) -> list[str]:
    """What the tokens and their plans leave unseen."""
    about = case.manifest
    why = left_out(case.length, prompt=about.prompt_tokens, original=about.original)
    # Of mixed `unseen` says it.
    found = [f"{plan} was not run: {why[plan]}" for plan in ORDER[:-1] if plan in why]
    if case.length > 1 and len(set(case.manifest.tokens)) == 1:
        what = "all tokens are equal: a wrong mask or row cannot show"
        found.append(
            f"{what} here; only the probe has different ones"
            if probed
            else f"{what}; give a prompt of different ones"
        )
    return found


def _of_traces(case: Case, traces: Iterable[Trace]) -> list[str]:
    """What the traces do not say of themselves, and where nobody measured the limits."""
    metas, found = [trace.meta for trace in traces], []
    if any(meta.fingerprint is None for meta in metas):
        found.append("weights undeclared: the trace does not say of which weights it is")
    if any(meta.config_digest not in (None, case.manifest.config_digest) for meta in metas):
        found.append("config digest differs from the oracle's: the engine read another config.json")
    if case.pool.distinct < limits.DISTINCT_LEAST:
        found.append(
            f"the pool has {case.pool.distinct} bitwise distinct members, "
            f"usually {limits.DISTINCT_LEAST} or more: its floor may read low"
        )
    systems = (str(meta.environment.get("os", "unknown")).lower() for meta in metas)
    names = [(system.split("-")[0].split() or ["unknown"])[0] for system in systems]
    devices = set(zip(names, (meta.device for meta in metas), strict=True)) - limits.CALIBRATED
    if devices:
        classes = ", ".join(" ".join(one) for one in sorted(devices))
        found.append(
            f"limits not calibrated on this device ({classes}): they were measured on Linux CPUs"
        )
    return found


def _blind(main: Judged) -> str | None:
    """In a coarse dtype: whether logits times 1.001 would have been seen in the run's dtype."""
    case, usual = main.case, limits.CONTROL_SCALE["float32"]
    dtype = case.manifest.dtype
    seen = dtype == "float32"
    sigma = None if seen else blind_to(main.yardstick, main.survey.scaled[usual])
    if sigma is None:
        return None
    unseen = "unseen outside lane A" if case.has_truth else "unseen here"
    return (
        f"in {dtype} logits times {usual:g} pass (sigma {sigma:.2f}), {unseen}; "
        f"times {limits.CONTROL_SCALE[dtype]:g} is seen"
    )

"""What may be measured at all: names, plans, positions, shapes and dtypes, before any number.

Each check gives reasons, one line each, for which the verdict is "cannot tell": two traces that are
not of the same weights, plan and positions have no distance. Whether a candidate's numbers are
finite is not checked here: a NaN is a number, and a wrong one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mlxkv.judge.case import CACHE, ORDER, Case
from oracle.formats import contents
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan, fewer_prefixes, growing_prefixes
from oracle.formats.rows import WHOLE
from oracle.formats.run_folder import Manifest
from oracle.formats.trace import Trace


def by_plan(manifest: Manifest, traces: Iterable[Trace]) -> dict[str, Trace]:
    """Traces under the names of the judged plans that have the same digest.

    Where nothing is decoded, full and step are the same plan, and one trace has both names.
    """
    found: dict[str, Trace] = {}
    for trace in traces:
        digest = trace.meta.plan.digest
        names = [name for name in manifest.plans if digest in _digests(manifest, name, trace)]
        if not names:
            known = ", ".join(f"{name} {of[:12]}" for name, of in sorted(manifest.plans.items()))
            what, remedy = f"plan digest is {digest[:12]}", "run the oracle folder's plans"
            if not isinstance(trace.meta.plan.rows, str):
                remedy = "its rows are a probe's: give a folder with that probe, and no --quick"
                if trace.meta.plan.longest > WHOLE:
                    remedy = "its rows are a sample: give the folder whose plan it is"
            raise Refusal(f"{what}, expected one of {known}", where=trace.label, remedy=remedy)
        for name in names:
            if name in found:
                what = f"a second trace of plan {name!r} beside {found[name].label}"
                raise Refusal(what, where=trace.label, remedy="give one of them")
            found[name] = trace
    return found


def admit(
    case: Case, traces: Mapping[str, Trace], dtype: str
) -> tuple[dict[str, Trace], list[str]]:
    """The traces that may be measured, in the order of the plans, and why the others may not."""
    inside, reasons = {}, []
    for plan in sorted(traces, key=lambda p: (ORDER.index(p) if p in ORDER else len(ORDER), p)):
        odd = trace_reasons(traces[plan], plan, case, dtype=dtype)
        reasons += odd
        if not odd:
            inside[plan] = traces[plan]
    return inside, reasons


def trace_reasons(trace: Trace, plan: str, case: Case, *, dtype: str) -> list[str]:
    """Why `trace` cannot be measured as the judged plan of that name; empty where it can."""
    meta, manifest, reasons = trace.meta, case.manifest, []
    if meta.fingerprint not in (None, manifest.fingerprint):
        found, wanted = str(meta.fingerprint)[:16], manifest.fingerprint[:16]
        what = f"weights fingerprint is {found}, expected {wanted} as the oracle's"
        reasons.append(f"{what}; run it on the same weights")
    if meta.dtype != dtype:
        what = f"dtype is {meta.dtype!r}, expected {dtype!r} as this run's"
        reasons.append(f"{what}; run it in {dtype}")
    wanted, found = manifest.plans.get(plan, ""), meta.plan.digest
    if not wanted:
        known = ", ".join(sorted(manifest.plans))
        reasons.append(f"plan {plan!r} is not judged here, expected one of {known}")
    elif found not in _digests(manifest, plan, trace):
        what = f"plan digest is {found[:12]}, expected {wanted[:12]} of plan {plan!r}"
        reasons.append(f"{what}; run that plan")
    else:
        reasons += _shape_reasons(trace, case, dtype) + _position_reasons(trace, case)
    return [f"{trace.label}: {reason}" for reason in reasons]


def _digests(manifest: Manifest, plan: str, trace: Trace) -> set[str]:
    """What a trace of a judged plan may have as its plan's: in float64 it may have fewer of the
    growing prefixes.
    """
    found = {manifest.plans[plan]}
    if plan == "prefixes" and trace.meta.dtype == "float64":
        steps = growing_prefixes(tuple(manifest.tokens), manifest.prompt_tokens)
        found.add(fewer_prefixes(Plan(plan, steps, "last")).digest)
    return found


def engine_reasons(traces: Sequence[Trace]) -> list[str]:
    """Why the traces cannot be judged as one engine's; empty where they are of one."""
    engines = sorted({f"{t.meta.engine} {t.meta.engine_version}".strip() for t in traces})
    if len(engines) <= 1:
        return []
    return [f"candidate: traces of {', '.join(engines)}, expected one engine; judge each by itself"]


def asked(plan: Plan) -> set[int]:
    """The position of each call's last token, for which every engine can give a row."""
    return {call.start + call.width - 1 for call in plan.calls()}


def layers(trace: Trace) -> int:
    """Of how many layers a trace holds keys or values of the judged plans' cache."""
    return len({name.split("/")[2] for name in _cache_names(trace)})


def cache_reasons(trace: Trace, truth: Trace) -> list[str]:
    """Why the keys and values in `trace` cannot be measured against the truth's.

    What either has and the other lacks is named, then what has another shape.
    """
    reasons, mine, its = [], _cache_names(trace), _cache_names(truth)
    for name in sorted(mine ^ its):
        held, lacks = (trace, truth) if name in mine else (truth, trace)
        reasons.append(f"{lacks.label}: no {name}, expected it as in {held.label}")
    for name in sorted(mine & its):
        found, wanted = (list(of.arrays[name].shape) for of in (trace, truth))
        if found != wanted:
            reasons.append(f"{trace.label}: {name} has shape {found}, expected {wanted}")
    return reasons


def case_reasons(case: Case) -> list[str]:
    """Why the oracle's side cannot serve as a measure; empty where it can."""
    return contents.reasons(case.manifest, case.truth, case.references, case.pool, case.floors)


def _cache_names(trace: Trace) -> set[str]:
    return {name for name in trace.arrays if name.startswith(f"kv/{CACHE}/")}


def _shape_reasons(trace: Trace, case: Case, dtype: str) -> list[str]:
    logits, positions, reasons = trace.logits, trace.positions, []
    if logits.ndim != 2 or positions.ndim != 1 or len(logits) != len(positions):
        shapes = f"logits {list(logits.shape)} and positions {list(positions.shape)}"
        return [f"{shapes} do not pair up, expected a position per row"]
    columns, vocab = logits.shape[1], case.truth.logits.shape[1]
    if columns != vocab:
        what = f"logits have {columns} columns, expected {vocab}, the vocabulary"
        reasons.append(f"{what}; keep all of them")
    if dtype == "float64" and logits.dtype != np.float64:
        reasons.append(f"logits are stored as {logits.dtype}, expected float64 for a float64 run")
    return reasons


def _position_reasons(trace: Trace, case: Case) -> list[str]:
    held, n, reasons = np.asarray(trace.positions).ravel().tolist(), case.length, []
    needed = _needed(trace.meta.plan, case)
    missing, foreign = sorted(needed - set(held)), sorted(set(held) - set(range(n)))
    twice = sorted(p for p, times in Counter(held).items() if times > 1)
    failed = _failed_step(trace)
    if missing:
        what = f"no row for position {_some(missing)}, expected {len(needed)} rows"
        reasons.append("; ".join([what, *failed]))
    else:
        reasons += failed
    if foreign:
        reasons.append(f"a row for position {_some(foreign)}, expected 0 to {n - 1}")
    if twice:
        what = f"more than one row for position {_some(twice)}, expected one"
        reasons.append(f"{what}; keep the plan's last call that gives it")
    return reasons


def _needed(plan: Plan, case: Case) -> set[int]:
    """The positions of which a run of a plan must have rows: those that the plan names, or else
    what the tables show and the end of each call. Without a cache each call is a run of its own.
    """
    if isinstance(plan.rows, tuple):
        return set(plan.rows)
    if not any(call.keeps for call in plan.calls()):
        return asked(plan)
    return set(range(case.manifest.prompt_tokens - 1, case.length)) | asked(plan)


def _failed_step(trace: Trace) -> list[str]:
    """The first step that failed, if one did: no other may stand for it."""
    errors = ((i, outcome.error) for i, outcome in enumerate(trace.meta.outcomes))
    return [f"its step {i} failed: {error}" for i, error in errors if error is not None][:1]


def _some(positions: list[int]) -> str:
    head = ", ".join(map(str, positions[:6]))
    return head if len(positions) <= 6 else f"{head} and {len(positions) - 6} more"

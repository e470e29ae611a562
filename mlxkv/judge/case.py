"""What is judged, and the strict door before any number: names, plans, positions, shapes, dtypes.

A `Case` is one oracle folder. Every check here answers with reasons, one line each, for which the verdict is "cannot
tell": two things that are not of the same weights, plan and positions have no distance. Finiteness of a candidate is not
checked here: that is a number, and a wrong one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan
from oracle.formats.run_folder import FLOORS, Manifest, Pool, read_floors, read_manifest
from oracle.formats.trace import Trace, read

Array = npt.NDArray[Any]

CACHE = "a"  # the name that judged plans give their one cache
ORDER = ("full", "step", "prefixes", "chunked")  # of the judged plans
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Case:
    """One oracle folder: the truth, the transformers runs by plan name, and the pool's raw errors.

    Where the manifest has no truth, `truth` is the mean of the pool, and the errors are the members' deviations from it.
    """

    manifest: Manifest
    truth: Trace
    references: Mapping[str, Trace]
    pool: Pool
    floors: Mapping[str, Array]

    @property
    def length(self) -> int:
        """The number of tokens judged, n."""
        return len(self.manifest.tokens)

    @property
    def has_truth(self) -> bool:
        """Whether `truth` is one."""
        return self.manifest.has_truth

    @property
    def held_out(self) -> str:
        """The pool member whose logits are kept as reference-step: of the last kind of attention."""
        return f"{self.pool.kinds[-1]}-step"

    @property
    def rows(self) -> list[int]:
        """The positions that the page's tables show: from the prompt's last token on."""
        return list(range(self.manifest.prompt_tokens - 1, self.length))

    def text(self, position: int) -> str | None:
        """The token at a position as text, None where the oracle had no tokenizer."""
        return self.manifest.texts[position] if 0 <= position < len(self.manifest.texts) else None


def read_case(folder: Path) -> Case:
    """The oracle folder, its arrays mapped into memory; a Refusal where a file is missing or damaged."""
    manifest = read_manifest(folder)
    names = [
        n.removeprefix("reference-").removesuffix(".safetensors")
        for n in sorted(manifest.files)
        if n.startswith("reference-")
    ]
    pool, floors = read_floors(folder / FLOORS)
    references = {name: read(folder / f"reference-{name}.safetensors") for name in names}
    return Case(manifest, read(folder / manifest.measure), references, pool, floors)


def by_plan(manifest: Manifest, traces: Iterable[Trace]) -> dict[str, Trace]:
    """Traces under the names of the judged plans with the same digest (full and step coincide where nothing is decoded)."""
    found: dict[str, Trace] = {}
    for trace in traces:
        names = [
            name for name, digest in manifest.plans.items() if digest == trace.meta.plan.digest
        ]
        if not names:
            known = ", ".join(
                f"{name} {digest[:12]}" for name, digest in sorted(manifest.plans.items())
            )
            raise Refusal(
                f"{trace.label}: plan digest is {trace.meta.plan.digest[:12]}, expected one of {known}; run the oracle folder's plans"
            )
        for name in names:
            if name in found:
                raise Refusal(
                    f"{trace.label}: a second trace of plan {name!r} beside {found[name].label}; give one of them"
                )
            found[name] = trace
    return found


def case_reasons(case: Case) -> list[str]:
    """Why the oracle's side cannot serve as a measure; empty where it can."""
    truth, n = case.truth, case.length
    reasons = door(truth, "full", case, dtype="float64")
    if not reasons and not np.array_equal(truth.positions, np.arange(n)):
        reasons.append(
            f"{truth.label}: positions are not 0 to {n - 1} in order; make the folder again"
        )
    pairs = [truth.kv(CACHE, layer) for layer in range(layers(truth))]
    if any(
        pair is None or pair[0].shape != pair[1].shape or pair[0].shape[1] != n for pair in pairs
    ):
        reasons.append(
            f"{truth.label}: keys and values are not those of {n} tokens in every layer; make the folder again"
        )
    for name, reference in case.references.items():
        reasons += door(reference, name, case, dtype=case.manifest.dtype)
    wanted = [name for name in ("full", "step", "chunked") if name in case.manifest.plans]
    reasons += [
        f"oracle folder: no reference-{name}, expected one for each plan"
        for name in wanted
        if name not in case.references
    ]
    if case.manifest.dtype not in DTYPES:
        reasons.append(
            f"manifest.json: dtype is {case.manifest.dtype!r}, expected one of {', '.join(DTYPES)}"
        )
    return reasons + _floors_reasons(case)


def door(trace: Trace, plan: str, case: Case, *, dtype: str) -> list[str]:
    """Why `trace` cannot be measured as the judged plan of that name; empty where it can."""
    meta, manifest, where = trace.meta, case.manifest, trace.label
    reasons = []
    if meta.fingerprint is not None and meta.fingerprint != manifest.fingerprint:
        reasons.append(
            f"{where}: weights fingerprint is {meta.fingerprint[:16]}, expected {manifest.fingerprint[:16]} as the oracle's; "
            "run it on the same weights"
        )
    if meta.dtype != dtype:
        reasons.append(
            f"{where}: dtype is {meta.dtype!r}, expected {dtype!r} as this run's; run it in {dtype}"
        )
    expected = manifest.plans.get(plan)
    if expected is None:
        return [
            *reasons,
            f"{where}: plan {plan!r} is not judged here, expected one of {', '.join(sorted(manifest.plans))}",
        ]
    if meta.plan.digest != expected:
        return [
            *reasons,
            f"{where}: plan digest is {meta.plan.digest[:12]}, expected {expected[:12]} of plan {plan!r}; run that plan",
        ]
    return reasons + _shape_reasons(trace, case, dtype) + _position_reasons(trace, case)


def admit(
    case: Case, traces: Mapping[str, Trace], dtype: str
) -> tuple[dict[str, Trace], list[str]]:
    """The traces that may be measured, in the order of the plans, and why the others may not."""
    inside, reasons = {}, []
    for plan in sorted(traces, key=lambda p: (ORDER.index(p) if p in ORDER else len(ORDER), p)):
        odd = door(traces[plan], plan, case, dtype=dtype)
        reasons += odd
        if not odd:
            inside[plan] = traces[plan]
    return inside, reasons


def engine_reasons(traces: Sequence[Trace]) -> list[str]:
    """Whether the traces are of one engine."""
    engines = sorted({f"{t.meta.engine} {t.meta.engine_version}".strip() for t in traces})
    return (
        [f"candidate: traces of {', '.join(engines)}, expected one engine; judge each by itself"]
        if len(engines) > 1
        else []
    )


def asked(plan: Plan) -> set[int]:
    """The position of each call's last token: what every engine can give a row for."""
    return {call.start + len(call.step.tokens) - 1 for call in plan.calls()}


def layers(trace: Trace) -> int:
    """How many layers' keys or values a trace holds of the judged plans' cache."""
    return len({name.split("/")[2] for name in trace.arrays if name.startswith(f"kv/{CACHE}/")})


def cache_reasons(trace: Trace, truth: Trace) -> list[str]:
    """Why the keys and values in `trace` cannot be measured against the truth's; both ways, layer by layer."""
    reasons = []
    mine, its = (
        {n: a for n, a in t.arrays.items() if n.startswith(f"kv/{CACHE}/")} for t in (trace, truth)
    )
    for name in sorted(set(mine) ^ set(its)):
        held, lacks = (trace, truth) if name in mine else (truth, trace)
        reasons.append(f"{lacks.label}: no {name}, expected it as in {held.label}")
    for name in sorted(set(mine) & set(its)):
        if mine[name].shape != its[name].shape:
            reasons.append(
                f"{trace.label}: {name} has shape {list(mine[name].shape)}, expected {list(its[name].shape)}"
            )
    return reasons


def _shape_reasons(trace: Trace, case: Case, dtype: str) -> list[str]:
    logits, truth, where = trace.logits, case.truth.logits, trace.label
    if logits.ndim != 2 or trace.positions.ndim != 1 or len(logits) != len(trace.positions):
        return [
            f"{where}: logits {list(logits.shape)} and positions {list(trace.positions.shape)} do not pair up, expected a position per row"
        ]
    reasons = []
    if logits.shape[1] != truth.shape[1]:
        reasons.append(
            f"{where}: logits have {logits.shape[1]} columns, expected {truth.shape[1]}, the vocabulary; keep all of them"
        )
    if dtype == "float64" and logits.dtype != np.float64:
        reasons.append(
            f"{where}: logits are stored as {logits.dtype}, expected float64 for a float64 run"
        )
    return reasons


def _position_reasons(trace: Trace, case: Case) -> list[str]:
    where, held = trace.label, np.asarray(trace.positions).ravel().tolist()
    needed = set(case.rows) | asked(trace.meta.plan)
    errors = [
        f"; its step {i} failed: {o.error}"
        for i, o in enumerate(trace.meta.outcomes)
        if o.error is not None
    ]
    reasons = []
    missing, foreign = sorted(needed - set(held)), sorted(set(held) - set(range(case.length)))
    twice = sorted(p for p, times in Counter(held).items() if times > 1)
    if missing:
        reasons.append(
            f"{where}: no row for position {_shown(missing)}, expected {len(needed)} rows{''.join(errors[:1])}"
        )
    if foreign:
        reasons.append(
            f"{where}: a row for position {_shown(foreign)}, expected 0 to {case.length - 1}"
        )
    if twice:
        reasons.append(
            f"{where}: more than one row for position {_shown(twice)}, expected one; keep the plan's last call that gives it"
        )
    return reasons


def _floors_reasons(case: Case) -> list[str]:
    members, kinds, n, where = case.pool.members, case.pool.kinds, case.length, FLOORS
    reasons = [
        f"{where}: {', '.join(names)} names one twice, expected each once; make the folder again"
        for names in (members, kinds)
        if len(set(names)) < len(names)
    ]
    if set(kinds) != {name.split("-")[0] for name in members}:
        reasons.append(
            f"{where}: kinds are {', '.join(kinds) or 'none'}, expected those of {', '.join(members)}; make the folder again"
        )
    if not kinds or case.held_out not in members or len(members) < 2:
        wanted = case.held_out if kinds else "runs of transformers"
        reasons.append(
            f"{where}: members are {', '.join(members) or 'none'}, expected {wanted} and others"
        )
    if not case.has_truth and case.pool.distinct < 2:
        reasons.append(
            f"{where}: {case.pool.distinct} bitwise distinct members, expected 2 or more, as there is no truth to measure them by"
        )
    shapes = {
        "rms": (len(members), n),
        "shift": (len(members), n),
        "peak": (len(members), n),
        "cached": (len(kinds), n),
    }
    for name, shape in shapes.items():
        found = list(case.floors[name].shape) if name in case.floors else "none"
        if found != list(shape):
            reasons.append(
                f"{where}: {name} has shape {found}, expected {list(shape)}; make the folder again"
            )
    first = case.truth.kv(CACHE, 0)
    if first is not None:
        expected = [len(members), layers(case.truth), len(first[0]), n]
        for name in ("keys", "values"):
            found = list(case.floors[name].shape) if name in case.floors else "none"
            if found != expected:
                reasons.append(
                    f"{where}: {name} has shape {found}, expected {expected}; make the folder again"
                )
    reasons += [
        f"{where}: {name} holds a value that is not finite"
        for name, a in sorted(case.floors.items())
        if not np.isfinite(a).all()
    ]
    return reasons


def _shown(positions: list[int]) -> str:
    head = ", ".join(map(str, positions[:6]))
    return head if len(positions) <= 6 else f"{head} and {len(positions) - 6} more"

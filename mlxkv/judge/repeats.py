"""Whether an engine gives the same numbers when it follows the same plan once more.

An engine is taken for deterministic unless its traces' environment says `"deterministic": false`.
Of a deterministic one every bit must be the same; of another the two runs must lie as near to one
another as cached and uncached runs do.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mlxkv.judge import limits, measure
from mlxkv.judge.gates import Yardstick, by_position
from mlxkv.judge.measure import Bools
from mlxkv.judge.result import Gate, GateName
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace


def repeat_gates(
    yardstick: Yardstick, runs: Mapping[str, Trace], repeats: Mapping[str, Trace]
) -> tuple[list[Gate], list[str]]:
    """The gate of each plan that was followed twice, and what leaves the verdict open."""
    gates, reasons = list[Gate](), list[str]()
    for plan in (plan for plan in runs if plan in repeats):
        run, again = runs[plan], repeats[plan]
        odd = _apart(run, again)
        reasons += [f"{again.label}: {line}; follow the plan twice in one process" for line in odd]
        if odd:
            continue
        gate = _bitwise if _deterministic(run) and _deterministic(again) else _within
        gates.append(gate(yardstick, plan, run, again))
    return gates, reasons


def calls(traces: Mapping[str, Trace]) -> int:
    """How many calls the plans of these traces make."""
    return sum(1 for trace in traces.values() for _ in trace.meta.plan.calls())


def _deterministic(trace: Trace) -> bool:
    return trace.meta.environment.get("deterministic", True) is not False


def _apart(first: Trace, again: Trace) -> list[str]:
    """Why two runs have no distance: another engine, the same run, or what one lacks."""
    engines = [f"{t.meta.engine} {t.meta.engine_version}".strip() for t in (again, first)]
    if engines[0] != engines[1]:
        return [f"the repeat is of {engines[0]}, expected {engines[1]}"]
    if again.meta.repeat <= first.meta.repeat:
        what = f"the repeat says that it is followed for time {again.meta.repeat + 1}"
        return [f"{what}, expected a later one than the first run"]
    if set(first.positions.tolist()) != set(again.positions.tolist()):
        return ["the repeat has rows of other positions than the first run"]
    names = [{name for name in trace.arrays if name.startswith("kv/")} for trace in (first, again)]
    if names[0] != names[1]:
        return [f"{min(names[0] ^ names[1])} is in one of the two runs only, expected it in both"]
    found = [n for n in sorted(names[0]) if first.arrays[n].shape != again.arrays[n].shape]
    found += [n for n in ("logits", *names[0]) if first.arrays[n].dtype != again.arrays[n].dtype]
    return [f"{name} has another shape or dtype than in the first run" for name in found[:1]]


def _bitwise(yardstick: Yardstick, plan: str, run: Trace, again: Trace) -> Gate:
    """How many positions have a row of logits, keys or values that is not the same; none may."""
    at, rows, others = measure.beside(run, again)
    wrong = set[int]()
    for part in measure.blocks(len(at), run.logits.shape[1]):
        unlike = _unlike(run.logits[rows[part]], again.logits[others[part]])
        wrong.update(at[part][unlike.any(axis=-1)].tolist())
    for name in (name for name in run.arrays if name.startswith("kv/")):
        unlike = _unlike(run.arrays[name], again.arrays[name])
        wrong.update(np.flatnonzero(unlike.any(axis=(0, -1))).tolist())
    first = min(wrong, default=None)
    text = yardstick.case.text(first) if first is not None else None
    return Gate(GateName.REPEAT, plan, float(len(wrong)), 0.0, first, text, first=first)


def _unlike(a: Array, b: Array) -> Bools:
    """Where the bits of two arrays of one dtype are not the same."""
    whole = f"u{a.itemsize}"
    return np.asarray(a.view(whole) != b.view(whole))


def _within(yardstick: Yardstick, plan: str, run: Trace, again: Trace) -> Gate:
    """The worst rms of the two runs' difference, in the floors of cached against uncached."""
    at, rms = measure.difference(run, again)
    held, truth = np.isin(at, yardstick.case.truth.positions), yardstick.case.truth
    at = at[held]
    ratios = rms[held] / yardstick.floors.cached[measure.rows_of(truth, at.tolist())]
    return by_position(yardstick.case, GateName.REPEAT, plan, at, ratios, limits.CACHED)

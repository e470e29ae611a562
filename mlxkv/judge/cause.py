"""Which usual mistake explains a difference, and which of them a run could not see.

The folder of suspects is the oracle's (`python -m oracle suspects`): for each usual mistake the
errors, against the truth, of a truth that makes the mistake too, and some columns of its logits.
In `suspects.json` stand its name and words, and the plan in which alone it shows.

Axes: n positions of suspects, C columns, K key/value heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlxkv.judge import limits, measure
from mlxkv.judge.angles import Angles, estimate
from mlxkv.judge.cache_gates import ratio_gates
from mlxkv.judge.case import CACHE, ORDER, Case
from mlxkv.judge.floors import Floors, cache_floors, logit_floors
from mlxkv.judge.gates import pooled
from mlxkv.judge.limits import SIGMA
from mlxkv.judge.measure import Floats, Measures
from mlxkv.judge.result import Cause, Gate
from mlxkv.judge.words import plans_of
from oracle.formats import strict_json, tensors
from oracle.formats.disk import hash_once
from oracle.formats.errors import Refusal
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace

FORMAT = "mlxkv-suspects/2"
ARRAYS = "suspects.safetensors"
ROUGH = 1 / 3
"""A cache in float16 is rounded otherwise where float32's noise crosses a border: of an error of
203 floors some 30 are left against the truth with such a cache, 0.15 of it; less where the
rounding is coarser."""
SURE = 1.5
"""How far beyond a limit a suspect's own error must lie to be called seen: a run's noise may lie
against it. Of the shift correct runs read up to 5.0 of 10, and less of all others."""


@dataclass(frozen=True, slots=True, eq=False)
class Suspect:
    """A usual mistake: `rms`, `shift` and `peak` (n,), as in Measures; `logits` (n, C).

    `cache` (keys and values, layers, K, n) is the rms of the cache's errors. `plan` is "" if it
    shows in all plans; a `rough` one rounds what no two engines round alike.
    """

    name: str
    words: str
    plan: str
    rough: bool
    rms: Floats
    shift: Floats
    peak: Floats
    cache: Floats
    logits: Array


@dataclass(frozen=True, slots=True, eq=False)
class Suspects:
    """Those of one run folder, over its first n positions and some columns (C,) of logits."""

    listed: tuple[Suspect, ...]
    columns: Array
    angles: Angles
    n: int


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    words: str
    plan: str
    rough: bool


@dataclass(frozen=True, slots=True)
class _List:
    inputs: str
    fingerprint: str
    theta: float
    sha256: str
    suspects: list[_Entry]


def find(case: Case, candidates: Mapping[str, Trace], suspects: Suspects) -> Cause | str:
    """The suspect with the least sigma, or what the keys' angles say, or why there is none.

    Judged on the first plan above the limit of sigma, at the positions that the suspects have.
    """
    n, unsought = suspects.n, "the cause was not looked for"
    floors = logit_floors(case, measure.truth_rows(case.truth))
    found = {plan: _first(candidates.get(plan), case, n) for plan in ORDER}
    runs = {plan: run for plan, run in found.items() if run is not None}
    measured = {plan: measure.measure(run, case.truth) for plan, run in runs.items()}
    above = [plan for plan, one in measured.items() if not _sigma(one.rms, one, floors) <= SIGMA]
    for plan in above[:1]:
        if cause := _nearest(runs[plan], measured[plan], suspects, floors):
            return cause
    cached = [run for run in candidates.values() if run.kv(CACHE, 0) is not None]
    for run in cached[:1]:
        if cause := estimate(case, run, suspects.angles):
            return cause
    if above:
        return f"none of {len(suspects.listed)} usual suspects explains the difference"
    if not runs:
        return f"{unsought}: no row of a judged plan at the first {n} positions"
    where = f"at the first {n} positions of {plans_of(list(runs))}"
    return f"{unsought}: sigma is within its limit {where}"


def blind(
    case: Case, candidates: Mapping[str, Trace], gates: Sequence[Gate], suspects: Suspects
) -> tuple[str, ...]:
    """The words of those suspects that these very runs could not have shown.

    A suspect is seen if its own errors are clearly beyond a limit of a gate that ran. Positions
    that the suspects do not have count as without error. Decisive flips are not asked: one takes an
    error of half its margin, which the peak shows before.
    """
    floors = logit_floors(case, measure.truth_rows(case.truth))
    largest, ran = measure.cache_largest(case.truth), {gate.name for gate in gates if gate.ran}
    held = None if largest is None else cache_floors(case, largest)
    tried: dict[str, bool] = {}  # one mistake may be several suspects, one for each plan
    for suspect in suspects.listed:
        plans = [plan for plan in candidates if suspect.plan in ("", plan)]
        shown = any(_seen(suspect, case, candidates[plan], suspects.n, floors) for plan in plans)
        if not shown and any(candidates[plan].kv(CACHE, 0) is not None for plan in plans):
            of_cache = [] if held is None else _of_cache(case, suspect, held)
            shown = any(gate.name in ran and gate.value > SURE * gate.limit for gate in of_cache)
        if plans:
            tried[suspect.words] = tried.get(suspect.words, False) or shown
    return tuple(words for words, shown in tried.items() if not shown)


def read_suspects(folder: Path, fingerprint: str) -> Suspects:
    """The suspects of the weights of that fingerprint; a Refusal if the folder is not whole."""
    path = folder / "suspects.json"
    how: dict[str, Any] = {"where": path, "remedy": "have the folder made again"}
    value = strict_json.read(path, remedy=how["remedy"])
    found = strict_json.typed(strict_json.of_format(value, FORMAT, **how), _List, **how)
    if found.fingerprint != fingerprint:
        what = f"of weights {found.fingerprint[:16]}, expected {fingerprint[:16]}"
        raise Refusal(what, **how)
    if hash_once(folder / ARRAYS) != found.sha256:
        raise Refusal(f"sha256 of {ARRAYS} is another than the one listed", **how)
    _, arrays = tensors.read(folder / ARRAYS)
    each = ("rms", "shift", "peak", "cache", "logits")
    if any(len(arrays.get(name, ())) != len(found.suspects) for name in each):
        raise Refusal(f"{ARRAYS} holds another number of suspects than are listed", **how)
    listed = []
    for i, one in enumerate(found.suspects):
        its = {name: arrays[name][i] for name in each}
        listed.append(Suspect(one.name, one.words, one.plan, one.rough, **its))
    angles = Angles(found.theta, arrays["frequencies"], arrays["powers"])
    return Suspects(tuple(listed), arrays["columns"], angles, arrays["rms"].shape[1])


def _first(run: Trace | None, case: Case, n: int) -> Trace | None:
    """Only the rows of the first n positions, where there are any, in order of position."""
    if run is None:
        return None
    at, rows, _ = measure.beside(run, case.truth)
    keep = rows[at < n]
    arrays = {name: run.arrays[name][keep] for name in ("logits", "positions")}
    return replace(run, arrays=arrays) if len(keep) else None


def _sigma(rms: Floats, run: Measures, floors: Floors) -> float:
    sigma = pooled(rms / floors.rms[run.rows])
    return sigma if np.isfinite(sigma) else float("inf")


def _nearest(run: Trace, measured: Measures, suspects: Suspects, floors: Floors) -> Cause | None:
    """The suspect that explains the run; it must leave half of the difference at most.

    What is not finite is no size of an error, so nothing is half of it.
    """
    least, right = None, _sigma(measured.rms, measured, floors)
    if not np.isfinite(right):
        return None
    for suspect in suspects.listed:
        if suspect.plan not in ("", run.meta.plan.name):
            continue
        sigma = _sigma(_left(run, measured, suspect, suspects.columns), measured, floors)
        limit = max(SIGMA, ROUGH * right) if suspect.rough else SIGMA
        if sigma <= min(limit, right / 2) and (least is None or sigma < least.sigma):
            where = f" in plan {suspect.plan}" if suspect.plan else ""
            against = f"a truth with that mistake{where}"
            least = Cause(suspect.name, suspect.words, sigma, against)
    return least


def _left(run: Trace, measured: Measures, suspect: Suspect, columns: Array) -> Floats:
    """What the suspect leaves of the run's error, its rms by position.

    Of the sampled columns; but at least what the two rms over all columns differ by, so that an
    error of few columns is not taken for none.
    """
    at = measured.positions
    with np.errstate(invalid="ignore", over="ignore"):
        e = np.subtract(run.logits[:, columns], suspect.logits[at], dtype=np.float64)
        e -= e.mean(1, keepdims=True)
        sampled = np.sqrt(np.mean(e * e, axis=1))
        return np.asarray(np.maximum(sampled, np.abs(measured.rms - suspect.rms[at])))


def _seen(suspect: Suspect, case: Case, run: Trace, n: int, floors: Floors) -> bool:
    """Whether the logits' gates on the run would have shown the suspect."""
    every, _, rows = measure.beside(run, case.truth)
    at, rows = every[every < n], rows[every < n]
    sigmas = suspect.rms[at] / floors.rms[rows]
    pairs = (
        (np.sqrt(np.sum(sigmas**2, keepdims=True) / len(every)), SIGMA),
        (sigmas, limits.WORST),
        (suspect.peak[at] / floors.peak[rows], limits.PEAK),
        (np.abs(suspect.shift[at]) / floors.shift[rows], limits.SHIFT),
    )
    return any((values > SURE * limit).any() for values, limit in pairs)


def _of_cache(case: Case, suspect: Suspect, floors: Floats) -> list[Gate]:
    """The gates on keys and values as the suspect alone would read."""
    errors = np.zeros_like(floors)
    errors[..., : suspect.cache.shape[-1]] = suspect.cache
    return ratio_gates(case, np.divide(errors, floors, out=errors))

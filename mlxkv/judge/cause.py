"""Which usual mistake explains a difference: the engine against a truth that makes the mistake too.

The folder of suspects is the oracle's (`python -m oracle suspects`): for each usual mistake a trace
of the first positions as the truth would have it with that mistake, and in `suspects.json` its name
and words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlxkv.judge import measure
from mlxkv.judge.case import Case
from mlxkv.judge.floors import Floors, logit_floors
from mlxkv.judge.gates import pooled
from mlxkv.judge.limits import SIGMA
from mlxkv.judge.result import Cause
from oracle.formats import strict_json
from oracle.formats.disk import hash_once
from oracle.formats.errors import Refusal
from oracle.formats.trace import Trace, read

FORMAT = "mlxkv-suspects/1"


@dataclass(frozen=True, slots=True)
class Suspect:
    """A usual mistake, and the truth of the first positions with it."""

    name: str
    words: str
    truth: Trace


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    words: str
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class _List:
    inputs: str
    fingerprint: str
    suspects: list[_Entry]


def find(case: Case, candidates: Mapping[str, Trace], suspects: Sequence[Suspect]) -> Cause | str:
    """The suspect with the least sigma, or why there is none.

    It must be within the limit of sigma, which the truth itself must be above. Judged on the full
    plan, or on the step plan if there is no full one, at the positions that the suspects have.
    """
    held, unsought = max((len(s.truth.logits) for s in suspects), default=0), "was not looked for"
    run = _first(candidates.get("full", candidates.get("step")), held)
    if run is None:
        where = f"no row of plan full or step at the first {held} positions"
        return f"the cause {unsought}: {where}"
    floors = logit_floors(case, measure.truth_rows(case.truth))
    if _sigma(run, case.truth, floors) <= SIGMA:
        where = f"at the first {held} positions of plan {run.meta.plan.name}"
        return f"the cause {unsought}: sigma is within its limit {where}"
    causes = [Cause(s.name, s.words, _sigma(run, s.truth, floors)) for s in suspects]
    best = min(causes, key=lambda cause: cause.sigma)
    if best.sigma <= SIGMA:
        return best
    return f"none of {len(suspects)} usual suspects explains the difference"


def read_suspects(folder: Path, fingerprint: str) -> list[Suspect]:
    """The suspects of the weights of that fingerprint; a Refusal if the folder is not whole."""
    path = folder / "suspects.json"
    how: dict[str, Any] = {"where": path, "remedy": "have the folder made again"}
    value = strict_json.read(path, remedy=how["remedy"])
    found = strict_json.typed(strict_json.of_format(value, FORMAT, **how), _List, **how)
    if found.fingerprint != fingerprint:
        what = f"of weights {found.fingerprint[:16]}, expected {fingerprint[:16]}"
        raise Refusal(what, **how)
    for entry in found.suspects:
        if hash_once(folder / entry.file) != entry.sha256:
            raise Refusal(f"sha256 of {entry.file} is another than the one listed", **how)
    return [Suspect(one.name, one.words, read(folder / one.file)) for one in found.suspects]


def _first(run: Trace | None, n: int) -> Trace | None:
    """Only the rows of the first n positions, where there are any."""
    keep = np.flatnonzero(np.asarray(run.positions) < n) if run is not None else ()
    if run is None or len(keep) == 0:
        return None
    return replace(run, arrays={name: run.arrays[name][keep] for name in ("logits", "positions")})


def _sigma(run: Trace, truth: Trace, floors: Floors) -> float:
    measured = measure.measure(run, truth)
    sigma = pooled(measured.rms / floors.rms[measured.positions])
    return sigma if np.isfinite(sigma) else float("inf")

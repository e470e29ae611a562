"""Which usual mistake makes the delta vanish: an engine that differs from the truth, against the truth with each of them.

The folder of suspects is the oracle's (`python -m oracle suspects`): a trace of the first positions for each, and their
names and words in `suspects.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlxkv.judge import measure
from mlxkv.judge.case import Case
from mlxkv.judge.floors import Floors, logit_floors
from mlxkv.judge.result import Cause
from mlxkv.judge.verdict import SIGMA
from oracle.formats.disk import hash_once
from oracle.formats.errors import Refusal
from oracle.formats.trace import Trace, read

FORMAT = "mlxkv-suspects/1"


def find(case: Case, candidates: Mapping[str, Trace], folder: Path) -> Cause | str:
    """The suspect with the least sigma, if that is within the limit which the truth itself is above; else why there is none.

    Judged on the full plan, or on the step plan where there is no full one, at the positions that the suspects have.
    """
    suspects = read_suspects(folder, case.manifest.fingerprint)
    held = max((len(truth.logits) for _, truth in suspects), default=0)
    run = _first(candidates.get("full", candidates.get("step")), held)
    if run is None:
        return f"the cause was not looked for: no row of plan full or step at the first {held} positions"
    floors = logit_floors(case, measure.truth_rows(case.truth))
    if _sigma(run, case.truth, floors) <= SIGMA:
        return f"the cause was not looked for: sigma is within its limit at the first {held} positions of plan {run.meta.plan.name}"
    best = min(
        (replace(cause, sigma=_sigma(run, truth, floors)) for cause, truth in suspects),
        key=lambda cause: cause.sigma,
    )
    return (
        best
        if best.sigma <= SIGMA
        else f"none of {len(suspects)} usual suspects explains the difference"
    )


def read_suspects(folder: Path, fingerprint: str) -> list[tuple[Cause, Trace]]:
    """Each suspect, without a sigma yet, and the truth as it would have it; a Refusal where the folder is not whole."""
    path = folder / "suspects.json"
    try:
        value = json.loads(path.read_bytes())
        if value["format"] != FORMAT or value["fingerprint"] != fingerprint:
            raise ValueError(
                f"format {value['format']!r} of weights {value['fingerprint'][:16]}, expected {FORMAT!r} of {fingerprint[:16]}"
            )
        listed = [
            (Cause(s["name"], s["words"], float("nan")), folder / s["file"], s["sha256"])
            for s in value["suspects"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(
            f"{path}: not a list of suspects ({' '.join(str(error).split())}); have it made again"
        ) from error
    for _, file, digest in listed:
        if hash_once(file) != digest:
            raise Refusal(
                f"{file}: sha256 differs from the one in suspects.json; have the folder made again"
            )
    return [(cause, read(file)) for cause, file, _ in listed]


def _first(run: Trace | None, n: int) -> Trace | None:
    """Only the rows of the first n positions, where there are any."""
    keep = np.flatnonzero(np.asarray(run.positions) < n) if run is not None else ()
    if run is None or len(keep) == 0:
        return None
    return replace(run, arrays={name: run.arrays[name][keep] for name in ("logits", "positions")})


def _sigma(run: Trace, truth: Trace, floors: Floors) -> float:
    measured = measure.measure(run, truth)
    ratios = measured.rms / floors.rms[measured.positions]
    sigma = float(np.sqrt(np.mean(ratios * ratios)))
    return sigma if np.isfinite(sigma) else float("inf")

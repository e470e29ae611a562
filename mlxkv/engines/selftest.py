"""The port on trial: right runs and seeded faults, judged and located in memory. A process of its own.

`python -m mlxkv.engines.selftest JOB.json ORACLE RESULT.json [FAULT ...]`: one model, one oracle folder with all taps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxkv.engines.job import Job
from mlxkv.judge import locate
from mlxkv.judge.case import Case, read_case
from mlxkv.judge.trial import Trial, accused, missed
from mlxkv.judge.verdict import judge
from mlxkv.progress import bar
from oracle.plan import Plan, Refusal
from oracle.trace import Meta, Trace, write_text

if TYPE_CHECKING:
    from mlxkv.engines.faults import Fault, Place
    from mlxkv.port.llama import Llama

TAPPED = "chunked"
"""The plan in which every fault shows: it has a call of several tokens on an empty cache, one on a used cache, and single ones."""


class Bench:
    """One model in both dtypes, and what it is judged by."""

    def __init__(self, case: Case, plans: Mapping[str, Plan], models: Mapping[str, Llama], meta: Meta, probes: dict[str, float]) -> None:
        self.case, self.plans, self.models, self.meta, self.probes = case, plans, models, meta, probes

    def right(self) -> Trial:
        """The port as it is, on every judged plan in both lanes."""
        arithmetic = {name: self._run(name, "float32") for name in self.plans}
        algebra = {name: self._run(name, "float64") for name in self.plans}
        verdict = judge(self.case, arithmetic, algebra=algebra)
        found = locate.locate(self.case, verdict, arithmetic=arithmetic)
        return accused(verdict, found)

    def wrong(self, fault: Fault, place: Place) -> Trial:
        """The port with a fault in it: what the judge says of it, and where it is found."""
        arithmetic, algebra, isolated = {}, {}, None
        with fault.plant(self.models["float32"], place) if "B" in fault.lanes else nullcontext():
            arithmetic = {name: self._run(name, "float32") for name in ("full", "step", TAPPED)}
        if "A" in fault.lanes:
            with fault.plant(self.models["float64"], place):
                algebra[TAPPED], isolated = self._tapped()
        verdict = judge(self.case, arithmetic, algebra=algebra)
        found = locate.locate(self.case, verdict, propagated=algebra.get(TAPPED), isolated=isolated, arithmetic=arithmetic)
        expected = (fault.first(place), fault.layer(place), fault.taps)
        return missed(fault.name, verdict, found, expected)

    def _run(self, plan: str, dtype: str) -> Trace:
        from mlxkv.engines import port

        return port.run(self.models[dtype], self.plans[plan], meta=self._meta(dtype))

    def _tapped(self) -> tuple[Trace, Trace]:
        from mlxkv.engines import taps

        meta, model, plan = self._meta("float64"), self.models["float64"], self.plans[TAPPED]
        made, _ = taps.run(model, plan, meta)
        alone, _ = taps.run(model, plan, meta, truth=self.case.truth)
        return made, alone

    def _meta(self, dtype: str) -> Meta:
        return replace(self.meta, dtype=dtype, probes=self.probes if dtype == "float64" else {})


def follow(job: Job, folder: Path, chosen: list[str]) -> dict[str, Any]:
    """The trials of one model, as plain values."""
    from mlxkv import runtime

    environment = runtime.prepare("cpu", threads=job.threads)
    from mlxkv.engines import port
    from mlxkv.engines.faults import FAULTS, Place, applies
    from mlxkv.port.weights import from_checkpoint
    from oracle.checkpoint import resolve

    checkpoint, case = resolve(job.folder, ignore_keys=job.ignore_keys), read_case(folder)
    models = {dtype: from_checkpoint(checkpoint, dtype, rounded_to="float32") for dtype in ("float32", "float64")}
    config = models["float32"].config
    plans = {plan.name: plan for plan in job.plans}
    meta = Meta(
        plan=job.plans[0],
        engine="mlxkv",
        engine_version=runtime.version("mlxkv"),
        dtype="float32",
        weights_dtype="float32",
        fingerprint=checkpoint.fingerprint,
        config_digest=checkpoint.config_digest,
        environment=environment,
    )
    bench = Bench(case, plans, models, meta, port.probe())
    cut = next(len(step.tokens) for step in plans[TAPPED].steps if hasattr(step, "tokens"))
    place = Place(config.num_hidden_layers, case.manifest.prompt_tokens, cut)
    unknown = sorted(set(chosen) - {fault.name for fault in FAULTS})
    if unknown:
        raise Refusal(f"--fault {unknown[0]!r}: expected one of {', '.join(fault.name for fault in FAULTS)}")
    faults = [fault for fault in FAULTS if applies(fault, config) and (not chosen or fault.name in chosen)]
    trials = []
    with bar(f"selftest: {checkpoint.name}", len(faults) + 1) as advance:
        for one in (None, *faults):
            trials.append(bench.right() if one is None else bench.wrong(one, place))
            advance(1)
    return {"trials": [asdict(trial) for trial in trials], "environment": environment}


def main() -> None:
    """The process's entry."""
    from mlxkv.engines.job import serve

    folder, result, *chosen = sys.argv[2:]
    serve(lambda job: write_text(Path(result), json.dumps(follow(job, Path(folder), chosen))))


if __name__ == "__main__":
    main()

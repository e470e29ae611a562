"""The port on trial: right runs and seeded faults, judged and located in memory. A process of its own.

`python -m mlxkv.engines.selftest JOB.json ORACLE RESULT.json [FAULT ...]`: one model, one oracle folder with all taps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxkv.engines.job import Job
from mlxkv.judge import locate
from mlxkv.judge.case import Case, read_case
from mlxkv.judge.result import Verdict
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


@dataclass(frozen=True, slots=True)
class Loaded:
    """The port on one model in both lanes, the run's dtype first, and what its traces say of it."""

    models: Mapping[str, Llama]
    meta: Meta
    probes: Mapping[str, float]

    @property
    def dtype(self) -> str:
        """That of lane B."""
        return self.meta.dtype

    def run(self, plan: Plan, dtype: str) -> Trace:
        """One plan in one lane."""
        from mlxkv.engines import port

        return port.run(self.models[dtype], plan, meta=self.of(dtype))

    def of(self, dtype: str) -> Meta:
        """What the traces of a lane say."""
        return replace(self.meta, dtype=dtype, probes=dict(self.probes) if dtype == "float64" else {})


class Bench:
    """One model in both lanes, and what it is judged by."""

    def __init__(self, case: Case, plans: Mapping[str, Plan], loaded: Loaded) -> None:
        self.case, self.plans, self.loaded = case, plans, loaded

    def judged(self) -> tuple[Verdict, dict[str, Trace]]:
        """The port as it is, on every judged plan in both lanes; and lane B's traces."""
        arithmetic = {name: self._run(name, self.loaded.dtype) for name in self.plans}
        algebra = {name: self._run(name, "float64") for name in self.plans}
        return judge(self.case, arithmetic, algebra=algebra), arithmetic

    def right(self) -> Trial:
        """What becomes of a correct run."""
        verdict, arithmetic = self.judged()
        found = locate.locate(self.case, verdict, arithmetic=arithmetic)
        return accused(verdict, found)

    def wrong(self, fault: Fault, place: Place) -> Trial:
        """The port with a fault in it: what the judge says of it, and where it is found."""
        arithmetic, algebra, isolated, dtype = {}, {}, None, self.loaded.dtype
        with fault.plant(self.loaded.models[dtype], place) if "B" in fault.lanes else nullcontext():
            arithmetic = {name: self._run(name, dtype) for name in ("full", "step", TAPPED)}
        if "A" in fault.lanes:
            with fault.plant(self.loaded.models["float64"], place):
                algebra[TAPPED], isolated = self._tapped()
                if fault.in_logits is not None:
                    # Rows that are wrong before anybody reads them show in the cache alone, and lane A looks at that of step.
                    algebra["step"] = self._run("step", "float64")
        verdict = judge(self.case, arithmetic, algebra=algebra)
        found = locate.locate(self.case, verdict, propagated=algebra.get(TAPPED), isolated=isolated, arithmetic=arithmetic)
        expected = (fault.first(place), fault.layer(place), fault.taps)
        return missed(fault.name, verdict, found, expected)

    def _run(self, plan: str, dtype: str) -> Trace:
        return self.loaded.run(self.plans[plan], dtype)

    def _tapped(self) -> tuple[Trace, Trace]:
        from mlxkv.engines import taps

        meta, model, plan = self.loaded.of("float64"), self.loaded.models["float64"], self.plans[TAPPED]
        made, _ = taps.run(model, plan, meta)
        alone, _ = taps.run(model, plan, meta, truth=self.case.truth)
        return made, alone


def load(job: Job) -> Loaded:
    """The job's model in its dtype and in float64, with the same weights in both."""
    from mlxkv import runtime

    environment = runtime.prepare("cpu", threads=job.threads)
    from mlxkv.engines import port
    from mlxkv.port.weights import from_checkpoint
    from oracle.checkpoint import resolve

    checkpoint = resolve(job.folder, ignore_keys=job.ignore_keys)
    models = {dtype: from_checkpoint(checkpoint, dtype, rounded_to=job.weights_dtype) for dtype in (job.dtype, "float64")}
    meta = Meta(
        plan=job.plans[0],
        engine="mlxkv",
        engine_version=runtime.version("mlxkv"),
        dtype=job.dtype,
        weights_dtype=job.weights_dtype,
        fingerprint=checkpoint.fingerprint,
        config_digest=checkpoint.config_digest,
        environment=environment,
    )
    return Loaded(models, meta, port.probe())


def follow(job: Job, folder: Path, chosen: list[str]) -> dict[str, Any]:
    """The trials of one model, as plain values."""
    loaded, case = load(job), read_case(folder)
    from mlxkv.engines.faults import FAULTS, Place, applies

    config, plans = loaded.models[job.dtype].config, {plan.name: plan for plan in job.plans}
    cut = next(len(step.tokens) for step in plans[TAPPED].steps if hasattr(step, "tokens"))
    place = Place(config.num_hidden_layers, case.manifest.prompt_tokens, cut)
    unknown = sorted(set(chosen) - {fault.name for fault in FAULTS})
    if unknown:
        raise Refusal(f"--fault {unknown[0]!r}: expected one of {', '.join(fault.name for fault in FAULTS)}")
    faults = [fault for fault in FAULTS if applies(fault, config, job.dtype) and (not chosen or fault.name in chosen)]
    bench, trials = Bench(case, plans, loaded), []
    with bar(f"selftest: {case.manifest.name}", len(faults) + 1) as advance:
        for one in (None, *faults):
            trials.append(bench.right() if one is None else bench.wrong(one, place))
            advance(1)
    return {"trials": [asdict(trial) for trial in trials], "environment": loaded.meta.environment}


def main() -> None:
    """The process's entry."""
    from mlxkv.engines.job import serve

    folder, result, *chosen = sys.argv[2:]
    serve(lambda job: write_text(Path(result), json.dumps(follow(job, Path(folder), chosen))))


if __name__ == "__main__":
    main()

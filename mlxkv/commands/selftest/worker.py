"""The port on trial: right runs and seeded faults, judged and located in memory. A process of its own.

`python -m mlxkv.engines.selftest JOB.json ORACLE RESULT.json [NAME ...]`: one model, one oracle folder with all taps. The names
are those of faults, beside which the right runs are always tried, or that of one right run alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxkv.commands.locate import place as locate
from mlxkv.commands.selftest.trial import BRANCH, RIGHT, RIGHTS, Trial, accused, missed
from mlxkv.engines.job import Job
from mlxkv.engines.progress import bar
from mlxkv.judge.case import Case, read_case
from mlxkv.judge.result import Verdict
from mlxkv.judge.verdict import judge
from oracle.formats.disk import write_text
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, Clone, New, Plan, Step
from oracle.formats.trace import Meta, Trace

if TYPE_CHECKING:
    from mlxkv.commands.selftest.faults import Fault, Place
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
        return replace(
            self.meta, dtype=dtype, probes=dict(self.probes) if dtype == "float64" else {}
        )


class Bench:
    """One model in both lanes, and what it is judged by."""

    def __init__(self, case: Case, plans: Mapping[str, Plan], loaded: Loaded) -> None:
        self.case, self.plans, self.loaded = case, plans, loaded

    def judged(self) -> tuple[Verdict, dict[str, Trace]]:
        """The port as it is, on every judged plan in both lanes; and lane B's traces."""
        lanes = [
            {name: self._run(name, dtype) for name in self.plans}
            for dtype in (self.loaded.dtype, "float64")
        ]
        return judge(self.case, lanes[0], algebra=lanes[1]), lanes[0]

    def right(self, name: str) -> Trial:
        """What becomes of a correct run."""
        if name == RIGHT:
            verdict, arithmetic = self.judged()
        else:
            run = self._branch if name == BRANCH else partial(self._run, "step")
            # Growing prefixes would take minutes on a slow BLAS, and none is a branch.
            lanes = [
                {"full": self._run("full", dtype), "step": run(dtype)}
                for dtype in (self.loaded.dtype, "float64")
            ]
            verdict, arithmetic = judge(self.case, lanes[0], algebra=lanes[1]), lanes[0]
        return accused(name, verdict, locate.locate(self.case, verdict, arithmetic=arithmetic))

    def _branch(self, dtype: str) -> Trace:
        """The step plan on a clone of its prompt's cache, whose parent is fed other tokens between the clone's calls."""
        step, vocab = self.plans["step"], self.loaded.models[dtype].config.vocab_size
        made = self.loaded.run(branched(step, vocab), dtype)
        kept = [
            i
            for i, one in enumerate(made.meta.plan.steps)
            if i < 2 or getattr(one, "cache", "") == "a"
        ]
        rows = np.isin(made.arrays["steps"], kept)
        arrays = {name: made.arrays[name][rows] for name in ("logits", "positions")}
        arrays |= {name: array for name, array in made.arrays.items() if name.startswith("kv/a/")}
        return Trace(
            replace(made.meta, plan=step, outcomes=[made.meta.outcomes[i] for i in kept]), arrays
        )

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
        found = locate.locate(
            self.case,
            verdict,
            propagated=algebra.get(TAPPED),
            isolated=isolated,
            arithmetic=arithmetic,
        )
        first = fault.first(place)
        expected = ((first, first + 1) if fault.sink else (first,), fault.layer(place), fault.taps)
        return missed(fault.name, verdict, found, expected)

    def _run(self, plan: str, dtype: str) -> Trace:
        return self.loaded.run(self.plans[plan], dtype)

    def _tapped(self) -> tuple[Trace, Trace]:
        from mlxkv.engines import recorder as taps

        meta, model, plan = (
            self.loaded.of("float64"),
            self.loaded.models["float64"],
            self.plans[TAPPED],
        )
        made, _ = taps.run(model, plan, meta)
        alone, _ = taps.run(model, plan, meta, truth=self.case.truth)
        return made, alone


def branched(step: Plan, vocab: int) -> Plan:
    """`step` on cache "a", which is cloned from the prompt's own; that one goes on with other tokens meanwhile."""
    calls = [one for one in step.steps if isinstance(one, Call)]
    steps: list[Step] = [New("parent"), replace(calls[0], cache="parent"), Clone("parent", "a")]
    for one in calls[1:]:
        steps += [
            one,
            Call("parent", tuple((token + 1) % vocab for token in one.tokens), one.index_pos),
        ]
    return Plan("branch", tuple(steps))


def load(job: Job) -> Loaded:
    """The job's model in its dtype and in float64, with the same weights in both."""
    from mlxkv.engines import machine as runtime

    environment = runtime.prepare("cpu", threads=job.threads)
    from mlxkv.engines import port
    from mlxkv.port.weights import from_checkpoint
    from oracle.model.checkpoint import resolve

    checkpoint = resolve(job.folder, ignore_keys=job.ignore_keys)
    models = {
        dtype: from_checkpoint(checkpoint, dtype, rounded_to=job.weights_dtype)
        for dtype in (job.dtype, "float64")
    }
    meta = job.meta(checkpoint, environment, engine="mlxkv", version=runtime.version("mlxkv"))
    return Loaded(models, meta, port.probe())


def follow(job: Job, folder: Path, chosen: list[str]) -> dict[str, Any]:
    """The trials of one model, as plain values."""
    loaded, case = load(job), read_case(folder)
    from mlxkv.commands.selftest.faults import FAULTS, Place, applies

    config, plans = loaded.models[job.dtype].config, {plan.name: plan for plan in job.plans}
    cut = next(len(step.tokens) for step in plans[TAPPED].steps if hasattr(step, "tokens"))
    place = Place(config.num_hidden_layers, case.manifest.prompt_tokens, cut)
    unknown = sorted(set(chosen) - {fault.name for fault in FAULTS} - set(RIGHTS))
    if unknown:
        raise Refusal(
            f"--fault {unknown[0]!r}: expected one of {', '.join(fault.name for fault in FAULTS)}"
        )
    faults = [
        fault
        for fault in FAULTS
        if applies(fault, config, job.dtype) and (not chosen or fault.name in chosen)
    ]
    rights = [name for name in RIGHTS if name in chosen] or [RIGHT, BRANCH]
    bench, trials = Bench(case, plans, loaded), []
    with bar(f"selftest: {case.manifest.name}", len(rights) + len(faults)) as advance:
        for name in rights:
            trials.append(bench.right(name))
            advance(1)
        for fault in faults:
            trials.append(bench.wrong(fault, place))
            advance(1)
    return {"trials": [asdict(trial) for trial in trials], "environment": loaded.meta.environment}


def main() -> None:
    """The process's entry."""
    from mlxkv.engines.job import serve

    folder, result, *chosen = sys.argv[2:]
    serve(lambda job: write_text(Path(result), json.dumps(follow(job, Path(folder), chosen))))


if __name__ == "__main__":
    main()

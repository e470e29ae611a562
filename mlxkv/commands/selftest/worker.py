"""The port on trial: correct runs and seeded faults, judged and located in memory.

A process of its own, started by `start`, as `python -m mlxkv.commands.selftest.worker JOB RESULT`
and one of: `trials ORACLE PROBE [NAME ...]`, where PROBE may be empty and the names are those of
faults, beside which the correct runs are always tried, or that of one correct run alone; `readings
ORACLE ...`, what a correct run on each oracle folder reads at every gate; and `orders ORACLE ...`,
the same, and on the first folder what the port reads there with other sums.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxkv.commands.locate import place as locating
from mlxkv.commands.selftest import readings, trial
from mlxkv.commands.selftest.trial import BRANCH, RIGHT, RIGHTS, Trial
from mlxkv.engines import job, oracle, process
from mlxkv.engines.progress import bar
from mlxkv.judge.case import Case, Probed, read_case
from mlxkv.judge.result import Verdict
from mlxkv.judge.verdict import judge
from oracle.formats.disk import write_text
from oracle.formats.plan import Call, Clone, New, Plan, Step, fewer_prefixes
from oracle.formats.run_folder import read_plans
from oracle.formats.trace import Meta, Trace
from oracle.model.checkpoint import Checkpoint

if TYPE_CHECKING:
    from mlxkv.commands.selftest.faults import Fault, Place, Seen
    from mlxkv.engines.port import Begun
    from mlxkv.port.llama import Llama

TAPPED = "chunked"
"""The plan in which every fault shows: it has a call of several tokens on an empty cache, one on a
used cache, and single ones."""


def start(
    checkpoint: Checkpoint,
    answer: oracle.Answer,
    room: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Runs this module's process to its end, in the folder `room`; what it wrote, decoded."""
    plans = read_plans(answer.folder, answer.manifest).values()
    asked = job.Job.on(checkpoint, plans, room, dtype=answer.manifest.dtype, device="cpu")
    result = room / "result.json"
    process.start([__name__, str(asked.save()), str(result), *arguments], environment=environment)
    return json.loads(result.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Ports:
    """The port on one model in lane B's dtype, which `meta` names, and in float64 (lane A).

    `meta` is what the traces say of the model and the machine, `probes` how accurate MLX's float64
    functions are here.
    """

    models: Mapping[str, Llama]
    meta: Meta
    probes: Mapping[str, float]

    def of(self, dtype: str) -> Meta:
        probes = dict(self.probes) if dtype == "float64" else {}
        return replace(self.meta, dtype=dtype, probes=probes)

    def run(self, plan: Plan, dtype: str, begun: Begun | None = None) -> Trace:
        from mlxkv.engines import port

        return port.run(self.models[dtype], plan, meta=self.of(dtype), begun=begun)


_PLANS: dict[Seen, tuple[str, ...]] = {
    "judged": ("full", "step", TAPPED),
    "mixed": ("full", "mixed"),
    "probe": ("full",),
    "repeat": ("step",),
}
"""The judged plans that are followed with a fault in the port, by what shows it."""


class Experiment:
    """The port on one model, and the oracle's answer that its runs are judged by."""

    def __init__(
        self,
        case: Case,
        plans: Mapping[str, Plan],
        ports: Ports,
        *,
        probe: tuple[Case, Mapping[str, Plan]] | None = None,
    ) -> None:
        self.case, self.plans, self.ports, self.probe = case, plans, ports, probe

    def judged(self) -> tuple[Verdict, Mapping[str, Trace]]:
        """The verdict on the port as it is, by all that `compare` runs; lane B's traces."""
        again = job.repeated(self.plans.values()).name
        repeats = {again: self._again(again)}
        runs = {name: partial(self._run, name) for name in self.plans}
        probe = self._probed(self._probe_runs(), self._probe_algebra())
        return self._judged(runs, repeats=repeats, probe=probe)

    def _judged(
        self, runs: Mapping[str, Any], **beside: Any
    ) -> tuple[Verdict, Mapping[str, Trace]]:
        arithmetic, algebra = (
            {plan: run(dtype) for plan, run in runs.items()}
            for dtype in (self.ports.meta.dtype, "float64")
        )
        return judge(self.case, arithmetic, algebra=algebra, **beside), arithmetic

    def in_other_orders(self) -> Iterator[dict[str, Any]]:
        """What the judge reads of the port in lane B, with each other order of sums."""
        from mlxkv.commands.selftest.orders import ORDERS

        for name, order in ORDERS.items():
            with order():
                runs = {
                    plan: self._run(plan, self.ports.meta.dtype)
                    for plan in ("full", "step", TAPPED)
                }
            verdict = judge(self.case, runs)
            found = readings.of_engine(verdict, readings.ORDERS, how=name)
            yield readings.plain_run(name, verdict, found)

    def correct(self, name: str) -> Trial:
        if name == RIGHT:
            verdict, arithmetic = self.judged()
        else:
            step = self._branch if name == BRANCH else partial(self._run, "step")
            # Growing prefixes would take minutes on a slow BLAS, and none is a branch.
            verdict, arithmetic = self._judged({"full": partial(self._run, "full"), "step": step})
        found = locating.locate(self.case, verdict, arithmetic=arithmetic)
        return trial.correct_run(name, verdict, found)

    def faulty(self, fault: Fault, place: Place) -> Trial:
        """The port with a fault in it: what the judge says of it, and where it is found."""
        arithmetic, repeats, probe = dict[str, Trace](), dict[str, Trace](), dict[str, Trace]()
        algebra, isolated, exact = dict[str, Trace](), None, dict[str, Trace]()
        if "B" in fault.lanes:
            with fault.plant(self.ports.models[self.ports.meta.dtype], place):
                plans = _PLANS[fault.seen]
                arithmetic = {plan: self._run(plan, self.ports.meta.dtype) for plan in plans}
                repeats = {plan: self._again(plan) for plan in plans if fault.seen == "repeat"}
                probe = self._probe_runs() if fault.seen == "probe" else {}
        if "A" in fault.lanes:
            with fault.plant(self.ports.models["float64"], place):
                exact = self._probe_algebra() if fault.seen == "probe" else {}
                algebra, isolated = self._algebra(fault)
        verdict = judge(
            self.case,
            arithmetic,
            algebra=algebra,
            repeats=repeats,
            probe=self._probed(probe, exact),
        )
        found = locating.locate(
            self.case,
            verdict,
            propagated=algebra.get(TAPPED),
            isolated=isolated,
            arithmetic=arithmetic,
        )
        return trial.faulty_run(fault, place, verdict, found)

    def _algebra(self, fault: Fault) -> tuple[dict[str, Trace], Trace | None]:
        """Lane A of the plans that show the fault, and with taps each layer fed the truth's
        input.
        """
        if fault.seen != "judged":
            plans = _PLANS[fault.seen] if fault.seen == "mixed" else ()
            return {plan: self._run(plan, "float64") for plan in plans}, None
        made, isolated = self._tapped()
        # Until somebody reads a wrong row it shows in the cache alone, and of lane A's runs the
        # judge looks at the cache of step.
        late = {"step": self._run("step", "float64")} if fault.in_logits is not None else {}
        return {TAPPED: made} | late, isolated

    def _again(self, plan: str) -> Trace:
        """Lane B's run of a plan, as one that follows another."""
        made = self._run(plan, self.ports.meta.dtype)
        return replace(made, meta=replace(made.meta, repeat=1))

    def _probe_runs(self) -> dict[str, Trace]:
        """Lane B's runs of the probe's plans; none without a probe."""
        plans = self.probe[1] if self.probe is not None else {}
        return {name: self.ports.run(plan, self.ports.meta.dtype) for name, plan in plans.items()}

    def _probe_algebra(self) -> dict[str, Trace]:
        """Lane A's runs of the probe's plans, as `compare` makes them: with one first call."""
        from mlxkv.engines.port import Begun

        plans, begun = self.probe[1] if self.probe is not None else {}, Begun()
        runs = (
            self.ports.run(plan, "float64", begun) for plan in job.longest_first(plans.values())
        )
        return {run.meta.plan.name: run for run in runs}

    def _probed(self, runs: Mapping[str, Trace], exact: Mapping[str, Trace]) -> Probed | None:
        made = self.probe is not None and (runs or exact)
        return Probed(self.probe[0], runs, exact) if made and self.probe is not None else None

    def _run(self, plan: str, dtype: str) -> Trace:
        made = self.plans[plan]
        return self.ports.run(fewer_prefixes(made) if dtype == "float64" else made, dtype)

    def _branch(self, dtype: str) -> Trace:
        """The step plan on a clone of its prompt's cache, as a trace of the step plan.

        The clone's parent is fed other tokens between the clone's calls.
        """
        step, vocab = self.plans["step"], self.ports.models[dtype].config.vocab_size
        made = self.ports.run(branched(step, vocab), dtype)
        steps = enumerate(made.meta.plan.steps)
        kept = [i for i, one in steps if i < 2 or getattr(one, "cache", "") == "a"]
        rows = np.isin(made.arrays["steps"], kept)
        arrays = {name: made.arrays[name][rows] for name in ("logits", "positions")}
        arrays |= {name: array for name, array in made.arrays.items() if name.startswith("kv/a/")}
        outcomes = [made.meta.outcomes[i] for i in kept]
        return Trace(replace(made.meta, plan=step, outcomes=outcomes), arrays)

    def _tapped(self) -> tuple[Trace, Trace]:
        """Lane A with taps: as it is, and each layer fed the truth's input."""
        from mlxkv.engines import recorder

        given = self.ports.models["float64"], self.plans[TAPPED], self.ports.of("float64")
        made, _ = recorder.run(*given)
        alone, _ = recorder.run(*given, truth=self.case.truth)
        return made, alone


def branched(step: Plan, vocab: int) -> Plan:
    """`step` on cache "a", cloned from the prompt's own, which goes on with other tokens."""
    prompt, *rest = (call.step for call in step.calls())
    begun = Call("parent", prompt.tokens, prompt.index_pos)
    steps: list[Step] = [New("parent"), begun, Clone("parent", "a")]
    for one in rest:
        other = tuple((token + 1) % vocab for token in one.batch[0])
        steps += [one, Call("parent", other, one.index_pos)]
    return Plan("branch", tuple(steps))


def load(asked: job.Job) -> Ports:
    """The job's model in its dtype and in float64, with the same weights in both."""
    environment, checkpoint = asked.prepare("cpu")
    from mlxkv.engines import machine, port
    from mlxkv.port.weights import from_checkpoint

    models = {
        dtype: from_checkpoint(checkpoint, dtype, rounded_to=asked.weights_dtype)
        for dtype in (asked.dtype, "float64")
    }
    version = machine.version("mlxkv")
    meta = asked.meta(checkpoint, environment, engine="mlxkv", version=version)
    return Ports(models, meta, port.probe())


def trials(
    ports: Ports, folder: Path, probe: Path | None, chosen: Sequence[str]
) -> list[dict[str, Any]]:
    from mlxkv.commands.selftest.faults import FAULTS, Place, applies

    (case, plans), dtype = _case_and_plans(folder), ports.meta.dtype
    config = ports.models[dtype].config
    cut = next(plans[TAPPED].calls()).fed
    beside = None if probe is None else _case_and_plans(probe)
    place = Place(
        config.num_hidden_layers,
        case.manifest.prompt_tokens,
        cut,
        tuple(case.manifest.tokens),
        () if beside is None else tuple(beside[0].manifest.tokens),
    )
    asked = [fault for fault in FAULTS if not chosen or fault.name in chosen]
    asked = [fault for fault in asked if beside is not None or fault.seen != "probe"]
    faults = [fault for fault in asked if applies(fault, config, dtype)]
    rights = [name for name in RIGHTS if name in chosen] or [RIGHT, BRANCH]
    experiment = Experiment(case, plans, ports, probe=beside)
    runs = [partial(experiment.correct, name) for name in rights]
    runs += [partial(experiment.faulty, fault, place) for fault in faults]
    found = []
    with bar(f"selftest: {case.manifest.name}", len(runs)) as advance:
        for run in runs:
            found.append(asdict(run()))
            advance(1)
    return found


def _case_and_plans(folder: Path) -> tuple[Case, Mapping[str, Plan]]:
    case = read_case(folder)
    return case, read_plans(folder, case.manifest)


def read(ports: Ports, folder: Path, *, orders: bool = False) -> list[dict[str, Any]]:
    """One correct run, and one with each other order of sums, as `readings.plain_run` has them."""
    case, plans = _case_and_plans(folder)
    experiment = Experiment(case, plans, ports)
    verdict, _ = experiment.judged()
    return [
        readings.plain_run("", verdict, readings.read(case, verdict)),
        *(experiment.in_other_orders() if orders else []),
    ]


def follow(asked: job.Job, mode: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What the process is asked for, and its surroundings."""
    ports = load(asked)
    if mode == "trials":
        folder, probe, *chosen = arguments
        found: list[Any] = trials(ports, Path(folder), Path(probe) if probe else None, chosen)
    else:
        found = []
        with bar(f"calibrate: {Path(asked.folder).name}", len(arguments)) as advance:
            for i, folder in enumerate(arguments):
                found.append(read(ports, Path(folder), orders=mode == "orders" and i == 0))
                advance(1)
    return {mode: found, "environment": ports.meta.environment}


def main() -> None:
    result, mode, *arguments = sys.argv[2:]
    path = Path(result)
    job.serve(lambda asked: write_text(path, json.dumps(follow(asked, mode, arguments))))


if __name__ == "__main__":
    main()

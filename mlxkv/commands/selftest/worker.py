"""The port on trial: correct runs and seeded faults, judged and located in memory.

A process of its own, started by `start`, as `python -m mlxkv.commands.selftest.worker JOB RESULT`
and one of: `trials ORACLE [NAME ...]`, where the names are those of faults, beside which the
correct runs are always tried, or that of one correct run alone; `readings ORACLE ...`, what a
correct run on each oracle folder reads at every gate; and `orders ORACLE ...`, the same, and on the
first folder what the port reads there with other sums.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
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
from mlxkv.judge.case import Case, read_case
from mlxkv.judge.result import Verdict
from mlxkv.judge.verdict import judge
from oracle.formats.disk import write_text
from oracle.formats.plan import Call, Clone, New, Plan, Step
from oracle.formats.run_folder import read_plans
from oracle.formats.trace import Meta, Trace
from oracle.model.checkpoint import Checkpoint

if TYPE_CHECKING:
    from mlxkv.commands.selftest.faults import Fault, Place
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
    dtype = answer.manifest.dtype
    asked = job.Job(
        folder=str(checkpoint.folder),
        plans=tuple(read_plans(answer.folder, answer.manifest).values()),
        out=room,
        dtype=dtype,
        weights_dtype=dtype,
        device="cpu",
        ignore_keys=checkpoint.without,
    )
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

    def run(self, plan: Plan, dtype: str) -> Trace:
        from mlxkv.engines import port

        return port.run(self.models[dtype], plan, meta=self.of(dtype))


class Experiment:
    """The port on one model, and the oracle's answer that its runs are judged by."""

    def __init__(self, case: Case, plans: Mapping[str, Plan], ports: Ports) -> None:
        self.case, self.plans, self.ports = case, plans, ports

    def judged(self) -> tuple[Verdict, Mapping[str, Trace]]:
        """The verdict on the port as it is, by every judged plan in both lanes; lane B's traces."""
        return self._judged({name: partial(self._run, name) for name in self.plans})

    def _judged(self, runs: Mapping[str, Any]) -> tuple[Verdict, Mapping[str, Trace]]:
        arithmetic, algebra = (
            {plan: run(dtype) for plan, run in runs.items()}
            for dtype in (self.ports.meta.dtype, "float64")
        )
        return judge(self.case, arithmetic, algebra=algebra), arithmetic

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
        arithmetic, algebra, isolated = {}, {}, None
        dtype = self.ports.meta.dtype
        with fault.plant(self.ports.models[dtype], place) if "B" in fault.lanes else nullcontext():
            arithmetic = {plan: self._run(plan, dtype) for plan in ("full", "step", TAPPED)}
        if "A" in fault.lanes:
            with fault.plant(self.ports.models["float64"], place):
                algebra[TAPPED], isolated = self._tapped()
                if fault.in_logits is not None:
                    # Until somebody reads a wrong row it shows in the cache alone, and of lane A's
                    # runs the judge looks at the cache of step.
                    algebra["step"] = self._run("step", "float64")
        verdict = judge(self.case, arithmetic, algebra=algebra)
        found = locating.locate(
            self.case,
            verdict,
            propagated=algebra.get(TAPPED),
            isolated=isolated,
            arithmetic=arithmetic,
        )
        return trial.faulty_run(fault, place, verdict, found)

    def _run(self, plan: str, dtype: str) -> Trace:
        return self.ports.run(self.plans[plan], dtype)

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


def trials(ports: Ports, folder: Path, chosen: Sequence[str]) -> list[dict[str, Any]]:
    from mlxkv.commands.selftest.faults import FAULTS, Place, applies

    case, dtype = read_case(folder), ports.meta.dtype
    config, plans = ports.models[dtype].config, read_plans(folder, case.manifest)
    cut = next(plans[TAPPED].calls()).fed
    place = Place(config.num_hidden_layers, case.manifest.prompt_tokens, cut)
    asked = [fault for fault in FAULTS if not chosen or fault.name in chosen]
    faults = [fault for fault in asked if applies(fault, config, dtype)]
    rights = [name for name in RIGHTS if name in chosen] or [RIGHT, BRANCH]
    experiment = Experiment(case, plans, ports)
    runs = [partial(experiment.correct, name) for name in rights]
    runs += [partial(experiment.faulty, fault, place) for fault in faults]
    found = []
    with bar(f"selftest: {case.manifest.name}", len(runs)) as advance:
        for run in runs:
            found.append(asdict(run()))
            advance(1)
    return found


def read(ports: Ports, folder: Path, *, orders: bool = False) -> list[dict[str, Any]]:
    """One correct run, and one with each other order of sums, as `readings.plain_run` has them."""
    case = read_case(folder)
    experiment = Experiment(case, read_plans(folder, case.manifest), ports)
    verdict, _ = experiment.judged()
    return [
        readings.plain_run("", verdict, readings.read(case, verdict)),
        *(experiment.in_other_orders() if orders else []),
    ]


def follow(asked: job.Job, mode: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What the process is asked for, and its surroundings."""
    ports = load(asked)
    if mode == "trials":
        found: list[Any] = trials(ports, Path(arguments[0]), arguments[1:])
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

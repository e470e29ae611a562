"""`mlxkv calibrate`: correct runs on MODEL and on random models, read at every gate."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mlxkv.commands.selftest import calibration_page, readings, worker
from mlxkv.commands.selftest.models import LAYOUTS, STDS, WIDE, Tiny, Wanted, Wide
from mlxkv.commands.selftest.readings import Range, Reading, ranges
from mlxkv.commands.selftest.run import question, random_ids
from mlxkv.engines import job, machine, oracle, process
from mlxkv.engines.progress import announce, say, steps
from mlxkv.judge.case import read_case
from mlxkv.judge.limits import current_limits
from mlxkv.judge.result import plain
from mlxkv.judge.verdict import judge
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats.run_folder import read_plans
from oracle.formats.trace import read
from oracle.model.checkpoint import Checkpoint, resolve

FORMAT = "mlxkv-calibrate/1"
EVERY_RUN, EACH = 4.0, 1.4e-7
"""About the seconds of every run, and more for each parameter of the model: 34 s of CPU time for
the default model's 134,515,008, on 1.5 of two cores."""
IN_OTHER_ORDERS = 4.0
"""As many of such runs take as long as one with each other order of sums."""
EVERY_WIDE = 25.0
"""About the seconds of a wide model, the widest of which take three times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Wanted):
    """What to measure on: so many `seeds` of each model."""

    seeds: int = 5


@dataclass(frozen=True, slots=True)
class Calibration:
    """What correct runs read on each model, and the runs that were not found right.

    `models` are the fingerprints of the weights, by the name of the model or of the random kind.
    """

    dtype: str
    seeds: int
    ranges: tuple[Range, ...]
    accused: tuple[str, ...]
    models: dict[str, list[str]]
    environment: dict[str, Any]
    oracle: dict[str, Any]

    @property
    def exit_code(self) -> int:
        """0 when every correct run is within every limit and found right, else 1."""
        return 0 if all(one.within for one in self.ranges) and not self.accused else 1

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-calibrate/1`, with the limits of the day."""
        more = [{"headroom": r.headroom, "within": r.within} for r in self.ranges]
        value = {
            "format": FORMAT,
            "exit_code": self.exit_code,
            "dtype": self.dtype,
            "seeds": self.seeds,
            "limits": current_limits(),
            "readings": [asdict(r) | m for r, m in zip(self.ranges, more, strict=True)],
            "accused": self.accused,
            "models": self.models,
            "environment": {"port": self.environment, "oracle": self.oracle},
        }
        return dict(plain(value))


def report(request: Request, *, out: Path, command: str) -> Report:
    done = run(request)
    files = calibration_files(done, commands=[command])
    where = str(out / "calibration.md")
    text = calibration_page.console(done.ranges, done.accused, dtype=done.dtype, report=where)
    return Report(files, text, files["calibration.json"], done.exit_code)


def calibration_files(done: Calibration, *, commands: Sequence[str]) -> dict[str, str]:
    value = done.to_json()
    text = calibration_page.markdown(done.ranges, done.accused, value, commands=commands)
    return {"calibration.json": pretty(value), "calibration.md": text}


@dataclass(frozen=True, slots=True)
class _Model:
    """A model to read: its checkpoints, each with the seeds of its random prompts.

    The first prompt of each is also read in `others`, beside the port on the BLAS chosen here.
    """

    name: str
    prompts: list[tuple[Checkpoint, list[int]]]
    others: tuple[str, ...]


# The modules of engines in processes of their own, each with its environment.
_ASIDE = {
    readings.MLX_LM: (process.MLX_LM, {}),
    readings.PLAIN: (process.PORT, {"MLXKV_BLAS": "none"}),
}


def run(request: Request) -> Calibration:
    """MODEL on `seeds` random prompts; as many random models of each kind, and the wide ones, on
    one each.
    """
    machine.require_device("cpu")
    oracle.require_torch()
    machine.require_mlx_lm()
    done = Calibration(request.dtype, request.seeds, (), (), {}, {}, {})
    found: list[Range] = []
    accused: list[str] = []
    checkpoint = request.checkpoint(steps()) if request.real else None
    _announce(request, checkpoint)
    with process.scratch() as room:
        for model in _models(request, checkpoint, room):
            runs: list[tuple[str, list[Reading]]] = []
            for one, seeds in model.prompts:
                for seed, ran in _measured(model, one, seeds, room / "run", done):
                    runs.append((f"seed {seed}", [Reading(**r) for r in ran["readings"]]))
                    if ran["outcome"] != "agree":
                        accused.append(f"{_named(model.name, seed, ran)}: {_why(ran)}")
            found += ranges(model.name, runs)
            done.models[model.name] = [one.fingerprint for one, _ in model.prompts]
    return replace(done, ranges=tuple(found), accused=tuple(accused))


def _announce(request: Request, checkpoint: Checkpoint | None) -> None:
    models, seconds, once = [], 0.0, 0.0
    if checkpoint is not None:
        models.append(checkpoint.name)
        seconds += EVERY_RUN + EACH * checkpoint.parameters
        once += IN_OTHER_ORDERS * EACH * checkpoint.parameters
    if request.tiny:
        kinds = len(LAYOUTS) * len(STDS)
        models.append(f"{kinds} kinds of small random models")
        seconds += kinds * EVERY_RUN
    what = f"calibrate: {request.seeds} correct runs on each of {' and '.join(models)}"
    if request.tiny:
        what += f", and on {len(WIDE)} wide ones"
        once += len(WIDE) * EVERY_WIDE
    announce(what, request.seeds * seconds + once)


def _models(request: Request, checkpoint: Checkpoint | None, room: Path) -> Iterator[_Model]:
    seeds = range(request.seeds)
    if checkpoint is not None:
        sums = () if checkpoint.packed else (readings.ORDERS,)
        yield _Model(checkpoint.name, [(checkpoint, list(seeds))], (*sums, readings.MLX_LM))
    for layout in LAYOUTS if request.tiny else ():
        for std in STDS:
            kind = [Tiny(layout, std, seed) for seed in seeds]
            made = [(resolve(str(one.save(room / one.name))), [one.seed]) for one in kind]
            yield _Model(f"{layout}-{std:g}", made, (readings.ORDERS,))
    for width, values in WIDE if request.tiny else ():
        wide = Wide(width, values)
        folder = wide.save(room / wide.name)
        yield _Model(wide.name, [(resolve(str(folder)), [wide.seed])], tuple(_ASIDE))
        shutil.rmtree(folder)


def _measured(
    model: _Model, checkpoint: Checkpoint, seeds: Sequence[int], room: Path, done: Calibration
) -> Iterator[tuple[int, dict[str, Any]]]:
    """What correct runs on one checkpoint read, each with the seed of its prompt."""
    answers = []
    for seed in seeds:
        say(f"calibrate: {model.name}, seed {seed}")
        ids = random_ids(checkpoint.vocab_size, seed)
        answers.append(oracle.ask(question(checkpoint, ids, None, dtype=done.dtype)))
    room.mkdir(exist_ok=True)
    folders = [str(answer.folder) for answer in answers]
    mode = "orders" if readings.ORDERS in model.others else "readings"
    value = worker.start(checkpoint, answers[0], room, mode, *folders)
    done.environment.update(value["environment"])
    done.oracle.update(answers[0].manifest.surroundings)
    for seed, runs in zip(seeds, value[mode], strict=True):
        yield from ((seed, ran) for ran in runs)
    for whose in (name for name in model.others if name in _ASIDE):
        yield seeds[0], _aside(whose, checkpoint, answers[0], room / whose)


def _aside(whose: str, checkpoint: Checkpoint, answer: oracle.Answer, room: Path) -> dict[str, Any]:
    """What another engine reads, in a process of its own."""
    case = read_case(answer.folder)
    plans = read_plans(answer.folder, case.manifest)
    kept = [plans[name] for name in ("full", "step", "chunked")]
    module, environment = _ASIDE[whose]
    dtype = case.manifest.dtype
    room.mkdir(exist_ok=True)
    asked = job.Job(
        folder=str(checkpoint.folder),
        plans=tuple(kept),
        out=room,
        dtype=dtype,
        weights_dtype=dtype,
        device="cpu",
        ignore_keys=checkpoint.without,
    )
    process.start([module, str(asked.save())], environment=environment)
    judged = judge(case, {plan.name: read(asked.trace(plan)) for plan in kept})
    return readings.plain_run(whose, judged, readings.of_engine(judged, whose))


def _named(model: str, seed: int, ran: dict[str, Any]) -> str:
    return ", ".join(filter(None, (model, f"seed {seed}", ran["name"])))


def _why(ran: dict[str, Any]) -> str:
    return f"{ran['outcome']}: {'; '.join(ran['reasons']) or 'a gate is above its limit'}"

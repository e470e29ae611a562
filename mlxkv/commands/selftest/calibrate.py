"""`mlxkv calibrate`: correct runs on MODEL and on small random models, read at every gate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxkv.commands.selftest import calibration_page, worker
from mlxkv.commands.selftest.models import LAYOUTS, STDS, Tiny, Wanted
from mlxkv.commands.selftest.readings import Range, Reading, ranges
from mlxkv.commands.selftest.run import question, random_ids
from mlxkv.engines import machine, oracle, process
from mlxkv.engines.progress import say
from mlxkv.judge.limits import current_limits
from mlxkv.judge.result import plain
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.model.checkpoint import Checkpoint, resolve

FORMAT = "mlxkv-calibrate/1"


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


_Prompts = list[tuple[Checkpoint, list[int]]]
"""Checkpoints, each with the seeds of its random prompts."""


def run(request: Request) -> Calibration:
    """MODEL on `seeds` random prompts; and as many random models of each kind on one each."""
    machine.require_device("cpu")
    oracle.require_torch()
    found: list[Range] = []
    accused: list[str] = []
    models: dict[str, list[str]] = {}
    port: dict[str, Any] = {}
    host: dict[str, Any] = {}
    with process.scratch() as room:
        for name, prompts in _models(request, room):
            readings: list[tuple[str, list[Reading]]] = []
            for checkpoint, seeds in prompts:
                value, host = _measured(name, checkpoint, seeds, room / "run", request.dtype)
                port = value["environment"]
                for seed, one in zip(seeds, value["readings"], strict=True):
                    readings.append((f"seed {seed}", [Reading(**r) for r in one["readings"]]))
                    if one["outcome"] != "agree":
                        accused.append(f"{name}, seed {seed}: {_why(one)}")
            found += ranges(name, readings)
            models[name] = [checkpoint.fingerprint for checkpoint, _ in prompts]
    found_on = tuple(found), tuple(accused), models
    return Calibration(request.dtype, request.seeds, *found_on, port, host)


def _models(request: Request, room: Path) -> Iterator[tuple[str, _Prompts]]:
    seeds = range(request.seeds)
    if request.real:
        checkpoint = request.checkpoint()
        yield checkpoint.name, [(checkpoint, list(seeds))]
    for layout in LAYOUTS if request.tiny else ():
        for std in STDS:
            kind = [Tiny(layout, std, seed) for seed in seeds]
            made = [(resolve(str(one.save(room / one.name))), [one.seed]) for one in kind]
            yield f"{layout}-{std:g}", made


def _measured(
    name: str, checkpoint: Checkpoint, seeds: Sequence[int], room: Path, dtype: str
) -> tuple[Any, dict[str, Any]]:
    """What the port's process reads on one checkpoint, a run for each seed; the oracle's host."""
    answers = []
    for seed in seeds:
        say(f"calibrate: {name}, seed {seed}")
        ids = random_ids(checkpoint.vocab_size, seed)
        answers.append(oracle.ask(question(checkpoint, ids, None, dtype=dtype)))
    room.mkdir(exist_ok=True)
    folders = [str(answer.folder) for answer in answers]
    value = worker.start(checkpoint, answers[0], room, "readings", *folders)
    return value, answers[0].manifest.surroundings


def _why(ran: dict[str, Any]) -> str:
    return f"{ran['outcome']}: {'; '.join(ran['reasons']) or 'a gate is above its limit'}"

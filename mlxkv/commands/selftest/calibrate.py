"""The steps of `mlxkv calibrate`: correct runs on the default model and on small random ones, and what they read at each gate."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxkv.commands.selftest import calibration_page as pages
from mlxkv.commands.selftest.models import LAYOUTS, STDS, Tiny
from mlxkv.commands.selftest.readings import Range, Reading, ranges
from mlxkv.commands.selftest.run import question, random_ids
from mlxkv.engines import job, oracle, process
from mlxkv.engines import machine as runtime
from mlxkv.engines.progress import say
from mlxkv.judge.limits import current_limits
from mlxkv.judge.result import plain
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint, require_llama, resolve

FORMAT = "mlxkv-calibrate/1"
ENGINE = "mlxkv.commands.selftest.calibrate_worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure on: MODEL and the small random models, on so many `seeds` of each."""

    model: str | None = None
    revision: str | None = None
    ignore_keys: tuple[str, ...] = ()
    tiny: bool = True
    real: bool = True
    dtype: str = "float32"
    seeds: int = 5


@dataclass(frozen=True, slots=True)
class Result:
    """What correct runs read, by model, and those that were not found right."""

    dtype: str
    seeds: int
    ranges: tuple[Range, ...]
    accused: tuple[str, ...]
    models: dict[str, list[str]]
    environment: dict[str, Any]
    oracle: dict[str, Any]

    @property
    def beyond(self) -> list[Range]:
        """Where a correct run is beyond a limit."""
        return [r for r in self.ranges if not r.within]

    @property
    def exit_code(self) -> int:
        """0 when every correct run is within every limit and found right, else 1."""
        return 1 if self.beyond or self.accused else 0

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-calibrate/1`, with the limits of the day; `models` are the weights' fingerprints."""
        value = {
            "format": FORMAT,
            "exit_code": self.exit_code,
            "dtype": self.dtype,
            "seeds": self.seeds,
            "limits": current_limits(),
            "readings": [
                asdict(r) | {"headroom": r.headroom, "within": r.within} for r in self.ranges
            ],
            "accused": self.accused,
            "models": self.models,
            "environment": {"port": self.environment, "oracle": self.oracle},
        }
        return dict(plain(value))


@dataclass(frozen=True, slots=True)
class _Measured:
    """One model's part of the result."""

    ranges: list[Range]
    accused: list[str]
    environment: dict[str, Any]
    oracle: dict[str, Any]


def run(request: Request) -> Result:
    """Every model in turn: MODEL on `seeds` random prompts, and as many random models of each kind on one each."""
    runtime.require_device("cpu")
    oracle.require_torch()
    with process.scratch() as room:
        models = dict(_models(request, room))
        found = [
            _measured(name, checkpoints, room, request.dtype)
            for name, checkpoints in models.items()
        ]
    if not found:
        raise Refusal("calibrate: no model to run on, expected the default or the random ones")
    return Result(
        dtype=request.dtype,
        seeds=request.seeds,
        ranges=tuple(one for part in found for one in part.ranges),
        accused=tuple(line for part in found for line in part.accused),
        models={
            name: [checkpoint.fingerprint for checkpoint, _ in checkpoints]
            for name, checkpoints in models.items()
        },
        environment=found[0].environment,
        oracle=found[0].oracle,
    )


_Seeded = list[tuple[Checkpoint, list[int]]]


def _models(request: Request, room: Path) -> Iterator[tuple[str, _Seeded]]:
    """Each model's name, and its checkpoints with the seeds of their prompts."""
    seeds = range(request.seeds)
    if request.real:
        checkpoint = resolve(
            request.model, revision=request.revision, ignore_keys=request.ignore_keys
        )
        require_llama(checkpoint)
        yield checkpoint.name, [(checkpoint, list(seeds))]
    for layout in LAYOUTS if request.tiny else ():
        for std in STDS:
            kind = [Tiny(layout, std, seed) for seed in seeds]
            yield (
                f"{layout}-{std:g}",
                [(resolve(str(one.save(room / one.name))), [one.seed]) for one in kind],
            )


def _measured(name: str, checkpoints: _Seeded, room: Path, dtype: str) -> _Measured:
    runs: list[tuple[str, list[Reading]]] = []
    accused: list[str] = []
    for checkpoint, seeds in checkpoints:
        answers = []
        for seed in seeds:
            say(f"calibrate: {name}, seed {seed}")
            answers.append(
                oracle.ask(
                    question(checkpoint, random_ids(checkpoint.vocab_size, seed), None, dtype=dtype)
                )
            )
        value = _followed(checkpoint, answers, room / "run", dtype)
        for seed, ran in zip(seeds, value["runs"], strict=True):
            runs.append((f"seed {seed}", [Reading(**reading) for reading in ran["readings"]]))
            accused += [] if ran["outcome"] == "agree" else [f"{name}, seed {seed}: {_why(ran)}"]
    return _Measured(
        ranges(name, runs), accused, value["environment"], answers[0].manifest.surroundings
    )


def _followed(
    checkpoint: Checkpoint, answers: Sequence[oracle.Answer], room: Path, dtype: str
) -> Any:
    room.mkdir(exist_ok=True)
    plans = tuple(oracle.judged(answers[0].manifest, answers[0].folder).values())
    one = job.Job(
        str(checkpoint.folder), plans, room, dtype, dtype, "cpu", ignore_keys=checkpoint.without
    )
    process.start(
        [
            ENGINE,
            str(one.save()),
            str(room / "result.json"),
            *(str(answer.folder) for answer in answers),
        ]
    )
    return json.loads((room / "result.json").read_text(encoding="utf-8"))


def _why(ran: dict[str, Any]) -> str:
    return f"{ran['outcome']}: {'; '.join(ran['reasons']) or 'a gate is above its limit'}"


def report(request: Request, *, out: Path, command: str) -> Report:
    """Measures what correct runs read."""
    result = run(request)
    files = calibration_files(result, commands=[command])
    text = pages.console(
        result.ranges, result.accused, dtype=result.dtype, report=str(out / "calibration.md")
    )
    return Report(files, text, files["calibration.json"], result.exit_code)


def calibration_files(result: Result, *, commands: Sequence[str]) -> dict[str, str]:
    """The report of a calibration, by file name."""
    value = result.to_json()
    return {
        "calibration.json": pretty(value),
        "calibration.md": pages.markdown(result.ranges, result.accused, value, commands=commands),
    }

"""The steps of `mlxkv selftest`: seeded faults and right runs on the default model and on small random ones."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxkv.commands.selftest import page as pages
from mlxkv.commands.selftest.models import LAYOUTS, STDS, Tiny
from mlxkv.commands.selftest.trial import PLAIN, RIGHTS, Trial, unseen
from mlxkv.engines import job, oracle, process
from mlxkv.engines import machine as runtime
from mlxkv.engines.progress import say
from mlxkv.judge import power
from mlxkv.judge.limits import current_limits
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import run_folder
from oracle.formats.errors import Refusal
from oracle.formats.trace import TAPS
from oracle.model import tokenizer as tokenizers
from oracle.model.checkpoint import Checkpoint, require_llama, resolve

FORMAT = "mlxkv-selftest/1"
ENGINE = "mlxkv.commands.selftest.worker"
PROMPT = "The river that runs through the old city was the first thing that every traveller asked about, and the last thing they saw"
STEPS = 16
TINY = tuple(Tiny(layout, std, seed) for layout in LAYOUTS for std in STDS for seed in (0, 1))
_TOKENS = 24  # of a random model's prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to try: MODEL and the small random models, some `faults` or all; `power` names a file to put into."""

    model: str | None = None
    revision: str | None = None
    ignore_keys: tuple[str, ...] = ()
    tiny: bool = True
    real: bool = True
    dtype: str = "float32"
    faults: tuple[str, ...] = ()
    power: Path | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The trials of every model in lane B's dtype, by its name, and what each model was."""

    dtype: str
    trials: dict[str, tuple[Trial, ...]]
    models: dict[str, dict[str, Any]]
    environment: dict[str, Any]
    oracle: dict[str, Any]

    @property
    def failed(self) -> list[tuple[str, Trial]]:
        """Faults that were missed or misplaced, and right runs that were accused."""
        return [
            (model, trial)
            for model, trials in self.trials.items()
            for trial in trials
            if not trial.passed
        ]

    @property
    def exit_code(self) -> int:
        """0 when nothing was missed and nobody accused, else 1."""
        return 1 if self.failed else 0

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-selftest/1`, with the limits of the day."""
        return {
            "format": FORMAT,
            "exit_code": self.exit_code,
            "dtype": self.dtype,
            "limits": current_limits(),
            "models": self.models,
            "trials": {
                model: [_plain(trial) for trial in trials] for model, trials in self.trials.items()
            },
            "environment": {"port": self.environment, "oracle": self.oracle},
        }


def write_power(path: Path, result: Result) -> None:
    """What lane B lets pass, put into a file as the judge's own `power.json`."""
    passed = unseen(result.trials)
    models = {
        name: {
            "fingerprint": result.models[name]["fingerprint"],
            "faults": sum(trial.fault not in RIGHTS for trial in trials),
            "unseen": [fault for fault, where in passed.items() if name in where],
        }
        for name, trials in result.trials.items()
    }
    power.write(path, result.dtype, models, limits=current_limits())


def run(request: Request) -> Result:
    """Every model in turn, each in a process of its own."""
    runtime.require_device("cpu")
    oracle.require_torch()
    trials: dict[str, tuple[Trial, ...]] = {}
    models: dict[str, dict[str, Any]] = {}
    made: dict[str, Any] = {}
    manifest: run_folder.Manifest | None = None
    with process.scratch() as room:
        for name, checkpoint, ids, prompt in _models(request, room):
            say(f"selftest: {name}")
            asked = question(checkpoint, ids, prompt, dtype=request.dtype, taps=TAPS)
            answer = oracle.ask(asked)
            manifest = answer.manifest
            (room / f"run-{name}").mkdir()
            one, made = _trials(checkpoint, answer, room / f"run-{name}", request.faults)
            trials[name] = one
            models[name] = {
                "fingerprint": checkpoint.fingerprint,
                "tokens": len(manifest.tokens),
                "prompt_tokens": len(ids),
            }
    if manifest is None:
        raise Refusal("selftest: no model to run on, expected the default or the random ones")
    return Result(request.dtype, trials, models, made, manifest.surroundings)


def _models(request: Request, room: Path) -> Any:
    """Name, checkpoint, prompt ids and prompt text of each."""
    if request.real:
        checkpoint = resolve(
            request.model, revision=request.revision, ignore_keys=request.ignore_keys
        )
        require_llama(checkpoint)
        if checkpoint.packed:
            raise Refusal(
                f"{checkpoint.folder}: packed weights ({checkpoint.note}), expected plain floats, as many faults change weights; "
                "take the unquantised checkpoint"
            )
        tokenizer = tokenizers.load(checkpoint.folder)
        if tokenizer is None:
            yield checkpoint.name, checkpoint, random_ids(checkpoint.vocab_size, 0), None
        else:
            yield checkpoint.name, checkpoint, tuple(tokenizer.encode(PROMPT)), PROMPT
    for one in TINY if request.tiny else ():
        checkpoint = resolve(str(one.save(room / one.name)))
        yield one.name, checkpoint, random_ids(checkpoint.vocab_size, one.seed), None


def random_ids(vocab: int, seed: int) -> tuple[int, ...]:
    """A prompt for a model without words."""
    return tuple(np.random.default_rng(seed).integers(0, vocab, _TOKENS).tolist())


def question(
    checkpoint: Checkpoint,
    ids: tuple[int, ...],
    prompt: str | None,
    *,
    dtype: str,
    taps: tuple[str, ...] = ("hidden",),
) -> oracle.Question:
    """The prompt in two halves, and as many tokens after it as the faults of a cache need."""
    half = len(ids) // 2
    return oracle.Question(
        checkpoint=checkpoint,
        prompt=prompt,
        tokens=ids,
        prompt_tokens=len(ids),
        steps=STEPS,
        chunks=(half, len(ids) - half),
        dtype=dtype,
        threads=os.cpu_count() or 1,
        taps=taps,
    )


def _trials(
    checkpoint: Checkpoint, answer: oracle.Answer, room: Path, faults: Sequence[str]
) -> tuple[tuple[Trial, ...], dict[str, Any]]:
    plans = tuple(oracle.judged(answer.manifest, answer.folder).values())
    dtype = answer.manifest.dtype
    one = job.Job(
        str(checkpoint.folder), plans, room, dtype, dtype, "cpu", ignore_keys=checkpoint.without
    ).save()
    value = _tried(one, answer.folder, faults)
    # A Mac has one BLAS only.
    plain = (
        _tried(one, answer.folder, [PLAIN], environment={"MLXKV_BLAS": "none"})
        if sys.platform == "linux" and not faults
        else None
    )
    trials = [Trial(**trial) for trial in [*value["trials"], *(plain["trials"] if plain else [])]]
    return tuple(sorted(trials, key=lambda trial: trial.fault not in RIGHTS)), value["environment"]


def _tried(
    asked: Path, folder: Path, names: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> Any:
    result = asked.with_name("result.json")
    process.start([ENGINE, str(asked), str(folder), str(result), *names], environment=environment)
    return json.loads(result.read_text(encoding="utf-8"))


def _plain(trial: Trial) -> dict[str, Any]:
    from dataclasses import asdict

    from mlxkv.judge.result import plain

    return dict(plain(asdict(trial)))


def report(request: Request, *, out: Path, command: str) -> Report:
    """Runs the trials, and puts what lane B lets pass into the file `power` names."""
    result = run(request)
    if request.power is not None:
        write_power(request.power, result)
    files = selftest_files(result, commands=[command])
    text = pages.console(result.trials, dtype=result.dtype, report=str(out / "selftest.md"))
    return Report(files, text, files["selftest.json"], result.exit_code)


def selftest_files(result: Result, *, commands: Sequence[str]) -> dict[str, str]:
    """The report of a selftest, by file name."""
    value = result.to_json()
    return {
        "selftest.json": pretty(value),
        "selftest.md": pages.markdown(result.trials, value, commands=commands),
    }

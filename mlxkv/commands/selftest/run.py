"""`mlxkv selftest`: seeded faults and correct runs on MODEL and on small random models."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxkv.commands.selftest import page, worker
from mlxkv.commands.selftest.models import LAYOUTS, STDS, Tiny, Wanted
from mlxkv.commands.selftest.trial import PLAIN, RIGHTS, Trial, unseen
from mlxkv.engines import machine, oracle, process
from mlxkv.engines.progress import announce, say, steps
from mlxkv.judge import power
from mlxkv.judge.limits import current_limits
from mlxkv.judge.result import plain
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats.errors import Refusal
from oracle.formats.trace import TAPS
from oracle.model import tokenizer
from oracle.model.checkpoint import Checkpoint, resolve

FORMAT = "mlxkv-selftest/1"
PROMPT = (
    "The river that runs through the old city was the first thing that every traveller asked "
    "about, and the last thing they saw"
)
STEPS = 16
TINY = tuple(Tiny(layout, std, seed) for layout in LAYOUTS for std in STDS for seed in (0, 1))
EVERY_MODEL, EACH, CORRECT_RUNS = 6.0, 3.7e-8, 4
"""About the seconds that every model takes, and more for each fault and each parameter: 7.3 s of
CPU time for a fault in the default model's 134,515,008, on 1.5 of two cores, and for the correct
runs as much as for so many faults."""
_TOKENS = 24  # of a random model's prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Wanted):
    """What to try: some `faults`, or all; `power` names a file to put into what lane B passes."""

    faults: tuple[str, ...] = ()
    power: Path | None = None


@dataclass(frozen=True, slots=True)
class Selftest:
    """The trials of every model, by its name, with lane B in `dtype`; and what each model was."""

    dtype: str
    trials: dict[str, tuple[Trial, ...]]
    models: dict[str, dict[str, Any]]
    environment: dict[str, Any]
    oracle: dict[str, Any]

    @property
    def exit_code(self) -> int:
        """0 when no fault was missed or misplaced and no correct run accused, else 1."""
        return 0 if all(one.passed for some in self.trials.values() for one in some) else 1

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-selftest/1`, with the limits of the day."""
        trials = {name: [plain(asdict(one)) for one in some] for name, some in self.trials.items()}
        return {
            "format": FORMAT,
            "exit_code": self.exit_code,
            "dtype": self.dtype,
            "limits": current_limits(),
            "models": self.models,
            "trials": trials,
            "environment": {"port": self.environment, "oracle": self.oracle},
        }


def report(request: Request, *, out: Path, command: str) -> Report:
    """Runs the trials, and puts what lane B lets pass into the file `power` names."""
    done = run(request)
    if request.power is not None:
        write_power(request.power, done)
    files = selftest_files(done, commands=[command])
    text = page.console(done.trials, dtype=done.dtype, report=str(out / "selftest.md"))
    return Report(files, text, files["selftest.json"], done.exit_code)


def selftest_files(done: Selftest, *, commands: Sequence[str]) -> dict[str, str]:
    value = done.to_json()
    text = page.markdown(done.trials, value, commands=commands)
    return {"selftest.json": pretty(value), "selftest.md": text}


def write_power(path: Path, done: Selftest) -> None:
    """What lane B lets pass, put into a file as the judge's own `power.json`."""
    passed = unseen(done.trials)
    models = {
        name: {
            "fingerprint": done.models[name]["fingerprint"],
            "faults": sum(trial.fault not in RIGHTS for trial in trials),
            "unseen": [fault for fault, where in passed.items() if name in where],
        }
        for name, trials in done.trials.items()
    }
    power.write(path, done.dtype, models, limits=current_limits())


def run(request: Request) -> Selftest:
    """Every model in turn, each in a process of its own."""
    machine.require_device("cpu")
    oracle.require_torch()
    faults = _known(request.faults)
    checkpoint = _unpacked(request) if request.real else None
    _announce(request, checkpoint, faults)
    done = Selftest(request.dtype, {}, {}, {}, {})
    with process.scratch() as room:
        models = list(_models(request, checkpoint, room))
        names = f"{models[0][0]} and {len(models) - 1} more" if models[1:] else models[0][0]
        say(f"selftest: the oracle's answers on {names}")
        asked = [
            question(found, ids, prompt, dtype=request.dtype, taps=TAPS)
            for _, found, ids, prompt in models
        ]
        answers = oracle.ask_pairs([(one, oracle.probe_beside(one)) for one in asked])
        for (name, found, ids, _), (answer, probe) in zip(models, answers, strict=True):
            say(f"selftest: {name}")
            own = room / f"run-{name}"
            own.mkdir()
            done.trials[name], environment = _trials(found, answer, probe, own, request.faults)
            done.environment.update(environment)
            done.oracle.update(answer.manifest.surroundings)
            done.models[name] = {
                "fingerprint": found.fingerprint,
                "tokens": len(answer.manifest.tokens),
                "prompt_tokens": len(ids),
            }
    return done


def _known(names: Sequence[str]) -> int:
    """How many faults are to be tried; the name of none is refused before anything runs."""
    from mlxkv.commands.selftest.faults import FAULTS

    known = [fault.name for fault in FAULTS]
    for name in names:
        if name not in (*known, *RIGHTS):
            quoted = ", ".join(map(repr, known))
            raise Refusal(f"no such fault, expected one of {quoted}", where=f"--fault {name!r}")
    return len(names or known)


def _unpacked(request: Request) -> Checkpoint:
    """The model, whose weights can be changed; refused where they are packed."""
    checkpoint = request.checkpoint(steps())
    if checkpoint.packed:
        raise Refusal(
            f"{checkpoint.folder}: packed weights ({checkpoint.note}), expected plain floats, "
            "as many faults change weights; take the unquantised checkpoint"
        )
    return checkpoint


def _announce(request: Request, checkpoint: Checkpoint | None, faults: int) -> None:
    seconds, models = 0.0, []
    if checkpoint is not None:
        models.append(checkpoint.name)
        seconds += EVERY_MODEL + (CORRECT_RUNS + faults) * EACH * checkpoint.parameters
    if request.tiny:
        models.append(f"{len(TINY)} small random models")
        seconds += len(TINY) * EVERY_MODEL
    announce(f"selftest: {faults} fault{'s' * (faults > 1)} in {' and '.join(models)}", seconds)


def _models(
    request: Request, checkpoint: Checkpoint | None, room: Path
) -> Iterator[tuple[str, Checkpoint, tuple[int, ...], str | None]]:
    """Name, checkpoint, prompt ids and prompt text of each."""
    if checkpoint is not None:
        words = tokenizer.load(checkpoint.folder)
        if words is None:
            yield checkpoint.name, checkpoint, random_ids(checkpoint.vocab_size, 0), None
        else:
            yield checkpoint.name, checkpoint, tuple(words.encode(PROMPT)), PROMPT
    for one in TINY if request.tiny else ():
        made = resolve(str(one.save(room / one.name)))
        yield one.name, made, random_ids(made.vocab_size, one.seed), None


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
    checkpoint: Checkpoint,
    answer: oracle.Answer,
    probe: oracle.Answer | None,
    room: Path,
    faults: Sequence[str],
) -> tuple[tuple[Trial, ...], dict[str, Any]]:
    """The trials of one model, correct runs first, and the surroundings they were made in."""
    asked = ("trials", str(answer.folder), "" if probe is None else str(probe.folder))
    value = worker.start(checkpoint, answer, room, *asked, *faults)
    found = value["trials"]
    if sys.platform == "linux" and not faults:  # a Mac has one BLAS only
        stock = {"MLXKV_BLAS": "none"}
        found += worker.start(checkpoint, answer, room, *asked, PLAIN, environment=stock)["trials"]
    trials = [Trial(**trial) for trial in found]
    return tuple(sorted(trials, key=lambda t: t.fault not in RIGHTS)), value["environment"]

"""The steps of `mlxkv selftest`: seeded faults and right runs on the default model and on small random ones."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxkv import runtime, session
from mlxkv.engines import job, oracle
from mlxkv.judge import verdict as limits
from mlxkv.judge.trial import Trial
from mlxkv.progress import say
from mlxkv.tiny import LAYOUTS, Tiny
from oracle import tokens as tokenizers
from oracle import trace
from oracle.checkpoint import Checkpoint, require_llama, resolve
from oracle.plan import Refusal
from oracle.trace import TAPS

FORMAT = "mlxkv-selftest/1"
ENGINE = "mlxkv.engines.selftest"
PROMPT = "The river that runs through the old city was the first thing that every traveller asked about, and the last thing they saw"
STEPS = 16
TINY = tuple(Tiny(layout, std, seed) for layout in LAYOUTS for std in (0.02, 0.2) for seed in (0, 1))
_TOKENS = 24  # of a random model's prompt


@dataclass(frozen=True, slots=True)
class Result:
    """The trials of every model, by its name, and what each model was."""

    trials: dict[str, tuple[Trial, ...]]
    models: dict[str, dict[str, Any]]
    environment: dict[str, Any]
    oracle: dict[str, Any]

    @property
    def failed(self) -> list[tuple[str, Trial]]:
        """Faults that were missed or misplaced, and right runs that were accused."""
        return [(model, trial) for model, trials in self.trials.items() for trial in trials if not trial.passed]

    @property
    def exit_code(self) -> int:
        """0 when nothing was missed and nobody accused, else 1."""
        return 1 if self.failed else 0

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-selftest/1`, with the limits of the day."""
        return {
            "format": FORMAT,
            "exit_code": self.exit_code,
            "limits": current_limits(),
            "models": self.models,
            "trials": {model: [_plain(trial) for trial in trials] for model, trials in self.trials.items()},
            "environment": {"port": self.environment, "oracle": self.oracle},
        }


def current_limits() -> dict[str, float]:
    """Every limit that a verdict depends on, by its name in judge/verdict.py."""
    names = ("SIGMA", "WORST", "PEAK", "SHIFT", "FLIP_MARGIN", "CACHED", "KV_MEDIAN", "KV_MOST", "KV_WORST", "ALGEBRA", "PROBE")
    return {name: float(getattr(limits, name)) for name in names}


def run(
    model: str | None,
    revision: str | None,
    *,
    faults: Sequence[str],
    tiny: bool,
    real: bool = True,
    ignore_keys: tuple[str, ...] = (),
) -> Result:
    """Every model in turn, each in a process of its own."""
    runtime.require_device("cpu")
    oracle.require_torch()
    trials: dict[str, tuple[Trial, ...]] = {}
    models: dict[str, dict[str, Any]] = {}
    made: dict[str, Any] = {}
    manifest: trace.Manifest | None = None
    with session.scratch() as room:
        for name, checkpoint, ids, prompt in _models(model, revision, room, ignore_keys, tiny=tiny, real=real):
            say(f"selftest: {name}")
            question = _question(checkpoint, ids, prompt)
            answer = oracle.ask(question)
            manifest = answer.manifest
            (room / f"run-{name}").mkdir()
            one, made = _trials(checkpoint, answer, room / f"run-{name}", faults)
            trials[name] = one
            models[name] = {"fingerprint": checkpoint.fingerprint, "tokens": len(manifest.tokens), "prompt_tokens": len(ids)}
    if manifest is None:
        raise Refusal("selftest: no model to run on, expected the default or the random ones")
    return Result(trials, models, made, manifest.environment)


def _models(model: str | None, revision: str | None, room: Path, ignore_keys: tuple[str, ...], *, tiny: bool, real: bool) -> Any:
    """Name, checkpoint, prompt ids and prompt text of each."""
    if real:
        checkpoint = resolve(model, revision=revision, ignore_keys=ignore_keys)
        require_llama(checkpoint)
        tokenizer = tokenizers.load(checkpoint.folder)
        if tokenizer is None:
            yield checkpoint.name, checkpoint, _random_ids(checkpoint.vocab_size, 0), None
        else:
            yield checkpoint.name, checkpoint, tuple(tokenizer.encode(PROMPT)), PROMPT
    for one in TINY if tiny else ():
        checkpoint = resolve(str(one.save(room / one.name)))
        yield one.name, checkpoint, _random_ids(checkpoint.vocab_size, one.seed), None


def _random_ids(vocab: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, vocab, _TOKENS).tolist())


def _question(checkpoint: Checkpoint, ids: tuple[int, ...], prompt: str | None) -> oracle.Question:
    half = len(ids) // 2
    return oracle.Question(
        checkpoint=checkpoint,
        prompt=prompt,
        tokens=ids,
        prompt_tokens=len(ids),
        steps=STEPS,
        chunks=(half, len(ids) - half),
        dtype="float32",
        threads=os.cpu_count() or 1,
        taps=TAPS,
    )


def _trials(checkpoint: Checkpoint, answer: oracle.Answer, room: Path, faults: Sequence[str]) -> tuple[tuple[Trial, ...], dict[str, Any]]:
    plans = tuple(oracle.judged(answer.manifest, answer.folder).values())
    one = job.Job(str(checkpoint.folder), plans, room, "float32", "float32", "cpu", ignore_keys=checkpoint.without)
    job.start([ENGINE, str(one.save()), str(answer.folder), str(room / "result.json"), *faults])
    value = json.loads((room / "result.json").read_text(encoding="utf-8"))
    return tuple(Trial(**trial) for trial in value["trials"]), value["environment"]


def _plain(trial: Trial) -> dict[str, Any]:
    from dataclasses import asdict

    from mlxkv.judge.result import plain

    return dict(plain(asdict(trial)))

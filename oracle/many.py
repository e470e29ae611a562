"""Many questions about one model: read from a file, estimated, and answered by one process."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from oracle import folder, sizes
from oracle.formats import questions
from oracle.formats.errors import Refusal
from oracle.formats.progress import Note, Progress, silent
from oracle.formats.questions import Asked, Estimate, One
from oracle.model import measured, tokenizer
from oracle.model.cache_folder import cache_dir
from oracle.question import IMPORTS, Question, ask, rough
from oracle.truth.config import Config

_LEAST_CONVERTED = 10**9  # bytes: smaller ones are converted in memory (`oracle.pool.converted`)
_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def answer(path: Path, *, progress: Progress = silent, note: Note = silent) -> Iterator[str]:
    """Answers the questions of a file; each folder's path as soon as it is there, and in the end of
    those that were refused why, as `questions.refusal` says it.
    """
    given = questions.read(path)
    asked = _questions(given, progress=progress, note=note)
    expected = _estimate(asked)
    note(_line(asked, expected))
    begun, ends, refused = time.perf_counter(), list[float](), dict[Path, Refusal]()

    def counted(what: str, part: int, whole: int) -> None:
        progress(what + _left(ends, len(asked)), part, whole)

    made = folder.many(asked, force=True, refused=refused, progress=counted, note=note)
    try:
        for out in made:
            ends.append(time.perf_counter())
            yield str(out)
    except Refusal:
        yield from (questions.refusal(out, error) for out, error in refused.items())
        raise
    plain = IMPORTS + sum(one.seconds() for one in asked.values())
    measured.remember(_key(asked), plain, time.perf_counter() - begun)


def _left(ends: Sequence[float], of: int) -> str:
    """Which of several answers is being made, and how long the rest takes at the speed so far: that
    from the end of the first on, which has the imports.
    """
    done = len(ends)
    if not done:
        return ""
    if done == 1:
        return f" (2 of {of})"
    each = (ends[-1] - ends[0]) / (done - 1)
    return f" ({done + 1} of {of}, about {rough((of - done) * each)} s left)"


def estimate(path: Path) -> str:
    """What the questions of a file would take, as JSON; nothing is computed."""
    return questions.estimate_json(_estimate(_questions(questions.read(path))))


def _questions(
    given: Asked, *, progress: Progress = silent, note: Note = silent
) -> dict[Path, Question]:
    """The questions by the folders for their answers; the model is opened once."""
    base = ask(
        given.model,
        tokens=[0],
        steps=0,
        dtype=given.dtype,
        threads=given.threads,
        revision=given.revision,
        ignore_keys=given.ignore_keys,
        progress=progress,
        note=note,
    )
    return {Path(one.out).absolute(): _question(base, one) for one in given.questions}


def _question(base: Question, one: One) -> Question:
    if one.probe:
        return base.probed()
    ids = list(one.tokens) if one.tokens is not None else _encoded(base, one.prompt or "")
    most = base.config.max_positions
    tokenizer.check_ids(ids, vocab_size=base.config.vocab_size, max_positions=most)
    found = replace(
        base,
        prompt=one.prompt,
        tokens=tuple(ids),
        prompt_tokens=one.prompt_tokens or len(ids),
        steps=one.steps,
        chunks=one.chunks,
        taps=one.taps,
        all_rows=one.all_rows,
    )
    found.checked()
    return found


def _encoded(base: Question, prompt: str) -> list[int]:
    if base.tokenizer is None:
        what = "no tokenizer.json, expected one for a prompt of text"
        raise Refusal(what, where=base.checkpoint.folder, remedy="give token ids")
    return base.tokenizer.encode(prompt)


def _estimate(asked: Mapping[Path, Question]) -> Estimate:
    some = list(asked.values())
    plain, key = IMPORTS + sum(one.seconds() for one in some), _key(asked)
    converted = _converted(some[0])
    return Estimate(
        seconds=measured.corrected(key, plain),
        memory_bytes=round(max(map(_memory, some))),
        disk_bytes=round(sum(one.disk_bytes() for one in some)) + converted,
        converted_bytes=converted,
        measured=measured.known(key),
        plans=[list(one.plans([0] * one.steps).values()) for one in some],
    )


def _key(asked: Mapping[Path, Question]) -> str:
    """Under what the speed of such answers is remembered."""
    first = next(iter(asked.values()))
    parameters = first.checkpoint.parameters
    return measured.key("oracle", first.dtype, first.threads, parameters=parameters)


def _line(asked: Mapping[Path, Question], expected: Estimate) -> str:
    """About what all will take, as the oracle says it before it begins."""
    first, *others = asked.values()
    if len(others) < 2:
        what = first.named if not others else f"{first.named} and {others[0].named}"
    else:
        what = f"{len(asked)} sequences"
    disk = rough(expected.disk_bytes / 1e6)
    return f"oracle: {what}, about {rough(expected.seconds)} s and {disk} MB on disk"


def _memory(one: Question) -> float:
    """About the bytes that are no file's: two of the largest layer's weights in float64, the rows,
    keys and values of two runs, small weights in the run's dtype, and the larger of what the truth
    and what transformers computes on the way.
    """
    plans = one.plans([0] * one.steps)
    runs = len(one.members(plans)) + 2
    (full,) = plans["full"].calls()
    kept, config = len(plans["full"].kept(full)), one.config
    calls = [call for plan in plans.values() for call in plan.calls() if call.held and call.fed > 1]
    masked = max((call.fed * (call.held + call.fed) for call in calls), default=0)
    item, ways = 4 if one.dtype == "float32" else 2, len(one.segments(plans))
    passing = sizes.pool(config, one.length, item=item, masked=masked)
    if isinstance(config, Config):
        passing = max(passing, sizes.truth(config, one.length, ways=ways, rows=kept))
    small = size if (size := _odd(one)) < _LEAST_CONVERTED else 0
    held = 16 * sizes.layer(config) + 2 * one.disk_bytes() / runs
    return sizes.PROCESS + held + small + passing


def _converted(one: Question) -> int:
    """Bytes of the weights that are kept in the run's dtype, if they are to be made first.

    Those are the ones that the files hold in another dtype, if they are large enough.
    """
    checkpoint, size = one.checkpoint, _odd(one)
    kept = cache_dir() / "converted"
    there = kept.is_dir() and any(kept.glob(f"{checkpoint.fingerprint}-{one.dtype}*"))
    return 0 if size < _LEAST_CONVERTED or there else size


def _odd(one: Question) -> int:
    """Bytes in the run's dtype of the weights that the files hold in another."""
    checkpoint, stored = one.checkpoint, _STORED[one.dtype]
    odd = [
        math.prod(shape)
        for name, shape in checkpoint.weights.items()
        if name in checkpoint.packed or checkpoint.tensors[name].dtype != stored
    ]
    return sum(odd) * (4 if one.dtype == "float32" else 2)

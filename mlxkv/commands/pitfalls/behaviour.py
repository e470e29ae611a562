"""What a system made of a scenario: right, silently wrong, refused, or cannot be expressed; and the evidence.

The rows decide, not the tokens: thirteen of twenty-four known faults change no token at all. A row can be laid beside the
truth as long as the same tokens were fed before it, so a run that chose another token counts up to that choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlxkv.commands.pitfalls.scenarios import NO, REFUSED, RIGHT, WRONG, Aim, Behaviour, Scenario
from mlxkv.judge import measure
from mlxkv.judge.case import Case
from mlxkv.judge.floors import logit_floors
from mlxkv.judge.limits import SIGMA, WORST
from mlxkv.judge.measure import Array, Floats
from oracle.formats.plan import Call, Greedy
from oracle.formats.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Right:
    """How one talk should go: its prompt, its greedy tokens, the truth's rows (n, V) and their noise floors (n,)."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: Floats
    floor: Floats


@dataclass(frozen=True, slots=True)
class Part:
    """One step beside what it was meant to be. `parted` is the first token that differs, counted from 0."""

    talk: str
    behaviour: Behaviour
    tokens: tuple[int, ...] = ()
    parted: int | None = None
    sigma: float | None = None
    worst: float | None = None
    rows: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """What a cache held at the end: layers, the shape of a layer's keys, bytes of all rows in the run's dtype."""

    cache: str
    layers: int
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Seen:
    """One system on one scenario. `reason` says why there is no run."""

    behaviour: Behaviour
    expected: Behaviour
    parts: tuple[Part, ...] = ()
    held: tuple[Held, ...] = ()
    masks: tuple[tuple[tuple[int, ...], ...], ...] = ()
    reason: str | None = None

    @property
    def documented(self) -> bool:
        """Whether it behaved as is known of it."""
        return self.behaviour == self.expected

    @property
    def cost(self) -> float | None:
        """The worst row's distance from the truth in noise floors, where something was silently wrong."""
        costs = [p.worst for p in self.parts if p.behaviour == WRONG and p.worst is not None]
        return max(costs, default=None)

    @property
    def errors(self) -> tuple[str, ...]:
        """Every error's text."""
        return tuple(p.error for p in self.parts if p.error)


def right(case: Case, generated: Sequence[int]) -> Right:
    """A talk's truth from the oracle's folder."""
    manifest = case.manifest
    floors = logit_floors(case, measure.truth_rows(case.truth))
    return Right(
        tuple(manifest.tokens[: manifest.prompt_tokens]),
        tuple(generated),
        case.truth.logits,
        floors.rms,
    )


def watch(scenario: Scenario, expected: Behaviour, trace: Trace, talks: dict[str, Right]) -> Seen:
    """What the trace shows. A step that the plan lacks was not asked of this system."""
    steps = trace.meta.plan.steps
    parts = tuple(
        _part(aim, trace, talks[aim.talk]) for aim in scenario.aims if aim.step < len(steps)
    )
    found = {part.behaviour for part in parts}
    behaviour = next(b for b in (WRONG, REFUSED, NO, RIGHT) if b in found)
    masks = tuple(
        _mask(array) for name, array in sorted(trace.arrays.items()) if name.startswith("mask/")
    )
    return Seen(behaviour, expected, parts, _held(trace), masks if scenario.shows_mask else ())


def _part(aim: Aim, trace: Trace, talk: Right) -> Part:
    step, outcome = trace.meta.plan.steps[aim.step], trace.meta.outcomes[aim.step]
    assert isinstance(step, Call | Greedy)
    tokens = tuple(outcome.tokens or ())
    at = np.flatnonzero(trace.arrays["steps"] == aim.step)
    rows = trace.logits[at]
    parted = next(
        (i for i, (a, b) in enumerate(zip(tokens, talk.tokens, strict=False)) if a != b), None
    )
    compared = len(rows) if parted is None else min(len(rows), parted + 1)
    place = aim.fed + len(step.tokens) - 1
    sigmas = _sigmas(rows[:compared], talk, place)
    sigma, worst = (
        (float(np.sqrt(np.mean(sigmas * sigmas))), float(sigmas.max()))
        if compared
        else (None, None)
    )
    good = sigma is None or worst is None or (sigma <= SIGMA and worst <= WORST)
    behaviour: Behaviour = WRONG if not good or (outcome.error is None and not compared) else RIGHT
    if good and outcome.error is not None:
        behaviour = NO if outcome.kind == "cannot be expressed" else REFUSED
    return Part(aim.talk, behaviour, tokens, parted, sigma, worst, compared, outcome.error)


def _sigmas(rows: Array, talk: Right, place: int) -> Floats:
    """Each row's centred rms distance from the truth at positions from `place` on, in noise floors; NaN counts as infinite."""
    places = range(place, place + len(rows))
    with np.errstate(invalid="ignore", over="ignore"):
        errors = rows.astype(np.float64) - talk.rows[places]
        errors -= errors.mean(axis=1, keepdims=True)
        sigmas = np.sqrt(np.mean(errors * errors, axis=1)) / talk.floor[places]
    return np.where(np.isfinite(sigmas), sigmas, np.inf)


def _held(trace: Trace) -> tuple[Held, ...]:
    names = list(
        dict.fromkeys(name.split("/")[1] for name in trace.arrays if name.startswith("kv/"))
    )
    size = 4 if trace.meta.dtype == "float32" else 2
    found = []
    for name in names:
        layers = sum(
            key.startswith(f"kv/{name}/") and key.endswith("/keys") for key in trace.arrays
        )
        first = trace.kv(name, 0)
        if first is not None:
            shape = first[0].shape
            found.append(Held(name, layers, (1, *shape), 2 * layers * int(np.prod(shape)) * size))
    return tuple(found)


def _mask(array: Array) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(x) for x in row) for row in array)

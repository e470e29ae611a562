"""What a system made of a scenario: right, silently wrong, refused, or cannot be expressed.

The rows decide, not the tokens: thirteen of twenty-four known faults change no token at all. A row
can be laid beside the truth as long as the same tokens were fed before it, so a run that chose
another token counts up to that choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlxkv.commands.pitfalls.scenarios import NO, REFUSED, RIGHT, WRONG, Aim, Behaviour, Scenario
from mlxkv.judge import measure
from mlxkv.judge.case import Case
from mlxkv.judge.floors import logit_floors
from mlxkv.judge.limits import SIGMA, WORST
from mlxkv.judge.measure import Floats
from mlxkv.judge.result import plain
from oracle.formats.plan import Call, Greedy
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace

FORMAT = "mlxkv-pitfalls/1"


@dataclass(frozen=True, slots=True, eq=False)
class Right:
    """How one talk should go: its prompt and greedy tokens, and the truth's rows.

    `rows` are (n, V), one per position; `floor` (n,) is their noise floor.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: Floats
    floor: Floats


@dataclass(frozen=True, slots=True)
class Part:
    """One step beside what it was meant to be. `parted` is the first token that differs, from 0."""

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
    """What a cache held at the end; `shape` is that of a layer's keys, `bytes` of all rows."""

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
        return self.behaviour == self.expected

    @property
    def cost(self) -> float | None:
        """The worst silently wrong row's distance from the truth, in noise floors."""
        costs = [p.worst for p in self.parts if p.behaviour == WRONG and p.worst is not None]
        return max(costs, default=None)

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(p.error for p in self.parts if p.error)


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """What came of every scenario on every system; `comparable` with the page's values or not.

    `seen` is by scenario and system, `rights` by talk, `environments` by system. `branches` are
    what memory.py measured. `text(before, ids)` is the text of ids that follow others.
    """

    model: str
    source: str
    fingerprint: str
    scenarios: tuple[Scenario, ...]
    seen: Mapping[tuple[str, str], Seen]
    rights: Mapping[str, Right]
    environments: Mapping[str, Mapping[str, Any]]
    branches: Mapping[str, Any]
    comparable: bool
    text: Callable[[Sequence[int], Sequence[int]], str]

    @property
    def surprises(self) -> list[tuple[str, str]]:
        return [key for key, seen in self.seen.items() if not seen.documented]

    @property
    def exit_code(self) -> int:
        """0 when all behaved as documented, 1 when one did not."""
        return 1 if self.surprises else 0

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-pitfalls/1`"""
        systems: dict[str, dict[str, Any]] = {}
        for (name, system), seen in self.seen.items():
            systems.setdefault(name, {})[system] = asdict(seen)
        value = {
            "format": FORMAT,
            "model": {"name": self.model, "source": self.source, "fingerprint": self.fingerprint},
            "prompts": {
                name: {"ids": right.prompt, "generated": right.tokens}
                for name, right in self.rights.items()
            },
            "scenarios": [
                {"name": s.name, "what": s.what, "systems": systems[s.name], "page": s.page}
                for s in self.scenarios
            ],
            "page_comparable": self.comparable,
            "surprises": self.surprises,
            "exit_code": self.exit_code,
            "branches": {k: v for k, v in self.branches.items() if k != "environment"},
            "environment": self.environments,
        }
        return dict(plain(value))


def right(case: Case, generated: Sequence[int]) -> Right:
    """A talk's truth from the oracle's folder."""
    prompt = tuple(case.manifest.tokens[: case.manifest.prompt_tokens])
    floors = logit_floors(case, measure.truth_rows(case.truth))
    return Right(prompt, tuple(generated), case.truth.logits, floors.rms)


def watch(
    scenario: Scenario, expected: Behaviour, trace: Trace, talks: Mapping[str, Right]
) -> Seen:
    """What the trace shows. A step that the plan lacks was not asked of this system."""
    aims = [aim for aim in scenario.aims if aim.step < len(trace.meta.plan.steps)]
    parts = tuple(_part(aim, trace, talks[aim.talk]) for aim in aims)
    found = {part.behaviour for part in parts}
    behaviour = next(b for b in (WRONG, REFUSED, NO, RIGHT) if b in found)
    names = sorted(trace.arrays) if scenario.shows_mask else []
    masks = [trace.arrays[name].tolist() for name in names if name.startswith("mask/")]
    shown = tuple(tuple(map(tuple, mask)) for mask in masks)
    return Seen(behaviour, expected, parts, _held(trace), shown)


def _part(aim: Aim, trace: Trace, talk: Right) -> Part:
    step, outcome = trace.meta.plan.steps[aim.step], trace.meta.outcomes[aim.step]
    assert isinstance(step, Call | Greedy)
    tokens, error = tuple(outcome.tokens or ()), outcome.error
    pairs = enumerate(zip(tokens, talk.tokens, strict=False))
    parted = next((i for i, (a, b) in pairs if a != b), None)
    of_step = trace.arrays["steps"] == aim.step
    if "batch" in trace.arrays:
        of_step = of_step & (trace.arrays["batch"] == aim.row)
    rows = trace.logits[np.flatnonzero(of_step)]
    if parted is not None:
        rows = rows[: parted + 1]
    sigma, worst = None, None
    if len(rows):
        sigmas = _sigmas(rows, talk, aim.fed + len(step.batch[0]) - 1)
        sigma, worst = float(np.sqrt(np.mean(sigmas * sigmas))), float(sigmas.max())
    if sigma is not None and worst is not None and not (sigma <= SIGMA and worst <= WORST):
        behaviour = WRONG
    elif error is not None:
        behaviour = NO if outcome.kind == NO else REFUSED
    else:
        behaviour = RIGHT if len(rows) else WRONG
    return Part(aim.talk, behaviour, tokens, parted, sigma, worst, len(rows), error)


def _sigmas(rows: Array, talk: Right, first: int) -> Floats:
    """Each row's centred rms distance from the truth, in noise floors; NaN counts as infinite.

    `rows` (R, V) are those of the positions from `first` on.
    """
    at = range(first, first + len(rows))
    with np.errstate(invalid="ignore", over="ignore"):
        errors = rows.astype(np.float64) - talk.rows[at]
        errors -= errors.mean(axis=1, keepdims=True)
        sigmas = np.sqrt(np.mean(errors * errors, axis=1)) / talk.floor[at]
    return np.where(np.isfinite(sigmas), sigmas, np.inf)


def _held(trace: Trace) -> tuple[Held, ...]:
    """What every cache held that has rows; in bytes of the run's dtype."""
    size = 4 if trace.meta.dtype == "float32" else 2
    kept = [name.split("/")[1:] for name in trace.arrays if name.startswith("kv/")]
    found = []
    for cache in dict.fromkeys(name for name, *_ in kept):
        layers = sum(name == cache and kind == "keys" for name, _, kind in kept)
        first = trace.kv(cache, 0)
        if first is not None:
            shape = (1, *first[0].shape)[-4:]  # of a batch they have four axes already
            found.append(Held(cache, layers, shape, 2 * layers * int(np.prod(shape)) * size))
    return tuple(found)

"""The page's experiments as plans: for each system what its user would write, and what comes of it.

Systems: T transformers with DynamicCache; C the port in candle's mode; G the port with its guards;
L mlx-lm with KVCache. `TABLE` says what is known to come of each scenario on each system; the plans
follow it. A plan here returns the last row of every call. A talk is a prompt and its greedy tokens
on a fresh cache, as it should go; an `Aim` says which part of which talk a step was meant to be, so
that the rows which came can be laid beside the right ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from oracle.formats.errors import Refusal
from oracle.formats.plan import (
    Call,
    Clone,
    Crop,
    Greedy,
    New,
    Plan,
    Reset,
    Step,
    growing_prefixes,
    judged_plans,
)

Behaviour = Literal[
    "right",
    "silently wrong",
    "refused",
    "cannot be expressed",
    "lossy by design",
    "not compared",
]
SYSTEMS: dict[str, str] = {
    "T": "transformers, DynamicCache",
    "C": "the port in candle's mode",
    "G": "the port, guarded",
    "L": "mlx-lm, KVCache",
}
OTHER_CACHES = ("ConcatenateKVCache", "RotatingKVCache")
"""mlx-lm's other caches, run where a scenario says so."""

RIGHT: Behaviour = "right"
WRONG: Behaviour = "silently wrong"
REFUSED: Behaviour = "refused"
NO: Behaviour = "cannot be expressed"
LOSSY: Behaviour = "lossy by design"
UNSEEN: Behaviour = "not compared"


_EACH_RIGHT = (RIGHT,) * 4
TABLE: dict[str, tuple[str, tuple[Behaviour, ...]]] = {
    "greedy": ("the prompt once, then token by token", (RIGHT,) * 6),
    "pos0": ("index_pos stays 0 while decoding", (NO, WRONG, REFUSED, NO)),
    "cached": ("teacher-forced: the prompt, then single tokens", _EACH_RIGHT),
    "chunked": ("the prompt in {cut} + {rest} tokens, then single ones", _EACH_RIGHT),
    "mask": ("what {rest} new tokens may see after {cut} cached ones", _EACH_RIGHT),
    "reuse": (
        "a second prompt on the used cache, from index_pos 0",
        (WRONG, REFUSED, REFUSED, WRONG, WRONG, WRONG),
    ),
    "reuse1": (
        "a prompt of one token on the used cache, from index_pos 0",
        (WRONG, WRONG, REFUSED, WRONG),
    ),
    "far": (
        "one token at position {limit}, the first beyond the model's",
        (RIGHT, REFUSED, REFUSED, NO),
    ),
    "branch": ("one prefix, cloned, two ends", (RIGHT,) * 6),
    "crop": (
        "a used cache cut back to the common prefix, the second prompt's end after it",
        (RIGHT, NO, RIGHT, RIGHT, WRONG, RIGHT),
    ),
    "dtype": ("a cache of another dtype than the weights'", (NO, REFUSED, REFUSED, NO)),
    "nocache": ("use_kv_cache = false: the growing prefix at every step", _EACH_RIGHT),
    "by_calls": ("index_pos counts calls instead of tokens", (NO, WRONG, REFUSED, NO)),
    "quantized": (
        "as reuse, where index_pos 0 drops the old cache (candle's quantized_llama)",
        (NO, RIGHT, NO, NO),
    ),
    "nocache1": (
        "use_kv_cache = false, fed one token at a time: the context is lost",
        (WRONG, WRONG, REFUSED, WRONG),
    ),
    "reset": (
        "a used cache, emptied (or a new one, where it has no such call), the second prompt on it",
        (RIGHT,) * 6,
    ),
    "turns": ("one prefix, cloned, both ends fed in turn, a call each", (RIGHT,) * 6),
    "batch": ("two sequences in one batch: {width} tokens, then single ones", (RIGHT,) * 6),
}
"""By scenario what it is, with names of the setting's values, and what is known to come of it: on
T, C, G and L in turn and, where given, on OTHER_CACHES."""
PAGE: dict[str, dict[str, str]] = {
    "greedy": {
        "T": "30 layers, keys (1, 3, 24, 64), length 24: ` Paris. Paris is the largest city in "
        "France and the capital of the French department of the Espace`",
        "C": "the same tokens; no way to see the length",
    },
    "pos0": {
        "T": "takes no position",
        "C": "no error: `7042 28 260 3575 282 4649 28 260 1797 1918 28 260 1797 1918 28 284 260 "
        "3575 282 4649`",
    },
    "cached": {
        "T": "max 8.01e-5 against 24 at once, 20/20",
        "C": "max 6.25e-5 against no cache, 20/20",
    },
    "chunked": {"T": "4.673e-5 at the prompt's last position", "C": "max 2.909e-5, 20/20"},
    "mask": {"C": "`[[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]`"},
    "reuse": {
        "T": "length 48; the first 14 tokens as fresh, the 15th not: ` German state` for "
        "` Federal Republic`",
        "C": "`cannot broadcast [5, 5] to [1, 9, 5, 29]`",
    },
    "reuse1": {
        "C": "no error: `3575 282 4649 30 657 314 260 3995 2240 281 1910 411 2155 284 260 1796 768 "
        "35488 6151 282`; fresh: `198 198 504 1646 288 253 3424 2329 1740 314 288 1464 253 2437 "
        "284 4798 1380 1786 338 27784`",
    },
    "far": {
        "T": "computes: (1, 1, 49152), finite",
        "C": "`narrow invalid args start + len > dim_len: [8192, 32], ...`",
    },
    "branch": {
        "C": "both equal fresh runs; Germany: `11452 30 11452 314 260 3995 2240 281 4521 284 260 "
        "3575 282 260 7030 5261 282 4521 30 11452`",
    },
    "dtype": {"T": "not needed", "C": "must be equal, by convention"},
    "nocache": {"T": "use_cache=False", "C": "kvs stay empty"},
}
"""What the page shows of a scenario, by system."""


@dataclass(frozen=True, slots=True)
class Aim:
    """The rows of one step were meant to continue `talk`, of which `fed` tokens were fed before.

    Of a batch, those of its row number `row`.
    """

    step: int
    talk: str
    fed: int = 0
    row: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One experiment: by system its plan, or the words why it has none, and what is expected.

    mlx-lm's OTHER_CACHES stand beside the systems where they run it too, on mlx-lm's plan. The
    cache is of `cache_dtype`, if that is given; `shows_mask` has the report show masks.
    """

    name: str
    what: str
    plans: Mapping[str, Plan | str]
    aims: tuple[Aim, ...]
    expected: Mapping[str, Behaviour]
    page: Mapping[str, str] = field(default_factory=dict)
    cache_dtype: str | None = None
    shows_mask: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """What scenarios are made from: two prompts that begin alike, and the greedy tokens of each.

    Those of the first are `right`, those of the second `other`. `limit` is the first position
    beyond the model's, `steps` the greedy tokens after each prompt.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    right: tuple[int, ...]
    other: tuple[int, ...]
    limit: int
    steps: int

    @property
    def common(self) -> int:
        """Tokens that both prompts begin with."""
        pairs = enumerate(zip(self.first, self.second, strict=False))
        return next((i for i, (a, b) in pairs if a != b), self.width)

    @property
    def sequence(self) -> tuple[int, ...]:
        """The first prompt and its greedy tokens but the last: what is teacher-forced."""
        return (*self.first, *self.right[: self.steps - 1])

    @property
    def other_sequence(self) -> tuple[int, ...]:
        """The second prompt and its greedy tokens but the last."""
        return (*self.second, *self.other[: self.steps - 1])

    @property
    def width(self) -> int:
        """Tokens of each prompt that one batch can take: as many as the shorter has."""
        return min(len(self.first), len(self.second))

    @property
    def halves(self) -> Plan:
        """The first prompt alone in two calls, as the chunked plan sends it."""
        return judged_plans(list(self.first), prompt=len(self.first))["chunked"]

    def check(self) -> None:
        """Refuses prompts with which some scenario would say nothing."""
        if self.first == self.second or not 0 < self.common < self.width or self.width < 3:
            raise Refusal(
                f"prompts: they share their first {self.common} of {len(self.first)} and "
                f"{len(self.second)} tokens, expected two of at least 3 tokens that begin alike "
                "and differ before their ends; give other ones"
            )
        if self.steps < 3:
            raise Refusal(
                f"--steps {self.steps}: expected at least 3, or a wrong position would not show"
            )


def talks(setting: Setting) -> dict[str, tuple[int, ...]]:
    """The prompts of the talks whose truth must be known: both, and the first token alone."""
    first, second = setting.first, setting.second
    return {"first": first, "second": second, "one": first[:1]}


def scenarios(setting: Setting) -> list[Scenario]:
    """All of them, the page's in its order; a Refusal where the prompts would show nothing."""
    setting.check()
    ways = _one_prompt(setting) | _second_prompt(setting) | _no_cache(setting) | _both(setting)
    cut, rest = (call.fed for call in setting.halves.calls())
    made = []
    for name, (what, behaviours) in TABLE.items():
        steps, aims = ways[name]
        others = OTHER_CACHES[: len(behaviours) - len(SYSTEMS)]
        names = [name] * len(SYSTEMS) + [f"{name}-{cache}" for cache in others]
        named = zip((*SYSTEMS, *others), names, (*steps, *steps[3:] * len(others)), strict=True)
        plans = {
            system: way if isinstance(way, str) else Plan(plan, way, "last")
            for system, plan, way in named
        }
        made.append(
            Scenario(
                name=name,
                what=what.format(cut=cut, rest=rest, limit=setting.limit, width=setting.width),
                plans=plans,
                aims=aims,
                expected=dict(zip(plans, behaviours, strict=True)),
                page=PAGE.get(name, {}),
                cache_dtype="float16" if name == "dtype" else None,
                shows_mask=name == "mask",
            )
        )
    return made


Steps = tuple[Step, ...]
Way = Steps | str
Ways = dict[str, tuple[tuple[Way, Way, Way, Way], tuple[Aim, ...]]]
"""By scenario: the steps of T, C, G and L, or the words why there are none; and the aims."""
_UNPLACED = "{} takes no position: its cache gives it"
_T, _L = _UNPLACED.format("transformers"), _UNPLACED.format("mlx-lm")


def _one_prompt(s: Setting) -> Ways:
    """The first prompt on one cache, used right, and with wrong positions."""
    new, prompt = New("a"), (Aim(1, "first"),)
    greedy = (new, Greedy("a", s.first, 0, s.steps))
    judged = judged_plans(list(s.sequence), prompt=len(s.first))
    step, chunked = judged["step"], judged["chunked"]
    zero = (new, Greedy("a", s.first, 0, s.steps, "zero"))
    by_calls = (new, Greedy("a", s.first, 0, s.steps, "by_calls"))
    beyond = (new, Call("a", s.first[:1], s.limit))
    far = (*beyond, Call("a", s.first[:1], 0))
    once = (new, Call("a", s.first, 0))
    tables = "needs none: its tables live in the model"
    return {
        "greedy": ((greedy,) * 4, prompt),
        "cached": ((step.steps,) * 4, _along(step)),
        "chunked": ((chunked.steps,) * 4, _along(chunked)),
        "mask": ((s.halves.steps,) * 4, _along(s.halves)),
        "pos0": ((_T, zero, zero, _L), prompt),
        "by_calls": ((_T, by_calls, by_calls, _L), prompt),
        "far": ((beyond, far, far, _L), (Aim(1, "one"), Aim(2, "one"))),
        "dtype": ((tables, once, once, tables), prompt),
    }


def _second_prompt(s: Setting) -> Ways:
    """Another prompt after the first, on its cache or on a clone of it."""
    new, n = New("a"), s.common
    used: Steps = (new, Greedy("a", s.first, 0, s.steps))

    def then(tokens: tuple[int, ...], at: int | None, cache: str = "a") -> Greedy:
        return Greedy(cache, tokens, at, s.steps)

    reuse, placed = (*used, then(s.second, None)), (*used, then(s.second, 0))
    reuse1, placed1 = (*used, then(s.first[:1], None)), (*used, then(s.first[:1], 0))
    dropped = (*used, new, then(s.second, 0))
    begun = (*used, Crop("a", n))
    crop, placed_crop = (*begun, then(s.second[n:], None)), (*begun, then(s.second[n:], n))
    prefix = (new, Call("a", s.first[:n], 0), Clone("a", "b"))
    branch = (*prefix, then(s.first[n:], n), then(s.second[n:], n, "b"))
    no_rule = "no such rule: a caller makes a new cache"
    refuses = "refuses instead, as in reuse"
    emptied = (*used, Reset("a"), then(s.second, 0))
    return {
        "reset": ((emptied,) * 4, (Aim(3, "second"),)),
        "reuse": ((reuse, placed, placed, reuse), (Aim(2, "second"),)),
        "reuse1": ((reuse1, placed1, placed1, reuse1), (Aim(2, "one"),)),
        "quantized": ((no_rule, dropped, refuses, no_rule), (Aim(3, "second"),)),
        "branch": ((branch,) * 4, (Aim(3, "first", n), Aim(4, "second", n))),
        "crop": ((crop, "no way to cut a cache", placed_crop, crop), (Aim(3, "second", n),)),
    }


def _no_cache(s: Setting) -> Ways:
    growing = tuple(growing_prefixes(s.sequence, len(s.first)))
    whole = tuple(Aim(i, "first") for i, step in enumerate(growing) if isinstance(step, Call))
    new = New("a", use_kv_cache=False)
    placed: Steps = (new, *(Call("a", (token,), i) for i, token in enumerate(s.first)))
    left_out: Steps = (new, *(Call("a", (token,)) for token in s.first))
    by_one = tuple(Aim(i + 1, "first", i) for i in range(len(s.first)))
    return {
        "nocache": ((growing,) * 4, whole),
        "nocache1": ((left_out, placed, placed, left_out), by_one),
    }


def _both(s: Setting) -> Ways:
    """Both prompts with what follows them, alive at once: as branches of a prefix, in a batch."""
    new, n, width = New("a"), s.common, s.width
    turns: list[Step] = [new, Call("a", s.first[:n], 0), Clone("a", "b")]
    aims = []
    for cache, talk, tokens, at in _in_turn(s):
        aims.append(Aim(len(turns), talk, at))
        turns.append(Call(cache, tokens, at))
    pairs = tuple(zip(s.sequence, s.other_sequence, strict=False))
    whole: tuple[tuple[int, ...], ...] = s.first[:width], s.second[:width]
    singles = (Call("a", ((a,), (b,)), i) for i, (a, b) in enumerate(pairs) if i >= width)
    batch = Plan("batch", (new, Call("a", whole, 0), *singles))
    talks = enumerate(("first", "second"))
    rows = [(row, talk, call) for row, talk in talks for call in batch.calls()]
    return {
        "turns": ((tuple(turns),) * 4, tuple(aims)),
        "batch": (
            (batch.steps,) * 4,
            tuple(Aim(call.index, talk, call.start, row) for row, talk, call in rows),
        ),
    }


def _in_turn(s: Setting) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Cache, talk, tokens and their position: the end of each prompt, then a token of each."""
    n = s.common
    yield "a", "first", s.first[n:], n
    yield "b", "second", s.second[n:], n
    for i in range(s.steps - 1):
        yield "a", "first", (s.right[i],), len(s.first) + i
        yield "b", "second", (s.other[i],), len(s.second) + i


def _along(plan: Plan) -> tuple[Aim, ...]:
    """Every call was meant to continue the first talk."""
    return tuple(Aim(call.index, "first", call.start) for call in plan.calls())

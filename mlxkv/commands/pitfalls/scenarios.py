"""The page's experiments as plans: for each system what its user would write, and what is known to come of it.

Systems: T transformers with DynamicCache; C the port in candle's mode; G the port with its guards; L mlx-lm with KVCache.
A plan here returns the last row of every call. A `Talk` is a conversation as it should have gone; an `Aim` says which
part of which talk a step was meant to be, so that what came can be laid beside what is right.
"""

from __future__ import annotations

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
    Step,
    growing_prefixes,
    judged_plans,
)

Behaviour = Literal["right", "silently wrong", "refused", "cannot be expressed"]
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


@dataclass(frozen=True, slots=True)
class Talk:
    """A prompt, and how many greedy tokens follow it on a fresh cache."""

    name: str
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Aim:
    """The rows of one step were meant to continue `talk`, of which `fed` tokens had been fed before."""

    step: int
    talk: str
    fed: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One experiment. `plans` has a plan for each system, or the words why it has none."""

    name: str
    what: str
    plans: dict[str, Plan | str]
    aims: tuple[Aim, ...]
    expected: dict[str, Behaviour]
    page: dict[str, str] = field(default_factory=dict)
    others: dict[str, Behaviour] = field(default_factory=dict)
    cache_dtype: str | None = None
    shows_mask: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """What the scenarios are made from: two prompts that begin alike, and the model's last position plus one."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    right: tuple[int, ...]
    limit: int
    steps: int

    @property
    def common(self) -> int:
        """Tokens that both prompts begin with."""
        pairs = zip(self.first, self.second, strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.first), len(self.second))
        )

    @property
    def sequence(self) -> tuple[int, ...]:
        """The first prompt and its greedy tokens but the last: what is teacher-forced."""
        return (*self.first, *self.right[: self.steps - 1])

    def check(self) -> None:
        """Refuses prompts with which some scenario would say nothing."""
        shortest = min(len(self.first), len(self.second))
        if self.first == self.second or not 0 < self.common < shortest or shortest < 3:
            raise Refusal(
                f"prompts: they share their first {self.common} of {len(self.first)} and {len(self.second)} tokens, "
                "expected two of at least 3 tokens that begin alike and differ before their ends; give other ones"
            )
        if self.steps < 3:
            raise Refusal(
                f"--steps {self.steps}: expected at least 3, or a wrong position would not show"
            )


def talks(setting: Setting) -> list[Talk]:
    """The conversations whose truth must be known: both prompts, and the first token alone."""
    return [
        Talk("first", setting.first),
        Talk("second", setting.second),
        Talk("one", setting.first[:1]),
    ]


def scenarios(setting: Setting) -> list[Scenario]:
    """All of them, in the page's order."""
    setting.check()
    made = _used_right(setting) + _wrong_position(setting) + _second_prompt(setting)
    made += [*_one_prefix(setting), _dtype(setting), *_without_cache(setting)]
    order = (
        "greedy",
        "pos0",
        "cached",
        "chunked",
        "mask",
        "reuse",
        "reuse1",
        "far",
        "branch",
        "crop",
        "dtype",
        "nocache",
    )
    return sorted(made, key=lambda s: order.index(s.name) if s.name in order else len(order))


def _used_right(s: Setting) -> list[Scenario]:
    all_right = dict.fromkeys(SYSTEMS, RIGHT)
    judged = judged_plans(list(s.sequence), prompt=len(s.first))
    chunks = judged_plans(list(s.first), prompt=len(s.first))["chunked"]
    cut = [call.fed for call in chunks.calls()]
    return [
        Scenario(
            "greedy",
            "the prompt once, then token by token",
            _everywhere("greedy", New("a"), Greedy("a", s.first, 0, s.steps)),
            (Aim(1, "first"),),
            all_right,
            {
                "T": "30 layers, keys (1, 3, 24, 64), length 24: ` Paris. Paris is the largest city in France and the capital of the "
                "French department of the Espace`",
                "C": "the same tokens; no way to see the length",
            },
            dict.fromkeys(OTHER_CACHES, RIGHT),
        ),
        Scenario(
            "cached",
            "teacher-forced: the prompt, then single tokens",
            _everywhere("cached", *judged["step"].steps),
            _along("first", judged["step"]),
            all_right,
            {
                "T": "max 8.01e-5 against 24 at once, 20/20",
                "C": "max 6.25e-5 against no cache, 20/20",
            },
        ),
        Scenario(
            "chunked",
            f"the prompt in {cut[0]} + {cut[1]} tokens, then single ones",
            _everywhere("chunked", *judged["chunked"].steps),
            _along("first", judged["chunked"]),
            all_right,
            {"T": "4.673e-5 at the prompt's last position", "C": "max 2.909e-5, 20/20"},
        ),
        Scenario(
            "mask",
            f"what {cut[1]} new tokens may see after {cut[0]} cached ones",
            _everywhere("mask", *chunks.steps),
            _along("first", chunks),
            all_right,
            {"C": "`[[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]`"},
            shows_mask=True,
        ),
    ]


def _wrong_position(s: Setting) -> list[Scenario]:
    takes_none: dict[str, Plan | str] = {
        "T": _no_position("transformers"),
        "L": _no_position("mlx-lm"),
    }
    expected: dict[str, Behaviour] = {"T": NO, "C": WRONG, "G": REFUSED, "L": NO}
    zero = Plan("pos0", (New("a"), Greedy("a", s.first, 0, s.steps, "zero")), "last")
    calls = Plan("by_calls", (New("a"), Greedy("a", s.first, 0, s.steps, "by_calls")), "last")
    far = Plan(
        "far", (New("a"), Call("a", s.first[:1], s.limit), Call("a", s.first[:1], 0)), "last"
    )
    far_alone = Plan("far", (New("a"), Call("a", s.first[:1], s.limit)), "last")
    return [
        Scenario(
            "pos0",
            "index_pos stays 0 while decoding",
            {**takes_none, "C": zero, "G": zero},
            (Aim(1, "first"),),
            expected,
            {
                "T": "takes no position",
                "C": "no error: `7042 28 260 3575 282 4649 28 260 1797 1918 28 260 1797 1918 28 284 260 3575 282 4649`",
            },
        ),
        Scenario(
            "by_calls",
            "index_pos counts calls instead of tokens",
            {**takes_none, "C": calls, "G": calls},
            (Aim(1, "first"),),
            expected,
        ),
        Scenario(
            "far",
            f"one token at position {s.limit}, the first beyond the model's",
            {"T": far_alone, "C": far, "G": far, "L": takes_none["L"]},
            (Aim(1, "one"), Aim(2, "one")),
            {"T": RIGHT, "C": REFUSED, "G": REFUSED, "L": NO},
            {
                "T": "computes: (1, 1, 49152), finite",
                "C": "`narrow invalid args start + len > dim_len: [8192, 32], ...`",
            },
        ),
    ]


def _second_prompt(s: Setting) -> list[Scenario]:
    first, wrong = Greedy("a", s.first, 0, s.steps), dict.fromkeys(OTHER_CACHES, WRONG)
    used = {
        "reuse": Plan("reuse", (New("a"), first, Greedy("a", s.second, 0, s.steps)), "last"),
        "reuse1": Plan("reuse1", (New("a"), first, Greedy("a", s.first[:1], 0, s.steps)), "last"),
    }
    inferred = {
        "reuse": Plan("reuse", (New("a"), first, Greedy("a", s.second, None, s.steps)), "last"),
        "reuse1": Plan(
            "reuse1", (New("a"), first, Greedy("a", s.first[:1], None, s.steps)), "last"
        ),
    }
    dropped = Plan(
        "quantized", (New("a"), first, New("a"), Greedy("a", s.second, 0, s.steps)), "last"
    )
    no_rule = "no such rule: a caller makes a new cache"
    return [
        Scenario(
            "reuse",
            "a second prompt on the used cache, from index_pos 0",
            {
                "T": inferred["reuse"],
                "C": used["reuse"],
                "G": used["reuse"],
                "L": inferred["reuse"],
            },
            (Aim(2, "second"),),
            {"T": WRONG, "C": REFUSED, "G": REFUSED, "L": WRONG},
            {
                "T": "length 48; the first 14 tokens as fresh, the 15th not: ` German state` for ` Federal Republic`",
                "C": "`cannot broadcast [5, 5] to [1, 9, 5, 29]`",
            },
            wrong,
        ),
        Scenario(
            "reuse1",
            "a prompt of one token on the used cache, from index_pos 0",
            {
                "T": inferred["reuse1"],
                "C": used["reuse1"],
                "G": used["reuse1"],
                "L": inferred["reuse1"],
            },
            (Aim(2, "one"),),
            {"T": WRONG, "C": WRONG, "G": REFUSED, "L": WRONG},
            {
                "C": "no error: `3575 282 4649 30 657 314 260 3995 2240 281 1910 411 2155 284 260 1796 768 35488 6151 282`; "
                "fresh: `198 198 504 1646 288 253 3424 2329 1740 314 288 1464 253 2437 284 4798 1380 1786 338 27784`",
            },
        ),
        Scenario(
            "quantized",
            "as reuse, where index_pos 0 drops the old cache (candle's quantized_llama)",
            {"T": no_rule, "C": dropped, "G": "refuses instead, as in reuse", "L": no_rule},
            (Aim(3, "second"),),
            {"T": NO, "C": RIGHT, "G": NO, "L": NO},
        ),
    ]


def _one_prefix(s: Setting) -> list[Scenario]:
    n = s.common
    a, b = (
        Greedy(name, prompt[n:], n, s.steps) for name, prompt in (("a", s.first), ("b", s.second))
    )
    begun = (New("a"), Greedy("a", s.first, 0, s.steps), Crop("a", n))
    placed, inferred = (
        Plan("crop", (*begun, Greedy("a", s.second[n:], at, s.steps)), "last") for at in (n, None)
    )
    return [
        Scenario(
            "branch",
            "one prefix, cloned, two ends",
            _everywhere("branch", New("a"), Call("a", s.first[:n], 0), Clone("a", "b"), a, b),
            (Aim(3, "first", n), Aim(4, "second", n)),
            dict.fromkeys(SYSTEMS, RIGHT),
            {
                "C": "both equal fresh runs; Germany: "
                "`11452 30 11452 314 260 3995 2240 281 4521 284 260 3575 282 260 7030 5261 282 4521 30 11452`",
            },
            dict.fromkeys(OTHER_CACHES, RIGHT),
        ),
        Scenario(
            "crop",
            "a used cache cut back to the common prefix, the second prompt's end after it",
            {"T": inferred, "C": "no way to cut a cache", "G": placed, "L": inferred},
            (Aim(3, "second", n),),
            {"T": RIGHT, "C": NO, "G": RIGHT, "L": RIGHT},
            {},
            {"ConcatenateKVCache": WRONG, "RotatingKVCache": RIGHT},
        ),
    ]


def _dtype(s: Setting) -> Scenario:
    plan = Plan("dtype", (New("a"), Call("a", s.first, 0)), "last")
    tables = "needs none: its tables live in the model"
    return Scenario(
        "dtype",
        "a cache of another dtype than the weights'",
        {"T": tables, "C": plan, "G": plan, "L": tables},
        (Aim(1, "first"),),
        {"T": NO, "C": REFUSED, "G": REFUSED, "L": NO},
        {"T": "not needed", "C": "must be equal, by convention"},
        cache_dtype="float16",
    )


def _without_cache(s: Setting) -> list[Scenario]:
    growing = growing_prefixes(tuple(s.sequence), len(s.first))
    one = [Call("a", (token,), i) for i, token in enumerate(s.first)]
    left_out = [Call("a", (token,)) for token in s.first]
    by_one = Plan("nocache1", (New("a", use_kv_cache=False), *one), "last")
    unplaced = Plan("nocache1", (New("a", use_kv_cache=False), *left_out), "last")
    return [
        Scenario(
            "nocache",
            "use_kv_cache = false: the growing prefix at every step",
            _everywhere("nocache", *growing),
            tuple(Aim(i, "first") for i, step in enumerate(growing) if isinstance(step, Call)),
            dict.fromkeys(SYSTEMS, RIGHT),
            {"T": "use_cache=False", "C": "kvs stay empty"},
        ),
        Scenario(
            "nocache1",
            "use_kv_cache = false, fed one token at a time: the context is lost",
            {"T": unplaced, "C": by_one, "G": by_one, "L": unplaced},
            tuple(Aim(i + 1, "first", i) for i in range(len(s.first))),
            {"T": WRONG, "C": WRONG, "G": REFUSED, "L": WRONG},
        ),
    ]


def _everywhere(name: str, *steps: Step) -> dict[str, Plan | str]:
    return dict.fromkeys(SYSTEMS, Plan(name, steps, "last"))


def _along(talk: str, plan: Plan) -> tuple[Aim, ...]:
    return tuple(Aim(call.index, talk, call.step.index_pos or 0) for call in plan.calls())


def _no_position(name: str) -> str:
    return f"{name} takes no position: its cache gives it"

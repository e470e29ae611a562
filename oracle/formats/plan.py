"""A plan: which tokens go through which named cache, in which calls.

A plan holds token ids only, so an engine that runs one needs no tokenizer. Every experiment of the project (cached
decoding, whole and chunked prefill, growing prefixes, each misuse of a cache) is a list of these steps, and one runner
per engine follows them all. This module knows no engine and no numbers.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from oracle.formats import disk, strict_json
from oracle.formats.errors import Refusal, brief

FORMAT = "mlxkv-plan/1"
Advance = Literal["right", "zero", "by_calls"]
Rows = Literal["all", "last"]
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

PREFIXES_MOST = 32_768
"""Tokens that the growing prefixes may feed in all: at 150 a second, as two cores do in float32, under four minutes."""


@dataclass(frozen=True, slots=True)
class New:
    """A fresh cache under this name; an older one of the same name is dropped."""

    cache: str
    use_kv_cache: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """One forward call of `tokens`. `index_pos` None leaves the position to the cache."""

    cache: str
    tokens: tuple[int, ...]
    index_pos: int | None = None


@dataclass(frozen=True, slots=True)
class Greedy:
    """`n` greedy tokens after `tokens`; ties take the lowest id; the last token chosen is not fed.

    `advance` says what the caller does to index_pos after a call: `right` adds the tokens fed, `zero` leaves it where it
    was, `by_calls` adds one whatever was fed.
    """

    cache: str
    tokens: tuple[int, ...]
    index_pos: int | None
    n: int
    advance: Advance = "right"


@dataclass(frozen=True, slots=True)
class Clone:
    """`target` becomes an independent copy of `source`."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Crop:
    """The cache keeps its first `length` tokens."""

    cache: str
    length: int


@dataclass(frozen=True, slots=True)
class Reset:
    """The cache is empty again."""

    cache: str


Step = New | Call | Greedy | Clone | Crop | Reset

_KEYS: dict[str, tuple[type, dict[str, str]]] = {
    "new": (New, {"cache": "cache", "use_kv_cache": "use_kv_cache"}),
    "call": (Call, {"cache": "cache", "tokens": "tokens", "index_pos": "index_pos"}),
    "greedy": (Greedy, {k: k for k in ("cache", "tokens", "index_pos", "n", "advance")}),
    "clone": (Clone, {"from": "source", "to": "target"}),
    "crop": (Crop, {"cache": "cache", "length": "length"}),
    "reset": (Reset, {"cache": "cache"}),
}
_OPTIONAL = {"use_kv_cache", "index_pos", "advance"}
_NAME_OF = {kind: do for do, (kind, _) in _KEYS.items()}


@dataclass(frozen=True, slots=True)
class Plan:
    """A named list of steps. `rows` says which logits of a call are kept: those of all its positions, or the last."""

    name: str
    steps: tuple[Step, ...]
    rows: Rows = "all"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def digest(self) -> str:
        """sha256 of the steps. The name and `rows` are left out: they do not change what is computed."""
        return hashlib.sha256(_canonical(self.to_json()["steps"])).hexdigest()

    @property
    def longest(self) -> int:
        """The most tokens that any cache or single call of the plan takes up (crop and reset not considered)."""
        lengths: dict[str, int] = {}
        most = 0
        for step in self.steps:
            if isinstance(step, New):
                lengths[step.cache] = 0
            elif isinstance(step, Clone):
                lengths[step.target] = lengths[step.source]
            elif isinstance(step, Call | Greedy):
                new = len(step.tokens) + (step.n - 1 if isinstance(step, Greedy) else 0)
                lengths[step.cache] += new
                most = max(most, lengths[step.cache] if self.keeps(step.cache) else new)
        return most

    def keeps(self, cache: str) -> bool:
        """Whether the named cache stores keys and values (the last `new` of that name decides)."""
        news = [s for s in self.steps if isinstance(s, New) and s.cache == cache]
        return not news or news[-1].use_kv_cache

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        steps = []
        for step in self.steps:
            do = _NAME_OF[type(step)]
            values = asdict(step)
            steps.append({"do": do} | {key: values[attr] for key, attr in _KEYS[do][1].items()})
        return {
            "format": FORMAT,
            "name": self.name,
            "rows": self.rows,
            "steps": json.loads(json.dumps(steps)),
        }


def from_json(value: Any, *, where: str = "plan") -> Plan:
    """A plan from decoded JSON, or a Refusal that names the step and the key."""
    if not isinstance(value, dict):
        raise Refusal(
            f"{where}: expected a JSON object, got {type(value).__name__}; write it with `mlxkv` or by hand as in README.md"
        )
    if value.get("format") != FORMAT:
        raise Refusal(
            f"{where}: format is {brief(value.get('format'))}, expected {FORMAT!r}; make it again with this version"
        )
    _known(value, {"format", "name", "rows", "steps"}, where)
    if not isinstance(value.get("name"), str) or not isinstance(value.get("steps"), list):
        raise Refusal(f"{where}: expected a string under name and a list under steps")
    rows = value.get("rows", "all")
    if rows not in get_args(Rows):
        raise Refusal(
            f"{where}: rows is {brief(rows)}, expected one of {', '.join(get_args(Rows))}"
        )
    steps = tuple(_step(s, f"{where}: step {i}") for i, s in enumerate(value["steps"]))
    return Plan(value["name"], steps, rows)


def read(path: Path) -> Plan:
    """The plan in a JSON file."""
    try:
        value = strict_json.decode(disk.read_bytes(path))
    except OSError as error:
        raise Refusal(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except ValueError as error:
        raise Refusal(f"{path}: not JSON ({_one_line(error)}); write it again") from error
    return from_json(value, where=str(path))


def judged_plans(
    tokens: list[int], *, prompt: int, chunks: list[int] | None = None
) -> dict[str, Plan]:
    """The plans that a comparison judges, over `tokens` of which the first `prompt` are the prompt.

    full: one call. step: the prompt, then single tokens. prefixes: no cache, the growing prefix from the prompt on; left
    out where that is more than PREFIXES_MOST tokens. chunked: the prompt in `chunks` (default: ceil(0.6 prompt) and the
    rest), then single tokens; left out for a prompt of one token, which cannot be split.
    """
    if not 1 <= prompt <= len(tokens):
        raise Refusal(
            f"plan: the prompt has {prompt} tokens, expected 1 to {len(tokens)} (the length of the sequence)"
        )
    ids = tuple(tokens)
    first = min(-(-3 * prompt // 5), max(1, prompt - 1))
    sizes = chunks if chunks is not None else [first, prompt - first]
    plans = {
        "full": Plan("full", (New("a"), Call("a", ids, 0))),
        "step": Plan("step", (New("a"), *_calls(ids, [prompt] + [1] * (len(ids) - prompt)))),
    }
    if prefixes_feed(len(ids), prompt) <= PREFIXES_MOST:
        plans["prefixes"] = Plan("prefixes", growing_prefixes(ids, prompt), "last")
    if chunks is not None and (sum(sizes) != prompt or min(sizes) < 1):
        raise Refusal(
            f"plan: chunks {','.join(map(str, sizes))} do not add up to the prompt's {prompt} tokens; give positive sizes that do"
        )
    if prompt > 1:
        plans["chunked"] = Plan(
            "chunked", (New("a"), *_calls(ids, sizes + [1] * (len(ids) - prompt)))
        )
    return plans


def prefixes_feed(length: int, prompt: int) -> int:
    """How many tokens the growing prefixes of a sequence feed in all, from the prompt to the whole."""
    return (length + prompt) * (length - prompt + 1) // 2


def _calls(ids: tuple[int, ...], sizes: list[int]) -> tuple[Call, ...]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(Call("a", ids[s : s + n], s) for s, n in zip(starts, sizes, strict=True))


def growing_prefixes(ids: tuple[int, ...], prompt: int) -> tuple[Step, ...]:
    """The prompt, then one token more at each call, every time from nothing."""
    steps: list[Step] = []
    for end in range(prompt, len(ids) + 1):
        steps += [New("a", use_kv_cache=False), Call("a", ids[:end], 0)]
    return tuple(steps)


def _step(value: Any, where: str) -> Step:
    do = value.get("do") if isinstance(value, dict) else value
    if not isinstance(value, dict) or not isinstance(do, str) or do not in _KEYS:
        raise Refusal(f"{where}: do is {brief(do)}, expected one of {', '.join(_KEYS)}")
    kind, keys = _KEYS[value["do"]]
    _known(value, {"do", *keys}, where)
    missing = [k for k in keys if k not in value and k not in _OPTIONAL]
    if missing:
        raise Refusal(f"{where}: {value['do']} lacks {', '.join(missing)}")
    given: dict[str, Any] = {attr: value[key] for key, attr in keys.items() if key in value}
    if kind is Greedy:
        given.setdefault("index_pos", None)
    if isinstance(given.get("tokens"), list):
        given["tokens"] = tuple(given["tokens"])
    step: Step = kind(**given)
    return step


def _check(plan: Plan) -> None:
    """Values that no engine could follow, refused once and here."""
    if not _NAME.fullmatch(plan.name):
        raise Refusal(
            f"plan {brief(plan.name)}: its name becomes a file's, expected 1 to 100 letters, digits and _ . -; rename it"
        )
    alive: set[str] = set()
    for i, step in enumerate(plan.steps):
        where = f"plan {plan.name!r}: step {i}"
        for name, value in asdict(step).items():
            _check_value(name, value, where)
        reads = (
            step.source
            if isinstance(step, Clone)
            else None
            if isinstance(step, New)
            else step.cache
        )
        if reads is not None and reads not in alive:
            raise Refusal(
                f"{where}: cache {reads!r} does not exist yet; add a `new` step before it"
            )
        alive.add(step.target if isinstance(step, Clone) else step.cache)


def _check_value(name: str, value: Any, where: str) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if name in ("cache", "source", "target"):
        good, expected = (
            isinstance(value, str) and value.isidentifier() and len(value) <= 100,
            "a name of letters, digits and _",
        )
    elif name == "tokens":
        good = (
            isinstance(value, tuple)
            and len(value) > 0
            and all(type(t) is int and 0 <= t < 2**31 for t in value)
        )
        expected = "one or more token ids"
    elif name == "index_pos":
        good, expected = (
            value is None or (whole and 0 <= value < 2**31),
            "a position from 0 or null",
        )
    elif name == "use_kv_cache":
        good, expected = isinstance(value, bool), "true or false"
    elif name == "advance":
        good, expected = value in get_args(Advance), f"one of {', '.join(get_args(Advance))}"
    else:
        low = 1 if name == "n" else 0
        good, expected = whole and low <= value < 2**31, f"a whole number from {low}"
    if not good:
        raise Refusal(f"{where}: {name} is {brief(value)}, expected {expected}")


def _known(value: dict[str, Any], keys: set[str], where: str) -> None:
    unknown = sorted(set(map(str, value)) - keys)
    if unknown:
        raise Refusal(
            f"{where}: unknown key {brief(unknown[0])}, expected {', '.join(sorted(keys))}"
        )


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())

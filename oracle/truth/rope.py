"""config.json's RoPE keys -> theta and a scaling, in both of transformers' generations; no torch.

`rope_theta` and `rope_scaling` are the keys until transformers 4, `rope_parameters` is the one
since 5. A file with both must say the same twice, and transformers must not read it otherwise than
it is meant: it lets rope_scaling replace rope_parameters. The defaults are transformers' own
(`modeling_rope_utils.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oracle.formats.errors import Refusal, brief
from oracle.truth.keys import Keys, described

MOST_POSITIONS = 2**24
_ORIGINAL = "original_max_position_embeddings"
_YARN = "attention_factor mscale mscale_all_dim beta_fast beta_slow truncate"
# The keys that each type reads.
_READ = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", _ORIGINAL, *_YARN.split()},
    "longrope": {"short_factor", "long_factor", "factor", "attention_factor", _ORIGINAL},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL},
}
_UNREAD = {"rope_type", "type", "rope_theta", "finetuned"}  # transformers does not read the last
# Where transformers takes null for a value, and where for an absent key.
_NULL_COUNTS = {"truncate", _ORIGINAL}
_NULL_IS_ABSENT = set().union(*_READ.values(), _UNREAD, {"partial_rotary_factor"}) - _NULL_COUNTS
_KEEP_ONE = "keep one of them"


@dataclass(frozen=True, slots=True)
class Linear:
    """Every position divided by the factor (position interpolation, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Plain RoPE up to max_position_embeddings; every length beyond has its own, unjudged."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's stretching by frequency (`apply_scaling` in Meta's llama-models)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """Slow pairs stretched, fast ones kept, a ramp between them (YaRN, arXiv:2309.00071).

    Cosines and sines are multiplied by `attention`.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention: float


@dataclass(frozen=True, slots=True)
class LongRope:
    """A factor for each pair: `short` up to the original length, else `long` (arXiv:2402.13753).

    Cosines and sines are multiplied by `attention`.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position_embeddings: int
    attention: float


Scaling = Linear | Dynamic | Llama3 | Yarn | LongRope


def read_rope(given: Keys, *, max_positions: int, head_dim: int) -> tuple[float, Scaling | None]:
    """theta and scaling of a config.json without its nulls, or a Refusal that names the key."""
    thetas = {"rope_theta": _theta(given)} if "rope_theta" in given.values else {}
    scalings: dict[str, Scaling | None] = {}
    for key in ("rope_scaling", "rope_parameters"):
        values = given.values.get(key, {})
        if not isinstance(values, dict):
            raise given.wrong(key, "an object or null")
        if not values:
            continue  # null and {} are plain RoPE to transformers too
        where = f"{given.where}: {key}"
        if values.get("rope_theta") is not None:
            thetas[f"{key}.rope_theta"] = _theta(Keys(values, where))
        values = _with_outer_length(given, values, where)
        scalings[key] = _Reader(values, where, max_positions, head_dim // 2).scaling()
    _refuse_contradictions(given, thetas, scalings)
    return next(iter(thetas.values()), 10000.0), next(iter(scalings.values()), None)


def _refuse_contradictions(
    given: Keys, thetas: Mapping[str, float], scalings: Mapping[str, Scaling | None]
) -> None:
    for found in (thetas, scalings):
        if len(set(found.values())) > 1:
            (one, value), (other, its) = list(found.items())[:2]
            raise given.refusal(f"{one} says {value} but {other} says {its}", _KEEP_ONE)
    if "rope_scaling" in scalings and list(thetas) == ["rope_parameters.rope_theta"]:
        alone = "rope_theta is in rope_parameters alone"
        what = f"{alone}, which transformers does not read beside rope_scaling"
        raise given.refusal(what, "keep one")
    if not scalings and _ORIGINAL in given.values:
        original = described(given.values[_ORIGINAL])
        what = f"unknown key {_ORIGINAL!r} ({original}) for rope_type 'default'"
        raise given.refusal(what, "remove it")


def _theta(keys: Keys) -> float:
    """rope_theta. Its logarithm divides, so it must be above 1."""
    theta = keys.number("rope_theta")
    if not theta > 1:
        raise keys.wrong("rope_theta", "a number above 1", found=theta)
    return theta


def _with_outer_length(given: Keys, values: dict[str, Any], where: str) -> dict[str, Any]:
    """The object with the outer level's original length, where transformers looks first."""
    outer, inner = given.values.get(_ORIGINAL), values.get(_ORIGINAL)
    if outer is None:
        return values
    if inner is not None and inner != outer:
        what = f"{_ORIGINAL} is {described(inner)}, but {described(outer)} outside of it"
        raise Refusal(what, where=where, remedy=_KEEP_ONE)
    return {**values, _ORIGINAL: outer}


class _Reader(Keys):
    """Reads one object of RoPE's keys, of a model with so many positions and pairs a head."""

    def __init__(
        self, values: Mapping[str, Any], where: str, max_positions: int, pairs: int
    ) -> None:
        kept = {k: v for k, v in values.items() if v is not None or k not in _NULL_IS_ABSENT}
        self._types = [kept[key] for key in ("rope_type", "type") if key in kept]
        super().__init__({k: v for k, v in kept.items() if k not in _UNREAD}, where)
        self._max_positions, self._pairs = max_positions, pairs
        rotated = self.values.pop("partial_rotary_factor", 1.0)
        if type(rotated) not in (int, float) or rotated != 1:
            raise self.wrong("partial_rotary_factor", "1.0, a whole rotation", found=rotated)

    def scaling(self) -> Scaling | None:
        """None for plain RoPE."""
        match self._type():
            case "linear":
                return Linear(self._factor())
            case "dynamic":
                return Dynamic(self._factor())
            case "llama3":
                return self._llama3()
            case "yarn":
                return self._yarn()
            case "longrope":
                return self._longrope()
        return None

    def _type(self) -> str:
        """The type of RoPE, once every key is one that it reads."""
        if len(self._types) == 2 and self._types[0] != self._types[1]:
            one, other = map(described, self._types)
            raise self.refusal(f"rope_type is {one} but type is {other}", _KEEP_ONE)
        found = self._types[0] if self._types else None if self.values else "default"
        if not isinstance(found, str) or found not in _READ:
            what = f"rope_type is {brief(found)}, expected one of {', '.join(map(repr, _READ))}"
            raise self.refusal(what, "other kinds of RoPE cannot be run")
        for key, value in sorted(self.values.items()):
            unset = (key in _NULL_COUNTS and value is None) or (
                key == "truncate" and value is False
            )
            if key not in _READ[found] and not unset:
                what = f"unknown key {key!r} ({described(value)}) for rope_type {found!r}"
                raise self.refusal(what, "remove it")
        return found

    def _llama3(self) -> Llama3:
        low, high = self.number("low_freq_factor"), self.number("high_freq_factor")
        if not low < high:
            raise self.wrong("low_freq_factor", f"less than high_freq_factor {high}", found=low)
        return Llama3(self._factor(), low, high, self.whole(_ORIGINAL, most=MOST_POSITIONS))

    def _yarn(self) -> Yarn:
        factor = self._factor()
        fast, slow = self.number("beta_fast", 32.0), self.number("beta_slow", 1.0)
        if fast < slow:
            raise self.wrong("beta_fast", f"at least beta_slow {slow}", found=fast)
        truncate = self.flag("truncate", default=True)
        # transformers takes 0 for absent here, and one of the two without the other for nothing.
        most, least = (
            0.0 if self._is_zero(key) else self.number(key) for key in ("mscale", "mscale_all_dim")
        )
        attention = 1 + 0.1 * math.log(factor)
        if most and least:
            attention = (1 + 0.1 * most * math.log(factor)) / (1 + 0.1 * least * math.log(factor))
        attention = self.number("attention_factor", attention)
        return Yarn(factor, self._original(), fast, slow, truncate, attention)

    def _longrope(self) -> LongRope:
        original = self._original()
        if original < 2:
            expected = "a whole number from 2, as its logarithm divides"
            raise self.wrong(_ORIGINAL, expected, found=original)
        factor = self._factor() if "factor" in self.values else self._max_positions / original
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        short, long = self._list("short_factor"), self._list("long_factor")
        return LongRope(short, long, original, self.number("attention_factor", attention))

    def _list(self, key: str) -> tuple[float, ...]:
        found = self.values.get(key)
        if type(found) is not list or len(found) != self._pairs:
            raise self.wrong(key, f"a list of {self._pairs} numbers, one for each pair of head_dim")
        factors = tuple(Keys({key: value}, self.where).number(key) for value in found)
        if min(factors) <= 1e-6:  # its inverse would leave float32, transformers' own
            raise self.wrong(key, "numbers above 1e-06", found=min(factors))
        return factors

    def _is_zero(self, key: str) -> bool:
        value = self.values.get(key, 0)
        return type(value) in (int, float) and value == 0

    def _factor(self) -> float:
        factor = self.number("factor")
        if factor < 1:
            raise self.wrong("factor", "a number from 1", found=factor)
        return factor

    def _original(self) -> int:
        return self.whole(_ORIGINAL, most=MOST_POSITIONS, default=self._max_positions)

"""config.json's RoPE keys -> theta and a scaling, in both of transformers' generations; no torch.

`rope_theta` and `rope_scaling` are the keys until transformers 4, `rope_parameters` is the one since 5. A file with both must
say the same twice, and transformers must not read it otherwise than it is meant: it lets rope_scaling replace rope_parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oracle.formats.errors import Refusal

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
MOST_POSITIONS = 2**24
_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}
_YARN = {
    "factor",
    _ORIGINAL,
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "truncate",
}
_LONGROPE = {"short_factor", "long_factor", "factor", "attention_factor", _ORIGINAL}
_READ = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": _YARN,
    "longrope": _LONGROPE,
    "llama3": _LLAMA3,
}
_UNREAD = {"rope_type", "type", "rope_theta", "finetuned"}  # transformers does not read the last
# Where transformers takes null for a value.
_NULL_SAYS = {"truncate", _ORIGINAL}


@dataclass(frozen=True, slots=True)
class Linear:
    """Every position divided by the factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Plain RoPE up to max_position_embeddings; beyond it every length has frequencies of its own, and none is judged."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """The frequency-dependent stretching of RoPE that Llama 3.1 brought."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """Slow pairs stretched, fast ones kept, a ramp between them; cosines and sines times `attention`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention: float


@dataclass(frozen=True, slots=True)
class LongRope:
    """A factor for each pair, one list up to the original length and another beyond it; cosines and sines times `attention`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position_embeddings: int
    attention: float


Scaling = Linear | Dynamic | Llama3 | Yarn | LongRope


def read_rope(
    given: Mapping[str, Any], where: str, *, max_positions: int, head_dim: int
) -> tuple[float, Scaling | None]:
    """theta and scaling of a config.json, or a Refusal that names the key."""
    thetas = {"rope_theta": theta_of(given, where)} if "rope_theta" in given else {}
    scalings: dict[str, Scaling | None] = {}
    for key in ("rope_scaling", "rope_parameters"):
        values = given.get(key, {})
        if not isinstance(values, dict):
            raise Refusal(
                f"{where}: {key} is {show(values)}, expected an object or null; correct config.json"
            )
        if not values:
            continue  # null and {} are plain RoPE to transformers too
        if values.get("rope_theta") is not None:
            thetas[f"{key}.rope_theta"] = theta_of(values, f"{where}: {key}")
        scalings[key] = _Reader(
            _outer(given, values, f"{where}: {key}"), f"{where}: {key}", max_positions, head_dim
        ).scaling()
    for found in (thetas, scalings):
        if len(set(found.values())) > 1:
            first, second = list(found.items())[:2]
            raise Refusal(
                f"{where}: {first[0]} says {first[1]} but {second[0]} says {second[1]}; keep one of them"
            )
    if "rope_scaling" in scalings and list(thetas) == ["rope_parameters.rope_theta"]:
        raise Refusal(
            f"{where}: rope_theta is in rope_parameters alone, which transformers does not read beside rope_scaling; keep one"
        )
    if not scalings and given.get(_ORIGINAL) is not None:
        raise Refusal(
            f"{where}: unknown key {_ORIGINAL!r} ({show(given[_ORIGINAL])}) for rope_type 'default'; remove it"
        )
    return next(iter(thetas.values()), 10000.0), next(iter(scalings.values()), None)


def theta_of(values: Mapping[str, Any], where: str) -> float:
    """rope_theta; its logarithm divides, so it must be above 1."""
    theta = number(values, "rope_theta", where)
    if not theta > 1:
        raise Refusal(
            f"{where}: rope_theta is {theta}, expected a number above 1; correct config.json"
        )
    return theta


def _outer(given: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The object with the original length of the outer level in it, where transformers looks first."""
    outer, inner = given.get(_ORIGINAL), values.get(_ORIGINAL)
    if outer is None:
        return dict(values)
    if inner is not None and inner != outer:
        raise Refusal(
            f"{where}: {_ORIGINAL} is {show(inner)}, but {show(outer)} outside of it; keep one of them"
        )
    return {**values, _ORIGINAL: outer}


class _Reader:
    """Reads one object of RoPE's keys."""

    def __init__(
        self, values: dict[str, Any], where: str, max_positions: int, head_dim: int
    ) -> None:
        kept = {k: v for k, v in values.items() if v is not None or k in _NULL_SAYS}
        self._kinds = {key: kept[key] for key in ("rope_type", "type") if key in kept}
        self._values = {k: v for k, v in kept.items() if k not in _UNREAD}
        self._where, self._max_positions, self._pairs = where, max_positions, head_dim // 2
        rotated = self._values.pop("partial_rotary_factor", 1.0)
        if type(rotated) not in (int, float) or rotated != 1:
            raise self._refusal("partial_rotary_factor", rotated, "1.0, a whole rotation")

    def scaling(self) -> Scaling | None:
        """None for plain RoPE."""
        kinds = list(self._kinds.values())
        if len(kinds) == 2 and kinds[0] != kinds[1]:
            raise Refusal(
                f"{self._where}: rope_type is {show(kinds[0])} but type is {show(kinds[1])}; keep one of them"
            )
        kind = kinds[0] if kinds else None if self._values else "default"
        if kind not in KINDS:
            known = ", ".join(map(repr, KINDS))
            raise Refusal(
                f"{self._where}: rope_type is {show(kind, none='None')}, expected one of {known}; other kinds of RoPE cannot be run"
            )
        off = (None, False)
        unknown = sorted(
            key
            for key, value in self._values.items()
            if key not in _READ[kind] and not any(value is v for v in off)
        )
        if unknown:
            found = show(self._values[unknown[0]])
            raise Refusal(
                f"{self._where}: unknown key {unknown[0]!r} ({found}) for rope_type {kind!r}; remove it"
            )
        if kind == "default":
            return None
        read: dict[str, Callable[[], Scaling]]
        read = {
            "linear": self._linear,
            "dynamic": self._dynamic,
            "yarn": self._yarn,
            "longrope": self._longrope,
            "llama3": self._llama3,
        }
        return read[kind]()

    def _linear(self) -> Linear:
        return Linear(self._factor())

    def _dynamic(self) -> Dynamic:
        return Dynamic(self._factor())

    def _llama3(self) -> Llama3:
        low, high = (
            number(self._values, key, self._where)
            for key in ("low_freq_factor", "high_freq_factor")
        )
        if not low < high:
            raise Refusal(
                f"{self._where}: low_freq_factor is {low}, expected less than high_freq_factor {high}; correct config.json"
            )
        return Llama3(
            self._factor(),
            low,
            high,
            whole(self._values, _ORIGINAL, self._where, most=MOST_POSITIONS),
        )

    def _yarn(self) -> Yarn:
        factor = self._factor()
        fast, slow = self._or("beta_fast", 32.0), self._or("beta_slow", 1.0)
        if fast < slow:
            raise self._refusal("beta_fast", fast, f"at least beta_slow {slow}")
        truncate = self._values.get("truncate", True)
        if type(truncate) is not bool:
            raise self._refusal("truncate", truncate, "true or false")
        # transformers takes 0 for absent here, and one of the two without the other for nothing.
        most, least = (
            0.0 if self._is_zero(key) else number(self._values, key, self._where)
            for key in ("mscale", "mscale_all_dim")
        )
        attention = 1 + 0.1 * math.log(factor)
        if most and least:
            attention = (1 + 0.1 * most * math.log(factor)) / (1 + 0.1 * least * math.log(factor))
        return Yarn(
            factor, self._original(), fast, slow, truncate, self._or("attention_factor", attention)
        )

    def _longrope(self) -> LongRope:
        original = self._original()
        if original < 2:
            raise self._refusal(
                _ORIGINAL, original, "a whole number from 2, as its logarithm divides"
            )
        factor = self._factor() if "factor" in self._values else self._max_positions / original
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        short, long = (self._list(key) for key in ("short_factor", "long_factor"))
        return LongRope(short, long, original, self._or("attention_factor", attention))

    def _list(self, key: str) -> tuple[float, ...]:
        found = self._values.get(key)
        if type(found) is not list or len(found) != self._pairs:
            raise self._refusal(
                key, found, f"a list of {self._pairs} numbers, one for each pair of head_dim"
            )
        factors = tuple(number({key: value}, key, self._where) for value in found)
        if min(factors) <= 1e-6:  # its inverse would leave float32, transformers' own
            raise self._refusal(key, min(factors), "numbers above 1e-06")
        return factors

    def _is_zero(self, key: str) -> bool:
        value = self._values.get(key, 0)
        return type(value) in (int, float) and value == 0

    def _factor(self) -> float:
        factor = number(self._values, "factor", self._where)
        if factor < 1:
            raise self._refusal("factor", factor, "a number from 1")
        return factor

    def _or(self, key: str, default: float) -> float:
        return number(self._values, key, self._where) if key in self._values else default

    def _original(self) -> int:
        if _ORIGINAL not in self._values:
            return self._max_positions
        return whole(self._values, _ORIGINAL, self._where, most=MOST_POSITIONS)

    def _refusal(self, key: str, found: Any, expected: str) -> Refusal:
        return Refusal(
            f"{self._where}: {key} is {show(found)}, expected {expected}; correct config.json"
        )


def whole(values: Mapping[str, Any], key: str, where: str, *, most: int) -> int:
    """A whole number from 1 to `most`."""
    value = values.get(key)
    if type(value) is not int or value < 1:
        raise Refusal(
            f"{where}: {key} is {show(value)}, expected a whole number from 1; correct config.json"
        )
    if value > most:
        raise Refusal(
            f"{where}: {key} is {show(value)}, expected at most {most}, as in every Llama by far; correct config.json"
        )
    return value


def number(values: Mapping[str, Any], key: str, where: str) -> float:
    """A number above 0, and within float32."""
    value: Any = values.get(key)
    if type(value) not in (int, float) or not 0 < value <= 1e30:
        raise Refusal(
            f"{where}: {key} is {show(value)}, expected a number above 0; correct config.json"
        )
    return float(value)


def show(value: Any, *, none: str = "missing") -> str:
    """A value for a message, cut to fit."""
    text = none if value is None else repr(value)
    return text if len(text) < 60 else text[:57] + "..."

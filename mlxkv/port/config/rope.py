"""config.json's RoPE keys -> Rope.

They are `rope_theta` and `rope_scaling` as transformers wrote them until 4, and `rope_parameters`
since 5. What both generations say must agree. The defaults are those of transformers'
modeling_rope_utils. What the parameters mean is in `mlxkv.port.rope`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlxkv.port.config.keys import NEUTRAL
from mlxkv.port.config.values import Values

ORIGINAL = "original_max_position_embeddings"
KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": (
        *("factor", "beta_fast", "beta_slow", "truncate"),
        *(ORIGINAL, "attention_factor", "mscale", "mscale_all_dim"),
    ),
    "longrope": (ORIGINAL, "factor", "attention_factor", "short_factor", "long_factor"),
}
"""Each type of RoPE that the port computes, and the keys that it reads."""

_TYPE = ("rope_type", "type")
_KNOWN = {key for keys in KEYS.values() for key in keys}
_NULL_COUNTS = {"truncate", ORIGINAL}
_IGNORED = {"finetuned": "a mark of who trained the model; transformers does not read it"}
_PARTIAL = "partial_rotary_factor"


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE's parameters; those that `rope_type` does not read keep their defaults.

    `attention_factor`, `mscale` and `mscale_all_dim` are None where config.json leaves them to the
    formula. `factor` of longrope is max_position_embeddings over the original length where
    config.json does not say.
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def words(self) -> str:
        """The type, theta and every parameter that is not at its default; lists by their length."""
        words, defaults = [self.rope_type, f"theta {self.theta:g}"], asdict(Rope(0.0))
        for key, value in asdict(self).items():
            if key not in ("theta", "rope_type") and value != defaults[key]:
                listed = isinstance(value, tuple)
                words.append(f"{key} {f'{len(value)} numbers' if listed else json.dumps(value)}")
        return ", ".join(words)

    @property
    def beyond(self) -> str:
        """What a refusal should say of positions beyond max_position_embeddings."""
        if self.rope_type != "dynamic":
            return ""
        return (
            ", and beyond it dynamic RoPE has other frequencies at every length: "
            "cached keys and uncached ones would differ"
        )


def read_rope(values: Values, *, max_positions: int, head_dim: int) -> Rope:
    """The Rope of a config.json, or a ConfigError that names the key."""
    old, new = values.object("rope_scaling"), values.object("rope_parameters")
    _place(values, {"rope_scaling": old, "rope_parameters": new})
    theta = _theta(values, old, new)
    named = [part.get(name) for part in (new, old) for name in _TYPE]
    rope_type, scaling = values.agreed("rope_type", *named), _merged(values, old, new)
    rope_type = "default" if rope_type is None else rope_type
    if not isinstance(rope_type, str) or rope_type not in KEYS:
        spelled = next(n for part in (new, old) for n in _TYPE if part.get(n) is not None)
        raise values.error(spelled, f"one of {', '.join(KEYS)}", rope_type)
    outer = values.value.get(ORIGINAL)
    if outer is not None:
        scaling[ORIGINAL] = values.agreed(ORIGINAL, outer, scaling.get(ORIGINAL))
    for key, value in scaling.items():
        unset = (value is None and key in _KNOWN) or (value is False and key == "truncate")
        if key not in KEYS[rope_type] and not unset:
            raise values.error(key, f"no such key for rope_type {rope_type}", value)
    _ignore(values, {"rope_scaling": old, "rope_parameters": new}, rope_type)
    read = _scaled(values, scaling, rope_type, max_positions, head_dim // 2)
    return _require_sense(values, Rope(theta, rope_type, **read))


def _place(values: Values, objects: Mapping[str, Mapping[str, Any]]) -> None:
    """Tells `values` where RoPE's keys stand; one that is missing belongs to an object that is."""
    there = {name: part for name, part in objects.items() if part}
    places = {key: f"{name}.{key}" for name in there for key in _KNOWN}
    for name, part in there.items():
        for key, value in part.items():
            if value is not None or key not in places:
                places[key] = f"{name}.{key}"
            if value is None:
                values.nulls |= {f"{name}.{key}"} | ({key} & _KNOWN - {ORIGINAL})
    outer = {key for key in ("rope_theta", ORIGINAL) if values.value.get(key) is not None}
    values.places = {key: place for key, place in places.items() if key not in outer}


def _ignore(values: Values, objects: Mapping[str, Mapping[str, Any]], rope_type: str) -> None:
    """Lists the keys inside the objects that nothing is computed from, each with the reason."""
    unread = f"says nothing at this value; rope_type {rope_type} does not read it"
    for name, part in objects.items():
        for key in part:
            if key in _KNOWN and key not in KEYS[rope_type]:
                values.ignored[f"{name}.{key}"] = unread
            elif key in _IGNORED or key == _PARTIAL:
                values.ignored[f"{name}.{key}"] = _IGNORED.get(key, NEUTRAL)


def _theta(values: Values, old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    outer = values.value.get("rope_theta")
    theta = values.agreed("rope_theta", outer, new.get("rope_theta"), old.get("rope_theta"))
    if old and theta is not None and outer is None and old.get("rope_theta") is None:
        # transformers lets rope_scaling replace rope_parameters and would take 10000.
        found = f"{theta!r} in rope_parameters alone"
        raise values.refusal("rope_theta", "it beside rope_scaling", found)
    theta = values.filled("rope_theta", 10000.0) if theta is None else theta
    for name, part in (("rope_scaling", old), ("rope_parameters", new)):
        if "rope_theta" in part and part["rope_theta"] is None:
            values.filled(f"{name}.rope_theta", theta)
    return values.number("rope_theta", theta, above=1.0)


def _merged(values: Values, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """What the two objects say beside type and theta.

    Refused where they disagree, or where one says less than the other.
    """
    read = []
    for where, part in (("rope_scaling", old), ("rope_parameters", new)):
        ours = {k: v for k, v in part.items() if k not in (*_TYPE, "rope_theta", *_IGNORED)}
        partial = ours.pop(_PARTIAL, None)
        if partial is not None and (isinstance(partial, bool) or partial != 1):
            raise values.error(
                f"{where}.{_PARTIAL}", "1.0 (another value changes the model)", partial
            )
        # null leaves most keys to transformers, but two of them it takes for values.
        ours = {k: v for k, v in ours.items() if v is not None or k not in _KNOWN - _NULL_COUNTS}
        if ours and all(part.get(name) is None for name in _TYPE):
            expected = f"a rope_type beside {', '.join(sorted(ours))}"
            raise values.error(where, expected, dict(part))
        read += [ours] if part else []
    for key in sorted(set().union(*read)):
        found = [part.get(key) for part in read]
        if None in found and len(found) > 1 and found != [None, None]:
            got = f"{found[0]!r} and {found[1]!r}"
            raise values.refusal(key, "it in both rope_scaling and rope_parameters", got)
        values.agreed(key, *found)
    return {key: value for part in read for key, value in part.items()}


def _scaled(
    values: Values, scaling: Mapping[str, Any], rope_type: str, max_positions: int, pairs: int
) -> dict[str, Any]:
    """The keys that one type of RoPE reads, each checked."""

    def read(key: str) -> Any:
        value, number = scaling.get(key), values.number
        match key:
            case "truncate":
                given = value if key in scaling else values.filled(key, True)
                return values.boolean(key, given)
            case "short_factor" | "long_factor":
                if not isinstance(value, list) or len(value) != pairs:
                    got = f"{len(value)} of them" if isinstance(value, list) else repr(value)
                    expected = f"a list of {pairs} numbers, head_dim / 2"
                    raise values.refusal(values.place(key), expected, got)
                return tuple(number(key, one, above=1e-6) for one in value)
            case "original_max_position_embeddings":
                if key not in scaling and rope_type != "llama3":
                    value = values.filled(key, max_positions)
                return values.whole(key, value, most=2**24)
            case "factor":
                if value is None and rope_type == "longrope":
                    original = scaling.get(ORIGINAL, max_positions)
                    return float(values.filled(key, max_positions / original))
                return number(key, value, least=1.0)
            case "beta_fast" | "beta_slow" if value is None:
                value = values.filled(key, {"beta_fast": 32.0, "beta_slow": 1.0}[key])
            case "mscale" | "mscale_all_dim":
                return None if value is None else number(key, value, least=0.0)
            case "attention_factor" if value is None:
                return None
        return number(key, value, above=0.0)

    return {key: read(key) for key in KEYS[rope_type]}


def _require_sense(values: Values, rope: Rope) -> Rope:
    type_, first = rope.rope_type, rope.original_max_position_embeddings
    if type_ == "llama3" and not rope.low_freq_factor < rope.high_freq_factor:
        expected = f"a number below high_freq_factor {rope.high_freq_factor}"
        raise values.error("low_freq_factor", expected, rope.low_freq_factor)
    if type_ == "yarn" and not rope.beta_fast >= rope.beta_slow:
        expected = f"a number from beta_slow {rope.beta_slow}"
        raise values.error("beta_fast", expected, rope.beta_fast)
    if type_ == "longrope" and first < 2:
        raise values.error(ORIGINAL, "a whole number from 2 (its logarithm divides)", first)
    return rope

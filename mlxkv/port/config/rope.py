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

from mlxkv.port.config.values import Values

ORIGINAL = "original_max_position_embeddings"
KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": (
        *("factor", ORIGINAL, "attention_factor", "mscale", "mscale_all_dim"),
        *("beta_fast", "beta_slow", "truncate"),
    ),
    "longrope": ("short_factor", "long_factor", "factor", ORIGINAL, "attention_factor"),
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
    theta = _theta(values, old, new)
    named = [part.get(name) for part in (new, old) for name in _TYPE]
    rope_type, scaling = values.agreed("rope_type", *named), _merged(values, old, new)
    rope_type = "default" if rope_type is None else rope_type
    if not isinstance(rope_type, str) or rope_type not in KEYS:
        raise values.error("rope_type", f"one of {', '.join(KEYS)}", rope_type)
    outer = values.value.get(ORIGINAL)
    if outer is not None:
        scaling[ORIGINAL] = values.agreed(ORIGINAL, outer, scaling.get(ORIGINAL))
    for key, value in scaling.items():
        unset = (value is None and key in _KNOWN) or (value is False and key == "truncate")
        if key not in KEYS[rope_type] and not unset:
            raise values.error(key, f"no such key for rope_type {rope_type}", value)
    return _Scaled(values, scaling, theta, max_positions, head_dim).read(rope_type)


def _theta(values: Values, old: Mapping[str, Any], new: Mapping[str, Any]) -> float:
    outer = values.value.get("rope_theta")
    theta = values.agreed("rope_theta", outer, new.get("rope_theta"), old.get("rope_theta"))
    if old and theta is not None and outer is None and old.get("rope_theta") is None:
        # transformers lets rope_scaling replace rope_parameters and would take 10000.
        found = f"{theta!r} in rope_parameters alone"
        raise values.refusal("rope_theta", "it beside rope_scaling", found)
    theta = values.filled("rope_theta", 10000.0) if theta is None else theta
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
            raise values.error(_PARTIAL, "1.0 (another value changes the model)", partial)
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


class _Scaled:
    """The values that one type of RoPE reads."""

    def __init__(
        self,
        values: Values,
        scaling: Mapping[str, Any],
        theta: float,
        max_positions: int,
        head_dim: int,
    ) -> None:
        self.values, self.scaling, self.theta = values, scaling, theta
        self.max_positions, self.head_dim = max_positions, head_dim

    def read(self, rope_type: str) -> Rope:
        """The Rope of that type."""
        if rope_type == "default":
            return Rope(self.theta)
        if rope_type == "longrope":
            return self._longrope()
        factor = self._number("factor", least=1.0)
        if rope_type == "llama3":
            return self._llama3(factor)
        return self._yarn(factor) if rope_type == "yarn" else Rope(self.theta, rope_type, factor)

    def _llama3(self, factor: float) -> Rope:
        low = self._number("low_freq_factor", above=0.0)
        high = self._number("high_freq_factor", above=0.0)
        if not low < high:
            expected = f"a number below high_freq_factor {high}"
            raise self.values.error("low_freq_factor", expected, low)
        original = self._whole(self.scaling.get(ORIGINAL))
        return Rope(self.theta, "llama3", factor, low, high, original)

    def _yarn(self, factor: float) -> Rope:
        fast, slow = (self._optional(key, above=0.0) for key in ("beta_fast", "beta_slow"))
        fast = self.values.filled("beta_fast", 32.0) if fast is None else fast
        slow = self.values.filled("beta_slow", 1.0) if slow is None else slow
        if not fast >= slow:
            raise self.values.error("beta_fast", f"a number from beta_slow {slow}", fast)
        truncate = self.scaling.get("truncate")
        if "truncate" not in self.scaling:
            truncate = self.values.filled("truncate", True)
        return Rope(
            self.theta,
            "yarn",
            factor,
            original_max_position_embeddings=self._original(),
            attention_factor=self._optional("attention_factor", above=0.0),
            mscale=self._optional("mscale", least=0.0),
            mscale_all_dim=self._optional("mscale_all_dim", least=0.0),
            beta_fast=fast,
            beta_slow=slow,
            truncate=self.values.boolean("truncate", truncate),
        )

    def _longrope(self) -> Rope:
        original, factor = self._original(), self._optional("factor", least=1.0)
        if original < 2:
            expected = "a whole number from 2 (its logarithm divides)"
            raise self.values.error(ORIGINAL, expected, original)
        if factor is None:
            factor = self.values.filled("factor", self.max_positions / original)
        return Rope(
            self.theta,
            "longrope",
            factor,
            original_max_position_embeddings=original,
            attention_factor=self._optional("attention_factor", above=0.0),
            short_factor=self._factors("short_factor"),
            long_factor=self._factors("long_factor"),
        )

    def _factors(self, key: str) -> tuple[float, ...]:
        found, pairs = self.scaling.get(key), self.head_dim // 2
        if not isinstance(found, list) or len(found) != pairs:
            got = f"{len(found)} of them" if isinstance(found, list) else repr(found)
            raise self.values.refusal(key, f"a list of {pairs} numbers, head_dim / 2", got)
        return tuple(self.values.number(key, value, above=1e-6) for value in found)

    def _original(self) -> int:
        if ORIGINAL not in self.scaling:
            return int(self.values.filled(ORIGINAL, self.max_positions))
        return self._whole(self.scaling[ORIGINAL])

    def _whole(self, value: Any) -> int:
        return self.values.whole(ORIGINAL, value, most=2**24)

    def _number(self, key: str, **bounds: float) -> float:
        return self.values.number(key, self.scaling.get(key), **bounds)

    def _optional(self, key: str, **bounds: float) -> float | None:
        return None if self.scaling.get(key) is None else self._number(key, **bounds)

"""How a cache is named on a command line: NAME, or NAME:key=value,key=value.

What a name means is said where the caches are made; transformers' names and their options stand
here, since both sides read them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from oracle.formats.errors import Refusal, brief

_OPTION = re.compile(r"([a-z_]+)=([A-Za-z0-9_.]+)")

Value = int | str
Defaults = Mapping[str, Value | None]
"""A cache's options and what they are where they are not given; None: they must be."""

TRANSFORMERS: dict[str, Defaults] = {
    "DynamicCache": {},
    "StaticCache": {"size": 512},
    "DynamicSlidingCache": {"size": None},
    "StaticSlidingCache": {"size": None},
    "QuantizedCache": {"backend": "fp8", "nbits": 4},
}
"""The last one's backend fp8 has no nbits."""

CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("float16", "bfloat16"),
    "mode": ("guarded", "candle"),
    "backend": ("fp8", "quanto", "hqq"),
}
"""What an option may be that is no number."""


@dataclass(frozen=True, slots=True)
class CacheName:
    """A cache's name and its options; `str` writes them as `parse` reads them."""

    name: str
    options: Mapping[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        written = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{written}" if written else self.name


def parse(text: str) -> CacheName:
    """The parts of a name; a Refusal where an option is none, or is given twice."""
    name, colon, rest = text.partition(":")
    options: dict[str, Value] = {}
    for part in rest.split(",") if colon else []:
        found = _OPTION.fullmatch(part)
        if not found or found[1] in options:
            what = f"{brief(part)}, expected options as key=value, each once"
            raise Refusal(what, where=f"cache {brief(name)}", remedy="write NAME:key=value,...")
        options[found[1]] = found[2]
    return CacheName(name, options)


def complete(text: str, known: Mapping[str, Defaults]) -> CacheName:
    """A name that is `known`, with every option that it has, checked; else a Refusal."""
    given = parse(text)
    if given.name not in known:
        what = f"{brief(given.name)}, expected one of {', '.join(known)}"
        raise Refusal(what, where="cache")
    where, expected = f"cache {given.name}", dict(known[given.name])
    if given.options.get("backend", expected.get("backend")) == "fp8":
        del expected["nbits"]
    unknown = sorted(set(given.options) - set(expected))
    if unknown:
        keys = ", ".join(expected) or "none"
        raise Refusal(f"option {unknown[0]!r}, expected {keys}", where=where)
    options = {
        key: _value(key, given.options.get(key, default), default, where)
        for key, default in expected.items()
    }
    return CacheName(given.name, options)


def _value(key: str, value: Value | None, default: Value | None, where: str) -> Value:
    if value is None:
        raise Refusal(f"no {key}, expected {key}=NUMBER", where=where, remedy="give it")
    if not isinstance(default, str):
        if not str(value).isdecimal():
            raise Refusal(f"{key} is {value!r}, expected a whole number", where=where)
        return int(value)
    if value not in (known := CHOICES[key]):
        raise Refusal(f"{key} is {value!r}, expected one of {', '.join(known)}", where=where)
    return value

"""How a cache is named on a command line: NAME, or NAME:key=value,key=value.

What a name means, and which keys it takes, is said where the caches are made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from oracle.formats.errors import Refusal, brief

_OPTION = re.compile(r"([a-z_]+)=([A-Za-z0-9_.]+)")


@dataclass(frozen=True, slots=True)
class CacheName:
    """A cache's name and its options, as they were written."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        written = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{written}" if written else self.name


def parse(text: str) -> CacheName:
    """The parts of a name; a Refusal where an option is none, or is given twice."""
    name, colon, rest = text.partition(":")
    options: dict[str, str] = {}
    for part in rest.split(",") if colon else []:
        found = _OPTION.fullmatch(part)
        if not found or found[1] in options:
            what = f"{brief(part)}, expected options as key=value, each once"
            raise Refusal(what, where=f"cache {brief(name)}", remedy="write NAME:key=value,...")
        options[found[1]] = found[2]
    return CacheName(name, options)

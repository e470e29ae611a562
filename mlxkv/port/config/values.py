"""The values of a config.json, checked as they are taken out of it.

Each refusal names the file, the key, what was expected and what was found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlxkv.port.config.keys import DEFAULTS
from oracle.formats.errors import Refusal

LARGEST = 1e30
"""The largest number that is believed; float32 holds it and its products with a few others."""


class ConfigError(Refusal):
    """A config.json that the port cannot follow exactly."""


class Values:
    """A config.json's object; collects how it was read.

    `defaults` are filled in, `ignored` gives a reason by key, `remarks` are for a reader. `places`
    are the dotted names of keys that stand in an inner object, `nulls` the keys that are null.
    """

    def __init__(self, value: Mapping[str, Any], where: str) -> None:
        self.value, self.where = value, where
        self.defaults: list[tuple[str, Any]] = []
        self.ignored: dict[str, str] = {}
        self.remarks: list[str] = []
        self.places: dict[str, str] = {}
        self.nulls = {key for key, entry in value.items() if entry is None}

    def get(self, key: str) -> Any:
        """The value, or the one that is filled in where the key is absent."""
        if key not in self.value and key in DEFAULTS:
            return self.filled(key, DEFAULTS[key])
        return self.value.get(key)

    def filled(self, key: str, value: Any) -> Any:
        """The value that transformers takes too where the key is absent or null; remembered."""
        self.defaults.append((key, value))
        if key in self.nulls:
            self.remarks.append(f"{key} null counts as absent: {json.dumps(value)} filled in")
        return value

    def size(self, key: str, *, most: int, default: int | None = None) -> int:
        """A whole number from 1 to `most`."""
        value = self.get(key)
        if value is None and default is not None:
            value = self.filled(key, default)
        return self.whole(key, value, most=most)

    def whole(self, key: str, value: Any, *, most: int) -> int:
        """The same of a value that stands elsewhere."""
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "a whole number from 1", value)
        if value > most:
            raise self.error(key, f"at most {most} (no Llama comes near it)", value)
        return value

    def flag(self, key: str) -> bool:
        """True or false; false where absent."""
        value = self.value.get(key)
        return self.boolean(key, self.filled(key, False) if value is None else value)

    def boolean(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def number(
        self, key: str, value: Any, *, above: float | None = None, least: float | None = None
    ) -> float:
        """A number up to LARGEST, above one bound or from another."""
        expected = f"a number above {above:g}" if above is not None else f"a number from {least:g}"
        if not isinstance(value, int | float) or isinstance(value, bool) or not value <= LARGEST:
            raise self.error(key, expected, value)
        if (above is not None and not value > above) or (least is not None and not value >= least):
            raise self.error(key, expected, value)
        return float(value)

    def object(self, key: str) -> Mapping[str, Any]:
        """A JSON object; empty where absent or null."""
        value = self.value.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(key, "a JSON object or null", value)
        return value

    def agreed(self, key: str, *values: Any) -> Any:
        """The one value that stands in several places; None where it stands in none."""
        given = [v for v in values if v is not None]
        if any(v != given[0] or isinstance(v, bool) != isinstance(given[0], bool) for v in given):
            found = " and ".join(repr(v)[:120] for v in given)
            raise self.refusal(key, "one value", f"{found} in different places")
        return given[0] if given else None

    def error(self, key: str, expected: str, found: Any) -> ConfigError:
        return self.refusal(self.place(key), expected, repr(found)[:120])

    def place(self, key: str) -> str:
        """The key as a refusal names it: with the object that it stands in."""
        return self.places.get(key, key)

    def refusal(self, key: str, expected: str, found: str, *, remedy: str = "") -> ConfigError:
        what = f"expected {expected}, got {found[:160]}"
        return ConfigError(what, where=f"{self.where}: {key}", remedy=remedy)


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"config": {"rope": {"theta": 1.0}}}` as `{"config.rope.theta": 1.0}`."""
    found: dict[str, Any] = {}
    for key, entry in value.items():
        nested = isinstance(entry, Mapping)
        found |= flat(entry, f"{prefix}{key}.") if nested else {prefix + key: entry}
    return found

"""The keys of one object of config.json, each read strictly or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oracle.formats.errors import Refusal, brief


class Keys:
    """`values` by key; `where` is the file, and within it the object, for messages."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = dict(values), where

    def whole(self, key: str, *, most: int, default: int | None = None) -> int:
        """A whole number from 1 to `most`; `default` if the key is absent."""
        if key not in self.values and default is not None:
            return default
        value = self.values.get(key)
        if type(value) is not int or value < 1:
            raise self.wrong(key, "a whole number from 1")
        if value > most:
            raise self.wrong(key, f"at most {most}, as in every Llama by far")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0 and within float32; `default` if the key is absent."""
        if key not in self.values and default is not None:
            return default
        value: Any = self.values.get(key)
        if type(value) not in (int, float) or not 0 < value <= 1e30:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """true or false; `default` if the key is absent."""
        value = self.values.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def wrong(self, key: str, expected: str, *, found: Any = None) -> Refusal:
        """The refusal of a key's value, or of `found` in its place."""
        value = self.values.get(key) if found is None else found
        what = f"{key} is {described(value)}, expected {expected}"
        return Refusal(what, where=self.where, remedy="correct config.json")

    def refusal(self, what: str, remedy: str) -> Refusal:
        """A refusal of anything else about this object."""
        return Refusal(what, where=self.where, remedy=remedy)


def described(value: Any) -> str:
    """A value for a message; null counts as absent."""
    return "missing" if value is None else brief(value)

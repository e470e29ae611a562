"""Files that others wrote: regular ones only, JSON strictly, and each value of the kind that its reader's annotation says.

Whoever reads a file that may be damaged or edited reads it through here: what comes out can be hashed, written and printed
again, and nothing here waits for a pipe.
"""

from __future__ import annotations

import json
import math
from types import UnionType
from typing import Any, Union, get_args, get_origin

from oracle.formats.errors import brief

_DEEPEST = 32  # of JSON within JSON; what is written here goes 5 deep
_WIDEST = 2**63


def decode(text: bytes | str) -> Any:
    """A JSON value; ValueError where it is none, names a key twice, is nested too deep or holds half a character."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("nested too deep") from None
    _check(value, _DEEPEST)
    return value


def fits(value: Any, kind: Any) -> bool:
    """Whether a decoded value is of an annotation made of str, int, float, bool, None, list, dict and unions.

    Numbers must be finite and whole ones fit into 64 bits; a float may be written as a whole number; Any is any such value.
    """
    if kind is Any:
        return any(
            fits(value, each) for each in (str, bool, float, None, list[Any], dict[str, Any])
        )
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in args)
    if origin is list:
        return type(value) is list and all(fits(entry, args[0]) for entry in value)
    if origin is dict:
        return type(value) is dict and all(
            type(key) is str and fits(entry, args[1]) for key, entry in value.items()
        )
    if kind is int or (kind is float and type(value) is int):
        return type(value) is int and -_WIDEST <= value < _WIDEST
    if kind is float:
        return type(value) is float and math.isfinite(value)
    return value is None if kind in (None, type(None)) else type(value) is kind


def named(kind: Any) -> str:
    """An annotation, for a message."""
    return kind.__name__ if type(kind) is type else str(kind)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"key {brief(key)} is there twice")
        made[key] = value
    return made


def _check(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError(f"nested more than {_DEEPEST} deep")
    if isinstance(value, str):
        value.encode()  # half a surrogate pair could be neither hashed nor written
    elif isinstance(value, dict):
        for key, entry in value.items():
            key.encode()
            _check(entry, depth - 1)
    elif isinstance(value, list):
        for entry in value:
            if isinstance(
                entry, str | list | dict
            ):  # of a plan's millions of numbers none needs a look
                _check(entry, depth - 1)

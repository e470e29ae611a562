"""JSON that others wrote, read strictly, and put into the types of our own formats.

`decode` refuses what Python's json lets pass, so that what it returns can be hashed, written and
printed again. `typed` then makes a dataclass or a msgspec.Struct of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from oracle.formats import disk
from oracle.formats.errors import Refusal, brief, one_line

T = TypeVar("T")

_DEEPEST = 32  # of JSON within JSON; what is written here goes 5 deep
_WIDEST = 2**63


def decode(text: bytes | str, *, any_numbers: bool = False) -> Any:
    """The value of a JSON text.

    ValueError if it is none, names a key twice, is nested more than 32 deep, or holds half a
    surrogate pair or (unless `any_numbers`) a number that is not finite or beyond 64 bits.
    """
    hooks = {} if any_numbers else _NUMBERS
    try:
        value = json.loads(text, object_pairs_hook=_object, **hooks)
    except RecursionError:
        raise ValueError("nested too deep") from None
    _check(value, _DEEPEST)
    return value


def read(path: Path, *, remedy: str, any_numbers: bool = False) -> Any:
    """The JSON value in a UTF-8 file, a byte order mark or not; a Refusal if there is none."""
    with disk.reading(path, remedy):
        text = disk.read_bytes(path)
    try:
        return decode(text.decode("utf-8-sig"), any_numbers=any_numbers)
    except ValueError as error:
        raise Refusal(f"not JSON ({one_line(error)})", where=path, remedy=remedy) from error


def encode(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces; ValueError where it is not finite."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def of_format(value: Any, name: str, *, where: object, remedy: str) -> dict[str, Any]:
    """A decoded object without its key `format`, once that is known to be `name`."""
    found = value.get("format") if isinstance(value, dict) else value
    if not isinstance(value, dict) or found != name:
        raise Refusal(f"format is {brief(found)}, expected {name!r}", where=where, remedy=remedy)
    return {key: entry for key, entry in value.items() if key != "format"}


def typed(value: object, kind: type[T], *, where: object, remedy: str) -> T:
    """A decoded value as a `kind`; a Refusal names the key, what is there and what is expected.

    A dataclass takes no unknown key; a Struct must say `forbid_unknown_fields` itself.
    A Refusal from a `__post_init__` comes through, with `where` in front.
    """
    if is_dataclass(kind) and isinstance(value, dict):
        for key in sorted(set(value) - {field.name for field in fields(kind)}):
            raise Refusal(f"unknown key {brief(key)}", where=where, remedy=remedy)
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        if isinstance(why := error.__cause__, Refusal):
            raise Refusal(why.what, where=f"{where}: {why.where}", remedy=why.remedy) from error
        raise Refusal(_why(str(error), value, kind), where=where, remedy=remedy) from error


def fits(value: object, kind: Any) -> bool:
    """Whether a value is of a type, with nothing converted but what JSON cannot tell apart."""
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError:
        return False
    return True


def _why(message: str, value: object, kind: Any) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.a[3].n`" as "a[3].n is 'x', expected int"."""
    what, _, path = message.replace("`", "").rpartition(" - at ")
    what, path = (what, path.replace("$.", "").replace("$", "")) if what else (path, "")
    what = f"{what[0].lower()}{' '.join(what[1:].split())}"[:300]
    found, keys = value, re.findall(r"\[(\d+|\.\.\.)\]|([^.\[\]]+)", path)
    for index, key in keys:
        if index == "..." or " " in key:  # msgspec does not say which entry of an object it is
            return f"{path}: {what}"
        found = found[int(index)] if index else found[key]  # type: ignore[index]
    if what.startswith("expected "):
        return f"{path or 'value'} is {brief(found)}, {what.split(', got ')[0]}"
    if what.startswith("invalid "):
        choices = ", ".join(map(str, _choices(msgspec.inspect.type_info(kind), keys[-1][1])))
        return f"{path} is {brief(found)}, expected one of {choices}"
    return f"{path}: {what}" if path else what


def _choices(kind: Any, key: str) -> Iterator[Any]:
    """What the keys of this name may be within a type: values of a Literal, tags of Structs."""
    for field in getattr(kind, "fields", ()):
        alone = (field.type,)
        literals = [getattr(of, "values", ()) for of in getattr(field.type, "types", alone)]
        named = [value for values in literals for value in values]
        yield from named if field.encode_name == key and named else _choices(field.type, key)
    if getattr(kind, "tag_field", None) == key:
        yield kind.tag
    for inner in (*getattr(kind, "types", ()), getattr(kind, "item_type", None)):
        yield from _choices(inner, key) if inner else ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"key {brief(key)} is there twice")
        made[key] = value
    return made


def _whole(text: str) -> int:
    value = int(text)
    if not -_WIDEST <= value < _WIDEST:
        raise ValueError(f"{brief(value)} does not fit into 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not finite")
    return value


_NUMBERS: dict[str, Any] = {"parse_int": _whole, "parse_float": _finite, "parse_constant": _finite}


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
            # Of a plan's millions of numbers none needs a look.
            if isinstance(entry, str | list | dict):
                _check(entry, depth - 1)

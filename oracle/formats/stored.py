"""How a cache that keeps less than it is given is named, on a command line and in a file.

    float16, bfloat16                        keys and values rounded to that dtype
    affine:bits=8,group_size=64              MLX's affine quantisation of keys and values
    affine:keys=8,values=4,group_size=64     the same with other bits for each (0: as they are)
    window:size=256,keep=4                   the first 4 positions and the last 252

What each does to keys, values and attention, `oracle.truth.stored` computes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from oracle.formats import cache_name
from oracle.formats.errors import Refusal, brief

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
"""What `mx.quantize` takes of either, but 1 bit, which its backends quantise each in its way."""
_WHOLE = re.compile(r"0|[1-9][0-9]{0,8}")
_KNOWN = "float16, bfloat16, affine:bits=8,group_size=64, affine:keys=8,values=4, window:size=64"


@dataclass(frozen=True, slots=True)
class Rounded:
    """Keys and values in another dtype, rounded to the nearest, ties to even."""

    dtype: Literal["float16", "bfloat16"]

    @property
    def name(self) -> str:
        """The canonical spelling, which `parse` takes."""
        return self.dtype


@dataclass(frozen=True, slots=True)
class Affine:
    """Keys and values quantised in groups along head_dim; 0 bits leave either as it is."""

    keys: int
    values: int
    group_size: int

    @property
    def name(self) -> str:
        """The canonical spelling, which `parse` takes."""
        bits = f"bits={self.keys}"
        if self.keys != self.values:
            bits = f"keys={self.keys},values={self.values}"
        return f"affine:{bits},group_size={self.group_size}"


@dataclass(frozen=True, slots=True)
class Window:
    """Of a sequence's positions the first `keep` and the last `size - keep`, that of the token
    itself among them.
    """

    size: int
    keep: int = 0

    @property
    def name(self) -> str:
        """The canonical spelling, which `parse` takes."""
        return f"window:size={self.size}" + (f",keep={self.keep}" if self.keep else "")


Spec = Rounded | Affine | Window
_ROUNDED = {each.name: each for each in (Rounded("float16"), Rounded("bfloat16"))}


def parse(text: str) -> Spec:
    """What a SPEC says; a Refusal that names the option and what it may be."""
    found = cache_name.parse(text)
    where = f"--stored {brief(text)}"
    if found.name in _ROUNDED:
        _only(found.options, (), where)
        return _ROUNDED[found.name]
    if found.name == "affine":
        return _affine(found.options, where)
    if found.name == "window":
        return _window(found.options, where)
    raise Refusal("unknown", where=where, remedy=f"take one of {_KNOWN}")


def _affine(options: Mapping[str, cache_name.Value], where: str) -> Affine:
    apart = "keys" in options or "values" in options
    names = ("keys", "values") if apart else ("bits",)
    _only(options, (*names, "group_size"), where)
    allowed = (0, *BITS) if apart else BITS
    bits = [_whole(options, name, 8, where, among=allowed) for name in names]
    size = _whole(options, "group_size", 64, where, among=GROUP_SIZES)
    if not any(bits):
        what = "keys=0 and values=0, expected bits for either"
        raise Refusal(what, where=where, remedy="leave it out")
    return Affine(bits[0], bits[-1], size)


def _window(options: Mapping[str, cache_name.Value], where: str) -> Window:
    _only(options, ("size", "keep"), where)
    size, keep = _whole(options, "size", None, where), _whole(options, "keep", 0, where)
    if not 0 <= keep < size:
        what = f"size={size} and keep={keep}, expected a size from 1 and a smaller keep"
        raise Refusal(what, where=where, remedy="a token sees itself beside what is kept")
    return Window(size, keep)


def _only(options: Mapping[str, cache_name.Value], known: tuple[str, ...], where: str) -> None:
    for key in options:
        if key not in known:
            what = f"option {key!r}, expected {', '.join(known) or 'none'}"
            raise Refusal(what, where=where, remedy="leave it out")


def _whole(
    options: Mapping[str, cache_name.Value],
    key: str,
    default: int | None,
    where: str,
    *,
    among: tuple[int, ...] = (),
) -> int:
    text = options.get(key, default)
    if text is None:
        raise Refusal(f"no {key}, expected {key}=NUMBER", where=where, remedy="give it")
    found = int(text) if _WHOLE.fullmatch(str(text)) else -1
    if found < 0 or (among and found not in among):
        expected = f"one of {', '.join(map(str, among))}" if among else "a whole number"
        what = f"{key} is {text!r}, expected {expected}"
        raise Refusal(what, where=where, remedy="change it")
    return found

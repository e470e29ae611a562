"""The header of a safetensors file, strictly: what it declares must be what the file holds.

A file is 8 bytes of the header's length (little endian), the header as JSON, then the tensors'
bytes back to back (https://github.com/huggingface/safetensors#format). The `safetensors` library
reads and writes whole tensors; this is for memory maps, for rows written one after another, and for
knowing a file before a byte of its tensors is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from oracle.formats import disk, strict_json
from oracle.formats.errors import Refusal, brief, one_line

_SIZES = dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1)
_SIZES |= dict.fromkeys(("U16", "I16", "F16", "BF16"), 2)
_SIZES |= dict.fromkeys(("U32", "I32", "F32"), 4) | dict.fromkeys(("U64", "I64", "F64"), 8)
_MOST_HEADER = 100_000_000
_MOST_AXES = 8
COPY = "download, copy or make it again"
_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor: its dtype as safetensors spells it, where its bytes are in `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int = 0


def read(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors that a file declares, and its `__metadata__`, unchecked.

    A Refusal says what does not add up: the tensors must fill the file exactly.
    """
    with disk.reading(path, f"check the path or {COPY}"), disk.opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length = int.from_bytes(first, "little")
        text = file.read(length) if 2 <= length <= min(_MOST_HEADER, size - 8) else b""
    if first == b"version ":
        what = "a Git LFS pointer, expected the safetensors file itself"
        raise Refusal(what, where=path, remedy="fetch it with `git lfs pull`")
    try:
        if not text:
            raise ValueError(f"a header of {length} bytes" if len(first) == 8 else "no header")
        entries = strict_json.decode(text)
        if not isinstance(entries, dict):
            raise ValueError(f"its header is {brief(entries)}")
        meta = entries.pop("__metadata__", None)
        return checked(path, entries, 8 + length, size), meta
    except ValueError as error:
        what = f"not a whole safetensors file of {size} bytes ({one_line(error)})"
        raise Refusal(what, where=path, remedy=COPY) from error


def encoded(tensors: Mapping[str, Any], meta: Any = None, *, size: int | None = None) -> bytes:
    """What stands in front of the tensors, padded to `size` bytes or to a multiple of 8."""
    entries = ({} if meta is None else {"__metadata__": meta}) | dict(tensors)
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8 if size is None else size - 8)
    if size is not None and len(text) > size - 8:
        raise ValueError(f"metadata of {len(text)} bytes, expected at most {size - 8}")
    return len(text).to_bytes(8, "little") + text


def declare(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[dict[str, Any], int]:
    """Entries for tensors (dtype, shape) back to back in this order, and the bytes of all."""
    entries: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + _SIZES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return entries, end


def checked(path: Path, entries: Mapping[str, Any], base: int, size: int) -> dict[str, Tensor]:
    """The header's entries as tensors that follow one another from byte `base` to byte `size`."""
    typed = {
        name: strict_json.typed(entry, _Entry, where=brief(name), remedy="")
        for name, entry in entries.items()
    }
    found: dict[str, Tensor] = {}
    end = base
    for name, entry in sorted(typed.items(), key=lambda e: e[1].data_offsets):
        start, stop = (base + at for at in entry.data_offsets)
        if entry.dtype not in _SIZES:
            raise ValueError(f"{name} is {brief(entry.dtype)}, expected one of {', '.join(_SIZES)}")
        # An empty array has any other sizes for nothing, but numpy multiplies them too.
        if len(entry.shape) > _MOST_AXES or math.prod(max(n, 1) for n in entry.shape) >= 2**60:
            expected = f"expected at most {_MOST_AXES} axes of a possible size"
            raise ValueError(f"{name} has shape {brief(list(entry.shape))}, {expected}")
        if start != end or stop - start != math.prod(entry.shape) * _SIZES[entry.dtype]:
            expected = f"from {end - base} on for {entry.dtype} {brief(list(entry.shape))}"
            place = f"bytes {start - base} to {stop - base}"
            raise ValueError(f"{name} has {place}, expected them {expected}")
        end = stop
        found[name] = Tensor(path, entry.dtype, entry.shape, start, stop)
    if end != size:
        raise ValueError(f"its tensors end at byte {end}")
    return found

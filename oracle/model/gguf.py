"""What a GGUF file holds: metadata, and tensors that are dequantised to float32 one at a time.

The container is read here (the `gguf` package takes eight seconds over a vocabulary), its blocks
by `gguf.quants`. This module knows no model.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle.formats import disk
from oracle.formats.errors import Refusal, brief

# The container's types of values, by number, as `struct` spells them.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_SHARD = re.compile(r"(.+-)(\d{5})(-of-)(\d{5})(\.gguf)", re.IGNORECASE)
_ALL = "download all shards, under their own names, into one folder"

# Numbers that are dequantised together: 4 MB in float32, and `gguf.quants` has a few such arrays.
_BLOCK = 2**20

_Place = tuple[tuple[int, ...], int, int, mmap.mmap]


@dataclass(frozen=True, slots=True)
class Gguf:
    """A model's metadata, and its tensors.

    Those are name -> shape (outermost axis first), type, first byte, and the file's bytes.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, _Place]


def shards(path: Path) -> list[Path]:
    """The files of the split model that `path` is one of by its name, in order; or `path` alone."""
    named = _SHARD.fullmatch(path.name)
    if not named:
        return [path]
    stem, number, of, count, suffix = named.groups()
    names = [f"{stem}{i:05d}{of}{count}{suffix}" for i in range(1, int(count) + 1)]
    for name in names:
        if not (path.parent / name).is_file():
            what = f"shard {int(number)} of {int(count)}, expected {name} beside it"
            raise Refusal(what, where=path, remedy=_ALL)
    return [path.parent / name for name in names] or [path]


def read(path: Path) -> Gguf:
    """The metadata and tensors of a file, or of all shards that it is one of by its name."""
    files = [_read(file) for file in shards(path)]
    tensors: dict[str, _Place] = {}
    for i, file in enumerate(files):
        number, count = file.metadata.get("split.no", 0), file.metadata.get("split.count", 1)
        if (number, count) != (i, len(files)):
            number = number + 1 if isinstance(number, int) else number  # names count from 1
            what = f"is shard {brief(number)} of {brief(count)} by its metadata"
            what += f", expected {i + 1} of {len(files)} by its name"
            raise Refusal(what, where=file.path, remedy=_ALL)
        for name in sorted(file.tensors.keys() & tensors.keys()):
            what = f"holds {name} as another shard does, expected it once"
            raise Refusal(what, where=file.path, remedy=_ALL)
        tensors |= file.tensors
    n = files[0].metadata.get("split.tensors.count", len(tensors))
    if n != len(tensors):
        what = f"split.tensors.count is {brief(n)}, expected {len(tensors)} as all shards hold"
        raise Refusal(what, where=files[0].path, remedy=_ALL)
    return Gguf(path, files[0].metadata, tensors)


def _read(path: Path) -> Gguf:
    """The contents of one file; the tensors' bytes are mapped and not yet read."""
    again = "download it again"
    try:
        with disk.opened(path) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        remedy = f"check the path or {again}"
        raise Refusal(f"cannot be read ({error})", where=path, remedy=remedy) from error
    if data[:8] == b"version ":
        what = "a Git LFS pointer, expected the GGUF file itself"
        raise Refusal(what, where=path, remedy="fetch it with `git lfs pull`")
    if data[:4] != b"GGUF":
        raise Refusal(f"begins with {data[:4]!r}, expected b'GGUF'", where=path, remedy=again)
    try:
        return Gguf(path, *_contents(_Cursor(data)))
    except (struct.error, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as e:
        what = f"not a whole GGUF file of {len(data)} bytes ({e})"
        raise Refusal(what, where=path, remedy=again) from e


class _Cursor:
    """Little-endian values, one after the other; ValueError past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 4

    def skip(self, size: int) -> int:
        if size > len(self.data) - self.at:
            raise ValueError(f"ends within {size} bytes from byte {self.at}")
        self.at += size
        return self.at - size

    def scalars(self, code: str, n: int) -> tuple[Any, ...]:
        start = self.skip(n * struct.calcsize("<" + code))
        return struct.unpack_from(f"<{n}{code}", self.data, start)

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        start = self.skip(self.scalar("Q"))
        return self.data[start : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, n = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            return list(self.scalars(_SCALARS[inner], n))
        return [self.value(inner) for _ in range(n)]


def _contents(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, _Place]]:
    """The metadata and the tensors' places, as the GGUF specification of ggml lays them out."""
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"version {version}, expected 2 or 3")
    n_tensors, n_values = cursor.scalars("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(n_values):
        name = _new_name(cursor, metadata)
        metadata[name] = cursor.value(cursor.scalar("I"))
    tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(n_tensors):
        name = _new_name(cursor, tensors)
        shape = cursor.scalars("Q", cursor.scalar("I"))[::-1]
        tensors[name] = (shape, cursor.scalar("I"), cursor.scalar("Q"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {brief(alignment)}, expected a whole number from 1")
    base = -(-cursor.at // alignment) * alignment
    return metadata, {
        name: (shape, kind, base + start, cursor.data)
        for name, (shape, kind, start) in tensors.items()
    }


def _new_name(cursor: _Cursor, known: dict[str, Any]) -> str:
    name = cursor.string()
    if name in known:
        raise ValueError(f"{name} is there twice")
    return name


def dequantised(gguf: Gguf, name: str, *, together: int = 1) -> Iterator[Any]:
    """A matrix's rows (n, columns) in float32, a block after another; what has one axis (n,) whole.

    A block has a multiple of `together` rows, which must divide their number.
    """
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    shape, number, start, data = gguf.tensors[name]
    try:
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
        rows, row = math.prod(shape[:-1]), shape[-1] // block * size
        stored = np.frombuffer(data, np.uint8, rows * row, start).reshape(rows, row)
        step = together * max(1, _BLOCK // (together * shape[-1]))
        for first in range(0, rows, step):
            found = np.asarray(dequantize(stored[first : first + step], kind), np.float32)
            yield found.reshape(-1, *shape[1:])
    except (ValueError, KeyError, OverflowError, NotImplementedError) as error:
        what = f"{name} of type {number} cannot be read ({error})"
        remedy = "download it again or use another type"
        raise Refusal(what, where=gguf.path, remedy=remedy) from error


def main_type(gguf: Gguf) -> str:
    """The type that most of the elements are stored in."""
    from gguf.constants import GGMLQuantizationType

    elements: dict[int, int] = {}
    for shape, kind, *_ in gguf.tensors.values():
        elements[kind] = elements.get(kind, 0) + math.prod(shape)
    return str(GGMLQuantizationType(max(elements, key=elements.__getitem__)).name)

"""What a GGUF file holds: metadata, and tensors that are dequantised to float32 one at a time.

The container is read here (the `gguf` package takes eight seconds over a vocabulary), its blocks by `gguf.quants`. This
module knows no model.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle.formats import disk
from oracle.formats.errors import Refusal, brief

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Gguf:
    """A file's metadata, and its tensors as name -> (shape, outermost axis first; ggml type; first byte)."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], int, int]]
    data: mmap.mmap


def read(path: Path) -> Gguf:
    """The container's metadata; the tensors' bytes are mapped and not yet read."""
    try:
        with disk.opened(path) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise Refusal(
            f"{path}: cannot be read ({error}); check the path or download it again"
        ) from error
    if data[:8] == b"version ":
        raise Refusal(
            f"{path}: a Git LFS pointer, expected the GGUF file itself; fetch it with `git lfs pull`"
        )
    if data[:4] != b"GGUF":
        raise Refusal(f"{path}: begins with {data[:4]!r}, expected b'GGUF'; download it again")
    try:
        return Gguf(path, *_contents(_Cursor(data)), data)
    except (
        struct.error,
        ValueError,
        KeyError,
        TypeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise Refusal(
            f"{path}: not a whole GGUF file of {len(data)} bytes ({error}); download it again"
        ) from error


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
        return struct.unpack_from(
            f"<{n}{code}", self.data, self.skip(n * struct.calcsize("<" + code))
        )

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        size = self.scalar("Q")
        start = self.skip(size)
        return self.data[start : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, n = self.scalar("I"), self.scalar("Q")
        return (
            list(self.scalars(_SCALARS[inner], n))
            if inner in _SCALARS
            else [self.value(inner) for _ in range(n)]
        )


def _contents(
    cursor: _Cursor,
) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"version {version}, expected 2 or 3")
    n_tensors, n_values = cursor.scalars("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(n_values):
        name = cursor.string()
        if name in metadata:
            raise ValueError(f"{name} is there twice")
        metadata[name] = cursor.value(cursor.scalar("I"))
    tensors = {}
    for _ in range(n_tensors):
        name = cursor.string()
        shape = cursor.scalars("Q", cursor.scalar("I"))[::-1]
        if name in tensors:
            raise ValueError(f"{name} is there twice")
        tensors[name] = (shape, *cursor.scalars("I", 1), *cursor.scalars("Q", 1))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {brief(alignment)}, expected a whole number from 1")
    start = -(-cursor.at // alignment) * alignment
    return metadata, {
        name: (shape, kind, start + offset) for name, (shape, kind, offset) in tensors.items()
    }


def dequantised(gguf: Gguf, name: str) -> Any:
    """One tensor as a float32 array."""
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    shape, number, start = gguf.tensors[name]
    try:
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
        rows, row = math.prod(shape[:-1]), shape[-1] // block * size
        stored = np.frombuffer(gguf.data, np.uint8, rows * row, start).reshape(rows, row)
        return np.asarray(dequantize(stored, kind), np.float32).reshape(shape)
    except (ValueError, KeyError, OverflowError, NotImplementedError) as error:
        raise Refusal(
            f"{gguf.path}: {name} of type {number} cannot be read ({error}); download it again or use another type"
        ) from error


def main_type(gguf: Gguf) -> str:
    """The type that most of the elements are stored in."""
    from gguf.constants import GGMLQuantizationType

    elements: dict[int, int] = {}
    for shape, kind, _ in gguf.tensors.values():
        elements[kind] = elements.get(kind, 0) + math.prod(shape)
    return str(GGMLQuantizationType(max(elements, key=elements.__getitem__)).name)

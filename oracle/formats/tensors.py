"""Safetensors files of ours and of others: the strict header, memory maps, and a writer in place.

A file is 8 bytes of the header's length (little endian), the header as JSON, then the tensors' bytes
back to back. The `safetensors` library reads and writes whole tensors; here is what it does not do:
every byte of the file accounted for before a tensor is mapped, and rows written one after another.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt

from oracle.formats import disk, strict_json
from oracle.formats.errors import Refusal, brief, one_line

Array = npt.NDArray[Any]
Shapes = Mapping[str, tuple[type, tuple[int, ...]]]
"""Each array's numpy dtype and shape, by name."""

_SIZES = dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1)
_SIZES |= dict.fromkeys(("U16", "I16", "F16", "BF16"), 2)
_SIZES |= dict.fromkeys(("U32", "I32", "F32"), 4) | dict.fromkeys(("U64", "I64", "F64"), 8)
_NUMPY: dict[str, type] = {
    "F64": np.float64,
    "F32": np.float32,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
}
_NAMES = {np.dtype(kind): name for name, kind in _NUMPY.items()}
_MOST_HEADER = 100_000_000
_MOST_AXES = 8
_COPY = "download, copy or make it again"

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor: its file, its dtype as safetensors spells it, its shape, its bytes' place."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int = 0


def header(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors that a file declares, once they fill it exactly, and its `__metadata__`, unchecked.

    A Refusal says what does not add up.
    """
    try:
        with disk.opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(8)
            length = int.from_bytes(first, "little")
            text = file.read(length) if 2 <= length <= min(_MOST_HEADER, size - 8) else b""
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        raise Refusal(why, where=path, remedy=f"check the path or {_COPY}") from error
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
        return _declared(path, entries, 8 + length, size), meta
    except ValueError as error:
        what = f"not a whole safetensors file of {size} bytes ({one_line(error)})"
        raise Refusal(what, where=path, remedy=_COPY) from error


def header_bytes(tensors: Mapping[str, Any], meta: Any = None, *, size: int | None = None) -> bytes:
    """What stands in front of the tensors, padded to `size` bytes or to a multiple of 8."""
    entries = ({} if meta is None else {"__metadata__": meta}) | dict(tensors)
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8 if size is None else size - 8)
    if size is not None and len(text) > size - 8:
        raise ValueError(f"metadata of {len(text)} bytes, expected at most {size - 8}")
    return len(text).to_bytes(8, "little") + text


def declare(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[dict[str, Any], int]:
    """The header's entries of tensors back to back in this order (dtype, shape), and all their bytes."""
    entries: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + _SIZES[dtype] * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return entries, end


def mapped(tensors: Mapping[str, Tensor], mode: Literal["r", "r+"] = "r") -> dict[str, Array]:
    """The tensors as memory maps of their files; a Refusal of a dtype that numpy lacks."""
    arrays: dict[str, Array] = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in _NUMPY:
            what = f"{name} is {tensor.dtype}, expected one of {', '.join(_NUMPY)}"
            raise Refusal(what, where=tensor.file, remedy=_COPY)
        dtype = _NUMPY[tensor.dtype]
        arrays[name] = (
            np.memmap(tensor.file, dtype, mode, tensor.start, tensor.shape)
            if math.prod(tensor.shape)
            else np.zeros(tensor.shape, dtype)
        )
    return arrays


class Writer:
    """Arrays of known shapes, filled in place in a memory map; the file is there only when whole.

    `meta_bytes` bounds the metadata, which is written last (what became of the steps is known only
    then) into space kept for it in front. It is one key, `mlxkv`, holding sorted JSON, because
    several keys would be written in varying order.
    """

    def __init__(self, path: Path, shapes: Shapes, *, meta_bytes: int = 2**16) -> None:
        self.path = path
        # Largest items first, so that every array starts at a multiple of its item's size.
        order = sorted(shapes.items(), key=lambda s: (-np.dtype(s[1][0]).itemsize, s[0]))
        self._entries, size = declare(
            {name: (_NAMES[np.dtype(dtype)], shape) for name, (dtype, shape) in order}
        )
        room = len(json.dumps(self._entries)) + meta_bytes
        self._header = 8 + -(-room // 4096) * 4096
        self._part = disk.claim_part(path)
        try:
            _allocate(self._part, self._header + size)
            whole = _declared(self._part, self._entries, self._header, self._header + size)
            self.arrays = mapped(whole, "r+")
        except OSError as error:
            self.discard()
            raise disk.unwritable(path, error) from error

    def finish(self, meta: Mapping[str, Any]) -> None:
        """Writes the metadata and renames the file into place."""
        # JSON within JSON: quotes are escaped once more, which the bound above allows for.
        text = header_bytes(self._entries, {"mlxkv": strict_json.encode(meta)}, size=self._header)
        try:
            for array in self.arrays.values():
                if isinstance(array, np.memmap):
                    array.flush()
            self.arrays = {}
            with self._part.open("r+b") as file:
                file.write(text)
            self._part.replace(self.path)
        except OSError as error:
            raise disk.unwritable(self.path, error) from error

    def discard(self) -> None:
        """Drops what has been written, unless it was finished."""
        self.arrays = {}
        self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()


def read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """The metadata and the mapped arrays of a file that a Writer wrote."""
    tensors, meta = header(path)
    try:
        value = strict_json.decode(meta["mlxkv"])
        if not isinstance(value, dict):
            raise ValueError(f"its metadata is {brief(value)}, expected an object")
    except (ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        raise Refusal(f"no metadata of ours ({why})", where=path, remedy=_COPY) from error
    return value, mapped(tensors)


def _declared(path: Path, entries: Mapping[str, Any], base: int, size: int) -> dict[str, Tensor]:
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


def _allocate(path: Path, size: int) -> None:
    # Blocks are claimed now: a full disk is an error here, and would be a bus error on writing into
    # a sparse map.
    with path.open("r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
            return
        for start in range(0, size, 2**24):
            file.write(bytes(min(2**24, size - start)))

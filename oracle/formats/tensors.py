"""Arrays in safetensors files of ours: mapped into memory to be read, or to be filled in place."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from oracle.formats import disk, header, strict_json
from oracle.formats.errors import Refusal, brief, one_line
from oracle.formats.header import Tensor

Array = npt.NDArray[Any]
Shapes = Mapping[str, tuple[type, tuple[int, ...]]]
"""Each array's numpy dtype and shape, by name."""

_NUMPY: dict[str, type] = {
    "F64": np.float64,
    "F32": np.float32,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
}
_NAMES = {np.dtype(kind): name for name, kind in _NUMPY.items()}


def mapped(tensors: Mapping[str, Tensor], mode: Literal["r", "r+"] = "r") -> dict[str, Array]:
    """The tensors in memory maps of their files; a Refusal of a dtype that numpy lacks.

    A file is mapped once: each map keeps a file open, and a trace has hundreds of arrays.
    """
    arrays: dict[str, Array] = {}
    files: dict[Path, Array] = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in _NUMPY:
            what = f"{name} is {tensor.dtype}, expected one of {', '.join(_NUMPY)}"
            raise Refusal(what, where=tensor.file, remedy=header.COPY)
        dtype = np.dtype(_NUMPY[tensor.dtype])
        size = math.prod(tensor.shape) * dtype.itemsize
        if not size:
            arrays[name] = np.zeros(tensor.shape, dtype)
            continue
        if tensor.file not in files:
            files[tensor.file] = np.memmap(tensor.file, np.uint8, mode)
        stored = files[tensor.file][tensor.start : tensor.start + size]
        arrays[name] = stored.view(dtype).reshape(tensor.shape)
    return arrays


class Writer:
    """Arrays of known shapes, filled in place in a memory map of `part`; see `writer`."""

    def __init__(self, path: Path, part: Path, shapes: Shapes, meta_bytes: int) -> None:
        self._path, self._part = path, part
        # Largest items first, so that every array starts at a multiple of its item's size.
        order = sorted(shapes.items(), key=lambda s: (-np.dtype(s[1][0]).itemsize, s[0]))
        self._entries, size = header.declare(
            {name: (_NAMES[np.dtype(dtype)], shape) for name, (dtype, shape) in order}
        )
        room = len(json.dumps(self._entries)) + meta_bytes
        self._header = 8 + -(-room // 4096) * 4096
        whole = self._header + size
        _allocate(part, whole)
        self.arrays = mapped(header.checked(part, self._entries, self._header, whole), "r+")

    def finish(self, meta: Mapping[str, Any]) -> None:
        """Writes the metadata and renames the file into place.

        The system writes the arrays to the disk when it likes, as it does with every other file:
        waiting for it took 0.1 s for each 60 MB. What is kept has a sha256 that is looked at.
        """
        # JSON within JSON: quotes are escaped once more, which the bound above allows for.
        text = {"mlxkv": strict_json.encode(meta)}
        first = header.encoded(self._entries, text, size=self._header)
        with disk.writing(self._path):
            self.arrays = {}
            with self._part.open("r+b") as file:
                file.write(first)
            self._part.replace(self._path)


@contextmanager
def writer(path: Path, shapes: Shapes, *, meta_bytes: int = 2**16) -> Iterator[Writer]:
    """A Writer of one file, which is there only once it is finished.

    `meta_bytes` bounds the metadata, which is written last (what became of the steps is known only
    then) into space kept for it in front. It is one key, `mlxkv`, holding sorted JSON, because
    several keys would be written in varying order.
    """
    with disk.part(path) as part:
        with disk.writing(path):
            made = Writer(path, part, shapes, meta_bytes)
        yield made


def write(path: Path, arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> None:
    """A file of arrays that are in memory."""
    with writer(path, {name: (a.dtype.type, a.shape) for name, a in arrays.items()}) as out:
        for name, array in arrays.items():
            out.arrays[name][...] = array
        out.finish(meta)


def release(array: Array) -> None:
    """Takes a mapped array's pages out of this process's memory; they are read again if needed."""
    map = getattr(array, "_mmap", None)
    if not isinstance(map, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = array.ctypes.data - np.frombuffer(map, np.uint8).ctypes.data
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (first + array.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        map.madvise(mmap.MADV_DONTNEED, start, length)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """The metadata and the mapped arrays of a file that a Writer wrote."""
    tensors, meta = header.read(path)
    try:
        value = strict_json.decode(meta["mlxkv"])
        if not isinstance(value, dict):
            raise ValueError(f"its metadata is {brief(value)}, expected an object")
    except (ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {one_line(error)}"
        raise Refusal(f"no metadata of ours ({why})", where=path, remedy=header.COPY) from error
    return value, mapped(tensors)


def _allocate(path: Path, size: int) -> None:
    # Blocks are claimed now: a full disk is an error here, and would be a bus error on writing into
    # a sparse map.
    with path.open("r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
            return
        for start in range(0, size, 2**24):
            file.write(bytes(min(2**24, size - start)))

"""The fingerprint of a model's weights: one sha256 of every tensor's name, dtype, shape and bytes.

The bytes are read once for that and for their largest number. What is found in a file is kept in
the cache folder until the file changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oracle.formats import disk, strict_json
from oracle.formats.errors import Refusal
from oracle.formats.header import Tensor
from oracle.formats.progress import Progress
from oracle.model import cache_folder

# Bytes of each float, and its name in `struct` (bfloat16 is the upper half of a float32).
_FLOATS = {"F64": (8, "d"), "F32": (4, "f"), "F16": (2, "e"), "BF16": (2, "f")}


@dataclass(frozen=True, slots=True)
class Contents:
    """What is known of tensors, by name: the sha256 of their bytes, and their largest number.

    `largest` is a float's bits without its sign: read as a whole number, those are in the order of
    the magnitudes, with infinity and then NaN last. 0 for what is no float.
    """

    hashes: dict[str, str]
    largest: dict[str, int]


def fingerprint(tensors: Mapping[str, Tensor], hashes: Mapping[str, str]) -> str:
    """sha256 over the sorted (name, dtype, shape, sha256 of the bytes), whatever the files."""
    rows = [[name, t.dtype, list(t.shape), hashes[name]] for name, t in sorted(tensors.items())]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def magnitude(dtype: str, bits: int) -> float:
    """The number that a float's bits without its sign stand for; 0 for what is no float."""
    if dtype not in _FLOATS:
        return 0.0
    size, kind = _FLOATS[dtype]
    if dtype == "BF16":
        size, bits = 4, bits << 16
    return float(struct.unpack(f"<{kind}", bits.to_bytes(size, "little"))[0])


def contents(tensors: Mapping[str, Tensor], *, progress: Progress) -> Contents:
    """What the tensors hold, from the cache folder if their files' stat is still the same."""
    by_file: dict[Path, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        by_file.setdefault(tensor.file, {})[name] = tensor
    found = Contents({}, {})
    for file, its in by_file.items():
        of_file = _contents(file.resolve(), its, progress)
        found.hashes.update(of_file.hashes)
        found.largest.update(of_file.largest)
    return found


def _contents(path: Path, tensors: Mapping[str, Tensor], progress: Progress) -> Contents:
    name = f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    record = cache_folder.part("fingerprints") / name
    with disk.reading(path, "check the file or download it again"):
        stamp = _stamp(path)
        known = _recalled(record, stamp, tensors)
        if known is not None:
            return known
        started = time.time_ns()
        found = _hashed(path, tensors, progress)
        settled = disk.settled(stamp["mtime_ns"], started) and _stamp(path) == stamp
    if settled:
        disk.write_text(record, json.dumps(stamp | asdict(found), indent=1))
    return found


def _stamp(path: Path) -> dict[str, Any]:
    stat = path.stat()
    found = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}
    return {"path": str(path)} | found


def _recalled(
    record: Path, stamp: dict[str, Any], tensors: Mapping[str, Tensor]
) -> Contents | None:
    """What a record says; None if it is missing, damaged or of another file."""
    try:
        value = strict_json.decode(disk.read_bytes(record))
        found = Contents(value.pop("hashes"), value.pop("largest"))
        whole = all(len(bytes.fromhex(digest)) == 32 for digest in found.hashes.values())
        whole = whole and all(type(bits) is int for bits in found.largest.values())
        whole = whole and set(found.largest) == set(tensors)
        return found if value == stamp and set(found.hashes) == set(tensors) and whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _hashed(path: Path, tensors: Mapping[str, Tensor], progress: Progress) -> Contents:
    found = Contents({}, {})
    buffer = memoryview(bytearray(2**20))
    total, done = sum(t.stop - t.start for t in tensors.values()), 0
    with disk.opened(path) as file:
        for name, tensor in tensors.items():
            digest, largest = hashlib.sha256(), 0
            file.seek(tensor.start)
            left = tensor.stop - tensor.start
            while left:
                n = file.readinto(buffer[: min(left, len(buffer))])
                if not n:
                    what = f"ends within {name}, expected {left} bytes more"
                    raise Refusal(what, where=path, remedy="it was changed while being read")
                digest.update(buffer[:n])
                largest = max(largest, _largest(buffer[:n], tensor.dtype))
                left -= n
            found.hashes[name], found.largest[name] = digest.hexdigest(), largest
            done += tensor.stop - tensor.start
            progress(f"hashing {path.name}", done, total)
    return found


def _largest(piece: memoryview, dtype: str) -> int:
    """The bits of the largest magnitude; two passes cost a fifteenth of the hash."""
    if dtype not in _FLOATS:
        return 0
    import numpy as np

    size = _FLOATS[dtype][0]
    signed, unsigned = (int(np.frombuffer(piece, f"<{kind}{size}").max()) for kind in "iu")
    without_sign: int = unsigned % 2 ** (8 * size - 1)
    return max(0, signed, without_sign)

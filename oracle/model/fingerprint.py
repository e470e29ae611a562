"""The fingerprint of a model's weights: one sha256 of every tensor's name, dtype, shape and bytes.

The hashes of a file's tensors are kept in the cache folder until the file changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oracle.formats import disk, strict_json
from oracle.formats.errors import Refusal
from oracle.formats.header import Tensor
from oracle.formats.progress import Progress
from oracle.model import cache_folder

Spans = Mapping[str, tuple[int, int]]
"""Names, and from which byte of a file to which."""


def fingerprint(tensors: Mapping[str, Tensor], *, progress: Progress) -> str:
    """sha256 over the sorted (name, dtype, shape, sha256 of the bytes), whatever the files."""
    by_file: dict[Path, dict[str, tuple[int, int]]] = {}
    for name, tensor in tensors.items():
        by_file.setdefault(tensor.file, {})[name] = (tensor.start, tensor.stop)
    digests: dict[str, str] = {}
    for file, spans in by_file.items():
        digests |= hashes(file, spans, progress=progress)
    rows = [[name, t.dtype, list(t.shape), digests[name]] for name, t in sorted(tensors.items())]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def hashes(path: Path, spans: Spans, *, progress: Progress) -> dict[str, str]:
    """sha256 of each span of a file, from the cache folder if the file's stat is still the same."""
    path = path.resolve()
    name = f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    record = cache_folder.part("fingerprints") / name
    with disk.reading(path, "check the file or download it again"):
        stamp = _stamp(path)
        known = _recalled(record, stamp, spans)
        if known is not None:
            return known
        started = time.time_ns()
        found = _hashed(path, spans, progress)
        settled = disk.settled(stamp["mtime_ns"], started) and _stamp(path) == stamp
    if settled:
        disk.write_text(record, json.dumps(stamp | {"hashes": found}, indent=1))
    return found


def _stamp(path: Path) -> dict[str, Any]:
    stat = path.stat()
    found = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}
    return {"path": str(path)} | found


def _recalled(record: Path, stamp: dict[str, Any], spans: Spans) -> dict[str, str] | None:
    """The hashes in a record; None if it is missing, damaged or of another file."""
    try:
        value = strict_json.decode(disk.read_bytes(record))
        found: dict[str, str] = value.pop("hashes")
        whole = all(len(bytes.fromhex(digest)) == 32 for digest in found.values())
        return found if value == stamp and set(found) == set(spans) and whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _hashed(path: Path, spans: Spans, progress: Progress) -> dict[str, str]:
    found = {}
    buffer = memoryview(bytearray(2**20))
    total, done = sum(stop - start for start, stop in spans.values()), 0
    with disk.opened(path) as file:
        for name, (start, stop) in spans.items():
            digest = hashlib.sha256()
            file.seek(start)
            left = stop - start
            while left:
                n = file.readinto(buffer[: min(left, len(buffer))])
                if not n:
                    what = f"ends within {name}, expected {left} bytes more"
                    raise Refusal(what, where=path, remedy="it was changed while being read")
                digest.update(buffer[:n])
                left -= n
            found[name] = digest.hexdigest()
            done += stop - start
            progress(f"hashing {path.name}", done, total)
    return found

"""What a folder's safetensors hold, without reading a weight: headers and index, strictly; and the hash of each tensor.

An index rules where there is one: files that it does not name are not looked at. Everything else must add up: every
shard there and whole, every tensor in the one shard that the index says. Pickle files are never opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle.formats import disk, strict_json
from oracle.formats.errors import Refusal, brief

Progress = Callable[[str, int, int], None]

INDEX = "model.safetensors.index.json"
_SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
}
_SIZES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}
_MOST_HEADER = 100_000_000
_MOST_AXES = 8
_PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
# A file written to again within a tick of the clock keeps its time stamp; kernels tick every 10 ms or faster.
_TICK_NS = 50_000_000


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor: its file, its dtype as safetensors spells it, its shape, its bytes' place in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int = 0


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder by name, sorted; a Refusal that names the file where anything does not add up."""
    found = _by_index(folder) if os.path.exists(folder / INDEX) else header(_only_file(folder))
    if not found:
        raise Refusal(
            f"{folder}: its safetensors hold no tensors, expected a model's; download it again"
        )
    return dict(sorted(found.items()))


def header(path: Path) -> dict[str, Tensor]:
    """The tensors that one file declares, once they are known to fill it exactly."""
    try:
        with disk.opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(8)
            length = int.from_bytes(first, "little")
            text = file.read(length) if 2 <= length <= min(_MOST_HEADER, size - 8) else b""
    except OSError as error:
        raise Refusal(
            f"{path}: cannot be read ({error.strerror}); check the path or download it again"
        ) from error
    if first == b"version ":
        raise Refusal(
            f"{path}: a Git LFS pointer, expected the safetensors file itself; fetch it with `git lfs pull`"
        )
    try:
        if not text:
            raise ValueError(f"a header of {length} bytes" if len(first) == 8 else "no header")
        return _declared(path, strict_json.decode(text), 8 + length, size)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())[:160] or type(error).__name__
        raise Refusal(
            f"{path}: not a whole safetensors file of {size} bytes ({why}); download or copy it again"
        ) from error


def _declared(path: Path, entries: Any, base: int, size: int) -> dict[str, Tensor]:
    entries.pop("__metadata__", None)
    found: dict[str, Tensor] = {}
    end = base
    for name, entry in sorted(entries.items(), key=lambda e: e[1]["data_offsets"]):
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if (
            dtype not in _SIZES
            or not strict_json.fits([shape, [start, stop]], list[list[int]])
            or min([*shape, start, stop]) < 0
        ):
            raise ValueError(
                f"{name} is {dtype} {brief(shape)}, expected one of {', '.join(_SIZES)}"
            )
        if len(shape) > _MOST_AXES:
            raise ValueError(f"{name} has {len(shape)} axes, expected at most {_MOST_AXES}")
        if base + start != end or stop - start != math.prod(shape) * _SIZES[dtype]:
            raise ValueError(
                f"{name} has bytes {start} to {stop}, expected them from {end - base} on for {dtype} {shape}"
            )
        end = base + stop
        found[name] = Tensor(path, dtype, tuple(shape), base + start, end)
    if end != size:
        raise ValueError(f"its tensors end at byte {end}")
    return found


def _by_index(folder: Path) -> dict[str, Tensor]:
    where = _index(folder)
    found: dict[str, Tensor] = {}
    shards = [folder / shard for shard in sorted(set(where.values()))]
    for path in shards:
        if not os.path.exists(path):
            raise Refusal(
                f"{path}: no such file, expected it as {INDEX} names it; download the folder again"
            )
    for path in shards:
        for name, tensor in header(path).items():
            if name in found:
                raise Refusal(
                    f"{path}: {name} is in {found[name].file.name} too, expected it once; download the folder again"
                )
            if where.get(name) != path.name:
                expected = f"in {where[name]}" if name in where else "nowhere"
                raise Refusal(
                    f"{path}: holds {name}, expected it {expected} as {INDEX} says; download the folder again"
                )
            found[name] = tensor
    missing = sorted(set(where) - set(found))
    if missing:
        raise Refusal(
            f"{folder / where[missing[0]]}: lacks {missing[0]} (and {len(missing) - 1} more), expected it as {INDEX} says; "
            "download the folder again"
        )
    return found


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    value = read_object(path)
    where = value.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise Refusal(
            f"{path}: no weight_map, expected an object of tensor and file names; download it again"
        )
    for name, shard in where.items():
        if (
            not isinstance(shard, str)
            or Path(shard).name != shard
            or not shard.endswith(".safetensors")
            or "\0" in shard
        ):
            raise Refusal(
                f"{path}: {name} is in {brief(shard)}, expected the name of a safetensors file beside it; download it again"
            )
    return where


def _only_file(folder: Path) -> Path:
    if (folder / "model.safetensors").exists():
        return folder / "model.safetensors"
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise Refusal(
            f"{folder}: {len(found)} safetensors files and no {INDEX}, expected it or model.safetensors; download the index too"
        )
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if pickles:
        raise Refusal(
            f"{folder}: no safetensors, and {pickles[0]} is never opened (pickle files run code); save it as safetensors first"
        )
    raise Refusal(
        f"{folder}: no model.safetensors, expected the weights beside config.json; download the folder again"
    )


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; a byte order mark in front is passed over."""
    try:
        value = strict_json.decode(disk.read_bytes(path).decode("utf-8-sig"))
    except OSError as error:
        raise Refusal(f"{path}: cannot be read ({error.strerror}); check the folder") from error
    except ValueError as error:
        raise Refusal(
            f"{path}: not JSON ({' '.join(str(error).split())}); correct it or download it again"
        ) from error
    if not isinstance(value, dict):
        raise Refusal(
            f"{path}: a JSON {type(value).__name__}, expected an object; correct it or download it again"
        )
    return value


def fingerprint(found: Mapping[str, Tensor], *, cache: Path, progress: Progress) -> str:
    """sha256 over the sorted (name, stored dtype, shape, sha256 of the bytes), however they are spread over files."""
    by_file: dict[Path, dict[str, tuple[int, int]]] = {}
    for name, tensor in found.items():
        by_file.setdefault(tensor.file, {})[name] = (tensor.start, tensor.stop)
    digests = {
        n: d
        for file, spans in by_file.items()
        for n, d in hashes(file, spans, cache=cache, progress=progress).items()
    }
    rows = [
        [name, found[name].dtype, list(found[name].shape), digests[name]] for name in sorted(found)
    ]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def hashes(
    path: Path, spans: Mapping[str, tuple[int, int]], *, cache: Path, progress: Progress
) -> dict[str, str]:
    """sha256 of each span of a file, remembered in the folder `cache` for as long as the file's stat stays the same."""
    path = path.resolve()
    record = cache / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    try:
        stamp = _stamp(path)
        known = _recalled(record, stamp, spans)
        if known is not None:
            return known
        started = time.time_ns()
        found = _hashed(path, spans, progress)
        settled = started - stamp["mtime_ns"] > _TICK_NS and _stamp(path) == stamp
    except OSError as error:
        raise Refusal(
            f"{path}: cannot be read ({error.strerror}); check the file or download it again"
        ) from error
    if settled:
        from oracle.formats.disk import write_text

        write_text(record, json.dumps(stamp | {"hashes": found}, indent=1))
    return found


def _stamp(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {
        "path": str(path),
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "inode": stat.st_ino,
    }


def _recalled(
    record: Path, stamp: dict[str, Any], spans: Mapping[str, tuple[int, int]]
) -> dict[str, str] | None:
    """What was remembered, or None where it is missing, damaged or of another file: then the hashes are made again."""
    try:
        value = strict_json.decode(disk.read_bytes(record))
        found: dict[str, str] = value.pop("hashes")
        good = (
            value == stamp
            and set(found) == set(spans)
            and all(len(bytes.fromhex(digest)) == 32 for digest in found.values())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if good else None


def _hashed(path: Path, spans: Mapping[str, tuple[int, int]], progress: Progress) -> dict[str, str]:
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
                    raise Refusal(
                        f"{path}: ends within {name}, expected {left} bytes more; it was changed while being read"
                    )
                digest.update(buffer[:n])
                left -= n
            found[name] = digest.hexdigest()
            done += stop - start
            progress(f"hashing {path.name}", done, total)
    return found

"""A folder's safetensors without reading a weight: which tensors there are, and the hash of each.

If there is an index, it rules: files that it does not name are not looked at. Everything else must
add up: every shard there and whole, every tensor in the one shard that the index says. Pickle files
are never opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from oracle.formats import disk, header, strict_json
from oracle.formats.errors import Refusal, brief
from oracle.formats.header import Tensor

Progress = Callable[[str, int, int], None]

INDEX = "model.safetensors.index.json"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
_AGAIN = "download the folder again"


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder by name, sorted; a Refusal names the file that is at fault."""
    found = (
        _by_index(folder) if os.path.exists(folder / INDEX) else header.read(_only_file(folder))[0]
    )
    if not found:
        what = "its safetensors hold no tensors, expected a model's"
        raise Refusal(what, where=folder, remedy="download it again")
    return dict(sorted(found.items()))


def _by_index(folder: Path) -> dict[str, Tensor]:
    where = _index(folder)
    found: dict[str, Tensor] = {}
    shards = [folder / shard for shard in sorted(set(where.values()))]
    for path in shards:
        if not os.path.exists(path):
            what = f"no such file, expected it as {INDEX} names it"
            raise Refusal(what, where=path, remedy=_AGAIN)
    for path in shards:
        for name, tensor in header.read(path)[0].items():
            if name in found:
                what = f"{name} is in {found[name].file.name} too, expected it once"
                raise Refusal(what, where=path, remedy=_AGAIN)
            if where.get(name) != path.name:
                expected = f"in {where[name]}" if name in where else "nowhere"
                what = f"holds {name}, expected it {expected} as {INDEX} says"
                raise Refusal(what, where=path, remedy=_AGAIN)
            found[name] = tensor
    missing = sorted(set(where) - set(found))
    if missing:
        what = f"lacks {missing[0]} (and {len(missing) - 1} more), expected it as {INDEX} says"
        raise Refusal(what, where=folder / where[missing[0]], remedy=_AGAIN)
    return found


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    where = read_object(path).get("weight_map")
    if not isinstance(where, dict) or not where:
        what = "no weight_map, expected an object of tensor and file names"
        raise Refusal(what, where=path, remedy="download it again")
    for name, shard in where.items():
        beside = isinstance(shard, str) and Path(shard).name == shard and "\0" not in shard
        if not beside or not shard.endswith(".safetensors"):
            expected = "expected the name of a safetensors file beside it"
            what = f"{name} is in {brief(shard)}, {expected}"
            raise Refusal(what, where=path, remedy="download it again")
    return where


def _only_file(folder: Path) -> Path:
    if (folder / "model.safetensors").exists():
        return folder / "model.safetensors"
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        what = f"{len(found)} safetensors files and no {INDEX}, expected it or model.safetensors"
        raise Refusal(what, where=folder, remedy="download the index too")
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if pickles:
        what = f"no safetensors, and {pickles[0]} is never opened (pickle files run code)"
        raise Refusal(what, where=folder, remedy="save it as safetensors first")
    what = "no model.safetensors, expected the weights beside config.json"
    raise Refusal(what, where=folder, remedy=_AGAIN)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of somebody's model, with numbers of any size."""
    remedy = "correct it or download it again"
    value = strict_json.read(path, remedy=remedy, any_numbers=True)
    if not isinstance(value, dict):
        what = f"a JSON {type(value).__name__}, expected an object"
        raise Refusal(what, where=path, remedy=remedy)
    return value


def fingerprint(found: Mapping[str, Tensor], *, cache: Path, progress: Progress) -> str:
    """sha256 over the sorted (name, stored dtype, shape, sha256 of the bytes) of all tensors.

    How they are spread over files makes no difference.
    """
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
    """sha256 of each span of a file, kept in `cache` while the file's stat stays the same."""
    path = path.resolve()
    record = cache / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    try:
        stamp = _stamp(path)
        known = _recalled(record, stamp, spans)
        if known is not None:
            return known
        started = time.time_ns()
        found = _hashed(path, spans, progress)
        settled = disk.settled(stamp["mtime_ns"], started) and _stamp(path) == stamp
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        remedy = "check the file or download it again"
        raise Refusal(why, where=path, remedy=remedy) from error
    if settled:
        disk.write_text(record, json.dumps(stamp | {"hashes": found}, indent=1))
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
    """What was kept; None if it is missing, damaged or of another file, to be made again."""
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
                    what = f"ends within {name}, expected {left} bytes more"
                    raise Refusal(what, where=path, remedy="it was changed while being read")
                digest.update(buffer[:n])
                left -= n
            found[name] = digest.hexdigest()
            done += stop - start
            progress(f"hashing {path.name}", done, total)
    return found

"""What a folder's safetensors hold, without reading a weight: headers and index, strictly.

An index rules where there is one: files that it does not name are not looked at. Everything else must add up: every
shard there and whole, every tensor in the one shard that the index says. Pickle files are never opened.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle.formats import disk, strict_json
from oracle.formats.errors import Refusal, brief

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

"""A folder's safetensors without reading a weight: which tensors there are, and where.

If there is an index, it rules: files that it does not name are not looked at. Everything else must
add up: every shard there and whole, every tensor in the one shard that the index says. Pickle files
are never opened.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from oracle.formats import header, strict_json
from oracle.formats.errors import Refusal, brief
from oracle.formats.header import Tensor

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

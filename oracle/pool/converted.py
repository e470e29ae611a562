"""A checkpoint's weights in the dtype that transformers computes in.

Where the files hold that dtype, they are mapped and take no memory of this process's own. Where
they do not, transformers would hold a converted copy of every weight; a large one is made once
instead, row by row, in a file of the cache folder, and mapped from there by this and later runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from oracle.formats import disk, header
from oracle.formats.errors import Refusal
from oracle.formats.progress import Progress, silent
from oracle.model import cache_folder
from oracle.model.checkpoint import Checkpoint, is_neighbour
from oracle.truth import unpack
from oracle.truth.config import OLD_FREQUENCIES
from oracle.truth.weights import DTYPES, Rows, Weights, row_blocks

FOLDER = "converted"
"""Where the files are, in the cache folder."""
LEAST = 10**9
"""Bytes from which on a file is made: it costs 0.7 s a GB once, where memory costs 0.6 s each time
(measured at 1.2 and 4.9 GB). What is smaller fits anywhere, and would fill the disk for nothing."""
_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ROOM = 2**28  # bytes that are left free on the disk
_PAGE = 4096


def tensors(
    checkpoint: Checkpoint, dtype: str, *, progress: Progress = silent
) -> dict[str, Tensor]:
    """The tensors that the fingerprint covers, packed ones unpacked and rounded once.

    Those that are few enough to be converted in memory may be in the stored dtype still.
    """
    weights, odd = Weights(checkpoint, dtype=dtype), _odd(checkpoint, dtype)
    size = sum(map(math.prod, odd.values())) * DTYPES[dtype].itemsize
    # Of a neighbour's weights transformers may keep some wider than the run's dtype.
    narrowed = is_neighbour(checkpoint) and dtype != "float32"
    kept = None if size < LEAST or narrowed or not odd else _kept(weights, odd, size, progress)
    found = {} if kept is None else _mapped(kept, odd)
    for name in sorted(checkpoint.weights.keys() - found.keys()):
        if name in checkpoint.packed:
            found[name] = weights(name).to(DTYPES[dtype])
        elif not name.endswith(OLD_FREQUENCIES):
            found[name] = weights.stored(name)
    return found


def _odd(checkpoint: Checkpoint, dtype: str) -> dict[str, tuple[int, ...]]:
    """The weights that are not stored as the run has them, and their shapes, matrices first."""
    found = {
        name: tuple(shape)
        for name, shape in checkpoint.weights.items()
        if not name.endswith(OLD_FREQUENCIES)
        and (name in checkpoint.packed or checkpoint.tensors[name].dtype != _STORED[dtype])
    }
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def path_of(checkpoint: Checkpoint, dtype: str) -> Path:
    """Where the converted weights are kept.

    What packed weights unpack to depends on their bits, which the fingerprint does not cover, and
    on the code that unpacks them.
    """
    name = f"{checkpoint.fingerprint}-{dtype}"
    if checkpoint.packed:
        how = {name: [p.bits, p.group_size] for name, p in checkpoint.packed.items()}
        source = disk.read_bytes(Path(unpack.__file__))
        text = json.dumps(how, sort_keys=True).encode()
        name += f"-{hashlib.sha256(text + source).hexdigest()[:16]}"
    return cache_folder.in_use(FOLDER) / f"{name}.safetensors"


def _kept(
    weights: Weights, odd: Mapping[str, tuple[int, ...]], size: int, progress: Progress
) -> Path | None:
    """The file, made if it is missing or damaged; None where only memory has room for it."""
    path = path_of(weights.checkpoint, weights.dtype)
    cache_folder.hold(path)
    if path.exists() and _whole(path, weights, odd):
        return path
    free = shutil.disk_usage(path.parent).free
    if free < size + _ROOM:
        if size < _memory() // 2:
            return None
        what = f"{free / 1e9:.1f} GB are free, expected {(size + _ROOM) / 1e9:.1f} GB"
        what = f"{what} for the weights in {weights.dtype}"
        remedy = "free some space or name another cache folder in MLXKV_CACHE"
        raise Refusal(what, where=path.parent, remedy=remedy)
    _write(path, weights, odd, progress)
    cache_folder.hold(path)
    return path


def _memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _whole(path: Path, weights: Weights, odd: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the file has these tensors, and of each the right first and last row."""
    try:
        declared = {n: (t.dtype, t.shape) for n, t in header.read(path)[0].items()}
    except Refusal:
        return False
    if declared != {name: (_STORED[weights.dtype], shape) for name, shape in odd.items()}:
        return False
    found = _mapped(path, odd)
    ends = {name: torch.tensor([0, shape[0] - 1]) for name, shape in odd.items()}
    return all(torch.equal(found[n][at], _converted(weights, n, at)) for n, at in ends.items())


def _write(
    path: Path, weights: Weights, odd: Mapping[str, tuple[int, ...]], progress: Progress
) -> None:
    entries, _ = header.declare({n: (_STORED[weights.dtype], s) for n, s in odd.items()})
    size = -(-(len(header.encoded(entries)) + 64) // _PAGE) * _PAGE  # so that matrices are aligned
    with disk.atomic(path) as part, part.open("wb") as file:
        file.write(header.encoded(entries, {"format": "pt"}, size=size))
        for i, (name, shape) in enumerate(odd.items()):
            progress(f"converting weights to {weights.dtype}, once", i, len(odd))
            for rows in row_blocks(shape[0], math.prod(shape[1:])):
                piece = _converted(weights, name, rows).contiguous()
                file.write(piece.view(torch.uint8).numpy().data)


def _converted(weights: Weights, name: str, rows: Rows) -> Tensor:
    """Rows of a weight as the run has them."""
    packed = name in weights.checkpoint.packed
    made = weights(name, rows=rows) if packed else weights.stored(name)[rows]
    return made.to(DTYPES[weights.dtype])


def _mapped(path: Path, names: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}

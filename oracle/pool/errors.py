"""How far each member of the transformers pool is from the truth: by position; keys and values by layer and head too.

Where there is no truth, from the mean of the members; the judge knows that this is too near by sqrt(1 - 1/n).
These are measures, not limits: the judge makes its floors from them, also with one member held out. For a run X and the
truth T at one position, e = X - T over the vocabulary: `shift` is its mean, `rms` and `peak` are those of e - shift.
numpy only, a block of positions at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from oracle.formats.errors import Refusal
from oracle.formats.run_folder import Pool
from oracle.formats.tensors import Array, Writer
from oracle.formats.trace import Trace

KINDS = ("eager", "sdpa")
_BLOCK = 2**21  # float64 numbers in one block of logits: 16 MB


def members_of(plans: Collection[str], kinds: Sequence[str] = KINDS) -> list[str]:
    """The pool of a model with these kinds of attention, for these plans; only the last kind also follows the chunked one."""
    wanted = [
        f"{kind}-{plan}"
        for kind in kinds
        for plan in ("full", "step", *(["chunked"] if kind == kinds[-1] else []))
    ]
    return [name for name in wanted if name.split("-")[1] in plans]


def write(
    path: Path, truth: Trace, members: Mapping[str, Trace], *, kinds: Sequence[str] = KINDS
) -> Pool:
    """Measures the members, in the order of `members_of`, into one file; returns what it says of them."""
    names = [name for name in members_of({"full", "step", "chunked"}, kinds) if name in members]
    n = len(truth.logits)
    layers = sum(1 for name in truth.arrays if name.endswith("/keys"))
    heads = _kv(truth, 0)[0].shape[0] if layers else 0
    shapes: dict[str, tuple[type, tuple[int, ...]]] = {
        name: (np.float64, (len(names), n)) for name in ("rms", "shift", "peak")
    }
    shapes["cached"] = (np.float64, (len(kinds), n))
    shapes |= {name: (np.float64, (len(names), layers, heads, n)) for name in ("keys", "values")}
    with Writer(path, shapes) as out:
        for m, name in enumerate(names):
            _logits(out.arrays, m, members[name], truth)
            for i in range(layers):
                found, true = _kv(members[name], i), _kv(truth, i)
                for kind, mine, ours in zip(("keys", "values"), found, true, strict=True):
                    out.arrays[kind][m, i] = _rms(mine - ours.astype(np.float64))
        for k, kind in enumerate(kinds):
            step, full = members[f"{kind}-step"].logits, members[f"{kind}-full"].logits
            for rows in blocks(full):
                out.arrays["cached"][k, rows] = _rms(step[rows].astype(np.float64) - full[rows])
        distinct = len(distinct_of({name: members[name] for name in names}))
        pool = Pool(names, list(kinds), distinct)
        out.finish(pool.to_json())
    return pool


def distinct_of(members: Mapping[str, Trace]) -> dict[str, Trace]:
    """Of members whose logits are bitwise equal the first."""
    first: dict[str, str] = {}
    for name, member in members.items():
        first.setdefault(_digest(member.logits), name)
    return {name: members[name] for name in first.values()}


def blocks(logits: Array) -> list[slice]:
    """The rows of (n, V) logits in pieces that fit into memory as float64."""
    n, width = logits.shape
    rows = max(1, _BLOCK // width)
    return [slice(start, min(start + rows, n)) for start in range(0, n, rows)]


def require_finite(trace: Trace) -> None:
    """Refuses a trace that holds NaN or infinity, by its first place."""
    for name, array in trace.arrays.items():
        pieces = blocks(array) if name == "logits" else [slice(None)]
        for rows in pieces:
            if not np.isfinite(array[rows]).all():
                at = (
                    f" at position {trace.positions[rows][~np.isfinite(array[rows]).all(axis=1)][0]}"
                    if name == "logits"
                    else ""
                )
                raise Refusal(
                    f"{trace.label}: {name} is not finite{at}, expected finite numbers; check the weights or use another --dtype"
                )


def _logits(out: Mapping[str, Array], m: int, member: Trace, truth: Trace) -> None:
    if member.logits.shape != truth.logits.shape or not np.array_equal(
        member.positions, truth.positions
    ):
        raise ValueError(
            f"{member.label}: logits {member.logits.shape} at other positions than the truth's {truth.logits.shape}"
        )
    for rows in blocks(truth.logits):
        error = member.logits[rows] - truth.logits[rows]
        shift = error.mean(axis=1)
        error -= shift[:, None]
        out["shift"][m, rows] = shift
        out["rms"][m, rows] = _rms(error)
        out["peak"][m, rows] = np.abs(error).max(axis=1)


def _kv(trace: Trace, layer: int) -> tuple[Array, Array]:
    found = trace.kv("a", layer)
    if found is None:
        raise ValueError(f"{trace.label}: no keys and values of layer {layer}")
    return found


def _rms(x: Array) -> Array:
    result: Array = np.sqrt(np.square(x, dtype=np.float64).mean(axis=-1))
    return result


def _digest(logits: Array) -> str:
    digest = hashlib.sha256()
    for rows in blocks(logits):
        digest.update(np.ascontiguousarray(logits[rows]).tobytes())
    return digest.hexdigest()

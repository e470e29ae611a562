"""How far each member of the transformers pool is from the truth, by position.

For keys and values also by layer and head. Where there is no truth, the distance is that from the
mean of the members; the judge knows that this is too near by sqrt(1 - 1/n). These are measures, not
limits: the judge makes its noise floors from them, also with one member held out. For a run X and
the truth T at one position, e = X - T over the vocabulary: `shift` is its mean, `rms` and `peak`
are those of e - shift. numpy only, a block of positions at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from oracle.formats import noise
from oracle.formats.contents import KINDS, members_of
from oracle.formats.errors import Refusal
from oracle.formats.run_folder import Pool, ordinary
from oracle.formats.tensors import Array, Shapes, writer
from oracle.formats.trace import Trace

_BLOCK = 2**21  # float64 numbers in one block of logits: 16 MB


def write(
    path: Path,
    truth: Trace,
    members: Mapping[str, Trace],
    *,
    kinds: Sequence[str] = KINDS,
    cached: str = "step",
    widest: int = 0,
) -> Pool:
    """Measures the members, in the order of `members_of`, into one file.

    Logits have a column for each row of the truth, keys and values one for each position. `cached`
    is the plan that is held against the full one, `widest` the longest row that the sequential
    member added up.
    """
    names = [name for name in members_of({"full", "step", "chunked"}, kinds) if name in members]
    distinct = len(distinct_of({name: members[name] for name in names}))
    pool = Pool(names, list(kinds), distinct, widest)
    with writer(path, _shapes(truth, len(names), len(kinds))) as out:
        for m, name in enumerate(names):
            _measure_logits(out.arrays, m, members[name], truth)
            _measure_cache(out.arrays, m, members[name], truth)
        for k, kind in enumerate(kinds):
            held = members[f"{kind}-{cached}"]
            out.arrays["cached"][k] = apart(held, members[f"{kind}-full"])
        out.finish(pool.to_json())
    return pool


def of_member(member: Trace, truth: Trace) -> dict[str, Iterable[Array]]:
    """One run's errors, as `noise.Errors` has them."""
    shapes = _shapes(truth, 1, 0)
    out = {name: np.empty(shapes[name][1]) for name in ("rms", "shift", "peak")}
    _measure_logits(out, 0, member, truth)
    return {name: array[0] for name, array in out.items()} | {
        kind: _of_layers(member, truth, kind) for kind in noise.CACHE
    }


def apart(one: Trace, other: Trace) -> Array:
    """(rows,): the rms of what two runs of the same rows are apart, over the vocabulary."""
    found = np.empty(len(other.logits))
    for rows in blocks(other.logits):
        found[rows] = _rms(one.logits[rows].astype(np.float64) - other.logits[rows])
    return found


def _shapes(truth: Trace, members: int, kinds: int) -> Shapes:
    rows, layers = len(truth.logits), _layers(truth)
    heads, n, _ = _kv(truth, 0)[0].shape if layers else (0, rows, 0)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("rms", "shift", "peak"), (members, rows))
    shapes |= {"cached": (kinds, rows)} | dict.fromkeys(
        ("keys", "values"), (members, layers, heads, n)
    )
    return {name: (np.float64, shape) for name, shape in shapes.items()}


def distinct_of(members: Mapping[str, Trace]) -> dict[str, Trace]:
    """The ordinary members without those whose logits are bitwise equal to an earlier one's."""
    first: dict[str, str] = {}
    for name in ordinary(members):
        first.setdefault(_digest(members[name].logits), name)
    return {name: members[name] for name in first.values()}


def blocks(logits: Array) -> list[slice]:
    """The rows of (n, V) logits in pieces that fit into memory as float64."""
    n, width = logits.shape
    rows = max(1, _BLOCK // width)
    return [slice(start, min(start + rows, n)) for start in range(0, n, rows)]


def require_finite(trace: Trace) -> None:
    """Refuses a trace that holds NaN or infinity, by its first place."""
    for name, array in trace.arrays.items():
        for rows in blocks(array) if name == "logits" else [slice(None)]:
            finite = np.isfinite(array[rows])
            if finite.all():
                continue
            at = ""
            if name == "logits":
                at = f" at position {trace.positions[rows][~finite.all(axis=1)][0]}"
            what = f"{name} is not finite{at}, expected finite numbers"
            remedy = "check the weights or use another --dtype"
            raise Refusal(what, where=trace.label, remedy=remedy)


def _measure_logits(out: Mapping[str, Array], m: int, member: Trace, truth: Trace) -> None:
    same = np.array_equal(member.positions, truth.positions)
    if member.logits.shape != truth.logits.shape or not same:
        has, expected = member.logits.shape, truth.logits.shape
        raise ValueError(f"{member.label}: logits {has} at other positions than {expected}")
    for rows in blocks(truth.logits):
        error = member.logits[rows] - truth.logits[rows]
        shift = error.mean(axis=1)
        error -= shift[:, None]
        out["shift"][m, rows] = shift
        out["rms"][m, rows] = _rms(error)
        out["peak"][m, rows] = np.abs(error).max(axis=1)


def _measure_cache(out: Mapping[str, Array], m: int, member: Trace, truth: Trace) -> None:
    for kind in noise.CACHE:
        for i, errors in enumerate(_of_layers(member, truth, kind)):
            out[kind][m, i] = errors


def _of_layers(member: Trace, truth: Trace, kind: str) -> Iterator[Array]:
    """(K, n) of each layer's keys, or values; a head at a time, as a long sequence's are large."""
    for i in range(_layers(truth)):
        mine, ours = (_kv(run, i)[noise.CACHE.index(kind)] for run in (member, truth))
        if mine.shape != ours.shape:
            what = f"{kind} of layer {i} have shape {mine.shape}, expected {ours.shape}"
            raise ValueError(f"{member.label}: {what}")
        yield np.stack([_rms(x - y.astype(np.float64)) for x, y in zip(mine, ours, strict=True)])


def _layers(trace: Trace) -> int:
    return sum(name.endswith("/keys") for name in trace.arrays)


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

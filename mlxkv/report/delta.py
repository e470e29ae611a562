"""Stored traces side by side, as lines for a terminal. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from mlxkv.judge.delta import Run
from mlxkv.judge.stored import Compared
from mlxkv.report.text import columns, number
from oracle.trace import Trace

_TRACES = ("", "run", "dtype", "rows", "weights", "file")
_PAIRS = ("a", "b", "rows", "max |d|", "first", "last", "rms", "top-1", "max |b|", "NMSE (dB)", "1 - cosine", "KL (nats)")


def console(traces: Sequence[Trace], compared: Sequence[Compared]) -> str:
    """What `mlxkv delta` prints: the files by number, then every pair over the positions that both have."""
    files = columns(_TRACES, [[str(i), *_file(one)] for i, one in enumerate(traces, 1)], left={0, 1, 2, 4, 5})
    return "\n".join([*files, "", *columns(_PAIRS, [_cells(one) for one in compared], left=set())]) + "\n"


def _file(one: Trace) -> list[str]:
    weights = (one.meta.fingerprint or "undeclared")[:16]
    return [str(Run(one.meta.engine, one.meta.plan.name)), one.meta.dtype, str(len(one.positions)), weights, str(one.path)]


def _cells(compared: Compared) -> list[str]:
    p, f = compared.pair, compared.figures
    deltas = [number(x) for x in (p.max_abs, p.first_max, p.last_max, p.rms)]
    tools = [f"{f.nmse_db:.1f}", number(1 - f.cosine), number(f.kl)]
    return [str(compared.a + 1), str(compared.b + 1), str(p.rows), *deltas, f"{p.top1_equal}/{p.rows}", f"{p.max_abs_ref:.3f}", *tools]

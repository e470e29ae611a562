"""`mlxkv delta`: stored traces side by side. Nothing runs and nothing is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mlxkv.judge import alignment
from mlxkv.judge.alignment import Aligned
from mlxkv.judge.delta import Run
from mlxkv.report.phrases import figure_cells, pair_cells
from mlxkv.report.text import columns, pretty
from oracle.formats import trace
from oracle.formats.trace import Trace

FORMAT = "mlxkv-delta/1"
_TRACES = ("", "run", "dtype", "rows", "weights", "file")
_DELTAS = ("max |d|", "first", "last", "rms", "top-1", "max |b|")
_PAIRS = ("a", "b", "rows", *_DELTAS, "NMSE (dB)", "1 - cosine", "KL (nats)")


def delta(paths: Sequence[Path], *, as_json: bool) -> str:
    """Every pair of the traces, over the positions that both have, as text or as JSON."""
    traces = [trace.read(path) for path in paths]
    aligned = alignment.align(traces)
    if not as_json:
        return console(traces, aligned)
    files = [{"path": str(t.path), "rows": len(t.positions)} | t.meta.to_json() for t in traces]
    pairs = [
        {"a": one.a, "b": one.b, "positions": one.positions} | _numbers(one) for one in aligned
    ]
    return pretty({"format": FORMAT, "traces": files, "pairs": pairs})


def _numbers(one: Aligned) -> dict[str, object]:
    """Both tables' numbers in one; the runs are named beside them already."""
    both = asdict(one.figures) | asdict(one.pair)
    return {name: value for name, value in both.items() if name not in ("a", "b", "plan")}


def console(traces: Sequence[Trace], aligned: Sequence[Aligned]) -> str:
    """What `mlxkv delta` prints: the files by number, then every pair."""
    files = [[str(i), *_file(one)] for i, one in enumerate(traces, 1)]
    pairs = [_cells(one) for one in aligned]
    lines = columns(_TRACES, files, left={0, 1, 2, 4, 5})
    return "\n".join([*lines, "", *columns(_PAIRS, pairs, left=set())]) + "\n"


def _file(one: Trace) -> list[str]:
    run = str(Run(one.meta.engine, one.meta.plan.name))
    weights = (one.meta.fingerprint or "undeclared")[:16]
    return [run, one.meta.dtype, str(len(one.positions)), weights, str(one.path)]


def _cells(one: Aligned) -> list[str]:
    p = one.pair
    deltas = [str(one.a + 1), str(one.b + 1), str(p.rows), *pair_cells(p), f"{p.max_abs_ref:.3f}"]
    return [*deltas, *figure_cells(one.figures)]

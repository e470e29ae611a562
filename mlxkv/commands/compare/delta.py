"""`mlxkv delta`: stored traces side by side. Nothing runs and nothing is judged; neither MLX nor torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mlxkv.judge import alignment
from mlxkv.judge.alignment import Compared
from mlxkv.judge.delta import Run
from mlxkv.judge.result import plain
from mlxkv.report.text import columns, number, pretty
from oracle.formats import trace
from oracle.formats.trace import Trace

FORMAT = "mlxkv-delta/1"
_TRACES = ("", "run", "dtype", "rows", "weights", "file")
_PAIRS = (
    "a",
    "b",
    "rows",
    "max |d|",
    "first",
    "last",
    "rms",
    "top-1",
    "max |b|",
    "NMSE (dB)",
    "1 - cosine",
    "KL (nats)",
)


def delta(paths: Sequence[Path], *, as_json: bool) -> str:
    """Every pair of the traces, over the positions that both have, as text or as JSON."""
    traces = [trace.read(path) for path in paths]
    compared = alignment.compare(traces)
    if not as_json:
        return console(traces, compared)
    files = [{"path": str(t.path), "rows": len(t.positions)} | t.meta.to_json() for t in traces]
    pairs = [{"a": c.a, "b": c.b, "positions": c.positions} | _numbers(c) for c in compared]
    return pretty(plain({"format": FORMAT, "traces": files, "pairs": pairs}))


def _numbers(compared: Compared) -> dict[str, object]:
    """Both tables' numbers in one; the runs are named beside them already."""
    both = asdict(compared.figures) | asdict(compared.pair)
    return {name: value for name, value in both.items() if name not in ("a", "b", "plan")}


def console(traces: Sequence[Trace], compared: Sequence[Compared]) -> str:
    """What `mlxkv delta` prints: the files by number, then every pair over the positions that both have."""
    files = columns(
        _TRACES, [[str(i), *_file(one)] for i, one in enumerate(traces, 1)], left={0, 1, 2, 4, 5}
    )
    return (
        "\n".join([*files, "", *columns(_PAIRS, [_cells(one) for one in compared], left=set())])
        + "\n"
    )


def _file(one: Trace) -> list[str]:
    weights = (one.meta.fingerprint or "undeclared")[:16]
    return [
        str(Run(one.meta.engine, one.meta.plan.name)),
        one.meta.dtype,
        str(len(one.positions)),
        weights,
        str(one.path),
    ]


def _cells(compared: Compared) -> list[str]:
    p, f = compared.pair, compared.figures
    deltas = [number(x) for x in (p.max_abs, p.first_max, p.last_max, p.rms)]
    tools = [f"{f.nmse_db:.1f}", number(1 - f.cosine), number(f.kl)]
    return [
        str(compared.a + 1),
        str(compared.b + 1),
        str(p.rows),
        *deltas,
        f"{p.top1_equal}/{p.rows}",
        f"{p.max_abs_ref:.3f}",
        *tools,
    ]

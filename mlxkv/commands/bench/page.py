"""What was measured as lines for a terminal and as a Markdown page. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from mlxkv.commands.bench.ask import PACKED
from mlxkv.commands.bench.kernels import SEVERAL, VIEWS
from mlxkv.commands.bench.result import Bench, Cell, Side, Steps
from mlxkv.report.text import code, columns, environment_table, filled, markdown_table

WIDTH = 80
_HEAD = ("port", "mlx-lm", "ratio", "range", "peak MB", "of copy")
_STEPS = ("primitives", "kernels", "ms to build", "ratio")
_PLOT = "the port's speed over mlx-lm's: median and range of each cell's pairs"
_WORDS = {
    "port, mlx-lm": "tokens per second, by the median turn; of a batch those of all sequences",
    "ratio": "the port's speed over mlx-lm's: the median of pairs of turns that follow each other, "
    "so that a machine whose speed drifts slows both; above 1 the port is faster",
    "range": "the least and the greatest ratio of a pair",
    "peak MB": "the most that MLX's arrays took in a turn, weights and cache included, of both",
    "of copy": "bytes that a decode step must read, the weights once and the cache's rows, over "
    "its time, by what a copy of 256 MB reads and writes; a step that reads each byte once and "
    "waits for nothing else would be at about 100 %",
    PACKED: "MLX's affine 4 bits in groups of 64, made of the model at hand; float32 arithmetic. "
    "Some 30 kernels too many are counted of both engines: a CPU unpacks the embedding's row by "
    "small ones, and a GPU by one",
    "primitives": "nodes of the graph from a token's id to the greedy next one, with one for each "
    "call of `mx.fast`, as on a GPU; what `mx.compile` fused is one",
    "kernels": "what a GPU runs for them. No kernel: " + ", ".join(sorted(VIEWS)) + ", whose "
    "`eval_gpu` shares the input's buffer (MLX 0.32, mlx/backend/gpu/primitives.cpp). Two: "
    + ", ".join(sorted(SEVERAL))
    + ". Concatenate: one for each input. All else: one",
    "ms to build": "milliseconds of Python and MLX until the graph is there and nothing is "
    "computed yet; the ratio is the port's over mlx-lm's, below 1 the port's is built faster",
}


def console(done: Bench) -> str:
    """What `mlxkv bench` prints, in 80 columns."""
    env = done.environment
    engine = f"mlx {env['mlx']} {env['device']} ({env['blas'].split(' (')[0]})"
    first = f"{done.model}  {engine}  {env['device_name']}"
    lines = [*filled(first, width=WIDTH), ""]
    lines += _tables(done, columns)
    lines += columns(("a decode step, port/mlx-lm", *_STEPS), _steps(done.steps), left={0})
    lines += ["", f"a copy moves {done.copy / 1e9:.1f} GB/s"]
    for one in done.left_out:
        lines += filled(f"left out, as a turn would take minutes: {one}", width=WIDTH)
    for warning in done.warnings:
        lines += filled(f"warning: {warning}", width=WIDTH)
    return "\n".join(lines) + "\n"


def markdown(done: Bench, *, commands: Sequence[str], svg: str | None = None) -> str:
    """The page; `svg` is the picture's name beside it."""
    parts = [
        [f"# The port's speed beside mlx-lm's: {done.model}"],
        [f"- **Warning**: {warning}" for warning in done.warnings],
        [f"![{_PLOT}]({svg})"] if svg else [],
        ["## Speed", "", "Tokens per second.", "", *_tables(done, markdown_table)],
        [f"A copy moves {done.copy / 1e9:.1f} GB/s, read and written."],
        [f"- Left out, as a turn would take minutes: {one}" for one in done.left_out],
        ["## One decode step", "", "What a GPU would run of it, port/mlx-lm.", ""],
        markdown_table(("", *_STEPS), _steps(done.steps), left={0}),
        *(_kinds(steps) for steps in done.steps[:1]),
        ["## Environment", "", *environment_table({"port": done.environment})],
        ["## Reproduce", "", "```sh", *commands, "```"],
        ["## Words", "", *(f"- **{word}**: {meaning}" for word, meaning in _WORDS.items())],
    ]
    return "\n\n".join("\n".join(part).rstrip() for part in parts if part) + "\n"


def _tables(done: Bench, table: Callable[..., list[str]]) -> list[str]:
    """A table for each dtype and batch, an empty line after each."""
    lines = []
    for group, some in groupby(done.cells, lambda cell: cell.group):
        rows = [_row(cell, done.copy) for cell in some]
        lines += [*table((group, *_HEAD), rows, left={0}), ""]
    return lines


def _row(cell: Cell, copy: float) -> list[str]:
    sides = (cell.port, cell.other)
    low, high = min(cell.ratios), max(cell.ratios)
    peaks = "/".join(_megabytes(side.peak) for side in sides)
    speeds = [_speed(side) for side in sides]
    moved = [cell.bandwidth(side) for side in sides]
    share = "/".join(f"{100 * one / copy:.0f}" for one in moved if one is not None)
    spread = f"{low:.2f} to {high:.2f}"
    return [cell.name, *speeds, f"{cell.ratio:.2f}", spread, peaks, f"{share}%" if share else "-"]


def _speed(side: Side) -> str:
    return f"{side.speed:,.1f}" if side.speed < 1000 else f"{side.speed:,.0f}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f}" if size >= 1e7 else f"{size / 1e6:.1f}"


def _steps(some: Sequence[Steps]) -> list[list[str]]:
    return [
        [
            steps.name,
            f"{steps.port.primitives:,}/{steps.other.primitives:,}",
            f"{steps.port.kernels:,}/{steps.other.kernels:,}",
            "/".join(f"{1e3 * side.build:.2f}" for side in (steps.port, steps.other)),
            f"{steps.ratio:.2f}",
        ]
        for steps in some
    ]


def _kinds(steps: Steps) -> list[str]:
    """Every primitive of both graphs, those that run kernels first."""
    sides = (steps.port.kinds, steps.other.kinds)
    names = sorted(
        {*sides[0], *sides[1]}, key=lambda n: (n in VIEWS, -sum(s.get(n, 0) for s in sides), n)
    )
    rows = [
        [code(name), *(f"{side.get(name, 0):,}" for side in sides), _each(name)] for name in names
    ]
    table = markdown_table(("primitive", "port", "mlx-lm", "kernels each"), rows, left={0})
    return [f"In {steps.name}:", "", *table]


def _each(name: str) -> str:
    if name == "Concatenate":
        return "as inputs"
    return "-" if name in VIEWS else str(SEVERAL.get(name, 1))

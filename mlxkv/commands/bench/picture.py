"""Each cell's ratio with its range, as SVG; in the style of `mlxkv.report.plots`."""

from __future__ import annotations

import numpy as np

from mlxkv.commands.bench.result import Bench
from mlxkv.report import plots

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9")
_MARKS = "os^Dv<"


def ratios(done: Bench) -> str:
    """The first cell on top; at 1 both engines are as fast."""
    groups = list(dict.fromkeys(cell.group for cell in done.cells))
    names = [cell.name for cell in done.cells]
    with plots.drawing(9, 1.5 + 0.25 * len(names)) as figure:
        axes = figure.add_subplot()
        axes.axvline(1, color="#000000", linewidth=1)
        for i, group in enumerate(groups):
            some = [(at, cell) for at, cell in enumerate(done.cells) if cell.group == group]
            x = np.array([cell.ratio for _, cell in some])
            low = x - [min(cell.ratios) for _, cell in some]
            high = [max(cell.ratios) for _, cell in some] - x
            looks = {
                "color": _COLOURS[i % len(_COLOURS)],
                "marker": _MARKS[i % len(_MARKS)],
                "markersize": 5,
                "linestyle": "",
                "capsize": 3,
            }
            axes.errorbar(x, [at for at, _ in some], xerr=[low, high], label=group, **looks)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set(title=f"{done.model}: the port's speed over mlx-lm's")
        axes.set(xlabel="ratio: median and range of pairs; above 1 the port is faster")
        axes.grid(axis="x", color="#DDDDDD", linewidth=0.5)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        return plots.svg(figure)

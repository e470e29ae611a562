"""KL against bytes per token as SVG, both by decades; in the style of `mlxkv.report.plots`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlxkv.commands.cost import metrics
from mlxkv.commands.cost.result import Cost, Measured
from mlxkv.commands.cost.scoring import FAR
from mlxkv.report import plots
from mlxkv.report.text import power

_KINDS = {
    "full": ("#000000", "o"),
    "quantised": ("#0072B2", "s"),
    "window": ("#D55E00", "^"),
    "weights": ("#009E73", "D"),
    "compute": ("#CC79A7", "v"),
}
_LEAST = 1e-3  # of the noise: what reads 0 is drawn there


def kl_against_bytes(cost: Cost) -> str:
    """Each variant with its standard error, the best of each size, and float32's noise."""
    noise = cost.noise.all.mean_kld.mean
    shown = [one for one in cost.shown if one is not cost.noise]
    with plots.drawing(9, 5.5) as figure:
        axes = figure.add_subplot()
        axes.set(xscale="log", yscale="log")
        label = f"float32's noise, up to {metrics.NOISE:g} times"
        axes.axhspan(noise / 30, noise * metrics.NOISE, color="#BBBBBB", alpha=0.6, label=label)
        best = pareto(cost.shown)
        x, y = [one.per_token for one in best], [_y(one, noise) for one in best]
        looks = {"color": "#666666", "linewidth": 1, "linestyle": "--", "zorder": 1}
        axes.plot(x, y, label="nothing smaller loses less", **looks)
        for kind in _KINDS:
            _points(axes, kind, [one for one in (cost.noise, *shown) if _kind(one) == kind], noise)
        _names(axes, cost.shown, noise)
        axes.set(title=f"{cost.model}: what a smaller cache costs")
        axes.set(xlabel=f"bytes of the cache per token, after {FAR:,} tokens")
        axes.set(ylabel="mean KL against the float64 truth (nats)")
        axes.yaxis.set_major_formatter(lambda value, _: power(value))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.xaxis.set_minor_formatter(lambda value, _: f"{value:,.0f}" if _round(value) else "")
        axes.tick_params(axis="x", which="minor", length=3.5)
        axes.yaxis.set_minor_formatter(lambda *_: "")
        axes.margins(x=0.15)
        sizes = [one.per_token for one in cost.shown]
        if min(sizes) == max(sizes):  # which leaves a margin nothing to be a share of
            axes.set_xlim(sizes[0] / 2, sizes[0] * 2)
        axes.grid(color="#DDDDDD", linewidth=0.5)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        return plots.svg(figure)


def pareto(shown: Sequence[Measured]) -> list[Measured]:
    """The variants that none is smaller than at no more KL, from the largest to the smallest."""
    found: list[Measured] = []
    for one in sorted(shown, key=lambda one: (one.per_token, one.all.mean_kld.mean)):
        if not found or one.all.mean_kld.mean < found[-1].all.mean_kld.mean:
            found.append(one)
    return found[::-1]


def _points(axes: Any, kind: str, some: Sequence[Measured], noise: float) -> None:
    if not some:
        return
    colour, marker = _KINDS[kind]
    x, y = np.array([one.per_token for one in some]), np.array([_y(one, noise) for one in some])
    error = np.nan_to_num([one.all.mean_kld.error for one in some])
    down = np.minimum(error, 0.9 * y)  # an error as large as the mean has no end by decades
    looks = {"color": colour, "marker": marker, "markersize": 6, "linestyle": "", "capsize": 3}
    axes.errorbar(x, y, yerr=[down, error], label=_LABELS[kind], **looks)


_LABELS = {
    "full": "every row",
    "quantised": "fewer bits",
    "window": "fewer rows",
    "weights": "rounded weights, full cache",
    "compute": "half-precision compute",
}


def _kind(one: Measured) -> str:
    variant = one.variant
    if variant.bits:
        return "weights"
    if variant.dtype != "float32":
        return "compute"
    lossy = variant.kind.lossy
    return "quantised" if lossy == "depends" else lossy or "full"


def _names(axes: Any, shown: Sequence[Measured], noise: float) -> None:
    """Each variant's name: below the line for those on it, else to the right where there is room.

    Where two would lie on each other, the one that loses less goes lower.
    """
    best, taken = pareto(shown), list[tuple[str, float, float]]()
    largest = max(one.per_token for one in shown)
    for one in sorted(shown, key=lambda one: -one.all.mean_kld.mean):
        ha = "right" if one in best or one.per_token > 0.6 * largest else "left"
        x, y = np.log10(one.per_token), np.log10(_y(one, noise))
        near = sum(ha == side and abs(x - a) < 0.1 and y > b - 0.45 for side, a, b in taken)
        taken.append((ha, x, y - 0.3 * near))
        offset = (6 if ha == "left" else -6, (-8 if one in best else 3) - 8 * near)
        looks = {"textcoords": "offset points", "fontsize": 7, "ha": ha}
        axes.annotate(one.variant.name, (one.per_token, _y(one, noise)), xytext=offset, **looks)


def _y(one: Measured, noise: float) -> float:
    return max(one.all.mean_kld.mean, _LEAST * noise)


def _round(value: float) -> bool:
    """Whether a tick is 2 or 5 times a power of ten."""
    return round(float(value / 10 ** np.floor(np.log10(value))), 6) in (2.0, 5.0)

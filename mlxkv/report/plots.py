"""The error of each plan position by position, beside the floor and the limit, and of each layer as a strip, as SVG.

matplotlib is imported when a plot is asked for. The text carries no date and a fixed hash salt: the same numbers give
the same file.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlxkv.commands.locate.place import Strip
from mlxkv.judge.result import Curve
from mlxkv.report.text import power, quoted
from oracle.formats.errors import Refusal

# Okabe and Ito's colours, told apart by colour-blind readers; marker and dash tell the lines apart without any colour.
_LOOKS = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
)
_SETTINGS = {
    "svg.hashsalt": "mlxkv",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
}
_MOST_TOKENS = 40
_MOST_COLUMNS = 120  # of a strip: more positions share a column, which shows the largest
_DECADES = (-17, 4)  # of its colours; what is outside has the last one's


def load() -> tuple[Any, Any, Any]:
    """matplotlib and its two classes used here; more than a second, which a caller may spend while it waits."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Refusal(
            "plot: matplotlib is not installed, expected it for the SVG; pip install 'mlxkv[port]'"
        ) from error
    return matplotlib, FigureCanvasSVG, Figure


def error_by_position(
    curves: Sequence[Curve],
    floor: Sequence[float],
    *,
    limit: float,
    texts: Sequence[str] = (),
    title: str = "Error by position",
) -> str:
    """`floor` has a value for each position; `limit` is in floors. `texts`, the tokens, stand below up to 40 positions."""
    matplotlib, FigureCanvasSVG, Figure = load()
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # glyphs missing from the font that only measures the text
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        FigureCanvasSVG(figure)
        axes, at = figure.add_subplot(), np.arange(len(floor))
        axes.fill_between(at, floor, color="#BBBBBB", alpha=0.6, linewidth=0, label="noise floor")
        axes.plot(
            at,
            np.multiply(floor, limit),
            color="#000000",
            linewidth=1,
            label=f"limit, {limit:g} floors",
        )
        for i, curve in enumerate(curves):
            color, marker, line = _LOOKS[i % len(_LOOKS)]
            size = 4 if len(floor) <= _MOST_TOKENS else 0
            rms = np.where(np.greater(curve.rms, 0), curve.rms, np.nan)
            axes.plot(
                curve.positions,
                rms,
                color=color,
                marker=marker,
                linestyle=line,
                markersize=size,
                linewidth=1.2,
                label=curve.plan,
            )
        axes.set(
            title=title,
            ylabel="rms error against float64 (logits)",
            yscale="log",
            xlim=(-0.5, len(floor) - 0.5),
        )
        # Not matplotlib's own 10^-5: that is mathematics, which is switched off so that no token is read as such.
        axes.yaxis.set_major_formatter(lambda value, _: power(value))
        axes.yaxis.set_minor_formatter(lambda *_: "")
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.5)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        _label_positions(axes, len(floor), texts)
        return _svg(figure)


def heat_strip(
    strip: Strip,
    *,
    texts: Sequence[str] = (),
    at: tuple[int, int] | None = None,
    title: str = "Error by layer",
) -> str:
    """A strip of colours, layers upwards and positions to the right; `at`, a layer and a position, is outlined.

    What is not finite is grey. One colour to a decade; the limit stands in the title of the colours.
    """
    matplotlib, FigureCanvasSVG, Figure = load()
    values = np.array(strip.values, np.float64)  # None becomes NaN
    (layers, n), (low, high) = values.shape, _DECADES
    size = -(-n // _MOST_COLUMNS)
    starts = np.arange(0, n, size)
    # A column that holds one value that is not finite is not finite.
    shown = np.clip(np.maximum.reduceat(values, starts, axis=1), 10.0**low, 0.999 * 10.0**high)
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        figure = Figure(figsize=(9, min(8.0, 2.5 + 0.18 * layers)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot(facecolor="#BBBBBB")
        decades = [10.0**i for i in range(low, high + 1)]
        norm = matplotlib.colors.BoundaryNorm(decades, 256)
        edges = np.append(starts, n) - 0.5
        mesh = axes.pcolormesh(
            edges,
            np.arange(layers + 1) - 0.5,
            np.ma.masked_invalid(shown),
            norm=norm,
            cmap="cividis",
            edgecolors="face",
            linewidth=0.2,
        )
        bar = figure.colorbar(
            mesh, ax=axes, ticks=decades[::3], format=lambda value, _: power(value)
        )
        bar.set_label(f"limit {power(strip.limit)}")
        if at is not None:
            x = int(np.searchsorted(starts, at[1], side="right")) - 1
            corner, wide = (edges[x], at[0] - 0.5), edges[x + 1] - edges[x]
            axes.add_patch(
                matplotlib.patches.Rectangle(
                    corner, wide, 1, fill=False, edgecolor="#D55E00", linewidth=2
                )
            )
        axes.set(title=title, ylabel="layer")
        axes.yaxis.get_major_locator().set_params(integer=True)
        _label_positions(axes, n, texts)
        return _svg(figure)


def _label_positions(axes: Any, n: int, texts: Sequence[str]) -> None:
    if len(texts) == n <= _MOST_TOKENS:
        axes.set_xticks(
            np.arange(n),
            [f"{quoted(text)} {i}" for i, text in enumerate(texts)],
            rotation=90,
            fontsize=8,
        )
        axes.set_xlabel("token and position")
    else:
        axes.set_xlabel("position")


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()

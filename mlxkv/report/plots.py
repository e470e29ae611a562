"""Errors as SVG: of each plan by position, beside floor and limit; of each layer as a strip.

matplotlib is imported when a plot is asked for. The text carries no date and a fixed hash salt, so
the same numbers give the same file.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from mlxkv.judge.result import Curve, Strip
from mlxkv.report.text import power, quoted
from oracle.formats.errors import Refusal, install

# Okabe and Ito's colours, which colour-blind readers can tell apart; marker and dash tell the lines
# apart without any colour.
_COLOURS = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
_LOOKS = tuple(zip(_COLOURS, "os^D", ("-", "--", "-.", ":"), strict=True))
_SETTINGS = {
    "svg.hashsalt": "mlxkv",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
}
_MOST_TOKENS = 40
# Of a strip: more positions share a column, which shows the largest. A cell takes 230 bytes.
_MOST_COLUMNS, _MOST_CELLS = 120, 8000
_DECADES = (-17, 4)  # of its colours; what is outside has the last one's


def load() -> Any:
    """matplotlib, with its SVG canvas; a Refusal where it is not installed."""
    try:
        import matplotlib
        import matplotlib.backends.backend_svg
        import matplotlib.figure
    except ImportError as error:
        what = "matplotlib is not installed, expected it for the SVG"
        raise Refusal(what, where="plot", remedy=install("port")) from error
    return matplotlib


def load_aside() -> None:
    """Begins to import matplotlib in a thread, which takes a second that a caller may wait out."""

    def work() -> None:
        with suppress(Refusal):  # it is said when a plot is asked for
            load()

    threading.Thread(target=work, daemon=True).start()


def error_by_position(
    curves: Sequence[Curve],
    floor: Sequence[float],
    *,
    limit: float,
    at: Sequence[int] | None = None,
    texts: Sequence[str] = (),
    title: str = "Error by position",
) -> str:
    """The curves over the floor, which has a value at each of the positions `at` (None: all).

    `limit` is in floors. `texts` are the tokens, which stand below up to 40 positions. Of long
    curves a part is drawn, as `Curve.thinned` says.
    """
    at = range(len(floor)) if at is None else at
    n = max(at, default=-1) + 1
    # Where not every position has a row, marks show which have.
    size = 4 if n <= _MOST_TOKENS else 2 if len(at) < n else 0
    least = Curve("noise floor", tuple(at), tuple(floor)).thinned
    with drawing(9, 4.5) as figure:
        axes, where = figure.add_subplot(), least.positions
        axes.fill_between(
            where, least.rms, color="#BBBBBB", alpha=0.6, linewidth=0, label=least.plan
        )
        above, label = np.multiply(least.rms, limit), f"limit, {limit:g} floors"
        axes.plot(where, above, color="#000000", linewidth=1, label=label)
        for i, curve in enumerate(each.thinned for each in curves):
            color, marker, line = _LOOKS[i % len(_LOOKS)]
            rms = np.where(np.greater(curve.rms, 0), curve.rms, np.nan)
            looks = {"color": color, "marker": marker, "linestyle": line, "markersize": size}
            axes.plot(curve.positions, rms, linewidth=1.2, label=curve.plan, **looks)
        axes.set(title=title, ylabel="rms error against float64 (logits)", yscale="log")
        axes.set(xlim=(-0.5, n - 0.5))
        _powers(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        _label_positions(axes, n, texts)
        return svg(figure)


def _powers(axes: Any) -> None:
    """A logarithmic scale without matplotlib's own 10^-5: that is mathematics, which is switched
    off so that no token is read as such.
    """
    axes.yaxis.set_major_formatter(lambda value, _: power(value))
    axes.yaxis.set_minor_formatter(lambda *_: "")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.5)


def worst_first(values: Mapping[str, float], *, limit: float, title: str = "Sigma") -> str:
    """A dot for each named value (in noise floors) beside the limit, in the order given.

    Names stand at up to 40 of them. What is not finite is a cross at the limit's line, and what is
    less than a thousandth of the limit is drawn there.
    """
    names, n = list(values), len(values)
    found = np.array(list(values.values()), np.float64)
    good, at = np.isfinite(found), np.arange(n)
    found = np.maximum(found, limit / 1e3)  # decades have no place for 0
    with drawing(9, 4.5) as figure:
        axes = figure.add_subplot()
        axes.axhline(limit, color="#000000", linewidth=1, label=f"limit, {limit:g} floors")
        below, above = good & (found <= limit), good & (found > limit)
        for which, label, (color, marker, _) in (
            (below, "within", _LOOKS[0]),
            (above, "beyond", _LOOKS[1]),
        ):
            looks = {"color": color, "marker": marker, "linestyle": "", "markersize": 5}
            if which.any():
                axes.plot(at[which], found[which], label=label, **looks)
        if not good.all():
            looks = {"color": _COLOURS[3], "marker": "x", "linestyle": "", "markersize": 6}
            axes.plot(at[~good], np.full((~good).sum(), limit), label="no number", **looks)
        axes.set(title=title, ylabel="sigma (noise floors)", yscale="log", xlim=(-0.5, n - 0.5))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda *_: "")
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.5)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        axes.set_xlabel("prompts, the worst first")
        if n <= _MOST_TOKENS:
            axes.set_xticks(at, names, rotation=90, fontsize=8)
        return svg(figure)


def heat_strip(
    strip: Strip,
    *,
    texts: Sequence[str] = (),
    at: tuple[int, int] | None = None,
    title: str = "Error by layer",
) -> str:
    """A strip of colours, layers upwards and positions to the right, one colour to a decade.

    `at`, a layer and a position, is outlined. What is not finite is grey.
    """
    layers, n = len(strip.values), len(strip.values[0])
    step = -(-n // min(_MOST_COLUMNS, max(1, _MOST_CELLS // layers)))
    starts, columns = np.arange(0, n, step), strip.columns(step)
    edges = np.append(starts, n) - 0.5
    with drawing(9, min(8.0, 2.5 + 0.18 * layers)) as figure:
        axes = figure.add_subplot(facecolor="#BBBBBB")
        _colours(figure, axes, columns, edges, strip.limit)
        if at is not None:
            x = int(np.searchsorted(starts, at[1], side="right")) - 1
            corner, wide = (edges[x], at[0] - 0.5), edges[x + 1] - edges[x]
            looks = {"fill": False, "edgecolor": "#D55E00", "linewidth": 2}
            axes.add_patch(load().patches.Rectangle(corner, wide, 1, **looks))
        axes.set(title=title, ylabel="layer")
        axes.yaxis.get_major_locator().set_params(integer=True)
        _label_positions(axes, n, texts)
        return svg(figure)


def _colours(figure: Any, axes: Any, columns: Any, edges: Any, limit: float) -> None:
    """The strip itself, and the bar that says what its colours mean."""
    low, high = _DECADES
    decades = [10.0**i for i in range(low, high + 1)]
    clipped = np.clip(columns, 10.0**low, 0.999 * 10.0**high)
    mesh = axes.pcolormesh(
        edges,
        np.arange(len(columns) + 1) - 0.5,
        np.ma.masked_invalid(clipped),
        norm=load().colors.BoundaryNorm(decades, 256),
        cmap="cividis",
        edgecolors="face",
        linewidth=0.2,
    )
    bar = figure.colorbar(mesh, ax=axes, ticks=decades[::3], format=lambda value, _: power(value))
    bar.set_label(f"limit {power(limit)}")


@contextmanager
def drawing(width: float, height: float) -> Iterator[Any]:
    matplotlib = load()
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # Glyphs are missing from the font, which only measures the text.
        warnings.simplefilter("ignore", UserWarning)
        figure = matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
        matplotlib.backends.backend_svg.FigureCanvasSVG(figure)
        yield figure


def _label_positions(axes: Any, n: int, texts: Sequence[str]) -> None:
    if len(texts) == n <= _MOST_TOKENS:
        labels = [f"{quoted(text)} {i}" for i, text in enumerate(texts)]
        axes.set_xticks(np.arange(n), labels, rotation=90, fontsize=8)
        axes.set_xlabel("token and position")
    else:
        axes.set_xlabel("position")


def svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()

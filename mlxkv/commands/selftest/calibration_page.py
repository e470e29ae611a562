"""What correct runs read at each gate, as Markdown and as lines for a terminal. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxkv.commands.selftest.readings import (
    ENGINES,
    MEMBERS,
    MLX_LM,
    ORACLE,
    ORDERS,
    PLAIN,
    PORT,
    Range,
    joined,
)
from mlxkv.report.text import code, columns, environment_table, markdown_table, ordered

HEAD = ("gate", "median", "largest", "limit", "headroom", "on")
SECTIONS = {
    PORT: ("The port", "Every plan, in both lanes."),
    ORDERS: (
        "The port with other sums",
        "Products in parts, in reverse and in pairs, norms in lanes; lane B.",
    ),
    MLX_LM: ("mlx-lm", "In a process of its own; lane B."),
    PLAIN: ("The port without a faster BLAS", "On the one that MLX brings; lane B."),
    MEMBERS: (
        "Transformers, each member held out",
        "Each member of the pool, in floors that the others make.",
    ),
    ORACLE: (
        "The oracle",
        "The truth's proofs, the size of the floor, and the control on stored errors.",
    ),
}
WORDS = (
    "Correct runs in {dtype}, {seeds} on each model, each on another random prompt, and on a "
    "random model with other weights too. Values are in units of the noise floor, algebra relative "
    "to the largest value. *largest* is the worst run, plan and position; *headroom* how often it "
    "fits under the limit."
)


def console(ranges: Sequence[Range], accused: Sequence[str], *, dtype: str, report: str) -> str:
    lines = []
    for whose, (title, _) in SECTIONS.items():
        rows = [_cells(one) for one in _joined(ranges, whose)]
        lines += [f"{title}, {dtype}", *columns(HEAD, rows, left={0, 5}), ""] if rows else []
    lines += [f"failed: {line}" for line in failures(ranges, accused)]
    return "\n".join([*lines, f"{sentence(ranges, accused)}    report: {report}"]) + "\n"


def sentence(ranges: Sequence[Range], accused: Sequence[str]) -> str:
    names = list(dict.fromkeys(r.model for r in ranges))
    models = f"{len(names)} models" if len(names) > 1 else names[0]
    if failures(ranges, accused):
        beyond = sum(not r.within for r in ranges)
        return f"correct runs on {models}: beyond a limit {beyond}, accused {len(accused)}"
    of_engines = [r for r in ranges if r.headroom is not None and r.whose in ENGINES]
    least = min(of_engines, key=lambda r: r.headroom or 0.0, default=None)
    line = f"every correct run on {models} is within every limit"
    if least is None:
        return line
    return (
        f"{line}; the tightest limit is that of {least.gate}, {_headroom(least)} on {least.model}"
    )


def failures(ranges: Sequence[Range], accused: Sequence[str]) -> list[str]:
    """Each reading beyond its limit, and each run that was not found right."""
    beyond = [
        f"{r.model}, {r.run}: {r.whose}: {r.gate} ({r.plan}) is {r.largest:.3g}, limit {r.limit:g}"
        for r in ranges
        if not r.within
    ]
    return [*beyond, *accused]


def markdown(
    ranges: Sequence[Range],
    accused: Sequence[str],
    value: Mapping[str, Any],
    *,
    commands: Sequence[str],
) -> str:
    """The Markdown report; `value` is the calibration as `mlxkv-calibrate/1`."""
    host = {"mlxkv": value["environment"]["port"], "oracle": value["environment"]["oracle"]}
    models = [
        (name, ", ".join(code(weights[:16]) for weights in found))
        for name, found in value["models"].items()
    ]
    parts = [
        ["# Calibration", "", f"**{sentence(ranges, accused)}**"],
        [f"- {line}" for line in failures(ranges, accused)],
        [WORDS.format(dtype=value["dtype"], seeds=value["seeds"])],
        *(_section(ranges, whose) for whose in SECTIONS),
        *(_by_model(ranges, whose) for whose in (*ENGINES, MEMBERS)),
        ["## Environment", "", *environment_table(host)],
        ["## Models", "", *markdown_table(("", "weights"), models, left={0, 1})],
        ["## Reproduce", "", "```sh", *commands, "```"],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _section(ranges: Sequence[Range], whose: str) -> list[str]:
    title, how = SECTIONS[whose]
    rows = [_cells(one) for one in _joined(ranges, whose)]
    return [f"## {title}", "", how, "", *markdown_table(HEAD, rows, left={0, 5})] if rows else []


def _by_model(ranges: Sequence[Range], whose: str) -> list[str]:
    largest = {(r.gate, r.model): _number(r.largest) for r in ranges if r.whose == whose}
    if not largest:
        return []
    gates, models = (list(dict.fromkeys(names)) for names in zip(*largest, strict=True))
    rows = [(gate, *(largest.get((gate, model), "-") for model in models)) for gate in gates]
    table = markdown_table(("largest", *models), rows, left={0})
    return [f"## {SECTIONS[whose][0]}, by model", "", *table]


def _joined(ranges: Sequence[Range], whose: str) -> list[Range]:
    by_gate: dict[str, list[Range]] = {}
    for one in ranges:
        if one.whose == whose:
            by_gate.setdefault(one.gate, []).append(one)
    return [joined(some) for some in by_gate.values()]


def _cells(r: Range) -> tuple[str, ...]:
    near = not r.largest < r.limit / 1000  # only there could too few digits hide which is larger
    value, limit = ordered(r.largest, r.limit) if near else (_number(r.largest), f"{r.limit:g}")
    plan = "" if r.plan == "-" else f", {r.plan}"
    on = f"{r.model}, {r.run}{plan}" if r.largest > 0 else "-"
    return r.gate, _number(r.median), value, limit, _headroom(r), on


def _headroom(r: Range) -> str:
    times = r.headroom
    if times is None:
        return "-"
    return f"{times:.0e}x" if times >= 1e5 else f"{times:.{0 if times >= 10 else 1}f}x"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if abs(value) < 1e-2 else f"{value:.2f}"

"""What the selftest found, as Markdown for a file and as lines for a terminal. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxkv.commands.selftest.trial import RIGHTS, Trial, unseen
from mlxkv.report.text import code, columns, environment_table, markdown_table

Trials = Mapping[str, Sequence[Trial]]
HEAD = ("run", "sigma", "algebra", "gate", "first", "layer", "tap", "verdict")
LEFT = {0, 3, 6, 7}
WORDS = (
    "Known faults, put into the port from outside, and the port as it is. *sigma* is the worst "
    "plan's rms error in noise floors, *algebra* the float64 lane's largest error relative to the "
    "truth's largest logit, *gate* the one furthest over its limit in {0}, or lane A's where {0} "
    "shows nothing. *first*, *layer* and *tap* are what `locate` says."
)


def console(trials: Trials, *, dtype: str, report: str) -> str:
    lines = []
    for model, found in trials.items():
        lines += [model, *columns(HEAD, [_cells(t) for t in found], left=LEFT), ""]
    lines += [f"failed: {line}" for line in _failures(trials)]
    last = f"{sentence(trials)}    report: {report}"
    return "\n".join([*lines, *_unseen_lines(trials, dtype), last]) + "\n"


def sentence(trials: Trials) -> str:
    every = [t for found in trials.values() for t in found]
    right = [t for t in every if t.fault in RIGHTS]
    accused, faults = sum(not t.passed for t in right), len(every) - len(right)
    found = faults - sum(not t.passed for t in every) + accused
    return (
        f"{found} of {faults} faults found in their place, "
        f"{accused} of {len(right)} correct runs accused"
    )


def _failures(trials: Trials) -> list[str]:
    return [
        f"{model}: {t.fault}: {t.why}"
        for model, found in trials.items()
        for t in found
        if not t.passed
    ]


def _unseen_lines(trials: Trials, dtype: str) -> list[str]:
    """The faults that the run's dtype alone would not have shown, and on which models."""
    lines = []
    for name, models in unseen(trials).items():
        tried = [model for model, found in trials.items() if any(t.fault == name for t in found)]
        where = "every model" if len(models) == len(tried) else ", ".join(models)
        lines.append(f"- unseen in {dtype} outside lane A: {name} ({where})")
    return lines


def markdown(trials: Trials, value: Mapping[str, Any], *, commands: Sequence[str]) -> str:
    """The Markdown report; `value` is the selftest as `mlxkv-selftest/1`."""
    (first, *random), dtype = trials, str(value["dtype"])
    host = {"mlxkv": value["environment"]["port"], "oracle": value["environment"]["oracle"]}
    limits = [(name, f"{limit:g}") for name, limit in value["limits"].items()]
    models = [
        (name, code(m["fingerprint"]), str(m["tokens"])) for name, m in value["models"].items()
    ]
    parts = [
        [f"# Selftest, {dtype}", "", f"**{sentence(trials)}**"],
        [f"- {line}" for line in _failures(trials)],
        [WORDS.format(dtype)],
        [f"## {first}", "", *markdown_table(HEAD, [_cells(t) for t in trials[first]], left=LEFT)],
        _spread(trials, random),
        ["## Limits of the day", "", *markdown_table(("limit", "value"), limits, left={0})],
        ["## Environment", "", *environment_table(host)],
        ["## Models", "", *markdown_table(("", "weights", "tokens"), models, left={0, 1})],
        ["## Reproduce", "", "```sh", *commands, "```"],
        [f"## What lane B alone would let pass in {dtype}", ""],
    ]
    parts[-1] += _unseen_lines(trials, dtype) or ["Nothing."]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _spread(trials: Trials, models: Sequence[str]) -> list[str]:
    """The random models together: the smallest and largest sigma of each fault."""
    if not models:
        return []
    names = list(dict.fromkeys(t.fault for model in models for t in trials[model]))
    rows = []
    for name in names:
        found = [t for model in models for t in trials[model] if t.fault == name]
        sigmas = [t.sigma for t in found if t.sigma is not None]
        seen = f"{sum(t.seen_in_lane_b for t in found)}/{len(found)}" if name not in RIGHTS else "-"
        low, high = (f"{f(sigmas):.3g}" if sigmas else "-" for f in (min, max))
        rows.append((name, low, high, seen, f"{sum(t.passed for t in found)}/{len(found)}"))
    head = ("run", "least sigma", "most sigma", "seen in lane B", "passed")
    how = "(head layout, standard deviation of the weights, seed)"
    about = f"{len(models)} models: {', '.join(models)} {how}."
    return ["## Random models", "", about, "", *markdown_table(head, rows, left={0})]


def _cells(t: Trial) -> tuple[str, ...]:
    return (
        t.fault,
        f"{t.sigma:.3g}" if t.sigma is not None else "-",
        f"{t.algebra:.1e}" if t.algebra is not None else "-",
        t.gate or "-",
        *("-" if place is None else str(place) for place in (t.position, t.layer)),
        t.tap or "-",
        t.outcome + ("" if t.passed else " (FAILED)"),
    )

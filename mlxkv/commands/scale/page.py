"""The cases at size as one Markdown page. A pure function of what they showed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mlxkv.commands.scale.memory import INTERVAL
from mlxkv.commands.scale.result import Fault, Place, Ran, Result, gigabytes
from mlxkv.report.text import code, environment_table, markdown_table, ordered, shortened

_CASES = ("case", "parameters", "dtype", "tokens", "verdict", "cold", "warm", "peak", "bars met")
_BARS = ("bar", "measured", "limit", "met")
_GATES = ("gate", "plan", "value", "limit")
SMALL = 10**7
"""Bytes below which a process or a folder is not shown."""
_MET = {True: "yes", False: "no", None: "could not be measured"}
_WORDS = {
    "cold, warm": "with no answer of the oracle's kept, and the same command again; the model's "
    "file was written just before, so that much of it is in the system's cache",
    "peak": "the largest sum over all processes, at one time, of memory that the system cannot "
    f"drop (RssAnon, RssShmem and VmSwap), looked at every {1000 * INTERVAL:.0f} ms; pages of "
    "mapped files are not in it",
    "limit of a peak": "the port's own weights in the run's dtype, and 3 GB; of locating, where an "
    "engine of one's own gives the logits of all tokens of a call, the memory that there is",
    "oracle, runs, converted, suspects": "on disk: the oracle's answers; the engine's traces while "
    "they are judged; weights converted for transformers; the truth with usual mistakes in it",
}


def markdown(results: Sequence[Result]) -> str:
    """The page of the cases that are there."""
    rows = [_row(one) for one in results]
    table = markdown_table(_CASES, rows, left={0, 2, 4, 8})
    parts = [
        [
            "# At size",
            "",
            "Large models and long sequences, each compared in a cache folder of its own by "
            "`mlxkv reports --only scale`, which measured all that stands here.",
        ],
        table,
        *(_section(one) for one in results),
        ["## Words", "", *(f"- **{word}**: {meaning}" for word, meaning in _WORDS.items())],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _row(one: Result) -> list[str]:
    peaks = [run.memory.together for run in one.runs.values() if run.memory]
    bars = one.bars
    met = sum(bar.met is True for bar in bars)
    return [
        f"[{one.case}](#{one.case})",
        f"{one.model.parameters:,}",
        one.dtype,
        f"{one.tokens:,}",
        one.outcome,
        f"{one.cold.seconds:.0f} s",
        f"{one.warm.seconds:.0f} s" if one.warm else "-",
        gigabytes(max(peaks)) if peaks else "-",
        f"{met} of {len(bars)}",
    ]


def _section(one: Result) -> list[str]:
    lines = [f"## {one.case}", "", one.about, ""]
    lines += [f"- model: {one.model.made}; {_size(one)}; weights `{one.model.fingerprint[:16]}`"]
    lines += [f"- sequence: {one.tokens:,} tokens, the first {one.prompt_tokens:,} as the prompt; "]
    lines[-1] += f"{one.rows} rows of logits judged"
    lines += [f"- {reason}" for reason in one.reasons]
    lines += ["", *_bars(one), "", *_gates(one), "", *_processes(one)]
    lines += _disk(one.runs)
    lines += _planted(one.fault) if one.fault else []
    lines += _unseen(one.not_exercised)
    environment = {name: dict(values) for name, values in one.environment.items()}
    lines += ["", f"Code `{one.sources[:16]}`, run on:", "", *environment_table(environment)]
    return [*lines, "", "```sh", *_commands(one), "```"]


def _size(one: Result) -> str:
    model = one.model
    return (
        f"{model.parameters:,} parameters, {gigabytes(model.on_disk)} on disk, "
        f"{gigabytes(model.in_memory)} in {one.dtype}"
    )


def _bars(one: Result) -> list[str]:
    rows = [[bar.what, bar.measured, bar.limit, _MET[bar.met]] for bar in one.bars]
    return markdown_table(_BARS, rows, left={0, 3})


def _gates(one: Result) -> list[str]:
    rows = []
    for gate in one.gates:
        value, limit = ordered(math.nan if gate.value is None else gate.value, gate.limit)
        rows.append([gate.name, gate.plan, value, limit])
    return ["Each gate on the plan that did worst:", "", *markdown_table(_GATES, rows, left={0, 1})]


def _processes(one: Result) -> list[str]:
    """What each process held, as was seen from outside, and took, as the command says."""
    runs = one.runs
    runs |= {"locate": one.fault.ran} if one.fault else {}
    peaks = {name: _peaks(run) for name, run in runs.items()}
    named = dict.fromkeys(process for of in peaks.values() for process in of)
    rows = [[process, *(of.get(process, "-") for of in peaks.values())] for process in named]
    took = [f"{name} {run.seconds:.1f} s{_parts(run)}" for name, run in runs.items()]
    table = markdown_table(("peak", *runs), rows, left={0})
    return [f"Times: {'; '.join(took)}.", "", *table]


def _parts(run: Ran) -> str:
    found = ", ".join(f"{of} {seconds:.1f}" for of, seconds in run.took.items())
    return f" ({found})" if found else ""


def _peaks(run: Ran) -> dict[str, str]:
    """By process; those that are small beside what is measured here are left out."""
    if run.memory is None:
        return {"all processes together": "not measured"}
    each = {of: gigabytes(size) for of, size in run.memory.each.items() if size >= SMALL}
    return {"all processes together": gigabytes(run.memory.together)} | each


def _disk(runs: Mapping[str, Ran]) -> list[str]:
    sizes = [
        f"{name} {', '.join(f'{kind} {gigabytes(size)}' for kind, size in large.items())}"
        for name, run in runs.items()
        if (large := {kind: size for kind, size in sorted(run.disk.items()) if size >= 10**7})
    ]
    return ["", f"Most on disk at one time: {'; '.join(sizes)}."] if sizes else []


def _planted(fault: Fault) -> list[str]:
    found = "nothing" if fault.found is None else _place(fault.found)
    lines = ["", f"Planted: {fault.words}; expected {_place(fault.planted)}. "]
    lines[-1] += f"`mlxkv locate`: {fault.outcome}, {found}."
    return lines + (["", f"Its hint: {code(fault.hint)}"] if fault.hint else [])


def _place(place: Place) -> str:
    parts = {
        "layer": place.layer,
        "tap": place.tap,
        "head": place.head,
        "position": place.position,
    }
    return ", ".join(f"{name} {part}" for name, part in parts.items() if part is not None)


def _unseen(lines: Sequence[str]) -> list[str]:
    return ["", "Not exercised:", "", *(f"- {line}" for line in lines)] if lines else []


def _commands(one: Result) -> list[str]:
    commands = [one.cold.command, *([one.fault.ran.command] if one.fault else [])]
    shown = [shortened(command, 300) for command in commands]  # a prompt of ids may be long
    return [f"mlxkv reports --only scale --case {one.case}", *shown]

"""The behaviour matrix, as Markdown for a file and as lines for a terminal. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mlxkv.commands.pitfalls.behaviour import Matrix, Part, Seen
from mlxkv.commands.pitfalls.scenarios import OTHER_CACHES, SYSTEMS, WRONG, Scenario
from mlxkv.report.text import clip, code, columns, environment_table, markdown_table, quoted

HEAD = ("scenario", *SYSTEMS, "what")
WORDS = (
    "Each experiment as a user of each system would write it. Rows decide, not tokens: *silently "
    "wrong* is logits further from the float64 truth than the noise limit, without an error. "
    "*Cost* is the worst such row's distance, in noise floors."
)
BRANCHES = (
    "The guarded port, counted by MLX over what it held before. A first write copies the rows "
    "once, into buffers with room for more."
)


def console(matrix: Matrix, *, report: str) -> str:
    others = [(name, cache, _cell(one)) for name, cache, one in _others(matrix)]
    lines = [f"{letter}  {words}" for letter, words in SYSTEMS.items()]
    lines += ["", *columns(HEAD, _rows(matrix), left=set(range(len(HEAD)))), ""]
    lines += [*columns(("scenario", "mlx-lm's", "behaviour"), others, left={0, 1, 2}), ""]
    lines += [f"news: {line}" for line in surprises(matrix)]
    return "\n".join([*lines, f"{_sentence(matrix)}    report: {report}"]) + "\n"


def _rows(matrix: Matrix, *, bold: bool = False) -> list[list[str]]:
    cells = [
        [_cell(matrix.seen[s.name, system], bold=bold) for system in SYSTEMS]
        for s in matrix.scenarios
    ]
    return [[s.name, *of, s.what] for s, of in zip(matrix.scenarios, cells, strict=True)]


def surprises(matrix: Matrix) -> list[str]:
    """A line for every system that did not behave as documented."""
    return [
        f"{scenario} on {_named(system)}: {one.behaviour}, documented is {one.expected}"
        for (scenario, system), one in matrix.seen.items()
        if not one.documented
    ]


def markdown(matrix: Matrix, *, commands: Sequence[str]) -> str:
    table = [[f"[{name}](#{name})", *rest] for name, *rest in _rows(matrix, bold=True)]
    others = [(name, cache, _cell(one, bold=True)) for name, cache, one in _others(matrix)]
    inputs = [("model", code(matrix.source)), ("weights", code(matrix.fingerprint))]
    hosts = {_named(system): host for system, host in matrix.environments.items()}
    beside = markdown_table(("scenario", "cache", "behaviour"), others, left={0, 1, 2})
    parts = [
        [f"# Pitfalls: {matrix.model}", "", f"**{_sentence(matrix)}**"],
        [f"- {line}" for line in surprises(matrix)],
        [WORDS],
        [f"- **{letter}**: {words}" for letter, words in SYSTEMS.items()],
        ["## Matrix", "", *markdown_table(HEAD, table, left=set(range(len(HEAD))))],
        ["## mlx-lm's other caches", "", *beside],
        _talks(matrix),
        *(_section(s, matrix) for s in matrix.scenarios),
        _branches(matrix.branches),
        ["## Environment", "", *environment_table(hosts)],
        ["## Inputs", "", *markdown_table(("", ""), inputs, left={0, 1})],
        ["## Reproduce", "", "```sh", *commands, "```"],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _others(matrix: Matrix) -> list[tuple[str, str, Seen]]:
    """What came of the scenarios that ran on mlx-lm's other caches."""
    return [(name, who, one) for (name, who), one in matrix.seen.items() if who in OTHER_CACHES]


def _talks(matrix: Matrix) -> list[str]:
    rows = [
        (name, *_tokens(right.prompt, matrix), *_tokens(right.tokens, matrix))
        for name, right in matrix.rights.items()
    ]
    head = ("talk", "prompt", "as text", "what follows on a fresh cache", "as text")
    table = markdown_table(head, rows, left=set(range(5)))
    return ["## Talks", "", "What the oracle says of each prompt.", "", *table]


def _tokens(ids: Sequence[int], matrix: Matrix) -> tuple[str, str]:
    return code(" ".join(map(str, ids))), code(quoted(matrix.text(ids)))


def _section(scenario: Scenario, matrix: Matrix) -> list[str]:
    page = "on the page" if matrix.comparable else "on the page (other weights: not comparable)"
    head, rows = ["", "behaviour", "evidence", "cost", page], []
    for system in scenario.expected:
        one = matrix.seen[scenario.name, system]
        cost = f"{one.cost:.3g}" if one.cost is not None else "-"
        beside = scenario.page.get(system, "-")
        rows.append([system, _cell(one, bold=True), _evidence(one, matrix), cost, beside])
    if not scenario.page:
        head, rows = head[:-1], [row[:-1] for row in rows]
    table = markdown_table(head, rows, left={0, 1, 2, 4})
    return [f"## {scenario.name}", "", f"{scenario.what}.", "", *table]


def _branches(b: Mapping[str, Any]) -> list[str]:
    rows = {
        f"the rows of {b['context_tokens']} tokens, {b['dtype']}": b["rows"],
        "the buffers that hold them": b["buffers"],
        "a clone, at its birth": b["birth"],
        "a clone, at its first write": b["first_write"],
        f"{b['branches']} branches after {b['steps']} tokens each, in turn": b["active"],
        "the same, at the peak (rounded up to a MiB)": b["peak"],
    }
    cells = [(what, f"{value:,}", f"{value / b['rows']:.2f}") for what, value in rows.items()]
    table = markdown_table(("", "bytes", "times the rows"), cells, left={0})
    return ["## Memory of branches", "", BRANCHES, "", *table]


def _evidence(seen: Seen, matrix: Matrix) -> str:
    """What was seen, in one cell of a table: tokens, rows, errors, caches, masks."""
    if seen.reason is not None:
        return seen.reason
    found = [_continued(part, matrix) for part in seen.parts if part.tokens]
    calls = [part for part in seen.parts if not part.tokens and part.error is None]
    found += [_together(calls)] if calls else []
    errors = list(dict.fromkeys(seen.errors))
    found += [code(clip(error, 160)) for error in errors[:1]]
    found += [f"{len(errors) - 1} more refused"] if len(errors) > 1 else []
    found += [
        f"cache {h.cache}: {h.layers} layers, keys {h.shape}, length {h.shape[2]}, "
        f"{h.bytes:,} bytes"
        for h in seen.held
    ]
    found += [
        f"mask {code(str([list(row) for row in mask]))}"
        for mask in seen.masks
        if any(map(any, mask)) and len(mask) < len(mask[0])
    ]
    return "; ".join(found).replace("|", "\\|")


def _continued(part: Part, matrix: Matrix) -> str:
    """The tokens that a step chose, and how far they are right."""
    n = len(part.tokens)
    parted = "all tokens right"
    if part.parted is not None:
        parted = f"token {part.parted + 1} of {n} is the first to differ"
    sigma = f", sigma {part.sigma:.3g} over {part.rows} rows" if part.sigma is not None else ""
    return f"{part.talk}: {' '.join(_tokens(part.tokens, matrix))}: {parted}{sigma}"


def _together(calls: Sequence[Part]) -> str:
    """Calls that return a row each, together."""
    wrong = sum(part.behaviour == WRONG for part in calls)
    sigma = math.sqrt(sum((part.sigma or 0.0) ** 2 for part in calls) / len(calls))
    return f"{wrong} of {len(calls)} rows wrong, sigma {sigma:.3g}"


def _cell(seen: Seen, *, bold: bool = False) -> str:
    mark = "" if seen.documented else f" (documented: {seen.expected})"
    name = f"**{seen.behaviour}**" if bold and seen.behaviour == WRONG else seen.behaviour
    return f"{name}{mark}"


def _sentence(matrix: Matrix) -> str:
    odd = len(matrix.surprises)
    if not odd:
        return "all behaved as documented"
    return f"{odd} of {len(matrix.seen)} did not behave as documented"


def _named(system: str) -> str:
    return SYSTEMS.get(system, f"mlx-lm, {system}")

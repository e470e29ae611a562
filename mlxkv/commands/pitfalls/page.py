"""The behaviour matrix, as Markdown for a file and as lines for a terminal. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxkv.commands.pitfalls.behaviour import Part, Seen
from mlxkv.commands.pitfalls.scenarios import OTHER_CACHES, SYSTEMS, WRONG, Scenario
from mlxkv.report.text import clip, code, columns, environment_table, markdown_table, quoted

Text = Callable[[Sequence[int]], str]
Found = Mapping[tuple[str, str], Seen]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the report says beside the matrix."""

    model: str
    source: str
    fingerprint: str
    prompts: Mapping[str, tuple[int, ...]]
    generated: Mapping[str, tuple[int, ...]]
    environments: Mapping[str, Mapping[str, Any]]
    branches: Mapping[str, Any]
    comparable: bool


def console(scenarios: Sequence[Scenario], seen: Found, *, report: str) -> str:
    """What `pitfalls` prints."""
    head = ("scenario", *SYSTEMS, "what")
    rows = [
        (s.name, *(_cell(seen[s.name, system]) for system in SYSTEMS), s.what) for s in scenarios
    ]
    lines = [f"{letter}  {words}" for letter, words in SYSTEMS.items()]
    lines += ["", *columns(head, rows, left=set(range(len(head)))), ""]
    others = [
        (s.name, cache, _cell(seen[s.name, cache]))
        for s in scenarios
        for cache in OTHER_CACHES
        if cache in s.others
    ]
    lines += [*columns(("scenario", "mlx-lm's", "behaviour"), others, left={0, 1, 2}), ""]
    lines += [f"news: {line}" for line in surprises(seen)]
    return "\n".join([*lines, f"{_sentence(seen)}    report: {report}"]) + "\n"


def surprises(seen: Found) -> list[str]:
    """A line for every system that did not behave as documented."""
    odd = [
        (scenario, system, one) for (scenario, system), one in seen.items() if not one.documented
    ]
    return [
        f"{scenario} on {_named(system)}: {one.behaviour}, documented is {one.expected}"
        for scenario, system, one in odd
    ]


def report(
    facts: Facts, scenarios: Sequence[Scenario], seen: Found, *, text: Text, commands: Sequence[str]
) -> str:
    """The Markdown report."""
    table = [
        [
            f"[{s.name}](#{s.name})",
            *(_cell(seen[s.name, system], bold=True) for system in SYSTEMS),
            s.what,
        ]
        for s in scenarios
    ]
    others = [
        [s.name, cache, _cell(seen[s.name, cache], bold=True)]
        for s in scenarios
        for cache in OTHER_CACHES
        if cache in s.others
    ]
    parts = [
        [f"# Pitfalls: {facts.model}", "", f"**{_sentence(seen)}**"],
        [f"- {line}" for line in surprises(seen)],
        [
            "Each experiment as a user of each system would write it. Rows decide, not tokens: *silently wrong* is logits further from "
            "the float64 truth than the noise limit, without an error. *Cost* is the worst such row's distance, in noise floors.",
        ],
        [f"- **{letter}**: {words}" for letter, words in SYSTEMS.items()],
        [
            "## Matrix",
            "",
            *markdown_table(("scenario", *SYSTEMS, "what"), table, left=set(range(6))),
        ],
        [
            "## mlx-lm's other caches",
            "",
            *markdown_table(("scenario", "cache", "behaviour"), others, left={0, 1, 2}),
        ],
        _talks(facts, text),
        *(_section(s, seen, facts, text) for s in scenarios),
        _branches(facts.branches),
        [
            "## Environment",
            "",
            *environment_table(
                {_named(who): facts.environments[who] for who in facts.environments}
            ),
        ],
        [
            "## Inputs",
            "",
            *markdown_table(
                ("", ""),
                [["model", code(facts.source)], ["weights", code(facts.fingerprint)]],
                left={0, 1},
            ),
        ],
        ["## Reproduce", "", "```sh", *commands, "```"],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _talks(facts: Facts, text: Text) -> list[str]:
    rows = [
        [
            name,
            code(_ids(ids)),
            code(quoted(text(ids))),
            code(_ids(facts.generated[name])),
            code(quoted(text(facts.generated[name]))),
        ]
        for name, ids in facts.prompts.items()
    ]
    head = ("talk", "prompt", "as text", "what follows on a fresh cache", "as text")
    return [
        "## Talks",
        "",
        "What the oracle says of each prompt.",
        "",
        *markdown_table(head, rows, left=set(range(5))),
    ]


def _section(scenario: Scenario, seen: Found, facts: Facts, text: Text) -> list[str]:
    systems = [*SYSTEMS, *(cache for cache in OTHER_CACHES if cache in scenario.others)]
    rows = []
    for system in systems:
        one = seen[scenario.name, system]
        cost = f"{one.cost:.3g}" if one.cost is not None else "-"
        rows.append(
            [
                system,
                _cell(one, bold=True),
                _evidence(one, text),
                cost,
                scenario.page.get(system, "-"),
            ]
        )
    page = "on the page" if facts.comparable else "on the page (other weights: not comparable)"
    head = ["", "behaviour", "evidence", "cost", page]
    if not scenario.page:
        head, rows = head[:-1], [row[:-1] for row in rows]
    return [
        f"## {scenario.name}",
        "",
        f"{scenario.what}.",
        "",
        *markdown_table(head, rows, left={0, 1, 2, 4}),
    ]


def _branches(b: Mapping[str, Any]) -> list[str]:
    rows = [
        (f"the rows of {b['context_tokens']} tokens, {b['dtype']}", b["rows"]),
        ("the buffers that hold them", b["buffers"]),
        ("a clone, at its birth", b["birth"]),
        ("a clone, at its first write", b["first_write"]),
        (f"{b['branches']} branches after {b['steps']} tokens each, in turn", b["active"]),
        ("the same, at the peak (rounded up to a MiB)", b["peak"]),
    ]
    how = "The guarded port, counted by MLX over what it held before. A first write copies the rows once, into buffers with room for more."
    cells = [(what, f"{value:,}", f"{value / b['rows']:.2f}") for what, value in rows]
    return [
        "## Memory of branches",
        "",
        how,
        "",
        *markdown_table(("", "bytes", "times the rows"), cells, left={0}),
    ]


def _evidence(seen: Seen, text: Text) -> str:
    if seen.reason is not None:
        return seen.reason
    calls = [part for part in seen.parts if not part.tokens and part.error is None]
    told = [_told(part, text) for part in seen.parts if part.tokens]
    told += [_rows(calls)] if calls else []
    errors = list(dict.fromkeys(seen.errors))
    told += [code(clip(error, 160)) for error in errors[:1]] + (
        [f"{len(errors) - 1} more refused"] if len(errors) > 1 else []
    )
    told += [
        f"cache {h.cache}: {h.layers} layers, keys {h.shape}, length {h.shape[2]}, {h.bytes:,} bytes"
        for h in seen.held
    ]
    told += [
        f"mask {code(str([list(row) for row in mask]))}"
        for mask in seen.masks
        if any(map(any, mask)) and len(mask) < len(mask[0])
    ]
    return "; ".join(told).replace("|", "\\|")


def _told(part: Part, text: Text) -> str:
    parted = (
        "all tokens right"
        if part.parted is None
        else f"token {part.parted + 1} of {len(part.tokens)} is the first to differ"
    )
    sigma = f", sigma {part.sigma:.3g} over {part.rows} rows" if part.sigma is not None else ""
    return (
        f"{part.talk}: {code(_ids(part.tokens))} {code(quoted(text(part.tokens)))}: {parted}{sigma}"
    )


def _rows(calls: Sequence[Part]) -> str:
    """Calls that return a row each, together."""
    wrong = sum(part.behaviour == WRONG for part in calls)
    sigma = math.sqrt(sum((part.sigma or 0.0) ** 2 for part in calls) / len(calls))
    return f"{wrong} of {len(calls)} rows wrong, sigma {sigma:.3g}"


def _cell(seen: Seen, *, bold: bool = False) -> str:
    mark = "" if seen.documented else f" (documented: {seen.expected})"
    name = f"**{seen.behaviour}**" if bold and seen.behaviour == WRONG else seen.behaviour
    return f"{name}{mark}"


def _sentence(seen: Found) -> str:
    odd = sum(not one.documented for one in seen.values())
    return (
        "all behaved as documented"
        if not odd
        else f"{odd} of {len(seen)} did not behave as documented"
    )


def _named(system: str) -> str:
    return SYSTEMS.get(system, f"mlx-lm, {system}")


def _ids(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))

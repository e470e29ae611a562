"""What came of caches on their lives, as Markdown for a file and as lines for a terminal.

Pure functions.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence

from mlxkv.commands.pitfalls.caches import Caches, Column
from mlxkv.commands.pitfalls.known import Finding
from mlxkv.commands.pitfalls.lives import WHAT
from mlxkv.commands.pitfalls.scenarios import LOSSY, NO, REFUSED, RIGHT, UNSEEN, WRONG, Behaviour
from mlxkv.commands.pitfalls.trial import OWN_NOISE, Came
from mlxkv.report.text import (
    WIDTH,
    clip,
    code,
    columns,
    environment_table,
    filled,
    markdown_table,
    several,
    shortened,
)

MARKS: dict[Behaviour, str] = {
    RIGHT: ".",
    LOSSY: "~",
    WRONG: "X",
    REFUSED: "r",
    NO: "-",
    UNSEEN: "?",
}
SHORT: dict[Behaviour, str] = {
    RIGHT: "right",
    LOSSY: "lossy",
    WRONG: "**wrong**",
    REFUSED: "refused",
    NO: "-",
    UNSEEN: "?",
}
_ERROR = 300
"""Characters of an error that are shown: what it is, and the line that raised it."""
_FEW = 2
"""So many caches have a table of their own in a terminal; more stand side by side as marks."""
WORDS = (
    "Every cache lives the same lives, and each row of logits that comes is compared. *right* is "
    "within the noise limits of the float64 truth. A lossy cache is *lossy by design* where its "
    "rows are those of the same cache fed straight (a fresh one, the prompt in one call, then "
    f"single tokens; a window: single tokens) to within {OWN_NOISE:g} times its own noise, and "
    "*silently wrong* where they are neither. *cost* is the distance of the worst row, in noise "
    "floors from the truth, or of a lossy cache that is wrong in its own noise from itself. `?` is "
    "not compared: what it gives depends on the calls, and there is nothing else to lay beside it."
)

HOW = (
    "mlx-lm's caches, ours and one's own run in mlx-lm's Llama; classes that `load_prompt_cache` "
    "does not know are shown to it. transformers' run in its Llama, and its sliding ones with the "
    "mask of its Mistral, which is a Llama with a window."
)


def console(caches: Caches, *, report: str) -> str:
    few = len(caches.columns) <= _FEW
    lines = list(_each(caches) if few else _side_by_side(caches))
    for line in _said(caches):
        lines += filled(line)
    return "\n".join([*lines, f"{sentence(caches)}    report: {report}"]) + "\n"


def _said(caches: Caches) -> Iterator[str]:
    """What is said under the table in a terminal."""
    yield from (f"news: {line}" for line in surprises(caches))
    yield from (f"hint: {line}" for line in hints(caches))
    few = len(caches.columns) <= _FEW
    lines = [line if few else line.partition(": ")[0] for line in caches.unexercised]
    yield f"not exercised: {'; '.join(dict.fromkeys(lines))}"


def table(came: Sequence[Came]) -> list[str]:
    """One cache's lives as lines: what came of each, its cost, and where it is wrong."""
    cells = [(one.life, one.behaviour, _cost(one)) for one in came]
    head = ("life", "behaviour", "cost")
    room = WIDTH - sum(max(map(len, column)) + 2 for column in zip(head, *cells, strict=True))
    rows: list[tuple[str, ...]] = []
    for one, start in zip(came, cells, strict=True):
        first, *more = filled(_detail(one), "", width=room)
        rows += [(*start, first), *(("", "", "", line) for line in more)]
    return columns((*head, "where"), rows, left={0, 1, 3})


def _each(caches: Caches) -> Iterator[str]:
    for column in caches.columns:
        yield from filled(_named(column))
        yield from table(column.came)
        yield ""


def _side_by_side(caches: Caches) -> Iterator[str]:
    for letter, column in _lettered(caches):
        yield from filled(f"{letter}  {_named(column)}")
    yield ""
    head = ("life", *(letter for letter, _ in _lettered(caches)), "what")
    marks = {n: [_mark(column, n) for _, column in _lettered(caches)] for n in caches.lives}
    room = WIDTH - max(map(len, marks)) - 3 * len(caches.columns) - 2
    rows = [[name, *of, clip(WHAT[name], max(room, 3))] for name, of in marks.items()]
    yield from columns(head, rows, left=set(range(len(head))))
    yield ""
    yield "  ".join(f"{mark} {behaviour}" for behaviour, mark in MARKS.items())


def markdown(caches: Caches, *, commands: Sequence[str]) -> str:
    legend = [f"- **{letter}**: {_named(column)}" for letter, column in _lettered(caches)]
    legend += [f"- not for this model: {why}" for why in caches.without.values()]
    inputs = [("model", code(caches.source)), ("weights", code(caches.fingerprint))]
    hosts = {str(column.kind.whose): column.environment for column in caches.columns}
    parts = [
        [f"# Caches: {caches.model}", "", f"**{sentence(caches)}**"],
        [f"- news: {line}" for line in surprises(caches)],
        [f"- hint: {line}" for line in hints(caches)],
        [WORDS],
        [HOW],
        legend,
        ["## Matrix", "", *_matrix(caches)],
        *_not_right(caches),
        _lost(caches),
        _without(caches),
        _facts(caches),
        ["## Not exercised", "", *(f"- {line}" for line in caches.unexercised)],
        ["## Environment", "", *environment_table(hosts)],
        ["## Inputs", "", *markdown_table(("", ""), inputs, left={0, 1})],
        ["## Reproduce", "", "```sh", *commands, "```"],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def surprises(caches: Caches) -> list[str]:
    """A line for everything that was not expected."""
    return [
        f"{one.life} on {column.kind.name}: {one.behaviour}, "
        f"expected {column.expected(one.life)[0]}{_beside(one)}"
        for column, one in caches.surprises
    ]


def hints(caches: Caches) -> list[str]:
    """A line for each cache of which something would explain all that is wrong."""
    return [f"{one.kind.name}: {one.hint}" for one in caches.columns if one.hint]


def sentence(caches: Caches) -> str:
    n = sum(len(column.came) for column in caches.columns)
    wrong, odd = len(list(caches.wrong)), len(caches.surprises)
    tried = f"{several(len(caches.columns), 'cache')}, {n} lives: {wrong} silently wrong"
    return f"{tried}, {odd} not as expected" if odd else f"{tried}, all as expected"


def _beside(one: Came) -> str:
    detail = _detail(one)
    return f" ({detail})" if detail else ""


def _detail(one: Came) -> str:
    if one.behaviour == WRONG:
        return one.where
    # What follows a first error mostly follows from it.
    first = one.errors[0].removeprefix(f"{NO}: ") if one.errors else ""
    return one.reason or shortened(first, _ERROR)


def _cost(one: Came) -> str:
    shown = one.behaviour in (WRONG, LOSSY, UNSEEN) and one.cost is not None
    return f"{one.cost:.3g}" if shown else "-"


def _named(column: Column) -> str:
    lossy = f", lossy by design ({column.kind.loses})" if column.kind.lossy else ""
    return f"{column.kind.whose}: {column.kind.name}{lossy}"


def _lettered(caches: Caches) -> list[tuple[str, Column]]:
    letters = string.ascii_uppercase + string.ascii_lowercase
    return list(zip(letters, caches.columns, strict=False))


def _of(column: Column, life: str) -> Came | None:
    return next((one for one in column.came if one.life == life), None)


def _mark(column: Column, life: str) -> str:
    one = _of(column, life)
    return MARKS[one.behaviour] if one is not None else " "


def _matrix(caches: Caches) -> list[str]:
    head = ("life", *(letter for letter, _ in _lettered(caches)), "what")
    rows = []
    for name in caches.lives:
        found = [_of(column, name) for _, column in _lettered(caches)]
        cells = [SHORT[one.behaviour] if one is not None else "" for one in found]
        rows.append([name, *cells, WHAT[name]])
    return markdown_table(head, rows, left=set(range(len(head))))


def _not_right(caches: Caches) -> Iterator[list[str]]:
    """What is silently wrong or fails, by its cause, each with what shows it."""
    causes: dict[Finding | None, list[tuple[Column, Came]]] = {}
    for column, one in caches.amiss:
        causes.setdefault(column.finding(one), []).append((column, one))
    if causes:
        yield ["## What is not right"]
    for cause in sorted(causes, key=lambda cause: cause is None):
        rows = [
            (column.kind.name, one.life, one.behaviour, _cost(one), _detail(one))
            for column, one in causes[cause]
        ]
        seen = markdown_table(
            ("cache", "life", "behaviour", "cost", "where"), rows, left={0, 1, 2, 4}
        )
        if cause is None:
            yield ["### Not known before", "", *seen]
            continue
        said = [f"### {cause.title}", "", cause.cause, "", cause.public, ""]
        yield [*said, "```python", *cause.code.strip().splitlines(), "```", "", *seen]


def _lost(caches: Caches) -> list[str]:
    """How far lossy caches are from the truth, and what their own noise is."""
    rows = []
    for column in caches.columns:
        worst = [one.worst for one in column.came if one.behaviour in (LOSSY, UNSEEN)]
        apart = [one.apart for one in column.came if one.behaviour == LOSSY]
        if column.kind.lossy:
            most = max((w for w in worst if w is not None), default=None)
            own = max((a for a in apart if a is not None), default=None)
            rows.append((column.kind.name, *map(_number, (most, column.noise, own))))
    if not rows:
        return []
    head = ("cache", "worst row, in floors", "own noise, in logits", "apart, in own noise")
    words = "`mlxkv cost` says what this does to a text."
    return ["## What the lossy ones lose", "", words, "", *markdown_table(head, rows, left={0})]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _without(caches: Caches) -> list[str]:
    """What was refused or has no call, and why, each reason once for a cache."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for column in caches.columns:
        for one in column.came:
            if one.behaviour in (REFUSED, NO):
                why = _detail(one).replace("|", "\\|")
                rows.setdefault((column.kind.name, one.behaviour, why), []).append(one.life)
    cells = [(name, ", ".join(lives), how, why) for (name, how, why), lives in rows.items()]
    if not cells:
        return []
    head = ("cache", "lives", "behaviour", "why")
    table = markdown_table(head, cells, left={0, 1, 2, 3})
    return ["## What was refused, and what there is no call for", "", *table]


def _facts(caches: Caches) -> list[str]:
    names = ("length", "size", "rows", "nbytes", "allocated")
    rows = []
    for column in caches.columns:
        values = [column.facts.get(name) for name in names]
        cells = [f"{v:,}" if isinstance(v, int) else "-" for v in values]
        reset = str(column.facts.get("reset", "-"))
        rows.append([column.kind.name, f"{column.fed}", *cells, reset])
    head = ("cache", "fed", "length", "size()", "rows", "bytes said", "bytes allocated", "emptied")
    said = "After the first life: `-` where a cache does not say. `emptied`: by what, in `reset`."
    return ["## What they say of themselves", "", said, "", *markdown_table(head, rows, left={0})]

"""Where something first goes wrong, as lines for a terminal and as Markdown. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlxkv.commands.locate.found import TAP, Located, TapRow
from mlxkv.commands.locate.outside import MEDIAN
from mlxkv.judge.limits import KV_WORST
from mlxkv.report import phrases
from mlxkv.report.text import code, columns, markdown_table, number, power
from oracle.formats.run_folder import Manifest

HEAD = ("layer", "tap", "isolated", "propagated", "first wrong", "wrong heads")
OPENED = ("layer", "tap", "error", "noise floors", "first wrong", "wrong heads")
WORDS = {
    "isolated": "each layer fed the float64 truth's input: what is wrong here was made wrong in "
    "this layer",
    "propagated": "the same run with each layer fed what the layer before really gave",
    "tap": "a place inside a layer, in the order of computation; errors are relative to the "
    "truth's largest value there",
    "noise floors": "of a tap that an engine hands out: its error over that of the port's tap in "
    "the same dtype, near the same position",
    "keys, values": "what the cache holds at the end of the plan, beside k_rope and v, which went "
    "into it",
    "logits": "behind the layers: the final norm and the head",
    "full, step, chunked": "the whole sequence in one call; the prompt, then single tokens; the "
    "prompt in several calls, then single tokens",
}


def sentence(found: Located) -> str:
    if found.outcome == "cannot tell":
        return f"cannot tell: {found.reasons[0]}"
    if found.outcome == "nothing":
        worst = max((row.isolated for row in found.rows if row.isolated is not None), default=None)
        if worst is None:
            return "nothing stands out"
        within = number(worst)
        return f"nothing stands out: every tap within {within} of the truth (limit {TAP:g})"
    places = [
        f"position {_position(found)}" if found.position is not None else None,
        f"layer {found.layer}" if found.layer is not None else None,
        found.tap,
        f"head {found.head}" if found.head is not None else None,
    ]
    though = ", though results change from run to run" if found.changes else ""
    place = ", ".join(name for name in places if name is not None) or "no place"
    return f"located{though}: {place}"


def facts(found: Located, manifest: Manifest, *, layers: int) -> list[tuple[str, str]]:
    if found.outcome != "located":
        return []
    position = "-"
    if found.position is not None:
        kind = f": {found.kind}" if found.kind and found.tap is None and found.layer is None else ""
        place = _position(found, found.token)
        position = f"{place}, the first wrong of {len(manifest.tokens)}{kind}"
    heads = "-"
    if found.heads:
        heads = ", ".join(map(str, found.heads)) + (" (every one)" if found.head is None else "")
    rows = [("repeats", found.changes)] if found.changes else []
    rows += [
        ("plan", found.plan or "-"),
        ("position", position),
        ("layer", _layers(found, layers)),
        ("tap", found.tap or "-"),
        ("heads", heads),
        ("hint", found.hint or "-"),
    ]
    return rows + ([("cause", found.cause)] if found.cause else [])


def _position(found: Located, token: str | None = None) -> str:
    assert found.position is not None
    return phrases.position(found.position, token, about=found.about, after=found.after)


def console(
    found: Located, manifest: Manifest, *, engine: str, layers: int, report: str | None = None
) -> str:
    lines = [f"{manifest.title}  {manifest.dtype}  {engine}", ""]
    place = facts(found, manifest, layers=layers)
    lines += [*(f"{name:10}{text}" for name, text in place), ""] if place else []
    lines += (
        [*columns(_head(found.rows), _cells(found.rows), left={1, 5}), ""] if found.rows else []
    )
    lines += [f"cannot tell: {reason}" for reason in found.reasons[1:]]
    lines += [f"note: {note}" for note in found.notes]
    lines += [sentence(found)] + ([f"report: {report}"] if report is not None else [])
    return "\n".join(lines) + "\n"


def markdown(
    found: Located,
    manifest: Manifest,
    *,
    engine: str,
    layers: int,
    commands: Sequence[str] = (),
    svg: str | None = None,
) -> str:
    title = f"# Where {engine} goes wrong: {manifest.title}, {manifest.dtype}"
    place = [
        (name, code(text) if text != "-" else text)
        for name, text in facts(found, manifest, layers=layers)
    ]
    parts = [
        [title, "", f"**{sentence(found)}**"],
        [f"- {line}" for line in (*found.reasons[1:], *found.notes)],
        ["## Place", "", *markdown_table(("", ""), place, left={0, 1})] if place else [],
        _taps(found),
        _strip(found, svg),
        ["## Reproduce", "", "```sh", *commands, "```"] if commands else [],
        ["## Words", "", *(f"- **{word}**: {meaning}" for word, meaning in WORDS.items())],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _taps(found: Located) -> list[str]:
    if not found.rows:
        return []
    what = "Of each tap the layer that is furthest off."
    if found.layer is not None and found.outcome == "located":
        what = "Of the first wrong layer."
    table = markdown_table(_head(found.rows), _cells(found.rows), left={1, 5})
    limit = f"Limit of the isolated error: {power(TAP)}."
    if found.rows[0].isolated is None:
        limit = f"Limits in noise floors: {MEDIAN:g} for a tap's median, {KV_WORST:g} for one row."
    return ["## Taps", "", f"{what} {limit}", "", *table]


def _strip(found: Located, svg: str | None) -> list[str]:
    strip = found.strip
    if strip is None or svg is None:
        return []
    limit = f"{strip.unit}; limit {power(strip.limit)}."
    return ["## By layer and position", "", limit, "", f"![{strip.unit}]({svg})"]


def _cells(rows: Sequence[TapRow]) -> list[list[str]]:
    return [
        [
            "-" if r.tap == "logits" else str(r.layer),
            r.tap,
            *map(number, _errors(r)),
            "-" if r.first is None else str(r.first),
            ", ".join(map(str, r.heads)) or "-",
        ]
        for r in rows
    ]


def _head(rows: Sequence[TapRow]) -> tuple[str, ...]:
    return OPENED if rows[0].isolated is None else HEAD


def _errors(row: TapRow) -> tuple[float, float]:
    """The two numbers of a tap, as `_head` calls them."""
    if row.isolated is not None:
        return row.isolated, row.propagated
    return row.propagated, math.nan if row.floors is None else row.floors


def _layers(found: Located, count: int) -> str:
    wrong = len(found.layers)
    if found.layer is None:
        return "-"
    if not wrong:
        return f"{found.layer}, the first that shows"
    if wrong == 1:
        return f"{found.layer} (this layer alone)"
    if wrong == count:
        return f"{found.layer} (every layer is wrong by itself)"
    return f"{found.layer} ({wrong} of {count} layers are wrong by themselves)"

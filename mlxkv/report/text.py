"""Numbers, tokens and tables as text, for the terminal and for Markdown. Pure functions."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from mlxkv.judge.result import Gate, plain
from oracle.formats.trace import CACHES

Row = Sequence[str]
WIDTH = 100


def pretty(value: Any) -> str:
    """JSON for a report's file: the same bytes for the same value."""
    text = json.dumps(plain(value), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return f"{text}\n"


def quoted(text: str) -> str:
    """Text in quotes; what cannot be printed is escaped, so that none can steer a terminal."""
    plain = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in plain)


def code(text: str) -> str:
    """Text as a Markdown code span that may stand in a table."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    room = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{room}{text}{room}{fence}".replace("|", "\\|")


def clip(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def shortened(text: str, most: int) -> str:
    """Text of at most `most` characters without its middle: an error begins with what it is, and
    ends with where it was raised.
    """
    if len(text) <= most:
        return text
    end = (most - 3) // 2
    return f"{text[: most - 3 - end]}...{text[-end:]}"


def filled(text: str, indent: str = "  ", *, width: int = WIDTH) -> list[str]:
    """Lines of at most `width` columns, broken between words; those after the first indented."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def wrapped(text: str) -> list[str]:
    """Lines of at most 100 columns, broken after a semicolon; those after the first indented."""
    first, *rest = text.split("; ")
    lines = [first]
    for clause in rest:
        if len(f"{lines[-1]}; {clause};") <= WIDTH:
            lines[-1] += f"; {clause}"
        else:
            lines[-1] += ";"
            lines.append(f"  {clause}")
    return lines


def several(n: int, what: str) -> str:
    """As in "1 token" and "2 tokens"."""
    return f"{n} {what}{'s' * (n != 1)}"


def number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"


def power(value: float, *, digits: int = 1) -> str:
    """So many digits and a short exponent, as in 5e-8."""
    return re.sub(r"e([-+])0(\d)$", r"e\1\2", f"{value:.{digits - 1}e}")


def ordered(value: float, limit: float) -> tuple[str, str]:
    """Value and limit with as many digits as it takes to see which is larger."""
    if math.isnan(value) or limit == 0:
        return f"{value:zg}", f"{limit:g}" if limit < 1e-3 else f"{limit:.2f}"
    kind = "f" if value < 1e5 else "e"
    for digits in range(2, 18):
        shown = f"{value:z.{digits}{kind}}", f"{limit:.{digits}f}"
        if limit < 1e-3:
            shown = f"{value:.{digits - 1}e}", f"{limit:g}"
        if _order(float(shown[0]), float(shown[1])) == _order(value, limit):
            break
    return shown


def _order(a: float, b: float) -> int:
    return (a > b) - (a < b)


def headroom(gate: Gate) -> str:
    """How often the value fits under the limit."""
    times = gate.headroom
    if math.isnan(times):
        return "-"
    if times < 0.01:
        return "<0.01x"
    digits = 0 if times >= 10 else 1 if times >= 0.1 else 2
    return f"{times:.{digits}f}x"


def where(gate: Gate) -> str:
    """Layer, head, position and token, as far as the gate has them; or why it did not run."""
    if gate.reason is not None:
        return gate.reason
    parts = [f"layer {gate.layer} head {gate.head}"] if gate.layer is not None else []
    if gate.position is not None:
        token = f" {quoted(gate.token)}" if gate.token is not None else ""
        parts.append(f"pos {gate.position}{token}")
    return " ".join(parts) or "-"


def gate_cells(gate: Gate) -> list[str]:
    """gate, plan, value, limit, headroom, where."""
    value, limit = ordered(gate.value, gate.limit)
    return [gate.name, gate.plan, value if gate.ran else "-", limit, headroom(gate), where(gate)]


def columns(head: Row, rows: Sequence[Row], *, left: set[int]) -> list[str]:
    """Aligned lines for a terminal; columns not in `left` are right-aligned."""
    return ["  ".join(row).rstrip() for row in _aligned([head, *rows], left)]


def markdown_table(head: Row, rows: Sequence[Row], *, left: set[int]) -> list[str]:
    rule = ["---" if i in left else "--:" for i in range(len(head))]
    lines = _aligned([head, rule, *rows], left)
    lines[1] = [cell.replace(" ", "-") for cell in lines[1]]
    return [f"| {' | '.join(line)} |" for line in lines]


def _aligned(rows: Sequence[Row], left: set[int]) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    marks = ["<" if i in left else ">" for i in range(len(widths))]
    forms = [f"{{:{mark}{width}}}" for mark, width in zip(marks, widths, strict=True)]
    return [[form.format(cell) for form, cell in zip(forms, row, strict=True)] for row in rows]


def environment_rows(environment: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Names and values of what a run depends on, as text."""
    rows = sorted((name, value) for name, value in environment.items() if name != CACHES)
    return tuple((name, _value(value)) for name, value in rows)


def environment_table(environments: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return side_by_side([(name, environment_rows(one)) for name, one in environments.items()])


def side_by_side(sides: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> list[str]:
    """A Markdown table of named values, a column for each side."""
    names = list(dict.fromkeys(name for _, rows in sides for name, _ in rows))
    values = [dict(rows) for _, rows in sides]
    cells = [[name, *(_cell(value.get(name, "-")) for value in values)] for name in names]
    head = ("", *(title for title, _ in sides))
    return markdown_table(head, cells, left=set(range(len(head))))


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={_value(v)}" for k, v in sorted(value.items())) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")

"""Do two sets of report files say the same? Tokens, errors and verdicts exactly, distances within a factor of 2.

What may move freely: where a value was worst, the environment, and figures that only restate a distance on another scale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FACTOR = 2.0
FREE = {
    "environment",
    "position",
    "token",
    "layer",
    "head",
    "headroom",
    "worst",
    "nmse_db",
    "cosine",
    "kl",
}
_NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?x?")


def folders(committed: Path, fresh: Path, names: Sequence[Path]) -> list[str]:
    """The differences of the files `names`, one line each."""
    found = []
    for name in names:
        old, new = committed / name, fresh / name
        if not old.is_file():
            found.append(f"{name}: missing, expected it as just made; run `mlxkv reports`")
        elif name.suffix == ".json":
            found += values(_load(old), json.loads(new.read_bytes()), where=str(name))
        elif name.suffix == ".md":
            found += lines(
                old.read_text(encoding="utf-8"), new.read_text(encoding="utf-8"), where=str(name)
            )
    return found


def values(old: Any, new: Any, *, where: str) -> list[str]:
    """The differences of two decoded JSON files: `old` is the committed one."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = [
            f"{where}.{key}: only in the {'committed' if key in old else 'new'} file"
            for key in sorted(set(old) ^ set(new))
        ]
        for key in sorted((set(old) & set(new)) - FREE):
            found += values(old[key], new[key], where=f"{where}.{key}")
        return found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            line
            for i, (a, b) in enumerate(zip(old, new, strict=True))
            for line in values(a, b, where=f"{where}[{i}]")
        ]
    if isinstance(old, float) and isinstance(new, float):
        return (
            []
            if _near(old, new)
            else [
                f"{where}: {old:.3g} committed, {new:.3g} now, more than a factor of {FACTOR:g} apart"
            ]
        )
    return (
        []
        if type(old) is type(new) and old == new
        else [f"{where}: {_clip(old)} committed, {_clip(new)} now"]
    )


def lines(old: str, new: str, *, where: str) -> list[str]:
    """The differences of two Markdown files once numbers, places and the environment are left out."""
    a, b = _skeleton(old), _skeleton(new)
    if a == b:
        return []
    at = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    return [
        f"{where}: {_clip(a[at] if at < len(a) else '')} committed, {_clip(b[at] if at < len(b) else '')} now"
    ]


def _near(old: float, new: float) -> bool:
    if old == new:
        return True
    return old * new > 0 and 1 / FACTOR <= new / old <= FACTOR


def _skeleton(text: str) -> list[str]:
    kept, section = [], ""
    for line in text.splitlines():
        if line.startswith("#"):
            section = line
        if section == "## Environment":
            continue
        if section == "## Prompts" and line.startswith("|"):
            # The worst comes first, and which of several good ones is the worst is noise.
            kept.append(f"{section} {_NUMBER.sub('#', line)}")
            continue
        placed = section == "## Gates" and line.startswith("|")
        shown = line.rsplit("|", 2)[0] if placed else line
        kept.append(_NUMBER.sub("#", shown) if section != "## Tokens" else shown)
    found = [" ".join(line.split()) for line in kept]
    rows = iter(sorted(line for line in found if line.startswith("## Prompts |")))
    return [next(rows) if line.startswith("## Prompts |") else line for line in found]


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return f"unreadable file {path.name}"


def _clip(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "..."

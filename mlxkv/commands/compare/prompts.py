"""The sequences that one comparison runs over: read from a file, built in, or drawn. Text and ids, no tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle.formats.errors import Refusal

BUILTIN = "builtin"
_KEYS = ("prompt", "tokens", "name", "steps")
# A name becomes a folder's; without a dot it cannot be one of the report's files.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One sequence's beginning: text or ids, and how many greedy tokens follow (None: as the command says)."""

    name: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Long:
    """The one long sequence of the reports: `length` ids, of which `chunks` are the prompt and the rest is decoded."""

    length: int = 1024
    chunks: tuple[int, ...] = (640, 320)


LONG = Long()


def builtin() -> tuple[Prompt, ...]:
    """Prose, code, numbers, and rare and repeated tokens."""
    return read(Path(__file__).with_name("prompts.jsonl"))


def named(source: str) -> tuple[Prompt, ...]:
    """The built-in prompts or those of a file."""
    return builtin() if source == BUILTIN else read(Path(source))


def drawn(length: int, *, vocab_size: int) -> tuple[int, ...]:
    """Ids that are the same on every machine and no text: each is the sha256 of its place, modulo the vocabulary."""
    digests = (hashlib.sha256(str(i).encode()).digest() for i in range(length))
    return tuple(int.from_bytes(digest[:8], "big") % vocab_size for digest in digests)


def read(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a file, or a Refusal with the line. JSON lines where the first line begins with {, else one text a line.

    Blank lines and lines from # on are left out. A prompt without a name is called after its line.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(
            f"{path}: cannot be read as UTF-8 text ({' '.join(str(error).split())}); check the path"
        ) from error
    # Not splitlines: what else Unicode calls the end of a line may stand in a prompt.
    lines = [(i, line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1)]
    lines = [(i, line) for i, line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise Refusal(
            f'{path}: no prompts, expected a line or more, of text or as {{"prompt": "..."}}; add some'
        )
    as_json = path.suffix == ".jsonl" or lines[0][1].lstrip().startswith("{")
    found = [
        _prompt(line, i, f"{path}: line {i}") if as_json else Prompt(f"line-{i}", line)
        for i, line in lines
    ]
    _unlike(found, [i for i, _ in lines], path)
    return tuple(found)


def _prompt(line: str, number: int, where: str) -> Prompt:
    try:
        value = json.loads(line, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise Refusal(
            f"{where}: not JSON ({error or 'nested too deep'}), expected an object with prompt or tokens; mend it"
        ) from error
    if not isinstance(value, dict):
        raise Refusal(
            f"{where}: {_shown(value)}, expected an object with prompt or tokens; write it in braces"
        )
    unknown = sorted(set(value) - set(_KEYS))
    if unknown:
        raise Refusal(
            f"{where}: unknown key {_shown(unknown[0])}, expected {', '.join(_KEYS)}; take it out"
        )
    if ("prompt" in value) == ("tokens" in value):
        raise Refusal(
            f"{where}: {'both' if 'prompt' in value else 'neither'} prompt and tokens, expected one of them; mend it"
        )
    for key, (good, expected) in _expected(value).items():
        if not good:
            raise Refusal(f"{where}: {key} is {_shown(value[key])}, expected {expected}; mend it")
    tokens = value.get("tokens")
    return Prompt(
        value.get("name", f"line-{number}"),
        value.get("prompt"),
        None if tokens is None else tuple(tokens),
        value.get("steps"),
    )


def _expected(value: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """Of each key that is there whether its value will do, and what would."""
    tokens, name = value.get("tokens"), value.get("name")
    rules = {
        "prompt": (isinstance(value.get("prompt"), str) and value["prompt"] != "", "text"),
        "tokens": (
            isinstance(tokens, list)
            and tokens != []
            and all(type(id) is int and id >= 0 for id in tokens),
            "a list of ids",
        ),
        "name": (
            isinstance(name, str) and bool(_NAME.fullmatch(name)),
            "1 to 64 letters, digits, _ and -, since it names a folder",
        ),
        "steps": (type(value.get("steps")) is int and value["steps"] >= 1, "a whole number from 1"),
    }
    return {key: rules[key] for key in _KEYS if key in value}


def _unlike(found: list[Prompt], lines: list[int], path: Path) -> None:
    """Names become folders, and some file systems do not tell upper case from lower."""
    seen: dict[str, int] = {}
    for prompt, line in zip(found, lines, strict=True):
        first = seen.setdefault(prompt.name.lower(), line)
        if first != line:
            raise Refusal(
                f"{path}: line {line}: name {_shown(prompt.name)} is that of line {first} too, expected another; rename one"
            )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for i, (key, _) in enumerate(pairs) if key in [k for k, _ in pairs[:i]]]
    if twice:
        raise ValueError(f"key {_shown(twice[0])} twice")
    return dict(pairs)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

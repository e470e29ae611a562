"""The sequences that one comparison runs over: read from a file, built in, or drawn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from oracle.formats import disk, strict_json
from oracle.formats.errors import Refusal, one_line

BUILTIN = "builtin"


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sequence's beginning, text or ids, and how many greedy tokens follow; as a line of JSON.

    The name becomes a folder's; without a dot it is no report's file. What is empty was not given;
    `steps` 0: as many as the command says.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,63}\Z")] = ""
    prompt: Annotated[str, Meta(min_length=1)] = ""
    tokens: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)] = ()
    steps: Annotated[int, Meta(ge=1)] = 0


LONG, LONG_CHUNKS = 1024, (640, 320)
"""The reports' long sequence: how many ids, and of which chunks its prompt."""


def builtin() -> tuple[Prompt, ...]:
    """Prose, code, numbers, and rare and repeated tokens."""
    return read(Path(__file__).with_name("prompts.jsonl"))


def named(source: str) -> tuple[Prompt, ...]:
    return builtin() if source == BUILTIN else read(Path(source))


def drawn(length: int, *, vocab_size: int) -> tuple[int, ...]:
    """Ids that are the same everywhere: the sha256 of each place modulo the vocabulary."""
    digests = (hashlib.sha256(str(i).encode()).digest() for i in range(length))
    return tuple(int.from_bytes(digest[:8], "big") % vocab_size for digest in digests)


def read(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a UTF-8 file; a Refusal names the line that will not do.

    A file whose name ends in .jsonl, or whose first line begins with {, holds a JSON object a line,
    any other one text a line. Blank lines and lines that begin with # are left out. A prompt
    without a name is called after its line.
    """
    text = disk.read_text(path).removeprefix("\ufeff")
    # Not splitlines: what else Unicode calls the end of a line may stand in a prompt.
    lines = [(i, line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1)]
    lines = [(i, line) for i, line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        expected = 'expected a line or more, of text or as {"prompt": "..."}'
        raise Refusal(f"no prompts, {expected}", where=path, remedy="add some")
    if path.suffix == ".jsonl" or lines[0][1].lstrip().startswith("{"):
        found = [_prompt(line, i, f"{path}: line {i}") for i, line in lines]
    else:
        found = [Prompt(f"line-{i}", line) for i, line in lines]
    _require_different(found, [i for i, _ in lines], path)
    return tuple(found)


def _prompt(line: str, number: int, where: str) -> Prompt:
    remedy = (
        "write an object with prompt or tokens, and if you like name (it names a folder), steps"
    )
    try:
        value = strict_json.decode(line)
    except ValueError as error:
        raise Refusal(f"not JSON ({one_line(error)})", where=where, remedy=remedy) from error
    given = strict_json.typed(value, Prompt, where=where, remedy=remedy)
    if bool(given.prompt) == bool(given.tokens):
        which = "both prompt and" if given.prompt else "neither prompt nor"
        raise Refusal(f"{which} tokens, expected one of them", where=where, remedy=remedy)
    return given if given.name else msgspec.structs.replace(given, name=f"line-{number}")


def _require_different(found: Sequence[Prompt], lines: Sequence[int], path: Path) -> None:
    """Names become folders, and some file systems do not tell upper case from lower."""
    seen: dict[str, int] = {}
    for prompt, line in zip(found, lines, strict=True):
        first = seen.setdefault(prompt.name.lower(), line)
        if first != line:
            what = f"name {json.dumps(prompt.name)} is that of line {first} too, expected another"
            raise Refusal(what, where=f"{path}: line {line}", remedy="rename one")

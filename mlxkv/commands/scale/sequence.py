"""The tokens of a case: ids, or as much of a text as makes so many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oracle.formats.disk import read_text, write_text
from oracle.formats.errors import Refusal
from oracle.model import tokenizer

TEXT = Path(__file__).parents[1] / "text.txt"
_TRIES = 100


@dataclass(frozen=True, slots=True)
class Ids:
    """The prompt's ids."""

    ids: tuple[int, ...]

    def options(self, folder: Path, room: Path, *, steps: int) -> list[str]:
        """The prompt as a command takes it; `folder` is the model's."""
        return [f"--tokens={','.join(map(str, self.ids))}"]


@dataclass(frozen=True, slots=True)
class Text:
    """`tokens` in all, the last few of which are decoded."""

    tokens: int

    def options(self, folder: Path, room: Path, *, steps: int) -> list[str]:
        """A file in `room` with the text of the prompt, since an argument would be too long."""
        words = tokenizer.load(folder)
        if words is None:
            what = "no tokenizer.json, expected one for a text"
            raise Refusal(what, where=folder, remedy="give the case ids")
        path = room / "prompt.txt"
        write_text(path, exactly(words, self.tokens - (steps - 1)))
        return ["--prompt-file", str(path)]


def exactly(words: tokenizer.Tokenizer, length: int) -> str:
    """A text of exactly so many tokens: the built-in one again and again, from a place near its
    beginning on. From some places the cut at the end makes other tokens.
    """
    text = read_text(TEXT)
    ids: Sequence[int] = words.encode(text)
    ids = words.encode(text * (-(-(length + _TRIES) // len(ids)) + 1))
    for start in range(_TRIES):
        found = words.decode(ids[start : start + length])
        if len(words.encode(found)) == length:
            return found
    what = f"no text of exactly {length} tokens was found"
    raise Refusal(what, where=TEXT, remedy="take another length")

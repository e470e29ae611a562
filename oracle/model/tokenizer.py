"""Text -> token ids -> text, with the checkpoint's own tokenizer.json, and the check of given ids.

A prompt is tokenised once and both engines get the same ids. Nothing is repaired: if a text begins
with the token that the tokenizer adds, `warning` says so and both are kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oracle.formats import disk
from oracle.formats.errors import Refusal, one_line

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A folder's tokenizer. `warning` is a line on the last encoded text, to be shown, or None."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # A file may ask for either, and a prompt would be cut or filled up without a word.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.warning: str | None = None

    def encode(self, text: str) -> list[int]:
        """The ids, with what the tokenizer's own post-processor adds."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"not text ({error.reason} at place {error.start}), expected Unicode"
            raise Refusal(what, where="prompt", remedy="check its encoding") from error
        bare = list(self._inner.encode(text, add_special_tokens=False).ids)
        if not bare:
            what = f"{'no tokens' if text else 'empty'}, expected text of one token or more"
            raise Refusal(what, where="prompt", remedy="give some text or token ids")
        ids = list(self._inner.encode(text).ids)
        self.warning = self._doubled(ids, bare)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text, special tokens included."""
        return str(self._inner.decode(list(ids), skip_special_tokens=False))

    def stream(self, prompt: Sequence[int], ids: Iterable[int]) -> Iterator[str]:
        """The text of `ids` after a prompt, piece by piece, as the ids come.

        All pieces together are `decode(prompt + ids)[len(decode(prompt)):]`. A decoder may drop a
        text's first space, and makes characters of whole runs of bytes: so the whole is decoded
        each time, and a piece waits for the token that ends its last run.
        """
        sequence = list(prompt)
        shown = len(self.decode(sequence))
        text = ""
        for id in ids:
            sequence.append(id)
            text = self.decode(sequence)
            if not (text.endswith("\ufffd") or _BYTE_TOKEN.fullmatch(self._spelling(id))):
                yield text[shown:]
                shown = max(shown, len(text))
        if text[shown:]:
            yield text[shown:]

    def token_text(self, id: int) -> str:
        """One token's text as it is within a sentence; part of a character as bytes: <f0 9f>."""
        spelling = self._spelling(id)
        if not spelling:
            return f"<{id}>"
        # Some decoders drop the space before a sentence's first word: the second of two keeps it.
        first, both = self.decode([id]), self.decode([id, id])
        text = both[len(first) :] if both.startswith(first) else first
        return _bytes(spelling) if not text or "\ufffd" in text else text

    def _spelling(self, id: int) -> str:
        return str(self._inner.id_to_token(id) or "")

    def _doubled(self, ids: list[int], bare: list[int]) -> str | None:
        if ids[0] != bare[0] or ids[1 : 1 + len(bare)] != bare:
            return None
        twice = f"begins with {self._inner.id_to_token(ids[0])} twice"
        return f"prompt: {twice} (the text has it and the tokenizer adds it); both are kept"


def _bytes(spelling: str) -> str:
    """The bytes that SentencePiece's or GPT-2's vocabulary spells so; another spelling as it is."""
    if byte := _BYTE_TOKEN.fullmatch(spelling):
        return f"<{byte[1].lower()}>"
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    byte_of = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
    if not set(spelling) <= set(byte_of):
        return spelling
    return f"<{bytes(byte_of[c] for c in spelling).hex(' ')}>"


def load(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder; None without a tokenizer.json, so that only ids can be given."""
    path = folder / "tokenizer.json"
    if not os.path.exists(path):
        return None
    import tokenizers

    try:
        return Tokenizer(tokenizers.Tokenizer.from_buffer(disk.read_bytes(path)))
    except Exception as error:  # the library raises no narrower class
        what = f"not a tokenizer ({one_line(error)}), expected what `tokenizers` writes"
        raise Refusal(what, where=path, remedy="download it again or give token ids") from error


def check_ids(ids: Sequence[int], *, vocab_size: int, max_positions: int) -> None:
    """Refuses ids that the model has no row or no position for."""
    if not ids:
        what = "none, expected one id or more"
        raise Refusal(what, where="tokens", remedy="give some text or token ids")
    for place, id in enumerate(ids):
        if type(id) is not int or not 0 <= id < vocab_size:
            what = f"id {id!r} at place {place}, expected 0 to {vocab_size - 1}"
            raise Refusal(what, where="tokens", remedy="take ids of this model's vocabulary")
    if len(ids) > max_positions:
        most = f"{max_positions} (max_position_embeddings)"
        what = f"{len(ids)} of them, expected at most {most}"
        raise Refusal(what, where="tokens", remedy="shorten the prompt")

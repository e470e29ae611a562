"""From a request to what is asked: the tokens of the text, its truth, and the variants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlxkv.commands.cost import variants
from mlxkv.commands.cost.variants import Variant
from mlxkv.engines.kinds import Lossy
from oracle.formats.disk import read_text
from oracle.formats.errors import Refusal
from oracle.model import tokenizer
from oracle.model.checkpoint import Checkpoint, Named

LENGTH, DECODE = 1024, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Named):
    """A text (None: the built-in one) or its ids, and what to measure on it.

    The first `length` tokens go in calls of `chunk`, `decode` more one by one; None: 1,024 and 256,
    or fewer where the text or the model has fewer. `caches` are measured beside the full one, in
    place of the `chosen` variants; `lossy` and `known` are said of a person's own.
    """

    text: Path | None = None
    tokens: tuple[int, ...] | None = None
    caches: tuple[str, ...] = ()
    lossy: Lossy | None = None
    known: str | None = None
    chosen: str = "default"
    length: int | None = None
    chunk: int = 64
    decode: int | None = None
    device: str = "auto"
    fresh: bool = False

    def variants(self) -> tuple[Variant, ...]:
        if self.caches:
            return variants.chosen(self.caches, self.lossy or "", self.known or "")
        if self.lossy or self.known:
            what = "no --cache, expected one of your own that it is said of"
            raise Refusal(what, where="--lossy, --known", remedy="leave it out")
        return variants.everything() if self.chosen == "all" else variants.default()


@dataclass(frozen=True, slots=True)
class Passage:
    """The tokens that are fed, of which the first `length` in chunks; `title` says whose text."""

    tokens: tuple[int, ...]
    length: int
    title: str


def passage(request: Request, checkpoint: Checkpoint) -> Passage:
    """What of the text is fed; a Refusal where it has less than was asked for."""
    ids, title = _ids(request, checkpoint)
    most = min(len(ids), checkpoint.max_positions)
    decode = min(DECODE, most // 5) if request.decode is None else request.decode
    length = min(LENGTH, most - decode) if request.length is None else request.length
    if not 1 <= length <= most - decode:
        few = f"{len(ids)} tokens" if most == len(ids) else f"{most} positions (of the model)"
        what = f"{few}, expected at least {max(1, length) + decode}"
        raise Refusal(what, where=title, remedy="give smaller --length and --decode")
    found = ids[: length + decode]
    sizes = {"vocab_size": checkpoint.vocab_size, "max_positions": checkpoint.max_positions}
    tokenizer.check_ids(found, **sizes)
    if len(found) < 2:
        raise Refusal("1 token, expected two or more", where=title, remedy="give a longer text")
    return Passage(tuple(found), length, title)


def _ids(request: Request, checkpoint: Checkpoint) -> tuple[list[int], str]:
    if request.tokens is not None:
        if request.text is not None:
            raise Refusal("--text and --tokens: expected one of them; leave the other out")
        return list(request.tokens), "--tokens"
    words = tokenizer.load(checkpoint.folder)
    if words is None:
        what = "no tokenizer.json, expected one for a text"
        raise Refusal(what, where=checkpoint.folder, remedy="give ids with --tokens")
    path = request.text or Path(__file__).parents[1] / "text.txt"
    title = str(request.text) if request.text else "the built-in text"
    return words.encode(read_text(path)), title

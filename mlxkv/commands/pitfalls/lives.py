"""The lives that a cache is put through by `pitfalls --cache`, as plans over a few known talks.

Each is what a user of caches does: feeds a prompt and single tokens, trims what a draft model
guessed, keeps a prompt in a store, saves it, is interrupted. None names a position: the cache knows
where it is. Which call should continue which talk, `history` reads from the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlxkv.commands.pitfalls.scenarios import Setting
from oracle.formats.plan import (
    Call,
    Clone,
    Crop,
    Fail,
    Ids,
    New,
    Pad,
    Plan,
    Recall,
    Reload,
    Reset,
    Rows,
    Step,
    Trim,
)

Steps = tuple[Step, ...]

WHAT: dict[str, str] = {
    "singles": "the prompt in one call, then single tokens",
    "alone": "single tokens from the first on",
    "chunks": "chunks of several sizes",
    "several": "several tokens in a call after single ones, and single ones after them",
    "reset": "emptied (or a new one, if there is no such call) and used for another prompt",
    "branches": "one prefix, copied; one end after the other",
    "turns": "one prefix, copied; both ends fed in turn, a call each",
    "copy": "copied while decoding: the copy writes, then the original, then a chunk on each",
    "batch": "two sequences in one batch",
    "ragged": "two prompts of different lengths in one batch, the shorter padded on its left",
    "trim": "a used cache cut back to a common prefix, another end after it",
    "draft": "a chunk of guesses of which the last are cut off; again, by one token",
    "nothing": "cut back to nothing, another prompt after it",
    "more": "asked to trim more tokens than it holds; the prompt again, or on where it was",
    "saved": "saved to a file, loaded, and continued",
    "empty-saved": "saved and loaded while it is empty, then used",
    "cut-saved": "cut back, saved, loaded, and continued",
    "stored": "kept in a store; a prompt that begins alike continues from it, then the kept one",
    "broken": "a call broken off half way through the layers, and the same call again",
    "blocks": "single tokens across the 256th row, and a chunk after them",
    "blocks-chunk": "a chunk across the 256th row",
    "ends": "single tokens after chunks of w - 1, w, w + 1 and 2 w tokens, w being the window",
    "ends-chunks": "chunks that end at w - 1, w, w + 1 and 2 w",
    "wide": "chunks longer than the window, at first and later",
    "late": "chunks after single tokens beyond the window",
    "late-trim": "cut back once tokens have left the window",
    "late-saved": "saved and loaded once tokens have left the window",
    "late-copy": "copied once tokens have left the window; the copy decodes, then the original",
    "lengths": "the length that it says, beside the tokens that it was fed",
    "bytes": "the bytes that it says, beside those of its arrays",
}
"""What is tried, in the order of the tables. The last two need no calls of their own: they are read
from the others."""
FACTS = ("lengths", "bytes")
ONLY_FED = ("singles", "alone", "chunks", "several", "blocks", "blocks-chunk")
"""Those in which nothing else happens to the cache."""
WINDOW = ("ends", "ends-chunks", "wide", "late", "late-trim", "late-saved", "late-copy")
"""Those that only a window has."""
_BLOCKS = 264
"""Tokens across the 256 rows in which caches grow."""
STEPS_LEAST = 14
"""Tokens after each prompt that the longest of the lives without a window takes, and one more."""
_BEFORE = 2
"""Single tokens after the prompt before something happens to the cache."""


@dataclass(frozen=True, slots=True)
class Life:
    """A named plan; `words` instead say why a cache has none."""

    name: str
    plan: Plan | None
    words: str = ""

    @property
    def what(self) -> str:
        return WHAT[self.name]


@dataclass(frozen=True, slots=True)
class Talks:
    """The tokens of what is told to a cache: two talks that begin alike, and a long one.

    `kept` are the positions of the long one that have a known row, "all" if each has.
    """

    setting: Setting
    long: Ids = ()
    kept: Rows = "all"

    @property
    def tokens(self) -> dict[str, Ids]:
        found = {"first": self.setting.sequence, "second": self.setting.other_sequence}
        return found | ({"long": self.long} if self.long else {})

    @property
    def rows(self) -> dict[str, Rows]:
        """Which rows a plan over each of them keeps."""
        return {"first": "all", "second": "all", "long": self.kept}


def lives(talks: Talks, *, window: int | None = None) -> list[Life]:
    """All lives of a cache; those at a window's ends for one of `window` tokens."""
    setting = talks.setting
    made: dict[str, Steps] = _fed(setting) | _copied(setting) | _cut(setting) | _kept(setting)
    found = [Life(name, Plan(name, steps)) for name, steps in made.items()]
    found += _blocks(talks) + (_windows(talks, window) if window is not None else [])
    return sorted(found, key=lambda life: list(WHAT).index(life.name))


def feed(cache: str, tokens: Ids, start: int, sizes: Sequence[int]) -> Iterator[Call]:
    """Calls of these sizes, from the token at `start` on."""
    for size in sizes:
        yield Call(cache, tokens[start : start + size])
        start += size


def straight(name: str, tokens: Ids, sizes: Sequence[int], rows: Rows = "all") -> Plan:
    """A fresh cache that is fed `tokens` in calls of these sizes, and nothing else."""
    return Plan(name, (New("a"), *feed("a", tokens, 0, sizes)), rows)


def _fed(s: Setting) -> dict[str, Steps]:
    """A cache that is only fed, with one sequence or a batch."""
    first, second, new, p = s.sequence, s.other_sequence, New("a"), len(s.first)
    sizes = {
        "singles": [p, *[1] * 8],
        "alone": [1] * (p + 4),
        "chunks": [2, p - 2, 4, 3],
        "several": [p, 1, 1, 3, 1, 1, 4, 1],
    }
    width = s.width
    pairs = tuple(zip(first, second, strict=False))
    whole = Call("a", (first[:width], second[:width]))
    singles = (Call("a", ((a,), (b,))) for a, b in pairs[width : width + 4])
    later = Call("a", (first[width + 4 : width + 7], second[width + 4 : width + 7]))
    made: dict[str, Steps] = {
        name: (new, *feed("a", first, 0, some)) for name, some in sizes.items()
    }
    return made | {"batch": (new, whole, *singles, later), "ragged": _ragged(s)}


def _ragged(s: Setting) -> Steps:
    """The first prompt, and of the second all but its last two tokens, with padding before it."""
    first, second, p = s.sequence, s.other_sequence, len(s.first)
    q = min(len(s.second), p) - 2
    padded = (0,) * (p - q) + second[:q]
    singles = (Call("a", ((first[p + i],), (second[q + i],))) for i in range(4))
    later = Call("a", (first[p + 4 : p + 7], second[q + 4 : q + 7]))
    return (New("a"), Pad("a", (0, p - q)), Call("a", (first[:p], padded)), *singles, later)


def _used(s: Setting) -> Steps:
    """A prompt and a few single tokens."""
    return (New("a"), *feed("a", s.sequence, 0, [len(s.first), *[1] * _BEFORE]))


def _copied(s: Setting) -> dict[str, Steps]:
    first, second, n, p = s.sequence, s.other_sequence, s.common, len(s.first)
    prefix: Steps = (New("a"), *feed("a", first, 0, [n]), Clone("a", "b"))
    sizes = [p - n, *[1] * 4]
    one = tuple(feed("a", first, n, sizes))
    other = tuple(feed("b", second, n, [len(s.second) - n, *[1] * 4]))
    turns = tuple(call for pair in zip(one, other, strict=True) for call in pair)
    begun = [n - 1, 1] if n > 1 else [n]
    copy: Steps = (
        New("a"),
        *feed("a", first, 0, begun),
        Clone("a", "b"),
        *feed("b", second, n, [1, 1]),
        *feed("a", first, n, [1, 1, 1]),
        *feed("b", second, n + 2, [3, 1]),
        *feed("a", first, n + 3, [4, 1]),
        *feed("b", second, n + 6, [1]),
    )
    return {
        "reset": (*_used(s), Reset("a"), *feed("a", second, 0, [len(s.second), 1, 1, 1])),
        "branches": (*prefix, *one, *other),
        "turns": (*prefix, *turns),
        "copy": copy,
    }


def _cut(s: Setting) -> dict[str, Steps]:
    first, second, n, p = s.sequence, s.other_sequence, s.common, len(s.first)
    end: Steps = tuple(feed("a", second, n, [len(s.second) - n, 1, 1, 1]))
    at = p + _BEFORE
    draft = (
        *_used(s)[:-1],
        *feed("a", first, at - 1, [3]),
        Crop("a", at + 1),
        *feed("a", first, at + 1, [1]),
        Crop("a", at + 1),
        *feed("a", first, at + 1, [1, 2, 1]),
    )
    return {
        "trim": (*_used(s), Crop("a", n), *end),
        "draft": draft,
        "nothing": (*_used(s), Crop("a", 0), *feed("a", second, 0, [len(s.second), 1, 1])),
        # What was refused has left the cache as it was; then the first tokens again belong to
        # no talk, and the last ones do.
        "more": (
            *_used(s),
            Trim("a", at + 3),
            *feed("a", second, 0, [len(s.second), 1, 1]),
            New("b"),
            *feed("b", first, 0, [p]),
            Trim("b", p + 200),
            *feed("b", first, p, [1, 2]),
        ),
    }


def _kept(s: Setting) -> dict[str, Steps]:
    """What leaves the process, or is broken off."""
    first, second, n, p = s.sequence, s.other_sequence, s.common, len(s.first)
    at = p + _BEFORE
    on: Steps = (*feed("a", first, at, [1, 3, 1]),)
    cut: Steps = (Crop("a", n), *feed("a", second, n, [len(s.second) - n, 1]), Crop("a", n + 1))
    rest = tuple(feed("a", second, n + 1, [len(s.second) - n - 1, 1, 1]))
    stored: Steps = (Recall("a", "b", n), *feed("b", second, n, [len(s.second) - n, 1, 1]))
    broken = (
        *_used(s),
        Fail("a", first[at : at + 1]),
        *feed("a", first, at, [1, 1]),
        Fail("a", first[at + 2 : at + 5]),
        *feed("a", first, at + 2, [3, 1]),
    )
    return {
        "saved": (*_used(s), Reload("a"), *on),
        "empty-saved": (New("a"), Reload("a"), *feed("a", first, 0, [p, 1, 2])),
        "cut-saved": (*_used(s), *cut, Reload("a"), *rest),
        "stored": (*_used(s), *stored, *on),
        "broken": broken,
    }


def _blocks(talks: Talks) -> list[Life]:
    """Across the 256 rows in which caches grow."""
    n = len(talks.long)
    if n < _BLOCKS:
        return [Life(name, None, f"{n} positions") for name in ("blocks", "blocks-chunk")]
    sizes = {"blocks": [253, *[1] * 5, 6], "blocks-chunk": [200, 55, 3, 6]}
    tokens, kept = talks.long[:_BLOCKS], talks.kept
    rows = kept if isinstance(kept, str) else tuple(at for at in kept if at < _BLOCKS)
    return [Life(name, straight(name, tokens, some, rows)) for name, some in sizes.items()]


def _windows(talks: Talks, w: int) -> list[Life]:
    """At the ends of a window of w tokens, on the shortest talk that has them."""
    ways, longest = _ways(w), 0
    for some in ways.values():
        longest = max([longest, *(sum(sizes) for sizes, _ in some)])
    names = [name for name, tokens in talks.tokens.items() if len(tokens) >= longest]
    if not names or w < 4:
        why = f"a window of {w}; 4 to {(max(map(len, talks.tokens.values())) - 4) // 2} can be seen"
        return [Life(name, None, why) for name in WINDOW]
    tokens, rows = talks.tokens[names[0]], talks.rows[names[0]]
    found = []
    for name, some in ways.items():
        end = max(sum(sizes) for sizes, _ in some)
        kept = rows if isinstance(rows, str) else tuple(at for at in rows if at < end)
        found.append(Life(name, Plan(name, _steps(some, tokens), kept)))
    return found


_Way = tuple[Sequence[int], Mapping[int, str]]
"""Sizes of calls, and before the call of some numbers what is done."""


def _ways(w: int) -> dict[str, list[_Way]]:
    """By life the ways of its caches."""
    edges = (w - 1, w, w + 1, 2 * w)
    singles = [1] * (w + 2)
    return {
        "ends": [([edge, 1, 1, 1], {}) for edge in edges],
        "ends-chunks": [([w - 1, 1, 1, w - 1, 3], {}), ([2, w - 2, w, 2], {}), ([1, w, 2], {})],
        "wide": [([w + 3, 1, 1], {}), ([3, w + 2, 1, 2], {}), ([2 * w, 3, 1], {})],
        "late": [([*singles, 3, 1, 2], {}), ([2, *singles, 2, 1], {})],
        "late-trim": [([*singles, 1, 2], {w + 2: "crop"})],
        "late-saved": [([*singles, 1, 2], {w + 2: "save"}), ([w + 3, 1, 2], {1: "save"})],
        "late-copy": [([*singles, 1, 2, 1], {w + 2: "copy"})],
    }


def _steps(ways: Sequence[_Way], tokens: Ids) -> Steps:
    """The steps of each way, on a cache of its own."""
    steps: list[Step] = []
    for name, (sizes, done) in zip("abcd", ways, strict=False):
        steps.append(New(name))
        start = 0
        for i, size in enumerate(sizes):
            steps += _done(done.get(i), name, start, tokens)
            start -= 2 if done.get(i) == "crop" else 0
            steps.append(Call(name, tokens[start : start + size]))
            start += size
    return tuple(steps)


def _done(what: str | None, name: str, held: int, tokens: Ids) -> Steps:
    match what:
        case "crop":
            return (Crop(name, held - 2),)
        case "save":
            return (Reload(name),)
        case "copy":
            return (Clone(name, "copy"), *feed("copy", tokens, held, [1, 2, 1]))
    return ()

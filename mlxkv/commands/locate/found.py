"""What locating found: the place, and every tap that was looked at. No measuring."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mlxkv.commands.locate.layers import EQUAL
from mlxkv.judge.result import Strip, plain

FORMAT = "mlxkv-locate/1"
TAP = EQUAL
"""Of the largest value of a tap: limit for a layer fed the truth's input in float64."""
Found = Literal["nothing", "located", "cannot tell"]


@dataclass(frozen=True, slots=True)
class TapRow:
    """One tap of one layer: its largest errors, relative to the truth's largest value there.

    `isolated` is that of the layer fed the truth's input; None where nobody could feed it, and then
    `floors` is the largest error of the run as it is, in noise floors. `first` is the first
    position above the limit, and `heads` are the heads above it.
    """

    layer: int
    tap: str
    isolated: float | None
    propagated: float
    first: int | None = None
    heads: tuple[int, ...] = ()
    floors: float | None = None

    @property
    def wrong(self) -> bool:
        """Above the limit, or not a number."""
        return self.first is not None


@dataclass(frozen=True, slots=True)
class Located:
    """Where something first goes wrong.

    `position` is the first wrong one of all plans, known as `FirstWrong` says (`about`, `after`),
    `plan` the one it was looked for in. `layers`
    are all layers that are wrong by themselves, of which `layer` is the first; empty where that was
    not tested, since each layer must be fed the truth's input for it. `heads` are the wrong heads,
    of which `head` is the first, None where every head is wrong. `cause` is the usual
    mistake that explains the difference, where one was found. `changes` says of a plan that was
    followed twice how it differs from itself, if it does: another run may show another place.
    """

    outcome: Found
    plan: str | None = None
    position: int | None = None
    about: bool = False
    after: int | None = None
    token: str | None = None
    kind: str | None = None
    layer: int | None = None
    layers: tuple[int, ...] = ()
    tap: str | None = None
    head: int | None = None
    heads: tuple[int, ...] = ()
    hint: str | None = None
    cause: str | None = None
    changes: str | None = None
    rows: tuple[TapRow, ...] = ()
    strip: Strip | None = None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 nothing stands out, 1 something is located, 2 could not tell."""
        return {"nothing": 0, "located": 1, "cannot tell": 2}[self.outcome]

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-locate/1`: plain values; numbers that are not finite are null."""
        rows = [asdict(row) | {"wrong": row.wrong} for row in self.rows]
        head = {"format": FORMAT, "exit_code": self.exit_code, "limit": TAP}
        strip = self.strip and self.strip.to_json()
        found = asdict(replace(self, strip=None)) | {"rows": rows, "strip": strip}
        return dict(plain(head | found))

    @property
    def at(self) -> tuple[int, int] | None:
        """Layer and position, where both are known."""
        if self.layer is None or self.position is None:
            return None
        return self.layer, self.position

    @property
    def pointed(self) -> str:
        """What the first wrong position alone says."""
        return f"the first wrong position points to {self.kind or 'no kind of fault'}"

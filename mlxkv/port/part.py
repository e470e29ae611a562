"""Which part of a model one rank of several has, and which models can be split so.

Heads, KV heads and the MLP's inner width are split evenly; so a rank has whole groups of query
heads with the KV head that they share. Nothing here needs MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oracle.formats.errors import Refusal

if TYPE_CHECKING:
    from oracle.model.checkpoint import Checkpoint

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Projections of which a rank has some rows, and so computes some of the outputs."""
COLUMNS = ("o_proj", "down_proj")
"""Projections of which a rank has some columns; the ranks' products are added up."""
SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


@dataclass(frozen=True, slots=True)
class Part:
    """The part of rank `rank`, counted from 0, of `size` ranks."""

    rank: int
    size: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def of(self, n: int) -> range:
        """Which of `n` heads, rows or columns are this rank's."""
        each = n // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def heads(self, n: int) -> str:
        """Which of `n` KV heads, counted from 0, in words."""
        mine = self.of(n)
        which = f"head {mine[0]}" if len(mine) == 1 else f"heads {mine[0]} to {mine[-1]}"
        return f"KV {which} of {n}, {self}"


def axis_of(name: str, axes: int) -> int | None:
    """Along which of its `axes` a tensor of this name is split; None: every rank has it whole."""
    *_, projection, leaf = ("", *name.split("."))[-2:]
    if projection in ROWS:
        return 0
    return axes - 1 if projection in COLUMNS and leaf != "bias" else None


def require_divides(
    sizes: Mapping[str, int], ranks: int, *, groups: Mapping[str, tuple[int, int]], where: object
) -> None:
    """Refuses, by name, what cannot be split evenly among so many ranks.

    `sizes` are those of SPLIT, `groups` by a packed weight's name its columns and how many of them
    make a group, which is not cut.
    """
    for name, size in sizes.items():
        if size % ranks:
            fit = [n for n in range(2, size + 1) if not any(s % n for s in sizes.values())]
            what = f"{name} is {size}, expected a multiple of the {ranks} ranks"
            remedy = f"take {' or '.join(map(str, fit[:6]))} ranks" if fit else "take no ranks"
            raise Refusal(what, where=where, remedy=remedy)
    for name, (columns, group) in groups.items():
        if axis_of(name, 2) == 1 and columns % (ranks * group):
            what = f"{name} has {columns} columns packed in groups of {group}"
            what += f", expected a multiple of {ranks} ranks x {group}"
            raise Refusal(what, where=where, remedy="take fewer ranks, or weights that are floats")


def require_splits(checkpoint: Checkpoint, ranks: int) -> None:
    """Refuses a model that so many ranks cannot share, before anything of it is loaded."""
    config: dict[str, Any] = checkpoint.config
    given = {"num_key_value_heads": config.get("num_attention_heads")} | config
    sizes = {name: given[name] for name in SPLIT if isinstance(given.get(name), int)}
    groups = {name: (p.shape[1], p.group_size) for name, p in checkpoint.packed.items()}
    require_divides(sizes, ranks, groups=groups, where=checkpoint.where)

"""What was measured, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from mlxkv.commands.bench.busy import Busy

FORMAT = "mlxkv-bench/2"
SPREAD = 0.25
"""How far apart the ratios of a cell's pairs may be, by their median, before it is warned of."""


@dataclass(frozen=True, slots=True)
class Side:
    """One engine's turns in a cell: `tokens` a turn, the seconds of each, and the most bytes that
    MLX's arrays took.
    """

    tokens: int
    seconds: tuple[float, ...]
    peak: int

    @property
    def speed(self) -> float:
        """Tokens per second, by the median."""
        return self.tokens / median(self.seconds)


@dataclass(frozen=True, slots=True)
class Cell:
    """A prompt of `length` tokens that is filled, or what is decoded after one.

    `model` is "" for the one at hand. `read` are the bytes that a decode step must read.
    """

    model: str
    dtype: str
    batch: int
    what: str
    length: int
    port: Side
    other: Side
    read: int | None = None

    @property
    def name(self) -> str:
        return f"{'prefill' if self.what == 'prefill' else 'decode after'} {self.length:,}"

    @property
    def group(self) -> str:
        """What it shares with its neighbours."""
        return self.model or f"{self.dtype}, batch {self.batch}"

    @property
    def ratios(self) -> tuple[float, ...]:
        """The port's speed over mlx-lm's, pair by pair."""
        pairs = zip(self.port.seconds, self.other.seconds, strict=True)
        return tuple(other / port for port, other in pairs)

    @property
    def ratio(self) -> float:
        """Above 1 the port is faster."""
        return median(self.ratios)

    @property
    def spread(self) -> float:
        return (max(self.ratios) - min(self.ratios)) / self.ratio

    def bandwidth(self, side: Side) -> float | None:
        """Bytes per second that decoding reads at least."""
        steps = side.tokens / self.batch
        return None if self.read is None else self.read * steps / median(side.seconds)


@dataclass(frozen=True, slots=True)
class Step:
    """The graph of an engine's decode step as on a GPU, and the seconds of each build of it."""

    primitives: int
    kernels: int
    kinds: Mapping[str, int]
    seconds: tuple[float, ...]

    @property
    def build(self) -> float:
        """Seconds of a build, by the median."""
        return median(self.seconds)


@dataclass(frozen=True, slots=True)
class Steps:
    """Both engines' decode steps with one model; `model` is "" for the one at hand."""

    model: str
    dtype: str
    port: Step
    other: Step

    @property
    def name(self) -> str:
        return self.model or self.dtype

    @property
    def ratios(self) -> tuple[float, ...]:
        """The port's time to build over mlx-lm's, pair by pair."""
        pairs = zip(self.port.seconds, self.other.seconds, strict=True)
        return tuple(port / other for port, other in pairs)

    @property
    def ratio(self) -> float:
        """Below 1 the port's is built faster."""
        return median(self.ratios)


@dataclass(frozen=True, slots=True)
class Bench:
    """A run: `copy` is in bytes per second, read and written; `left_out` names what would have
    taken too long.
    """

    model: str
    source: str
    fingerprint: str
    cells: tuple[Cell, ...]
    left_out: tuple[str, ...]
    steps: tuple[Steps, ...]
    copy: float
    busy: Busy
    environment: Mapping[str, Any]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why the figures may not be believed."""
        wide = [cell for cell in self.cells if cell.spread > SPREAD]
        if not wide:
            return self.busy.words
        worst = max(wide, key=lambda cell: cell.spread)
        low, high = min(worst.ratios), max(worst.ratios)
        said = f"{len(wide)} of {len(self.cells)} cells spread by more than {SPREAD:.0%}"
        said += f", most of all {worst.group}: {worst.name}, {low:.2f} to {high:.2f}"
        return (*self.busy.words, f"{said}; run again on a quiet machine or with more --rounds")

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-bench/2`: seconds, bytes, tokens per second, bytes per second."""
        return {
            "format": FORMAT,
            "model": {"name": self.model, "source": self.source, "fingerprint": self.fingerprint},
            "warnings": list(self.warnings),
            "busy": asdict(self.busy),
            "copy": self.copy,
            "cells": [_cell(cell) for cell in self.cells],
            "left_out": list(self.left_out),
            "steps": [asdict(steps) | {"ratio": steps.ratio} for steps in self.steps],
            "environment": dict(self.environment),
        }


def _cell(cell: Cell) -> dict[str, Any]:
    sides = {
        name: asdict(side) | {"speed": side.speed, "bandwidth": cell.bandwidth(side)}
        for name, side in (("port", cell.port), ("other", cell.other))
    }
    ratios = {"ratio": cell.ratio, "ratios": list(cell.ratios), "spread": cell.spread}
    return asdict(cell) | sides | ratios

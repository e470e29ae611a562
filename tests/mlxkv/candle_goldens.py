"""Runs candle's golden plans on the port and says where it parts from candle, in units of candle's
own error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from candle import outcomes_of, plan_of
from safetensors.numpy import load_file

from mlxkv.engines.port import PortRunner
from mlxkv.port.llama import Llama
from oracle.formats.plan import Plan
from oracle.formats.trace import Outcome

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = ("mha", "gqa", "mqa", "llama3")
EVERY = 96
"""Of SmolLM2's rows every 96th column is kept."""

# Two correct engines of candle's size of error lie sqrt(2) of it apart: 4 sqrt(2) for a plan's rows
# together leaves a factor of 4,
# and a single row may be twice as bad. Worst measured, over all plans with rows: with BLIS 1.8
# together and 5.1 in one row, with
# OpenBLAS 3.5 (mha stale-one, three rows; the next is 2.7) and 6.0, with MLX's own BLAS 2.0 and
# 5.6.
POOLED_LIMIT = 4 * 2**0.5
ROW_LIMIT = 8 * 2**0.5


@dataclass(frozen=True)
class Ratio:
    """The rms distance from candle's rows, of all together and of the worst one, over candle's own
    pooled error.
    """

    pooled: float
    row: float


class Golden:
    """One golden plan and what candle made of it."""

    def __init__(self, folder: Path, entry: dict[str, Any]) -> None:
        self.folder = folder
        self.entry = entry
        self.name: str = entry["name"]
        self.dtype: str = entry["dtype"]

    def __repr__(self) -> str:
        return f"{self.folder.name}-{self.name}"

    @cached_property
    def plan(self) -> Plan:
        return plan_of(self.entry)

    @cached_property
    def outcomes(self) -> list[Outcome]:
        return outcomes_of(self.folder, self.name, len(self.plan.steps))

    @cached_property
    def rows(self) -> npt.NDArray[np.float32] | None:
        return load_file(self.folder / "rows.safetensors").get(self.name)

    @cached_property
    def highest(self) -> npt.NDArray[np.int32] | None:
        """The highest token of each whole row, where only some columns are kept."""
        return load_file(self.folder / "rows.safetensors").get(f"{self.name}.argmax")

    @cached_property
    def noise(self) -> float:
        noise: float = json.loads((self.folder / "noise.json").read_text())[self.dtype]
        return noise

    @property
    def says_something(self) -> bool:
        """Whether there is anything to compare with but that the calls went well."""
        return self.rows is not None or any(o != Outcome() for o in self.outcomes)

    def run(self, model: Llama) -> PortRunner:
        """The port in candle's mode on this plan."""
        return PortRunner(model, self.plan, guarded=False).run()

    def faults(self, runner: PortRunner) -> list[str]:
        """Everything in which the port's run differs from candle's beyond the noise; empty where it
        is right.
        """
        return [*self._wrong_rows(runner), *self._wrong_outcomes(runner)]

    def ratio(self, runner: PortRunner) -> Ratio:
        """NaN where a row is missing or not finite."""
        assert self.rows is not None
        rows = np.concatenate(runner.rows) if runner.rows else np.zeros((0, 0))
        if self.highest is not None:
            rows = rows[:, ::EVERY]
        if rows.shape != self.rows.shape:
            return Ratio(float("nan"), float("nan"))
        squares = np.mean((rows.astype(np.float64) - self.rows) ** 2, axis=1)
        return Ratio(
            float(squares.mean() ** 0.5) / self.noise, float(squares.max() ** 0.5) / self.noise
        )

    def _wrong_rows(self, runner: PortRunner) -> Iterator[str]:
        if self.rows is None:
            return
        ratio = self.ratio(runner)
        if not ratio.pooled <= POOLED_LIMIT:
            yield (
                f"{self!r}: rows are {ratio.pooled:.4g} times candle's own error from candle's, "
                f"expected at most {POOLED_LIMIT:.4g}"
            )
        if not ratio.row <= ROW_LIMIT:
            yield (
                f"{self!r}: the worst row is {ratio.row:.4g} times candle's own error from "
                f"candle's, expected at most {ROW_LIMIT:.4g}"
            )
        if self.highest is not None:
            highest = np.concatenate(runner.rows).argmax(axis=1)
            if not np.array_equal(highest, self.highest):
                yield (
                    f"{self!r}: the rows' highest tokens are {highest.tolist()}, expected "
                    f"{self.highest.tolist()}"
                )

    def _wrong_outcomes(self, runner: PortRunner) -> Iterator[str]:
        for i, (candle, port) in enumerate(zip(self.outcomes, runner.outcomes, strict=True)):
            if (candle.error is None) != (port.error is None):
                yield f"{self!r}: step {i} ended with {port.error!r}, expected {candle.error!r}"
            elif candle.error is not None:
                if not all(part in str(port.error) for part in said(candle.error)):
                    yield (
                        f"{self!r}: step {i} ended with {port.error!r}, expected it to say "
                        f"{said(candle.error)}"
                    )
            # Free running in half precision may part at a near tie: there the rows decide.
            elif self.dtype == "float32" and candle.tokens != port.tokens:
                yield f"{self!r}: step {i} chose {port.tokens}, expected {candle.tokens}"


def said(error: str) -> tuple[str, ...]:
    """What the port must say where candle says `error`: both shapes, or position and limit."""
    narrow = re.fullmatch(
        r"narrow invalid args start \+ len > dim_len: \[(\d+), \d+\], dim: 0, start: (\d+), len:1",
        error,
    )
    if narrow:
        return f"position {narrow[2]}", f"max_position_embeddings is {narrow[1]}"
    assert error.startswith("cannot broadcast"), error
    return (error,)


def goldens(model: str) -> list[Golden]:
    """Every golden plan of a model: `tiny/mha`, `smollm2`."""
    folder = GOLDEN / model
    return [Golden(folder, entry) for entry in json.loads((folder / "plans.json").read_text())]

"""Runs candle's golden plans on the port and says how far it lands from candle, in units of candle's own error."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from mlxkv.engines.candle import outcomes_of, plan_of
from mlxkv.engines.port import Runner
from mlxkv.port.llama import Llama
from oracle.trace import Outcome

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = ("mha", "gqa", "mqa", "llama3")

# Two correct engines differ by at most the sum of their errors; 4 sqrt(2) leaves a factor of 4 over two of candle's size. The worst
# measured is 2.3, and the smallest fault of tests/mlxkv/test_candle.py is seen at 20 and more.
LIMIT = 4 * 2**0.5


@dataclass(frozen=True)
class Golden:
    """One golden plan and what candle made of it."""

    folder: Path
    entry: dict[str, object]

    @property
    def name(self) -> str:
        return str(self.entry["name"])

    @property
    def dtype(self) -> str:
        return str(self.entry["dtype"])

    @property
    def outcomes(self) -> list[Outcome]:
        return outcomes_of(self.folder, self.name, len(plan_of(self.entry).steps))

    def rows(self) -> npt.NDArray[np.float32] | None:
        return load_file(self.folder / "rows.safetensors").get(self.name)

    def noise(self) -> float:
        noise: float = json.loads((self.folder / "noise.json").read_text())[self.dtype]
        return noise

    def run(self, model: Llama) -> Runner:
        """The port in candle's mode on this plan."""
        return Runner(model, plan_of(self.entry), guarded=False).run()


def plans(model: str) -> list[Golden]:
    folder = GOLDEN / model
    return [Golden(folder, entry) for entry in json.loads((folder / "plans.json").read_text())]


def ratio(golden: Golden, runner: Runner, *, every: int = 1) -> float:
    """The worst row's rms distance from candle, over candle's own error; NaN where a row is missing or not finite."""
    expected = golden.rows()
    assert expected is not None
    rows = np.concatenate(runner.rows)[:, ::every] if runner.rows else np.zeros((0, expected.shape[1]))
    if rows.shape != expected.shape:
        return float("nan")
    delta = rows.astype(np.float64) - expected
    return float(np.sqrt(np.mean(delta * delta, axis=1)).max() / golden.noise())

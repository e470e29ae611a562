"""Long sequences: judging holds blocks, reads each file once, and its reports stay small."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import synthetic
from synthetic import changed, make_algebra, make_candidates, make_case

from mlxkv.commands.locate.found import Located
from mlxkv.judge import walk
from mlxkv.judge.case import Case
from mlxkv.judge.result import MOST_COLUMNS, MOST_POINTS, Curve, Strip, Verdict
from mlxkv.judge.verdict import judge
from mlxkv.report import plots
from mlxkv.report.text import pretty
from oracle.formats.trace import Trace

Array = Any


class Sizes(NamedTuple):
    """Of a sequence whose truth has many logits, or many keys and values."""

    n: int
    vocab: int
    layers: int
    kv: tuple[int, int]

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(synthetic, "VOCAB", self.vocab)
        patch.setattr(synthetic, "LAYERS", self.layers)

    def made(self) -> tuple[Case, dict[str, Trace], dict[str, Trace]]:
        """The oracle's side, and a correct engine's runs in the run's dtype and in float64."""
        with pytest.MonkeyPatch.context() as patch:
            self.patch(patch)
            case = make_case(n=self.n, prompt=self.n - 8, kv=self.kv)
            return case, make_candidates(case), make_algebra(case)


LOGITS = Sizes(400, 2048, 2, (2, 8))
"""6.5 MB of logits in float64."""
CACHE = Sizes(1000, 16, 2, (8, 64))
"""4 MB of keys in each of two layers in float64."""


@pytest.fixture(scope="module")
def logits() -> tuple[Case, dict[str, Trace], dict[str, Trace]]:
    return LOGITS.made()


@pytest.fixture(scope="module")
def cache() -> tuple[Case, dict[str, Trace], dict[str, Trace]]:
    return CACHE.made()


def peak_of(
    case: Case, runs: Mapping[str, Trace], exact: Mapping[str, Trace]
) -> tuple[Verdict, int]:
    """The verdict, and the most bytes that were held while it was found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "_BLOCK", 2**13)
        tracemalloc.start()
        try:
            return judge(case, runs, algebra=exact), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def test_judging_holds_blocks_of_logits(
    logits: tuple[Case, dict[str, Trace], dict[str, Trace]],
) -> None:
    verdict, peak = peak_of(*logits)
    assert verdict.outcome == "agree"

    assert peak < 3e6, f"{peak:,} bytes"


def neighbours(keys: Array) -> Array:
    """Keys as an engine keeps them whose RoPE turns channels 2i and 2i + 1."""
    return np.stack(np.split(keys, 2, axis=-1), axis=-1).reshape(keys.shape)


def not_a_number(keys: Array) -> Array:
    keys[1, 300, 5] = np.nan
    return keys


def rounded(keys: Array) -> Array:
    return keys.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [(None, "agree"), (neighbours, "agree"), (not_a_number, "differ"), (rounded, "differ")],
)
def test_judging_holds_no_copy_of_a_layers_keys(
    cache: tuple[Case, dict[str, Trace], dict[str, Trace]],
    change: Callable[[Array], Array] | None,
    outcome: str,
) -> None:
    case, runs, exact = cache
    step = runs["step"]
    for name in step.arrays if change else ():
        if name.endswith("keys"):
            step = changed(step, name, change)
    verdict, peak = peak_of(case, {**runs, "step": step}, exact)
    assert verdict.outcome == outcome, verdict

    assert peak < 3.5e6, f"{peak:,} bytes"


class Counted:
    """An array of which each row that is read is counted."""

    def __init__(self, array: Array, read: Counter[str], name: str) -> None:
        self.array, self.read, self.name = array, read, name
        self.shape, self.ndim, self.dtype = array.shape, array.ndim, array.dtype

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, at: Any) -> Array:
        found = self.array[at]
        self.read[self.name] += len(found)
        return found


def test_each_row_of_logits_is_read_once_to_judge_and_once_more_where_it_is_shown(
    logits: tuple[Case, dict[str, Trace], dict[str, Trace]],
) -> None:
    (case, runs, exact), read = logits, Counter[str]()

    def counted(trace: Trace, name: str) -> Trace:
        return replace(
            trace, arrays=dict(trace.arrays) | {"logits": Counted(trace.logits, read, name)}
        )

    def all_counted(traces: Mapping[str, Trace], whose: str) -> dict[str, Trace]:
        return {plan: counted(trace, f"{whose} {plan}") for plan, trace in traces.items()}

    watched = replace(
        case,
        truth=counted(case.truth, "truth"),
        references=all_counted(case.references, "reference"),
    )
    verdict = judge(watched, all_counted(runs, "run"), algebra=all_counted(exact, "exact"))
    assert verdict == judge(case, runs, algebra=exact)
    shown, prefixes = len(case.rows), len(runs["prefixes"].positions)
    # Prefixes have fewer rows, and are gone through by themselves.
    assert read.pop("truth") == LOGITS.n + prefixes
    assert read.pop("run prefixes") <= prefixes + 2 * shown
    assert read.pop("exact prefixes") == prefixes
    for name, rows in read.items():
        tables = {"run step": 7, "reference full": 6, "run full": 2, "exact": 0}
        most = next((n for known, n in tables.items() if name.startswith(known)), 3)
        assert LOGITS.n <= rows <= LOGITS.n + most * shown, name


def test_reports_of_32768_positions_stay_small() -> None:
    n, random = 32_768, np.random.default_rng(0)
    rms = 1 + random.random(n)
    rms[12_345] = 99.0
    curve = Curve("full", tuple(range(n)), tuple(rms.tolist()))
    verdict = replace(_verdict(), curves=(curve,) * 5, floor=curve.rms, floor_at=curve.positions)
    shown = verdict.to_json()
    assert len(pretty(shown)) < 1e6
    points = shown["by_position"]["rms"][0]
    assert len(points["rms"]) == len(points["positions"]) == MOST_POINTS
    assert points["rms"][points["positions"].index(12_345)] == 99.0
    strip = Strip("floors", 30.0, (curve.rms,) * 80)
    located = Located("nothing", strip=strip)
    assert len(pretty(located.to_json())) < 2e6
    assert len(plots.heat_strip(strip)) < 2e6
    assert len(plots.error_by_position((curve,) * 5, curve.rms, limit=16.0)) < 2e6


def _verdict() -> Verdict:
    case = make_case()
    return judge(case, make_candidates(case))


def test_a_curve_and_a_strip_that_are_cut_show_what_is_worst() -> None:
    short = Curve("step", (3, 5), (1.0, 2.0))
    assert short.thinned is short
    n = 2 * MOST_POINTS
    values = np.zeros(n)
    values[[7, n - 1]] = np.nan, 5.0
    cut = Curve("step", tuple(range(100, 100 + n)), tuple(values.tolist())).thinned
    assert len(cut.rms) == MOST_POINTS
    assert [p for p, value in zip(cut.positions, cut.rms, strict=True) if value != 0] == [
        107,
        99 + n,
    ]
    assert math.isnan(cut.rms[3])
    assert Strip("u", 1.0, ((1.0, None),)).to_json() == {
        "unit": "u",
        "limit": 1.0,
        "values": ((1.0, None),),
    }
    row = [0.0] * (MOST_COLUMNS + 1)
    row[0], row[-1] = 4.0, 3.0
    wide = Located("nothing", strip=Strip("u", 1.0, (tuple(row), (None, *row[1:])))).to_json()
    first, second = wide["strip"]["values"]
    assert (wide["strip"]["step"], len(first)) == (2, MOST_COLUMNS // 2 + 1)
    assert (first[0], first[-1], second[0], second[-1]) == (4.0, 3.0, None, 3.0)

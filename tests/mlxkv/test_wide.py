"""Correct engines of any width: MLX adds up a row's squares one after another, and the pool knows
that order.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic import MEMBERS, make_case

from mlxkv.commands.selftest import calibrate, worker
from mlxkv.commands.selftest.models import Wide
from mlxkv.commands.selftest.readings import MLX_LM
from mlxkv.commands.selftest.run import question, random_ids
from mlxkv.engines import oracle
from mlxkv.judge.case import Case, read_case
from mlxkv.judge.floors import cache_floors, logit_floors
from mlxkv.judge.measure import cache_largest, truth_rows
from oracle.formats.run_folder import SEQUENTIAL, ordinary
from oracle.model.checkpoint import resolve

CASE = make_case()
OWN = MEMBERS.index(SEQUENTIAL)


def louder(case: Case, member: str, times: float) -> Case:
    """The case with one member's errors multiplied."""
    at = MEMBERS.index(member)
    floors = {name: np.array(array) for name, array in case.floors.items()}
    for name in ("rms", "shift", "peak", "keys", "values"):
        floors[name][at] *= times
    return replace(case, floors=floors)


def test_a_floor_is_at_least_what_the_sequential_member_reads() -> None:
    case, truth = louder(CASE, SEQUENTIAL, 10), truth_rows(CASE.truth)
    found, before = logit_floors(case, truth), logit_floors(CASE, truth)
    assert (found.rms >= case.floors["rms"][OWN]).all()
    assert (found.rms > 5 * before.rms).all()
    assert (found.shift > 2 * before.shift).all()
    assert (found.peak > 5 * before.peak).all()
    assert np.array_equal(found.cached, before.cached)
    largest = cache_largest(case.truth)
    assert largest is not None
    own = np.stack([case.floors[name][OWN] for name in ("keys", "values")])
    assert (cache_floors(case, largest) >= own).all()


@pytest.mark.parametrize("member", ordinary(MEMBERS))
def test_where_a_member_is_held_out_the_sequential_one_hides_nothing(member: str) -> None:
    truth = truth_rows(CASE.truth)
    loud, usual = (
        logit_floors(case, truth, without=member) for case in (louder(CASE, SEQUENTIAL, 100), CASE)
    )
    assert np.array_equal(loud.rms, usual.rms)
    assert np.array_equal(loud.shift, usual.shift)


def test_an_ordinary_member_is_one_of_several_and_no_bound() -> None:
    truth = truth_rows(CASE.truth)
    found = logit_floors(louder(CASE, "eager-full", 10), truth)
    assert (found.rms < 0.7 * 10 * np.abs(CASE.floors["rms"]).max()).all()


def test_a_pool_without_a_sequential_member_has_the_floors_of_the_others() -> None:
    keep = [i for i, name in enumerate(MEMBERS) if name != SEQUENTIAL]
    floors = {
        name: array if name == "cached" else array[keep] for name, array in CASE.floors.items()
    }
    pool = type(CASE.pool)(ordinary(MEMBERS), CASE.pool.kinds, CASE.pool.distinct)
    case, truth = replace(CASE, floors=floors, pool=pool), truth_rows(CASE.truth)
    assert np.array_equal(
        logit_floors(case, truth).rms, logit_floors(CASE, truth, without="nobody").rms
    )


@pytest.mark.parametrize("values", ["bfloat16", "4-bit"])
def test_a_wide_model_of_coarse_values_is_found_right(values: str, tmp_path: Path) -> None:
    checkpoint = resolve(str(Wide(2048, values).save(tmp_path / "m")))
    ids = random_ids(checkpoint.vocab_size, 0)
    answer = oracle.ask(question(checkpoint, ids, None, dtype="float32"))
    (tmp_path / "port").mkdir()
    value = worker.start(checkpoint, answer, tmp_path / "port", "readings", str(answer.folder))
    (port,) = value["readings"][0]
    third = calibrate._aside(MLX_LM, checkpoint, answer, tmp_path / "mlx-lm")
    for ran in (port, third):
        read = {r["gate"]: r["value"] for r in ran["readings"]}
        assert ran["outcome"] == "agree", ran["reasons"]
        assert read["keys median"] < 1.5
        assert read["values 95%"] < 2
    if values == "bfloat16":
        case = read_case(answer.folder)
        sums = case.floors["keys"][case.pool.members.index(SEQUENTIAL)]
        others = case.floors["keys"][case.pool.members.index("sdpa-full")]
        assert np.median(sums) > 3 * np.median(others)


def test_a_noisy_position_has_a_floor_of_its_own_for_the_shift() -> None:
    floors = {name: np.array(array) for name, array in CASE.floors.items()}
    floors["shift"][:, 13] *= 20
    case, keep = replace(CASE, floors=floors), [MEMBERS.index(m) for m in ordinary(MEMBERS)]
    found = logit_floors(case, truth_rows(case.truth)).shift
    assert found[13] >= np.sqrt(np.mean(floors["shift"][keep, 13] ** 2))
    assert found[13] > 2 * found[12]

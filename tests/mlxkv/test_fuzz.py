"""Cases and candidates damaged at random: the judge gives reasons, never raises, and nothing
damaged passes for good.

MLXKV_FUZZ multiplies the number of cases.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import synthetic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxkv.judge.case import Case
from mlxkv.judge.verdict import judge
from oracle.formats.errors import Refusal
from oracle.formats.run_folder import Pool, read_floors
from oracle.formats.tensors import Array, writer
from oracle.formats.trace import Trace

CASES = 200 * int(os.environ.get("MLXKV_FUZZ", "1"))
fuzz = settings(
    max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
ODD = (
    st.none()
    | st.integers()
    | st.text(max_size=5)
    | st.lists(st.integers() | st.text(max_size=5), max_size=6)
    | st.floats(allow_nan=False, allow_infinity=False)
)
NAMES = st.lists(st.text(max_size=5), max_size=6)


@functools.cache
def sound() -> tuple[Case, dict[str, Trace], dict[str, Trace]]:
    case = synthetic.make_case()
    return case, synthetic.make_candidates(case), synthetic.make_algebra(case)


def damaged(
    data: st.DataObject, arrays: Mapping[str, Array], *, moved: bool = True
) -> dict[str, Array]:
    """One array cut, emptied, moved, of more axes, or with a number that is none; of what a reader
    lets in, also gone.
    """
    name = data.draw(st.sampled_from(sorted(arrays)))
    array = np.array(arrays[name])
    match data.draw(st.integers(0, 5)):
        case 0 if name not in ("logits", "positions"):
            return {n: a for n, a in arrays.items() if n != name}
        case 1:
            array = array[:-1]
        case 2:
            array = np.zeros((0, *array.shape[1:]), array.dtype)
        case 3 if name not in ("logits", "positions"):
            array = array[..., None]
        case 4 if array.dtype.kind == "f":
            array.flat[data.draw(st.integers(0, array.size - 1))] = data.draw(
                st.sampled_from([np.nan, np.inf, -np.inf])
            )
        case _:
            array = array + 1 if moved else array[:0]
    return {**arrays, name: array}


def outcome(case: Case, candidates: Mapping[str, Trace], algebra: Mapping[str, Trace]) -> str:
    verdict = judge(case, candidates, algebra=algebra)
    json.dumps(verdict.to_json(), allow_nan=False).encode()
    return verdict.outcome


def test_what_is_whole_agrees() -> None:
    assert outcome(*sound()) == "agree"


@fuzz
@given(st.data())
def test_a_damaged_candidate_never_agrees(data: st.DataObject) -> None:
    case, candidates, algebra = sound()
    hurt = dict(data.draw(st.sampled_from([candidates, algebra])))
    plan = data.draw(st.sampled_from(sorted(hurt)))
    hurt[plan] = replace(hurt[plan], arrays=damaged(data, hurt[plan].arrays))
    both = (hurt, algebra) if hurt[plan].meta.dtype == "float32" else (candidates, hurt)
    assert outcome(case, *both) != "agree"


@fuzz
@given(st.data())
def test_a_damaged_oracle_folder_never_agrees(data: st.DataObject) -> None:
    case, candidates, algebra = sound()
    what = data.draw(st.sampled_from(["truth", "floors", "meta", "step"]))
    if what == "truth":
        case = replace(case, truth=replace(case.truth, arrays=damaged(data, case.truth.arrays)))
    elif what == "floors":
        case = replace(
            case, floors=damaged(data, case.floors, moved=False)
        )  # a floor's number has only its file's sha256
    elif what == "meta":
        changes = {data.draw(st.sampled_from(["members", "kinds"])): data.draw(NAMES)}
        case = replace(case, pool=msgspec.structs.replace(case.pool, **changes))
    else:
        whole = case.references[what]
        read = {
            name: whole.arrays[name] for name in ("logits", "positions")
        }  # its keys and values are in the floors already
        broken = replace(whole, arrays=dict(whole.arrays) | damaged(data, read))
        case = replace(case, references=dict(case.references) | {what: broken})
    assert outcome(case, candidates, algebra) != "agree"


@fuzz
@given(NAMES, NAMES, st.integers(-1, 6))
def test_an_odd_pool_is_a_reason(members: list[str], kinds: list[str], distinct: int) -> None:
    case, candidates, algebra = sound()
    odd = replace(case, pool=Pool(members, kinds, distinct))
    assert outcome(odd, candidates, algebra) in ("agree", "cannot tell")


@fuzz
@given(st.dictionaries(st.sampled_from(["distinct", "members", "kinds", "format", "x"]), ODD))
def test_odd_metadata_of_the_floors_is_refused(meta: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as room:
        path = Path(room) / "floors.safetensors"
        with writer(path, {}) as out:
            out.finish(sound()[0].pool.to_json() | meta)
        try:
            found, _ = read_floors(path)
        except Refusal as error:
            refused = str(error)
        else:
            assert found.to_json() == sound()[0].pool.to_json() | meta
            return
        assert refused.startswith(f"{path}: ")

"""A seeded fault changes what it should, from where it says on, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable

import models
import numpy as np
import numpy.typing as npt
import pytest

from mlxkv.commands.selftest.faults import FAULTS, Fault, Place, applies
from mlxkv.engines.port import PortRunner
from mlxkv.port.config.llama import LlamaConfig
from mlxkv.port.llama import Llama
from oracle.formats.plan import judged_plans

ModelOf = Callable[..., Llama]
N, PROMPT, CUT = 20, 12, 6
PLACE = Place(layers=3, prompt=PROMPT, cut=CUT)
PLANS = judged_plans(models.ids(N), prompt=PROMPT, chunks=[CUT, PROMPT - CUT])


def rows(model: Llama, plan: str) -> npt.NDArray[np.float64]:
    return np.concatenate(PortRunner(model, PLANS[plan]).run().rows).astype(np.float64)


CASES = [
    pytest.param(fault, layout, id=f"{fault.name.replace(' ', '-')}-{layout}")
    for fault in FAULTS
    for layout in ("mha", "gqa", "mqa")
    if applies(fault, LlamaConfig.from_json(models.config(layout)))
]


def test_every_fault_has_a_layout_and_a_name_of_its_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 33
    assert {case.values[0] for case in CASES} == set(FAULTS)


@pytest.mark.parametrize(("fault", "layout"), CASES)
def test_a_fault_starts_where_it_says_and_leaves_nothing_behind(
    fault: Fault, layout: str, model_of: ModelOf
) -> None:
    model = model_of(layout, "float64" if "A" in fault.lanes else "float32")
    right = {plan: rows(model, plan) for plan in ("full", "step", "chunked")}
    with fault.plant(model, PLACE):
        wrong = {plan: rows(model, plan) for plan in right}
    limit = 1e-10 if "A" in fault.lanes else 1e-5
    off = [
        np.abs(wrong[plan] - right[plan]).max(1) > limit * np.abs(right["full"]).max()
        for plan in right
    ]
    assert min(int(np.argmax(o)) for o in off if o.any()) == (fault.in_logits or fault.where.first)(
        PLACE
    )
    for plan, before in right.items():
        assert np.array_equal(rows(model, plan), before)

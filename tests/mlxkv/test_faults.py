"""A seeded fault changes what it should, from where it says on, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import models
import numpy as np
import numpy.typing as npt
import pytest

from mlxkv.commands.selftest.faults import FAULTS, Fault, Place, applies
from mlxkv.engines import port
from mlxkv.engines.port import PortRunner
from mlxkv.port.config.llama import LlamaConfig
from mlxkv.port.llama import Llama
from mlxkv.port.weights import load
from oracle.formats.plan import judged_plans, probe_plans, probe_tokens

ModelOf = Callable[..., Llama]
N, PROMPT, CUT = 36, 12, 6
IDS = models.ids(N)
PLACE = Place(layers=3, prompt=PROMPT, cut=CUT, tokens=tuple(IDS))
PLANS = judged_plans(IDS, prompt=PROMPT, chunks=[CUT, PROMPT - CUT])
USUAL = ("full", "step", "chunked")


def rows(model: Llama, plan: str) -> npt.NDArray[np.float64]:
    return np.concatenate(PortRunner(model, PLANS[plan]).run().rows).astype(np.float64)


def named(fault: Fault, layout: str) -> Any:
    return pytest.param(fault, layout, id=f"{fault.name.replace(' ', '-')}-{layout}")


CASES = [
    named(fault, layout)
    for fault in FAULTS
    for layout in ("mha", "gqa", "mqa")
    if applies(fault, LlamaConfig.from_json(models.config(layout)))
    and (fault.seen == "judged" or (fault.seen, layout) == ("mixed", "gqa"))
]
BEYOND = [fault for fault in FAULTS if fault.seen == "probe"]


def test_every_fault_has_a_layout_and_a_name_of_its_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 45
    assert {case.values[0] for case in CASES} == {
        fault for fault in FAULTS if fault.seen in ("judged", "mixed")
    }
    assert len(BEYOND) == 6


@pytest.fixture(scope="module")
def right_of() -> Callable[[Llama, str, str], npt.NDArray[np.float64]]:
    """The rows of a model without a fault, by layout, its dtype and plan; computed once."""
    made: dict[tuple[str, str], npt.NDArray[np.float64]] = {}

    def right(model: Llama, layout: str, plan: str) -> npt.NDArray[np.float64]:
        key = f"{layout} {model.dtype}", plan
        if key not in made:
            made[key] = rows(model, plan)
        return made[key]

    return right


@pytest.mark.parametrize(("fault", "layout"), CASES)
def test_a_fault_starts_where_it_says_and_leaves_nothing_behind(
    fault: Fault,
    layout: str,
    model_of: ModelOf,
    right_of: Callable[[Llama, str, str], npt.NDArray[np.float64]],
) -> None:
    model = model_of(layout, "float64" if "A" in fault.lanes else "float32")
    plans = USUAL if fault.seen == "judged" else (*USUAL, "mixed")
    right = {plan: right_of(model, layout, plan) for plan in plans}
    with fault.plant(model, PLACE):
        wrong = {plan: rows(model, plan) for plan in right}
    limit = 1e-10 if "A" in fault.lanes else 1e-5
    off = {
        plan: np.abs(wrong[plan] - right[plan]).max(1) > limit * np.abs(right["full"]).max()
        for plan in right
    }
    assert min(int(np.argmax(o)) for o in off.values() if o.any()) == (
        fault.in_logits or fault.where.first
    )(PLACE)
    shown = [plan for plan in off if off[plan].any()]
    assert fault.seen == "judged" or shown == ["mixed"]
    for plan in shown[-1:]:  # one in which it shows would show what is left of it
        assert np.array_equal(rows(model, plan), right[plan])


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """With room for the probe, and more ids than 16 bits hold."""
    config = models.config("gqa", max_position_embeddings=512, vocab_size=33_000)
    return load(models.save(tmp_path_factory.mktemp("long") / "model", config), "float32")


@pytest.mark.parametrize("fault", BEYOND, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_beyond_the_prompt_is_seen_from_its_position_of_the_probe_on(
    fault: Fault, long: Llama
) -> None:
    assert applies(fault, long.config)
    tokens = probe_tokens(long.config.vocab_size, 512)
    place = replace(PLACE, probe=tokens)
    plans = probe_plans(tokens)

    def logits() -> dict[str, npt.NDArray[np.float64]]:
        made = {plan: port.run(long, of) for plan, of in plans.items()}
        return {plan: trace.logits.astype(np.float64) for plan, trace in made.items()}

    right, before, kept = logits(), rows(long, "full"), np.array(plans["full"].rows)
    with fault.plant(long, place):
        wrong, within = logits(), rows(long, "full")
    start = fault.where.first(place)
    off = [kept[np.abs(wrong[p] - right[p]).max(1) > 1e-5 * np.abs(right[p]).max()] for p in right]
    assert min(at[0] for at in off if len(at)) == kept[kept >= start][0]
    assert np.array_equal(within, before)


def test_a_call_that_is_now_and_then_off_is_within_the_noise_and_not_the_same_again(
    model_of: ModelOf,
) -> None:
    (fault,) = (fault for fault in FAULTS if fault.seen == "repeat")
    model = model_of("gqa", "float32")
    right = rows(model, "step")
    with fault.plant(model, PLACE):
        first, again = (rows(model, "step") for _ in range(2))
    assert 0 < np.abs(first - again).max() < 1e-6 * np.abs(right).max()
    assert np.array_equal(rows(model, "step"), right)


def test_a_model_without_room_for_the_probe_has_no_faults_beyond_it() -> None:
    config = LlamaConfig.from_json(models.config("gqa", max_position_embeddings=299))
    assert [fault for fault in BEYOND if applies(fault, config)] == []
    config = LlamaConfig.from_json(models.config("gqa", max_position_embeddings=300))
    assert [f.name for f in BEYOND if not applies(f, config)] == ["ids of 16 bits"]

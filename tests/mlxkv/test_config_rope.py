"""config.json's RoPE, in both generations of its spelling: rope_theta and rope_scaling, or rope_parameters."""

from __future__ import annotations

from typing import Any

import pytest
from configs import LLAMA3_ROPE, LLAMA32_1B, SMOLLM2, read, refusal

from mlxkv.port.config import Rope


@pytest.mark.parametrize("key", ["rope_theta", "rope_parameters"])
@pytest.mark.parametrize("value", ["8", -1, 0, 1, True, float("inf")])
def test_a_wrong_theta_is_refused_by_name_wherever_it_stands(key: str, value: Any) -> None:
    config = SMOLLM2 | {"rope_theta": ...}
    given = value if key == "rope_theta" else {"rope_theta": value, "rope_type": "default"}

    assert refusal(config, **{key: given}) == f"config.json: rope_theta: expected a number above 1, got {value!r}"


@pytest.mark.parametrize("value", [..., None])
def test_an_absent_theta_is_that_of_transformers_and_that_is_said(value: Any) -> None:
    found = read(SMOLLM2, rope_theta=value)

    assert found.rope == Rope(10000.0)
    assert found.notes == ("rope_theta absent: 10000, as transformers fills in",)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 100000.0}},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 100000.0, "type": "default"}},
        {"rope_theta": ..., "rope_scaling": {"rope_theta": 100000.0, "rope_type": "default"}},
        {"rope_scaling": {}},
        {"rope_scaling": {}, "rope_parameters": {}},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": {"type": "default", "rope_type": "default"}},
        {"rope_parameters": None},
    ],
)
def test_plain_rope_however_it_is_spelled(changes: dict[str, Any]) -> None:
    assert read(SMOLLM2, **changes) == read(SMOLLM2)
    assert read(SMOLLM2, **changes).notes == ()


LLAMA3 = LLAMA32_1B["rope_scaling"]
WITHOUT_TYPE = {k: v for k, v in LLAMA3.items() if k != "rope_type"}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": WITHOUT_TYPE | {"type": "llama3"}},
        {"rope_scaling": WITHOUT_TYPE | {"type": "llama3", "rope_type": "llama3"}},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
        {"rope_scaling": None, "rope_parameters": LLAMA3},
    ],
)
def test_llama3_however_it_is_spelled(changes: dict[str, Any]) -> None:
    assert read(LLAMA32_1B, **changes).rope == LLAMA3_ROPE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_theta": 10000.0}}, "rope_theta: expected one value, got 100000 and 10000.0 in different places"),
        (
            {"rope_scaling": {"type": "llama3", "rope_type": "default"}},
            "rope_type: expected one value, got 'default' and 'llama3' in different places",
        ),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}},
            "rope_type: expected one value, got 'default' and 'llama3' in different places",
        ),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3 | {"factor": 8.0}},
            "factor: expected one value, got 32.0 and 8.0 in different places",
        ),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling: expected a rope_type beside factor, got {'factor': 4.0}"),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "rope_type: expected one of default, llama3, got 'linear'",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type: expected one of default, llama3, got 'dynamic'"),
        ({"rope_scaling": {"type": "foo"}}, "rope_type: expected one of default, llama3, got 'foo'"),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "factor: expected no such key for rope_type default, got 4.0"),
        ({"rope_scaling": LLAMA3 | {"attention_factor": 1.1}}, "attention_factor: expected no such key for rope_type llama3, got 1.1"),
        ({"rope_scaling": "llama3"}, "rope_scaling: expected a JSON object or null, got 'llama3'"),
        ({"rope_parameters": [8]}, "rope_parameters: expected a JSON object or null, got [8]"),
        ({"rope_scaling": LLAMA3 | {"factor": 0.5}}, "factor: expected a number from 1, got 0.5"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor: expected a number below high_freq_factor 4.0, got 4.0"),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192.5}},
            "original_max_position_embeddings: expected a whole number, got 8192.5",
        ),
    ],
)
def test_rope_that_contradicts_itself_or_is_unknown_is_refused(changes: dict[str, Any], message: str) -> None:
    assert refusal(SMOLLM2, **changes) == f"config.json: {message}"


@pytest.mark.parametrize("key", sorted(WITHOUT_TYPE))
@pytest.mark.parametrize("value", [..., None, "8", -1, 0])
def test_every_number_of_llama3_must_be_there_and_positive(key: str, value: Any) -> None:
    scaling = {k: v for k, v in (LLAMA3 | {key: value}).items() if v is not ...}
    shown = repr(None if value is ... else value)

    assert refusal(LLAMA32_1B, rope_scaling=scaling) == f"config.json: {key}: expected a number above 0, got {shown}"

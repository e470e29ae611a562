"""config.json's RoPE, in both generations of its spelling: rope_theta and rope_scaling, or
rope_parameters.
"""

from __future__ import annotations

from typing import Any

import pytest
from configs import LLAMA3_ROPE, LLAMA32_1B, SMOLLM2, read, refusal
from hypothesis import given
from hypothesis import strategies as st

from mlxkv.port.config.llama import Rope


@pytest.mark.parametrize("key", ["rope_theta", "rope_parameters"])
@pytest.mark.parametrize("value", ["8", -1, 0, 1, True, float("inf")])
def test_a_wrong_theta_is_refused_by_name_wherever_it_stands(key: str, value: Any) -> None:
    config = SMOLLM2 | {"rope_theta": ...}
    given = value if key == "rope_theta" else {"rope_theta": value, "rope_type": "default"}
    named = key if key == "rope_theta" else f"{key}.rope_theta"

    assert (
        refusal(config, **{key: given})
        == f"config.json: {named}: expected a number above 1, got {value!r}"
    )


@pytest.mark.parametrize("value", [..., None])
def test_an_absent_theta_is_that_of_transformers_and_that_is_said(value: Any) -> None:
    found = read(SMOLLM2, rope_theta=value)

    assert found.rope == Rope(10000.0)
    assert ("rope_theta", 10000.0) in found.defaults


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


@pytest.mark.parametrize("outer", [100000, None, ...])
def test_a_null_theta_in_an_object_is_filled_in_and_that_is_said(outer: Any) -> None:
    found = read(SMOLLM2, rope_theta=outer, rope_parameters={"rope_theta": None})
    theta = float(outer) if isinstance(outer, int) else 10000.0

    assert found.rope == Rope(theta)
    assert ("rope_parameters.rope_theta", theta) in found.defaults
    said = "rope_parameters.rope_theta null counts as absent: "
    assert [note for note in found.notes if note.startswith(said)]
    assert [note for note in found.notes if note.startswith("rope_theta")] == (
        ["rope_theta null counts as absent: 10000.0 filled in"] if outer is None else []
    )


def test_what_a_type_of_rope_does_not_read_is_listed_as_ignored() -> None:
    unread = {"low_freq_factor": None, "finetuned": True, "partial_rotary_factor": 1.0}
    scaling = {"type": "yarn", "factor": 4.0, "beta_fast": None}
    found = read(SMOLLM2, rope_scaling=scaling | unread)

    names = {key for key, _ in found.ignored if key.startswith("rope_scaling.")}
    assert names == {f"rope_scaling.{key}" for key in unread}
    assert found.notes == ("beta_fast null counts as absent: 32.0 filled in",)


TYPES = "default, linear, dynamic, llama3, yarn, longrope"
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
        (
            {"rope_parameters": {"rope_theta": 10000.0}},
            "rope_theta: expected one value, got 100000 and 10000.0 in different places",
        ),
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
        (
            {"rope_scaling": {"factor": 4.0}},
            "rope_scaling: expected a rope_type beside factor, got {'factor': 4.0}",
        ),
        (
            {"rope_scaling": {"rope_type": "proportional", "factor": 4.0}},
            f"rope_scaling.rope_type: expected one of {TYPES}, got 'proportional'",
        ),
        (
            {"rope_scaling": {"type": "foo"}},
            f"rope_scaling.type: expected one of {TYPES}, got 'foo'",
        ),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_type": 8}},
            f"rope_parameters.rope_type: expected one of {TYPES}, got 8",
        ),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "rope_parameters.factor: expected a number from 1, got None",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "wobble": None}},
            "rope_parameters.wobble: expected no such key for rope_type linear, got None",
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 4.0},
                "original_max_position_embeddings": 0,
            },
            "original_max_position_embeddings: expected a whole number from 1, got 0",
        ),
        (
            {"rope_scaling": {"type": ["linear"], "factor": 4.0}},
            f"rope_scaling.type: expected one of {TYPES}, got ['linear']",
        ),
        (
            {
                "rope_theta": ...,
                "rope_scaling": LLAMA3,
                "rope_parameters": LLAMA3 | {"rope_theta": 5e5},
            },
            "rope_theta: expected it beside rope_scaling, got 500000.0 in rope_parameters alone",
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 4.0},
                "rope_parameters": {"type": "yarn", "factor": 4.0, "beta_fast": 16},
            },
            "beta_fast: expected it in both rope_scaling and rope_parameters, got None and 16",
        ),
        (
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 4096},
            "original_max_position_embeddings: expected one value, got 4096 and 8192 in "
            "different places",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 1},
                "rope_parameters": {"type": "linear", "factor": True},
            },
            "factor: expected one value, got 1 and True in different places",
        ),
        (
            {"original_max_position_embeddings": 4096},
            "original_max_position_embeddings: expected no such key for rope_type default, got "
            "4096",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "factor": 4.0}},
            "rope_scaling.factor: expected no such key for rope_type default, got 4.0",
        ),
        (
            {"rope_scaling": LLAMA3 | {"attention_factor": 1.1}},
            "rope_scaling.attention_factor: expected no such key for rope_type llama3, got 1.1",
        ),
        ({"rope_scaling": "llama3"}, "rope_scaling: expected a JSON object or null, got 'llama3'"),
        ({"rope_parameters": [8]}, "rope_parameters: expected a JSON object or null, got [8]"),
        (
            {"rope_scaling": LLAMA3 | {"factor": 0.5}},
            "rope_scaling.factor: expected a number from 1, got 0.5",
        ),
        (
            {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}},
            "rope_scaling.low_freq_factor: expected a number below high_freq_factor 4.0, got 4.0",
        ),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192.5}},
            "rope_scaling.original_max_position_embeddings: expected a whole number from 1, got "
            "8192.5",
        ),
    ],
)
def test_rope_that_contradicts_itself_or_is_unknown_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    assert refusal(SMOLLM2, **changes) == f"config.json: {message}"


@pytest.mark.parametrize("key", sorted(WITHOUT_TYPE))
@pytest.mark.parametrize("value", [..., None, "8", -1, 0])
def test_every_number_of_llama3_must_be_there_and_positive(key: str, value: Any) -> None:
    scaling = {k: v for k, v in (LLAMA3 | {key: value}).items() if v is not ...}
    shown = repr(None if value is ... else value)

    kinds = {
        "factor": "a number from 1",
        "original_max_position_embeddings": "a whole number from 1",
    }
    expected = f"rope_scaling.{key}: expected {kinds.get(key, 'a number above 0')}, got {shown}"
    assert refusal(LLAMA32_1B, rope_scaling=scaling) == f"config.json: {expected}"


@pytest.mark.parametrize("rope_type", ["linear", "dynamic"])
def test_linear_and_dynamic_have_a_factor_and_nothing_else(rope_type: str) -> None:
    expected = Rope(100000.0, rope_type, 4.0)
    old, new = (
        {"type": rope_type, "factor": 4},
        {"rope_type": rope_type, "factor": 4.0, "rope_theta": 100000},
    )

    assert read(SMOLLM2, rope_scaling=old).rope == expected
    assert read(SMOLLM2, rope_theta=..., rope_parameters=new).rope == expected
    assert read(SMOLLM2, rope_scaling=old, rope_parameters=new).rope == expected
    assert (
        refusal(SMOLLM2, rope_scaling={"type": rope_type})
        == "config.json: rope_scaling.factor: expected a number from 1, got None"
    )
    plain = read(SMOLLM2, rope_scaling=old)
    for key in ("original_max_position_embeddings", "beta_fast", "x"):
        expected_line = (
            f"config.json: rope_scaling.{key}: expected no such key for rope_type {rope_type}, got "
        )
        for value in (4096, False):
            assert refusal(SMOLLM2, rope_scaling=old | {key: value}) == f"{expected_line}{value}"
        if key != "x":
            assert read(SMOLLM2, rope_scaling=old | {key: None}) == plain
    assert read(SMOLLM2, rope_scaling=old | {"truncate": False}) == plain


Y: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}
EVERY = {
    "attention_factor": 1.3,
    "mscale": 0.7,
    "mscale_all_dim": 0.3,
    "beta_fast": 16,
    "beta_slow": 2,
    "truncate": False,
}


def test_yarn_with_everything_said_and_with_nothing_said() -> None:
    every = read(SMOLLM2, rope_scaling=Y | EVERY | {"original_max_position_embeddings": 2048})
    least = read(SMOLLM2, rope_scaling=Y)
    filled = dict(least.defaults)

    assert every.rope == Rope(
        100000.0, "yarn", 4.0, 1.0, 1.0, 2048, 1.3, 0.7, 0.3, 16.0, 2.0, False
    )
    assert least.rope == Rope(
        100000.0, "yarn", 4.0, 1.0, 1.0, 8192, None, None, None, 32.0, 1.0, True
    )
    assert [
        filled[k]
        for k in ("original_max_position_embeddings", "beta_fast", "beta_slow", "truncate")
    ] == [8192, 32.0, 1.0, True]


def test_the_original_length_may_stand_outside_of_the_scaling() -> None:
    inside = read(SMOLLM2, rope_scaling=Y | {"original_max_position_embeddings": 2048})

    assert read(SMOLLM2, rope_scaling=Y, original_max_position_embeddings=2048) == inside
    assert (
        read(
            SMOLLM2, rope_parameters=Y | {"rope_theta": 1e5}, original_max_position_embeddings=2048
        )
        == inside
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("factor", None, "a number from 1"),
        ("factor", 0.5, "a number from 1"),
        ("factor", True, "a number from 1"),
        ("attention_factor", 0, "a number above 0"),
        ("mscale", -1, "a number from 0"),
        ("mscale_all_dim", [], "a number from 0"),
        ("beta_fast", 0, "a number above 0"),
        ("beta_fast", 0.5, "a number from beta_slow 1.0"),
        ("beta_slow", "1", "a number above 0"),
        ("truncate", 1, "true or false"),
        ("truncate", None, "true or false"),
        ("original_max_position_embeddings", None, "a whole number from 1"),
        ("original_max_position_embeddings", 4096.0, "a whole number from 1"),
        ("original_max_position_embeddings", 2**25, "at most 16777216 (no Llama comes near it)"),
        ("low_freq_factor", 1.0, "no such key for rope_type yarn"),
    ],
)
def test_a_wrong_value_of_yarn_is_refused_by_name(key: str, value: Any, expected: str) -> None:
    assert (
        refusal(SMOLLM2, rope_scaling=Y | {key: value})
        == f"config.json: rope_scaling.{key}: expected {expected}, got {value!r}"
    )


SHORT, LONG = [1.0 + i / 64 for i in range(32)], [2.0 + i for i in range(32)]
L: dict[str, Any] = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}


def test_longrope_has_two_lists_and_works_out_its_factor() -> None:
    found = read(SMOLLM2, rope_scaling=L | {"original_max_position_embeddings": 2048})
    given = read(
        SMOLLM2,
        rope_scaling=L
        | {"original_max_position_embeddings": 2048, "factor": 8, "attention_factor": 1.5},
    )

    lists = {"short_factor": tuple(SHORT), "long_factor": tuple(LONG)}
    assert found.rope == Rope(100000.0, "longrope", 4.0, 1.0, 1.0, 2048, None, **lists)
    assert ("factor", 4.0) in found.defaults
    assert given.rope == Rope(100000.0, "longrope", 8.0, 1.0, 1.0, 2048, 1.5, **lists)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"long_factor": LONG[1:]},
            "long_factor: expected a list of 32 numbers, head_dim / 2, got 31 of them",
        ),
        (
            {"short_factor": None},
            "short_factor: expected a list of 32 numbers, head_dim / 2, got None",
        ),
        (
            {"short_factor": [*SHORT[1:], "1"]},
            "short_factor: expected a number above 1e-06, got '1'",
        ),
        ({"long_factor": [*LONG[1:], 0]}, "long_factor: expected a number above 1e-06, got 0"),
        (
            {"original_max_position_embeddings": 1},
            "original_max_position_embeddings: expected a whole number from 2 (its logarithm "
            "divides), got 1",
        ),
    ],
)
def test_a_wrong_value_of_longrope_is_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    assert refusal(SMOLLM2, rope_scaling=L | changes) == f"config.json: rope_scaling.{message}"


WHOLE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {k: v for k, v in LLAMA3.items() if k != "rope_type"},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048} | EVERY,
}


@given(
    kind=st.sampled_from(sorted(WHOLE)),
    names=st.sampled_from([["type"], ["rope_type"], ["type", "rope_type"]]),
    twice=st.booleans(),
    data=st.data(),
)
def test_two_generations_are_read_only_where_they_say_the_same(
    kind: str, names: list[str], twice: bool, data: st.DataObject
) -> None:
    one = WHOLE[kind] | dict.fromkeys(names, kind)
    new = one | {"rope_theta": 1e5}
    assert (
        read(SMOLLM2, rope_scaling=one if twice else None, rope_parameters=new).rope
        == read(SMOLLM2, rope_scaling=one).rope
    )

    key = data.draw(st.sampled_from(sorted(new)))
    other = (
        not new[key]
        if isinstance(new[key], bool)
        else "default"
        if isinstance(new[key], str)
        else new[key] * 2
    )

    message = refusal(SMOLLM2, rope_scaling=one, rope_parameters=new | {key: other})
    named = "rope_type" if key == "type" else key
    assert message.startswith(f"config.json: {named}: expected one value, got ")
    assert message.endswith(" in different places")

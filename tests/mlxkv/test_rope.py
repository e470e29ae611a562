"""RoPE's tables and rotation against the published formulas, in float64 and by values worked out
elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import models
import numpy as np
import numpy.typing as npt
import pytest

from mlxkv.port import rope
from mlxkv.port.cache import Cache
from mlxkv.port.config.llama import LlamaConfig, Rope
from mlxkv.port.llama import rotate

LISTS: dict[str, Any] = {"short_factor": (1.0, 1.5, 2.0, 2.5), "long_factor": (3.0, 4.0, 5.0, 6.0)}
LONG: dict[str, Any] = {"head_dim": 64, "rope_theta": 100000.0, "max_position_embeddings": 8192}


def config(layout: str = "gqa", **changes: Any) -> LlamaConfig:
    return LlamaConfig.from_json(models.config(layout, **changes))


def angles(positions: int, theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """(positions, head_dim / 2), one formula per element."""
    return np.array(
        [[p * theta ** (-2 * i / head_dim) for i in range(head_dim // 2)] for p in range(positions)]
    )


@pytest.mark.parametrize(
    ("theta", "expected"),
    [
        (10000.0, [1, 0.316228, 0.1, 0.0316228, 0.01, 0.00316228, 0.001, 0.000316228]),
        (
            500000.0,
            [1, 0.193923, 0.037606, 0.00729266, 0.00141421, 0.000274248, 5.318e-5, 1.0313e-5],
        ),
    ],
)
def test_inverse_frequencies_are_the_published_ones(theta: float, expected: list[float]) -> None:
    found = rope.inverse_frequencies(Rope(theta), 16)

    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=6e-5)  # as many digits as are given


def test_float64_frequencies_are_float64_throughout() -> None:
    found = rope.inverse_frequencies(Rope(100000.0), 64, np.float64)

    np.testing.assert_allclose(found, [100000.0 ** (-2 * i / 64) for i in range(32)], rtol=1e-15)


def test_llama3_divides_long_waves_keeps_short_ones_and_blends_between() -> None:
    scaled = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    plain = [500000.0 ** (-2 * i / 128) for i in range(64)]

    expected = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4.0:
            expected.append(frequency)
        elif wavelength > 8192 / 1.0:
            expected.append(frequency / 8.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8.0 + smooth * frequency)
    found = rope.inverse_frequencies(scaled, 128, np.float64)

    np.testing.assert_allclose(found, expected, rtol=1e-14)
    # All three kinds occur.
    assert [sum(np.isclose(found, np.array(plain) / d, rtol=1e-12)) for d in (1, 8)] == [29, 29]
    np.testing.assert_allclose(rope.inverse_frequencies(scaled, 128), expected, rtol=1e-6)


def test_linear_divides_every_frequency() -> None:
    plain = [10000.0 ** (-2 * i / 16) for i in range(8)]

    np.testing.assert_allclose(
        rope.inverse_frequencies(Rope(10000.0, "linear", 4.0), 16, np.float64),
        np.array(plain) / 4,
        rtol=1e-15,
    )


def test_dynamic_is_plain_where_it_is_computed_at_all() -> None:
    assert np.array_equal(
        rope.inverse_frequencies(Rope(10000.0, "dynamic", 4.0), 16),
        rope.inverse_frequencies(Rope(10000.0), 16),
    )


@pytest.mark.parametrize(
    ("truncate", "first", "last", "kept", "slowed"),
    # 128 elements, theta 10000, 4096 positions: 32 turns are made by pair 20.9446, 1 turn by pair
    # 45.0271.
    [(True, 20, 46, 21, 18), (False, 20.9446, 45.0271, 21, 18)],
)
def test_yarn_keeps_fast_pairs_slows_slow_ones_and_ramps_between(
    truncate: bool, first: float, last: float, kept: int, slowed: int
) -> None:
    plain = np.array([10000.0 ** (-i / 64) for i in range(64)])
    ramp = np.clip((np.arange(64) - first) / (last - first), 0, 1)
    expected = plain * (1 - ramp) + plain / 16 * ramp

    scaled = Rope(10000.0, "yarn", 16.0, original_max_position_embeddings=4096, truncate=truncate)
    found = rope.inverse_frequencies(scaled, 128, np.float64)

    np.testing.assert_allclose(
        found, expected, rtol=1e-14 if truncate else 3e-4
    )  # as many digits as are given
    assert [sum(np.isclose(found, plain / d, rtol=1e-12)) for d in (1, 16)] == [kept, slowed]
    np.testing.assert_allclose(rope.inverse_frequencies(scaled, 128), found, rtol=1e-6)


def test_yarn_may_ramp_past_the_last_pair() -> None:
    # 32 turns are made by pair 2.8 of 8, 1 turn by pair 8.8.
    scaled = Rope(100.0, "yarn", 4.0, original_max_position_embeddings=1000)
    plain, ramp = (
        np.array([100.0 ** (-i / 8) for i in range(8)]),
        np.clip((np.arange(8) - 2) / 7, 0, 1),
    )

    np.testing.assert_allclose(
        rope.inverse_frequencies(scaled, 16, np.float64),
        plain * (1 - ramp) + plain / 4 * ramp,
        rtol=1e-14,
    )


def test_yarn_with_equal_bounds_between_pairs_is_a_step_too() -> None:
    # 1 turn is made by pair 2.6.
    scaled = Rope(
        10000.0, "yarn", 2.0, original_max_position_embeddings=128, beta_fast=1.0, truncate=False
    )
    plain = np.array([10000.0 ** (-i / 8) for i in range(8)])

    np.testing.assert_allclose(
        rope.inverse_frequencies(scaled, 16, np.float64), [*plain[:3], *plain[3:] / 2], rtol=1e-15
    )


def test_yarn_with_equal_bounds_is_a_step() -> None:
    scaled = Rope(
        10000.0, "yarn", 2.0, original_max_position_embeddings=6
    )  # nothing turns once: both bounds are 0
    plain = np.array([10000.0 ** (-i / 8) for i in range(8)])

    np.testing.assert_allclose(
        rope.inverse_frequencies(scaled, 16, np.float64), [1.0, *plain[1:] / 2], rtol=1e-15
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.1 * math.log(16) + 1),
        ({"attention_factor": 1.3, "mscale": 0.7, "mscale_all_dim": 0.3}, 1.3),
        (
            {"mscale": 0.7, "mscale_all_dim": 0.3},
            (0.07 * math.log(16) + 1) / (0.03 * math.log(16) + 1),
        ),
        ({"mscale": 0.7}, 0.1 * math.log(16) + 1),
        ({"mscale": 0.7, "mscale_all_dim": 0.0}, 0.1 * math.log(16) + 1),
        ({"factor": 1.0}, 1.0),
        ({"rope_type": "linear"}, 1.0),
        ({"rope_type": "longrope"}, math.sqrt(1 + math.log(16) / math.log(4096))),
        ({"rope_type": "longrope", "factor": 0.5}, 1.0),
        ({"rope_type": "longrope", "attention_factor": 1.3}, 1.3),
    ],
)
def test_cosines_and_sines_carry_the_attention_factor(
    changes: dict[str, Any], expected: float
) -> None:
    parameters = {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
    } | changes
    given = replace(
        config(head_dim=8),
        rope=Rope(10000.0, **parameters, short_factor=(1.0,) * 4, long_factor=(2.0,) * 4),
    )

    assert rope.attention_factor(given.rope) == pytest.approx(expected, rel=1e-15)
    cos, sin = rope.tables(given, np.float64)
    np.testing.assert_allclose(np.hypot(cos, sin), expected, rtol=1e-15)


def test_longrope_takes_its_factors_by_the_length_that_the_tables_are_made_for() -> None:
    given = replace(config(head_dim=8), rope=Rope(10000.0, "longrope", 1.0, 1.0, 1.0, 32, **LISTS))
    plain = angles(64, 10000.0, 8)

    for length, stretch in ((32, LISTS["short_factor"]), (33, LISTS["long_factor"])):
        cos, _ = rope.tables(given, np.float64, length=length)
        np.testing.assert_allclose(cos, np.cos(plain / stretch)[:length], rtol=0, atol=1e-14)
    assert len(rope.tables(given)[0]) == 32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_tables_hold_the_cosine_and_sine_of_position_times_frequency(
    dtype: type[np.floating[Any]],
) -> None:
    cos, sin = rope.tables(config(head_dim=8), dtype)
    exact = angles(64, 10000.0, 8)

    assert (cos.dtype, cos.shape, sin.dtype, sin.shape) == (
        np.dtype(dtype),
        (64, 4),
        np.dtype(dtype),
        (64, 4),
    )
    # An angle carries the rounding of the frequency and its own.
    bound = np.finfo(dtype).eps * (1 + exact)
    assert np.all(np.abs(cos - np.cos(exact)) <= bound)
    assert np.all(np.abs(sin - np.sin(exact)) <= bound)


# Measured 4.6e-4, 5.9e-4 and 2.2e-3; a table from half-precision angles is wrong by up to 2.
@pytest.mark.parametrize(
    ("dtype", "worst"), [("float32", 6e-4), ("float16", 8.5e-4), ("bfloat16", 0.0025)]
)
def test_tables_are_cast_last_so_that_far_positions_keep_their_angles(
    dtype: str, worst: float
) -> None:
    cache = Cache(config(**LONG), dtype=dtype)
    exact = angles(8192, 100000.0, 64)
    cos, sin = (np.array(t.astype(mx.float32)) for t in (cache.cos, cache.sin))

    assert str(cache.cos.dtype) == str(cache.sin.dtype) == f"mlx.core.{dtype}"
    assert np.abs(cos - np.cos(exact)).max() <= worst
    assert np.abs(sin - np.sin(exact)).max() <= worst
    for row, other in ((256, 257), (1000, 1001), (8190, 8191)):
        assert not np.array_equal(cos[row], cos[other])


def test_the_algebra_lanes_tables_are_float64_on_the_device_too() -> None:
    cache = Cache(config(**LONG), dtype="float64")

    assert np.abs(np.array(cache.cos) - np.cos(angles(8192, 100000.0, 64))).max() <= 2e-12


def test_rotation_turns_element_i_with_element_i_plus_half() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 3, 5, 8))
    angle = random.uniform(-7, 7, (5, 4))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)

    with mx.stream(mx.cpu):
        found = rotate(*(mx.array(a, mx.float64) for a in (x, np.cos(angle), np.sin(angle))))

    np.testing.assert_allclose(np.array(found), expected, atol=1e-15)


def test_position_zero_turns_nothing_and_later_positions_keep_lengths() -> None:
    cache = Cache(config(head_dim=8))
    x = mx.array(np.random.default_rng(0).standard_normal((1, 2, 4, 8)).astype(np.float32))

    found = np.array(rotate(x, *cache.rotation(0, 4)))

    assert np.array_equal(found[:, :, 0], np.array(x)[:, :, 0])
    assert not np.allclose(found[:, :, 1:], np.array(x)[:, :, 1:], atol=0.1)
    np.testing.assert_allclose(
        np.linalg.norm(found, axis=-1), np.linalg.norm(np.array(x), axis=-1), rtol=1e-6
    )


def test_rotation_rows_start_at_the_position_asked_for() -> None:
    cache = Cache(config(head_dim=8))

    cos, sin = cache.rotation(9, 3)

    assert np.array_equal(np.array(cos), np.array(cache.cos)[9:12])
    assert np.array_equal(np.array(sin), np.array(cache.sin)[9:12])

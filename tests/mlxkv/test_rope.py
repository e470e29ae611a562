"""RoPE's tables and rotation against the published formulas, in float64 and by values worked out elsewhere."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import models
import numpy as np
import numpy.typing as npt
import pytest

from mlxkv.port import rope
from mlxkv.port.cache import Cache
from mlxkv.port.config import LlamaConfig, Rope
from mlxkv.port.llama import rotate

LONG: dict[str, Any] = {"head_dim": 64, "rope_theta": 100000.0, "max_position_embeddings": 8192}


def config(layout: str = "gqa", **changes: Any) -> LlamaConfig:
    return LlamaConfig.from_json(models.config(layout, **changes))


def angles(positions: int, theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """(positions, head_dim / 2), one formula per element."""
    return np.array([[p * theta ** (-2 * i / head_dim) for i in range(head_dim // 2)] for p in range(positions)])


@pytest.mark.parametrize(
    ("theta", "expected"),
    [
        (10000.0, [1, 0.316228, 0.1, 0.0316228, 0.01, 0.00316228, 0.001, 0.000316228]),
        (500000.0, [1, 0.193923, 0.037606, 0.00729266, 0.00141421, 0.000274248, 5.318e-5, 1.0313e-5]),
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_tables_hold_the_cosine_and_sine_of_position_times_frequency(dtype: type[np.floating[Any]]) -> None:
    cos, sin = rope.tables(config(head_dim=8), dtype)
    exact = angles(64, 10000.0, 8)

    assert (cos.dtype, cos.shape, sin.dtype, sin.shape) == (np.dtype(dtype), (64, 4), np.dtype(dtype), (64, 4))
    # An angle carries the rounding of the frequency and its own.
    bound = np.finfo(dtype).eps * (1 + exact)
    assert np.all(np.abs(cos - np.cos(exact)) <= bound)
    assert np.all(np.abs(sin - np.sin(exact)) <= bound)


# Measured 4.6e-4, 5.9e-4 and 2.2e-3; a table from half-precision angles is wrong by up to 2.
@pytest.mark.parametrize(("dtype", "worst"), [("float32", 6e-4), ("float16", 8.5e-4), ("bfloat16", 0.0025)])
def test_tables_are_cast_last_so_that_far_positions_keep_their_angles(dtype: str, worst: float) -> None:
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
    np.testing.assert_allclose(np.linalg.norm(found, axis=-1), np.linalg.norm(np.array(x), axis=-1), rtol=1e-6)


def test_rotation_rows_start_at_the_position_asked_for() -> None:
    cache = Cache(config(head_dim=8))

    cos, sin = cache.rotation(9, 3)

    assert np.array_equal(np.array(cos), np.array(cache.cos)[9:12])
    assert np.array_equal(np.array(sin), np.array(cache.sin)[9:12])

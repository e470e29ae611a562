"""Engines that add up in other orders compute the same up to rounding. The port stays as it was."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import models
import numpy as np
import pytest

from mlxkv.commands.selftest.orders import ORDERS
from mlxkv.port.cache import Cache
from mlxkv.port.llama import Llama


def logits(model: Llama) -> np.ndarray:
    cache = Cache(model.config, dtype=model.dtype)
    return np.array(model(mx.array([models.SEQUENCE]), cache=cache, all_positions=True))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", ["gqa", "mha"])
def test_another_order_of_sums_changes_roundings_and_nothing_else(
    model_of: Callable[..., Llama], layout: str, order: str
) -> None:
    model = model_of(layout)
    plain = logits(model)
    with ORDERS[order]():
        other = logits(model)
    assert 0 < np.abs(other - plain).max() < 1e-4 * np.abs(plain).max()
    assert np.array_equal(logits(model), plain)

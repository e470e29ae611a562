"""The tool that makes a Llama wider computes the logits of the model that it was given; files of
every kind hold what was written.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import models
import numpy as np
import pytest

from mlxkv.commands.scale import widen
from oracle.model import written
from oracle.model.checkpoint import resolve


def read(folder: Path) -> dict[str, written.Array]:
    return {name: written.read(tensor) for name, tensor in resolve(str(folder)).tensors.items()}


@pytest.mark.parametrize("layout", ["gqa", "llama3", "mqa"])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_a_wider_model_computes_the_same_logits(layout: str, times: int, tmp_path: Path) -> None:
    config = models.config(layout)
    source = models.save(tmp_path / "m", config)
    wide = resolve(str(widen.widen(str(source), tmp_path / "wide", times=times)))
    expected = models.forward(config, models.weights(config), models.SEQUENCE)
    found = models.forward(wide.config, read(wide.folder), models.SEQUENCE)
    assert wide.config["hidden_size"] == times * config["hidden_size"]
    assert wide.config["num_attention_heads"] == times * config["num_attention_heads"]
    assert np.abs(found - expected).max() < 1e-12 * np.abs(expected).max()


def test_shares_are_different_powers_of_two_that_add_up_to_one() -> None:
    assert widen.shares(1) == [1]
    assert widen.shares(2) == [1 / 2, 1 / 2]
    assert widen.shares(4) == [1 / 2, 1 / 4, 1 / 8, 1 / 8]
    assert sum(widen.shares(8)) == 1


@pytest.mark.parametrize("times", [0, 3])
def test_only_a_power_of_two_divides_without_rounding(times: int, tmp_path: Path) -> None:
    source = models.save(tmp_path / "m", models.config())
    with pytest.raises(ValueError, match=f"times: {times}, expected a power of two"):
        widen.widen(str(source), tmp_path / "wide", times=times)


@pytest.mark.parametrize("values", ["float16", "bfloat16"])
def test_half_precision_is_stored_rounded_to_nearest(values: str, tmp_path: Path) -> None:
    source = models.save(tmp_path / "m", models.config())
    wide = read(widen.widen(str(source), tmp_path / "wide", times=1, values=values))
    dtype = mx.float16 if values == "float16" else mx.bfloat16
    for name, array in read(source).items():
        expected = np.array(mx.array(array).astype(dtype).astype(mx.float32))
        assert np.array_equal(wide[name], expected)


def test_four_bits_are_packed_as_mlx_unpacks_them(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = {"a.weight": random.standard_normal((8, 128)).astype(np.float32)}
    arrays |= {"b.weight": np.ones((3, 64), np.float32), "norm.weight": np.ones(64, np.float32)}
    shapes = {name: array.shape for name, array in arrays.items()}
    written.save(tmp_path, {}, shapes, arrays.__getitem__, values="4-bit")
    file = mx.load(str(tmp_path / "model.safetensors"))
    assert isinstance(file, dict)
    for name in ("a", "b"):
        parts = (file[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
        words, scales, biases = parts
        found = mx.dequantize(words, scales, biases, group_size=written.GROUP, bits=4)
        apart = np.abs(np.array(found.astype(mx.float32)) - arrays[f"{name}.weight"])
        steps = np.repeat(np.array(scales.astype(mx.float32)), written.GROUP, axis=1)
        assert (apart <= 0.55 * steps + 0.02).all()
    assert file["norm.weight"].dtype == mx.bfloat16

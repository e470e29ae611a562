"""A checkpoint's tensors -> parameters: bit for bit, whatever they were stored as, and none missing
or left over.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import numpy as np
import numpy.typing as npt
import pytest
from caches import settled
from safetensors.numpy import save_file

from mlxkv.port import weights as weights_module
from mlxkv.port.cache import Cache
from mlxkv.port.config.llama import ConfigError
from mlxkv.port.llama import Llama, parameters
from mlxkv.port.weights import from_checkpoint, load
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import resolve

Array = npt.NDArray[Any]
FolderOf = Callable[[str], Path]
LAYOUTS = sorted(models.LAYOUTS)


def found_in(model: Llama) -> dict[str, Array]:
    """Every parameter as numpy; bfloat16 as the float32 that holds it."""
    return {
        n: np.array(a.astype(mx.float32) if a.dtype == mx.bfloat16 else a)
        for n, a in parameters(model).items()
    }


def same(found: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
    """Equal names, dtypes and bits."""
    return found.keys() == expected.keys() and all(
        found[n].dtype == expected[n].dtype and np.array_equal(found[n], expected[n])
        for n in expected
    )


def stored_as_bfloat16(array: Array) -> npt.NDArray[np.uint16]:
    """The upper half of each float32, to nearest, ties to even."""
    bits = array.astype(np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def as_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def save_bfloat16(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> Path:
    """numpy has no bfloat16, so the dtype is written into the header afterwards."""
    models.save(folder, config, {n: stored_as_bfloat16(a) for n, a in tensors.items()})
    data = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].replace(b'"U16"', b'"BF16"')
    (folder / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + data[end:]
    )
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_weights_arrive_bit_for_bit(layout: str, folder_of: FolderOf) -> None:
    assert same(found_in(load(folder_of(layout))), models.weights(models.config(layout)))


def test_a_path_a_string_and_a_checkpoint_name_the_same_model(folder_of: FolderOf) -> None:
    folder = folder_of("gqa")

    expected = found_in(load(folder))

    assert same(found_in(load(str(folder))), expected)
    assert same(found_in(from_checkpoint(resolve(str(folder)))), expected)


def test_half_precision_files_are_widened_exactly(tmp_path: Path) -> None:
    config = models.config("mqa")
    weights = models.weights(config)
    halves = {n: a.astype(np.float16) for n, a in weights.items()}

    from_f16 = load(models.save(tmp_path / "f16", config, halves))
    from_bf16 = load(save_bfloat16(tmp_path / "bf16", config, weights))

    assert same(found_in(from_f16), {n: a.astype(np.float32) for n, a in halves.items()})
    assert same(
        found_in(from_bf16), {n: as_float32(stored_as_bfloat16(a)) for n, a in weights.items()}
    )


def test_a_file_may_mix_dtypes(tmp_path: Path) -> None:
    config = models.config("gqa")
    mixed = {
        n: a.astype(np.float16) if "mlp" in n else a for n, a in models.weights(config).items()
    }

    found = found_in(load(models.save(tmp_path, config, mixed)))

    assert same(found, {n: a.astype(np.float32) for n, a in mixed.items()})


def test_a_run_in_half_precision_has_weights_rounded_to_nearest_even(folder_of: FolderOf) -> None:
    weights = models.weights(models.config("gqa"))

    f16, bf16 = load(folder_of("gqa"), "float16"), load(folder_of("gqa"), "bfloat16")

    assert same(found_in(f16), {n: a.astype(np.float16) for n, a in weights.items()})
    assert same(found_in(bf16), {n: as_float32(stored_as_bfloat16(a)) for n, a in weights.items()})
    assert {str(a.dtype) for a in parameters(bf16).values()} == {"mlx.core.bfloat16"}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rounded_to_rounds_first_and_computes_in_the_dtype(dtype: str, folder_of: FolderOf) -> None:
    weights = models.weights(models.config("gqa"))

    f16, bf16 = (
        load(folder_of("gqa"), dtype, rounded_to=first) for first in ("float16", "bfloat16")
    )

    assert same(found_in(f16), {n: a.astype(np.float16).astype(dtype) for n, a in weights.items()})
    assert same(
        found_in(bf16),
        {n: as_float32(stored_as_bfloat16(a)).astype(dtype) for n, a in weights.items()},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": 10_000},
            "tensor model.layers.10.input_layernorm.weight is missing (89973 in all)",
        ),
        (
            {"num_attention_heads": 10_000},
            "model.layers.0.self_attn.q_proj.weight has shape [32, 32], expected [80000, 32]",
        ),
        (
            {"intermediate_size": 2**24},
            "model.layers.0.mlp.gate_proj.weight has shape [48, 32], expected [16777216, 32]",
        ),
        (
            {"vocab_size": 2**24},
            "model.embed_tokens.weight has shape [40, 32], expected [16777216, 32]",
        ),
        (
            {"hidden_size": 2**20, "vocab_size": 2**24},
            "has shape [40, 32], expected [16777216, 1048576]",
        ),
        (
            {"head_dim": 2**16},
            "model.layers.0.self_attn.q_proj.weight has shape [32, 32], expected [262144, 32]",
        ),
    ],
)
def test_a_config_far_larger_than_its_weights_is_refused_before_anything_of_its_size_is_made(
    changes: dict[str, int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.save(
        tmp_path, models.config("gqa") | changes, models.weights(models.config("gqa"))
    )
    made: list[int] = []
    monkeypatch.setattr(
        weights_module,
        "Llama",
        lambda config: made.append(config.num_hidden_layers) or Llama(config),
    )
    held, began = settled(), time.perf_counter()
    mx.reset_peak_memory()

    with pytest.raises(Refusal) as caught:
        load(folder)

    assert message in str(caught.value)
    assert made == [1]
    assert mx.get_peak_memory() - held < 2**20
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_loading_takes_the_weights_and_one_tensor_as_it_is_stored(
    dtype: str, size: int, tmp_path: Path
) -> None:
    config = models.config("gqa", hidden_size=256, intermediate_size=512, vocab_size=1000)
    folder = models.save(tmp_path, config)
    sizes = [int(np.prod(shape)) for shape in models.shapes(config).values()]
    checkpoint = resolve(str(folder))
    held = settled()
    mx.reset_peak_memory()
    tracemalloc.start()

    model = from_checkpoint(checkpoint, dtype)

    _, ours = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    weights, stored = size * sum(sizes), 4 * max(sizes)
    assert settled() - held < weights + 2**16
    assert weights < mx.get_peak_memory() - held < weights + stored + 2**16
    assert ours < 2**18  # the file is mapped
    del model


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_that_overflows_in_the_runs_dtype_is_refused(name: str, tmp_path: Path) -> None:
    config = models.config("gqa")
    weights = models.weights(config)
    weights[name][3, 5] = -65520.0  # the least that float16 has no number for

    says = f"{tmp_path / 'model.safetensors'}: {name} holds NaN or infinity in float16"
    assert refusal(tmp_path, config, weights, dtype="float16").startswith(says)
    assert refusal(tmp_path, config, weights, dtype="float64", rounded_to="float16") == (
        f"{says}, expected finite weights; check the file"
    )
    weights[name][3, 5] = -65519.0
    assert load(models.save(tmp_path / "fits", config, weights), "float16")


# Shards, ties.


def sharded(folder: Path, config: Mapping[str, Any], shards: int) -> dict[str, list[str]]:
    weights = models.weights(config)
    parts = {
        f"model-{i + 1:05d}-of-{shards:05d}.safetensors": sorted(weights)[i::shards]
        for i in range(shards)
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for file, names in parts.items():
        save_file({n: weights[n] for n in names}, folder / file)
    index = {
        "metadata": {},
        "weight_map": {n: file for file, names in parts.items() for n in names},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return parts


def test_shards_are_one_model_and_strays_are_not_looked_at(tmp_path: Path) -> None:
    config = models.config("llama3")
    sharded(tmp_path / "m", config, 3)
    save_file(
        {"model.norm.weight": np.zeros(32, np.float32), "x": np.zeros(1)},
        tmp_path / "m" / "stray.safetensors",
    )

    assert same(found_in(load(tmp_path / "m")), models.weights(config))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    parts = sharded(tmp_path / "m", models.config("gqa"), 2)
    gone = tmp_path / "m" / list(parts)[1]
    gone.unlink()

    with pytest.raises(Refusal, match=rf"^{gone}: no such file"):
        load(tmp_path / "m")


def test_a_tied_head_that_is_stored_again_must_be_the_same(tmp_path: Path) -> None:
    config = models.config("mha")
    weights = models.weights(config)
    again = load(
        models.save(
            tmp_path / "again",
            config,
            weights | {"lm_head.weight": weights["model.embed_tokens.weight"]},
        )
    )
    assert "lm_head.weight" not in parameters(again)
    logits = np.array(again([[1, 2]], cache=Cache(again.config)))
    np.testing.assert_allclose(logits[0], models.forward(config, weights, [1, 2])[-1], atol=1e-4)
    other = models.save(
        tmp_path / "other", config, weights | {"lm_head.weight": np.zeros((40, 32), np.float32)}
    )
    with pytest.raises(
        Refusal,
        match=r"other/model\.safetensors: lm_head\.weight differs from "
        r"model\.embed_tokens\.weight though tie_word_embeddings is true; set it to false "
        r"in config\.json if the head is its own, or take the head out$",
    ):
        load(other)


def test_inverse_frequencies_stored_by_old_transformers_are_passed_over(tmp_path: Path) -> None:
    config = models.config("gqa")
    stored = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32) for i in range(3)
    }

    assert same(
        found_in(load(models.save(tmp_path, config, models.weights(config) | stored))),
        models.weights(config),
    )


# Refusals.


def refusal(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Array], **options: Any
) -> str:
    models.save(folder, config, tensors)
    with pytest.raises(Refusal) as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_missing_tensor_is_refused_by_name(layout: str, tmp_path: Path) -> None:
    config = models.config(layout, num_hidden_layers=1)
    weights = models.weights(config)

    for name in weights:
        message = refusal(tmp_path, config, {n: a for n, a in weights.items() if n != name})
        assert (
            message == f"{tmp_path}: tensor {name} is missing (1 in all); the weights do not fit "
            f"config.json"
        )


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("gqa", "model.layers.3.mlp.up_proj.weight"),
        ("gqa", "model.layers.0.self_attn.q_proj.bias"),
        ("gqa", "model.layers.0.self_attn.q_norm.weight"),
        ("gqa", "lm_head.bias"),
        ("gqa", "norm.weight"),
        ("mha", "score.weight"),
    ],
)
def test_a_tensor_left_over_is_refused_by_name(layout: str, name: str, tmp_path: Path) -> None:
    config = models.config(layout)

    message = refusal(
        tmp_path, config, models.weights(config) | {name: np.zeros((4, 4), np.float32)}
    )

    assert (
        message == f"{tmp_path}: tensor {name} is not part of this Llama (1 such); see config.json"
    )


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.embed_tokens.weight", [41, 32], [40, 32]),
        ("model.layers.1.self_attn.k_proj.weight", [32, 32], [16, 32]),
        ("model.layers.2.mlp.down_proj.weight", [48, 32], [32, 48]),
        ("model.norm.weight", [1, 32], [32]),
        ("model.norm.weight", [1], [32]),
        ("lm_head.weight", [32, 40], [40, 32]),
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_both(
    name: str, shape: list[int], expected: list[int], tmp_path: Path
) -> None:
    config = models.config("gqa")

    message = refusal(
        tmp_path, config, models.weights(config) | {name: np.zeros(shape, np.float32)}
    )

    assert message == f"{tmp_path}: {name} has shape {shape}, expected {expected} by config.json"


def test_a_head_dim_that_contradicts_the_tensors_is_refused(tmp_path: Path) -> None:
    weights = models.weights(models.config("gqa"))

    message = refusal(tmp_path, models.config("gqa", head_dim=16), weights)

    assert (
        message
        == f"{tmp_path}: model.layers.0.self_attn.q_proj.weight has shape [32, 32], expected "
        f"[64, 32] by config.json"
    )


@pytest.mark.parametrize(
    ("dtype", "name_of"),
    [
        (np.int8, "I8"),
        (np.uint32, "U32"),
        (np.int64, "I64"),
        (np.bool_, "BOOL"),
        (np.float64, "F64"),
    ],
)
def test_a_tensor_that_mlx_does_not_read_as_floats_is_refused(
    dtype: type[np.generic], name_of: str, tmp_path: Path
) -> None:
    config = models.config("gqa")
    name = "model.layers.0.mlp.up_proj.weight"

    message = refusal(tmp_path, config, models.weights(config) | {name: np.zeros((48, 32), dtype)})

    assert (
        message
        == f"{tmp_path / 'model.safetensors'}: {name} is stored as {name_of}, expected one of "
        f"F32, F16, BF16; save it in F32"
    )


def test_a_config_that_cannot_be_followed_is_refused_by_its_file(tmp_path: Path) -> None:
    models.save(
        tmp_path, models.config("gqa", rope_interleaved=True), models.weights(models.config("gqa"))
    )

    with pytest.raises(
        ConfigError, match=rf"^{tmp_path}/config.json: rope_interleaved: expected False"
    ):
        load(tmp_path)

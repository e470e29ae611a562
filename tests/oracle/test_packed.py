"""MLX's packed weights, without MLX: what the words mean, what the truth and the pool are given,
and every refusal.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from folders import refusal
from safetensors.torch import save_file

from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint, resolve
from oracle.pool import reference
from oracle.pool.neighbour import neighbour_of
from oracle.question import check_range
from oracle.truth import llama as truth
from oracle.truth import unpack as dequantise
from oracle.truth.config import check_weights, config_of
from oracle.truth.weights import DTYPES, Weights

# By bits: words written by hand, and the numbers in them, whole. Numbers of 3, 5 and 6 bits lie
# across bytes and words.
WORDS: dict[int, tuple[list[int], list[int]]] = {
    2: ([0xE4E4E4E4, 0x0000001B], [0, 1, 2, 3] * 4 + [3, 2, 1, 0] + [0] * 12),
    3: ([0x88FAC688, 0xC688FAC6, 0xFAC688FA], [0, 1, 2, 3, 4, 5, 6, 7] * 4),
    4: ([0x76543210, 0xFEDCBA98], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]),
    5: ([0x8A418820, 0xC5A92839, 0xCA307B9A, 0x38BDAB49, 0xFFBBCDEB], list(range(32))),
    6: ([0x81F83081, 0x3081F830, 0xF83081F8], [1, 2, 3, 62] * 4),
    8: ([0x03020100, 0xFF807F01], [0, 1, 2, 3, 1, 127, 128, 255]),
}
UP = "model.layers.1.mlp.up_proj"
SAID = {"group_size": 32, "bits": 4, "mode": "affine"}
TOKENS = models.tokens(12)


def packed(
    weight: torch.Tensor, *, bits: int, size: int, stored: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """words, scales and biases of a matrix, each group between its least and its largest value."""
    groups = weight.double().reshape(len(weight), -1, size)
    low, high = groups.amin(-1), groups.amax(-1)
    scales, biases = ((high - low) / (2**bits - 1)).to(stored), low.to(stored)
    q = (
        ((groups - biases.double()[..., None]) / scales.double()[..., None])
        .round()
        .clamp(0, 2**bits - 1)
        .reshape(weight.shape)
    )
    string = (q.numpy().astype(np.uint8)[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    octets = np.packbits(string.reshape(len(weight), -1), axis=1, bitorder="little")
    return torch.from_numpy(octets.view(np.uint32).copy()), scales, biases


def packed_tensors(
    config: Mapping[str, Any],
    *,
    bits: int = 4,
    size: int = 32,
    stored: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Random weights as mlx-lm writes them: every matrix packed whose rows are whole groups."""
    found: dict[str, Any] = {}
    for name, tensor in models.tensors_of(dict(config)).items():
        if tensor.ndim < 2 or tensor.shape[1] % size:
            found[name] = tensor.to(stored)
        else:
            parts = (
                f"{name.removesuffix('weight')}{part}" for part in ("weight", "scales", "biases")
            )
            found |= dict(
                zip(parts, packed(tensor, bits=bits, size=size, stored=stored), strict=True)
            )
    return found


def config_for(layout: str = "mha", **changes: Any) -> dict[str, Any]:
    return models.config_of(layout, **{"hidden_size": 64, "intermediate_size": 96} | changes)


def make(
    folder: Path,
    tensors: Mapping[str, Any],
    said: object = SAID,
    again: object = SAID,
    **changes: Any,
) -> Path:
    config = config_for(**changes) | {"quantization": said, "quantization_config": again}
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def formula(
    tensors: Mapping[str, Any], name: str, *, bits: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """q * scale + bias in float64, a number at a time out of one long integer a row."""
    words, rows = tensors[name].numpy(), []
    scales, biases = (
        tensors[name.removesuffix("weight") + part].to(dtype).double()
        for part in ("scales", "biases")
    )
    size = words.shape[1] * 32 // bits // scales.shape[1]
    for r, row in enumerate(words):
        whole = int.from_bytes(row.astype("<u4").tobytes(), "little")
        q = [whole >> bits * i & (2**bits - 1) for i in range(len(row) * 32 // bits)]
        rows.append(
            [v * float(scales[r, i // size]) + float(biases[r, i // size]) for i, v in enumerate(q)]
        )
    return torch.tensor(rows, dtype=torch.float64)


# What the words mean.


@pytest.mark.parametrize("bits", WORDS)
def test_numbers_are_read_from_the_lowest_bit_on(bits: int) -> None:
    words, expected = WORDS[bits]
    found = dequantise.numbers(np.array([words, words[::-1]], np.uint32), bits=bits)
    assert found[0].tolist() == expected
    assert (found[1].tolist() == expected) == (words == words[::-1])


def test_each_group_of_each_row_has_its_own_scale_and_bias() -> None:
    words = np.array([[0x76543210] * 8, [0xFFFFFFFF] * 4 + [0x00000000] * 4], np.uint32)
    scales, biases = np.array([[0.5, -2.0], [1.0, 1.0]]), np.array([[-1.0, 100.0], [0.25, -8.0]])
    expected = [
        [-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5] * 4
        + [100.0, 98.0, 96.0, 94.0, 92.0, 90.0, 88.0, 86.0] * 4,
        [15.25] * 32 + [-8.0] * 32,
    ]
    found = dequantise.weight(words, scales, biases, bits=4, group_size=32)
    assert found.dtype == np.float64
    assert found.tolist() == expected


# What the truth and the pool are given.


@pytest.mark.parametrize(
    ("bits", "size"), [(2, 32), (3, 32), (4, 32), (4, 64), (5, 32), (6, 32), (8, 64)]
)
def test_the_truth_is_given_the_exact_product_and_sum(tmp_path: Path, bits: int, size: int) -> None:
    tensors = packed_tensors(config_for(), bits=bits, size=size)
    said = {"group_size": size, "bits": bits}
    weights = Weights(resolve(str(make(tmp_path / "m", tensors, said, said))), dtype="float32")
    for name in ("model.embed_tokens.weight", "model.layers.2.self_attn.k_proj.weight"):
        expected = formula(tensors, name, bits=bits)
        assert torch.equal(weights(name), expected)
        assert torch.equal(weights(name, rows=torch.tensor([5, 0, 5])), expected[[5, 0, 5]])
    assert torch.equal(weights("model.norm.weight"), tensors["model.norm.weight"].double())


def test_scales_and_biases_are_rounded_to_the_runs_dtype_and_what_they_unpack_to_is_not(
    tmp_path: Path,
) -> None:
    tensors = packed_tensors(config_for(), stored=torch.float32)
    weights = Weights(resolve(str(make(tmp_path / "m", tensors))), dtype="bfloat16")
    expected = formula(tensors, f"{UP}.weight", bits=4, dtype=torch.bfloat16)
    assert torch.equal(weights(f"{UP}.weight"), expected)
    assert not torch.equal(expected, formula(tensors, f"{UP}.weight", bits=4))
    assert not torch.equal(expected, expected.bfloat16().double())


def proof(checkpoint: Checkpoint, dtype: str) -> float:
    """The truth's second proof, as a share of its limit."""
    from oracle.formats.proofs import TRUTH as PROOF_LIMITS

    config, weights = config_of(checkpoint), Weights(checkpoint, dtype=dtype)
    streams = truth.follow(weights, config, TOKENS, segments={"full": [len(TOKENS)]})
    out = np.zeros((len(TOKENS), config.vocab_size))
    most, _ = truth.write_logits(streams, weights.head_blocks(config), out)
    error = reference.Reference(checkpoint, dtype=dtype).double(TOKENS) - out
    return math.sqrt((error * error).mean()) / most / PROOF_LIMITS["transformers_double"]


@pytest.mark.parametrize(
    ("dtype", "stored", "tied"),
    [("float32", torch.float32, True), ("bfloat16", torch.bfloat16, False)],
)
def test_the_second_proof_is_on_the_exact_weights_and_the_pool_runs_on_rounded_ones(
    tmp_path: Path, dtype: str, stored: torch.dtype, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference.set_up(1)
    changes = {
        "layout": "llama3",
        "tie_word_embeddings": tied,
        "intermediate_size": 72,
    }  # down_proj's rows of 72 are not packed
    tensors = packed_tensors(config_for(**changes), stored=stored)
    checkpoint = resolve(str(make(tmp_path / "m", tensors, **changes)))
    assert "model.layers.0.mlp.down_proj.weight" not in checkpoint.packed
    assert 0 < proof(checkpoint, dtype) < 1
    loaded = dict(reference.Reference(checkpoint, dtype=dtype)._model.named_parameters())
    rounded = formula(tensors, f"{UP}.weight", bits=4).to(DTYPES[dtype])
    assert torch.equal(loaded[f"{UP}.weight"], rounded)
    assert not torch.equal(rounded.double(), formula(tensors, f"{UP}.weight", bits=4))
    right = Weights._unpacked

    def rounded_truth(*given: Any) -> torch.Tensor:
        return right(*given).to(DTYPES["bfloat16"]).double()

    def before_rounding(_: Weights, name: str, rows: Any = None, **rest: Any) -> torch.Tensor:
        return exact[name] if rows is None else exact[name][rows]

    exact = {name: Weights(checkpoint, dtype=dtype)(name) for name in checkpoint.packed}
    monkeypatch.setattr(Weights, "_unpacked", rounded_truth)
    before = type("Before", (Weights,), {"__call__": before_rounding})
    monkeypatch.setattr(reference, "Weights", before)
    assert proof(checkpoint, dtype) > 1


def test_the_pool_has_the_weights_of_the_plain_checkpoint_that_holds_the_same(
    tmp_path: Path,
) -> None:
    reference.set_up(1)
    tensors = packed_tensors(config_for())  # scales in bfloat16: float32 holds what they unpack to
    place = resolve(str(make(tmp_path / "packed", tensors)))
    plain = {name: formula(tensors, name, bits=4).float() for name in place.packed}
    plain |= {name: tensors[name].float() for name in place.weights if name not in place.packed}
    same = resolve(str(models.write(tmp_path / "plain", config_for(), plain)))
    assert place.weights == same.weights
    assert place.fingerprint != same.fingerprint
    a, b = (
        dict(reference.Reference(checkpoint)._model.named_parameters())
        for checkpoint in (place, same)
    )
    assert {name: torch.equal(a[name], b[name]) for name in b} == dict.fromkeys(a, True)
    assert len(a) == 29


def test_a_weight_that_config_json_names_has_its_own_bits_or_is_plain(tmp_path: Path) -> None:
    config, own = config_for(), {"group_size": 64, "bits": 8}
    tensors, eight = packed_tensors(config), packed_tensors(config, bits=8, size=64)
    down = "model.layers.0.mlp.down_proj"
    tensors |= {f"{UP}.{part}": eight[f"{UP}.{part}"] for part in ("weight", "scales", "biases")}
    for part in ("scales", "biases"):
        del tensors[f"{down}.{part}"]
    tensors[f"{down}.weight"] = models.tensors_of(config)[f"{down}.weight"]
    said = SAID | {UP: own, down: False, "model.embed_tokens": True}
    found = resolve(str(make(tmp_path / "m", tensors, said, said)))
    check_weights(config_of(found), found)
    assert found.note == "MLX 4-bit in groups of 32 and 8-bit in groups of 64"
    assert (found.packed[f"{UP}.weight"].bits, found.packed[f"{UP}.weight"].shape) == (8, (96, 64))
    assert f"{down}.weight" not in found.packed
    assert torch.equal(
        Weights(found, dtype="float32")(f"{UP}.weight"),
        formula(tensors, f"{UP}.weight", bits=8),
    )


def test_the_fingerprint_is_of_the_words(tmp_path: Path) -> None:
    tensors = packed_tensors(config_for())
    first = resolve(str(make(tmp_path / "a", tensors)))
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].clone()
    tensors[f"{UP}.weight"].view(torch.int32)[0, 0] ^= 1
    assert first.fingerprint != resolve(str(make(tmp_path / "b", tensors))).fingerprint


# Refusals.


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (SAID | {"mode": "mxfp4"}, "quantization: mode is 'mxfp4', expected 'affine'"),
        (
            SAID | {"mode": "nvfp4", "group_size": 16},
            "quantization: mode is 'nvfp4', expected 'affine'",
        ),
        (SAID | {"mode": "mxfp8", "bits": 8}, "quantization: mode is 'mxfp8', expected 'affine'"),
        (SAID | {"mode": None}, "quantization: mode is None, expected 'affine'"),
        (SAID | {"bits": 1}, "quantization: bits is 1, expected one of 2, 3, 4, 5, 6, 8"),
        (SAID | {"bits": 7}, "quantization: bits is 7, expected one of"),
        (SAID | {"bits": True}, "quantization: bits is True, expected one of"),
        (SAID | {"bits": 4.0}, "quantization: bits is 4.0, expected one of"),
        (SAID | {"group_size": 16}, "quantization: group_size is 16, expected one of 32, 64, 128"),
        ({"bits": 4}, "quantization: group_size is None, expected one of"),
        ({"group_size": 32}, "quantization: bits is None, expected one of"),
        (
            SAID | {"quantize_input": True},
            "quantization: quantize_input is True, expected group_size, bits, mode or the name "
            "of a weight",
        ),
        (
            SAID | {"model.layers.9.mlp.up_proj": SAID},
            "quantization: model.layers.9.mlp.up_proj is ",
        ),
        (
            SAID | {UP: 4},
            f"quantization: {UP} is 4, expected true, false, or an object with bits and group_size",
        ),
        (SAID | {UP: False}, f"quantization: {UP} is False, expected no scales beside the weight"),
        (
            SAID | {"model.norm": True},
            "quantization: model.norm is True, expected its scales beside the weight",
        ),
        (SAID | {UP: {"bits": 4}}, f"quantization: {UP}: group_size is None, expected one of"),
        (
            SAID | {UP: SAID | {"mode": "mxfp4"}},
            f"quantization: {UP}: mode is 'mxfp4', expected 'affine'",
        ),
        (
            SAID | {UP: SAID | {"global_scale": True}},
            f"quantization: {UP}: unknown key 'global_scale', expected group_size, bits, mode",
        ),
        (
            SAID | {UP: SAID | {"bits": 8}},
            f"{UP}.scales has shape [96, 2], expected [96, 1] beside {UP}.weight [96, 8] of 8 bits",
        ),
        (
            SAID | {"bits": 8},
            "scales has shape [61, 2], expected [61, 1] beside model.embed_tokens.weight [61, 8] "
            "of 8 bits in groups",
        ),
        (
            SAID | {"group_size": 64},
            "expected [61, 1] beside model.embed_tokens.weight [61, 8] of 4 bits in groups of 64",
        ),
    ],
)
def test_what_config_json_may_not_say_is_refused_by_its_key(
    tmp_path: Path, said: dict[str, Any], words: str
) -> None:
    place = make(tmp_path / "m", packed_tensors(config_for()), said, said, layout="mha")
    found = refusal(lambda: resolve(str(place)))
    assert words in found
    assert found.startswith(str(place))
    assert found.endswith(
        "; give the model's unquantised checkpoint or its GGUF, or quantise it again with mlx-lm"
    )


@pytest.mark.parametrize(
    ("again", "words"),
    [
        (
            SAID | {"bits": 8},
            "quantization_config says {'group_size': 32, 'bits': 8, 'mode': 'affine'}, expected "
            "{'group_size': 32, 'bits': 4",
        ),
        (
            {"quant_method": "awq", "bits": 4},
            "quantization_config says {'quant_method': 'awq', 'bits': 4}, expected "
            "{'group_size': 32",
        ),
    ],
)
def test_the_two_places_of_config_json_must_say_the_same(
    tmp_path: Path, again: object, words: str
) -> None:
    tensors = packed_tensors(config_for())
    assert words in refusal(lambda: resolve(str(make(tmp_path / "m", tensors, SAID, again))))
    assert resolve(str(make(tmp_path / "once", tensors, SAID, None))).packed


def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(f"{UP}.scales"), f"no {UP}.scales beside {UP}.weight (U32), expected them"),
        (
            without(f"{UP}.biases"),
            f"no {UP}.biases beside {UP}.scales, expected weight, scales and biases together",
        ),
        (
            without(f"{UP}.weight"),
            f"no {UP}.weight beside {UP}.scales, expected weight, scales and biases together",
        ),
        (lambda t: t | {f"{UP}.weight": torch.zeros(96, 64)}, f"{UP}.weight is F32, expected U32"),
        (
            lambda t: t | {f"{UP}.weight": t[f"{UP}.weight"].view(torch.int32)},
            f"{UP}.weight is I32, expected U32",
        ),
        (
            lambda t: t | {f"{UP}.scales": torch.zeros(96, 2, dtype=torch.uint8)},
            f"{UP}.scales is U8, expected F32, F16, BF16",
        ),
        (
            lambda t: t | {f"{UP}.biases": torch.zeros(96, 2, dtype=torch.float64)},
            f"{UP}.biases is F64, expected F32, F16, BF16",
        ),
        (
            lambda t: t | {f"{UP}.scales": torch.zeros(2, 96)},
            f"{UP}.scales has shape [2, 96], expected [96, 2] beside {UP}.weight [96, 8]",
        ),
        (
            lambda t: t | {f"{UP}.biases": torch.zeros(96, 1)},
            f"{UP}.biases has shape [96, 1], expected [96, 2] beside {UP}.weight [96, 8]",
        ),
        (
            lambda t: t | {f"{UP}.weight": t[f"{UP}.weight"][:, :7].clone()},
            f"{UP}.weight has shape [96, 7], expected rows of whole groups",
        ),
        (
            lambda t: t | {f"{UP}.weight": t[f"{UP}.weight"].flatten()},
            f"{UP}.weight has shape [768], expected rows of whole groups",
        ),
        (
            lambda t: (
                t | {"model.layers.0.mlp.up_proj.qweight": torch.zeros(2, 2, dtype=torch.int32)}
            ),
            "up_proj.qweight (I32) belongs to",
        ),
        (
            lambda t: {n: x for n, x in t.items() if "scales" not in n},
            "expected tensors with scales, found none",
        ),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], words: str
) -> None:
    place = make(tmp_path / "m", change(packed_tensors(config_for())))
    assert words in refusal(lambda: resolve(str(place)))


def test_scales_of_which_config_json_says_nothing_are_refused_as_ever(tmp_path: Path) -> None:
    place = make(tmp_path / "m", packed_tensors(config_for()), None, None)
    assert "scales (BF16) belongs to quantised weights" in refusal(lambda: resolve(str(place)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"intermediate_size": 128},
            "model.layers.0.mlp.gate_proj.weight has shape [96, 64] unpacked, expected [128, 64] "
            "as config.json says",
        ),
        ({"tie_word_embeddings": False}, "no tensor lm_head.weight"),
        ({"num_hidden_layers": 2}, "unknown tensor model.layers.2."),
    ],
)
def test_packed_weights_of_another_model_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    place = make(tmp_path / "m", packed_tensors(config_for()))
    config = json.loads((place / "config.json").read_text()) | changes
    (place / "config.json").write_text(json.dumps(config))
    found = resolve(str(place))
    assert words in refusal(lambda: check_weights(config_of(found), found))


@pytest.mark.parametrize("part", ["scales", "biases"])
@pytest.mark.parametrize(("value", "odd"), [(math.nan, "NaN"), (-math.inf, "infinity")])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_and_biases_that_are_not_finite_are_named(
    tmp_path: Path, part: str, value: float, odd: str, stored: torch.dtype
) -> None:
    tensors = packed_tensors(config_for(), stored=stored)
    tensors[f"{UP}.{part}"][3, 1] = value
    place = make(tmp_path / "m", tensors)
    what = f"{UP}.{part} holds {odd}, expected finite weights; download or save it again"
    assert refusal(lambda: resolve(str(place))) == f"{place}/model.safetensors: {what}"


@pytest.mark.parametrize("part", ["scales", "biases"])
def test_scales_and_biases_that_are_not_finite_in_their_dtype_are_named(
    tmp_path: Path, part: str
) -> None:
    tensors = packed_tensors(config_for())
    tensors[f"{UP}.{part}"][3, 1] = 1e6
    checkpoint = resolve(str(make(tmp_path / "m", tensors)))
    named = rf"up_proj\.{part}: not finite in float16, expected finite weights"
    with pytest.raises(Refusal, match=named):
        Weights(checkpoint, dtype="float16")(f"{UP}.weight")
    with pytest.raises(Refusal, match=named):
        reference.Reference(checkpoint, dtype="float16")
    with pytest.raises(Refusal, match=rf"up_proj\.{part} holds .*, which is infinite in float16"):
        check_range(checkpoint, "float16")


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_what_config_json_says_of_packed_weights_cannot_be_ignored(
    tmp_path: Path, key: str
) -> None:
    place = make(tmp_path / "m", packed_tensors(config_for()))
    assert f"--ignore-key {key} would change the weights" in refusal(
        lambda: resolve(str(place), ignore_keys=[key])
    )


def test_packed_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    found = resolve(str(make(tmp_path / "m", packed_tensors(config_for()), model_type="qwen2")))
    said = (
        "quantization says that weights are packed, expected plain ones; of qwen2 no others can "
        "be judged"
    )
    assert refusal(lambda: neighbour_of(found)) == f"{tmp_path / 'm' / 'config.json'}: {said}"

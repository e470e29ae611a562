import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import models
import numpy as np
import pytest
from folders import refused
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from oracle.formats.errors import Refusal
from oracle.model import gguf as gguf_file
from oracle.model import tokenizer as tokens
from oracle.model.checkpoint import resolve
from oracle.truth.config import checked

HIDDEN, INNER, VOCAB, LAYERS, HEAD = 64, 96, 40, 2, 16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def weights(heads: int, kv_heads: int, *, tied: bool = True) -> dict[str, np.ndarray]:
    """A Llama under Hugging Face's names, q and k in split halves."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (HIDDEN,),
            at + "self_attn.q_proj.weight": (heads * HEAD, HIDDEN),
            at + "self_attn.k_proj.weight": (kv_heads * HEAD, HIDDEN),
            at + "self_attn.v_proj.weight": (kv_heads * HEAD, HIDDEN),
            at + "self_attn.o_proj.weight": (HIDDEN, heads * HEAD),
            at + "post_attention_layernorm.weight": (HIDDEN,),
            at + "mlp.gate_proj.weight": (INNER, HIDDEN),
            at + "mlp.up_proj.weight": (INNER, HIDDEN),
            at + "mlp.down_proj.weight": (HIDDEN, INNER),
        }
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }


METADATA: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": HEAD,
    "llama.vocab_size": VOCAB,
}


def write(
    path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, Any] = METADATA, **options: Any
) -> Path:
    return gguf_files.write(path, arrays, metadata, head_dim=HEAD, **options)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_unquantised_gguf_gives_the_weights_back_bit_for_bit(
    tmp_path: Path, heads: int, kv_heads: int, tied: bool
) -> None:
    expected = weights(heads, kv_heads, tied=tied)
    changed = METADATA | {
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
    }
    found = resolve(str(write(tmp_path / "tiny.gguf", expected, changed)))
    assert found.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "vocab_size": 40,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }
    loaded = load_file(found.folder / "model.safetensors")
    assert sorted(loaded) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(loaded[name], array, err_msg=name, strict=True)
    save_file(expected, tmp_path / "library.safetensors", metadata={"format": "pt"})
    assert (found.folder / "model.safetensors").read_bytes() == (
        tmp_path / "library.safetensors"
    ).read_bytes()
    assert (found.source, found.name, found.revision) == (str(tmp_path / "tiny.gguf"), "tiny", None)
    assert found.note == "GGUF F32, no tokenizer: give token ids"


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_quantised_gguf_gives_the_dequantised_weights(tmp_path: Path, kind: str) -> None:
    arrays, number = weights(4, 2), GGMLQuantizationType[kind]
    found = resolve(str(write(tmp_path / "tiny.gguf", arrays, kind=number)))
    loaded = load_file(found.folder / "model.safetensors")
    for name, array in arrays.items():
        expected = (
            array
            if array.ndim == 1
            else gguf.quants.dequantize(gguf.quants.quantize(array, number), number)
        )
        np.testing.assert_array_equal(loaded[name], expected, err_msg=name, strict=True)
    assert found.note.startswith(f"GGUF {kind}, ")


def test_a_model_of_any_size_is_converted_and_hashed_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "_BLOCK", 10_001)  # not a multiple of a row, nor of a head
    arrays = weights(4, 2)
    large = np.random.default_rng(1).standard_normal((30_000, HIDDEN)).astype(np.float32)
    arrays["model.embed_tokens.weight"] = large
    path = write(tmp_path / "large.gguf", arrays, kind=GGMLQuantizationType.Q8_0)
    tracemalloc.start()
    try:
        found = resolve(str(path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < large.nbytes / 4  # of 7.7 MB, 1 MB of which is the buffer of the hash
    loaded = load_file(found.folder / "model.safetensors")
    for name, array in arrays.items():
        used = GGMLQuantizationType.Q8_0 if array.ndim == 2 else GGMLQuantizationType.F32
        expected = gguf.quants.dequantize(gguf.quants.quantize(array, used), used)
        np.testing.assert_array_equal(loaded[name], expected, err_msg=name)
    assert (
        found.largest["model.embed_tokens.weight"]
        == np.abs(loaded["model.embed_tokens.weight"]).max()
    )


def dequantisable() -> list[GGMLQuantizationType]:
    def works(kind: GGMLQuantizationType) -> bool:
        try:
            gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    return [kind for kind in GGML_QUANT_SIZES if works(kind)]


def test_every_type_that_gguf_can_dequantise_is_read_as_its_own_reader_reads_it(
    tmp_path: Path,
) -> None:
    kinds = dequantisable()
    assert len(kinds) >= 20
    random = np.random.default_rng(0)
    out = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    out.add_array("words", ["a", "é", ""])
    out.add_array("numbers", [1, 2, 3])
    for kind in kinds:
        block, size = GGML_QUANT_SIZES[kind]
        out.add_tensor(
            kind.name, random.integers(0, 256, (3, 256 // block * size), np.uint8), raw_dtype=kind
        )
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    reader, ours = gguf.GGUFReader(tmp_path / "all.gguf"), gguf_file.read(tmp_path / "all.gguf")
    assert ours.metadata == {
        k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")
    }
    assert list(ours.tensors) == [t.name for t in reader.tensors] == [k.name for k in kinds]
    with np.errstate(all="ignore"):
        for tensor in reader.tensors:
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(3, 256)
            np.testing.assert_array_equal(
                np.concatenate(list(gguf_file.dequantised(ours, tensor.name))),
                expected,
                err_msg=tensor.name,
            )


def test_a_type_that_gguf_cannot_dequantise_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", weights(4, 2))
    whole = path.read_bytes()
    at = whole.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    for kind in (
        GGMLQuantizationType.I8,
        GGMLQuantizationType.Q4_K,
        153,
    ):  # not implemented, not whole blocks, not known
        path.write_bytes(whole[:at] + int(kind).to_bytes(4, "little") + whole[at + 4 :])
        assert f"output_norm.weight of type {int(kind)} cannot be read" in refused(path)


def test_a_gguf_is_converted_once_for_its_bytes_whatever_its_name(
    tmp_path: Path, cache: Path
) -> None:
    first = resolve(str(write(tmp_path / "a.gguf", weights(4, 2))))
    made = (first.folder / "model.safetensors").stat().st_ino
    os.rename(tmp_path / "a.gguf", tmp_path / "b.GGUF")
    second = resolve(str(tmp_path / "b.GGUF"))
    assert (second.folder, second.fingerprint, second.name) == (
        first.folder,
        first.fingerprint,
        "b",
    )
    assert (first.folder / "model.safetensors").stat().st_ino == made
    assert len(os.listdir(cache / "models")) == 1
    other = resolve(
        str(
            write(
                tmp_path / "a.gguf", weights(4, 4), METADATA | {"llama.attention.head_count_kv": 4}
            )
        )
    )
    assert other.folder != first.folder
    (first.folder / "config.json").write_text("{")
    assert refused(tmp_path / "b.GGUF").endswith(f"delete {first.folder} to have it made again")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"llama.attention.sliding_window": 64},
            "llama.attention.sliding_window is '64', which config.json's Llama cannot express here",
        ),
        (
            {"llama.rope.scaling.type": "longrope"},
            "llama.rope.scaling.type is 'longrope', expected 'none', 'linear' or 'yarn'",
        ),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_attn_factor": 0.5},
            "llama.rope.scaling.yarn_attn_factor is '0.5', expected 1.0",
        ),
        (
            {"llama.rope.scaling.factor": 0.5},
            "llama.rope.scaling.factor is 0.5, expected a number from 1",
        ),
        (
            {"llama.rope.scaling.type": 2},
            "llama.rope.scaling.type is 2, expected 'none', 'linear' or 'yarn'",
        ),
        (
            {"llama.tensor_data_layout": "split halves"},
            "llama.tensor_data_layout is 'split halves', expected 'Meta AI original pth'",
        ),
        ({"llama.expert_count": 8}, "llama.expert_count is '8', expected 0"),
        (
            {"llama.attention.head_count": [4, 4]},
            "llama.attention.head_count is [4, 4], expected one positive whole number",
        ),
        (
            {"llama.block_count": None},
            "llama.block_count is None, expected one positive whole number",
        ),
        (
            {"llama.block_count": 3},
            "missing tensor blk.2.attn_k.weight (of 9), expected a Llama's 29",
        ),
        (
            {"llama.block_count": 1},
            "unknown tensor blk.1.attn_k.weight (of 9), expected a Llama's 11",
        ),
        (
            {"llama.attention.layer_norm_rms_epsilon": None},
            "llama.attention.layer_norm_rms_epsilon is None, expected one positive number",
        ),
        (
            {"llama.rope.freq_base": 0.0},
            "llama.rope.freq_base is 0.0, expected one positive number",
        ),
        (
            {"llama.rope.dimension_count": 8},
            "llama.rope.dimension_count is 8, expected the keys' 16",
        ),
        (
            {"llama.attention.key_length": 17, "llama.rope.dimension_count": 17},
            "its heads have 17 dimensions, expected an even number",
        ),
        (
            {"llama.attention.head_count_kv": 4},
            "blk.0.attn_k.weight has shape [32, 64], expected [64, 64] by its metadata",
        ),
        (
            {"llama.feed_forward_length": 64},
            "has shape [96, 64], expected [64, 64] by its metadata",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_metadata_that_config_json_cannot_say_is_refused_by_name(
    tmp_path: Path, cache: Path, change: dict[str, Any], says: str
) -> None:
    path = write(tmp_path / "tiny.gguf", weights(4, 2), METADATA | change)
    message = refused(path)
    assert message.startswith(f"{path}: ")
    assert says in message
    assert os.listdir(cache / "models") == []


def test_values_that_leave_the_model_alone_are_taken(tmp_path: Path) -> None:
    neutral = {
        "llama.rope.scaling.type": "none",
        "llama.expert_count": 0,
        "llama.attention.causal": True,
        "llama.rope.scale_linear": 1.0,
        "llama.rope.scaling.finetuned": True,
        "llama.tensor_data_layout": "Meta AI original pth",
    }
    plain = resolve(str(write(tmp_path / "a.gguf", weights(4, 2))))
    less = {
        k: v
        for k, v in METADATA.items()
        if k not in ("llama.rope.dimension_count", "llama.vocab_size")
    }
    assert (
        resolve(str(write(tmp_path / "b.gguf", weights(4, 2), less | neutral))).config
        == plain.config
    )
    assert plain.config["rms_norm_eps"] == 1e-5


YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.5}
ROPE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    ),
    "linear by its old name": (
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        {"llama.rope.scale_linear": 8.0},
    ),
    "linear by 1": ({}, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}),
    "none": ({}, {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.5}}, YARN),
    "yarn with its length": (
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 2.5,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            }
        },
        YARN
        | {
            "llama.rope.scaling.original_context_length": 32,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
            "llama.rope.scaling.yarn_beta_slow": 2.0,
        },
    ),
    "biases": ({"attention_bias": True, "mlp_bias": True}, {}),
    "biases of attention": ({"attention_bias": True}, {}),
}


@pytest.mark.parametrize("name", ROPE)
def test_a_gguf_file_is_the_model_that_the_folder_of_the_same_weights_is(
    tmp_path: Path, name: str
) -> None:
    change, metadata = ROPE[name]
    sizes = {"hidden_size": HIDDEN, "head_dim": HEAD, "intermediate_size": INNER}
    sizes |= {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = models.config_of("gqa", **sizes, vocab_size=VOCAB, rope_theta=500000.0, **change)
    tensors = models.tensors_of(config)
    folder = resolve(str(models.write(tmp_path / "folder", config, tensors)))
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    found = resolve(str(write(tmp_path / "tiny.gguf", arrays, METADATA | metadata)))
    assert found.fingerprint == folder.fingerprint
    assert checked(found) == checked(folder)


def split(path: Path, arrays: dict[str, np.ndarray]) -> list[Path]:
    """As llama-gguf-split writes them: all metadata in the first, tensors in each."""
    names, paths = sorted(arrays), []
    for i, part in enumerate((names[:5], names[5:])):
        about: dict[str, Any] = {"split.no": i, "split.count": 2, "split.tensors.count": len(names)}
        paths.append(path / f"tiny-{i + 1:05d}-of-00002.gguf")
        kept = METADATA if i == 0 else {}
        write(paths[-1], {n: arrays[n] for n in part}, kept | about)
    return paths


@pytest.mark.parametrize("given", [0, 1])
def test_a_split_file_is_read_whole_from_any_of_its_shards(tmp_path: Path, given: int) -> None:
    whole = resolve(str(write(tmp_path / "whole.gguf", weights(4, 2))))
    found = resolve(str(split(tmp_path, weights(4, 2))[given]))
    assert (found.fingerprint, found.config, found.name) == (
        whole.fingerprint,
        whole.config,
        "tiny",
    )


def test_a_shard_that_is_not_its_set_is_refused_by_what_is_missing(tmp_path: Path) -> None:
    first, second = split(tmp_path, weights(4, 2))
    remedy = "download all shards, under their own names, into one folder"
    second.rename(tmp_path / "other.gguf")
    beside = "shard 1 of 2, expected tiny-00002-of-00002.gguf beside it"
    assert refused(first) == f"{first}: {beside}; {remedy}"
    alone = tmp_path / "other.gguf"
    said = "is shard 2 of 2 by its metadata, expected 1 of 1 by its name"
    assert refused(alone) == f"{alone}: {said}; {remedy}"
    second.write_bytes(first.read_bytes())
    assert f"{second}: is shard 1 of 2 by its metadata, expected 2 of 2" in refused(first)


def test_another_architecture_or_tensor_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "q.gguf", weights(4, 2), architecture="qwen2")
    assert "general.architecture is 'qwen2', expected 'llama'" in refused(path)
    bias = {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    found = refused(write(tmp_path / "b.gguf", weights(4, 2), extra=bias))
    assert "missing tensor blk.0.attn_k.bias (of 7), expected a Llama's 28" in found
    assert found.endswith(
        "; it has biases in a part of its projections only, which no Llama has; it cannot be run"
    )
    headless = {n: a for n, a in weights(4, 2).items() if n != "model.embed_tokens.weight"}
    assert "no token_embd.weight of two axes" in refused(write(tmp_path / "h.gguf", headless))


def llama3_divisors(
    head_dim: int,
    theta: float,
    factor: float,
    *,
    original: int = 8192,
    low: float = 1,
    high: float = 4,
) -> np.ndarray:
    """By wavelength, one frequency after the other, in float32 as the published converter does."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = np.float32(2 * np.pi) * np.float32(theta) ** np.float32(i / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        blended = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(
            1
            if wavelength < original / high
            else factor
            if wavelength > original / low
            else blended
        )
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_expressed_and_any_other_refused(
    tmp_path: Path, factor: float
) -> None:
    wide = METADATA | {
        "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1,
        "llama.rope.dimension_count": HIDDEN,
    }
    arrays = {
        n: (a if "_proj" not in n or "mlp" in n else np.zeros((HIDDEN, HIDDEN), np.float32))
        for n, a in weights(1, 1).items()
    }
    extra = {"rope_freqs.weight": llama3_divisors(HIDDEN, 500000, factor)}
    found = resolve(str(write(tmp_path / "a.gguf", arrays, wide, extra=extra)))
    assert found.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for other in ({"original": 4096}, {"low": 1.1}, {"high": 4.1}):
        extra = {"rope_freqs.weight": llama3_divisors(HIDDEN, 500000, factor, **other)}
        assert f"rope_freqs.weight is not llama3 scaling by {factor:g}" in refused(
            write(tmp_path / "b.gguf", arrays, wide, extra=extra)
        )
    short = {"rope_freqs.weight": np.ones(3, np.float32)}
    assert "rope_freqs.weight has shape [3], expected [32]" in refused(
        write(tmp_path / "c.gguf", arrays, wide, extra=short)
    )


def test_a_damaged_gguf_is_refused_wherever_it_is_cut(tmp_path: Path, cache: Path) -> None:
    whole = write(
        tmp_path / "whole.gguf", weights(4, 2), METADATA | {"words": ["a", "b"], "numbers": [1, 2]}
    ).read_bytes()
    path = tmp_path / "cut.gguf"
    for end in [0, 3, 4, 7, 10, 30, 60, *range(100, 2000, 37), len(whole) // 2, len(whole) - 32]:
        path.write_bytes(whole[:end])
        assert refused(path).startswith(f"{path}: ")
    for start in range(4, 400, 3):  # lengths and counts beyond any file
        path.write_bytes(whole[:start] + b"\xff" * 8 + whole[start + 8 :])
        with pytest.raises(Refusal):
            resolve(str(path))
    assert os.listdir(cache / "models") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"<!doctype html>", "begins with b'<!do', expected b'GGUF'"),
        (b"GGUF\x00\x00\x00\x03" + bytes(64), "version 50331648, expected 2 or 3"),
        (b"GGUF\x01\x00\x00\x00" + bytes(64), "version 1, expected 2 or 3"),
    ],
)
def test_what_is_no_gguf_is_refused_by_what_it_is(tmp_path: Path, text: bytes, says: str) -> None:
    (tmp_path / "x.gguf").write_bytes(text)
    assert says in refused(tmp_path / "x.gguf")


SPELLINGS = ["<|endoftext|>", *"abcdefgh", "ab", "Ġ", "Ġab", "1", "2", "12", "bĠ"]
SMOLLM: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": SPELLINGS,
    "tokenizer.ggml.token_type": [3] + [1] * (len(SPELLINGS) - 1),
    "tokenizer.ggml.merges": ["b Ġ", "a b", "Ġ ab", "1 2"],
    "tokenizer.ggml.bos_token_id": 0,
}


def test_a_smollm_vocabulary_becomes_a_tokenizer(tmp_path: Path) -> None:
    found = resolve(str(write(tmp_path / "a.gguf", weights(4, 2), METADATA | SMOLLM)))
    assert found.note == "GGUF F32"
    assert found.config["bos_token_id"] == 0
    tokenizer = tokens.load(found.folder)
    assert tokenizer is not None
    assert tokenizer.encode("ab ab12<|endoftext|>") == [9, 11, 12, 13, 0]
    assert tokenizer.decode([9, 11, 12, 13, 0]) == "ab ab12<|endoftext|>"


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.ggml.model": "llama"},
        {"tokenizer.ggml.pre": "llama-bpe"},
        {"tokenizer.ggml.pre": None},
        {"tokenizer.ggml.add_bos_token": True},
        {"tokenizer.ggml.add_eos_token": True},
        {"tokenizer.ggml.merges": None},
        {"tokenizer.ggml.token_type": [4] + [1] * (len(SPELLINGS) - 1)},
    ],
    ids=json.dumps,
)
def test_another_vocabulary_is_left_to_token_ids(tmp_path: Path, change: dict[str, Any]) -> None:
    found = resolve(str(write(tmp_path / "a.gguf", weights(4, 2), METADATA | SMOLLM | change)))
    assert found.note == "GGUF F32, no tokenizer: give token ids"
    assert tokens.load(found.folder) is None

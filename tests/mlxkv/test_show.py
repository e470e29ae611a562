"""generate, inspect and doctor: the text that comes, where it ends, and the facts as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from command import mlxkv, refused
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram

from mlxkv.commands import show
from mlxkv.commands.show import generate
from mlxkv.port.weights import load
from mlxkv.report.text import quoted
from oracle.model import tokenizer as tokens
from oracle.model.checkpoint import Named

WORDS = ["▁", "▁the", "▁cat", "▁on", "▁sat", "at", "猫"]


def sentencepiece(folder: Path) -> int:
    """A tokenizer as Llama 2's: a sign for the space before a word, bytes for what has no word."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    scores = [(word, -9.0 if word[0] == "<" else -1.0) for word in words]
    inner = Tokenizer(Unigram(scores, 0, byte_fallback=True))
    inner.add_special_tokens(["<unk>", "<s>"])
    signs = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    inner.normalizer = normalizers.Sequence(signs)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    inner.save(str(folder / "tokenizer.json"))
    return len(words)


def metaspace(folder: Path) -> int:
    """As `transformers` converts one: the pre-tokenizer and the decoder are both a Metaspace."""
    inner = Tokenizer(Unigram([("<unk>", -9.0), *((word, -1.0) for word in WORDS)], 0))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.save(str(folder / "tokenizer.json"))
    return 1 + len(WORDS)


def byte_level(folder: Path) -> int:
    """As GPT-2's and SmolLM2's, without merges: a token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.save(str(folder / "tokenizer.json"))
    return len(letters)


Model = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Makes a tiny model with one of the tokenizers above."""

    def made(kind: Callable[[Path], int], **changes: Any) -> Path:
        folder = tmp_path / kind.__name__
        folder.mkdir()
        config = models.config("gqa", vocab_size=kind(folder), **changes)
        return models.save(folder, config)

    return made


def says(folder: Path, text: str, prompt: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pieces that generate yields where the model goes on after `prompt` with `text`'s rest."""
    words = tokens.load(folder)
    assert words is not None
    ids, start = words.encode(text), words.encode(prompt)
    assert ids[: len(start)] == start
    monkeypatch.setattr(show, "_greedy", lambda *_: iter(ids[len(start) :]))
    named = Named(model=str(folder))
    return list(generate(named, prompt, 8, dtype="float32", device="cpu"))


@pytest.mark.parametrize("kind", [sentencepiece, metaspace, byte_level])
@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("the cat", "the cat on sat"),
        ("the cat", "the catat"),
        ("the cat", "the cat  on"),
        ("the", "the 猫 猫"),
        (" the", " the cat"),
    ],
)
def test_generated_text_goes_on_where_the_prompt_ends(
    kind: Callable[[Path], int],
    prompt: str,
    text: str,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = says(model(kind), text, prompt, monkeypatch)
    assert "".join(pieces) == text
    assert pieces[0] == prompt


@pytest.mark.parametrize("kind", [sentencepiece, byte_level])
@pytest.mark.parametrize("rest", [" 👩‍🔬 🐈", " é猫", " 人口"])
def test_what_is_spread_over_several_tokens_comes_whole(
    kind: Callable[[Path], int], rest: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = says(model(kind), f"the cat{rest}", "the cat", monkeypatch)
    assert "".join(pieces) == f"the cat{rest}"
    assert "\ufffd" not in "".join(pieces)
    assert len(pieces) > 2


def test_the_command_prints_the_space_before_its_first_word(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(metaspace)
    monkeypatch.setattr(show, "_greedy", lambda *_: iter([4, 5]))
    done = mlxkv("generate", folder, "--prompt", "the cat", "-n", "2")
    assert (done.returncode, done.stdout) == (0, "the cat on sat\n"), done.stderr


def test_every_end_token_of_both_files_ends_a_text(model: Model) -> None:
    folder = model(byte_level, eos_token_id=None)
    words = tokens.load(folder)
    assert words is not None

    def chosen() -> list[int]:
        done = mlxkv("generate", folder, "--prompt", "a", "-n", "6", "--device", "cpu")
        assert done.returncode == 0, done.stderr
        return words.encode(done.stdout[:-1])

    config = json.loads((folder / "config.json").read_text())
    port = load(folder)
    free = list(show._greedy(port, words.encode("a"), 6, frozenset()))
    assert len(free) == 6
    for where, ends in (("config.json", free[0]), ("generation_config.json", [255, free[0]])):
        value = config if where == "config.json" else {}
        (folder / where).write_text(json.dumps(value | {"eos_token_id": ends}))
        assert chosen() == words.encode("a"), where
        (folder / where).write_text(json.dumps(value))


@pytest.mark.parametrize("ends", ["195", [[195]], 195.0, True])
@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_an_end_token_that_is_no_id_is_refused_by_name(
    ends: object, where: str, model: Model
) -> None:
    folder = model(byte_level)
    value = json.loads((folder / where).read_text()) if where == "config.json" else {}
    (folder / where).write_text(json.dumps(value | {"eos_token_id": ends}))
    for command in ("generate", "inspect"):
        refused(mlxkv(command, folder), f"{folder / where}: eos_token_id", "expected a token id")


def test_generate_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    folder = models.save(tmp_path / "m", models.config("gqa"))
    refused(mlxkv("generate", folder), f"{folder}: no tokenizer.json", "copy the tokenizer.json")


def test_inspect_gives_plain_keys_and_numbers(model: Model) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    folder = model(
        sentencepiece, eos_token_id=[260, 130], rope_scaling=scaling, torch_dtype="float16"
    )
    value = json.loads(mlxkv("inspect", folder, "--json").stdout)

    def keys(of: Any) -> list[str]:
        inner = of.items() if isinstance(of, dict) else ()
        return [k for key, one in inner for k in (key, *keys(one))]

    assert [key for key in keys(value) if not key.isidentifier() or key != key.lower()] == []
    assert value["format"] == "mlxkv-inspect/1"
    assert (value["num_hidden_layers"], value["vocab_size"]) == (3, 258 + len(WORDS))
    assert (value["tensors"], value["stored_dtypes"]) == (30, ["F32"])
    assert value["stored_bytes"] == sum(
        tensor.stop - tensor.start
        for tensor in Named(model=str(folder)).checkpoint().tensors.values()
    )
    assert value["rope"] == {"theta": 10000.0, "rope_type": "linear", "factor": 2.0}
    assert value["rope_table_shape"] == [64, 4]
    assert value["cache_bytes_per_token"] == {"float32": 384, "float16": 192, "bfloat16": 192}
    assert (value["eos_token_ids"], value["eos_tokens"]) == ([130, 260], ["<80>", " cat"])
    assert value["ignored_keys"] == {"torch_dtype": "weights are cast to the run's dtype"}
    lines = mlxkv("inspect", folder).stdout.splitlines()
    assert 'ends at          130 "<80>", 260 " cat"' in lines
    assert "ignored          torch_dtype: weights are cast to the run's dtype" in lines


def test_inspect_lists_every_key_that_is_ignored_and_every_null_that_is_filled_in(
    model: Model,
) -> None:
    odd = {"is_causal": None, "is_decoder": True, "pruned_heads": {}, "add_cross_attention": False}
    folder = model(sentencepiece, mlp_bias=None, **odd)
    value = json.loads(mlxkv("inspect", folder, "--json").stdout)
    assert odd.keys() <= value["ignored_keys"].keys()
    note = "mlp_bias null counts as absent: false filled in"
    assert (value["filled_in"]["mlp_bias"], value["notes"]) == (False, [note])
    lines = mlxkv("inspect", folder).stdout.splitlines()
    assert f"note             {note}" in lines
    for key in odd:
        assert f"ignored          {key}: changes nothing at this value; another is refused" in lines


def test_doctor_gives_the_same_facts_as_json() -> None:
    text, done = mlxkv("doctor").stdout, mlxkv("doctor", "--json")
    value = json.loads(done.stdout)
    assert (done.returncode, value["exit_code"], value["device_error"]) == (0, 0, None)
    assert value["format"] == "mlxkv-doctor/1"
    for name in ("mlx", "torch", "numpy"):
        assert f"{value['packages'][name]}\n" in text
    for name in ("device", "blas", "threads"):
        assert f"{value[name]}\n" in text
    assert value["cache"] == {"folder": value["cache"]["folder"], "writable": True}


def test_reports_show_the_space_before_a_continuation(model: Model, tmp_path: Path) -> None:
    folder, out = model(sentencepiece), tmp_path / "out"
    words = tokens.load(folder)
    assert words is not None
    given = ("--prompt", "the cat", "--steps", "4", "--out", out)
    done = mlxkv("compare", folder, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    generated = next(
        line for line in (out / "compare.md").read_text().splitlines() if "| generated" in line
    )
    ids = [int(id) for id in generated.split("`")[3].split()]
    prompt = words.encode("the cat")
    after = words.decode([*prompt, *ids])[len(words.decode(prompt)) :]
    assert generated.split("`")[1] == quoted(after)


def test_inspect_refuses_weights_that_no_command_would_run(tmp_path: Path) -> None:
    config = models.config("mha")
    weights = models.weights(config)
    up = "model.layers.0.mlp.up_proj.weight"
    for name, changed, says in (
        ("wide", {up: weights[up].astype(np.float64)}, f"{up} is stored as F64, expected one of"),
        (
            "head",
            {"lm_head.weight": weights["model.embed_tokens.weight"] + 1},
            "lm_head.weight differs from model.embed_tokens.weight",
        ),
    ):
        folder = models.save(tmp_path / name, config, weights | changed)
        for how in ((), ("--json",)):
            refused(mlxkv("inspect", folder, *how), says)

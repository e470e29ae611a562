"""A GGUF file is a model like any other: compared with its probe, its mistakes found and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_files
import models
import own_llama
import pytest
from command import mlxkv
from gguf.constants import GGMLQuantizationType

from mlxkv.judge.case import ORDER

CONFIG = models.config("gqa", intermediate_size=64)
METADATA = {
    "llama.block_count": CONFIG["num_hidden_layers"],
    "llama.context_length": CONFIG["max_position_embeddings"],
    "llama.embedding_length": CONFIG["hidden_size"],
    "llama.feed_forward_length": CONFIG["intermediate_size"],
    "llama.attention.head_count": CONFIG["num_attention_heads"],
    "llama.attention.head_count_kv": CONFIG["num_key_value_heads"],
    "llama.attention.layer_norm_rms_epsilon": CONFIG["rms_norm_eps"],
    "llama.rope.freq_base": CONFIG["rope_theta"],
    "llama.rope.dimension_count": CONFIG["head_dim"],
    "llama.vocab_size": CONFIG["vocab_size"],
}
PLANS = [*ORDER, "probe full", "probe chunked"]
PAIRED = """
    for name in list(weights):
        if "q_proj" in name or "k_proj" in name:
            rows = weights[name].reshape(-1, 2, config["head_dim"] // 2, config["hidden_size"])
            weights[name] = rows.swapaxes(1, 2).reshape(weights[name].shape)
    return OwnLlama("""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in Q8_0."""
    path, how = tmp_path_factory.mktemp("gguf") / "tiny.gguf", GGMLQuantizationType.Q8_0
    arrays = models.weights(CONFIG)
    return gguf_files.write(path, arrays, METADATA, head_dim=CONFIG["head_dim"], kind=how)


def compared(file: Path, *options: str | Path) -> dict[str, Any]:
    """The verdict; the oracle is asked once for all tests here."""
    env = {"MLXKV_CACHE": str(file.parent / "cache")}
    given = ("--tokens", "3,7,11,2,19", "--steps", "8", "--json", "--out", file.parent / "out")
    done = mlxkv("compare", file, *given, *options, env=env)
    assert done.returncode in (0, 1), done.stderr
    return dict(json.loads(done.stdout))


def test_a_gguf_file_is_compared_in_every_plan_and_over_its_probe(file: Path) -> None:
    verdict = compared(file)
    assert (verdict["outcome"], verdict["plans"]) == ("agree", PLANS)
    assert verdict["scopes"] == ["algebra", "logits", "cache"]
    exact = {g["plan"] for g in verdict["gates"] if g["name"] == "algebra (float64)" and g["ran"]}
    assert exact == set(PLANS)
    assert [line.split(": ")[0] for line in verdict["not_exercised"]] == [
        "calls of other sizes",
        "5 of 8 growing prefixes in float64",
        "batches, clone, crop and reset",
        "repeats of 26 of 35 calls",
        "the first call of probe chunked in float64",
    ]


def test_a_mistake_of_an_engine_that_reads_a_gguf_file_is_found_and_named(
    file: Path, tmp_path: Path
) -> None:
    text = Path(own_llama.__file__).read_text()
    before, after = text.rsplit("    return OwnLlama(", 1)
    (tmp_path / "mine.py").write_text(before + PAIRED.lstrip("\n") + after)
    verdict = compared(file, "--engine", f"{tmp_path / 'mine.py'}:load")
    assert verdict["outcome"] == "differ"
    assert verdict["cause"]["name"] == "paired-rows"
    wrong = {gate["plan"] for gate in verdict["gates"] if gate["failed"]}
    assert wrong >= set(PLANS)

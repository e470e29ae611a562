"""candle's own error on its goldens, measured against the truth: the unit in which the port's
distance from candle is judged.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from oracle.formats import trace
from oracle.model.checkpoint import resolve
from oracle.truth import llama as truth
from oracle.truth.config import read_config
from oracle.truth.weights import Weights

GOLDEN = Path(__file__).parents[1] / "golden"
PLAN = {"float32": "cached", "float16": "cached-float16"}


def distance(rows, true):
    """rms over all rows and columns."""
    return float(np.sqrt(np.mean((rows - true) ** 2)))


def noise(folder, dtype):
    return json.loads((folder / "noise.json").read_text())[dtype]


def cached(folder, dtype):
    """The rows of candle's cached plan and the tokens it was fed."""
    plan = next(
        p for p in json.loads((folder / "plans.json").read_text()) if p["name"] == PLAN[dtype]
    )
    tokens = [id for step in plan["steps"] if step["do"] == "call" for id in step["call"]["tokens"]]
    return load_file(folder / "rows.safetensors")[PLAN[dtype]], tokens


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layout", ["mha", "gqa", "mqa", "llama3"])
def test_the_noise_of_the_tiny_goldens_is_candles_distance_from_the_truth(layout, dtype):
    folder = GOLDEN / "tiny" / layout
    rows, tokens = cached(folder, dtype)
    checkpoint = resolve(str(folder))
    config = read_config(checkpoint.config)
    weights = Weights(checkpoint, dtype=dtype)
    streams = truth.follow(weights, config, tokens, segments={"full": [len(tokens)]})
    true = np.zeros((len(tokens), config.vocab_size))
    truth.write_logits(streams, weights.head_blocks(config), true)
    assert noise(folder, dtype) == pytest.approx(distance(rows, true[-len(rows) :]), rel=1e-6)


def test_the_noise_of_the_default_models_goldens_is_candles_distance_from_the_truth(default_run):
    out, manifest = default_run
    rows, tokens = cached(GOLDEN / "smollm2", "float32")
    assert tokens == manifest.tokens
    true = trace.read(out / "truth.safetensors").logits[-len(rows) :, ::96]
    assert noise(GOLDEN / "smollm2", "float32") == pytest.approx(distance(rows, true), rel=1e-6)

"""mlx-lm's head for the kept rows of a long call: the same bits as among all rows, or all rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import packed_models
import pytest

from mlxkv.engines import head as heads
from mlxkv.engines.head import LEAST, Head
from mlxkv.engines.mlx_lm import MlxLmRunner
from mlxkv.engines.runner import Array
from oracle.formats.plan import Call, New, Plan

TOKENS = tuple(i * 7 % 40 for i in range(700))
PLAN = Plan(
    "long",
    (
        New("a"),
        Call("a", TOKENS, 0),
        Call("a", TOKENS[:400], 700),
        Call("a", (3, 7), 1100),
        New("b"),
        Call("b", (TOKENS[:300], TOKENS[300:600]), 0),
    ),
    rows=(0, 1, 63, 64, 255, 256, 298, 299, 511, 512, 698, 699, 700, 900, 1099, 1100, 1101),
)
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 40,
}


def rows(model: Any, head: Head | None) -> Array:
    """All that the plan keeps of the model's logits."""
    found: Array = MlxLmRunner(model, PLAN, head=head).run().arrays()["logits"]
    return found


def require_same(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head computes fewer rows, and those are the bits of all of them."""
    monkeypatch.setattr(heads, "WHOLE", 0)
    head = Head.of(model, 40, [700])
    assert head is not None
    given: list[int] = []
    right = Head.given
    monkeypatch.setattr(
        Head, "given", lambda self, some: given.append(len(some)) or right(self, some)
    )
    np.testing.assert_array_equal(rows(model, head), rows(model, None))
    assert [n < 280 for n in given] == [True, True, True]
    assert given[2] >= LEAST


@pytest.mark.parametrize("layout", ["mha", "gqa", "mqa", "llama3"])
def test_a_head_of_its_own_or_the_embeddings(
    folder_of: Callable[[str], Path],
    mlx_lm_of: Callable[[Path], Any],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    require_same(mlx_lm_of(folder_of(layout)), monkeypatch)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision(
    folder_of: Callable[[str], Path],
    mlx_lm_of: Callable[[Path], Any],
    monkeypatch: pytest.MonkeyPatch,
    dtype: mx.Dtype,
) -> None:
    model = mlx_lm_of(folder_of("gqa"))
    model.set_dtype(dtype)
    require_same(model, monkeypatch)


@pytest.mark.parametrize("layout", ["mha", "gqa"])
def test_packed(
    folder_of: Callable[[str], Path],
    mlx_lm_of: Callable[[Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    require_same(mlx_lm_of(packed_models.quantised(folder_of(layout), tmp_path / "m")), monkeypatch)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("qwen2", {"rope_theta": 1e4, "tie_word_embeddings": True}),
        ("gemma2", {"final_logit_softcapping": 30.0, "query_pre_attn_scalar": 8.0}),
        ("cohere", {"logit_scale": 0.25, "layer_norm_eps": 1e-5}),
        ("phi3", {"rope_theta": 1e4, "max_position_embeddings": 2048}),
    ],
)
def test_neighbours_keep_what_they_do_after_the_head(
    folder_of: Callable[[str], Path],
    mlx_lm_of: Callable[[Path], Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    more: dict[str, Any],
) -> None:
    """Gemma 2 caps its logits, Cohere scales them."""
    mlx_lm_of(folder_of("gqa"))  # which imports mlx-lm without torch
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(1)
    require_same(
        module.Model(module.ModelArgs.from_dict(SMALL | more | {"model_type": name})), monkeypatch
    )


def odd(model: Any, how: str) -> Any:
    """The model with a `__call__` that is more than a function of each row."""
    right = type(model)

    class Odd(right):  # type: ignore[misc, valid-type]
        def __call__(self, *given: Any, **named: Any) -> mx.array:
            logits = super().__call__(*given, **named)
            of_rows = {
                "centred": lambda: logits - logits.mean(axis=1, keepdims=True),
                "turned": lambda: mx.roll(logits, 1, axis=1),
                "a row apart": lambda: mx.concatenate([logits[:, :1] * 2, logits[:, 1:]], axis=1),
                "whole": lambda: mx.broadcast_to(logits[:, -1:], (1, given[0].shape[1], 40)),
            }
            return of_rows.get(how, lambda: logits)()

    Odd.__module__ = right.__module__
    model.__class__ = Odd
    return model


@pytest.mark.parametrize("how", ["centred", "turned", "a row apart", "whole"])
def test_a_model_that_does_more_than_a_function_of_each_row_has_all_rows(
    folder_of: Callable[[str], Path],
    mlx_lm_of: Callable[[Path], Any],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    monkeypatch.setattr(heads, "WHOLE", 0)
    model = mlx_lm_of(folder_of("gqa"))
    assert Head.of(model, 40, [700]) is not None
    assert Head.of(odd(model, how), 40, [700]) is None


def test_a_head_that_is_not_called_code_of_ones_own_and_short_calls_have_all_rows(
    folder_of: Callable[[str], Path],
    mlx_lm_of: Callable[[Path], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mlx_lm_of(folder_of("gqa"))
    assert Head.of(model, 40, [700]) is None  # 28,000 logits are no matter
    monkeypatch.setattr(heads, "WHOLE", 0)
    tied = mlx_lm_of(folder_of("mha"))
    tied.lm_head = model.lm_head  # which it does not use
    assert Head.of(tied, 40, [700]) is None
    monkeypatch.setattr(type(model), "__module__", "mine")
    assert Head.of(model, 40, [700]) is None


def test_a_head_whose_bits_depend_on_the_number_of_rows_has_all_rows(
    folder_of: Callable[[str], Path],
    mlx_lm_of: Callable[[Path], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a BLAS that adds up in another order for other shapes."""
    monkeypatch.setattr(heads, "WHOLE", 0)
    model = mlx_lm_of(folder_of("gqa"))
    right = model.lm_head
    model.lm_head = heads._Instead(lambda x: right(x) * (1 + 1e-6 * x.shape[1]))
    assert Head.of(model, 40, [700]) is None

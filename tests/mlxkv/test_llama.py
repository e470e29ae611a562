"""The model as people call it: what goes in, what comes out, what is refused, and that any split
gives the same logits.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxkv
from mlxkv import Cache, CacheError
from mlxkv.engines import recorder
from mlxkv.port import llama, ops
from mlxkv.port.llama import Llama, fitting, parameters
from mlxkv.port.weights import load
from oracle.formats.errors import Refusal
from oracle.formats.plan import judged_plans
from oracle.formats.trace import TAPS, Meta

ModelOf = Callable[..., Llama]
FolderOf = Callable[[str], Path]
LAYOUTS = sorted(models.LAYOUTS)


def fresh(model: Llama, **options: Any) -> Cache:
    return Cache(model.config, dtype=model.dtype, **options)


def full(model: Llama, tokens: list[int]) -> npt.NDArray[Any]:
    """(L, V): every position's logits from one call on a fresh cache."""
    return np.array(model([tokens], cache=fresh(model), all_positions=True)[0])


# In and out.


def test_the_public_names_are_the_ports() -> None:
    assert (mlxkv.Llama, mlxkv.CacheError) == (Llama, CacheError)
    assert issubclass(CacheError, ValueError)
    assert sorted(mlxkv.__all__) == [
        "Cache",
        "CacheError",
        "Llama",
        "LlamaConfig",
        "Refusal",
        "load",
        "testing",
    ]
    assert mlxkv.Refusal is Refusal
    assert issubclass(CacheError, mlxkv.Refusal)
    assert (mlxkv.__version__, "__version__" in dir(mlxkv)) == (version("mlxkv"), True)
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        mlxkv.lod  # noqa: B018


def test_the_documented_calls_work(folder_of: FolderOf) -> None:
    model = mlxkv.load(folder_of("gqa"), dtype="float32")
    cache = mlxkv.Cache(model.config, dtype="float32", use_kv_cache=True, guarded=True)

    logits = model([[1, 2, 3]], cache=cache, index_pos=None)
    branch = cache.clone()
    more = model([[4]], cache=cache, index_pos=3)

    assert isinstance(model, mlxkv.Llama)
    assert isinstance(model.config, mlxkv.LlamaConfig)
    assert [(a.shape, a.dtype) for a in (logits, more)] == [((1, 40), mx.float32)] * 2
    assert (len(cache), len(branch)) == (4, 3)


@pytest.mark.parametrize(
    "tokens",
    [
        [[3, 1, 4], [1, 5, 9]],
        ((3, 1, 4), (1, 5, 9)),
        np.array([[3, 1, 4], [1, 5, 9]]),
        np.array([[3, 1, 4], [1, 5, 9]], np.uint8),
        mx.array([[3, 1, 4], [1, 5, 9]]),
        mx.array([[3, 1, 4], [1, 5, 9]], mx.uint32),
    ],
    ids=lambda tokens: f"{type(tokens).__module__}.{type(tokens).__name__}",
)
def test_tokens_may_be_lists_numpy_or_mlx(tokens: Any, model_of: ModelOf) -> None:
    model = model_of()

    found = model(tokens, cache=fresh(model))

    assert (found.shape, found.dtype) == ((2, 40), mx.float32)
    assert np.array_equal(
        np.array(found), np.array(model([[3, 1, 4], [1, 5, 9]], cache=fresh(model)))
    )


@pytest.mark.parametrize(
    ("dtype", "out"),
    [
        ("float32", mx.float32),
        ("float16", mx.float32),
        ("bfloat16", mx.float32),
        ("float64", mx.float64),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_float32_and_float64_only_in_the_algebra_lane(
    layout: str, dtype: str, out: mx.Dtype, model_of: ModelOf
) -> None:
    model = model_of(layout, dtype)

    last = model([[1, 2, 3]], cache=fresh(model))
    every = model([[1, 2, 3]], cache=fresh(model), all_positions=True)

    assert (last.shape, last.dtype) == ((1, 40), out)
    assert (every.shape, every.dtype) == ((1, 3, 40), out)
    assert {str(a.dtype) for a in parameters(model).values()} == {f"mlx.core.{dtype}"}
    assert np.isfinite(np.array(every)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_position_is_the_last_row_of_all_positions(layout: str, model_of: ModelOf) -> None:
    model = model_of(layout, "float64")
    tokens = models.ids(9)

    last = np.array(model([tokens], cache=fresh(model)))

    np.testing.assert_allclose(last[0], full(model, tokens)[-1], atol=1e-13)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_of_two_is_two_single_runs(layout: str, model_of: ModelOf) -> None:
    model = model_of(layout, "float64")
    rows = [models.ids(7, seed=1), models.ids(7, seed=2)]
    cache = fresh(model)

    first = np.array(model([r[:4] for r in rows], cache=cache, all_positions=True))
    rest = np.array(model([r[4:] for r in rows], cache=cache, all_positions=True))

    for i, row in enumerate(rows):
        np.testing.assert_allclose(
            np.concatenate([first[i], rest[i]]), full(model, row), atol=1e-12
        )
    assert cache.layers[0].keys is not None
    assert cache.layers[0].keys.shape[0] == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_algebra_lane_is_the_formulas(layout: str, model_of: ModelOf) -> None:
    config, tokens = models.config(layout), models.ids(40, seed=8)

    expected = models.forward(config, models.weights(config), tokens)

    np.testing.assert_allclose(
        full(model_of(layout, "float64"), tokens), expected, atol=1e-11, rtol=0
    )


# Any split of any sequence.


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(tokens=st.lists(st.integers(0, 39), min_size=1, max_size=24), data=st.data())
def test_any_split_of_any_sequence_gives_the_same_logits(
    layout: str, tokens: list[int], data: st.DataObject, model_of: ModelOf
) -> None:
    model = model_of(layout, "float64")
    cuts = data.draw(
        st.sets(st.integers(1, len(tokens))).map(lambda cuts: sorted({0, *cuts, len(tokens)}))
    )
    cache = fresh(model)

    rows = [
        np.array(model([tokens[a:b]], cache=cache, all_positions=True)[0])
        for a, b in pairwise(cuts)
    ]

    np.testing.assert_allclose(np.concatenate(rows), full(model, tokens), atol=1e-10, rtol=0)


# Measured 6e-7, 4e-3 and 2e-2 of the largest logit.
@pytest.mark.parametrize(
    ("dtype", "noise"), [("float32", 5e-6), ("float16", 2e-2), ("bfloat16", 2e-1)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_single_tokens_agree_with_one_call_within_the_dtypes_noise(
    layout: str, dtype: str, noise: float, folder_of: FolderOf
) -> None:
    model, truth = (
        load(folder_of(layout), dtype),
        load(folder_of(layout), "float64", rounded_to=dtype),
    )
    tokens = models.ids(20, seed=3)
    cache = fresh(model)

    rows = np.concatenate([np.array(model([[t]], cache=cache)) for t in tokens])

    expected = full(truth, tokens)
    assert np.abs(rows - expected).max() <= noise * np.abs(expected).max()


# Causality, the mask and token 0.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changed", [0, 4, 8])
def test_a_token_changes_its_own_row_and_none_before_it(
    layout: str, changed: int, model_of: ModelOf
) -> None:
    model = model_of(layout)
    tokens = models.ids(9, seed=4)
    others = [*tokens[:changed], (tokens[changed] + 1) % 40, *tokens[changed + 1 :]]
    caches = fresh(model), fresh(model)

    rows = [
        np.array(model([ids], cache=cache, all_positions=True)[0])
        for ids, cache in zip((tokens, others), caches, strict=True)
    ]

    assert np.array_equal(rows[0][:changed], rows[1][:changed])
    assert np.all(np.abs(rows[0][changed] - rows[1][changed]).max() > 0.01)
    for a, b in zip(*(c.layers for c in caches), strict=True):
        for mine, theirs in ((a.keys, b.keys), (a.values, b.values)):
            assert np.array_equal(np.array(mine)[:, :, :changed], np.array(theirs)[:, :, :changed])
            assert not np.array_equal(
                np.array(mine)[:, :, changed], np.array(theirs)[:, :, changed]
            )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("position", [0, 11])
def test_with_one_key_attention_is_its_value_through_o_proj(
    layout: str, position: int, model_of: ModelOf
) -> None:
    model = model_of(layout, "float64")
    config, attention = model.config, model.layers[1].self_attn
    x = mx.array(np.random.default_rng(5).standard_normal((2, 1, config.hidden_size)), mx.float64)

    with mx.stream(mx.cpu):
        found = attention(x, fresh(model, guarded=False), position)
        values = attention.v_proj(x).reshape(2, 1, config.num_key_value_heads, config.head_dim)
        shared = mx.repeat(values, config.num_attention_heads // config.num_key_value_heads, axis=2)
        expected = attention.o_proj(shared.reshape(2, 1, -1))

    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-14)


def test_the_mask_must_fit_the_scores_exactly() -> None:
    mask = mx.array([[0, 1]], mx.uint8)

    assert fitting(None, (1, 4, 1, 9)) is None
    fitted = fitting(mask, (1, 4, 1, 2))
    assert fitted is not None
    assert fitted.tolist() == [[False, True]]
    # MLX itself would stretch the first axis.
    with pytest.raises(CacheError) as caught:
        fitting(mask, (1, 4, 3, 2))
    assert (
        str(caught.value)
        == "cannot broadcast [1, 2] to [1, 4, 3, 2]: the cache holds other rows than index_pos says"
    )


def reference(
    x: npt.NDArray[Any], keys: npt.NDArray[Any], values: npt.NDArray[Any], scale: float, start: int
) -> npt.NDArray[Any]:
    """Attention by loops over heads and rows, in float64."""
    B, H, L, _ = x.shape
    out = np.empty_like(x)
    for b, h, i in np.ndindex(B, H, L):
        k, v = (a[b, h // (H // keys.shape[1]), : start + i + 1] for a in (keys, values))
        weights = np.exp(k @ x[b, h, i] * scale)
        out[b, h, i] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize(("dtype", "bound"), [(mx.float64, 1e-14), (mx.float32, 1e-5)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("length", "start"), [(5, 0), (2, 3), (1, 4)])
def test_attention_is_the_formula(
    dtype: mx.Dtype, bound: float, heads: int, kv_heads: int, length: int, start: int
) -> None:
    random = np.random.default_rng(6)
    shapes = (
        (2, heads, length, 8),
        (2, kv_heads, start + length, 8),
        (2, kv_heads, start + length, 8),
    )
    q, k, v = (random.standard_normal(s) for s in shapes)
    hidden = np.arange(start + length)[None] > start + np.arange(length)[:, None]

    with mx.stream(mx.cpu):
        arrays = [mx.array(a, dtype) for a in (q, k, v)]
        found = ops.attention(*arrays, scale=0.7, hidden=mx.array(hidden) if length > 1 else None)

    np.testing.assert_allclose(np.array(found), reference(q, k, v, 0.7, start), atol=bound)


def test_attention_adds_up_in_float32_wherever_a_kernel_would_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU always; Metal's kernel of one query does it by itself."""
    calls = [(1, 4, 64), (1, 32, 128), (1, 33, 128), (1, 4, 80), (2, 4, 64)]
    half = (mx.float16, mx.bfloat16)
    assert {ops.attended(dtype, *call) for dtype in half for call in calls} == {mx.float32}
    assert ops.attended(mx.float64, *calls[0]) == mx.float64

    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    for dtype in half:
        found = [ops.attended(dtype, *call) for call in calls]
        assert found == [dtype, dtype, mx.float32, mx.float32, mx.float32]
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)  # CUDA
    assert ops.attended(mx.float16, *calls[0]) == mx.float32


def test_the_exact_forms_are_exact() -> None:
    x = np.random.default_rng(7).standard_normal((3, 32)) * 4
    weight = np.linspace(0.5, 2, 32)

    with mx.stream(mx.cpu):
        silu = np.array(ops.silu(mx.array(x, mx.float64)))
        norm = np.array(ops.rms_norm(mx.array(x, mx.float64), mx.array(weight, mx.float64), 1e-3))

    np.testing.assert_allclose(silu, x / (1 + np.exp(-x)), atol=1e-14)
    np.testing.assert_allclose(
        norm, x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-3) * weight, rtol=1e-14
    )


# Refusals, each before anything is written.

WHOLE = "tokens: expected whole numbers of shape (B, L)"


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[3, 40]], "tokens: id 40 at place 1 is outside the vocabulary of 40"),
        ([[-1, 3]], "tokens: id -1 at place 0 is outside the vocabulary of 40"),
        ([[2**63]], "tokens: id 9223372036854775808 at place 0 is outside the vocabulary of 40"),
        (
            [[1, 2], [3, 41]],
            "tokens: id 41 at place 1 of sequence 1 is outside the vocabulary of 40",
        ),
        (np.array([[2**32]]), "tokens: id 4294967296 at place 0 is outside the vocabulary of 40"),
        ([[2**70]], f"{WHOLE}, got shape (1, 1) object, {2**70} at place 0 of sequence 0"),
        ([[1, 2.5]], f"{WHOLE}, got shape (1, 2) float64, 2.5 at place 1 of sequence 0"),
        ([[True]], f"{WHOLE}, got shape (1, 1) bool, True at place 0 of sequence 0"),
        ([[1], [None]], f"{WHOLE}, got shape (2, 1) object, None at place 0 of sequence 1"),
        ([[1, "2"]], f"{WHOLE}, got shape (1, 2) <U21, '2' at place 1 of sequence 0"),
        ("abc", "tokens: expected whole numbers of shape (B, L), got shape () <U3"),
        ([1, 2], "tokens: expected whole numbers of shape (B, L), got shape (2,) int64"),
        ([[[1]]], "tokens: expected whole numbers of shape (B, L), got shape (1, 1, 1) int64"),
        (3, "tokens: expected whole numbers of shape (B, L), got shape () int64"),
        (
            [[1, 2], [3]],
            "tokens: expected whole numbers of shape (B, L), got rows of unequal length or no "
            "numbers",
        ),
        (
            mx.array([[1]], mx.bfloat16),
            "tokens: expected whole numbers of shape (B, L), got rows of unequal length or no "
            "numbers",
        ),
        ([[]], "cache: no new tokens (the cache holds 3); a call needs at least one"),
        (
            np.zeros((0, 3), int),
            "cache: no new tokens (the cache holds 3); a call needs at least one",
        ),
        ([[1], [2]], "cache: batch of 2, expected 1 (that of the tokens held); make a new cache"),
    ],
    ids=str,
)
def test_tokens_that_cannot_be_used_are_refused(
    tokens: Any, message: str, model_of: ModelOf
) -> None:
    model = model_of()
    cache = fresh(model)
    model([[1, 2, 3]], cache=cache)
    before = cache.layers

    with pytest.raises(CacheError) as caught:
        model(tokens, cache=cache)

    assert str(caught.value) == message
    assert cache.layers is before


def test_ids_at_both_ends_of_the_vocabulary_are_used(model_of: ModelOf) -> None:
    model = model_of()

    assert model([[0, 39]], cache=fresh(model)).shape == (1, 40)


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("theirs", ["float16", "bfloat16", "float64"])
def test_a_cache_of_another_dtype_is_refused_with_both(
    theirs: str, guarded: bool, model_of: ModelOf
) -> None:
    model = model_of()
    cache = Cache(model.config, dtype=theirs, guarded=guarded)

    with pytest.raises(CacheError) as caught:
        model([[1]], cache=cache)

    assert (
        str(caught.value)
        == f"cache: dtype is {theirs}, the weights' is float32; make it with Cache(model.config, "
        f"dtype='float32')"
    )
    assert len(cache) == 0


def test_an_unknown_dtype_is_refused(model_of: ModelOf, folder_of: FolderOf) -> None:
    for make in (
        lambda: Cache(model_of().config, dtype="float8"),
        lambda: mlxkv.load(folder_of("gqa"), "float8"),
    ):
        with pytest.raises(
            ValueError,
            match=r"^dtype: expected one of float32, float16, bfloat16, float64, got 'float8'$",
        ):
            make()


@pytest.mark.parametrize("layout", models.LAYOUTS)
@pytest.mark.parametrize("queries", [1, 3, 4, 11])
def test_queries_in_blocks_give_what_all_at_once_give(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, layout: str, queries: int
) -> None:
    model = model_of(layout, "float64")
    tokens = np.array([models.ids(19), models.ids(19, seed=1)])

    def logits() -> npt.NDArray[np.float64]:
        cache = Cache(model.config, dtype="float64")
        return np.concatenate(
            [
                np.array(model(part, cache=cache, all_positions=True))
                for part in (tokens[:, :5], tokens[:, 5:])
            ],
            axis=1,
        )

    whole = logits()
    monkeypatch.setattr(llama, "QUERIES", queries)
    np.testing.assert_allclose(logits(), whole, rtol=0, atol=1e-12 * np.abs(whole).max())


@pytest.mark.parametrize("layout", models.LAYOUTS)
def test_exponentials_by_numpy_are_those_by_tanh(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    model = model_of(layout, "float64")
    tokens = np.array([models.ids(19), models.ids(19, seed=1)])

    def logits() -> npt.NDArray[np.float64]:
        return np.array(model(tokens, cache=Cache(model.config, dtype="float64")))

    few, taken = logits(), []
    monkeypatch.setattr(ops, "MANY", 19 * 19)
    monkeypatch.setattr(ops.np, "exp", lambda x, by=np.exp: taken.append(x.dtype) or by(x))
    many = logits()
    assert taken == [np.float64] * model.config.num_hidden_layers
    np.testing.assert_allclose(many, few, rtol=0, atol=1e-13 * np.abs(few).max())


# What a tap is shown.

ROWS = ("input_norm", "attention", "o_proj", "post_norm", "down", "hidden")
LAYER: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(ROWS, (2, 3, 32)),
    **dict.fromkeys(("gate", "up", "activation"), (2, 3, 48)),
    **dict.fromkeys(("q", "q_rope"), (2, 4, 3, 8)),
    **dict.fromkeys(("k", "k_rope", "v"), (2, 2, 3, 8)),
    "scores": (2, 2, 2, 3, 3),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_tap_is_shown_every_place_of_every_layer_and_changes_no_bit(
    dtype: str, model_of: ModelOf
) -> None:
    model, tokens = model_of("gqa", dtype), [models.ids(3, seed=1), models.ids(3, seed=2)]
    seen: dict[int, dict[str, tuple[int, ...]]] = {}

    def tap(layer: int, name: str, array: mx.array) -> mx.array:
        assert name not in seen.setdefault(layer, {})
        seen[layer][name] = array.shape
        return array

    found = model(tokens, cache=fresh(model), all_positions=True, tap=tap)

    exact = dtype == "float64"
    layer = LAYER if exact else {name: LAYER[name] for name in LAYER if name != "scores"}
    assert set(LAYER) == set(TAPS)
    assert seen == {0: {"embedding": (2, 3, 32)} | layer, 1: layer, 2: layer}
    plain = model(tokens, cache=fresh(model), all_positions=True)
    assert np.array_equal(np.array(found), np.array(plain))


def test_what_a_tap_returns_for_hidden_goes_on_in_its_place(model_of: ModelOf) -> None:
    model = model_of("gqa", "float64")
    given: dict[int, mx.array] = {}

    def tap(layer: int, name: str, array: mx.array) -> mx.array:
        given[layer] = array if name == "input_norm" else given.get(layer, array)
        return mx.zeros_like(array) + 1 if name == "hidden" else array

    logits = model([[3, 1, 4]], cache=fresh(model), tap=tap)

    ones = mx.ones((1, 3, 32), mx.float64)
    with ops.stream(mx.float64):
        norm = np.array(model.layers[1].input_layernorm(ones))
        head = np.array(model.lm_head(model.norm(ones)))[:, -1]
    assert np.array_equal(np.array(given[1]), norm)
    assert np.array_equal(np.array(logits), head)


def test_a_port_that_turns_queries_and_keys_apart_is_recorded_all_the_same(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, real = model_of("gqa", "float64"), llama.rotate
    plan = judged_plans(models.ids(7), prompt=5)["chunked"]
    meta = Meta(plan, "mlxkv", "0", "float64")
    expected, _ = recorder.run(model, plan, meta)

    def apart(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        return mx.concatenate([real(x[:, :4], cos, sin), real(x[:, 4:], cos, sin)], axis=1)

    monkeypatch.setattr(llama, "rotate", apart)
    found, _ = recorder.run(model, plan, meta)

    assert sorted(found.arrays) == sorted(expected.arrays)
    for name, array in expected.arrays.items():
        assert np.array_equal(found.arrays[name], array), name

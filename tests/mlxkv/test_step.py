"""Decoding as one compiled function: the rows of the layers as they are, and the cache's contract.

`Counted` stands where a model keeps its compiled steps, to see which calls were one.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import numpy as np
import pytest
from caches import Array, ModelOf, buffers, fresh, held, run, same
from mlx import nn
from packed_models import quantised
from test_rope_types import TYPES, described

from mlxkv.port import cache as cache_module
from mlxkv.port import llama, ops, packed, step, watched
from mlxkv.port.cache import BLOCK, Cache, Layer
from mlxkv.port.llama import Llama, parameters
from mlxkv.port.step import Step
from mlxkv.port.weights import load

NOISE = {"float32": 5e-6, "float16": 2e-2, "bfloat16": 2e-1, "float64": 1e-13}
"""Of the largest logit; in half precision those of test_llama."""
IDS = models.ids(8, seed=3)
TRACED = Llama.forward.__code__


class Counted(Step):
    """How many of its calls were a compiled step, and how many traced one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.traces = 0

    def __call__(self, *given: Any) -> Any:
        sys.setprofile(self._count)
        try:
            found = super().__call__(*given)
        finally:
            sys.setprofile(None)
        self.calls += found is not None
        return found

    def _count(self, frame: Any, event: str, _: Any) -> None:
        self.traces += event == "call" and frame.f_code is TRACED


def counted(model: Llama) -> Counted:
    model._step = made = Counted()
    return made


def decoded(model: Llama, *, batch: int = 1, exact: bool = False, **options: Any) -> Array:
    """(6, B, V): logits of single tokens after a prompt of two; float64 is compiled if `exact`."""
    cache, found = fresh(model, **options), []
    prompt = [[id + i for id in IDS[:2]] for i in range(batch)]
    model(prompt, cache=cache)
    for id in IDS[2:]:
        ids = np.array([[id + i] for i in range(batch)], np.int32) % model.config.vocab_size
        if not exact:
            found.append(np.array(model(ids, cache=cache)))
            continue
        with cache.call(batch, 1, None, model) as start, ops.stream(model.dtype):
            made = model._step(model, cache.after(mx.array(ids)), cache, start)
            assert made is not None
            found.append(np.array(cache.done(made)))
    assert len(cache) == len(IDS)
    return np.stack(found)


def off(model: Llama, **options: Any) -> float:
    """How far compiled steps are from the others, by the largest logit; all six were compiled."""
    spy, exact = counted(model), model.dtype == mx.float64
    found = decoded(model, exact=exact, **options)
    assert (spy.calls, spy.traces) == (6, 1)
    model.compiled = False
    try:
        plain = decoded(model, **options)
    finally:
        model.compiled = True
    assert spy.calls == 6
    return float(np.abs(found - plain).max() / np.abs(plain).max())


@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("layout", sorted(models.LAYOUTS))
def test_a_compiled_step_gives_the_rows_of_the_layers(
    layout: str, dtype: str, folder_of: Callable[[str], Path]
) -> None:
    model = load(folder_of(layout), dtype)
    assert off(model) <= NOISE[dtype]
    assert off(model, batch=3) <= NOISE[dtype]
    assert off(model, guarded=False) <= NOISE[dtype]


@pytest.mark.parametrize("name", TYPES)
def test_a_compiled_step_turns_by_every_type_of_rope(name: str, tmp_path: Path) -> None:
    folder = models.save(tmp_path, described(TYPES[name]))
    for dtype in ("float32", "float64"):
        assert off(load(folder, dtype)) <= NOISE[dtype]
    if name.startswith("longrope"):
        assert off(load(folder), max_length=12) <= NOISE["float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("named", [{}, {"model.layers.1.self_attn.k_proj": False}])
def test_a_compiled_step_multiplies_with_packed_weights(
    named: dict[str, Any], dtype: str, tmp_path: Path, folder_of: Callable[[str], Path]
) -> None:
    model = load(quantised(folder_of("gqa"), tmp_path / "q", named=named), dtype)
    apart = [block.self_attn.joint is None for block in model.layers]
    assert apart == [False, bool(named), False]
    assert off(model) <= NOISE[dtype]


def test_what_is_no_plain_step_of_one_model_is_not_compiled(model_of: ModelOf) -> None:
    model = model_of()
    spy = counted(model)

    class Other(Cache):
        pass

    calls: list[Callable[[], Any]] = [
        lambda: run(model, fresh(model), [1], [2, 3], [4, 5]),
        lambda: run(model, fresh(model, use_kv_cache=False), [1], index_pos=0),
        lambda: [model([[i]], cache=Other(model.config)) for i in (1, 2)],
        lambda: decoded_with_tap(model),
    ]
    for call in calls:
        call()
    assert spy.calls == 0
    ragged = fresh(model, guarded=False)
    run(model, ragged, [1, 2])
    ragged.restore((ragged.layers[0].crop(1), *ragged.layers[1:]))
    run(model, ragged, [3], index_pos=2)
    assert spy.calls == 0


def decoded_with_tap(model: Llama) -> None:
    cache = fresh(model)
    run(model, cache, [1, 2])
    model([[3]], cache=cache, tap=lambda layer, name, array: array)


OWNERS = (
    (ops, "silu"),
    (ops, "rms_norm"),
    (ops, "attention"),
    (llama, "rotate"),
    (llama, "blockwise"),
    (llama.Attention, "_heads"),
    (llama.Attention, "__call__"),
    (llama.MLP, "__call__"),
    (llama.Block, "__call__"),
    (llama.Llama, "_logits"),
    (Cache, "extend"),
    (Cache, "rotation"),
    (Cache, "mask"),
    (cache_module, "_put"),
    (nn.Linear, "__call__"),
    (nn.Embedding, "__call__"),
    (nn.Embedding, "as_linear"),
    (packed, "product"),
    (packed.PackedLinear, "__call__"),
)


def _method(real: Any) -> Any:
    """A function that does the same; one in a class is bound to what it is called on."""

    def same(*given: Any, **options: Any) -> Any:
        return real(*given, **options)

    return same


@pytest.mark.parametrize(("owner", "name"), OWNERS, ids=lambda one: getattr(one, "__name__", one))
def test_what_is_replaced_is_called_at_every_step(
    owner: Any, name: str, model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no compiled step hides a fault that is planted."""
    model = model_of()
    spy, cache = counted(model), fresh(model)
    run(model, cache, [1, 2], [3])
    assert spy.calls == 1
    real = getattr(owner, name)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, _method(real))
        assert not watched.unchanged()
        run(model, cache, [4])
    assert spy.calls == 1
    run(model, cache, [5])
    assert spy.calls == 2


def _twice(module: Any, name: str = "weight") -> Callable[[], None]:
    return lambda: setattr(module, name, getattr(module, name) * 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_put_into_a_model_has_its_effect_at_the_next_step(
    dtype: str, folder_of: Callable[[str], Path]
) -> None:
    model = load(folder_of("mqa"), dtype)
    spy, block = counted(model), model.layers[1]
    attention, mlp, other = block.self_attn, block.mlp, nn.Linear(32, 12)
    other.set_dtype(model.dtype)
    up = model.layers[2].mlp.up_proj
    changes = [
        lambda: model.update({"layers": [{}, {}, {"mlp": {"up_proj": {"bias": up.bias * 2}}}]}),
        *(_twice(attention[name]) for name in ("v_proj", "o_proj")),
        *(_twice(attention[name]) for name in ("q_proj", "k_proj")),
        *(_twice(mlp[name]) for name in ("gate_proj", "up_proj", "down_proj")),
        _twice(attention.q_proj, "bias"),
        _twice(model.embed_tokens),
        _twice(model.lm_head),
        _twice(model.norm),
        lambda: setattr(block.input_layernorm, "eps", 0.5),
        lambda: setattr(attention, "scale", attention.scale / 16),
        model.layers.reverse,
        lambda: attention.q_proj.pop("bias"),
        lambda: mlp.down_proj.__delitem__("bias"),
        lambda: delattr(mlp.gate_proj, "bias"),
        lambda: setattr(attention, "v_proj", other),
    ]
    changed: list[bool] = []
    for i, change in enumerate(changes):
        cache = fresh(model)
        run(model, cache, [1, 2, 3])
        model([[4]], cache=cache)
        before, branch = model([[5]], cache=cache.clone()), cache.clone()
        change()
        after = model([[5]], cache=cache)
        model.compiled = False
        plain = model([[5]], cache=branch)
        model.compiled = True
        largest = mx.abs(plain).max().item()
        changed.append(mx.abs(after - before).max().item() > 0)
        assert mx.abs(after - plain).max().item() <= NOISE[dtype] * largest, i
    assert changed == [True] * len(changes)
    assert spy.calls == 3 * len(changes)


def test_a_class_of_ones_own_is_called_at_every_step(folder_of: Callable[[str], Path]) -> None:
    class Halved(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(x) / 2

    model = load(folder_of("gqa"))
    spy, right = counted(model), decoded(model)
    for place in (model.layers[0].mlp, model.layers[2].self_attn):
        name = next(iter(place.names))
        place[name] = Halved(*reversed(place[name].weight.shape), bias=False)
    assert np.abs(decoded(model) - right).max() > 0.01
    assert spy.calls == 6


# The cache's contract.


def test_a_step_writes_into_no_buffer_that_a_clone_holds(model_of: ModelOf) -> None:
    model = model_of()
    spy = counted(model)
    for evaluated in (True, False):
        cache = fresh(model)
        run(model, cache, [1, 2, 3])
        clone = cache.clone()
        before = [np.array(b) for b in buffers(clone)]
        first = model([[4]], cache=cache)
        if evaluated:
            mx.eval(first)
        other = model([[5]], cache=clone.clone())
        mx.eval(first, other)
        assert same([np.array(b) for b in buffers(clone)], before)
        alone = fresh(model)
        run(model, alone, [1, 2, 3])
        assert np.array_equal(np.array(model([[5]], cache=alone)), np.array(other))
    assert spy.calls == 6


def test_a_cropped_row_that_is_no_number_reaches_no_later_step(model_of: ModelOf) -> None:
    model = model_of()
    spy = counted(model)
    cache, alone = fresh(model), fresh(model)
    for one in (cache, alone):
        run(model, one, [1, 2, 3])
    nan = mx.full((1, 2, 4, 8), float("nan"))
    cache.restore(tuple(layer.append(nan, nan) for layer in cache.layers))
    assert cache.crop(3) == 4
    clone = cache.clone()
    for one in (cache, clone):
        for id in (4, 5):
            assert np.array_equal(run(model, one, [id]), run(model, alone, [id]))
        alone.crop(3)
    assert spy.calls == 8
    assert all(np.isfinite(a).all() for a in held(cache))


def test_a_step_over_the_end_of_a_block_is_traced_anew_and_twice_over_is_not(
    tmp_path: Path,
) -> None:
    config = models.config("gqa", max_position_embeddings=2 * BLOCK)
    model = load(models.save(tmp_path, config))
    spy, cache = counted(model), fresh(model)
    run(model, cache, models.ids(BLOCK - 2))
    short = fresh(model)
    run(model, short, [1, 2])
    for i in range(4):
        run(model, cache, [i])
        run(model, short, [i])
    assert (spy.calls, spy.traces) == (8, 2)
    assert {b.shape[2] for b in buffers(cache)} == {2 * BLOCK}
    expected = fresh(model)
    found = run(model, expected, [*models.ids(BLOCK - 2), 0, 1, 2, 3])[-1]
    np.testing.assert_allclose(run(model, cache, [7]), run(model, expected, [7]), atol=1e-4)
    assert found.shape == (40,)


def test_a_step_adds_up_alike_whatever_the_cache_held_before(tmp_path: Path) -> None:
    """Buffers that grew and were cropped, that a file gave, and that somebody made to size."""
    model = load(models.save(tmp_path, models.config("gqa", max_position_embeddings=2 * BLOCK)))
    ids, spy = models.ids(BLOCK + 20), counted(model)
    cache, alone = fresh(model), fresh(model)
    run(model, cache, ids)
    run(model, alone, ids[: BLOCK - 9])
    cache.restore(tuple(layer.crop(BLOCK - 9) for layer in alone.layers))
    grown = alone.clone()
    nothing = mx.zeros((1, 2, 300, 8))
    grown.restore(tuple(layer.append(nothing, nothing) for layer in grown.layers))
    grown.crop(BLOCK - 9)
    grown.save(tmp_path / "cache")
    made = alone.clone()
    pairs = [(layer.keys, layer.values) for layer in alone.layers]
    made.restore(tuple(Layer(pair, BLOCK - 9) for pair in pairs))  # type: ignore[arg-type]
    right = run(model, alone, *[[i] for i in range(12)])
    for other in (cache, grown, made, Cache.load(tmp_path / "cache", model)):
        assert np.array_equal(run(model, other, *[[i] for i in range(12)]), right)
        sizes = {b.shape[2] for b in buffers(other)}
        assert sizes == {2 * BLOCK}
    assert (spy.calls, spy.traces) == (60, 2)


def test_a_step_that_fails_leaves_the_cache_as_it_was(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    cache = fresh(model)
    run(model, cache, [1, 2, 3])
    before, layers = held(cache), cache.layers

    class Broken(Step):
        def __call__(self, *given: Any) -> Any:
            super().__call__(*given)
            raise RuntimeError("no more")

    model._step = Broken()
    with pytest.raises(RuntimeError, match="no more"):
        model([[4]], cache=cache)
    model._step = Step()
    assert cache.layers is layers
    assert same(held(cache), before)
    assert len(cache) == 3


def test_a_compiled_step_keeps_neither_weights_nor_model(folder_of: Callable[[str], Path]) -> None:
    model = load(folder_of("gqa"))
    decoded(model)
    old = weakref.ref(model.layers[0].self_attn.o_proj.weight)
    own = weakref.ref(model.layers[0].self_attn.q_proj.weight)
    for module in (model.layers[0].self_attn.o_proj, model.layers[0].self_attn.q_proj):
        module.weight = mx.array(np.array(module.weight))
    decoded(model)
    gc.collect()
    assert (old(), own()) == (None, None)
    gone = weakref.ref(model)
    del model, module
    gc.collect()
    assert gone() is None


def test_somebody_who_has_mlx_compile_nothing_is_not_overruled(model_of: ModelOf) -> None:
    model = model_of()
    spy = counted(model)
    right = decoded(model)
    mx.disable_compile()
    try:
        np.testing.assert_allclose(decoded(model), right, atol=1e-5)
        assert not step._probe()
    finally:
        mx.enable_compile()
    assert np.array_equal(decoded(model), right)
    assert (step._probe(), spy.calls, spy.traces) == (True, 18, 7)


def test_threads_do_not_share_what_was_traced(model_of: ModelOf) -> None:
    model, found = model_of(), []
    spy = counted(model)
    right = decoded(model)

    def work() -> None:
        found.append(decoded(model))
        found.append((spy.calls, spy.traces))

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found[1::2] == [(6, 1), (6, 1)]
    assert all(np.array_equal(rows, right) for rows in found[::2])


# Joined weights.


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_every_weight_is_in_memory_once_under_its_own_name(dtype: str, tmp_path: Path) -> None:
    config = models.config("mqa", hidden_size=96, intermediate_size=512)
    folder = models.save(tmp_path, config)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    model = load(folder, dtype)
    grown = mx.get_active_memory() - before
    weights = parameters(model)
    assert {n: a.shape for n, a in weights.items()} == models.shapes(config)
    assert grown <= 1.05 * sum(a.nbytes for a in weights.values()) + 65536
    for name, array in models.weights(config).items():
        stored = array.astype(dtype) if dtype == "float16" else array
        assert np.array_equal(np.array(weights[name]), stored)
    assert (model.layers[0].self_attn.joint is None) == (dtype == "float64")


BARE = """
import sys
from pathlib import Path

from mlxkv.engines import machine

machine.prepare("cpu")
import mlx.core as mx
import numpy as np

from mlxkv import Cache, load
from mlxkv.port import step

model = load(sys.argv[1])
cache, rows = Cache(model.config), []
for ids in ([1, 2], [3], [4], [5]):
    rows.append(np.array(model([ids], cache=cache)))
np.save(sys.argv[2], np.concatenate(rows))
print(step.words(mx.float32, whole=True, tapped=False), len([*Path(sys.argv[3]).rglob("*.so")]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a path without g++ is Linux's")
def test_decoding_asks_for_no_compiler_and_goes_on_without_one(
    folder_of: Callable[[str], Path], tmp_path: Path, model_of: ModelOf
) -> None:
    found = {}
    for name, path in (("with", None), ("without", "/nonexistent")):
        out, room = tmp_path / f"{name}.npy", tmp_path / name
        room.mkdir()
        given = {"TMPDIR": str(room)} | ({} if path is None else {"PATH": path})
        done = subprocess.run(
            [sys.executable, "-c", BARE, str(folder_of("gqa")), str(out), str(room)],
            env=os.environ | given,
            capture_output=True,
            text=True,
            check=True,
        )
        found[name] = done.stdout.strip(), np.load(out)
    assert found["without"][0] == "not compiled (no C++ compiler) 0"
    expected = "compiled 0" if step.compiles() else found["without"][0]
    assert found["with"][0] == expected
    np.testing.assert_allclose(found["with"][1], found["without"][1], atol=1e-5)

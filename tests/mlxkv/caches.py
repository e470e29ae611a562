"""What the cache tests do to a cache, and what they look at."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import models
import numpy as np
import numpy.typing as npt
import pytest

from mlxkv.port.cache import Cache, CacheError
from mlxkv.port.config.llama import LlamaConfig
from mlxkv.port.llama import Llama

ModelOf = Callable[..., Llama]
Array = npt.NDArray[Any]
LAYOUTS = sorted(models.LAYOUTS)


def config(layout: str = "gqa", **changes: Any) -> LlamaConfig:
    return LlamaConfig.from_json(models.config(layout, **changes))


def fresh(model: Llama, **options: Any) -> Cache:
    return Cache(model.config, dtype=model.dtype, **options)


def run(model: Llama, cache: Cache, *calls: list[int], index_pos: int | None = None) -> Array:
    """The rows of every call, one after the other."""
    found = [
        np.array(model([ids], cache=cache, index_pos=index_pos, all_positions=True)[0])
        for ids in calls
    ]
    return np.concatenate([np.zeros((0, model.config.vocab_size), np.float32), *found])


def held(cache: Cache) -> list[Array]:
    """keys and values of every layer, as they are now."""
    return [
        np.array(a) for layer in cache.layers for a in (layer.keys, layer.values) if a is not None
    ]


def same(a: list[Array], b: list[Array]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def refused(act: Callable[[], Any], cache: Cache) -> str:
    """The refusal's text, once nothing of the cache has been found changed."""
    layers, before = cache.layers, held(cache)
    with pytest.raises(CacheError) as caught:
        act()
    assert cache.layers is layers
    assert same(held(cache), before)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rows(
    random: np.random.Generator, config: LlamaConfig, n: int, batch: int = 1
) -> tuple[Array, Array]:
    shape = (batch, config.num_key_value_heads, n, config.head_dim)
    return random.standard_normal(shape).astype(np.float32), random.standard_normal(shape).astype(
        np.float32
    )


def extend(cache: Cache, new: list[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
    """Appends to every layer; what the model would then attend to."""
    found = [cache.extend(i, mx.array(k), mx.array(v)) for i, (k, v) in enumerate(new)]
    return [(np.array(k), np.array(v)) for k, v in found]


def buffers(cache: Cache) -> Iterator[mx.array]:
    for layer in cache.layers:
        if layer.buffers is not None:
            yield from layer.buffers


def settled(*caches: Cache) -> int:
    """Bytes that MLX holds once everything is computed and what nobody holds is gone."""
    mx.eval([b for cache in caches for b in buffers(cache)])
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()

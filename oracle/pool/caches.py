"""transformers' caches by name: how each is made and cut, and what it holds and says of itself.

A sliding one is what transformers makes for a config with sliding attention. A Llama's own mask
knows no window, so the calls on such a cache have that of transformers' Mistral, which is a Llama
with one. transformers' quantised layers say nothing of what they hold, which is read from where
they keep it. Supported as in `reference.py`.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.llama import modeling_llama

from oracle.formats.cache_name import TRANSFORMERS, CacheName, complete
from oracle.formats.errors import Inexpressible, Refusal, one_line

SLIDING = ("DynamicSlidingCache", "StaticSlidingCache")
_PACKAGES = {"quanto": ("optimum.quanto", "optimum-quanto"), "hqq": ("hqq", "hqq")}


def named(text: str) -> CacheName:
    """The cache of this name; a Refusal for one that transformers does not have, or not here."""
    found = complete(text, TRANSFORMERS)
    module, package = _PACKAGES.get(str(found.options.get("backend")), ("", ""))
    if module and not _installed(module):
        what = f"backend {found.options['backend']} needs {package}, which is not installed"
        remedy = f"pip install {package}, or take backend=fp8"
        raise Refusal(what, where=f"cache {found.name}", remedy=remedy)
    if (size := int(found.options.get("size", 1))) < 1:
        raise Refusal(f"size is {size}, expected 1 or more", where=f"cache {found.name}")
    return found


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


def fresh(name: CacheName, config: Any) -> Any:
    """A new cache for the model of a config."""
    options = dict(name.options)
    if name.name == "DynamicCache":
        return DynamicCache(config=config)
    try:
        if name.name == "QuantizedCache":
            return cache_utils.QuantizedCache(config=config, **options)
        size = options["size"]
        if name.name == "StaticCache":
            return cache_utils.StaticCache(config=config, max_cache_len=size)
        sliding = _sliding(config, size)
        if name.name == "DynamicSlidingCache":
            return DynamicCache(config=sliding)
        longest = config.max_position_embeddings
        return cache_utils.StaticCache(config=sliding, max_cache_len=longest)
    except (ImportError, ValueError, AttributeError, TypeError) as error:
        what = f"this transformers does not make it ({one_line(error)})"
        raise Refusal(what, where=f"cache {name}") from error


def _sliding(config: Any, size: Any) -> Any:
    """The config of a model whose every layer attends to `size` tokens."""
    made = copy.deepcopy(config)
    made.sliding_window = size
    made.layer_types = ["sliding_attention"] * config.num_hidden_layers
    return made


@contextmanager
def masked(name: CacheName) -> Iterator[None]:
    """Calls of the model within have the mask that a sliding cache needs."""
    if name.name not in SLIDING:
        yield
        return
    kept = modeling_llama.create_causal_mask

    def sliding(config: Any, **given: Any) -> Any:
        return create_sliding_window_causal_mask(_sliding(config, name.options["size"]), **given)

    modeling_llama.create_causal_mask = sliding
    try:
        yield
    finally:
        modeling_llama.create_causal_mask = kept


def length(cache: Any) -> int:
    """The tokens that a cache says it holds; a copy, since a StaticCache hands out its counter."""
    return 0 if cache is None else int(cache.get_seq_length())


def crop(cache: Any, tokens: int) -> None:
    """Has a cache forget its last `tokens` by its own `crop`."""
    if not getattr(cache, "is_croppable", True):
        raise Inexpressible("its is_croppable is False")
    if tokens:
        cache.crop(-tokens)


def crop_to(cache: Any, before: list[int]) -> None:
    """Every layer back to the length that it had `before`.

    Not by the cache's `crop`, which takes as much from layers that a broken call never reached.
    """
    if not getattr(cache, "is_croppable", True):
        raise Inexpressible("its is_croppable is False")
    for layer, held in zip(cache.layers, before, strict=True):
        if more := int(layer.get_seq_length()) - held:
            layer.crop(-more)


def rows(layer: Any) -> tuple[Tensor, Tensor] | None:
    """Keys and values in use, each [B, K, S, D], of one layer; None where it shows none.

    Quantised ones are unpacked, and what a layer has not quantised yet stands after them.
    """
    if not getattr(layer, "is_initialized", True):
        return None
    found = []
    for kind in ("keys", "values"):
        side, packed = getattr(layer, kind, None), getattr(layer, f"_quantized_{kind}", None)
        if packed is not None:
            rest = [side] if isinstance(side, Tensor) and side.ndim == 4 else []
            side = torch.cat([layer._dequantize(packed), *rest], dim=-2)
        if not isinstance(side, Tensor) or side.ndim != 4:
            return None
        fixed = hasattr(layer, "max_cache_len")
        found.append(side[:, :, : int(layer.get_seq_length())] if fixed else side)
    return found[0], found[1]


def facts(cache: Any) -> dict[str, int | None]:
    """What a cache says of itself beside what it holds, as `oracle.formats.trace.CACHES` has it.

    transformers' caches say no bytes. Rows are those of the layer that is furthest from `length`.
    """
    said = length(cache)
    held = [pair[0].shape[-2] for layer in cache.layers if (pair := rows(layer)) is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _all(cache)}
    return {
        "length": said,
        "size": None,
        "nbytes": None,
        "allocated": sum(storages.values()),
        "rows": max(held, key=lambda n: abs(n - said), default=None),
    }


def _all(root: Any) -> Iterator[Tensor]:
    """Every tensor in a cache's layers, and in what they keep."""
    if isinstance(root, Tensor):
        yield root
    elif isinstance(root, list | tuple):
        for one in root:
            yield from _all(one)
    elif isinstance(root, dict):
        yield from _all(list(root.values()))
    elif isinstance(root, cache_utils.Cache | cache_utils.CacheLayerMixin):
        yield from _all(vars(root))


class BrokenOff(Exception):
    """What a call raises that is to be broken off."""


@contextmanager
def broken_off(model: Any) -> Iterator[None]:
    """A call of the model within fails at the layer in the middle."""
    layers = model.model.layers

    def fail(*_: Any) -> None:
        raise BrokenOff

    handle = layers[len(layers) // 2].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()

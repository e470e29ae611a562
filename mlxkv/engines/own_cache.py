"""A person's own cache: `make(config)`, given mlx-lm's ModelArgs, gives one for each layer.

FILE.py:make is executed because it was named, module:function imported as Python finds it; what
goes wrong in either becomes one line. What a layer's cache must have is what mlx-lm's Llama uses of
it: `update_and_fetch(keys, values)`, each [B, K, L, D], and `offset`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlxkv.engines.kinds import Kind
from mlxkv.engines.machine import has
from mlxkv.engines.own import Source, function_of, named
from mlxkv.engines.runner import blamed_on
from oracle.formats.errors import Refusal

PROTOCOL = "expected mlx-lm's protocol: update_and_fetch(keys, values) and offset"


def made(kind: Kind, config: Any, layers: int) -> list[Any]:
    """One cache for each of `layers`; a Refusal where it is anything else."""
    make = _function(kind.file, kind.module, kind.function, kind.name)
    return checked(make, config, layers, kind)


def checked(make: Callable[[Any], Any], config: Any, layers: int, kind: Kind) -> list[Any]:
    """What `make`, a kind's own, gives for a config, once it is a cache for each layer."""
    name = kind.name
    with blamed_on(name, f"{kind.function}(config)"):
        caches = make(config)
    if not isinstance(caches, list | tuple) or len(caches) != layers:
        listed = isinstance(caches, list | tuple)
        found = f"{len(caches)} caches" if listed else f"a {type(caches).__name__}"
        expected = f"expected a list of {layers}, one for each layer"
        raise Refusal(f"{kind.function}(config) gave {found}, {expected}", where=name)
    for i, layer in enumerate(caches):
        with blamed_on(name, f"offset of layer {i}'s cache"):
            takes, counts = hasattr(layer, "update_and_fetch"), hasattr(layer, "offset")
        if not (takes and counts):
            lacks = "offset" if takes else "update_and_fetch"
            what = f"layer {i}'s cache, of class {type(layer).__name__}, has no {lacks}"
            raise Refusal(f"{what}, {PROTOCOL}", where=name)
    if len({id(layer) for layer in caches}) < layers:
        what = f"{kind.function}(config) gave one cache for several layers"
        raise Refusal(f"{what}, expected {layers} of them", where=name)
    return list(caches)


@lru_cache(maxsize=8)
def _function(file: Path | None, module: str, function: str, name: str) -> Callable[[Any], Any]:
    """`make`; its file or module is executed once in a process."""
    if file is not None:
        return function_of(Source(file, function, name), "config")
    if not has(package := module.partition(".")[0]):
        what = f"Python finds no module {package}, expected one that is installed"
        remedy = f"name its file: {module.replace('.', '/')}.py:{function}"
        raise Refusal(what, where=name, remedy=remedy)
    with blamed_on(name, "import"):
        found = importlib.import_module(module)
    return named(found, function, "config", name, module)

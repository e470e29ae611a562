"""Llama inference on MLX with a candle-style KV cache, and the command that judges it against a torch oracle.

The public names are resolved when they are first used: importing this package loads neither MLX nor anything else of
weight, sets no environment variable and loads no library.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing's own would be a fifth of the time in which Python answers an interrupt with a traceback
if TYPE_CHECKING:
    from typing import Any

    from mlxkv import testing
    from mlxkv.port.cache import Cache, CacheError
    from mlxkv.port.config.llama import LlamaConfig
    from mlxkv.port.llama import Llama
    from mlxkv.port.weights import load

__all__ = ["Cache", "CacheError", "Llama", "LlamaConfig", "load", "testing"]

_HOMES = {
    "Cache": "cache",
    "CacheError": "cache",
    "Llama": "llama",
    "LlamaConfig": "config.llama",
    "load": "weights",
}


def __getattr__(name: str) -> Any:
    if name == "testing":
        return import_module("mlxkv.testing")
    if name not in _HOMES:
        raise AttributeError(f"module 'mlxkv' has no attribute {name!r}")
    return getattr(import_module(f"mlxkv.port.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

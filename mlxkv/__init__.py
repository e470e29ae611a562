"""Llama inference on MLX with a candle-style KV cache, and the command that judges it.

The judge is a torch oracle in a process of its own. The public names are resolved when they are
first used: importing this package loads neither MLX nor anything else of weight, sets no
environment variable and loads no library.
"""

# No `from __future__`: that is an import, and `python -m mlxkv` would make it from the working
# folder. typing's own TYPE_CHECKING would be a fifth of the time in which Python answers an
# interrupt with a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from mlxkv import testing
    from mlxkv.port.cache import Cache, CacheError
    from mlxkv.port.config.llama import LlamaConfig
    from mlxkv.port.llama import Llama
    from mlxkv.port.weights import load
    from oracle.formats.errors import Refusal

    __version__: str

__all__ = ["Cache", "CacheError", "Llama", "LlamaConfig", "Refusal", "load", "testing"]

_HOMES = {
    "Cache": "mlxkv.port.cache",
    "CacheError": "mlxkv.port.cache",
    "Llama": "mlxkv.port.llama",
    "LlamaConfig": "mlxkv.port.config.llama",
    "Refusal": "oracle.formats.errors",
    "load": "mlxkv.port.weights",
}


def __getattr__(name: str) -> "Any":
    if name == "__version__":
        from importlib.metadata import version

        return version("mlxkv")
    if name != "testing" and name not in _HOMES:
        raise AttributeError(f"module 'mlxkv' has no attribute {name!r}")
    from importlib import import_module

    require_oracle()
    if name == "testing":
        return import_module("mlxkv.testing")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> "list[str]":
    return sorted([*__all__, "__version__"])


def require_oracle() -> None:
    """Raises ImportError where the module `oracle` is not the one installed with this package.

    What is found instead is not executed.
    """
    from importlib.util import find_spec
    from os.path import dirname, realpath

    home, spec = dirname(dirname(realpath(__file__))), find_spec("oracle")
    found = spec.origin if spec is not None and spec.origin else "none"
    if dirname(dirname(realpath(found))) != home:
        raise ImportError(
            f"oracle: found {found}, expected the package installed beside mlxkv in {home}; "
            "rename that file or run from another place"
        )

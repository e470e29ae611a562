"""The CPU reference: torch and transformers follow a plan, a float64 forward says what is true."""

# No `from __future__`: that is an import, and `python -m oracle` would make it from the working
# folder. typing's own TYPE_CHECKING would be a fifth of the time in which Python answers an
# interrupt with a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from oracle.folder import run
    from oracle.formats import plan, trace
    from oracle.formats.plan import Plan
    from oracle.formats.trace import Trace

__all__ = ["Plan", "Trace", "plan", "run", "trace"]


def __getattr__(name: str) -> "Any":
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'oracle' has no attribute {name!r}")
    module = import_module("oracle.folder" if name == "run" else f"oracle.formats.{name.lower()}")
    return getattr(module, name, module)

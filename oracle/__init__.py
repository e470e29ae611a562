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
_HOME = {"Plan": "plan", "Trace": "trace", "plan": "plan", "trace": "trace"}


def __getattr__(name: str) -> "Any":
    """The public names, imported when they are first used."""
    from importlib import import_module

    if name == "run":
        return import_module("oracle.folder").run
    if name not in _HOME:
        raise AttributeError(f"module 'oracle' has no attribute {name!r}")
    module = import_module(f"oracle.formats.{_HOME[name]}")
    return module if name == _HOME[name] else getattr(module, name)

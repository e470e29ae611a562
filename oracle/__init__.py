"""The CPU reference: transformers follows a plan, a strict float64 forward says what is true."""

# No `from __future__`: that is an import, and `python -m oracle` would make it from the working
# folder. Python answers an interrupt during these imports with a traceback; importing typing for
# its own TYPE_CHECKING would make that time a fifth longer.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from oracle.folder import run
    from oracle.formats import plan, trace
    from oracle.formats.plan import Plan
    from oracle.formats.trace import Trace

__all__ = ["Plan", "Trace", "plan", "run", "trace"]
_HOMES = {"Plan": "formats.plan", "Trace": "formats.trace", "run": "folder"}
_MODULES = {"plan": "formats.plan", "trace": "formats.trace"}


def __getattr__(name: str) -> "Any":
    """The public names, imported when they are first used."""
    home = _HOMES.get(name) or _MODULES.get(name)
    if home is None:
        raise AttributeError(f"module 'oracle' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"oracle.{home}")
    return module if name in _MODULES else getattr(module, name)

"""The CPU reference: torch and transformers follow a plan, a float64 forward says what is true."""

# No `from __future__`: that is an import, and `python -m oracle` would make it from the working
# folder. typing's own TYPE_CHECKING would be a fifth of the time in which Python answers an
# interrupt with a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from oracle.folder import run
    from oracle.formats.plan import Plan
    from oracle.formats.trace import Trace

__all__ = ["Plan", "Trace", "run"]
_HOME = {"Plan": "oracle.formats.plan", "Trace": "oracle.formats.trace", "run": "oracle.folder"}


def __getattr__(name: str) -> "Any":
    """The public names, imported when they are first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'oracle' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)

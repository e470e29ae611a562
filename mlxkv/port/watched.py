"""What the port computes by, as its modules defined it.

A compiled step is the functions and classes that stood here when it was traced. Somebody who
replaces one of them afterwards (a test that plants a fault, a user who tries something) must get
what he asked for, and so a step that is not compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WATCHED: list[tuple[Any, dict[str, Any]]] = []
KINDS: set[type] = set()
"""The classes watched. An instance of any other class computes nobody knows what."""


def watch(*owners: Any) -> None:
    """Remembers what modules and classes hold now; a module calls it once it is complete."""
    _WATCHED.extend((owner, dict(vars(owner))) for owner in owners)
    KINDS.update(owner for owner in owners if isinstance(owner, type))


def unchanged() -> bool:
    """Whether all of them still hold what they held."""
    return all(_within(was, vars(owner)) for owner, was in _WATCHED)


def _within(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return was.items() <= now.items()

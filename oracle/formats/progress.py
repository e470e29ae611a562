"""How work says how far it is, and what a person should read meanwhile."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is in all."""
Note = Callable[[str], None]
"""Called with one line to read."""


def silent(*_: object) -> None:
    """Progress that nobody watches, or notes that nobody reads."""

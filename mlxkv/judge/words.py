"""Lists in plain English."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[object], last: str = "and") -> str:
    """As in "a", "a and b", "a, b and c"; `last` stands before the last one."""
    *before, end = map(str, names)
    return f"{', '.join(before)} {last} {end}" if before else end


def plans_of(names: Sequence[str]) -> str:
    """As in "plan full" and "plans full, step and chunked"."""
    return f"plan{'s' * (len(names) > 1)} {listed(names)}"

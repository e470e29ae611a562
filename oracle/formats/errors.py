"""How anything here ends that cannot go on."""

from __future__ import annotations


class Refusal(ValueError):
    """Input that cannot be used. The message is one line: where, what was expected, what was found, the remedy."""


class AlreadySaid(Exception):
    """A process of ours has refused and has said why on stderr."""

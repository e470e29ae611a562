"""How anything here ends that cannot go on, and how values and errors are put into its one line."""

from __future__ import annotations

from typing import Any


class Refusal(ValueError):
    """Input that cannot be used, told in one line: `where: what, expected X, got Y; remedy`.

    Raised with its parts, or with the whole line as `what`. `where` is the file or the option,
    `remedy` what the reader can do; str() is the line.
    """

    def __init__(self, what: str, *, where: object = "", remedy: str = "") -> None:
        self.where, self.what, self.remedy = str(where), what, remedy
        line = f"{self.where}: {what}" if self.where else what
        super().__init__(f"{line}; {remedy}" if remedy else line)


class Inexpressible(Refusal):
    """A step of a plan for which a system has no call, rather than one that it answers wrongly."""

    def __init__(self, what: str) -> None:
        super().__init__(what, where="cannot be expressed")


class AlreadySaid(Exception):
    """A process of ours has refused and has said why on stderr."""


def install(extra: str) -> str:
    """How an extra of this package is installed. Its name alone would not do: it is on no index."""
    return f"pip install -c constraints.txt '.[{extra}]' in a clone of the repository"


def brief(value: Any) -> str:
    """The repr of a value, as one line of at most 60 characters, for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def one_line(error: BaseException, most: int = 160) -> str:
    """An error's text as one line of at most `most` characters, or its type where it has none."""
    return " ".join(str(error).split())[:most] or type(error).__name__

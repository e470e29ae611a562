"""What both command lines read their options with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from oracle.formats.errors import Refusal

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


class Listed(click.ParamType):  # type: ignore[type-arg]
    """Values separated by commas: names, or whole numbers."""

    def __init__(self, kind: Callable[[str], Any]) -> None:
        self.name, self._kind = "n,n,..." if kind is int else "name,...", kind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """A tuple; a Refusal that names the option."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._kind(part) for part in str(value).split(","))
        except ValueError:
            what = f"{value!r}, expected whole numbers separated by commas"
            raise Refusal(what, where=param.opts[0] if param else "") from None


def option(name: str, what: str, *, into: str | None = None, **settings: Any) -> Option:
    """An option with its help, whose default, if it has one, is shown; `into` is its parameter."""
    names = [name] if into is None else [name, into]
    shown = settings.get("default") is not None
    return click.option(*names, help=what, show_default=shown, **settings)


def options(*several: Option) -> Option:
    """All of them as one."""

    def apply(function: Callable[..., Any]) -> Callable[..., Any]:
        for one in reversed(several):
            function = one(function)
        return function

    return apply

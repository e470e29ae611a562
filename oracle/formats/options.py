"""What both command lines read their options with."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from oracle.formats.errors import Refusal, brief

_WHOLE = re.compile(r"0|-?[1-9][0-9]*")
Option = Callable[[Callable[..., Any]], Callable[..., Any]]


def whole(text: str) -> int:
    """A whole number as JSON writes it; ValueError for what int() takes too: 1_0, +1, 01, " 1"."""
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


class Whole(click.IntRange):
    """A whole number, strictly read."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """An int; click's usage error where there is none, or none in the range."""
        try:
            value = whole(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return super().convert(value, param, ctx)


class Listed(click.ParamType):  # type: ignore[type-arg]
    """Values separated by commas: names, or whole numbers."""

    def __init__(self, kind: Callable[[str], Any]) -> None:
        self.name, self._kind = "n,n,..." if kind is whole else "name,...", kind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """A tuple; a Refusal that names the option."""
        if isinstance(value, tuple):
            return value
        made = []
        for i, part in enumerate(str(value).split(",")):
            try:
                made.append(self._kind(part))
            except ValueError:
                what = f"{brief(part)} at place {i}, expected whole numbers separated by commas"
                where = param.opts[0] if param else ""
                raise Refusal(what, where=where, remedy="write them as 1,2,3") from None
        return tuple(made)


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

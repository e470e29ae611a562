"""Progress on stderr, and only when a person is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from oracle.formats.progress import Progress


@contextmanager
def bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of steps done since it was last called."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda n: progress.advance(task, n)


def announce(what: str, seconds: float) -> None:
    """What is about to be done, and about how long it takes on two cores, for a person."""
    say(f"{what}: about {about(seconds)} on two cores")


def about(seconds: float) -> str:
    """A duration, roughly: "40 s", "8 min" or "3 h"."""
    if seconds >= 5400:
        return f"{round(seconds / 3600)} h"
    return (
        f"{max(1, round(seconds / 60))} min"
        if seconds >= 90
        else f"{max(1, round(seconds / 10)) * 10} s"
    )


def steps() -> Progress:
    """Progress that says each piece of work once, when it begins: a download, a conversion."""
    begun: list[str] = []

    def step(what: str, done: int, total: int) -> None:
        if what not in begun:
            begun.append(what)
            say(what)

    return step


def say(text: str) -> None:
    """One line about what happens now, for a person at a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)

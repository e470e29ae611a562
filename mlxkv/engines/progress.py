"""Progress on stderr, and only when a person is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of steps done since it was last called."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda n: progress.advance(task, n)


def announce(what: str, seconds: float) -> None:
    """What is about to be done, and about how long it takes on two cores, for a person."""
    minutes = max(1, round(seconds / 60))
    about = f"{minutes} min" if seconds >= 90 else f"{max(1, round(seconds / 10)) * 10} s"
    say(f"{what}: about {about} on two cores")


def say(text: str) -> None:
    """One line about what happens now, for a person at a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)

"""What of a run stays for the next one of the same command, and the line that says so."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

ANSWERS, RUNS, PROMPTS = "answer{} of the oracle", "run{} of the engine", "judged prompt{}"
_KEPT: Counter[str] = Counter()


def add(what: str, n: int) -> None:
    """So many of these lie in the cache folder from here on."""
    _KEPT[what] += n


@contextmanager
def told() -> Iterator[None]:
    """Says in one line on stderr what an interrupt within the block leaves to the next run."""
    _KEPT.clear()
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted: {_words()}", file=sys.stderr)
        raise SystemExit(130) from None  # click would write an empty line for the interrupt
    except SystemExit as ended:
        if ended.code == 143:  # SIGTERM
            print(f"interrupted: {_words()}", file=sys.stderr)
        raise


def _words() -> str:
    found = [f"{n} {what.format('s' * (n > 1))}" for what, n in _KEPT.items() if n]
    if not found:
        return "nothing was finished that is kept; the same command begins anew"
    verb = "is" if sum(_KEPT.values()) == 1 else "are"
    return f"{' and '.join(found)} {verb} kept; the same command goes on from there"

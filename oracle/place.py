"""Where a folder of the oracle's is made: it is there whole, or not at all."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from oracle.formats.disk import own_folder, writing
from oracle.formats.errors import Refusal
from oracle.formats.run_folder import PROBE


@contextmanager
def whole(out: Path, *, ours: Collection[str], force: bool) -> Iterator[Path]:
    """An empty folder beside `out`: takes its place if the block succeeds, else is removed.

    The block may remove it itself: then nothing takes the place of `out`. `ours` and `force` are
    as in `check`.
    """
    with ExitStack() as stack:
        with writing(out):
            part, old = (
                stack.enter_context(own_folder(out.parent, prefix=f".{out.name}.", suffix=suffix))
                for suffix in (".part", ".old")
            )
        yield part
        if part.exists():
            check(out, ours=ours, force=force)
            _replace(part, out, old / "old")


def _replace(part: Path, out: Path, old: Path) -> None:
    try:
        with writing(out):
            if out.exists():
                out.rename(old)
            part.rename(out)
    finally:
        if old.exists() and not out.exists():
            old.rename(out)


def check(out: Path, *, ours: Collection[str], force: bool) -> None:
    """Refuses a place that cannot be written, or that holds what the oracle did not make.

    `ours` are patterns of the names that the oracle gives files there, and in a probe in it;
    `force` allows that they are there already.
    """
    another = "choose another"
    above = next((path for path in out.parents if os.path.lexists(path)), None)
    if above is None:
        what = "the root of the file system, expected a new folder"
        raise Refusal(what, where=out, remedy=another)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = f"cannot be written, as {above} is {'read-only' if above.is_dir() else 'no folder'}"
        raise Refusal(what, where=out, remedy=f"{another} folder")
    if not os.path.isdir(out):
        if os.path.lexists(out):
            raise Refusal("exists and is no folder, expected a new one", where=out, remedy=another)
        return
    names = sorted(path.name for path in [*out.iterdir(), *(out / PROBE).glob("*")])
    for name in names:
        if not any(fnmatch.fnmatch(name, pattern) for pattern in ours):
            what = f"holds {name}, expected a new folder or one that the oracle made"
            raise Refusal(what, where=out, remedy=another)
    if names and not force:
        remedy = f"replace them with --force or {another} folder"
        raise Refusal("holds the oracle's files already", where=out, remedy=remedy)

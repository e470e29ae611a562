"""The user's cache folder: what is kept from one run to the next, such as converted models."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from oracle.formats.disk import held, own_folder
from oracle.formats.errors import Refusal

_HELD: dict[str, tuple[Path, int]] = {}
"""The folders within the cache folder that this process uses, and the handles that say so."""
_ENTRIES: dict[Path, int] = {}
"""The entries of those folders that this process uses, and the handles that say so."""
_ONE_AT_A_TIME = threading.Lock()  # two threads must not close one handle twice


def cache_dir() -> Path:
    """MLXKV_CACHE, or the user's cache folder for mlxkv."""
    named = os.environ.get("MLXKV_CACHE")
    if named:
        return Path(named).expanduser()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("mlxkv"))


def part(name: str) -> Path:
    """A folder within the cache folder, made if it is missing."""
    folder = cache_dir() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def in_use(name: str) -> Path:
    """`part`; what is half written in it `mlxkv store clear` leaves alone until this process ends.

    What is whole there is left alone where it is `hold`.
    """
    folder = part(name)
    with _ONE_AT_A_TIME:
        before, handle = _HELD.get(name, (None, -1))
        if before != folder:
            try:
                _HELD[name] = folder, held(folder)
            except OSError as error:
                raise _unwritable(folder, error) from error
            if before is not None:
                os.close(handle)
    return folder


def hold(path: Path) -> None:
    """Keeps `mlxkv store clear` from an entry, if it is there, until this process ends."""
    with _ONE_AT_A_TIME, suppress(OSError):
        before = _ENTRIES.get(path)
        if before is not None and os.path.samestat(os.fstat(before), path.stat()):
            return
        _ENTRIES[path] = held(path)
        if before is not None:
            os.close(before)


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of a converted model. If it is missing, `make` fills it, beside it until whole."""
    models = part("models")
    folder = models / name
    hold(folder)
    if folder.is_dir():
        return folder
    try:
        with own_folder(models, prefix=f".{name}.") as scratch:
            made = scratch / "model"
            made.mkdir()
            make(made)
            made.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was first, and made the same bytes
            raise _unwritable(folder, error) from error
    hold(folder)
    return folder


def _unwritable(folder: Path, error: OSError) -> Refusal:
    return Refusal(
        f"cannot be written ({error.strerror or error})",
        where=folder,
        remedy="name another cache folder in MLXKV_CACHE or free some space",
    )

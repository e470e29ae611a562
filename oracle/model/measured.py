"""How long work took here compared with its estimate, kept in the cache folder for the next one.

An estimate counts what is to be done by constants of one machine. What the last such work took on
this one, over its own estimate, corrects it.
"""

from __future__ import annotations

import math
from contextlib import suppress

from oracle.formats import disk, strict_json
from oracle.formats.errors import Refusal
from oracle.model.cache_folder import cache_dir

LEAST = 5.0
"""Seconds that work must take to say anything of a speed: less is mostly imports."""
_FILE = "measured.json"
_FORMAT = "mlxkv-measured/1"


def key(*parts: object, parameters: int) -> str:
    """Under what the speed of work on a model is remembered: what it is, and the model's size by
    powers of four, as small models are slow for theirs.
    """
    size = round(math.log(max(1, parameters), 4))
    return " ".join(map(str, (*parts, f"4^{size}")))


def corrected(key: str, seconds: float) -> float:
    """The estimate times what the last work of this key took over its estimate."""
    return seconds * _read().get(key, 1.0)


def known(key: str) -> bool:
    """Whether such work was measured here."""
    return key in _read()


def remember(key: str, estimate: float, seconds: float) -> None:
    """Keeps that work of this estimate took so many seconds; a cache that cannot be written does
    not stop anybody.
    """
    if seconds < LEAST or not estimate > 0:
        return
    value = {"format": _FORMAT, "ratios": _read() | {key: round(seconds / estimate, 3)}}
    with suppress(Refusal, OSError):
        disk.write_text(cache_dir() / _FILE, strict_json.encode(value) + "\n")


def _read() -> dict[str, float]:
    """Ratios by key; none where the file is missing or no such file."""
    path = cache_dir() / _FILE
    with suppress(Refusal):
        given = strict_json.of_format(
            strict_json.read(path, remedy=""), _FORMAT, where=path, remedy=""
        )
        ratios = strict_json.typed(given.get("ratios"), dict[str, float], where=path, remedy="")
        return {key: of for key, of in ratios.items() if 0 < of < math.inf}
    return {}

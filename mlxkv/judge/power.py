"""Which known faults the run in half precision lets pass, as `mlxkv selftest` measured it.

The noise of a coarse dtype hides more, so what lane A (the port in float64) finds, lane B (the run
in its own dtype) may not. The measurement is a file of the package, `power.json`: by dtype the
limits that it was made with, and for each model the faults tried and those unseen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle.formats import strict_json
from oracle.formats.disk import write_text

FORMAT = "mlxkv-power/1"
MEASURED = Path(__file__).with_name("power.json")


@dataclass(frozen=True, slots=True)
class _File:
    dtypes: dict[str, Any]


def read(path: Path = MEASURED) -> dict[str, Any]:
    """The measurements by dtype; a Refusal where the file is not one."""
    remedy = "make it with `mlxkv selftest --power`"
    value = strict_json.read(path, remedy=remedy)
    given = strict_json.of_format(value, FORMAT, where=path, remedy=remedy)
    return strict_json.typed(given, _File, where=path, remedy=remedy).dtypes


def write(
    path: Path, dtype: str, models: Mapping[str, Mapping[str, Any]], *, limits: Mapping[str, float]
) -> None:
    """Puts one dtype's measurement into the file, beside those of the others.

    `models` have a `fingerprint`, the number of `faults` and the names of those `unseen`.
    """
    dtypes = read(path) if path.exists() else {}
    dtypes[dtype] = {"limits": dict(limits), "models": models}
    value = {"format": FORMAT, "dtypes": dtypes}
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)
    write_text(path, f"{text}\n")


def note(measured: Mapping[str, Any], dtype: str, limits: Mapping[str, float]) -> str | None:
    """What lane B lets pass in this dtype, in one line; None in float32, where the limits hold."""
    if dtype == "float32":
        return None
    how = f"`mlxkv selftest --dtype {dtype} --power FILE` measures it"
    if dtype not in measured:
        return f"how many faults lane B lets pass in {dtype} was not measured; {how}"
    then, models = measured[dtype]["limits"], measured[dtype]["models"]
    names = list(dict.fromkeys(name for model in models.values() for name in model["unseen"]))
    always = [name for name in names if all(name in model["unseen"] for model in models.values())]
    sometimes = [name for name in names if name not in always]
    tried = max(model["faults"] for model in models.values())
    parts = [f"on every model: {', '.join(always)}"] if always else []
    parts += [f"on some: {', '.join(sometimes)}"] if sometimes else []
    changed = [
        name for name in sorted(set(then) | set(limits)) if then.get(name) != limits.get(name)
    ]
    where = "; ".join([*parts, "measured on " + ", ".join(models)])
    line = f"in {dtype} lane B alone lets {len(names)} of {tried} seeded faults pass ({where})"
    old = f"; out of date: measured with other limits ({', '.join(changed)}), {how}"
    return line + (old if changed else "")

"""Many questions to the oracle about one model, in one JSON file; and what they would take.

mlxkv writes the file, `mlxkv-oracle many` reads it. Text stands in it, since an argument has a
limit that a long prompt exceeds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from oracle.formats import strict_json
from oracle.formats.disk import write_text
from oracle.formats.plan import Plan, Whole

_FORMAT, _ESTIMATE = "mlxkv-questions/1", "mlxkv-estimate/1"
_REMEDY = "write it again with this version"


class One(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One question and the folder `out` for its answer; a path that is not absolute begins where
    the oracle runs.

    A `prompt` of text, or `tokens`, of which the first `prompt_tokens` are the prompt; as in
    `run_folder.Inputs`. `probe` asks for the model's probe, and the rest for nothing.
    """

    out: str
    prompt: str | None = None
    tokens: tuple[Whole, ...] | None = None
    prompt_tokens: Whole | None = None
    steps: Whole = 0
    chunks: tuple[Whole, ...] | None = None
    taps: tuple[str, ...] = ("hidden",)
    all_rows: bool = False
    probe: bool = False


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The model, as a person named it, how to compute, and the questions."""

    model: str
    dtype: str
    threads: Whole
    questions: Annotated[tuple[One, ...], msgspec.Meta(min_length=1)]
    revision: str | None = None
    ignore_keys: tuple[str, ...] = ()


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """About what answers would take: seconds, bytes of memory that no file's are, and bytes of
    disk, of which `converted_bytes` are weights in the run's dtype.

    `plans` are those of each question, in their order; where greedy tokens will stand, 0 stands.
    `measured` says that the last run on this machine corrected the seconds.
    """

    seconds: float
    memory_bytes: int
    disk_bytes: int
    converted_bytes: int
    measured: bool
    plans: list[list[Plan]]


def write(path: Path, asked: Asked) -> None:
    write_text(path, strict_json.encode({"format": _FORMAT, **msgspec.to_builtins(asked)}) + "\n")


def read(path: Path) -> Asked:
    value = strict_json.read(path, remedy=_REMEDY)
    given = strict_json.of_format(value, _FORMAT, where=path, remedy=_REMEDY)
    return strict_json.typed(given, Asked, where=path, remedy=_REMEDY)


def refusal(out: Path, error: Exception) -> str:
    """The line that says why there is no answer in the folder `out`."""
    return f"refused {out}: {' '.join(str(error).split())}"


def read_refusals(path: Path, folders: Iterable[Path]) -> dict[Path, str]:
    """Why there are no answers in some of the folders, by the lines that the oracle printed."""
    lines = path.read_text(encoding="utf-8").splitlines()
    begins = {folder: f"refused {folder}: " for folder in folders}
    return {
        folder: line.removeprefix(begin)
        for folder, begin in begins.items()
        for line in lines
        if line.startswith(begin)
    }


def estimate_json(estimate: Estimate) -> str:
    """The estimate as one line of JSON."""
    value = msgspec.structs.asdict(estimate)
    value["plans"] = [[plan.to_json() for plan in some] for some in estimate.plans]
    return strict_json.encode({"format": _ESTIMATE, **value})


def read_estimate(path: Path) -> Estimate:
    value = strict_json.of_format(
        strict_json.read(path, remedy=_REMEDY), _ESTIMATE, where=path, remedy=_REMEDY
    )
    for some in value["plans"]:
        for plan in some:
            del plan["format"]
    return strict_json.typed(value, Estimate, where=path, remedy=_REMEDY)

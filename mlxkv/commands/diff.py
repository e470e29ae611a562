"""Do two reports say the same? Outcomes, passes and tokens exactly, numbers within a factor.

The JSON files are compared. Markdown and pictures are made from the same values alone, and how wide
a column is depends on which plan happened to be the worst, so of them only the presence is asked.

What may move freely: where a value was worst, the surroundings, and figures that only restate a
distance on another scale. On another CPU, or where torch or the BLAS chose kernels for other
instructions, sums are made in another order, and numbers may differ by more than the factor: that
is said, and is no difference between the reports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxkv.report.text import clip

FACTOR = 2.0
FREE = {"environment", "position", "token", "layer", "head", "headroom", "worst"}
FREE |= {"nmse_db", "cosine", "kl"}
WORST_PLAN = {
    "mlxkv-calibrate/1": {"run", "plan"},
    "mlxkv-prompts/1": {"plan"},
    "mlxkv-scale/1": {"plan", "cold", "warm", "ran", "measured", "truth", "sources", "machine"},
    "mlxkv-bench/2": {"busy", "copy", "warnings", "seconds", "peak", "speed", "bandwidth", "ratio"}
    | {"ratios", "spread"},
    "mlxkv-cost/1": {"prefill_speed", "decode_speed", "errors", "apart", "mean_dp", "rates"},
}
"""By format what names the run or plan in which a value was worst (elsewhere `plan` names a row);
of speeds all but what was timed and what a GPU would run; of costs the speeds, and what lies about
0; at scale times and peaks, as it stands beside each bar whether it is met, and what float64's own
rounding makes."""
COUNTS = {"top1_equal", "top5_equal", "distinct_members", "peak", "decisive_flips"}
"""Whole numbers that rounding decides, or what MLX needs in passing."""
WORDS = {"gate", "tap", "hint", "notes"}
"""Words that follow from numbers; whether a run agreed or a trial passed stands beside them."""
LIMITS = {"limit", "limits"}
CPU = ("cpu", "host", "cpu_capability", "blas_kernel")
"""What of an environment names the CPU and the kernels chosen for it."""


Difference = tuple[str, bool]
"""Where two values of a file differ and how; and whether another CPU may account for it."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found: the `differences`, and a line on each file that another CPU made."""

    differences: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 when nothing differs, else 1."""
        return 1 if self.differences else 0

    @property
    def lines(self) -> tuple[str, ...]:
        return (*self.differences, *self.remarks)


def folders(committed: Path, fresh: Path, names: Sequence[Path]) -> Checked:
    """The files `names` of two folders."""
    differences, remarks = [], []
    for name in names:
        if not (committed / name).is_file():
            remedy = "expected it as just made; run `mlxkv reports`"
            differences.append(f"{name}: missing, {remedy}")
        elif name.suffix == ".json":
            found = files(_load(committed / name), json.loads((fresh / name).read_bytes()))
            differences += [f"{name}{line}" for line in found.differences]
            remarks += [f"{name}{line}" for line in found.remarks]
    return Checked(tuple(differences), tuple(remarks))


def files(old: Any, new: Any) -> Checked:
    """Two decoded JSON files, of which `old` is the committed one."""
    named = new.get("format") if isinstance(new, dict) else None
    found = list(_values(old, new, "", FREE | WORST_PLAN.get(str(named), set())))
    cpu = another_cpu(old, new)
    if cpu is None:
        return Checked(tuple(line for line, _ in found))
    moved = [line for line, arithmetic in found if arithmetic]
    rest = tuple(line for line, arithmetic in found if not arithmetic)
    more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
    return Checked(rest, (f": another CPU ({cpu}): {moved[0]}{more}",) if moved else ())


def another_cpu(old: Any, new: Any) -> str | None:
    """How the CPUs that made two files differ, in words; None where nothing is known to differ.

    Older files do not name the instructions or the BLAS's kernels, which then count as unknown.
    """
    before, now = _hosts(old), _hosts(new)
    for who, key in before:
        if (who, key) in now and before[who, key] != now[who, key]:
            return f"{key} of {who} {before[who, key]} committed, {now[who, key]} now"
    return None


def _hosts(value: Any) -> dict[tuple[str, str], Any]:
    """What a file says of the CPU, by engine and the name in its environment."""
    sides = value.get("environment") if isinstance(value, dict) else None
    named = sides.items() if isinstance(sides, dict) else ()
    known = [(who, side) for who, side in named if isinstance(side, dict)]
    return {(who, key): side[key] for who, side in known for key in CPU if key in side}


def _values(old: Any, new: Any, where: str, free: set[str], key: str = "") -> Iterator[Difference]:
    """The differences at and below `where`; `key` is the nearest name that says what may move."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted((set(old) | set(new)) - free):
            place = f"{where}.{name}"
            if name in old and name in new:
                known = name if name in LIMITS | COUNTS | WORDS else key
                yield from _values(old[name], new[name], place, free, known)
            else:
                yield f"{place}: only in the {'committed' if name in old else 'new'} file", False
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _values(a, b, f"{where}[{i}]", free, key)
    elif isinstance(old, float) and isinstance(new, float):
        if not _near(old, new):
            words = f"{old:.3g} committed, {new:.3g} now, more than a factor of {FACTOR:g} apart"
            yield f"{where}: {words}", key not in LIMITS
    elif type(old) is not type(new) or old != new:
        yield f"{where}: {_brief(old)} committed, {_brief(new)} now", key in COUNTS | WORDS


def _near(old: float, new: float) -> bool:
    return old == new or (old * new > 0 and 1 / FACTOR <= new / old <= FACTOR)


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return f"unreadable file {path.name}"


def _brief(value: Any) -> str:
    return clip(value if isinstance(value, str) else json.dumps(value), 100)

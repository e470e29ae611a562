"""Everything under reports/: its parts, the index, and whether it still says the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxkv.commands import diff as recheck
from mlxkv.commands.compare import many as prompting
from mlxkv.commands.compare import page, prompts
from mlxkv.commands.compare import run as comparing
from mlxkv.commands.compare.ask import Request
from mlxkv.commands.compare.page import Compared
from mlxkv.commands.pitfalls import run as pitfalls
from mlxkv.commands.selftest import calibrate as calibrating
from mlxkv.commands.selftest import run as selftesting
from mlxkv.engines import process
from mlxkv.engines.progress import say
from mlxkv.report import publish
from oracle.formats import disk, trace
from oracle.formats.errors import Refusal

COMMAND = "mlxkv reports"


@dataclass(frozen=True, slots=True)
class Made:
    """One part's files, and the model and machine whose folder they belong to."""

    model: str
    environment: dict[str, Any]
    files: dict[str, str]

    @property
    def folder(self) -> Path:
        """`model/system-architecture-device`."""
        system = str(self.environment.get("os", "unknown")).split()[0].lower()
        return Path(
            self.model,
            f"{system}-{self.environment.get('arch', 'unknown')}-{self.environment.get('device', 'unknown')}",
        )


def _compare(device: str, third: Sequence[trace.Trace]) -> Made:
    with comparing.run([Request(device=device)]) as (runs,):
        return _of(comparing.judged(runs, third), "", "mlxkv compare", "compare")


def _prompts(device: str, third: Sequence[trace.Trace]) -> Made:
    commands = ["mlxkv compare --prompts builtin", f"{COMMAND} --only prompts"]
    overview = prompting.compare(Request(device=device), prompts.builtin())
    runs, files = overview.first.runs, overview.files(commands=commands)
    files = {f"prompts/{name}": text for name, text in files.items()}
    return Made(runs.case.manifest.name, runs.environment, files)


def _long(device: str, third: Sequence[trace.Trace]) -> Made:
    return _of(prompting.long(Request(device=device)), "long/", "long")


def _pitfalls(device: str, third: Sequence[trace.Trace]) -> Made:
    matrix = pitfalls.run(pitfalls.Request(device=device))
    files = pitfalls.matrix_files(matrix, commands=["mlxkv pitfalls", f"{COMMAND} --only pitfalls"])
    return Made(matrix.checkpoint.name, matrix.environments["G"], files)


def _selftest(device: str, third: Sequence[trace.Trace]) -> Made:
    result = selftesting.run(selftesting.Request())
    files = selftesting.selftest_files(
        result, commands=["mlxkv selftest", f"{COMMAND} --only selftest"]
    )
    return Made(next(iter(result.models)), result.environment, files)


def _calibration(device: str, third: Sequence[trace.Trace]) -> Made:
    result = calibrating.run(calibrating.Request())
    files = calibrating.calibration_files(
        result, commands=["mlxkv calibrate", f"{COMMAND} --only calibration"]
    )
    return Made(next(iter(result.models)), result.environment, files)


def _of(compared: Compared, place: str, *commands: str) -> Made:
    *typed, part = commands
    files = page.files(compared, commands=[*typed, f"{COMMAND} --only {part}"])
    files = {f"{place}{name}": text for name, text in files.items()}
    return Made(compared.runs.case.manifest.name, compared.runs.environment, files)


PARTS: dict[str, Callable[[str, Sequence[trace.Trace]], Made]] = {
    "compare": _compare,
    "pitfalls": _pitfalls,
    "prompts": _prompts,
    "long": _long,
    "selftest": _selftest,
    "calibration": _calibration,
}
"""The last two always run on the CPU, where the limits were chosen."""


def write(
    out: Path, *, only: Collection[str] = (), candidates: Sequence[Path] = (), device: str = "auto"
) -> Iterator[Path]:
    """Makes all parts, or `only` some, and the index: each file's path when it is there, part after part."""
    if candidates and only and "compare" not in only:
        raise Refusal(
            f"--candidate with --only {' --only '.join(only)}: expected the part compare among them, the only one that shows it"
        )
    publish.claim(out)
    third = [trace.read(path) for path in candidates]
    for part, make in PARTS.items():
        if only and part not in only:
            continue
        say(f"reports: {part}")
        made = make(device, third)
        for name, content in made.files.items():
            disk.write_text(out / made.folder / name, content)
            yield out / made.folder / name
    disk.write_text(out / "README.md", index(out))
    yield out / "README.md"


def check(out: Path, *, only: Collection[str] = (), device: str = "auto") -> list[str]:
    """Makes the reports again in a scratch folder: the differences, one line each; none when they still say the same."""
    if not list(out.glob("*/*/*.json")):
        raise Refusal(
            f"{out}: no reports, so there is nothing to check; make them with `{COMMAND}` and commit them"
        )
    with process.scratch() as room:
        made = sorted(path.relative_to(room) for path in write(room, only=only, device=device))
        machine = next(path.parts[1] for path in made if len(path.parts) > 2)
        if not list(out.glob(f"*/{machine}/*.json")):
            raise Refusal(
                f"{out}: no reports for {machine}, so there is nothing to check; make them with `{COMMAND}` and commit them"
            )
        # The index of some parts is not that of all.
        return recheck.folders(
            out, room, [path for path in made if not only or len(path.parts) > 1]
        )


def index(out: Path) -> str:
    """The table of all reports below `out`."""
    rows = []
    for path in sorted([*out.glob("*/*/*.json"), *out.glob("*/*/*/compare.json")]):
        link = path.with_suffix(".md").relative_to(out)
        name = link.stem if len(link.parts) == 3 else f"{link.stem}, {link.parts[2]}"
        rows.append(
            f"| [{name}]({link}) | {link.parts[0]} | {link.parts[1]} | {_said(_read_json(path))} |"
        )
    head = [
        "# Reports",
        "",
        f"Each was measured by `{COMMAND}` on the machine that it names; `{COMMAND} --check` does it again.",
        "",
    ]
    return (
        "\n".join([*head, "| report | model | machine | result |", "|:--|:--|:--|:--|", *rows])
        + "\n"
    )


def _said(value: Any) -> str:
    if "trials" in value:
        trials = [t for some in value["trials"].values() for t in some]
        return f"{sum(not t['passed'] for t in trials)} of {len(trials)} runs judged wrongly"
    if "readings" in value:
        return (
            "every correct run within every limit"
            if value["exit_code"] == 0
            else "a correct run is beyond a limit"
        )
    if "surprises" in value:
        return (
            f"{len(value['surprises'])} systems not as documented"
            if value["surprises"]
            else "all as documented"
        )
    scopes = f" ({', '.join(value['scopes'])})" if value["outcome"] == "agree" else ""
    return f"{value['outcome']}{scopes}"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Refusal(
            f"{path}: cannot be read ({' '.join(str(error).split())}); restore it or make the reports again"
        ) from error

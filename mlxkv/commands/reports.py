"""`mlxkv reports`: everything under reports/, its index, and whether it still says the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxkv.commands import diff
from mlxkv.commands.bench import run as bench
from mlxkv.commands.bench.ask import Request as Timed
from mlxkv.commands.compare import many, page, prompts
from mlxkv.commands.compare import run as comparing
from mlxkv.commands.compare.ask import Request
from mlxkv.commands.compare.page import Compared
from mlxkv.commands.cost import run as cost
from mlxkv.commands.cost.ask import Request as Measurements
from mlxkv.commands.pitfalls import conform
from mlxkv.commands.pitfalls import run as pitfalls
from mlxkv.commands.scale import cases
from mlxkv.commands.scale import run as scale
from mlxkv.commands.scale.result import Result as Scaled
from mlxkv.commands.selftest import calibrate
from mlxkv.commands.selftest import run as selftest
from mlxkv.engines import process
from mlxkv.engines.progress import announce, say
from mlxkv.report import publish
from mlxkv.report.text import several
from oracle.formats import disk, strict_json, trace
from oracle.formats.errors import Refusal

COMMAND = "mlxkv reports"
BENCH, SCALE = "bench", "scale"
NAMED = (BENCH, SCALE)
"""The parts that are made only when they are named: the first wants a quiet machine, the other
takes hours, and tens of gigabytes of disk."""


@dataclass(frozen=True, slots=True)
class Made:
    """One part's files, and the model and machine whose folder they belong to."""

    model: str
    environment: Mapping[str, Any]
    files: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """The model's, and in it the machine's."""
        return Path(self.model, machine_of(self.environment))


def machine_of(environment: Mapping[str, Any]) -> str:
    """`system-architecture-device`."""
    names = ("os", "arch", "device")
    system, arch, device = (str(environment.get(name, "unknown")) for name in names)
    return f"{system.split()[0].lower()}-{arch}-{device}"


def _compare(device: str, third: Sequence[trace.Trace]) -> Made:
    commands = ["mlxkv compare", f"{COMMAND} --only compare"]
    with comparing.run([Request(device=device)]) as (runs,):
        return _compared(comparing.judged(runs, third), "", commands)


def _long(device: str, _: Sequence[trace.Trace]) -> Made:
    return _compared(many.long(Request(device=device)), "long/", [f"{COMMAND} --only long"])


def _compared(compared: Compared, place: str, commands: Sequence[str]) -> Made:
    files = page.files(compared, commands=commands).items()
    runs, named = compared.runs, {f"{place}{name}": text for name, text in files}
    return Made(runs.case.manifest.name, runs.environment, named)


def _prompts(device: str, _: Sequence[trace.Trace]) -> Made:
    commands = ["mlxkv compare --prompts builtin", f"{COMMAND} --only prompts"]
    request = Request(device=device)
    overview = many.compare(request, prompts.builtin(), commands=commands)
    first, files = overview.first, overview.files(commands=commands).items()
    named = {f"prompts/{name}": text for name, text in files}
    return Made(first.model, first.environments[request.engine], named)


def _pitfalls(device: str, _: Sequence[trace.Trace]) -> Made:
    matrix = pitfalls.run(pitfalls.Request(device=device))
    files = pitfalls.matrix_files(matrix, commands=["mlxkv pitfalls", f"{COMMAND} --only pitfalls"])
    return Made(matrix.model, matrix.environments["G"], files)


def _caches(device: str, _: Sequence[trace.Trace]) -> Made:
    caches = conform.tried(conform.CacheRequest(caches=(conform.ALL,), device=device))
    commands = ["mlxkv pitfalls --cache all", f"{COMMAND} --only caches"]
    return Made(caches.model, caches.environment, conform.cache_files(caches, commands=commands))


def _cost(device: str, _: Sequence[trace.Trace]) -> Made:
    done = cost.run(Measurements(device=device))
    files = cost.files(done, commands=["mlxkv cost", f"{COMMAND} --only cost"])
    return Made(done.model, done.environment["mlx-lm"], files)


def _selftest(_: str, __: Sequence[trace.Trace]) -> Made:
    done = selftest.run(selftest.Request())
    files = selftest.selftest_files(done, commands=["mlxkv selftest", f"{COMMAND} --only selftest"])
    return Made(next(iter(done.models)), done.environment, files)


def _calibration(_: str, __: Sequence[trace.Trace]) -> Made:
    done = calibrate.run(calibrate.Request())
    commands = ["mlxkv calibrate", f"{COMMAND} --only calibration"]
    files = calibrate.calibration_files(done, commands=commands)
    return Made(next(iter(done.models)), done.environment, files)


def _bench(device: str, _: Sequence[trace.Trace]) -> Made:
    done = bench.run(Timed(device=device, full=True))
    commands = ["mlxkv bench --full", f"{COMMAND} --only {BENCH}"]
    return Made(done.model, done.environment, bench.files(done, commands=commands))


PARTS: dict[str, Callable[[str, Sequence[trace.Trace]], Made]] = {
    "compare": _compare,
    "pitfalls": _pitfalls,
    "caches": _caches,
    "prompts": _prompts,
    "long": _long,
    "cost": _cost,
    "selftest": _selftest,
    "calibration": _calibration,
    BENCH: _bench,
}
"""Each part made on a device, compare with the traces of a third engine beside it. selftest and
calibration always run on the CPU, where the limits were chosen."""

SECONDS = {
    "compare": 40,
    "pitfalls": 140,
    "caches": 420,
    "prompts": 160,
    "long": 800,
    "cost": 540,
    "selftest": 260,
    "calibration": 650,
    BENCH: 3600,
    SCALE: sum(case.estimate for case in cases.everything().values()),
}
"""About what each part takes on two cores, by the CPU time of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Which `cases` of the part scale (none: all), the folder `room` that they are made in (None:
    one in the cache folder), and whether they `keep` what they made there.
    """

    cases: tuple[str, ...] = ()
    room: Path | None = None
    keep: bool = False

    def require_named(self, only: Collection[str]) -> None:
        """Refuses options of a part that is not made."""
        given = {"--case": self.cases, "--room": self.room, "--keep": self.keep}
        names = [name for name, value in given.items() if value]
        if names and SCALE not in only:
            raise Refusal(f"{' and '.join(names)}: expected --only {SCALE} beside; add it")


def write(
    out: Path,
    *,
    only: Collection[str] = (),
    candidates: Sequence[Path] = (),
    device: str = "auto",
    at: Scale = Scale(),
) -> Iterator[Path]:
    """Makes all parts but NAMED, or `only` some, and the index: each file's path when it is there.

    `at` is for the part scale.
    """
    at.require_named(only)
    if candidates and only and "compare" not in only:
        raise Refusal(
            f"--candidate with --only {' --only '.join(only)}: expected the part compare among "
            "them, the only one that shows it"
        )
    publish.claim(out)
    third = [trace.read(path) for path in candidates]
    parts = [part for part in PARTS if (part in only if only else part not in NAMED)]
    if parts:
        announce(f"reports: {', '.join(parts)}", sum(SECONDS[part] for part in parts))
    for part in () if only else NAMED:
        takes = several(round(SECONDS[part] / 3600), "hour")
        left = f"reports: without {part}, which takes {takes}: `{COMMAND} --only {part}`"
        print(left, file=sys.stderr)
    for part in parts:
        say(f"reports: {part}")
        made = PARTS[part](device, third)
        publish.write(out / made.folder, made.files)
        yield from (out / made.folder / name for name in made.files)
    if SCALE in only:
        yield from scale.write(out / SCALE, at.cases, device=device, room=at.room, keep=at.keep)
    disk.write_text(out / "README.md", index(out))
    yield out / "README.md"


def check(
    out: Path, *, only: Collection[str] = (), device: str = "auto", at: Scale = Scale()
) -> diff.Checked:
    """Makes the reports again in a scratch folder and compares them with those in `out`."""
    remedy = f"so there is nothing to check; make them with `{COMMAND}` and commit them"
    if not [*out.glob("*/*/*.json"), *out.glob(f"{SCALE}/*.json")]:
        raise Refusal(f"{out}: no reports, {remedy}")
    with process.scratch() as room:
        files = write(room, only=only, device=device, at=at)
        made = sorted({path.relative_to(room) for path in files})
        reports = [path for path in made if len(path.parts) > 1]
        for machine in {path.parts[1] for path in reports if path.parts[0] != SCALE}:
            if not list(out.glob(f"*/{machine}/*.json")):
                raise Refusal(f"{out}: no reports for {machine}, {remedy}")
        found = diff.folders(out, room, reports)
    return diff.Checked((*found.differences, *_index_differences(out)), found.remarks)


def _index_differences(out: Path) -> list[str]:
    """Whether the committed index is the one that the committed reports make."""
    path = out / "README.md"
    try:
        if path.read_bytes() == index(out).encode():
            return []
        why = "not the index of the reports beside it"
    except (OSError, Refusal, KeyError, TypeError) as error:
        why = f"cannot be compared ({type(error).__name__}: {error})"
    return [f"README.md: {why}; run `{COMMAND}`"]


def index(out: Path) -> str:
    rows = []
    for path in sorted([*out.glob("*/*/*.json"), *out.glob("*/*/*/compare.json")]):
        link = path.with_suffix(".md").relative_to(out)
        name = link.stem if len(link.parts) == 3 else f"{link.stem}, {link.parts[2]}"
        value = strict_json.read(path, remedy="restore it or make the reports again")
        model, machine, result = *link.parts[:2], _result(value)
        rows.append(f"| [{name}]({link}) | {model} | {machine} | {result} |")
    rows += [_of_scale(one) for one in scale.found(out / SCALE)]
    head = [
        "# Reports",
        "",
        f"Each was measured by `{COMMAND}` on the machine that it names; "
        f"`{COMMAND} --check` does it again.",
        "",
        "| report | model | machine | result |",
        "|:--|:--|:--|:--|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def _of_scale(one: Scaled) -> str:
    """A case's row: of its bars how many are met."""
    machine = machine_of(one.environment["port"])
    met = f"{one.outcome}, {sum(bar.met is True for bar in one.bars)} of {len(one.bars)} bars met"
    link = f"{SCALE}/{scale.PAGE}#{one.case}"
    return f"| [{SCALE}, {one.case}]({link}) | {one.model.made} | {machine} | {met} |"


def _result(value: Any) -> str:
    if "cells" in value:
        ahead = sum(cell["ratio"] >= 1 for cell in value["cells"])
        return f"as fast as mlx-lm or faster in {ahead} of {several(len(value['cells']), 'cell')}"
    if "trials" in value:
        trials = [t for some in value["trials"].values() for t in some]
        return f"{sum(not t['passed'] for t in trials)} of {len(trials)} runs judged wrongly"
    if "readings" in value:
        beyond = value["exit_code"] != 0
        return (
            "a correct run is beyond a limit" if beyond else "every correct run within every limit"
        )
    if "measured" in value:
        away = sum(bool(one.get("known")) and not one["known"]["met"] for one in value["measured"])
        return f"{several(away, 'cache')} away from a known answer"
    if "caches" in value:
        lives = [life for one in value["caches"] for life in one["lives"].values()]
        wrong = sum(life["behaviour"] == "silently wrong" for life in lives)
        news = len(value["surprises"])
        return f"{wrong} of {len(lives)} lives silently wrong, {news or 'none'} of them news"
    if "surprises" in value:
        odd = len(value["surprises"])
        return f"{odd} systems not as documented" if odd else "all as documented"
    scopes = f" ({', '.join(value['scopes'])})" if value["outcome"] == "agree" else ""
    return f"{value['outcome']}{scopes}"

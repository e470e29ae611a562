"""From a request to files: runs the session, asks the judge, renders, writes. `compare`, `reports` and `bench` end here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxkv import session
from mlxkv.engines.job import Finished
from mlxkv.judge import delta
from mlxkv.judge.case import Case, by_plan, door
from mlxkv.judge.result import Verdict, join
from mlxkv.judge.suspects import find
from mlxkv.judge.verdict import WORST, judge
from mlxkv.report import markdown, plots
from oracle import tokens, trace
from oracle.plan import Refusal

if TYPE_CHECKING:
    from mlxkv.pitfalls import Matrix

NAMES = ("compare.svg", "compare.json", "compare.md")
"""The files of one comparison; the Markdown last, since it links to the others."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A verdict with everything that its report shows, rendered already."""

    verdict: Verdict
    case: Case
    sides: tuple[markdown.Side, ...]
    files: dict[str, str]
    machine: str
    took: dict[str, Finished | None]
    third: Verdict | None = None

    @property
    def exit_code(self) -> int:
        """Of the worse of the engine's verdict and the candidate's."""
        both = [self.verdict, *([self.third] if self.third else [])]
        worst = join(v.outcome for v in both)
        return next(v.exit_code for v in both if v.outcome == worst)

    def as_json(self) -> str:
        """The verdict as `mlxkv-verdict/1`, with what each process took (null: its result was reused)."""
        took = {name: asdict(t) if t else None for name, t in self.took.items()}
        return json.dumps(json.loads(self.files["compare.json"]) | {"took": took}, indent=1, sort_keys=True, ensure_ascii=False) + "\n"

    def text(self, out: Path) -> str:
        """What a person reads in the terminal."""
        sides = (self.sides[0], self.sides[1])
        text = markdown.console_report(self.verdict, self.case.manifest, sides=sides, report=str(out / "compare.md"))
        if self.third is None:
            return text
        cause = f"{self.third.subject.engine}: cause: {markdown.cause(self.third)}\n" if self.third.cause else ""
        return f"{text}{cause}{self.third.subject.engine}: {markdown.sentence(self.third)}\n"

    def write(self, out: Path) -> list[Path]:
        """The files, each whole or not there."""
        for name in NAMES:
            trace.write_text(out / name, self.files[name])
        return [out / name for name in NAMES]


def compare(request: session.Request, out: Path, *, candidates: Sequence[Path] = (), command: str) -> Compared:
    """Runs, judges and writes a report into `out`."""
    third = [trace.read(path) for path in candidates]
    session.claim(out)
    with session.run(request, meanwhile=plots.load) as runs:
        compared = judged(runs, third, commands=[command])
    compared.write(out)
    return compared


def judged(runs: session.Runs, third: Sequence[trace.Trace] = (), *, commands: Sequence[str], notes: Sequence[str] = ()) -> Compared:
    """The verdict on what was run, rendered; `notes` are said beside the judge's own."""
    case = runs.case
    candidates = by_plan(case.manifest, runs.arithmetic)
    suspects = cache(partial(session.suspects, runs))
    verdict = _explained(judge(case, candidates, algebra=by_plan(case.manifest, runs.algebra)), case, candidates, suspects)
    verdict = replace(verdict, notes=(*notes, *verdict.notes))
    beside = _third(case, third)
    other = _explained(judge(case, beside), case, beside, suspects) if beside else None
    sides = [markdown.side(runs.arithmetic[0].meta), markdown.oracle_side(case.manifest)]
    sides += [markdown.side(t.meta) for t in third[:1]]
    environment = runs.arithmetic[0].meta.environment
    continuation = _continuation(runs)
    files = {
        "compare.svg": _plot(verdict, case),
        "compare.json": _json(verdict, other, runs, continuation),
        "compare.md": markdown.compare_report(
            verdict,
            case.manifest,
            sides=sides,
            commands=commands,
            continuation=continuation,
            svg="compare.svg",
            third=delta.three_way(case, candidates, beside),
            other=other,
            page=session.is_original(runs.checkpoint),
        ),
    }
    system = str(environment.get("os", "unknown")).split()[0].lower()
    machine = f"{system}-{environment.get('arch', 'unknown')}-{runs.arithmetic[0].meta.device}"
    return Compared(verdict, case, tuple(sides), files, machine, runs.took, other)


def _explained(verdict: Verdict, case: Case, traces: dict[str, trace.Trace], suspects: Callable[[], Path | str]) -> Verdict:
    """The verdict; where the engine differs, with the usual mistake that explains it, or with why none is named."""
    if verdict.outcome != "differ":
        return verdict
    folder = suspects()
    found = folder if isinstance(folder, str) else find(case, traces, folder)
    return replace(verdict, notes=(*verdict.notes, found)) if isinstance(found, str) else replace(verdict, cause=found)


def _third(case: Case, traces: Sequence[trace.Trace]) -> dict[str, trace.Trace]:
    named = by_plan(case.manifest, traces)
    for plan, candidate in named.items():
        reasons = door(candidate, plan, case, dtype=case.manifest.dtype)
        if reasons:
            raise Refusal(reasons[0])
    return named


def _plot(verdict: Verdict, case: Case) -> str:
    title = f"{case.manifest.name}, {case.manifest.dtype}: error by position"
    return plots.error_by_position(verdict.curves, verdict.floor, limit=WORST, texts=case.manifest.texts, title=title)


def _json(verdict: Verdict, other: Verdict | None, runs: session.Runs, continuation: markdown.Continuation) -> str:
    manifest = runs.case.manifest
    errors = [
        {"engine": t.meta.engine, "dtype": t.meta.dtype, "plan": t.meta.plan.name, "step": i, "error": o.error}
        for t in (*runs.arithmetic, *runs.algebra)
        for i, o in enumerate(t.meta.outcomes)
        if o.error is not None
    ]
    value = verdict.to_json() | {
        "model": {"name": manifest.name, "source": manifest.source, "revision": manifest.revision, "note": manifest.note},
        "prompt": manifest.prompt,
        "generated": list(continuation.ids),
        "errors": errors,
        "third": other.to_json() if other else None,
        "environment": {runs.engine: runs.arithmetic[0].meta.environment, "oracle": manifest.environment},
    }
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def _continuation(runs: session.Runs) -> markdown.Continuation:
    manifest = runs.case.manifest
    generated = manifest.environment.get("generated") or manifest.tokens[manifest.prompt_tokens :]
    tokenizer = tokens.load(runs.checkpoint.folder)
    return markdown.Continuation(tuple(generated), tokenizer.decode(generated) if tokenizer else None)


def pitfalls(out: Path, *, as_json: bool, command: str, **options: Any) -> tuple[str, int]:
    """Runs the scenarios and writes their report into `out`; what to print and the exit code."""
    from mlxkv import pitfalls as scenes
    from mlxkv.report import pitfalls as pages

    request = scenes.request(**options)
    session.claim(out)
    matrix = scenes.run(request)
    files = _matrix_files(matrix, commands=[command])
    for name, content in files.items():
        trace.write_text(out / name, content)
    printed = files["pitfalls.json"] if as_json else pages.console(matrix.scenarios, matrix.seen, report=str(out / "pitfalls.md"))
    return printed, matrix.exit_code


def _matrix_files(matrix: Matrix, *, commands: Sequence[str]) -> dict[str, str]:
    from mlxkv import pitfalls as scenes

    tokenizer = tokens.load(matrix.checkpoint.folder)
    text = (lambda ids: tokenizer.decode(list(ids))) if tokenizer else (lambda _: "")
    value = json.dumps(matrix.to_json(), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    return {"pitfalls.json": value, "pitfalls.md": scenes.report(matrix, text=text, commands=commands)}


def selftest(
    model: str | None, revision: str | None, out: Path, *, as_json: bool, command: str, power: Path | None = None, **options: Any
) -> tuple[str, int]:
    """Runs the trials and writes their report into `out`, and what lane B lets pass into `power`; what to print and the exit code."""
    from mlxkv import selftesting
    from mlxkv.report import selftest as pages

    session.claim(out)
    result = selftesting.run(model, revision, **options)
    value = result.to_json()
    if power is not None:
        selftesting.write_power(power, result)
    files = {
        "selftest.json": json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n",
        "selftest.md": pages.markdown(result.trials, value, commands=[command]),
    }
    for name, content in files.items():
        trace.write_text(out / name, content)
    text = pages.console(result.trials, dtype=result.dtype, report=str(out / "selftest.md"))
    return files["selftest.json"] if as_json else text, result.exit_code


def calibrate(model: str | None, revision: str | None, out: Path, *, as_json: bool, command: str, **options: Any) -> tuple[str, int]:
    """Measures correct runs and writes what they read into `out`; what to print and the exit code."""
    from mlxkv import calibrating
    from mlxkv.report import calibrate as pages

    session.claim(out)
    result = calibrating.run(model, revision, **options)
    value, found = result.to_json(), (result.ranges, result.accused)
    files = {
        "calibration.json": json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n",
        "calibration.md": pages.markdown(*found, value, commands=[command]),
    }
    for name, content in files.items():
        trace.write_text(out / name, content)
    text = pages.console(*found, dtype=result.dtype, report=str(out / "calibration.md"))
    return files["calibration.json"] if as_json else text, result.exit_code


def write_all(out: Path, *, candidates: Sequence[Path] = (), device: str = "auto") -> list[Path]:
    """Everything under reports/: the default model's comparison, also over several prompts and a long one, the matrix, the index."""
    from mlxkv import pitfalls as scenes
    from mlxkv import prompting

    session.claim(out)
    third = [trace.read(path) for path in candidates]
    with session.run(session.Request(device=device), meanwhile=plots.load) as runs:
        compared = judged(runs, third, commands=["mlxkv compare", "mlxkv reports"])
    folder = out / compared.case.manifest.name / compared.machine
    files = compared.files | _matrix_files(scenes.run(scenes.Request(device=device)), commands=["mlxkv pitfalls", "mlxkv reports"])
    files |= prompting.reports(session.Request(device=device))
    for name, content in files.items():
        trace.write_text(folder / name, content)
    trace.write_text(out / "README.md", _index(out))
    return [*(folder / name for name in files), out / "README.md"]


def _index(out: Path) -> str:
    rows = []
    for path in sorted([*out.glob("*/*/*.json"), *out.glob("*/*/*/compare.json")]):
        link = path.with_suffix(".md").relative_to(out)
        name = link.stem if len(link.parts) == 3 else f"{link.stem}, {link.parts[2]}"
        rows.append(f"| [{name}]({link}) | {link.parts[0]} | {link.parts[1]} | {_said(_read_json(path))} |")
    head = [
        "# Reports",
        "",
        "Each was measured by `mlxkv reports` on the machine that it names; `mlxkv reports --check` does it again.",
        "",
    ]
    return "\n".join([*head, "| report | model | machine | result |", "|:--|:--|:--|:--|", *rows]) + "\n"


def _said(value: Any) -> str:
    if "trials" in value:
        trials = [t for some in value["trials"].values() for t in some]
        return f"{sum(not t['passed'] for t in trials)} of {len(trials)} runs judged wrongly"
    if "readings" in value:
        return "every correct run within every limit" if value["exit_code"] == 0 else "a correct run is beyond a limit"
    if "surprises" in value:
        return f"{len(value['surprises'])} systems not as documented" if value["surprises"] else "all as documented"
    scopes = f" ({', '.join(value['scopes'])})" if value["outcome"] == "agree" else ""
    return f"{value['outcome']}{scopes}"


def check(out: Path, *, device: str = "auto") -> list[str]:
    """Makes the reports again in a scratch folder: the differences, one line each; none when they still say the same."""
    from mlxkv import recheck

    if not list(out.glob("*/*/*.json")):
        raise Refusal(f"{out}: no reports, so there is nothing to check; make them with `mlxkv reports` and commit them")
    with session.scratch() as room:
        write_all(room, device=device)
        made = sorted(path.relative_to(room) for path in room.rglob("*") if path.is_file())
        machine = next(path.parts[1] for path in made if len(path.parts) == 3)
        if not list(out.glob(f"*/{machine}/*.json")):
            raise Refusal(f"{out}: no reports for {machine}, so there is nothing to check; make them with `mlxkv reports` and commit them")
        return recheck.folders(out, room, made)


def bench(
    model: str | None,
    *,
    as_json: bool,
    with_compare: bool,
    revision: str | None = None,
    ignore_keys: tuple[str, ...] = (),
    **options: Any,
) -> str:
    """The speed of the port beside mlx-lm, and what a first and a second compare take."""
    from mlxkv import bench as benches
    from oracle.checkpoint import require_llama, resolve

    checkpoint = resolve(model, revision=revision, ignore_keys=ignore_keys)
    require_llama(checkpoint)
    given = {"dtype": options["dtype"], "device": options["device"]}
    speeds, environment = benches.speeds(
        checkpoint.folder,
        **given,
        lengths=options["prefill"],
        decode=options["decode"],
        rounds=options["rounds"],
        ignore_keys=checkpoint.without,
    )
    arguments = [checkpoint.source, *(["--revision", revision] if revision else []), *(f"--{k}={v}" for k, v in given.items())]
    arguments += [f"--ignore-key={key}" for key in checkpoint.without]
    takes = benches.compare_takes(arguments) if with_compare else []
    if as_json:
        return json.dumps(benches.to_json(speeds, takes, environment), indent=1) + "\n"
    return benches.text(checkpoint.name, speeds, takes, environment)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: cannot be read ({' '.join(str(error).split())}); restore it or make the reports again") from error

"""From a request to files: runs what a command asks for, asks the judge, renders, writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from mlxkv.commands.compare import session
from mlxkv.engines.process import Finished
from mlxkv.judge import delta
from mlxkv.judge.case import Case, by_plan, door
from mlxkv.judge.cause import find
from mlxkv.judge.result import Verdict, join
from mlxkv.judge.verdict import WORST, judge
from mlxkv.report import page as markdown
from mlxkv.report import plots
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import trace
from oracle.formats.errors import Refusal
from oracle.model import tokenizer as tokens
from oracle.model.default import is_original


@dataclass(frozen=True, slots=True)
class Compared:
    """A verdict with everything that its report shows, rendered already."""

    verdict: Verdict
    case: Case
    sides: tuple[markdown.Side, ...]
    files: dict[str, str]
    environment: dict[str, Any]
    took: dict[str, Finished | None]
    third: Verdict | None = None

    @property
    def exit_code(self) -> int:
        """Of the worse of the engine's verdict and the candidate's."""
        both = [self.verdict, *([self.third] if self.third else [])]
        worst = join(v.outcome for v in both)
        return next(v.exit_code for v in both if v.outcome == worst)

    @property
    def spent(self) -> dict[str, Any]:
        """What each process took, as plain values; None where its result was reused."""
        return {name: asdict(t) if t else None for name, t in self.took.items()}

    def as_json(self) -> str:
        """The verdict as `mlxkv-verdict/1`, with what each process took (null: its result was reused)."""
        return pretty(json.loads(self.files["compare.json"]) | {"took": self.spent})

    def text(self, out: Path) -> str:
        """What a person reads in the terminal."""
        sides = (self.sides[0], self.sides[1])
        text = markdown.console_report(
            self.verdict, self.case.manifest, sides=sides, report=str(out / "compare.md")
        )
        if self.third is None:
            return text
        cause = (
            f"{self.third.subject.engine}: cause: {markdown.cause(self.third)}\n"
            if self.third.cause
            else ""
        )
        return f"{text}{cause}{self.third.subject.engine}: {markdown.sentence(self.third)}\n"


def report(
    request: session.Request, *, candidates: Sequence[Path] = (), out: Path, command: str
) -> Report:
    """Runs and judges; `candidates` are traces of a third engine, judged and shown beside."""
    third = [trace.read(path) for path in candidates]
    with session.run(request, meanwhile=plots.load) as runs:
        compared = judged(runs, third, commands=[command])
    return Report(compared.files, compared.text(out), compared.as_json(), compared.exit_code)


def judged(
    runs: session.Runs,
    third: Sequence[trace.Trace] = (),
    *,
    commands: Sequence[str],
    notes: Sequence[str] = (),
) -> Compared:
    """The verdict on what was run, rendered; `notes` are said beside the judge's own."""
    case = runs.case
    candidates = by_plan(case.manifest, runs.arithmetic)
    suspects = cache(partial(session.suspects, runs))
    verdict = explained(
        judge(case, candidates, algebra=by_plan(case.manifest, runs.algebra)),
        case,
        candidates,
        suspects,
    )
    verdict = replace(verdict, notes=(*notes, *verdict.notes))
    beside = _third(case, third)
    other = explained(judge(case, beside), case, beside, suspects) if beside else None
    sides = [markdown.side(runs.arithmetic[0].meta), markdown.oracle_side(case.manifest)]
    sides += [markdown.side(t.meta) for t in third[:1]]
    continuation = _continuation(runs)
    files = {  # the Markdown last, since it links to the others
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
            page=is_original(runs.checkpoint),
        ),
    }
    return Compared(
        verdict, case, tuple(sides), files, runs.arithmetic[0].meta.environment, runs.took, other
    )


def explained(
    verdict: Verdict, case: Case, traces: dict[str, trace.Trace], suspects: Callable[[], Path | str]
) -> Verdict:
    """The verdict; where the engine differs, with the usual mistake that explains it, or with a note why none is named."""
    if verdict.outcome != "differ":
        return verdict
    folder = suspects()
    found = folder if isinstance(folder, str) else find(case, traces, folder)
    return (
        replace(verdict, notes=(*verdict.notes, found))
        if isinstance(found, str)
        else replace(verdict, cause=found)
    )


def _third(case: Case, traces: Sequence[trace.Trace]) -> dict[str, trace.Trace]:
    named = by_plan(case.manifest, traces)
    for plan, candidate in named.items():
        reasons = door(candidate, plan, case, dtype=case.manifest.dtype)
        if reasons:
            raise Refusal(reasons[0])
    return named


def _plot(verdict: Verdict, case: Case) -> str:
    title = f"{case.manifest.name}, {case.manifest.dtype}: error by position"
    return plots.error_by_position(
        verdict.curves, verdict.floor, limit=WORST, texts=case.manifest.texts, title=title
    )


def _json(
    verdict: Verdict, other: Verdict | None, runs: session.Runs, continuation: markdown.Continuation
) -> str:
    manifest = runs.case.manifest
    errors = [
        {
            "engine": t.meta.engine,
            "dtype": t.meta.dtype,
            "plan": t.meta.plan.name,
            "step": i,
            "error": o.error,
        }
        for t in (*runs.arithmetic, *runs.algebra)
        for i, o in enumerate(t.meta.outcomes)
        if o.error is not None
    ]
    value = verdict.to_json() | {
        "model": {
            "name": manifest.name,
            "source": manifest.source,
            "revision": manifest.revision,
            "note": manifest.note,
        },
        "prompt": manifest.prompt,
        "generated": list(continuation.ids),
        "errors": errors,
        "third": other.to_json() if other else None,
        "environment": {
            runs.engine: runs.arithmetic[0].meta.environment,
            "oracle": manifest.surroundings,
        },
    }
    return pretty(value)


def _continuation(runs: session.Runs) -> markdown.Continuation:
    manifest = runs.case.manifest
    generated = manifest.generated or manifest.tokens[manifest.prompt_tokens :]
    tokenizer = tokens.load(runs.checkpoint.folder)
    return markdown.Continuation(
        tuple(generated), tokenizer.decode(generated) if tokenizer else None
    )

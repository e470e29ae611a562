"""`mlxkv compare`: the oracle answers, the engine runs, the judge decides, and a report says it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mlxkv.commands.compare import page
from mlxkv.commands.compare.ask import Request, ask
from mlxkv.commands.compare.follow import Runs, find, follow
from mlxkv.commands.compare.suspects import Suspects
from mlxkv.judge.admission import by_plan, trace_reasons
from mlxkv.judge.case import Case
from mlxkv.judge.delta import three_way
from mlxkv.judge.result import EXIT_CODES, Verdict, join
from mlxkv.judge.verdict import judge
from mlxkv.report import plots
from mlxkv.report.phrases import Side, oracle_side, side
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import trace
from oracle.formats.errors import Refusal
from oracle.formats.trace import Trace


@dataclass(frozen=True, slots=True)
class Compared:
    """The verdict on one sequence, and on a third engine's traces, and the report's files.

    `value` is what `compare.json` holds; `took` is by process, None where its result was there.
    """

    case: Case
    verdict: Verdict
    third: Verdict | None
    sides: tuple[Side, ...]
    environment: dict[str, Any]
    value: dict[str, Any]
    files: dict[str, str]
    took: dict[str, Any]

    @property
    def exit_code(self) -> int:
        """Of the worse of the two verdicts."""
        return EXIT_CODES[join(v.outcome for v in (self.verdict, self.third) if v is not None)]


def report(request: Request, *, candidates: Sequence[Path] = (), out: Path, command: str) -> Report:
    """Runs and judges; `candidates` are traces of a third engine, judged and shown beside."""
    third = [trace.read(path) for path in candidates]
    with run([request]) as (runs,):
        compared = judged(runs, third, commands=[command])
    text = page.console(
        compared.verdict, compared.third, compared.case, compared.sides, out / "compare.md"
    )
    value = compared.value | {"took": compared.took}
    return Report(compared.files, text, pretty(value), compared.exit_code)


@contextmanager
def run(requests: Sequence[Request]) -> Iterator[tuple[Runs, ...]]:
    """The oracle's answers and the engine's traces, which are removed when the block ends.

    Several requests are sequences on the first one's model, engine, dtype and device.
    """
    engine = find(requests[0])
    answers = ask(requests)
    plots.load_aside()
    with follow(engine, answers, requests[0].device) as runs:
        yield runs


def judged(
    runs: Runs, third: Sequence[Trace] = (), *, commands: Sequence[str], notes: Sequence[str] = ()
) -> Compared:
    """The verdict on what was run, and its report; `notes` are said beside the judge's own."""
    case, suspects = runs.case, Suspects(runs)
    ours, exact = (by_plan(case.manifest, lane) for lane in (runs.arithmetic, runs.algebra))
    verdict = suspects.explain(judge(case, ours, algebra=exact), ours)
    verdict = replace(verdict, notes=(*notes, *verdict.notes))
    beside = _third(case, third)
    other = suspects.explain(judge(case, beside), beside) if beside else None
    first = runs.arithmetic[0].meta
    sides = (side(first), oracle_side(case.manifest), *(side(t.meta) for t in third[:1]))
    value = page.to_json(runs, verdict, other)
    files = page.files(
        runs,
        verdict,
        value,
        sides=sides,
        commands=commands,
        third=three_way(case, ours, beside),
        other=other,
    )
    took = {name: asdict(spent) if spent else None for name, spent in runs.took.items()}
    return Compared(case, verdict, other, sides, first.environment, value, files, took)


def _third(case: Case, traces: Sequence[Trace]) -> dict[str, Trace]:
    named = by_plan(case.manifest, traces)
    for plan, candidate in named.items():
        reasons = trace_reasons(candidate, plan, case, dtype=case.manifest.dtype)
        if reasons:
            raise Refusal(reasons[0])
    return named

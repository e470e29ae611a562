"""`mlxkv compare`: the oracle answers, the engine runs, the judge decides, and a report says it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mlxkv.commands.compare import page
from mlxkv.commands.compare.ask import Request, ask
from mlxkv.commands.compare.follow import Runs, find, follow
from mlxkv.commands.compare.page import Compared
from mlxkv.commands.compare.suspects import Suspects
from mlxkv.engines import memory
from mlxkv.judge.admission import trace_reasons
from mlxkv.judge.assign import Assigned, assign
from mlxkv.judge.delta import three_way
from mlxkv.report import plots
from mlxkv.report.phrases import oracle_side, side
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import trace
from oracle.formats.errors import Refusal
from oracle.formats.trace import Trace


def report(request: Request, *, candidates: Sequence[Path] = (), out: Path, command: str) -> Report:
    """Runs and judges; `candidates` are traces of a third engine, judged and shown beside."""
    third = [trace.read(path) for path in candidates]
    with run([request]) as (runs,):
        compared = judged(runs, third)
    files, text = page.files(compared, commands=[command]), page.console(compared, out)
    value = page.to_json(compared) | {"took": compared.runs.took}
    value["together_bytes"] = memory.together()
    return Report(files, text, pretty(value), compared.exit_code)


@contextmanager
def run(requests: Sequence[Request]) -> Iterator[tuple[Runs, ...]]:
    """The oracle's answers and the engine's traces, which are removed when the block ends.

    Several requests are sequences on the first one's model, engine, dtype and device.
    """
    engine = find(requests[0])
    answers = ask(requests)
    plots.load_aside()
    with follow(engine, answers) as runs:
        yield runs


def judged(
    runs: Runs, third: Sequence[Trace] = (), *, notes: Sequence[str] = (), unseen: bool = True
) -> Compared:
    """The verdict on what was run; `notes` are said beside the judge's own.

    `unseen`: whether to say which usual mistakes an agreement could not show.
    """
    case, suspects, ours = runs.case, Suspects(runs, unseen=unseen), runs.assigned
    verdict = suspects.explain(ours.judge(), ours.candidates)
    verdict = replace(verdict, notes=(*notes, *by_design(runs), *verdict.notes))
    beside = _third(runs, third)
    other = suspects.explain(beside.judge(), beside.candidates) if third else None
    engines = [side(t.meta) for t in (runs.arithmetic[0], *third[:1])]
    engines.insert(1, oracle_side(case.manifest))
    pairs = three_way(case, ours.candidates, beside.candidates)
    return Compared(runs, verdict, other, pairs, tuple(engines))


def by_design(runs: Runs) -> tuple[str, ...]:
    """The note on a cache that keeps less than it is given, whose verdict is that on any other."""
    if runs.cache is None or not runs.cache.lossy:
        return ()
    return (f"lossy by design ({runs.cache.loses}): `mlxkv cost` says what it costs",)


def _third(runs: Runs, traces: Sequence[Trace]) -> Assigned:
    """A third engine's traces; what of them cannot be compared is refused."""
    probe = runs.probe.case if runs.probe is not None else None
    found = assign(runs.case, traces, probe=probe)
    lanes = [(runs.case, found.candidates), (runs.case, found.repeats)]
    lanes += [(found.probe.case, found.probe.candidates)] if found.probe is not None else []
    for case, named in lanes:
        for plan, candidate in named.items():
            reasons = trace_reasons(candidate, plan, case, dtype=case.manifest.dtype)
            if reasons:
                raise Refusal(reasons[0])
    return found

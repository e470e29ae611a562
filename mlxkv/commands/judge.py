"""`mlxkv judge`: the verdict on stored traces. Nothing runs; neither MLX nor torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxkv.judge.admission import by_plan
from mlxkv.judge.case import read_case
from mlxkv.judge.verdict import judge
from mlxkv.report import page, terminal
from mlxkv.report.phrases import oracle_side, side
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import trace


def report(folder: Path, candidates: Sequence[Path], *, out: Path, command: str) -> Report:
    """Judges traces by an oracle's folder; the report has no plot, which only a run has."""
    traces = [trace.read(path) for path in candidates]
    case, meta = read_case(folder), traces[0].meta
    verdict = judge(case, by_plan(case.manifest, traces))
    sides = (side(meta), oracle_side(case.manifest))
    environments = {meta.engine: meta.environment, "oracle": case.manifest.surroundings}
    value = pretty(page.to_json(verdict, case.manifest, environments))
    markdown = page.markdown(verdict, case.manifest, sides=sides, commands=[command])
    where = str(out / "compare.md")
    text = terminal.console(verdict, case.manifest, sides=sides, report=where)
    files = {"compare.json": value, "compare.md": markdown}
    return Report(files, text, value, verdict.exit_code, stale=("compare.svg",))

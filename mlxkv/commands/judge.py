"""`mlxkv judge`: the verdict on stored traces. Nothing runs; neither MLX nor torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxkv.judge.assign import assign
from mlxkv.judge.case import read_case, read_probe
from mlxkv.report import page, terminal
from mlxkv.report.phrases import oracle_side, side
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import trace


def report(folder: Path, candidates: Sequence[Path], *, out: Path, command: str) -> Report:
    """Judges traces by an oracle's folder; the report has no plot, which only a run has.

    Those of the probe's plans are judged by the folder's probe, and those that say that they are a
    repeat against the first of their plan.
    """
    traces = [trace.read(path) for path in candidates]
    case, meta = read_case(folder), traces[0].meta
    verdict = assign(case, traces, probe=read_probe(folder)).judge()
    sides = (side(meta), oracle_side(case.manifest))
    environments = {meta.engine: meta.environment, "oracle": case.manifest.surroundings}
    value = pretty(page.to_json(verdict, case.manifest, environments))
    markdown = page.markdown(verdict, case.manifest, sides=sides, commands=[command])
    where = str(out / "compare.md")
    text = terminal.console(verdict, case.manifest, sides=sides, report=where)
    files = {"compare.json": value, "compare.md": markdown}
    return Report(files, text, value, verdict.exit_code, stale=("compare.svg",))

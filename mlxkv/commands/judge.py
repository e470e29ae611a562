"""What is made of stored traces alone: nothing runs, and neither MLX nor torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxkv.judge.case import by_plan, read_case
from mlxkv.judge.result import Verdict, plain
from mlxkv.judge.verdict import judge
from mlxkv.report import page as markdown
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import trace
from oracle.formats.run_folder import Manifest


def report(folder: Path, candidates: Sequence[Path], *, out: Path, command: str) -> Report:
    """Judges traces by an oracle's folder; the report has no plot, which only a run has."""
    traces = [trace.read(path) for path in candidates]
    case = read_case(folder)
    verdict = judge(case, by_plan(case.manifest, traces))
    sides = (markdown.side(traces[0].meta), markdown.oracle_side(case.manifest))
    files = {
        "compare.json": _json(verdict, case.manifest, traces[0]),
        "compare.md": markdown.compare_report(
            verdict, case.manifest, sides=sides, commands=[command]
        ),
    }
    text = markdown.console_report(
        verdict, case.manifest, sides=sides, report=str(out / "compare.md")
    )
    return Report(files, text, files["compare.json"], verdict.exit_code, stale=("compare.svg",))


def _json(verdict: Verdict, manifest: Manifest, first: trace.Trace) -> str:
    value = verdict.to_json() | {
        "model": {
            "name": manifest.name,
            "source": manifest.source,
            "revision": manifest.revision,
            "note": manifest.note,
        },
        "prompt": manifest.prompt,
        "environment": {
            first.meta.engine: plain(first.meta.environment),
            "oracle": plain(manifest.surroundings),
        },
    }
    return pretty(value)

"""What is made of stored traces alone: nothing runs, and neither MLX nor torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxkv.judge.case import by_plan, read_case
from mlxkv.judge.result import Verdict, plain
from mlxkv.judge.verdict import judge
from mlxkv.report import page as markdown
from mlxkv.report import publish
from mlxkv.report.text import pretty
from oracle.formats import trace
from oracle.formats.errors import Refusal
from oracle.formats.run_folder import Manifest


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on stored traces, and the files that say so."""

    verdict: Verdict
    text: str
    files: dict[str, str]


def compare(folder: Path, candidates: Sequence[Path], out: Path, *, command: str) -> Judged:
    """Judges the traces by the oracle's folder and writes a report into `out`, without the plot, which only a run has."""
    if not candidates:
        raise Refusal(
            "--no-run: nothing to judge, expected traces of an engine; give each with --candidate"
        )
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
    publish.write(out, files)
    (out / "compare.svg").unlink(missing_ok=True)  # of an earlier run
    text = markdown.console_report(
        verdict, case.manifest, sides=sides, report=str(out / "compare.md")
    )
    return Judged(verdict, text, files)


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
            "oracle": plain(manifest.environment),
        },
    }
    return pretty(value)

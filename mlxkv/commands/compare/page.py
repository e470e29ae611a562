"""What `compare` shows of one sequence: the page, the plot, the JSON, and lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxkv.commands.compare.follow import Runs
from mlxkv.judge.case import Case
from mlxkv.judge.delta import Pair
from mlxkv.judge.limits import WORST
from mlxkv.judge.result import Verdict
from mlxkv.report import page, phrases, plots, terminal
from mlxkv.report.phrases import Side
from mlxkv.report.text import pretty
from oracle.model import tokenizer as tokenizers
from oracle.model.default import is_original


def console(
    verdict: Verdict, third: Verdict | None, case: Case, sides: Sequence[Side], report: Path
) -> str:
    """What a person reads in the terminal, the third engine's verdict last."""
    text = terminal.console(verdict, case.manifest, sides=(sides[0], sides[1]), report=str(report))
    if third is None:
        return text
    name, cause = third.subject.engine, phrases.cause(third)
    lines = [f"cause: {cause}"] if cause else []
    return text + "".join(f"{name}: {line}\n" for line in (*lines, phrases.sentence(third)))


def files(
    runs: Runs,
    verdict: Verdict,
    value: dict[str, Any],
    *,
    sides: Sequence[Side],
    commands: Sequence[str],
    third: Sequence[Pair],
    other: Verdict | None,
) -> dict[str, str]:
    """The report's files by name; the Markdown last, since it links to the others."""
    manifest = runs.case.manifest
    title = f"{manifest.name}, {manifest.dtype}: error by position"
    return {
        "compare.svg": plots.error_by_position(
            verdict.curves, verdict.floor, limit=WORST, texts=manifest.texts, title=title
        ),
        "compare.json": pretty(value),
        "compare.md": page.markdown(
            verdict,
            manifest,
            sides=sides,
            commands=commands,
            continuation=_continuation(runs),
            svg="compare.svg",
            third=third,
            other=other,
            page_values=is_original(runs.checkpoint),
        ),
    }


def to_json(runs: Runs, verdict: Verdict, other: Verdict | None) -> dict[str, Any]:
    """`mlxkv-verdict/1`, with what was generated and what went wrong while the engine ran."""
    manifest = runs.case.manifest
    environments = {
        runs.engine: runs.arithmetic[0].meta.environment,
        "oracle": manifest.surroundings,
    }
    errors = [
        {
            "engine": meta.engine,
            "dtype": meta.dtype,
            "plan": meta.plan.name,
            "step": i,
            "error": outcome.error,
        }
        for meta in (t.meta for t in (*runs.arithmetic, *runs.algebra))
        for i, outcome in enumerate(meta.outcomes)
        if outcome.error is not None
    ]
    return page.to_json(verdict, manifest, environments) | {
        "generated": _generated(runs),
        "errors": errors,
        "third": other.to_json() if other else None,
    }


def _generated(runs: Runs) -> list[int]:
    """The greedy tokens, or those that were given after the prompt."""
    manifest = runs.case.manifest
    return manifest.generated or manifest.tokens[manifest.prompt_tokens :]


def _continuation(runs: Runs) -> page.Continuation:
    ids, tokenizer = _generated(runs), tokenizers.load(runs.checkpoint.folder)
    return page.Continuation(tuple(ids), tokenizer.decode(ids) if tokenizer else None)

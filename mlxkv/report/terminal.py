"""A verdict as lines for a terminal. Pure functions, as in phrases.py."""

from __future__ import annotations

from collections.abc import Sequence

from mlxkv.judge.result import Verdict
from mlxkv.report import phrases
from mlxkv.report.phrases import Side
from mlxkv.report.text import clip, columns, gate_cells, several, wrapped
from oracle.formats.run_folder import Manifest

_PAIRS = ("plan", "max |d|", "first", "last", "rms", "top-1")
_BESIDE = "(against transformers, as on the page)"
_MOST_PROMPT = 42
_MOST_CONTROLS = 2
"""Whose readings are shown where all passed: the run held out, and the one times a factor."""


def console(
    verdict: Verdict, manifest: Manifest, *, sides: Sequence[Side], report: str | None = None
) -> str:
    """What `compare` prints, of the engine's side and the oracle's; `report` names the Markdown."""
    engines = f"{sides[0].headline} vs {sides[1].headline}"
    decoded = len(manifest.tokens) - manifest.prompt_tokens
    prompt = clip(phrases.prompt(manifest), _MOST_PROMPT)
    proofs = ": ".join(phrases.proofs(manifest))
    sample = f"; {compared}" if (compared := phrases.rows(verdict.rows)) else ""
    lines = [
        f"{manifest.title}  {manifest.dtype}  {engines}",
        f"{several(len(manifest.tokens), 'token')}: {prompt} + {decoded}{sample}",
        proofs,
        "",
        *_tables(verdict),
    ]
    known = "also" if verdict.outcome == "differ" else "cannot tell"
    lines += [f"{known}: {reason}" for reason in verdict.reasons]
    lines += [f"note: {note}" for note in verdict.notes]
    lines += wrapped(unseen) if (unseen := phrases.unseen(verdict)) else []
    lines += [f"hint: {verdict.hint}"] if verdict.hint else []
    return "\n".join([*lines, *_last(verdict, report)]) + "\n"


def _tables(verdict: Verdict) -> list[str]:
    lines, ours = [], verdict.subject.engine
    if verdict.gates:
        cells = [gate_cells(g) for g in verdict.worst]
        lines += [*columns(phrases.GATES, cells, left={0, 1, 5}), ""]
    if verdict.controls:
        controls = phrases.controls(verdict, most=_MOST_CONTROLS)
        lines += [*wrapped(f"controls: {controls}"), ""]
    against = [
        [p.a.page_name, *phrases.pair_cells(p), ""]
        for p in (*verdict.tables.cached, *verdict.tables.chunked)
        if p.a.engine == ours and p.b.engine != ours and p.b.plan == "full"
    ]
    if against:
        lines += [*columns((*_PAIRS, _BESIDE), against, left={0, 6}), ""]
    return lines


def _last(verdict: Verdict, report: str | None) -> list[str]:
    engine = verdict.subject.engine
    # Reasons stand above already.
    doubt = verdict.outcome == "cannot tell" and verdict.reasons
    line = "cannot tell" if doubt else phrases.sentence(verdict)
    # The port is part of this program; whose verdict else this is must be said.
    line = line if engine.startswith("mlxkv") else f"{engine}: {line}"
    if report is None:
        return [line]
    if verdict.outcome == "differ":
        return [line, f"report: {report}"]
    return [f"{line}    report: {report}"]

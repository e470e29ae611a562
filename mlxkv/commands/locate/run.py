"""The steps of `mlxkv locate`: a comparison; where it differs, the plan that failed once more with taps; then the place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mlxkv.commands.compare import run as comparing
from mlxkv.commands.compare.ask import Request
from mlxkv.commands.compare.follow import Runs
from mlxkv.commands.compare.suspects import Suspects
from mlxkv.commands.locate import page as pages
from mlxkv.commands.locate import place as judging
from mlxkv.commands.locate.layers import count
from mlxkv.commands.locate.place import Located
from mlxkv.engines import job, oracle, process
from mlxkv.engines.progress import say
from mlxkv.judge.admission import by_plan, case_reasons
from mlxkv.judge.case import Case
from mlxkv.judge.result import Verdict
from mlxkv.judge.verdict import judge
from mlxkv.report import plots
from mlxkv.report.phrases import cause as cause_of
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan
from oracle.formats.trace import TAPS
from oracle.model.checkpoint import Checkpoint, resolve

NAMES = ("locate.svg", "locate.json", "locate.md")
"""The files of one search; the Markdown last, since it links to the others. Where there is no strip there is no SVG."""

SCORES_MOST = 512
"""Tokens up to which scores are recorded: they grow with the square, and beyond they would outweigh all other taps."""


def report(request: Request, *, candidates: Sequence[Path] = (), out: Path, command: str) -> Report:
    """Runs, judges and looks for the place; `candidates` are traces of one more engine."""
    third = [trace.read(path) for path in candidates]
    with comparing.run([request]) as (runs,):
        suspects = Suspects(runs)
        found, case = _engine(runs, suspects)
        engines = [runs.arithmetic[0].meta.engine]
        located = [found]
        if third:
            located.append(_from_outside(runs.case, by_plan(case.manifest, third), suspects))
            engines.append(third[0].meta.engine)
        return _rendered(case, located, engines, out, command)


def _engine(runs: Runs, suspects: Suspects) -> tuple[Located, Case]:
    case, arithmetic = runs.case, by_plan(runs.case.manifest, runs.arithmetic)
    # An engine without lane A is not the port, whose taps would say nothing of it.
    if not runs.algebra or case_reasons(case) or not count(case.truth):
        return _from_outside(case, arithmetic, suspects), case
    verdict = judge(case, arithmetic, algebra=by_plan(case.manifest, runs.algebra))
    plan = judging.failing_plan(verdict)
    cause, notes = _cause(verdict, arithmetic, suspects)
    if verdict.outcome == "cannot tell" or (verdict.outcome == "differ" and plan is None):
        return judging.locate(case, verdict, arithmetic=arithmetic, cause=cause, notes=notes), case
    if plan is not None:
        # Where all is right the hidden states of any folder show it.
        case, missing = with_taps(case)
        notes += missing
    with process.scratch() as room:
        propagated, isolated = _tapped(case, runs.checkpoint, plan or "step", room)
        found = judging.locate(
            case,
            verdict,
            propagated=propagated,
            isolated=isolated,
            arithmetic=arithmetic,
            cause=cause,
            notes=notes,
        )
        return found, case


def _from_outside(case: Case, traces: Mapping[str, trace.Trace], suspects: Suspects) -> Located:
    """What the logits and the cache show of an engine that nobody can look into."""
    verdict = judge(case, traces)
    cause, notes = _cause(verdict, traces, suspects)
    return judging.locate(case, verdict, arithmetic=traces, cause=cause, notes=notes)


def _cause(
    verdict: Verdict, traces: Mapping[str, trace.Trace], suspects: Suspects
) -> tuple[str | None, tuple[str, ...]]:
    """The usual mistake that explains the difference, and what is to be said of the search for it."""
    explained = suspects.explain(verdict, traces)
    return cause_of(explained), explained.notes[len(verdict.notes) :]


def with_taps(case: Case) -> tuple[Case, tuple[str, ...]]:
    """The case with a truth that has every tap, asked of the oracle over the same tokens where this folder has fewer.

    Without torch, or without the model that the folder was made with, the folder must do, and a note says what it lacks.
    """
    wanted = tuple(tap for tap in TAPS if tap != "scores" or case.length <= SCORES_MOST)
    missing = [tap for tap in wanted if f"tap/000/{tap}" not in case.truth.arrays]
    if not missing:
        return case, ()
    try:
        oracle.require_torch()
        question = _question(case, wanted)
    except Refusal as refusal:
        return case, (
            f"the oracle folder was made without the taps {', '.join(missing)}, and they cannot be had here: {refusal}",
        )
    answer = oracle.ask(question)
    if answer.manifest.plans != case.manifest.plans:
        raise Refusal(
            f"{answer.folder}: plans are not those of {case.truth.label}; make both folders with the same version"
        )
    return replace(case, truth=trace.read(answer.folder / "truth.safetensors")), ()


def _question(case: Case, taps: tuple[str, ...]) -> oracle.Question:
    """The very sequence of the case, on the model that its folder was made with: the port's may have another config."""
    manifest = case.manifest
    checkpoint = resolve(manifest.source, revision=manifest.revision)
    same = (checkpoint.fingerprint, checkpoint.config_digest) == (
        manifest.fingerprint,
        manifest.config_digest,
    )
    if not same:
        raise Refusal(
            f"{manifest.source}: its weights or config.json are not those that {case.truth.label} was made with; restore them"
        )
    return oracle.Question(
        checkpoint=checkpoint,
        prompt=None,
        tokens=tuple(manifest.tokens),
        prompt_tokens=manifest.prompt_tokens,
        steps=0,
        chunks=_chunks(case),
        dtype=manifest.dtype,
        threads=os.cpu_count() or 1,
        taps=taps,
    )


def _chunks(case: Case) -> tuple[int, ...] | None:
    """The sizes in which the chunked plan sends the prompt."""
    if "chunked" not in case.references:
        return None
    sizes = [call.fed for call in case.references["chunked"].meta.plan.calls()]
    return tuple(sizes[: len(sizes) - (case.length - case.manifest.prompt_tokens)])


def _tapped(
    case: Case, checkpoint: Checkpoint, plan: str, room: Path
) -> tuple[trace.Trace, trace.Trace]:
    """The port in float64 on one plan, with the truth's taps: as it is, and each layer fed the truth's input."""
    assert case.truth.path is not None
    taps = tuple(tap for tap in TAPS if f"tap/000/{tap}" in case.truth.arrays)
    # K and V stand in any folder, under other names.
    taps += tuple(tap for tap in ("v", "k_rope") if tap not in taps)
    size = 2 * sum(array.nbytes for array in case.truth.arrays.values())
    say(
        f"port: taps of plan {plan} in float64, about {size / 1e6:.0f} MB on disk while it is judged"
    )
    made = job.Job(
        str(checkpoint.folder),
        (_plan(case, plan),),
        room,
        "float64",
        case.manifest.dtype,
        "cpu",
        taps=taps,
        truth=str(case.truth.path),
    )
    with made.begin(process.PORT) as running:
        made.end(running)
    return trace.read(made.trace(made.plans[0])), trace.read(made.isolated(made.plans[0]))


def _plan(case: Case, name: str) -> Plan:
    """One of the judged plans, from the folder of the case."""
    assert case.truth.path is not None
    return oracle.judged(case.manifest, case.truth.path.parent)[name]


def _rendered(
    case: Case, located: Sequence[Located], engines: Sequence[str], out: Path, command: str
) -> Report:
    manifest, layers = case.manifest, count(case.truth)
    strip = located[0].strip
    first = located[0]
    at = (
        (first.layer, first.position)
        if first.layer is not None and first.position is not None
        else None
    )
    files = {"locate.json": pretty(_json(located, engines))}
    if strip is not None:
        title = f"{manifest.name}, {manifest.dtype}: {strip.unit}"
        files["locate.svg"] = plots.heat_strip(strip, texts=manifest.texts, at=at, title=title)
    svg = "locate.svg" if strip is not None else None
    sheets, texts = [], []
    for i, (found, engine) in enumerate(zip(located, engines, strict=True)):
        last = i == len(located) - 1
        commands = [command] if last else []
        sheets.append(
            pages.markdown(
                found,
                manifest,
                engine=engine,
                layers=layers,
                commands=commands,
                svg=svg if i == 0 else None,
            )
        )
        where = str(out / "locate.md") if last else None
        texts.append(pages.console(found, manifest, engine=engine, layers=layers, report=where))
    files["locate.md"] = "\n".join(sheets)
    codes = {found.exit_code for found in located}
    code = 1 if 1 in codes else max(codes)
    stale = tuple(name for name in NAMES if name not in files)
    return Report(files, "\n".join(texts), files["locate.json"], code, stale)


def _json(located: Sequence[Located], engines: Sequence[str]) -> dict[str, object]:
    values = [
        found.to_json() | {"engine": engine} for found, engine in zip(located, engines, strict=True)
    ]
    return values[0] | {"third": values[1] if len(values) > 1 else None}

"""`mlxkv locate`: a comparison; if it differs, the failed plan again with taps; the place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlxkv.commands.compare import run as comparing
from mlxkv.commands.compare.ask import Request
from mlxkv.commands.compare.follow import Runs
from mlxkv.commands.compare.suspects import Suspects
from mlxkv.commands.locate import page, place
from mlxkv.commands.locate.layers import count
from mlxkv.commands.locate.place import Located
from mlxkv.engines import job, oracle, process
from mlxkv.engines.progress import say
from mlxkv.judge.admission import by_plan, case_reasons
from mlxkv.judge.case import Case
from mlxkv.judge.result import Verdict
from mlxkv.judge.verdict import judge
from mlxkv.report import plots
from mlxkv.report.phrases import cause
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import trace
from oracle.formats.errors import Refusal
from oracle.formats.run_folder import read_plans
from oracle.formats.trace import TAPS, Trace
from oracle.model.checkpoint import Checkpoint, resolve

SCORES_MOST = 512
"""Tokens up to which scores are recorded: they grow with the square of the length, and beyond that
they would outweigh all other taps."""


def report(request: Request, *, candidates: Sequence[Path] = (), out: Path, command: str) -> Report:
    """Runs, judges and looks for the place; `candidates` are traces of one more engine."""
    third = [trace.read(path) for path in candidates]
    with comparing.run([request]) as (runs,):
        suspects = Suspects(runs)
        found, case = _port(runs, suspects) if runs.algebra else (None, runs.case)
        if found is None:
            found = _from_outside(case, runs.arithmetic, suspects)
        located = [(runs.arithmetic[0].meta.engine, found)]
        if third:
            beside = _from_outside(runs.case, third, suspects)
            located.append((third[0].meta.engine, beside))
        return _rendered(case, located, out, command)


def _port(runs: Runs, suspects: Suspects) -> tuple[Located | None, Case]:
    """Looks into the port; None where the oracle's folder is no measure for its layers.

    Gives the case too, as its truth may have more taps now. An engine without lane A is not the
    port, whose taps would say nothing of it.
    """
    case, arithmetic = runs.case, by_plan(runs.case.manifest, runs.arithmetic)
    if case_reasons(case) or not count(case.truth):
        return None, case
    verdict = judge(case, arithmetic, algebra=by_plan(case.manifest, runs.algebra))
    plan = place.failing_plan(verdict)
    why, notes = _explained(suspects, verdict, arithmetic)
    look = partial(place.locate, arithmetic=arithmetic, cause=why)
    if verdict.outcome == "cannot tell" or (verdict.outcome == "differ" and plan is None):
        return look(case, verdict, notes=notes), case
    if plan is not None:
        # Where all is right the hidden states of any folder show it.
        case, missing = with_taps(case)
        notes += missing
    with process.scratch() as room:
        alone, along = _tapped(case, runs.checkpoint, plan or "step", room)
        return look(case, verdict, isolated=alone, propagated=along, notes=notes), case


def _from_outside(case: Case, traces: Sequence[Trace], suspects: Suspects) -> Located:
    """What the logits and the cache show of an engine that nobody can look into."""
    named = by_plan(case.manifest, traces)
    verdict = judge(case, named)
    why, notes = _explained(suspects, verdict, named)
    return place.locate(case, verdict, arithmetic=named, cause=why, notes=notes)


def _explained(
    suspects: Suspects, verdict: Verdict, runs: Mapping[str, Trace]
) -> tuple[str | None, tuple[str, ...]]:
    """The usual mistake that explains a verdict, in words; and the notes on looking for it."""
    explained = suspects.explain(verdict, runs)
    return cause(explained), explained.notes[len(verdict.notes) :]


def with_taps(case: Case) -> tuple[Case, tuple[str, ...]]:
    """The case with a truth that has every tap, and notes on taps that cannot be had.

    Where the case's folder has fewer, the oracle is asked over the same tokens. Without torch, or
    without the model that the folder was made with, the folder must do.
    """
    wanted = tuple(tap for tap in TAPS if tap != "scores" or case.length <= SCORES_MOST)
    missing = [tap for tap in wanted if f"tap/000/{tap}" not in case.truth.arrays]
    if not missing:
        return case, ()
    try:
        oracle.require_torch()
        question = _question(case, wanted)
    except Refusal as refusal:
        lacks = f"the oracle folder was made without the taps {', '.join(missing)}"
        return case, (f"{lacks}, and they cannot be had here: {refusal}",)
    answer = oracle.ask(question)
    if answer.manifest.plans != case.manifest.plans:
        raise Refusal(
            f"{answer.folder}: plans are not those of {case.truth.label}; "
            "make both folders with the same version"
        )
    return replace(case, truth=trace.read(answer.folder / "truth.safetensors")), ()


def _question(case: Case, taps: tuple[str, ...]) -> oracle.Question:
    """The very sequence of the case, on the model that its folder was made with.

    That is not always the port's model, which may have another config.
    """
    manifest = case.manifest
    keys = tuple(manifest.ignored_keys)
    checkpoint = resolve(manifest.source, revision=manifest.revision, ignore_keys=keys)
    found = checkpoint.fingerprint, checkpoint.config_digest
    if found != (manifest.fingerprint, manifest.config_digest):
        raise Refusal(
            f"{manifest.source}: its weights or config.json are not those that "
            f"{case.truth.label} was made with; restore them"
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
    if "chunked" not in case.references:
        return None
    sizes = [call.fed for call in case.references["chunked"].meta.plan.calls()]
    return tuple(sizes[: len(sizes) - (case.length - case.manifest.prompt_tokens)])


def _tapped(case: Case, checkpoint: Checkpoint, plan: str, room: Path) -> tuple[Trace, Trace]:
    """The port in float64 on one plan: with each layer fed the truth's input, and as it is."""
    assert case.truth.path is not None
    taps = tuple(tap for tap in TAPS if f"tap/000/{tap}" in case.truth.arrays)
    # K and V stand in any folder, under other names.
    taps += tuple(tap for tap in ("v", "k_rope") if tap not in taps)
    size = 2 * sum(array.nbytes for array in case.truth.arrays.values()) / 1e6
    say(f"port: taps of plan {plan} in float64, about {size:.0f} MB on disk while it is judged")
    followed = read_plans(case.truth.path.parent, case.manifest)[plan]
    asked = job.Job(
        folder=str(checkpoint.folder),
        plans=(followed,),
        out=room,
        dtype="float64",
        weights_dtype=case.manifest.dtype,
        device="cpu",
        taps=taps,
        truth=str(case.truth.path),
        ignore_keys=checkpoint.without,
    )
    with asked.begin(process.PORT) as running:
        asked.end(running)
    return trace.read(asked.isolated(followed)), trace.read(asked.trace(followed))


def _rendered(
    case: Case, located: Sequence[tuple[str, Located]], out: Path, command: str
) -> Report:
    """The report on each engine's place, by its name: first the one that ran."""
    manifest, layers = case.manifest, count(case.truth)
    values = [found.to_json() | {"engine": engine} for engine, found in located]
    value = values[0] | {"third": values[1] if len(values) > 1 else None}
    files, first = {"locate.json": pretty(value)}, located[0][1]
    if first.strip is not None:
        title = f"{manifest.name}, {manifest.dtype}: {first.strip.unit}"
        files["locate.svg"] = plots.heat_strip(
            first.strip, texts=manifest.texts, at=first.at, title=title
        )
    markdown, console = [], []
    for engine, found in located:
        commands, where, svg = [], None, None
        if found is located[-1][1]:
            commands, where = [command], str(out / "locate.md")
        if found is first and "locate.svg" in files:
            svg = "locate.svg"
        markdown.append(
            page.markdown(found, manifest, engine=engine, layers=layers, commands=commands, svg=svg)
        )
        console.append(page.console(found, manifest, engine=engine, layers=layers, report=where))
    files["locate.md"] = "\n".join(markdown)  # the last, since it links to the others
    codes = {found.exit_code for _, found in located}
    code = 1 if 1 in codes else max(codes)
    stale = () if "locate.svg" in files else ("locate.svg",)
    return Report(files, "\n".join(console), files["locate.json"], code, stale)

"""`mlxkv locate`: a comparison; if it differs, the failed plan again with taps; the place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlxkv.commands.compare import run as comparing
from mlxkv.commands.compare.ask import Request
from mlxkv.commands.compare.follow import Probe, Runs
from mlxkv.commands.compare.suspects import Suspects
from mlxkv.commands.locate import page, place
from mlxkv.commands.locate.found import Located
from mlxkv.commands.locate.layers import count
from mlxkv.commands.locate.opened import Opened
from mlxkv.engines import job, oracle, own, process
from mlxkv.engines.kinds import Kind
from mlxkv.engines.progress import say
from mlxkv.judge.admission import case_reasons
from mlxkv.judge.assign import Assigned, assign
from mlxkv.judge.case import Case
from mlxkv.judge.result import Verdict
from mlxkv.judge.words import listed
from mlxkv.report import plots
from mlxkv.report.phrases import cause
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import prompt_calls
from oracle.formats.run_folder import read_plans
from oracle.formats.trace import TAPS, Trace
from oracle.model.checkpoint import resolve

SCORES_MOST = 512
"""Tokens up to which scores are recorded: they grow with the square of the length, and beyond that
they would outweigh all other taps."""


_SHOWN = "`.state` shows keys and values, each [B, K, S, D], S being `offset`"


def report(request: Request, *, candidates: Sequence[Path] = (), out: Path, command: str) -> Report:
    """Runs, judges and looks for the place; `candidates` are traces of one more engine."""
    third = [trace.read(path) for path in candidates]
    with comparing.run([request]) as (runs,):
        suspects = Suspects(runs)
        # The port that is looked into runs in one process, where a fault of the split is not.
        inside = runs.algebra and not request.shared_by
        found, case = _port(runs, suspects) if inside else (None, runs.case)
        if found is None and request.engine not in ("port", "mlx-lm"):
            found, case = _own(runs, suspects, own.find(request.engine))
        if found is None:
            found = _from_outside(case, _main(runs), suspects)
            found = replace(found, notes=(*comparing.by_design(runs), *found.notes))
            found = _by_design(found, runs.cache)
        if found.outcome == "nothing" and runs.probe is not None:
            found, case = _in_probe(found, case, runs.probe)
        located = [(runs.arithmetic[0].meta.engine, found)]
        if third:
            probe = runs.probe.case if runs.probe is not None else None
            given = replace(assign(runs.case, third, probe=probe), probe=None)
            beside = _from_outside(runs.case, given, suspects)
            located.append((third[0].meta.engine, beside))
        return _rendered(case, located, out, command)


def _main(runs: Runs) -> Assigned:
    """The runs over the tokens themselves, without the probe's."""
    return replace(runs.assigned, probe=None)


def _in_probe(found: Located, case: Case, probe: Probe) -> tuple[Located, Case]:
    """What the probe shows where the tokens themselves show nothing, by its cache alone."""
    ours = assign(probe.case, probe.arithmetic, algebra=probe.algebra)
    verdict = ours.judge()
    if verdict.outcome == "agree":
        return found, case
    note = f"the tokens themselves show nothing: this is in the probe's {probe.case.length} tokens"
    notes = (*found.notes, note)
    return place.locate(probe.case, verdict, arithmetic=ours.candidates, notes=notes), probe.case


def _port(runs: Runs, suspects: Suspects) -> tuple[Located | None, Case]:
    """Looks into the port; None where the oracle's folder is no measure for its layers.

    Gives the case too, as its truth may have more taps now. An engine without lane A is not the
    port, whose taps would say nothing of it.
    """
    case, ours = runs.case, _main(runs)
    arithmetic = ours.candidates
    if case_reasons(case) or not count(case.truth):
        return None, case
    verdict = ours.judge()
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
        alone, along = _tapped(runs, case, plan or "step", room)
        return look(case, verdict, isolated=alone, propagated=along, notes=notes), case


def _own(runs: Runs, suspects: Suspects, source: own.Source) -> tuple[Located | None, Case]:
    """Looks at what a person's own model hands out; None where nothing asks for it."""
    case, ours = runs.case, _main(runs)
    named, verdict = ours.candidates, ours.judge()
    first = verdict.first_wrong
    if first is None or first.plan not in named or case_reasons(case) or not count(case.truth):
        return None, case
    why, notes = _explained(suspects, verdict, named)
    custom = f"{source.file}:{source.function}"
    with process.scratch() as room:
        asked = _asked(runs, first.plan, room / "own", dtype=case.manifest.dtype)
        (run,) = _followed(replace(asked, custom=custom), process.OWN)
        opened = None
        if any(name.startswith("tap/") for name in run.arrays):
            case, missing = with_taps(case)
            asked = _asked(runs, first.plan, room / "port", dtype=case.manifest.dtype)
            (port,) = _followed(asked, process.PORT)
            opened, notes = Opened(run, port), notes + missing
        else:
            notes += (f"{source.name} has no taps(): nothing inside its layers was looked at",)
        look = partial(place.locate, arithmetic=named, cause=why, notes=notes)
        return look(case, verdict, opened=opened), case


def _from_outside(case: Case, ours: Assigned, suspects: Suspects) -> Located:
    """What the logits and the cache show of an engine that nobody can look into."""
    named, verdict = ours.candidates, ours.judge()
    why, notes = _explained(suspects, verdict, named)
    return place.locate(case, verdict, arithmetic=named, cause=why, notes=notes)


def _by_design(found: Located, cache: Kind | None) -> Located:
    """The place as it is to be read of a cache that is off by design: what a first wrong position
    points to in a model says nothing of it.
    """
    if cache is None or not cache.lossy or found.outcome != "located":
        return found
    hint = found.hint
    if hint is None or found.pointed in hint:
        hint = f"which rows are off can be seen where {_SHOWN}"
    return replace(found, kind=None, hint=f"lossy by design: {hint}")


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
        lacks = f"the oracle folder was made without the taps {listed(missing)}"
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
        all_rows=manifest.all_rows,
        dtype=manifest.dtype,
        threads=os.cpu_count() or 1,
        taps=taps,
    )


def _chunks(case: Case) -> tuple[int, ...] | None:
    if "chunked" not in case.references:
        return None
    plan = case.references["chunked"].meta.plan
    return tuple(prompt_calls(plan, case.length, case.manifest.prompt_tokens))


def _tapped(runs: Runs, case: Case, plan: str, room: Path) -> tuple[Trace, Trace]:
    """The port in float64 on one plan: with each layer fed the truth's input, and as it is."""
    assert case.truth.path is not None
    taps = tuple(tap for tap in TAPS if f"tap/000/{tap}" in case.truth.arrays)
    # K and V stand in any folder, under other names.
    taps += tuple(tap for tap in ("v", "k_rope") if tap not in taps)
    size = 2 * sum(array.nbytes for array in case.truth.arrays.values()) / 1e6
    say(f"port: taps of plan {plan} in float64, about {size:.0f} MB on disk while it is judged")
    asked = _asked(runs, plan, room, dtype="float64")
    along, alone = _followed(
        replace(asked, device="cpu", taps=taps, truth=str(case.truth.path)), process.PORT
    )
    return alone, along


def _asked(runs: Runs, plan: str, out: Path, *, dtype: str) -> job.Job:
    """One plan with every tap, on the model that was run."""
    out.mkdir(exist_ok=True)
    return job.Job.on(
        runs.checkpoint,
        [read_plans(runs.folder, runs.case.manifest)[plan]],
        out,
        dtype=dtype,
        weights_dtype=runs.case.manifest.dtype,
        device=runs.arithmetic[0].meta.device,
        taps=TAPS,
    )


def _followed(asked: job.Job, module: str) -> list[Trace]:
    """The trace of a job's one plan, and where a truth was fed the isolated one."""
    with asked.begin(module) as running:
        asked.end(running)
    paths = [asked.trace(asked.plans[0])]
    paths += [asked.isolated(asked.plans[0])] if asked.truth is not None else []
    return [trace.read(path) for path in paths]


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

"""The run folder: everything that a judge needs from torch and transformers, in files.

Any machine can read them. `manifest.json` is written last and names every other file with its
sha256. The folder is made beside its place and renamed, so that it is there whole or not at all.
torch is imported only while a folder is being made.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Unpack

import numpy as np

from oracle import place
from oracle.formats import contents, noise, trace
from oracle.formats import plan as plans
from oracle.formats import proofs as proved
from oracle.formats.cache_name import TRANSFORMERS, complete
from oracle.formats.errors import Refusal, install
from oracle.formats.progress import Note, Progress, silent
from oracle.formats.rows import WHOLE
from oracle.formats.run_folder import (
    FLOORS,
    MEAN,
    PROBE,
    TRUTH,
    Manifest,
    ordinary,
    probe_of,
    read_manifest,
    read_plans,
)
from oracle.model.checkpoint import require_llama, resolve
from oracle.pool import errors
from oracle.question import Asked, Computed, Question, ask, check_range, check_run

_POOL = ("reference-*.safetensors", "pool-*.safetensors")
_OURS = ("manifest.json", "plans", TRUTH, MEAN, FLOORS, PROBE, *_POOL)
_DOUBLE = "transformers in float64 is within"
_PROOFS = {
    "truth_agreement": "{} agree to",
    "transformers_double": _DOUBLE,
    "members_apart": "no run of the pool is from its mean by more than",
    "mean_double": _DOUBLE,
}


def run(
    model: str | None = None,
    *,
    out: Path | str,
    probe: bool = True,
    probe_out: Path | str | None = None,
    keep_pool: bool = False,
    force: bool = False,
    progress: Progress = silent,
    note: Note = silent,
    **asked: Unpack[Asked],
) -> Manifest:
    """Makes the run folder `out` for a model and a `prompt` (or `tokens`); returns its manifest.

    `steps` greedy tokens follow (default 20); 0 takes the tokens as the whole sequence, of which
    `prompt_tokens` are the prompt. `chunks`, `dtype`, `threads`, `revision` and `ignore_keys` are
    as on the command line; the truth also records `taps`. `keep_pool` keeps the eager runs, `force`
    replaces a folder that an earlier run left.

    The model's probe goes into `out`/probe, or into a folder of its own, `probe_out`, whole or not
    at all like the other; `probe=False` leaves it out. A model without a probe, or whose probe
    cannot be measured, is answered without it, and `note` says why.
    """
    require("torch", "transformers")
    out = Path(out).absolute()
    apart = out / PROBE if probe_out is None else Path(probe_out).absolute()
    _check_apart(out, apart)
    for each in [out, apart] if probe and apart.parent != out else [out]:
        place.check(each, ours=_OURS, force=force)
    question = ask(model, progress=progress, note=note, **asked)
    questions = {out: question}
    if probe:
        try:
            questions[apart] = question.probed()
        except Refusal as refusal:
            note(f"oracle: no probe, as {refusal.what}")
    first, *others = questions.values()
    note(first.estimate(*others))
    return _answered(questions, force=force, keep_pool=keep_pool, progress=progress, note=note)[out]


def probe(
    model: str | None = None,
    *,
    out: Path | str,
    force: bool = False,
    progress: Progress = silent,
    note: Note = silent,
    **computed: Unpack[Computed],
) -> Manifest:
    """Makes the run folder of a model's probe alone, which is the same beside every prompt."""
    require("torch", "transformers")
    out = Path(out).absolute()
    place.check(out, ours=_OURS, force=force)
    question = ask(model, tokens=[0], steps=0, progress=progress, note=note, **computed).probed()
    note(question.estimate())
    return _answered({out: question}, force=force, progress=progress, note=note)[out]


def many(
    questions: Mapping[Path, Question],
    *,
    force: bool = False,
    refused: dict[Path, Refusal] | None = None,
    progress: Progress = silent,
    note: Note = silent,
) -> Iterator[Path]:
    """Makes a run folder for each question about one model, in one process.

    Each folder's path comes as soon as the folder is there, whole: what is finished stays, whatever
    becomes of the rest. A question that is refused is left out, `note` says why, and `refused` gets
    it; in the end one Refusal speaks of all of them, unless it was a probe beside others.
    """
    require("torch", "transformers")
    _check_one_model(questions)
    progress("loading torch and transformers", 0, 1)
    from oracle import answer

    refused = {} if refused is None else refused
    several, model = sum(not one.probe for one in questions.values()) > 1, None
    for out, question in questions.items():
        model = model or answer.loaded(question, progress)
        try:
            place.check(out, ours=_OURS, force=force)
            with place.whole(out, ours=_OURS, force=force) as folder:
                answer.one(question, folder, model, progress=progress)
        except Refusal as error:
            if question.probe and len(questions) > 1:
                note(f"warning: no probe, as it cannot be measured: {error}")
                continue
            if not several:
                raise
            note(f"warning: no answer on {question.named}: {error}")
            refused[out] = error
            continue
        yield out
    if refused:
        raise _all_of([*refused.values()], len(questions))


def _all_of(refused: Sequence[Refusal], of: int) -> Refusal:
    """The Refusal that speaks of several."""
    first = refused[0]
    what = f"{first.what} ({len(refused)} of {of} questions were refused)"
    return Refusal(what, where=first.where, remedy=first.remedy)


def _check_one_model(questions: Mapping[Path, Question]) -> None:
    """Refuses questions that one model of transformers cannot answer."""
    asked = {
        (q.checkpoint.fingerprint, q.checkpoint.config_digest, q.dtype, q.threads)
        for q in questions.values()
    }
    if len(asked) != 1:
        what = f"{len(asked)} kinds of model, dtype and threads, expected one"
        raise Refusal(what, where="questions", remedy="ask about one at a time")


def _answered(
    questions: Mapping[Path, Question],
    *,
    force: bool,
    keep_pool: bool = False,
    progress: Progress,
    note: Note,
) -> dict[Path, Manifest]:
    """The manifests of the folders made, each whole or not there; the first one's is among them."""
    with ExitStack() as stack:
        folders: dict[Path, Path] = {}
        for out in questions:
            if above := folders.get(out.parent):
                folders[out] = above / out.name
            else:
                folders[out] = stack.enter_context(place.whole(out, ours=_OURS, force=force))
        progress("loading torch and transformers", 0, 1)
        from oracle import answer

        asked = {folders[out]: question for out, question in questions.items()}
        made = answer.write(asked, keep_pool=keep_pool, progress=progress, note=note)
    return {out: made[folder] for out, folder in folders.items() if folder in made}


def follow(
    model: str | None = None,
    *,
    plan_files: Sequence[Path],
    out: Path,
    dtype: str = "float32",
    threads: int | None = None,
    revision: str | None = None,
    ignore_keys: Sequence[str] = (),
    caches: Sequence[str] = ("DynamicCache",),
    dither: int = 0,
    progress: Progress = silent,
) -> list[Path]:
    """Follows plans with transformers; each one's trace goes into `out`, named after the plan.

    `caches` are names of transformers', one for all plans or one for each; `dither` is a seed as in
    `oracle.formats.dither`.
    """
    require("torch", "transformers")
    check_run(dtype, threads)
    found = [plans.read(path) for path in plan_files]
    _require_names(found)
    each = _one_each(caches, len(found))
    checkpoint = resolve(model, revision=revision, ignore_keys=ignore_keys, progress=progress)
    require_llama(checkpoint)
    check_range(checkpoint, dtype)
    progress("loading torch and transformers", 0, 1)
    from oracle.pool import caches as kinds
    from oracle.pool import reference

    reference.set_up(threads)
    engine, written = reference.Reference(checkpoint, dtype=dtype, dither=dither), []
    for i, plan in enumerate(found):
        progress(f"transformers: {plan.name}", i, len(found))
        made = engine.run(plan, cache=kinds.named(each[i]))
        written.append(out / f"{plan.name}.safetensors")
        trace.write(written[-1], made.meta, made.arrays)
    return written


def _one_each(caches: Sequence[str], plans: int) -> Sequence[str]:
    """The name of each plan's cache."""
    for cache in caches:
        complete(cache, TRANSFORMERS)
    if len(caches) == 1:
        return [*caches] * plans
    if len(caches) != plans:
        what = f"{len(caches)} for {plans} plans, expected one for all or one for each"
        raise Refusal(what, where="--cache", remedy="give as many as plans, in their order")
    return caches


def _require_names(found: Sequence[plans.Plan]) -> None:
    """Refuses plans of one name, whose traces would be one file."""
    names = [plan.name for plan in found]
    for name in sorted(names):
        if names.count(name) > 1:
            what = f"{name} is the name of more than one, expected one trace a name"
            raise Refusal(what, where="plans", remedy="rename one")


def check(folder: Path | str) -> Manifest:
    """The manifest, once every file is found whole, finite and true to it, and both proofs hold.

    The probe inside the folder is held to the same.
    """
    folder = Path(folder)
    found = contents.read(folder)
    _check(folder, found)
    probe = contents.read_probe(folder, found.manifest)
    if probe is not None:
        _check(folder / PROBE, probe)
    return found.manifest


def _check(folder: Path, found: contents.Contents) -> None:
    read_plans(folder, found.manifest)
    for name in sorted(found.manifest.files):
        if name.startswith(("reference-", "pool-")) or name == found.manifest.measure:
            errors.require_finite(trace.read(folder / name))
    for name, value, limit in proved.failed(found.manifest):
        what = f"proof {name} is {value}, expected at most {limit:g}"
        remedy = f"nothing can be judged by this {'truth' if found.manifest.has_truth else 'mean'}"
        raise Refusal(what, where=folder, remedy=remedy)
    _check_noise(folder, found)


def _check_noise(folder: Path, found: contents.Contents) -> None:
    """Refuses stored errors that are not those of the runs that are here."""
    manifest, measure, runs = found.manifest, found.measure, found.references
    kind, cached = found.pool.kinds[-1], manifest.cached
    again = {f"{kind}-{plan}": errors.of_member(run, measure) for plan, run in runs.items()}
    again[f"{kind}-{cached}"]["cached"] = errors.apart(runs[cached], runs["full"])
    largest = max(np.abs(measure.logits[rows]).max() for rows in errors.blocks(measure.logits))
    for each in noise.checks(
        manifest,
        found.pool,
        found.floors,
        again,
        largest=float(largest),
        positions=measure.positions,
    ):
        if not each.passed:
            what = f"{each.name}: {each.quantity} is {each.value:.3g}"
            raise _made_wrong(folder / FLOORS, f"{what}, expected at most {each.limit:g}")


def show(folder: Path | str) -> str:
    """What is in the folder, for a person; every file is read and found unchanged first."""
    folder = Path(folder)
    m = read_manifest(folder)
    probed = _probe(folder, m)
    files = ["manifest.json", *m.files]
    files += [f"{PROBE}/{name}" for p in probed for name in ["manifest.json", *p.files]]
    sizes = {name: (folder / name).stat().st_size for name in files}
    prompt = f"{m.prompt!r}, " if m.prompt is not None else ""
    after = len(m.tokens) - m.prompt_tokens
    made = {key: m.environment.get(key) for key in ("torch", "transformers", "threads", "os")}
    lines = [
        f"model        {m.name}{f' ({m.note})' if m.note else ''}, {m.dtype}",
        f"source       {m.source}{f' at {m.revision}' if m.revision else ''}",
        f"fingerprint  {m.fingerprint}",
        *_without_truth(m),
        f"sequence     {len(m.tokens)} tokens: {prompt}{m.prompt_tokens} tokens, "
        f"and {after} after them",
        *_sample(read_plans(folder, m).get("full"), m),
        f"made with    torch {made['torch']}, transformers {made['transformers']}, "
        f"{made['threads']} threads, {made['os']}",
        *(f"proof        {line}" for line in proofs(m)),
        *(f"probe        {line}" for p in probed for line in _probe_lines(p)),
        "",
        f"{'file':40}{'bytes':>14}",
        *(f"{name:40}{size:14,}" for name, size in sorted(sizes.items())),
        "",
        *_to_copy(m, folder, sum(sizes.values())),
    ]
    return "\n".join(lines) + "\n"


def whole(folder: Path, manifest: Manifest) -> list[str]:
    """What a folder that was found whole says to a person."""
    probed = _probe(folder, manifest)
    count = sum(1 + len(m.files) for m in [manifest, *probed])  # the manifests are one more each
    lines = [f"{folder}: {count} files, whole and finite", *proofs(manifest)]
    return lines + [f"probe: {line}" for probe in probed for line in _probe_lines(probe)]


def _probe(folder: Path, manifest: Manifest) -> list[Manifest]:
    """The probe's manifest, once every file of it is found unchanged; none without a probe."""
    inside = probe_of(folder, manifest)
    return [] if inside is None else [read_manifest(inside)]


def _probe_lines(probe: Manifest) -> list[str]:
    """What a probe is, and its proofs."""
    ids = f"{len(probe.tokens)} ids from {min(probe.tokens)} to {max(probe.tokens)}"
    return [f"{ids}, {probe.prompt_tokens} of them in the first call", *proofs(probe)]


def _sample(full: plans.Plan | None, m: Manifest) -> list[str]:
    """The line that says how many positions have a row of logits, if not all have."""
    if full is None or isinstance(full.rows, str):
        return []
    n = len(m.tokens)
    return [
        f"rows         {len(full.rows):,} of {n:,} of logits; keys and values of every position"
    ]


def _to_copy(m: Manifest, folder: Path, size: int) -> list[str]:
    portable = m.source == "default" or m.note.split(",")[0] == "hub"
    command = f"mlxkv compare{'' if portable else ' MODEL'} --oracle {folder.name}"
    what = f"the whole folder ({size / 1e6:.1f} MB)"
    lines = [f"Copy {what} to the machine with MLX and run there: {command}"]
    if not portable:
        must = f"its fingerprint must be {m.fingerprint[:16]}..."
        lines.append(f"MODEL is the same checkpoint on that machine: {must}")
    return lines


def _without_truth(m: Manifest) -> list[str]:
    """The line that says which runs of transformers are the measure, if it is not the truth."""
    if m.has_truth:
        return []
    runs = (
        f"transformers' {', '.join(ordinary(m.pool))} ({m.pool_distinct} of them bitwise distinct)"
    )
    return [f"measure      the mean of {runs}: there is no truth for this architecture"]


def proofs(manifest: Manifest) -> list[str]:
    """The two proofs of the truth, or of the mean in its place, one line each."""
    lines, most = [], "max |T|" if manifest.has_truth else "max |mean|"
    apart = {"prefixes"} if len(manifest.tokens) <= WHOLE else {"prefixes", "step", "mixed"}
    *ways, last = [name for name in manifest.plans if name not in apart]
    followed = f"{', '.join(ways)} and {last}" if ways else last
    odd = {name for name, _, _ in proved.failed(manifest)}
    for name, limit in proved.limits_of(manifest).items():
        value = manifest.proofs.get(name, float("nan"))
        holds = "FAILS" if name in odd else "holds"
        words = _PROOFS[name].format(followed)
        lines.append(f"{words} {value:.1e} of {most} (limit {limit:.0e}): {holds}")
    return lines


def _made_wrong(where: object, what: str) -> Refusal:
    return Refusal(what, where=where, remedy="make the folder again")


def require(*packages: str) -> None:
    """Refuses what could not be computed, with the line that installs the package."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise Refusal(f"{package} is not installed", remedy=install("oracle"))


def _check_apart(out: Path, probe: Path) -> None:
    """Refuses a place for the probe within the answer's folder, or around it."""
    if probe != out / PROBE and (probe.is_relative_to(out) or out.is_relative_to(probe)):
        expected = f"expected {out / PROBE} or a folder apart from {out}"
        raise Refusal(f"{probe}, {expected}", where="probe-out", remedy="choose another")

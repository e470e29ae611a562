"""The run folder: everything that a judge needs from torch and transformers, in files that any machine can read.

`manifest.json` is written last and names every other file with its sha256. The folder is made beside its place and
renamed, so that it is there whole or not at all. torch is imported only while a folder is being made.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Unpack

import numpy as np

from oracle.formats import plan as plan_files
from oracle.formats.disk import own_folder, unwritable
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, Plan, judged_plans
from oracle.formats.run_folder import (
    FLOORS,
    MEAN,
    TRUTH,
    Manifest,
    read_floors,
    read_manifest,
    write_manifest,
)
from oracle.formats.trace import read, write
from oracle.model.checkpoint import require_llama, resolve
from oracle.pool import errors as floors
from oracle.question import Asked, Note, Progress, ask, check_threads

_OURS = (
    "manifest.json",
    "plans",
    TRUTH,
    MEAN,
    FLOORS,
    "reference-*.safetensors",
    "pool-*.safetensors",
)
_PROOFS = {
    TRUTH: {
        "truth_agreement": "step, chunked and full agree to",
        "transformers_double": "transformers' .double() is within",
    },
    MEAN: {
        "members_apart": "no run of the pool is from its mean by more than",
        "mean_double": "transformers' .double() is within",
    },
}


def run(
    model: str | None = None,
    *,
    out: Path | str,
    keep_pool: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    note: Note | None = None,
    **asked: Unpack[Asked],
) -> Manifest:
    """Makes the run folder `out` for a model and a `prompt` (or `tokens`); returns its manifest.

    `steps` greedy tokens follow (default 20); 0 takes the tokens as the whole sequence, of which `prompt_tokens` are the
    prompt. `chunks`, `dtype`, `threads`, `revision` and `ignore_keys` are as on the command line; the truth also records `taps`.
    `keep_pool` keeps the eager runs, `force` replaces a folder that an earlier run left.
    """
    require("torch", "transformers")
    out = Path(out).absolute()
    _check_place(out, force=force)
    question = ask(model, progress=progress, note=note, **asked)
    if note:
        note(question.estimate())
    with _place(out, force=force) as folder:
        if progress:
            progress("loading torch and transformers", 0, 1)
        from oracle import answer

        manifest = answer.write(question, folder, keep_pool=keep_pool, progress=progress)
        write_manifest(folder, manifest)
    return manifest


def follow(
    model: str | None = None,
    *,
    plans: Sequence[Path],
    out: Path,
    dtype: str = "float32",
    threads: int | None = None,
    revision: str | None = None,
    ignore_keys: Sequence[str] = (),
    progress: Progress | None = None,
) -> list[Path]:
    """Follows the plans in the files `plans` with transformers and writes one trace of each, named after it, into `out`."""
    require("torch", "transformers")
    check_threads(threads)
    found = [plan_files.read(path) for path in plans]
    twice = {plan.name for plan in found if [p.name for p in found].count(plan.name) > 1}
    if twice:
        raise Refusal(
            f"plans: {min(twice)} is the name of more than one, expected one trace a name; rename one"
        )
    checkpoint = resolve(model, revision=revision, ignore_keys=ignore_keys, progress=progress)
    require_llama(checkpoint)
    if progress:
        progress("loading torch and transformers", 0, 1)
    from oracle.pool import reference

    reference.set_up(threads)
    engine, written = reference.Reference(checkpoint, dtype=dtype), []
    for i, plan in enumerate(found):
        if progress:
            progress(f"transformers: {plan.name}", i, len(found))
        made = engine.run(plan)
        written.append(out / f"{plan.name}.safetensors")
        write(written[-1], made.meta, made.arrays)
    return written


def check(folder: Path | str) -> Manifest:
    """The manifest, once every file is there and unchanged, says what the manifest says, is finite, and both proofs hold."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    found = _check_plans(folder, manifest)
    wanted = [f"reference-{name}.safetensors" for name in found if name != "prefixes"]
    for name in (manifest.measure, FLOORS, *wanted):
        if name not in manifest.files:
            raise Refusal(
                f"{folder}: no {name} in manifest.json, expected one; copy or make the folder again"
            )
    for name in sorted(manifest.files):
        if name.endswith(".safetensors") and name != FLOORS:
            plan = found[
                "full"
                if name == manifest.measure
                else name.removesuffix(".safetensors").split("-")[-1]
            ]
            _check_trace(folder / name, manifest, plan)
    _check_floors(folder / FLOORS, manifest)
    for name in _PROOFS[manifest.measure]:
        value, limit = _proof(manifest, name)
        if not value <= limit:
            what = "truth" if manifest.has_truth else "mean"
            raise Refusal(
                f"{folder}: {name} is {value:.3g}, expected at most {limit:g}; nothing can be judged by this {what}"
            )
    return manifest


def show(folder: Path | str) -> str:
    """What is in the folder, for a person; every file is read and found unchanged first."""
    folder = Path(folder)
    m = read_manifest(folder)
    size = {name: (folder / name).stat().st_size for name in ["manifest.json", *m.files]}
    total = f"{sum(size.values()) / 1e6:.1f} MB"
    note = f" ({m.note})" if m.note else ""
    prompt = f"{m.prompt!r}, " if m.prompt is not None else ""
    portable = m.source == "default" or m.note.split(",")[0] == "hub"
    command = (
        f"mlxkv compare --oracle {folder.name}"
        if portable
        else f"mlxkv compare MODEL --oracle {folder.name}"
    )
    lines = [
        f"model        {m.name}{note}, {m.dtype}",
        f"source       {m.source}{' at ' + m.revision if m.revision else ''}",
        f"fingerprint  {m.fingerprint}",
        *(
            []
            if m.has_truth
            else [f"measure      the mean of {_runs(m)}: there is no truth for this architecture"]
        ),
        f"sequence     {len(m.tokens)} tokens: {prompt}{m.prompt_tokens} tokens, and {len(m.tokens) - m.prompt_tokens} after them",
        f"made with    torch {m.environment.get('torch')}, transformers {m.environment.get('transformers')}, "
        f"{m.environment.get('threads')} threads, {m.environment.get('os')}",
        *(f"proof        {line}" for line in proofs(m)),
        "",
        f"{'file':40}{'bytes':>14}",
        *(f"{name:40}{size[name]:14,}" for name in sorted(size)),
        "",
        f"Copy the whole folder ({total}) to the machine with MLX and run there: {command}",
    ]
    if not portable:
        lines.append(
            f"MODEL is the same checkpoint on that machine: its fingerprint must be {m.fingerprint[:16]}..."
        )
    return "\n".join(lines) + "\n"


def proofs(manifest: Manifest) -> list[str]:
    """The two proofs of the truth, or of the mean in its place, one line each."""
    lines, most = [], "max |T|" if manifest.has_truth else "max |mean|"
    for name, words in _PROOFS[manifest.measure].items():
        value, limit = _proof(manifest, name)
        lines.append(
            f"{words} {value:.1e} of {most} (limit {limit:.0e}): {'holds' if value <= limit else 'FAILS'}"
        )
    return lines


def _runs(manifest: Manifest) -> str:
    """Which runs of transformers the mean is of."""
    pool, distinct = ", ".join(manifest.pool), manifest.pool_distinct
    return f"transformers' {pool} ({distinct} of them bitwise distinct)"


def _proof(manifest: Manifest, name: str) -> tuple[float, float]:
    """A proof's measured value and its limit; one that is not there is not a pass."""
    value, limit = manifest.proofs.get(name), manifest.proofs.get(f"{name}_limit")
    if not isinstance(value, float) or not isinstance(limit, float):
        raise Refusal(
            f"manifest.json: proof {name} is {value!r} with limit {limit!r}, expected two numbers; make the folder again"
        )
    return value, limit


def _check_plans(folder: Path, manifest: Manifest) -> dict[str, Plan]:
    found = {name: plan_files.read(folder / "plans" / f"{name}.json") for name in manifest.plans}
    for name, plan in found.items():
        if plan.digest != manifest.plans[name]:
            raise Refusal(
                f"{folder / 'plans' / name}.json: digest {plan.digest[:16]}, expected {manifest.plans[name][:16]}; make it again"
            )
    full = found["full"].steps[-1] if "full" in found else None
    wanted = set(judged_plans(manifest.tokens, prompt=manifest.prompt_tokens)) - {"chunked"}
    if (
        not isinstance(full, Call)
        or list(full.tokens) != manifest.tokens
        or not wanted <= set(found)
    ):
        raise Refusal(
            f"{folder}: plans {', '.join(found)} are not those of the manifest's {len(manifest.tokens)} tokens; make it again"
        )
    return found


def _check_trace(path: Path, manifest: Manifest, plan: Plan) -> None:
    trace = read(path)
    strict = path.name == manifest.measure
    expected = {
        "plan digest": (trace.meta.plan.digest, plan.digest),
        "fingerprint": (trace.meta.fingerprint, manifest.fingerprint),
        "config digest": (trace.meta.config_digest, manifest.config_digest),
        "dtype": (trace.meta.dtype, "float64" if strict else manifest.dtype),
        "weights dtype": (trace.meta.weights_dtype, manifest.dtype),
        "logits' dtype": (trace.logits.dtype.name, "float64" if strict else "float32"),
        "positions": (trace.positions.tolist(), list(range(len(manifest.tokens)))),
    }
    for what, (value, wanted) in expected.items():
        if value != wanted:
            raise Refusal(
                f"{path}: {what} is {str(value)[:40]}, expected {str(wanted)[:40]}; make the folder again"
            )
    floors.require_finite(trace)


def _check_floors(path: Path, manifest: Manifest) -> None:
    pool, arrays = read_floors(path)
    if (pool.members, pool.distinct) != (manifest.pool, manifest.pool_distinct):
        what = f"members are {', '.join(pool.members)} ({pool.distinct} distinct)"
        expected = (
            f"expected {', '.join(manifest.pool)} ({manifest.pool_distinct}) as in the manifest"
        )
        raise Refusal(f"{what}, {expected}", where=path, remedy="make the folder again")
    n, members = len(manifest.tokens), len(pool.members)
    wanted = dict.fromkeys(("rms", "shift", "peak", "keys", "values"), members)
    wanted["cached"] = len(pool.kinds)
    for name, rows in wanted.items():
        shape = arrays[name].shape if name in arrays else ()
        if not shape or (shape[0], shape[-1]) != (rows, n) or not np.isfinite(arrays[name]).all():
            raise Refusal(
                f"{path}: {name} has shape {list(shape)}, expected {rows} by {n} finite numbers; make the folder again"
            )


def require(*packages: str) -> None:
    """Refuses what could not be computed, with the line that installs the package."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise Refusal(f"{package} is not installed: pip install 'mlxkv[oracle]'")


@contextmanager
def _place(out: Path, *, force: bool) -> Iterator[Path]:
    """An empty folder beside `out`, which takes its place if the block succeeds and is removed if it does not."""
    with ExitStack() as stack:
        try:
            part = stack.enter_context(
                own_folder(out.parent, prefix=f".{out.name}.", suffix=".part")
            )
            old = stack.enter_context(own_folder(out.parent, prefix=f".{out.name}.", suffix=".old"))
        except OSError as error:
            raise unwritable(out, error) from error
        yield part
        _check_place(out, force=force)
        _replace(part, out, old / "old")


def _replace(part: Path, out: Path, old: Path) -> None:
    try:
        if out.exists():
            out.rename(old)
        part.rename(out)
    except OSError as error:
        raise unwritable(out, error) from error
    finally:
        if old.exists() and not out.exists():
            old.rename(out)


def _check_place(out: Path, *, force: bool) -> None:
    above = next((path for path in out.parents if os.path.lexists(path)), None)
    if above is None:
        raise Refusal(f"{out}: the root of the file system, expected a new folder; choose another")
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise Refusal(
            f"{out}: cannot be written, as {above} is {'read-only' if above.is_dir() else 'no folder'}; choose another folder"
        )
    if not os.path.isdir(out):
        if os.path.lexists(out):
            raise Refusal(f"{out}: exists and is no folder, expected a new one; choose another")
        return
    names = sorted(path.name for path in out.iterdir())
    foreign = [
        name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in _OURS)
    ]
    if foreign:
        raise Refusal(
            f"{out}: holds {foreign[0]}, expected a new folder or one that the oracle made; choose another"
        )
    if names and not force:
        raise Refusal(
            f"{out}: holds the oracle's files already; replace them with --force or choose another folder"
        )

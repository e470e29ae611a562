"""Whether the files of a run folder are those of one run, by all that they say of one another.

A file may be whole, with the sha256 that the manifest gives, and yet be of another run, or not be
listed. Here the plans must be those of the manifest's tokens, the files those that the plans need,
the traces those of the plans, and the floors those of the pool that such a run has. Each check
gives reasons, of which the oracle's `check` refuses by the first, and for which the judge cannot
tell. What the numbers themselves must be is asked in `noise`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from oracle.formats import rows, trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import (
    WITHOUT_REFERENCE,
    Plan,
    judged_plans,
    probe_plans,
    probe_tokens,
    prompt_calls,
)
from oracle.formats.run_folder import (
    FLOORS,
    SEQUENTIAL,
    Manifest,
    Pool,
    ordinary,
    probe_of,
    read_floors,
    read_manifest,
)
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace

DTYPES = ("float32", "float16", "bfloat16")
"""What transformers' runs are computed in."""
EAGER = "eager"
KINDS = (EAGER, "sdpa")
"""transformers' kinds of attention for a Llama."""
_AGAIN = "copy or make the folder again"


@dataclass(frozen=True, slots=True)
class Contents:
    """A run folder, read: `measure` is the truth, or the mean in its place; `references` are the
    runs of transformers that are kept, by plan; `floors` are the pool's errors.
    """

    manifest: Manifest
    measure: Trace
    references: Mapping[str, Trace]
    pool: Pool
    floors: Mapping[str, Array]


def read(folder: Path) -> Contents:
    """The folder, its arrays mapped; a Refusal where a file is missing, damaged or not its."""
    manifest = read_manifest(folder)
    for name in (manifest.measure, FLOORS):
        if name not in manifest.files:
            what = f"no {name} in manifest.json, expected one"
            raise Refusal(what, where=folder, remedy=_AGAIN)
    references = {
        plan: trace.read(folder / reference(plan))
        for plan in manifest.plans
        if reference(plan) in manifest.files
    }
    measure, (pool, floors) = trace.read(folder / manifest.measure), read_floors(folder / FLOORS)
    odd = reasons(manifest, measure, references, pool, floors)
    if odd:
        more = f" ({len(odd) - 1} more)" if len(odd) > 1 else ""
        raise Refusal(odd[0] + more, where=folder, remedy=_AGAIN)
    return Contents(manifest, measure, references, pool, floors)


def read_probe(folder: Path, of: Manifest) -> Contents | None:
    """The probe in a run folder, whose manifest is `of`; None where it was made without one."""
    inside = probe_of(folder, of)
    return None if inside is None else read(inside)


def kinds_of(length: int, kinds: Sequence[str] = KINDS) -> tuple[str, ...]:
    """Those of a model's kinds of attention that are in the pool of a sequence of so many tokens.

    Of a long one without eager, which writes out all scores of a layer, heads times the square of
    the length: 10 GB at 9 heads and 16,384 tokens. Where it is the last, the class's own, as a
    neighbour's is, it stays: the others may leave out what it computes.
    """
    if length <= rows.WHOLE or kinds[-1] == EAGER:
        return tuple(kinds)
    return tuple(kind for kind in kinds if kind != EAGER)


def members_of(
    plans: Collection[str], kinds: Sequence[str] = KINDS, *, length: int = 0
) -> list[str]:
    """The pool for these plans of a sequence of so many tokens, as "KIND-PLAN".

    Only the last kind follows the chunked plan.
    """
    kinds = kinds_of(length, kinds)
    wanted = [f"{kind}-{plan}" for kind in kinds for plan in ("full", "step")]
    wanted += [f"{kinds[-1]}-chunked", SEQUENTIAL]
    return [name for name in wanted if name.split("-")[1] in plans]


def reference(plan: str) -> str:
    """The file that keeps transformers' run of a plan."""
    return f"reference-{plan}.safetensors"


def reasons(
    manifest: Manifest,
    measure: Trace,
    references: Mapping[str, Trace],
    pool: Pool,
    floors: Mapping[str, Array],
) -> list[str]:
    """Why these are not one run's, one line each; empty where they are."""
    if manifest.dtype not in DTYPES:
        expected = f"expected one of {', '.join(DTYPES)}"
        return [f"manifest.json: dtype is {manifest.dtype!r}, {expected}"]
    odd = [*_of_plans(manifest, measure, references), *_of_files(manifest), *_of_texts(manifest)]
    odd += _of_trace(manifest, measure, "full", of=measure)
    for name in manifest.plans:
        if name in references:
            odd += _of_trace(manifest, references[name], name, of=measure)
        elif name not in WITHOUT_REFERENCE:
            odd.append(f"oracle folder: no {reference(name)}, expected one for each plan")
    # Of a pool of other members no floor has the right shape.
    odd += list(_of_sums(measure, pool))
    return odd + (list(_of_pool(manifest, pool)) or list(_of_floors(measure, pool, floors)))


def _of_plans(manifest: Manifest, measure: Trace, references: Mapping[str, Trace]) -> Iterator[str]:
    try:
        plans = _plans(manifest, references)
    except Refusal as error:
        yield f"manifest.json: {error}"
        return
    n, prompt, found = len(manifest.tokens), manifest.prompt_tokens, manifest.plans
    whose = f"of the {n} tokens, of which {prompt} are the prompt"
    for name in sorted({*plans} ^ {*found}):
        has = f"lacks plan {name}" if name in plans else f"holds plan {name}"
        yield f"manifest.json: {has}, expected {', '.join(plans)} {whose}"
    for name, plan in plans.items():
        if found.get(name, plan.digest) != plan.digest:
            what = f"plan {name} is {found[name][:12]}, expected {plan.digest[:12]} {whose}"
            yield f"manifest.json: {what}"
    vocab = measure.logits.shape[-1]
    if manifest.probe and tuple(manifest.tokens) != probe_tokens(vocab, n):
        yield f"manifest.json: tokens are not the probe's of a vocabulary of {vocab}"


def _plans(manifest: Manifest, references: Mapping[str, Trace]) -> dict[str, Plan]:
    """The plans of the manifest's tokens; how the prompt is cut, the chunked run says."""
    if manifest.probe:
        return probe_plans(manifest.tokens)
    prompt, chunks = manifest.prompt_tokens, None
    if "chunked" in references:
        chunks = prompt_calls(references["chunked"].meta.plan, len(manifest.tokens), prompt)
    return judged_plans(
        manifest.tokens,
        prompt=prompt,
        chunks=chunks,
        original=manifest.original,
        all_rows=manifest.all_rows,
    )


def _of_files(manifest: Manifest) -> Iterator[str]:
    needed = {manifest.measure, FLOORS, *(f"plans/{name}.json" for name in manifest.plans)}
    needed |= {reference(name) for name in manifest.plans if name not in WITHOUT_REFERENCE}
    may = {f"pool-{name}.safetensors" for name in manifest.pool}
    for name in sorted(needed - set(manifest.files)):
        yield f"manifest.json: files lack {name}, expected it"
    for name in sorted(set(manifest.files) - needed - may):
        yield f"manifest.json: files hold {name}, which no such run writes"


def _of_texts(manifest: Manifest) -> Iterator[str]:
    texts: dict[int, str] = {}
    for token, text in zip(manifest.tokens, manifest.texts, strict=False):
        if texts.setdefault(token, text) != text:
            what = f"token {token} is {texts[token]!r} and {text!r}, expected one text"
            yield f"manifest.json: {what}"


def _of_trace(manifest: Manifest, run: Trace, plan: str, *, of: Trace) -> list[str]:
    """Why a trace is not the run of a judged plan that its name says; `of` is the measure."""
    meta, strict = run.meta, run is of
    rows = [position for call in meta.plan.calls() for position in meta.plan.kept(call)]
    expected = {
        "plan digest": (meta.plan.digest, manifest.plans.get(plan, "none of that name")),
        "fingerprint": (meta.fingerprint, manifest.fingerprint),
        "config digest": (meta.config_digest, manifest.config_digest),
        "dtype": (meta.dtype, "float64" if strict else manifest.dtype),
        "weights dtype": (meta.weights_dtype, manifest.dtype),
        "logits' dtype": (run.logits.dtype.name, "float64" if strict else "float32"),
        "logits' shape": (run.logits.shape, (len(rows), *of.logits.shape[1:])),
        "positions": (run.positions.tolist(), rows),
        "failed steps": ([i for i, o in enumerate(meta.outcomes) if o.error is not None], []),
    }
    odd = [
        f"{key} is {str(value)[:60]}, expected {str(wanted)[:60]}"
        for key, (value, wanted) in expected.items()
        if value != wanted
    ]
    return [f"{run.label}: {reason}" for reason in [*odd, *_of_cache(manifest, run, of)]]


def _of_cache(manifest: Manifest, run: Trace, of: Trace) -> Iterator[str]:
    """Why keys and values are not those of every token in every layer of the measure's."""
    found, wanted = _cache(run), _cache(of)
    layers, n = len(wanted) // 2, len(manifest.tokens)
    heads, _, width = _shape(wanted)
    if not wanted and not (of.meta.no_cache and not manifest.has_truth):
        yield "holds no keys and values, expected those of every layer"
    names = {f"kv/a/{i:03d}/{kind}" for i in range(layers) for kind in ("keys", "values")}
    for name in sorted((names ^ {*found}) if wanted else ()):
        yield f"{name} is {'missing' if name in names else 'one too many'} of {layers} layers"
    for name in sorted(names & {*found}):
        if found[name] != (heads, n, width):
            yield f"{name} has shape {list(found[name])}, expected {[heads, n, width]}"


def _cache(run: Trace) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in run.arrays.items() if name.startswith("kv/")}


def _shape(cache: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Heads, positions and width of a cache, by the first array that has them."""
    return next((shape for shape in cache.values() if len(shape) == 3), (0, 0, 0))


def _of_pool(manifest: Manifest, pool: Pool) -> Iterator[str]:
    kinds, n = pool.kinds, len(manifest.tokens)
    llama = list(KINDS[-1:] if manifest.probe else kinds_of(n))
    once = list(dict.fromkeys(kinds))
    if not kinds or kinds != (llama if manifest.has_truth else once):
        expected = ", ".join(llama) if manifest.has_truth else "one or more, each once"
        yield f"{FLOORS}: kinds are {', '.join(kinds) or 'none'}, expected {expected}"
        return
    wanted = members_of(manifest.plans, kinds, length=n)
    for where, members in ((FLOORS, pool.members), ("manifest.json", manifest.pool)):
        if members != wanted:
            found = ", ".join(members) or "none"
            yield f"{where}: members are {found}, expected {', '.join(wanted)}"
    if pool.distinct != manifest.pool_distinct:
        what = f"{pool.distinct} members are distinct, {manifest.pool_distinct} in manifest.json"
        yield f"{FLOORS}: {what}, expected one number"
    if not manifest.has_truth and pool.distinct < 2:
        what = f"{pool.distinct} bitwise distinct members, expected 2 or more"
        yield f"{FLOORS}: {what}, as there is no truth to measure them by"


def _of_sums(measure: Trace, pool: Pool) -> Iterator[str]:
    """Whether the sequential member's rows, by whose length it may read more, are the model's."""
    hidden = measure.arrays.get("tap/000/hidden")
    if hidden is not None and pool.widest != hidden.shape[-1]:
        what = f"the sequential member added up rows of {pool.widest}"
        yield f"{FLOORS}: {what}, expected {hidden.shape[-1]} as hidden states have"


def _of_floors(measure: Trace, pool: Pool, floors: Mapping[str, Array]) -> list[str]:
    odd = []
    for name, shape in _floor_shapes(measure, pool).items():
        array = floors.get(name)
        if array is None or list(array.shape) != shape:
            found = "none" if array is None else list(array.shape)
            odd.append(f"{name} has shape {found}, expected {shape}")
        # A member at a time: those of a long sequence's keys take hundreds of MB together.
        elif not all(np.isfinite(of).all() for of in array):
            odd.append(f"{name} holds a value that is not finite")
        elif name != "shift" and any((np.asarray(of) < 0).any() for of in array):
            odd.append(f"{name} holds an error below 0")
    if not odd and pool.distinct != (distinct := _distinct(pool, floors)):
        odd.append(f"{pool.distinct} members are distinct, expected {distinct} by their errors")
    return [f"{FLOORS}: {reason}" for reason in odd]


def _floor_shapes(measure: Trace, pool: Pool) -> dict[str, list[int]]:
    rows, members, cache = len(measure.positions), len(pool.members), _cache(measure)
    heads, n, _ = _shape(cache) if cache else (0, rows, 0)
    shapes = {name: [members, rows] for name in ("rms", "shift", "peak")}
    shapes |= {name: [members, len(cache) // 2, heads, n] for name in ("keys", "values")}
    return shapes | {"cached": [len(pool.kinds), rows]}


def _distinct(pool: Pool, floors: Mapping[str, Array]) -> int:
    """How many ordinary members differ: runs that are bitwise equal have bitwise equal errors."""
    at = [pool.members.index(name) for name in ordinary(pool.members)]
    errors = [np.asarray(floors[name])[at] for name in ("rms", "shift", "peak")]
    return len({tuple(of[i].tobytes() for of in errors) for i in range(len(at))})

"""An oracle folder and candidates made from random numbers: no model, no weights, a vocabulary of
64 and 24 tokens; and the probe of 300 tokens, of which a sample of rows is kept, as of any
sequence of more than `rows.WHOLE`.

The truth is random; the five members of the pool, and a correct candidate, are the truth plus
independent noise of the size that float32 arithmetic makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxkv.judge.case import Case, Probed
from oracle.formats.contents import kinds_of
from oracle.formats.plan import (
    PROBE_LENGTH,
    Plan,
    judged_plans,
    probe_plans,
    probe_rows,
    probe_tokens,
)
from oracle.formats.run_folder import Manifest, Pool
from oracle.formats.trace import Meta, Trace

Array = npt.NDArray[Any]
N, PROMPT, VOCAB, LAYERS, HEADS, DIM = 24, 5, 64, 2, 2, 8
NOISE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-1}
MEMBERS = ["eager-full", "eager-step", "sdpa-full", "sdpa-step", "sdpa-chunked", "sequential-full"]
LINUX = {"os": "Linux", "python": "3.11.9", "threads": 2}


def plans(n: int = N, prompt: int = PROMPT) -> dict[str, Plan]:
    return judged_plans([t % VOCAB for t in range(3, 3 + n)], prompt=prompt)


def texts(n: int = N) -> list[str]:
    """One text for each id, of which there are VOCAB."""
    known = ["The", " capital", " of", " France", " is", *(f" t{i}" for i in range(5, VOCAB))]
    return [known[i % VOCAB] for i in range(n)]


def noisy(truth: Array, rng: np.random.Generator, size: float) -> Array:
    """The truth as a float32 run gives it, independent noise on every number."""
    return (truth + size * rng.standard_normal(truth.shape)).astype(np.float32)


def meta(plan: Plan, *, engine: str = "port", dtype: str = "float32", **more: Any) -> Meta:
    given = {"fingerprint": "f" * 64, "config_digest": "c" * 64, "environment": LINUX}
    given |= {"weights_dtype": "float32"} | more
    return Meta(plan, engine, "1.0", dtype, **given)


def cache_names() -> list[str]:
    return [f"kv/a/{layer:03d}/{kind}" for layer in range(LAYERS) for kind in ("keys", "values")]


def make_case(
    *,
    n: int = N,
    prompt: int = PROMPT,
    dtype: str = "float32",
    seed: int = 0,
    noise: float | None = None,
    kv: tuple[int, int] = (HEADS, DIM),
    tokens: list[int] | None = None,
) -> Case:
    """The oracle's side; `kv` are K and D."""
    size, given = NOISE[dtype] if noise is None else noise, {"n": n, "prompt": prompt, "kv": kv}
    judged = plans(n, prompt) if tokens is None else judged_plans(tokens, prompt=prompt)
    rows = judged["full"].rows
    kept = range(n) if isinstance(rows, str) else rows
    case = _case(judged, kept, **given, dtype=dtype, seed=seed, size=size)
    if tokens is None:
        return case
    return replace(case, manifest=replace(case.manifest, tokens=tokens, texts=[]))


def make_probe(*, dtype: str = "float32", seed: int = 10, n: int = PROBE_LENGTH) -> Probed:
    """The probe with its own oracle folder and a correct engine's runs in both lanes."""
    judged = probe_plans(probe_tokens(VOCAB, n))
    kept, size = probe_rows(n), NOISE[dtype]
    case = _case(judged, kept, n=n, prompt=n, dtype=dtype, seed=seed, size=size, probe=True)
    return Probed(case, make_candidates(case), make_algebra(case))


def _case(
    judged: dict[str, Plan],
    kept: Sequence[int],
    *,
    n: int,
    prompt: int,
    dtype: str,
    seed: int,
    size: float,
    kv: tuple[int, int] = (HEADS, DIM),
    probe: bool = False,
) -> Case:
    """`kept` are the positions of the rows of logits."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {
        "logits": 8 * rng.standard_normal((len(kept), VOCAB)),
        "positions": np.array(kept, np.int32),
    }
    arrays |= {name: rng.standard_normal((kv[0], n, kv[1])) for name in cache_names()}
    truth = Trace(
        meta(judged["full"], engine="truth", dtype="float64", weights_dtype=dtype), arrays
    )
    members = [m for m in MEMBERS if m.split("-")[1] in judged]
    kinds = ["sdpa"] if probe else list(kinds_of(n))
    members = [m for m in members if "eager" in kinds or not m.startswith("eager")]
    runs = {m: noisy(arrays["logits"], rng, size) for m in members}
    caches = {
        m: {name: noisy(arrays[name], rng, size / 8) for name in cache_names()} for m in members
    }
    names = ("full", "step", "chunked")
    references = {
        name: Trace(
            meta(judged[name], engine="transformers", dtype=dtype, weights_dtype=dtype),
            {"logits": runs[f"sdpa-{name}"], "positions": arrays["positions"]}
            | caches[f"sdpa-{name}"],
        )
        for name in names
        if name in judged
    }
    floors = _raw_floors(truth.arrays, runs, caches, "chunked" if probe else "step")
    manifest = Manifest(
        source="default",
        name="tiny",
        note="random",
        revision=None,
        fingerprint="f" * 64,
        config_digest="c" * 64,
        dtype=dtype,
        prompt="The capital of France is" if prompt == PROMPT else None,
        prompt_tokens=prompt,
        tokens=list(probe_tokens(VOCAB, n)) if probe else [t % VOCAB for t in range(3, 3 + n)],
        texts=[] if probe else texts(n),
        plans={name: plan.digest for name, plan in judged.items()},
        files=dict.fromkeys(_files(judged), "0" * 64),
        proofs={
            "truth_agreement": 1.1e-13,
            "transformers_double": 5.5e-16,
            "truth_max": float(np.abs(arrays["logits"]).max()),
            "float32_parts": 5.5e-8,
        },
        generated=[],
        pool=members,
        pool_distinct=len(members) - 1,
        left_out={},
        ignored_keys=[],
        packed="",
        environment={"os": "Linux", "torch": "2.13.0", "threads": 2},
        inputs="i" * 64,
        probe=probe,
    )
    return Case(manifest, truth, references, Pool(members, kinds, len(members) - 1), floors)


def _files(judged: Mapping[str, Plan]) -> list[str]:
    kept = [f"reference-{name}" for name in judged if name in ("full", "step", "chunked")]
    tensors = [f"{name}.safetensors" for name in ("truth", "floors", *kept)]
    return [*tensors, *(f"plans/{name}.json" for name in judged)]


def _raw_floors(
    truth: Mapping[str, Array],
    runs: dict[str, Array],
    caches: dict[str, dict[str, Array]],
    cached: str,
) -> dict[str, Array]:
    """The raw errors of the pool, written out a second time here."""
    errors = np.stack([run - truth["logits"] for run in runs.values()])
    shift = errors.mean(-1)
    centred = errors - shift[..., None]
    floors = {
        "rms": np.sqrt((centred**2).mean(-1)),
        "shift": shift,
        "peak": np.abs(centred).max(-1),
    }
    floors["cached"] = np.stack(
        [
            np.sqrt(((runs[f"{k}-{cached}"].astype(np.float64) - runs[f"{k}-full"]) ** 2).mean(-1))
            for k in ("eager", "sdpa")
            if f"{k}-full" in runs
        ]
    )
    for kind in ("keys", "values"):
        names = [name for name in cache_names() if name.endswith(kind)]
        of = [
            np.stack([np.sqrt(((cache[name] - truth[name]) ** 2).mean(-1)) for name in names])
            for cache in caches.values()
        ]
        floors[kind] = np.stack(of)
    return floors


def make_candidates(case: Case, *, seed: int = 1, size: float | None = None) -> dict[str, Trace]:
    """A correct engine's runs of the judged plans: rows for all positions, for prefixes the last
    ones; every other plan has its cache.
    """
    others, rng, dtype, about = (
        np.random.default_rng(seed + 100),
        np.random.default_rng(seed),
        case.manifest.dtype,
        case.manifest,
    )
    size, runs = NOISE[dtype] if size is None else size, {}
    judged = (
        probe_plans(about.tokens)
        if about.probe
        else judged_plans(about.tokens, prompt=about.prompt_tokens)
    )
    for name, plan in judged.items():
        first = about.prompt_tokens - 1 if name == "prefixes" else 0
        held = case.truth.positions >= first
        arrays: dict[str, Array] = {
            "logits": noisy(case.truth.logits[held], rng, size),
            "positions": case.truth.positions[held],
        }
        if name != "prefixes":
            by = rng if name == case.cached else others
            arrays |= {kv: noisy(case.truth.arrays[kv], by, size / 8) for kv in cache_names()}
        runs[name] = Trace(meta(plan, dtype=dtype), arrays)
    return runs


def make_algebra(case: Case, *, seed: int = 2) -> dict[str, Trace]:
    """The same engine in float64: off by 1e-14."""
    rng, runs = np.random.default_rng(seed), {}
    for name, trace in make_candidates(case).items():
        arrays: dict[str, Array] = {"positions": trace.positions}
        for key in trace.arrays:
            if key != "positions":
                exact = case.truth.arrays[key]
                if key == "logits":
                    exact = exact[np.searchsorted(case.truth.positions, trace.positions)]
                arrays[key] = exact + 1e-13 * rng.standard_normal(exact.shape)
        runs[name] = Trace(
            replace(trace.meta, dtype="float64", probes={"matmul": 1e-16, "tanh": 2e-16}), arrays
        )
    return runs


def changed(trace: Trace, name: str, change: Callable[[Array], Array]) -> Trace:
    """The trace with one array changed; the original stays as it is."""
    return replace(trace, arrays=dict(trace.arrays) | {name: change(trace.arrays[name].copy())})


def rows(trace: Trace, keep: list[int]) -> Trace:
    """The trace with only these rows, in this order, repeats allowed."""
    return replace(
        trace,
        arrays=dict(trace.arrays)
        | {name: trace.arrays[name][keep] for name in ("logits", "positions")},
    )

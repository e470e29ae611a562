"""The truth of a plan of one call, written as a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oracle.formats import trace
from oracle.formats.plan import Call, Plan
from oracle.formats.progress import Progress, silent
from oracle.formats.tensors import Shapes
from oracle.truth import llama
from oracle.truth.config import Config
from oracle.truth.weights import Weights


def write(
    path: Path,
    weights: Weights,
    config: Config,
    *,
    plan: Plan,
    segments: Mapping[str, Sequence[int]],
    shared: int = 0,
    taps: frozenset[str] = frozenset({"hidden"}),
    environment: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> tuple[float, float]:
    """Writes the trace of `plan`, followed as `segments` and `shared` say, first of all whole.

    Logits are those of the rows that the plan keeps; keys, values and taps those of all positions.
    Returns max |T|, and the largest difference of a logit between the first way and any other.
    """
    call = _only_call(plan)
    (tokens,), names = call.batch, _names(call.cache, taps)
    meta = _meta(weights, plan, dict(environment or {}))
    (kept,) = map(plan.kept, plan.calls())
    with trace.writer(path, meta, _shapes(config, len(tokens), len(kept), names)) as out:

        def sink(i: int, seen: dict[str, Any]) -> None:
            for key, tensor in seen.items():
                out.arrays[names[key].format(i)][...] = tensor.numpy()

        tables = llama.rope_tables(config, len(tokens))
        ways: Any = {"segments": segments, "shared": shared, "taps": taps, "tables": tables}
        streams = llama.follow(weights, config, tokens, sink=sink, progress=progress, **ways)
        for name, table in zip(trace.ROPE_TABLES, tables, strict=True):
            out.arrays[name][...] = table.numpy()
        streams = {n: hidden[list(kept)] for n, hidden in streams.items()}
        given = streams, weights.head_blocks(config), out.arrays["logits"]
        most, apart = llama.write_logits(*given, positions=kept)
        out.arrays["positions"][...] = kept
        out.arrays["steps"][...] = len(plan.steps) - 1
        out.finish(meta.to_json())
    return most, apart


def _names(cache: str, taps: frozenset[str]) -> dict[str, str]:
    """Where each array of a layer goes, to be formatted with the layer's number."""
    names = {kind: f"kv/{cache}/{{:03d}}/{kind}" for kind in ("keys", "values")}
    return names | {tap: f"tap/{{:03d}}/{tap}" for tap in taps}


def _only_call(plan: Plan) -> Call:
    call = plan.steps[-1]
    if not isinstance(call, Call) or call.batched or len(plan.steps) > 2:
        has = f"plan {plan.name!r} has {len(plan.steps)} steps"
        raise ValueError(f"truth: {has}, expected one call on a new cache")
    return call


def _shapes(config: Config, n: int, rows: int, names: Mapping[str, str]) -> Shapes:
    """The trace's arrays, of n positions and so many rows of logits.

    `names` are those of each layer, to be formatted with its number.
    """
    kv, taps = (config.n_kv_heads, n, config.head_dim), config.taps(n)
    arrays: dict[str, tuple[type, tuple[int, ...]]] = {
        "positions": (np.int32, (rows,)),
        "steps": (np.int32, (rows,)),
        "logits": (np.float64, (rows, config.vocab_size)),
    }
    arrays |= dict.fromkeys(trace.ROPE_TABLES, (np.float64, (n, config.head_dim // 2)))
    for key, name in names.items():
        for i in range(config.n_layers):
            arrays[name.format(i)] = (np.float64, taps.get(key, kv))
    return arrays


def _meta(weights: Weights, plan: Plan, environment: dict[str, Any]) -> trace.Meta:
    return trace.Meta(
        plan=plan,
        engine="truth",
        engine_version=str(environment.get("torch", "")),
        dtype="float64",
        weights_dtype=weights.dtype,
        fingerprint=weights.checkpoint.fingerprint,
        config_digest=weights.checkpoint.config_digest,
        outcomes=[trace.Outcome() for _ in plan.steps],
        environment=environment,
    )

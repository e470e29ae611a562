"""A question's answer, computed and written into a folder: the transformers pool, the truth, its proofs, the measures.

For a neighbour of Llama there is no truth: the pool's mean stands in its place. One set of weights is in memory at a time:
transformers' in the run's dtype, the same widened to float64, then the truth's, a layer at a time. Nothing that is not
finite is written as good.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oracle.formats import disk, run_folder, trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, Greedy, New, Plan
from oracle.formats.run_folder import Manifest
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace
from oracle.model import packing
from oracle.pool import errors as floors
from oracle.pool import mean, reference
from oracle.pool.neighbour import Neighbour
from oracle.question import Progress, Question
from oracle.truth import llama as truth
from oracle.truth.config import Config

# A proof of the truth, and what chose its limit. Right, the first reads 1e-14; any wrong mask, position or cache row makes it
# 1e-5 or more. Right, the second reads 5e-8 to 1e-7 on text and up to 5.1e-7 on random or repeated ids, where one early
# position dominates; an eps of 1.1e-5 instead of 1e-5 makes it 7e-6 or more on all of them.
PROOF_LIMITS = {"truth_agreement": 1e-10, "transformers_double": 1e-6}
PROOF_POSITIONS = 32


@dataclass(frozen=True, slots=True)
class _Pool:
    """What transformers computed: the greedy tokens, the judged plans, its members' files, and logits of its float64 form.

    `left_out` says by kind of attention how far it is from the class's own in float64, where that is too far.
    """

    generated: list[int]
    plans: dict[str, Plan]
    kinds: tuple[str, ...]
    files: dict[str, str]
    double: Array
    left_out: dict[str, float]


def write(
    question: Question, folder: Path, *, keep_pool: bool = False, progress: Progress | None = None
) -> Manifest:
    """Everything but the manifest into `folder`, and the manifest."""
    reference.set_up(question.threads)
    tell = progress or (lambda what, done, total: None)
    pool = _pool(question, folder, tell)
    for name, plan in pool.plans.items():
        disk.write_text(
            folder / "plans" / f"{name}.json", json.dumps(plan.to_json(), sort_keys=True) + "\n"
        )
    environment = reference.environment() | {"dtype": question.dtype, "attention": pool.kinds[-1]}
    members = {name: trace.read(folder / file) for name, file in pool.files.items()}
    if isinstance(question.config, Neighbour):
        true = mean.write(
            folder / run_folder.MEAN, pool.plans["full"], members, environment=environment
        )
        proofs = mean.proofs(true, members, pool.double, dtype=question.dtype)
    else:
        true, proofs = _truth(question, question.config, folder, pool, environment, progress)
    tell("measuring the pool", 0, 1)
    measured = floors.write(folder / run_folder.FLOORS, true, members, kinds=pool.kinds)
    step, full = (members[f"{pool.kinds[-1]}-{plan}"].logits for plan in ("step", "full"))
    proofs["reference_step_full_max"] = max(
        float(np.abs(step[rows] - full[rows]).max()) for rows in floors.blocks(full)
    )
    if not keep_pool:
        for file in pool.files.values():
            if file.startswith("pool-"):
                (folder / file).unlink()
    if isinstance(question.config, Config):
        environment["rope"] = question.config.rope
    return _manifest(question, folder, pool, measured, proofs, environment)


def _truth(
    question: Question,
    config: Config,
    folder: Path,
    pool: _Pool,
    environment: Mapping[str, Any],
    progress: Progress | None,
) -> tuple[Trace, dict[str, float]]:
    """The truth's trace and its proofs."""
    most, apart = write_truth(
        folder / run_folder.TRUTH,
        truth.Weights(question.checkpoint, dtype=question.dtype),
        config,
        plan=pool.plans["full"],
        segments=question.segments(pool.plans),
        taps=question.taps,
        environment=environment,
        progress=progress,
    )
    true = trace.read(folder / run_folder.TRUTH)
    return true, _proofs(true, pool.double, most, apart)


def write_truth(
    path: Path,
    weights: truth.Weights,
    config: Config,
    *,
    plan: Plan,
    segments: Mapping[str, Sequence[int]],
    taps: frozenset[str] = frozenset({"hidden"}),
    environment: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[float, float]:
    """Writes the trace of a plan of one call, followed as `segments` say, the first of them whole.

    Returns max |T|, and the largest difference of a logit between the first way and any other: the first proof.
    """
    call = plan.steps[-1]
    if not isinstance(call, Call) or len(plan.steps) > 2:
        raise ValueError(
            f"truth: plan {plan.name!r} has {len(plan.steps)} steps, expected one call on a new cache"
        )
    n, shapes = len(call.tokens), config.taps(len(call.tokens))
    kv = (config.n_kv_heads, n, config.head_dim)
    names = {"keys": f"kv/{call.cache}/{{:03d}}/keys", "values": f"kv/{call.cache}/{{:03d}}/values"}
    names |= {tap: f"tap/{{:03d}}/{tap}" for tap in taps}
    arrays: dict[str, tuple[type, tuple[int, ...]]] = {
        "positions": (np.int32, (n,)),
        "steps": (np.int32, (n,)),
    }
    arrays["logits"] = (np.float64, (n, config.vocab_size))
    arrays |= {
        name.format(i): (np.float64, shapes.get(key, kv))
        for key, name in names.items()
        for i in range(config.n_layers)
    }
    meta = _meta(weights, plan, environment)
    with trace.writer(path, meta, arrays) as out:

        def sink(i: int, seen: dict[str, Any]) -> None:
            for key, tensor in seen.items():
                out.arrays[names[key].format(i)][...] = tensor.numpy()

        streams = truth.follow(
            weights, config, call.tokens, segments=segments, taps=taps, sink=sink, progress=progress
        )
        most, apart = truth.write_logits(streams, weights.head(config), out.arrays["logits"])
        out.arrays["positions"][...] = np.arange(n)
        out.arrays["steps"][...] = len(plan.steps) - 1
        out.finish(meta.to_json())
    return most, apart


def _meta(weights: truth.Weights, plan: Plan, environment: Mapping[str, Any] | None) -> trace.Meta:
    return trace.Meta(
        plan=plan,
        engine="truth",
        engine_version=str((environment or {}).get("torch", "")),
        dtype="float64",
        weights_dtype=weights.dtype,
        fingerprint=weights.checkpoint.fingerprint,
        config_digest=weights.checkpoint.config_digest,
        outcomes=[trace.Outcome() for _ in plan.steps],
        environment=dict(environment or {}),
    )


def _pool(question: Question, folder: Path, tell: Progress) -> _Pool:
    """Runs the pool; its traces go to files, and transformers' weights go when this returns."""
    dtype = question.dtype
    tell("loading the weights into transformers", 0, 1)
    model = reference.Reference(question.checkpoint, dtype=dtype)
    generated: list[int] = []
    if question.steps:
        tell("greedy tokens", 0, 1)
        greedy = Plan("greedy", (New("a"), Greedy("a", question.tokens, 0, question.steps)), "last")
        generated = (
            _whole(model.run(greedy, attention=model.kinds[-1])).meta.outcomes[1].tokens or []
        )
    plans = question.plans(generated)
    files = _files(plans, model.kinds)
    for i, (name, file) in enumerate(files.items()):
        tell(f"transformers pool ({dtype}): {name}", i, len(files))
        attention, plan = name.split("-")
        made = _whole(model.run(plans[plan], attention="eager" if attention == "eager" else "sdpa"))
        trace.write(folder / file, made.meta, made.arrays)
    tell("transformers in float64", 0, 1)
    tokens = _proof_tokens(question, generated)
    if not isinstance(question.config, Neighbour):
        return _Pool(
            generated, plans, model.kinds, files, model.double(tokens, rows=PROOF_POSITIONS), {}
        )
    doubles = {kind: _double(model, tokens, kind) for kind in model.kinds}
    apart = {
        kind: value
        for kind, value in mean.faithful(doubles).items()
        if not value <= mean.KINDS_APART
    }
    for name in [name for name in files if name.split("-")[0] in apart]:
        (folder / files.pop(name)).unlink()
    kinds = tuple(kind for kind in model.kinds if kind not in apart)
    return _Pool(generated, plans, kinds, files, doubles[kinds[0]], apart)


def _double(model: reference.Reference, tokens: list[int], kind: str) -> Array:
    try:
        return model.double(
            tokens, rows=PROOF_POSITIONS, attention="eager" if kind == "eager" else "sdpa"
        )
    except Exception as error:  # code that names a dtype of its own does not run in another
        why = " ".join(str(error).split())[:200]
        raise Refusal(
            f"{model.checkpoint.folder}: transformers' own code of it does not run in float64 ({why}), expected that as the only "
            "witness where no truth is written out; judge another model"
        ) from error


def _proof_tokens(question: Question, generated: list[int]) -> list[int]:
    """As many tokens as the proof looks at; with longrope enough for transformers to choose the factors of the whole sequence."""
    tokens = question.sequence(generated)
    if question.original is not None and len(tokens) > question.original:
        return tokens[: max(PROOF_POSITIONS, question.original + 1)]
    return tokens[:PROOF_POSITIONS]


def _whole(made: Trace) -> Trace:
    """The trace, once every step of it went well and every number is finite."""
    for i, outcome in enumerate(made.meta.outcomes):
        if outcome.error:
            raise Refusal(
                f"{made.label}: step {i} failed ({outcome.error}), expected logits; the model cannot be judged on these tokens"
            )
    floors.require_finite(made)
    return made


def _files(plans: Mapping[str, Plan], kinds: Sequence[str]) -> dict[str, str]:
    """The pool's members and their files; those of the last kind are the references that stay."""
    members = {name: name.split("-") for name in floors.members_of(plans, kinds)}
    return {
        name: f"{'reference-' + plan if kind == kinds[-1] else 'pool-' + name}.safetensors"
        for name, (kind, plan) in members.items()
    }


def _proofs(true: Trace, double: Array, most: float, apart: float) -> dict[str, float]:
    if not most > 0:
        raise Refusal(
            f"{true.label}: every logit is 0, expected a trained model's; check the weights"
        )
    error = double - true.logits[: len(double)]
    measured = {
        "truth_agreement": apart / most,
        "transformers_double": float(np.sqrt(np.mean(error * error))) / most,
    }
    return (
        measured
        | {f"{name}_limit": limit for name, limit in PROOF_LIMITS.items()}
        | {"truth_max": most}
    )


def _manifest(
    question: Question,
    folder: Path,
    pool: _Pool,
    measured: run_folder.Pool,
    proofs: dict[str, float],
    environment: dict[str, Any],
) -> Manifest:
    checkpoint, sequence = question.checkpoint, question.sequence(pool.generated)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return Manifest(
        source=checkpoint.source,
        name=checkpoint.name,
        note=checkpoint.note,
        revision=checkpoint.revision,
        fingerprint=checkpoint.fingerprint,
        config_digest=checkpoint.config_digest,
        dtype=question.dtype,
        prompt=question.prompt,
        prompt_tokens=question.prompt_tokens,
        tokens=sequence,
        texts=[question.tokenizer.token_text(id) for id in sequence] if question.tokenizer else [],
        generated=pool.generated,
        plans={name: plan.digest for name, plan in pool.plans.items()},
        files={path.relative_to(folder).as_posix(): disk.sha256(path) for path in files},
        proofs=proofs,
        pool=measured.members,
        pool_distinct=measured.distinct,
        left_out=pool.left_out,
        ignored_keys=list(checkpoint.without),
        packed=packing.words(checkpoint.packed),
        environment=environment,
        inputs=question.digest(),
    )

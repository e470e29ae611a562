"""A question's answer: the transformers pool, the truth with its proofs, and the measures.

For a neighbour of Llama there is no truth, and the pool's mean stands in its place. One set of
weights is in memory at a time: transformers' in the run's dtype, the same widened to float64, then
the truth's, a layer at a time. Nothing that is not finite is written as good.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oracle.formats import disk, run_folder, trace
from oracle.formats.errors import Refusal, one_line
from oracle.formats.plan import Greedy, New, Plan
from oracle.formats.progress import Progress, silent
from oracle.formats.run_folder import FLOORS, MEAN, TRUTH, Manifest
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace
from oracle.model import packing
from oracle.pool import errors, mean, reference
from oracle.pool.neighbour import Neighbour
from oracle.pool.reference import Attention, Reference
from oracle.question import Question
from oracle.truth import record
from oracle.truth.config import Config
from oracle.truth.weights import Weights

# The truth's proofs, and what chose their limits. `truth_agreement`: step, chunked and full agree.
# A correct truth reads 1e-14; any wrong mask, position or cache row makes it 1e-5 or more.
# `transformers_double`: the distance from transformers' .double(). A correct truth reads 5e-8 to
# 1e-7 on text and up to 5.1e-7 on random or repeated ids, where one early position dominates; an
# eps of 1.1e-5 instead of 1e-5 makes it 7e-6 or more on all of them.
PROOF_LIMITS = {"truth_agreement": 1e-10, "transformers_double": 1e-6}
PROOF_POSITIONS = 32


@dataclass(frozen=True, slots=True)
class _Pool:
    """What transformers computed: the greedy tokens, and the judged plans as its members ran them.

    `files` are the members' traces, `double` the first positions' logits in float64. `left_out`
    says of a kind of attention how far it is from the class's own in float64, if that is too far.
    """

    generated: list[int]
    plans: dict[str, Plan]
    kinds: tuple[Attention, ...]
    files: dict[str, str]
    double: Array
    left_out: dict[str, float]


def write(
    question: Question, folder: Path, *, keep_pool: bool = False, progress: Progress = silent
) -> Manifest:
    """Everything but the manifest into `folder`, and the manifest."""
    reference.set_up(question.threads)
    pool = _run_pool(question, folder, progress)
    for name, plan in pool.plans.items():
        text = json.dumps(plan.to_json(), sort_keys=True) + "\n"
        disk.write_text(folder / "plans" / f"{name}.json", text)
    members = {name: trace.read(folder / file) for name, file in pool.files.items()}
    own = pool.kinds[-1]
    environment = reference.environment() | {"dtype": question.dtype, "attention": own}
    measure, proofs = _measure(question, folder, pool, members, environment, progress)
    progress("measuring the pool", 0, 1)
    measured = errors.write(folder / FLOORS, measure, members, kinds=pool.kinds)
    step, full = (members[f"{own}-{plan}"].logits for plan in ("step", "full"))
    proofs["reference_step_full_max"] = max(
        float(np.abs(step[rows] - full[rows]).max()) for rows in errors.blocks(full)
    )
    for file in pool.files.values():
        if file.startswith("pool-") and not keep_pool:
            (folder / file).unlink()
    if isinstance(question.config, Config):
        environment["rope"] = question.config.rope
    return _manifest(question, folder, pool, measured, proofs, environment)


def _run_pool(question: Question, folder: Path, progress: Progress) -> _Pool:
    """Runs the pool. Its traces go to files, and transformers' weights go when this returns."""
    dtype = question.dtype
    progress("loading the weights into transformers", 0, 1)
    model = Reference(question.checkpoint, dtype=dtype)
    generated = _greedy(question, model, progress)
    plans = question.plans(generated)
    files = _files(plans, model.kinds)
    for i, (name, file) in enumerate(files.items()):
        progress(f"transformers pool ({dtype}): {name}", i, len(files))
        kind, plan = name.split("-")
        made = _whole(model.run(plans[plan], attention=_attention(kind)))
        trace.write(folder / file, made.meta, made.arrays)
    progress("transformers in float64", 0, 1)
    tokens = _proof_tokens(question, generated)
    if not isinstance(question.config, Neighbour):
        double = model.double(tokens, rows=PROOF_POSITIONS)
        return _Pool(generated, plans, model.kinds, files, double, {})
    doubles = {kind: _double(model, tokens, kind) for kind in model.kinds}
    distances = mean.faithful(doubles)
    apart = {kind: value for kind, value in distances.items() if not value <= mean.KINDS_APART}
    for name in [name for name in files if name.split("-")[0] in apart]:
        (folder / files.pop(name)).unlink()
    kinds = tuple(kind for kind in model.kinds if kind not in apart)
    return _Pool(generated, plans, kinds, files, doubles[kinds[0]], apart)


def _greedy(question: Question, model: Reference, progress: Progress) -> list[int]:
    if not question.steps:
        return []
    progress("greedy tokens", 0, 1)
    steps = New("a"), Greedy("a", question.tokens, 0, question.steps)
    made = _whole(model.run(Plan("greedy", steps, "last"), attention=model.kinds[-1]))
    return made.meta.outcomes[1].tokens or []


def _attention(kind: str) -> Attention:
    return "eager" if kind == "eager" else "sdpa"


def _double(model: Reference, tokens: list[int], kind: Attention) -> Array:
    try:
        return model.double(tokens, rows=PROOF_POSITIONS, attention=kind)
    except Exception as error:  # code that names a dtype of its own does not run in another
        fails = f"transformers' own code of it does not run in float64 ({one_line(error, 200)})"
        what = f"{fails}, expected that as the only witness where no truth is written out"
        raise Refusal(what, where=model.checkpoint.folder, remedy="judge another model") from error


def _proof_tokens(question: Question, generated: list[int]) -> list[int]:
    """As many tokens as the proof looks at.

    With longrope enough for transformers to choose the factors of the whole sequence.
    """
    tokens, original = question.sequence(generated), question.config.original
    if original is not None and len(tokens) > original:
        return tokens[: max(PROOF_POSITIONS, original + 1)]
    return tokens[:PROOF_POSITIONS]


def _whole(made: Trace) -> Trace:
    """The trace, once every step of it went well and every number is finite."""
    for i, outcome in enumerate(made.meta.outcomes):
        if outcome.error:
            what = f"step {i} failed ({outcome.error}), expected logits"
            remedy = "the model cannot be judged on these tokens"
            raise Refusal(what, where=made.label, remedy=remedy)
    errors.require_finite(made)
    return made


def _files(plans: Mapping[str, Plan], kinds: Sequence[str]) -> dict[str, str]:
    """The pool's members and their files; those of the last kind are the references that stay."""
    files = {}
    for name in errors.members_of(plans, kinds):
        kind, plan = name.split("-")
        stem = f"reference-{plan}" if kind == kinds[-1] else f"pool-{name}"
        files[name] = f"{stem}.safetensors"
    return files


def _measure(
    question: Question,
    folder: Path,
    pool: _Pool,
    members: Mapping[str, Trace],
    environment: Mapping[str, Any],
    progress: Progress,
) -> tuple[Trace, dict[str, float]]:
    """The truth, or the mean in its place, and its proofs."""
    plan, config = pool.plans["full"], question.config
    if isinstance(config, Neighbour):
        made = mean.write(folder / MEAN, plan, members, environment=environment)
        return made, mean.proofs(made, members, pool.double, dtype=question.dtype)
    most, apart = record.write(
        folder / TRUTH,
        Weights(question.checkpoint, dtype=question.dtype),
        config,
        plan=plan,
        segments=question.segments(pool.plans),
        taps=question.taps,
        environment=environment,
        progress=progress,
    )
    true = trace.read(folder / TRUTH)
    mean.require_signal(most, true)
    error = pool.double - true.logits[: len(pool.double)]
    double = float(np.sqrt(np.mean(error * error))) / most
    proofs = {"truth_agreement": apart / most, "transformers_double": double, "truth_max": most}
    return true, proofs | {f"{name}_limit": limit for name, limit in PROOF_LIMITS.items()}


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

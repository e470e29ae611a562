"""A question's answer: the transformers pool, the truth with its proofs, and the measures.

For a neighbour of Llama there is no truth, and the pool's mean stands in its place. One set of
weights is in memory at a time: transformers' in the run's dtype, the same widened to float64, then
the truth's, a layer at a time. Nothing that is not finite is written as good.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from oracle.formats import disk, rows, run_folder, trace
from oracle.formats.errors import Refusal, one_line
from oracle.formats.plan import Greedy, New, Plan
from oracle.formats.progress import Note, Progress, silent
from oracle.formats.run_folder import FLOORS, MEAN, TRUTH, Manifest
from oracle.formats.tensors import Array
from oracle.formats.trace import Outcome, Trace
from oracle.model import packing
from oracle.pool import errors, mean, reference
from oracle.pool.neighbour import Neighbour
from oracle.pool.reference import Reference
from oracle.question import Question
from oracle.truth import record
from oracle.truth.config import Config
from oracle.truth.weights import Weights

PROOF_POSITIONS = 32

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Runs:
    """What transformers computed: the greedy tokens, the judged plans and each member's trace."""

    generated: list[int]
    plans: dict[str, Plan]
    members: dict[str, Trace]


@dataclass(frozen=True, slots=True)
class _Pool(_Runs):
    """The runs of the kinds of attention that are believed.

    `double` (n, V) are the first positions' logits in float64. `parts` is the rms of what they
    change by if all is float64 but what transformers computes in float32 whatever its weights are.
    `widest` is the longest row that the sequential member added up.
    `left_out` says of a kind of attention how far it is from the class's own in float64, if that is
    too far. `environment` is what the numbers depend on.
    """

    kinds: tuple[str, ...]
    double: Array
    parts: float
    widest: int
    left_out: dict[str, float]
    environment: dict[str, Any]


def write(
    asked: Mapping[Path, Question],
    *,
    keep_pool: bool = False,
    progress: Progress = silent,
    note: Note = silent,
) -> dict[Path, Manifest]:
    """Answers questions about one model, each into a folder: everything but the manifests.

    Returns the manifests. A probe that cannot be measured is left out beside another question.
    """
    reference.set_up(next(iter(asked.values())).threads)
    pools = _run_pools(asked, progress, note)

    def measured(folder: Path) -> Manifest:
        return _measured(asked[folder], folder, pools[folder], keep_pool, progress)

    return _each(pools, asked, measured, note)


def _each(
    folders: Iterable[Path],
    asked: Mapping[Path, Question],
    do: Callable[[Path], _T],
    note: Note,
) -> dict[Path, _T]:
    """What is done for each folder, without that of a probe beside another if it is refused."""
    made = {}
    for folder in folders:
        try:
            made[folder] = do(folder)
        except Refusal as error:
            if not asked[folder].probe or len(asked) == 1:
                raise
            shutil.rmtree(folder)
            note(f"warning: no probe, as it cannot be measured: {error}")
    return made


def _run_pools(asked: Mapping[Path, Question], progress: Progress, note: Note) -> dict[Path, _Pool]:
    """The pool of each question. transformers' weights go when this returns."""
    first = next(iter(asked.values()))
    progress("loading the weights into transformers", 0, 1)
    model = Reference(first.checkpoint, dtype=first.dtype)

    def run(folder: Path) -> _Runs:
        return _run(asked[folder], model, folder, progress)

    def proved(folder: Path) -> _Pool:
        progress("transformers in float64", 0, 1)
        return _proved(asked[folder], model, runs[folder])

    runs = _each(asked, asked, run, note)
    return _each(runs, asked, proved, note)  # Once it is widened, the model runs nothing else.


def _measured(
    question: Question, folder: Path, pool: _Pool, keep_pool: bool, progress: Progress
) -> Manifest:
    for name, plan in pool.plans.items():
        text = json.dumps(plan.to_json(), sort_keys=True) + "\n"
        disk.write_text(folder / "plans" / f"{name}.json", text)
    measure, proofs = _measure(question, folder, pool, progress)
    progress("measuring the pool", 0, 1)
    cached, kind = question.cached, pool.kinds[-1]
    measured = errors.write(
        folder / FLOORS,
        measure,
        pool.members,
        kinds=pool.kinds,
        cached=cached,
        widest=pool.widest,
    )
    step, full = (pool.members[f"{kind}-{plan}"].logits for plan in (cached, "full"))
    proofs[f"reference_{cached}_full_max"] = max(
        float(np.abs(step[rows] - full[rows]).max()) for rows in errors.blocks(full)
    )
    most = proofs["truth_max" if "truth_max" in proofs else "mean_max"]
    proofs["float32_parts"] = pool.parts / most
    for path in list(folder.glob("pool-*")):
        if not keep_pool or path.name.split("-")[1] in pool.left_out:
            path.unlink()
    return _manifest(question, folder, pool, measured, proofs)


def _run(question: Question, model: Reference, folder: Path, progress: Progress) -> _Runs:
    """Runs the pool. Its traces go to files."""
    dtype, whose = question.dtype, "the probe" if question.probe else "pool"
    folder.mkdir(exist_ok=True)
    greedy = _greedy(question, model, progress)
    generated = (greedy.meta.outcomes[-1].tokens or []) if greedy else []
    plans = question.plans(generated)
    members = {}
    names = question.members(plans, model.kinds)
    for i, name in enumerate(names):
        progress(f"transformers {whose} ({dtype}): {name}", i, len(names))
        kind, plan = name.split("-")
        all_rows = plans[plan].rows == "all"
        if greedy is not None and all_rows and name == f"{model.kinds[-1]}-step":
            made = _by_steps(greedy, plans[plan])
        else:
            made = _whole(model.run(plans[plan], attention=kind))
        # The runs of the last kind are the references, which stay.
        stem = f"reference-{plan}" if kind == model.kinds[-1] else f"pool-{name}"
        path = folder / f"{stem}.safetensors"
        trace.write(path, made.meta, made.arrays)
        members[name] = trace.read(path)
    return _Runs(generated, plans, members)


def _proved(question: Question, model: Reference, runs: _Runs) -> _Pool:
    """The pool without kinds of attention that are too far from the class's own."""
    tokens = _proof_tokens(question, runs.generated)
    double, apart = _doubles(question, model, tokens)
    held = {name.split("-")[0] for name in runs.members}
    kinds = tuple(kind for kind in model.kinds if kind in held and kind not in apart)
    rough = model.double(tokens, rows=PROOF_POSITIONS, attention=kinds[0], exact=False)
    members = {name: made for name, made in runs.members.items() if name.split("-")[0] not in apart}
    return _Pool(
        runs.generated,
        runs.plans,
        members,
        kinds,
        double,
        parts=float(np.sqrt(np.mean(np.square(rough - double)))),
        widest=model.widest,
        left_out=apart,
        environment=reference.environment() | {"dtype": question.dtype, "attention": kinds[-1]},
    )


def _greedy(question: Question, model: Reference, progress: Progress) -> Trace | None:
    """The run that chooses the greedy tokens; None where none are asked for.

    It has all rows, as the step plan's run, but where that plan keeps a sample.
    """
    if not question.steps:
        return None
    progress("greedy tokens", 0, 1)
    steps = New("a"), Greedy("a", question.tokens, 0, question.steps)
    whole = question.all_rows or question.length <= rows.WHOLE
    plan = Plan("greedy", steps, "all" if whole else "last")
    return _whole(model.run(plan, attention=model.kinds[-1]))


def _by_steps(greedy: Trace, plan: Plan) -> Trace:
    """The greedy run as that of the step plan, since the calls of both are the same."""
    steps = [call.index for call in plan.calls() for _ in plan.kept(call)]
    outcomes = [Outcome() for _ in plan.steps]
    meta = replace(greedy.meta, plan=plan, outcomes=outcomes)
    return replace(
        greedy, meta=meta, arrays=dict(greedy.arrays) | {"steps": np.array(steps, np.int32)}
    )


def _doubles(
    question: Question, model: Reference, tokens: list[int]
) -> tuple[Array, dict[str, float]]:
    """The logits in float64, and a neighbour's kinds of attention that are too far from them."""
    if not isinstance(question.config, Neighbour):
        return model.double(tokens, rows=PROOF_POSITIONS), {}
    doubles = {kind: _double(model, tokens, kind) for kind in model.kinds}
    distances = mean.faithful(doubles)
    apart = {kind: value for kind, value in distances.items() if not value <= mean.KINDS_APART}
    return next(made for kind, made in doubles.items() if kind not in apart), apart


def _double(model: Reference, tokens: list[int], kind: str) -> Array:
    try:
        return model.double(tokens, rows=PROOF_POSITIONS, attention=kind)
    except Exception as error:  # code that names a dtype of its own does not run in another
        fails = f"transformers' own code of it does not run in float64 ({one_line(error, 200)})"
        what = f"{fails}, expected that as the only witness where no truth is written out"
        raise Refusal(what, where=model.checkpoint.folder, remedy="judge another model") from error


def _proof_tokens(question: Question, generated: list[int]) -> list[int]:
    """As many as the proof looks at, and enough for longrope's factors of the whole sequence."""
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


def _measure(
    question: Question, folder: Path, pool: _Pool, progress: Progress
) -> tuple[Trace, dict[str, float]]:
    plan, config = pool.plans["full"], question.config
    if isinstance(config, Neighbour):
        made = mean.write(folder / MEAN, plan, pool.members, environment=pool.environment)
        return made, mean.proofs(made, pool.members, pool.double)
    most, apart = record.write(
        folder / TRUTH,
        Weights(question.checkpoint, dtype=question.dtype),
        config,
        plan=plan,
        segments=question.segments(pool.plans),
        shared=question.shared,
        taps=frozenset(question.taps),
        environment=pool.environment,
        progress=progress,
    )
    true = trace.read(folder / TRUTH)
    mean.require_signal(most, true)
    first = np.flatnonzero(true.positions < len(pool.double))
    error = pool.double[true.positions[first]] - true.logits[first]
    double = float(np.sqrt(np.mean(error * error))) / most
    return true, {"truth_agreement": apart / most, "transformers_double": double, "truth_max": most}


def _manifest(
    question: Question,
    folder: Path,
    pool: _Pool,
    measured: run_folder.Pool,
    proofs: dict[str, float],
) -> Manifest:
    checkpoint, config = question.checkpoint, question.config
    sequence = question.sequence(pool.generated)
    rope = {"rope": config.rope} if isinstance(config, Config) else {}
    named = "source", "name", "note", "revision", "fingerprint", "config_digest"
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("plans/*.json")])
    return Manifest(
        **{name: getattr(checkpoint, name) for name in named},
        dtype=question.dtype,
        prompt=question.prompt,
        prompt_tokens=question.prompt_tokens,
        tokens=sequence,
        original=config.original,
        probe=question.probe,
        all_rows=question.all_rows,
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
        environment=pool.environment | rope,
        inputs=run_folder.inputs_digest(checkpoint.fingerprint, checkpoint.config_digest, question),
    )

"""Whether a large model's logits are those of the small one that it was made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mlxkv.commands.scale.result import Same
from mlxkv.engines import process
from mlxkv.engines.job import Job
from mlxkv.judge import measure
from mlxkv.judge.case import Case, read_case
from mlxkv.judge.floors import logit_floors
from mlxkv.judge.gates import pooled
from oracle.formats import run_folder, trace
from oracle.formats.trace import Trace
from oracle.model.checkpoint import Checkpoint

PLAN = "step"
"""The plan whose rows are compared: the prompt, and then token by token through the cache."""


def beside(
    large: Checkpoint, answer: Path, small: Path, room: Path, *, of: str, device: str
) -> Same:
    """The truth and the port's rows of `large`, whose oracle folder is `answer`, beside the truth
    of the model in the folder `small`, which is called `of`.
    """
    case = read_case(answer)
    other = read_case(_asked(case, small, room / "small"))
    return compared(case, other, _followed(case, large, answer, room / "port", device), of=of)


def compared(case: Case, other: Case, run: Trace, *, of: str) -> Same:
    """`run` is of `case`'s model; only positions up to which both sequences are equal count."""
    pairs = zip(case.manifest.tokens, other.manifest.tokens, strict=False)
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), min(case.length, other.length))
    largest = float(measure.truth_rows(other.truth).largest.max())
    at, apart = measure.largest_error(case.truth, other.truth)
    found = measure.measure(run, other.truth)
    keep = found.positions < equal
    rows = measure.rows_of(case.truth, found.positions[keep].tolist())
    floors = logit_floors(case, measure.truth_rows(case.truth)).rms[rows]
    return Same(
        of,
        int(np.count_nonzero(keep)),
        float(apart[at < equal].max() / largest) if (at < equal).any() else None,
        pooled(found.rms[keep] / floors) if keep.any() else None,
    )


def _asked(case: Case, small: Path, out: Path) -> Path:
    """The oracle's folder of the small model over the prompt of the case."""
    m = case.manifest
    tokens, steps = m.tokens[: m.prompt_tokens], len(m.generated)
    words = [str(small), f"--tokens={','.join(map(str, tokens))}", f"--steps={steps}"]
    words += [f"--dtype={m.dtype}", "--no-probe", "--out", str(out)]
    process.start(["oracle", "run", *words])
    return out


def _followed(case: Case, large: Checkpoint, answer: Path, out: Path, device: str) -> Trace:
    """The port's rows on the large model."""
    out.mkdir()
    plan = run_folder.read_plans(answer, case.manifest)[PLAN]
    job = Job.on(large, [plan], out, dtype=case.manifest.dtype, device=device)
    with job.begin(process.PORT) as running:
        job.end(running)
    return trace.read(job.trace(plan))

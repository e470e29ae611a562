"""Runs variants over a text inside mlx-lm's Llama, and reduces each call's rows at once.

`python -m mlxkv.commands.cost.scoring JOB.json` is a process: one for the variants that compute in
the same dtype with the same weights, and one for each cache of a person's own. No more logits are
held than those of a call. Axes as in `mlxkv.port.llama`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mlxkv.commands.cost import held
from mlxkv.commands.cost.rows import Rows
from mlxkv.commands.cost.variants import Variant
from mlxkv.engines import machine, mlx_lm
from mlxkv.engines.runner import blamed_on, host
from oracle.formats import strict_json, text
from oracle.formats.disk import write_text
from oracle.formats.errors import Refusal
from oracle.formats.exits import code_of, end_with_parent

FAR = 8192
"""Tokens after which a cache's bytes are asked once more."""


@dataclass(frozen=True, slots=True)
class Job:
    """Variants, by the numbers that name their files in `out`, of the model in `folder`.

    The text and its truth are in `truth`; the first `length` tokens go in calls of `chunk`, the
    others one by one. `probe` are the tokens of the retrieval probe (none: it is left out), of
    which those at `asked` are known from what came before.
    """

    folder: str
    truth: str
    out: str
    variants: dict[str, Variant]
    length: int
    chunk: int
    probe: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()
    device: str = "auto"
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What became of a variant: `failed` says why there is nothing else.

    Seconds of the forward calls alone; `hits` are 1 where the probe's token was the most probable
    one. `held` is what the cache showed of its rows and bytes at the text's end, `far` its bytes after
    FAR tokens.
    """

    failed: str = ""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    hits: tuple[int, ...] = ()
    held: held.Held | None = None
    far: held.Bytes | None = None
    environment: dict[str, Any] = field(default_factory=dict)


def facts_file(out: Path, number: str) -> Path:
    return out / f"{number}.json"


def rows_file(out: Path, number: str) -> Path:
    return out / f"{number}.npz"


def serve(path: Path) -> None:
    """The main of the process. A variant that fails leaves its reason, and the next one follows."""
    end_with_parent()
    value = strict_json.read(path, remedy="start it again")
    job = strict_json.typed(value, Job, where=path, remedy="start it again")
    out = Path(job.out)
    environment = machine.prepare(job.device, threads=job.threads)
    first = next(iter(job.variants.values()))
    model = mlx_lm.load(job.folder, first.dtype)
    facts = {name: machine.version(name) for name in ("mlx-lm", "transformers")}
    environment |= facts | {"code of mlx-lm": machine.place("mlx_lm")}
    try:
        _round(model, first)
        truth, failed = text.read(Path(job.truth)), ""
    except Refusal as error:
        failed = str(error)
    for number, variant in job.variants.items():
        try:
            if failed:
                raise Refusal(failed)
            found, rows = _measured(model, job, variant, truth)
        except Refusal as error:
            found, rows = Facts(failed=str(error)), None
        if rows is not None:
            np.savez(rows_file(out, number), **{n: getattr(rows, n) for n in Rows.__slots__})
        done = asdict(found) | {"environment": environment}
        write_text(facts_file(out, number), msgspec.json.encode(done).decode())


def _round(model: Any, variant: Variant) -> None:
    """Gives the model's linear layers and embedding the values that affine groups leave of them."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    if not variant.bits:
        return
    size, rounded = variant.group_size, []
    for name, weight in tree_flatten(model.parameters()):
        if weight.ndim != 2 or not name.endswith(".weight"):
            continue
        if weight.shape[1] % size:
            what = f"{name} has rows of {weight.shape[1]}, expected a multiple of {size}"
            raise Refusal(what, where=f"weights in {variant.bits} bits")
        given = {"group_size": size, "bits": variant.bits}
        rounded.append((name, mx.dequantize(*mx.quantize(weight, **given), **given)))
        mx.eval(rounded[-1][1])
    model.update(tree_unflatten(rounded))


def _measured(model: Any, job: Job, variant: Variant, truth: text.Text) -> tuple[Facts, Rows]:
    kind, tokens = variant.kind, truth.manifest.tokens
    rows = Rows.of(len(tokens))
    caches = mlx_lm.caches_for(model, kind)
    seconds = [0.0, 0.0]
    for start, logits, took in _calls(model, caches, tokens, job.length, job.chunk, kind.name):
        seconds[start >= job.length] += took
        rows.put(start, logits, truth.logits[start : start + len(logits)], np.array(tokens))
    _require_finite(rows)
    seen = held.look(caches, kind, truth.keys, truth.values)
    far = held.bytes_at(mlx_lm.caches_for(model, kind), kind, truth.keys.shape, FAR)
    hits = _hits(model, mlx_lm.caches_for(model, kind), job, kind.name) if job.probe else ()
    return Facts("", *seconds, hits=hits, held=seen, far=far), rows


def _calls(
    model: Any, caches: list[Any], tokens: Sequence[int], length: int, chunk: int, name: str
) -> Iterator[tuple[int, Any, float]]:
    """Where each call begins, its logits (L, V), and its seconds."""
    import mlx.core as mx

    starts = [*range(0, length, chunk), *range(length, len(tokens)), len(tokens)]
    for start, end in zip(starts[:-1], starts[1:], strict=True):
        begun = time.perf_counter()
        with blamed_on(name, "a call"):
            logits = model(mx.array([tokens[start:end]]), cache=caches)
            mx.eval(logits)
        took = time.perf_counter() - begun
        yield start, host(logits[0]), took


def _require_finite(rows: Rows) -> None:
    odd = np.flatnonzero(~rows.finite)
    if len(odd):
        n = len(rows.kl)
        raise Refusal(f"logits are not finite at {len(odd)} of {n} positions, first at {odd[0]}")


def _hits(model: Any, caches: list[Any], job: Job, name: str) -> tuple[int, ...]:
    """Of the probe's tokens that are known from before, whether each is the most probable one."""
    best: list[int] = []
    for _, logits, _ in _calls(model, caches, job.probe, len(job.probe), job.chunk, name):
        best += logits.argmax(1).tolist()
    return tuple(int(best[at - 1] == job.probe[at]) for at in job.asked)


if __name__ == "__main__":
    sys.exit(code_of(lambda: serve(Path(sys.argv[1]))))

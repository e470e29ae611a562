"""Runs variants over a text inside mlx-lm's Llama, and reduces each call's rows at once.

`python -m mlxkv.commands.cost.scoring JOB.json` is a process: one for the variants that compute in
the same dtype with the same weights, and one for each cache of a person's own. No more logits are
held than those of a call. Axes as in `mlxkv.port.llama`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mlxkv.commands.cost import held
from mlxkv.commands.cost.held import Bytes, Held
from mlxkv.commands.cost.rows import Array, Rows
from mlxkv.commands.cost.variants import Variant
from mlxkv.engines import machine, mlx_lm, prompt_cache
from mlxkv.engines.kinds import Kind
from mlxkv.engines.progress import bar
from mlxkv.engines.runner import blamed_on, host
from mlxkv.report.text import several
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

    Seconds of the forward calls alone. `hits` are 1 where the probe's token was the most probable
    one. `held` is what the cache showed of itself at the text's end, `far` its bytes after FAR
    tokens.
    """

    failed: str = ""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    hits: tuple[int, ...] = ()
    held: Held | None = None
    far: Bytes | None = None
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
    environment = machine.prepare(job.device, threads=job.threads)
    first = next(iter(job.variants.values()))
    model = mlx_lm.load(job.folder, first.dtype)
    facts = {name: machine.version(name) for name in ("mlx-lm", "transformers")}
    environment |= facts | {"code of mlx-lm": machine.place("mlx_lm")}
    truth = text.read(Path(job.truth))
    each = len(truth.manifest.tokens) + len(job.probe)
    with bar(f"cost: {several(len(job.variants), 'variant')}", each * len(job.variants)) as advance:
        for number, variant in job.variants.items():
            try:
                _round(model, variant)
                found = _measured(_Fed(model, job, variant.kind, advance), truth, number)
            except Refusal as error:
                found = Facts(failed=str(error))
            made = msgspec.json.encode(replace(found, environment=environment)).decode()
            write_text(facts_file(Path(job.out), number), made)


def _round(model: Any, variant: Variant) -> None:
    """Gives the model's linear layers and embedding the values that affine groups leave of them.

    All variants of a process have the same, so a second time changes nothing that matters.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    bits, size = variant.bits, variant.group_size
    if not bits:
        return
    rounded = []
    for name, weight in tree_flatten(model.parameters()):
        if weight.ndim != 2 or not name.endswith(".weight"):
            continue
        if weight.shape[1] % size:
            what = f"{name} has rows of {weight.shape[1]}, expected a multiple of {size}"
            raise Refusal(what, where=f"weights in {bits} bits")
        packed = mx.quantize(weight, group_size=size, bits=bits)
        rounded.append((name, mx.dequantize(*packed, group_size=size, bits=bits)))
        mx.eval(rounded[-1][1])
    model.update(tree_unflatten(rounded))


@dataclass(frozen=True, slots=True)
class _Fed:
    """A model that is fed through caches of a kind, and told of each token."""

    model: Any
    job: Job
    kind: Kind
    advance: Callable[[int], None]

    def caches(self) -> list[Any]:
        return mlx_lm.caches_for(self.model, self.kind)

    def calls(
        self, caches: list[Any], tokens: Sequence[int], length: int, *, since: int = 0
    ) -> Iterator[tuple[int, Array, float]]:
        """Where each call begins, its logits (L, V), and its seconds.

        The first `length` tokens go in chunks, the others one by one. Of calls that end before
        `since` nothing but the cache is computed, and nothing is given.
        """
        import mlx.core as mx

        starts = [*range(0, length, self.job.chunk), *range(length, len(tokens)), len(tokens)]
        for start, end in pairwise(starts):
            begun = time.perf_counter()
            with blamed_on(self.kind.name, "a call"):
                logits = self.model(mx.array([tokens[start:end]]), cache=caches)
                mx.eval(logits if end > since else prompt_cache.arrays_of(caches))
            took = time.perf_counter() - begun
            if end > since:
                yield start, host(logits[0]), took
            self.advance(end - start)


def _measured(fed: _Fed, truth: text.Text, number: str) -> Facts:
    """Feeds the text, and the probe through other caches, and writes the rows."""
    tokens, job = truth.manifest.tokens, fed.job
    caches, rows = fed.caches(), Rows.of(len(tokens))
    seconds = {False: 0.0, True: 0.0}
    for start, logits, took in fed.calls(caches, tokens, job.length):
        seconds[start >= job.length] += took
        rows.put(start, logits, truth.logits[start : start + len(logits)], np.array(tokens))
    _require_finite(rows)
    seen = held.look(caches, fed.kind, truth.keys, truth.values)
    far = held.bytes_at(fed.caches(), fed.kind, truth.keys.shape, FAR)
    hits = _hits(fed) if job.probe else ()
    arrays = {each.name: getattr(rows, each.name) for each in fields(rows)}
    np.savez(rows_file(Path(job.out), number), **arrays)
    return Facts("", seconds[False], seconds[True], hits, seen, far)


def _require_finite(rows: Rows) -> None:
    odd = np.flatnonzero(~rows.finite)
    if len(odd):
        n = len(rows.kl)
        raise Refusal(f"logits are not finite at {len(odd)} of {n} positions, first at {odd[0]}")


def _hits(fed: _Fed) -> tuple[int, ...]:
    """Of the probe's tokens that are known from before, whether each is the most probable one."""
    best, probe = dict[int, int](), fed.job.probe
    since = min(fed.job.asked) - 1  # a token is foretold by the row before it
    for start, logits, _ in fed.calls(fed.caches(), probe, len(probe), since=since):
        best |= dict(enumerate(logits.argmax(1).tolist(), start))
    return tuple(int(best[at - 1] == probe[at]) for at in fed.job.asked)


if __name__ == "__main__":
    sys.exit(code_of(lambda: serve(Path(sys.argv[1]))))

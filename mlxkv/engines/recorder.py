"""What the port computes inside each layer, kept by the `tap` that its model calls.

Rows lie at their token's position, so that a plan of many calls gives the arrays of one call.
`scores` are those that softmax takes, 0 where the mask hides a key; the float64 form of attention
has them, the fused one does not. Axes as in `mlxkv.port.llama`; n is the number of positions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxkv.engines.job import Job
from mlxkv.engines.port import PortRunner
from mlxkv.engines.progress import bar
from mlxkv.engines.runner import Array, Batch, host
from mlxkv.port.config.llama import LlamaConfig
from mlxkv.port.llama import Llama
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan
from oracle.formats.tensors import Shapes, release
from oracle.formats.trace import TAPS, Meta, Trace, read, write


class Recorder:
    """A model's `tap` that keeps `taps` over `n` positions, and what enters layer 0 as `embedding`.

    `first` is the position of the next call's first token. `feed` are the truth's hidden states by
    layer, (n, E) each: where it is given, every layer but the first is fed what leaves the truth's
    layer before it, and the head what leaves the truth's last.
    """

    def __init__(
        self, n: int, *, taps: Collection[str] = TAPS, feed: Mapping[int, Array] | None = None
    ) -> None:
        self.n, self.taps, self.feed = n, {"embedding", *taps}, feed
        self.arrays: dict[str, Array] = {}
        self.begin(0)

    @classmethod
    def of(cls, taps: Collection[str], plan: Plan, truth: Trace | None, model: Llama) -> Recorder:
        """One for a plan; with `truth` each layer is fed the truth's input."""
        feed = None if truth is None else hidden_states(truth, len(model.layers))
        return cls(plan.longest, taps=taps, feed=feed)

    def shapes(self, config: LlamaConfig) -> Shapes:
        """Of `arrays`, in float64."""
        names = [f"{i:03d}/{tap}" for i in range(config.num_hidden_layers) for tap in TAPS]
        kept = [name for name in names if name.split("/")[1] in self.taps]
        found = {f"tap/{name}": self._shape(name.split("/")[1], config) for name in kept}
        return found | {"tap/000/embedding": (np.float64, (self.n, config.hidden_size))}

    def _shape(self, tap: str, c: LlamaConfig) -> tuple[type, tuple[int, ...]]:
        H, K, D, F = (
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.intermediate_size,
        )
        heads = dict.fromkeys(("q", "q_rope"), (H, self.n, D))
        heads |= dict.fromkeys(("k", "k_rope", "v"), (K, self.n, D))
        heads |= {"scores": (H, self.n, self.n)}
        wide = {"attention": H * D} | dict.fromkeys(("gate", "up", "activation"), F)
        return np.float64, heads.get(tap, (self.n, wide.get(tap, c.hidden_size)))

    def into(self, arrays: Mapping[str, Array]) -> None:
        """Takes the arrays of a trace that is being written, to be filled in place."""
        self.arrays = {name: array for name, array in arrays.items() if name.startswith("tap/")}
        for array in self.arrays.values():
            array[...] = np.nan
            release(array)

    def begin(self, first: int) -> None:
        """A call begins whose first token stands at position `first`."""
        self.first, self._queries = first, 0

    def __call__(self, layer: int, name: str, array: mx.array) -> mx.array:
        """Keeps batch 0 of the array; of `hidden` gives the array that goes on."""
        if name in self.taps:
            if name == "scores":
                self._keep_scores(layer, host(array[0]))
            else:
                self._keep(layer, name, host(array[0]), self.first)
        if name == "attention":
            self._queries = 0  # the next scores are another layer's
        if name != "hidden" or self.feed is None:
            return array
        rows = np.array(self.feed[layer][self.first : self.first + array.shape[1]])
        return mx.array(rows[None], array.dtype)

    def _keep_scores(self, layer: int, scores: Array) -> None:
        """[K, H/K, L, S] of some queries: a long prompt comes in blocks of them."""
        found = np.where(np.isneginf(scores), 0.0, scores).reshape(-1, *scores.shape[2:])
        columns = np.zeros((*found.shape[:2], self.n), found.dtype)
        seen = min(self.n, found.shape[2])
        columns[:, :, :seen] = found[:, :, :seen]
        self._keep(layer, "scores", columns, self.first + self._queries)
        self._queries += found.shape[1]

    def _keep(self, layer: int, name: str, rows: Array, first: int) -> None:
        """Rows [..., L, width]."""
        key = f"tap/{layer:03d}/{name}"
        if key not in self.arrays:
            # A position that no call reaches is not a number, and so never right.
            shape = (*rows.shape[:-2], self.n, rows.shape[-1])
            self.arrays[key] = np.full(shape, np.nan, rows.dtype)
        self.arrays[key][..., first : first + rows.shape[-2], :] = rows


class TapRunner(PortRunner):
    """A PortRunner whose every call is recorded.

    Where a call's tokens stand is what the plan says, and not what the engine thinks.
    """

    def __init__(
        self, model: Llama, plan: Plan, recorder: Recorder, *, guarded: bool = True
    ) -> None:
        super().__init__(model, plan, guarded=guarded)
        self.tap = self.recorder = recorder

    def forward(
        self, name: str, rows: Batch, index_pos: int | None, places: Sequence[int]
    ) -> Array:
        """(B, len(places), V)"""
        self.recorder.begin(self.held(name) if index_pos is None else index_pos)
        return super().forward(name, rows, index_pos, places)


def run(
    model: Llama,
    plan: Plan,
    meta: Meta,
    *,
    taps: Collection[str] = TAPS,
    truth: Trace | None = None,
    guarded: bool = True,
) -> tuple[Trace, float]:
    """The trace of a plan with its taps, and the seconds that it took.

    With `truth` each layer is fed the truth's input; the trace's logits are then those of the head
    alone, on the truth's last hidden state.
    """
    recorder = Recorder.of(taps, plan, truth, model)
    runner = TapRunner(model, plan, recorder, guarded=guarded).run()
    made = replace(meta, plan=plan, outcomes=runner.outcomes)
    return Trace(made, runner.arrays() | recorder.arrays), runner.seconds


def hidden_states(truth: Trace, layers: int) -> dict[int, Array]:
    """What leaves each layer of the truth, (n, E), by layer; a Refusal where it is not recorded."""
    names = [f"tap/{i:03d}/hidden" for i in range(layers)]
    for name in names:
        if name not in truth.arrays:
            what, remedy = f"no {name}", "make the folder again with --taps hidden"
            raise Refusal(
                f"{what}, expected the truth's hidden states", where=truth.label, remedy=remedy
            )
    return {i: truth.arrays[name] for i, name in enumerate(names)}


def follow(job: Job, model: Llama, meta: Meta) -> float:
    """Writes the traces of the job's plans with taps; the seconds spent in forward calls.

    Where the job names a truth, each plan is followed once more with every layer fed its input.
    """
    runs: list[tuple[Plan, Path, Trace | None]] = [(p, job.trace(p), None) for p in job.plans]
    if job.truth is not None:
        truth = read(Path(job.truth))
        runs += [(p, job.isolated(p), truth) for p in job.plans]
    seconds = 0.0
    with bar(f"taps ({job.dtype})", len(runs)) as advance:
        for plan, path, fed in runs:
            made, took = run(model, plan, meta, taps=job.taps, truth=fed, guarded=job.guarded)
            seconds += took
            write(path, made.meta, made.arrays)
            advance(1)
    return seconds

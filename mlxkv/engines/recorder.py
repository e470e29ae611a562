"""What the port computes inside each layer, recorded from outside: its own code knows nothing of it.

While a `Recorder` is at work, the modules and functions whose inputs or outputs are taps stand behind ones that keep what
they see. q and k are what goes into RoPE, v what goes to the cache, scores what goes into softmax (0 where the mask hides a
key; the exact form has them, the fused production one does not), attention what goes into o_proj: nothing is computed
again here. Rows lie at their token's position, so that a plan of many calls gives the arrays of one.

Axes: H query heads, K key/value heads, D head_dim, n positions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxkv.engines.job import Job
from mlxkv.engines.port import Runner
from mlxkv.engines.progress import bar
from mlxkv.port import llama, ops
from mlxkv.port.cache import Cache
from mlxkv.port.llama import Llama
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan
from oracle.formats.trace import TAPS, Meta, Trace, read, write

Array = npt.NDArray[Any]
Keep = Callable[..., Any]


class Recorder:
    """Keeps `taps` of a model's layers while it is entered, over `n` positions; also what enters layer 0, as `embedding`.

    `first` is the position of the next call's first token. With `feed`, the truth's hidden states by layer, every layer
    is given what leaves the truth's layer before it, and the head what leaves its last; layer 0 has its own embedding.
    """

    def __init__(
        self,
        model: Llama,
        n: int,
        *,
        taps: Collection[str] = TAPS,
        feed: Mapping[int, Array] | None = None,
    ) -> None:
        self.model, self.n, self.taps, self.feed = model, n, frozenset(taps), feed
        self.arrays: dict[str, Array] = {}
        self.first = 0
        self._layer = 0
        self._queries = 0
        self._undo = ExitStack()

    def keep(self, name: str, rows: mx.array) -> None:
        """Rows [..., L, width] of the layer at work."""
        if name in self.taps or name == "embedding":
            self._put(name, _host(rows), self.first)

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            for i in range(len(self.model.layers)):
                self._watch_layer(undo, i)
            self._replace(undo, llama, "rotate", self._rotate)
            self._replace(undo, ops, "_softmax", self._softmax)
            self._replace(undo, Cache, "extend", self._extend)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def _watch_layer(self, undo: ExitStack, i: int) -> None:
        block = self.model.layers[i]
        watched: list[tuple[Any, str, str | None, str]] = [
            (block, "input_layernorm", None, "input_norm"),
            (block.self_attn, "o_proj", "attention", "o_proj"),
            (block, "post_attention_layernorm", None, "post_norm"),
            (block.mlp, "gate_proj", None, "gate"),
            (block.mlp, "up_proj", None, "up"),
            (block.mlp, "down_proj", "activation", "down"),
        ]
        for owner, name, before, after in watched:
            self._replace(undo, owner, name, self._module(before, after))
        layers: list[Any] = self.model.layers
        layers[i] = self._block(block, i)
        undo.callback(layers.__setitem__, i, block)

    def _replace(self, undo: ExitStack, owner: Any, name: str, watch: Callable[[Any], Any]) -> None:
        real = getattr(owner, name)
        setattr(owner, name, watch(real))
        undo.callback(setattr, owner, name, real)

    def _module(self, before: str | None, after: str) -> Callable[[Keep], Keep]:
        def watch(real: Keep) -> Keep:
            def call(x: mx.array) -> mx.array:
                if before is not None:
                    self.keep(before, x[0])
                out = real(x)
                self.keep(after, out[0])
                return out

            return call

        return watch

    def _block(self, real: Keep, i: int) -> Keep:
        def call(x: mx.array, cache: Cache, start: int) -> mx.array:
            self._layer, self._queries = i, 0
            if i == 0:
                self.keep("embedding", x[0])
            out = real(x if i == 0 else self._fed(i - 1, x), cache, start)
            self.keep("hidden", out[0])
            return self._fed(i, out) if i == len(self.model.layers) - 1 else out

        return call

    def _fed(self, layer: int, x: mx.array) -> mx.array:
        if self.feed is None:
            return x
        rows = np.array(self.feed[layer][self.first : self.first + x.shape[1]])
        return mx.array(rows[None], x.dtype)

    def _rotate(self, real: Keep) -> Keep:
        def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
            out, H = real(x, cos, sin), self.model.config.num_attention_heads
            for (queries, keys), turned in ((("q", "k"), x), (("q_rope", "k_rope"), out)):
                self.keep(queries, turned[0, :H])
                self.keep(keys, turned[0, H:])
            return out

        return rotate

    def _extend(self, real: Keep) -> Keep:
        def extend(cache: Cache, layer: int, keys: mx.array, values: mx.array) -> Any:
            self.keep("v", values[0])
            return real(cache, layer, keys, values)

        return extend

    def _softmax(self, real: Keep) -> Keep:
        def softmax(scores: mx.array) -> mx.array:
            if "scores" in self.taps:
                found = _host(scores[0])  # [K, H/K, L, S]
                found = np.where(np.isneginf(found), 0.0, found).reshape(-1, *found.shape[2:])
                columns = np.zeros((*found.shape[:2], self.n), found.dtype)
                seen = min(self.n, found.shape[2])
                columns[:, :, :seen] = found[:, :, :seen]
                # A long prompt comes in blocks of queries.
                self._put("scores", columns, self.first + self._queries)
                self._queries += found.shape[1]
            return real(scores)

        return softmax

    def _put(self, name: str, rows: Array, first: int) -> None:
        key = f"tap/{self._layer:03d}/{name}"
        if key not in self.arrays:
            # A position that no call reaches is not a number, and so never right.
            self.arrays[key] = np.full(
                (*rows.shape[:-2], self.n, rows.shape[-1]), np.nan, rows.dtype
            )
        self.arrays[key][..., first : first + rows.shape[-2], :] = rows


class TapRunner(Runner):
    """A Runner that tells a recorder where each call's tokens stand, as the plan says and not as the engine thinks."""

    def __init__(
        self, model: Llama, plan: Plan, recorder: Recorder, *, guarded: bool = True
    ) -> None:
        super().__init__(model, plan, guarded=guarded)
        self.recorder = recorder

    def _call(self, index: int, name: str, tokens: tuple[int, ...], index_pos: int | None) -> Array:
        self.recorder.first = len(self.caches[name]) if index_pos is None else index_pos
        return super()._call(index, name, tokens, index_pos)


def run(
    model: Llama,
    plan: Plan,
    meta: Meta,
    *,
    taps: Collection[str] = TAPS,
    truth: Trace | None = None,
    guarded: bool = True,
) -> tuple[Trace, float]:
    """The trace of a plan with its taps, and the seconds it took; with `truth`, of the layers each fed the truth's input.

    The isolated trace's logits are those of the head alone, on the truth's last hidden state.
    """
    feed = None if truth is None else hidden_states(truth, len(model.layers))
    with Recorder(model, plan.longest, taps=taps, feed=feed) as recorder:
        runner = TapRunner(model, plan, recorder, guarded=guarded)
        runner.run()
    made = replace(meta, plan=plan, outcomes=runner.outcomes)
    return Trace(made, runner.arrays() | recorder.arrays), runner.seconds


def hidden_states(truth: Trace, layers: int) -> dict[int, Array]:
    """What leaves each layer of the truth, (n, E), by layer; a Refusal where the trace has not recorded it."""
    names = [f"tap/{i:03d}/hidden" for i in range(layers)]
    for name in names:
        if name not in truth.arrays:
            raise Refusal(
                f"{truth.label}: no {name}, expected the truth's hidden states; make the folder again with --taps hidden"
            )
    return {i: truth.arrays[name] for i, name in enumerate(names)}


def follow(job: Job, model: Llama, meta: Meta) -> float:
    """The job's plans with taps, each also with its layers apart where the job names a truth; the seconds of all calls."""
    truth = None if job.truth is None else read(Path(job.truth))
    runs: list[tuple[Plan, Path, Trace | None]] = [
        (plan, job.trace(plan), None) for plan in job.plans
    ]
    runs += [(plan, job.isolated(plan), truth) for plan in job.plans] if truth is not None else []
    seconds = 0.0
    with bar(f"taps ({job.dtype})", len(runs)) as advance:
        for plan, path, fed in runs:
            made, took = run(model, plan, meta, taps=job.taps, truth=fed, guarded=job.guarded)
            seconds += took
            write(path, made.meta, made.arrays)
            advance(1)
    return seconds


def _host(array: mx.array) -> Array:
    kept = array.dtype in (mx.float32, mx.float64)
    return np.array(array if kept else array.astype(mx.float32))

"""The port in float64 follows all plans at once, one layer after the other.

A model's float64 weights are twice to four times its file, and may be more than the memory. Here
one layer's are there at a time: it is converted once, every call of every plan goes through it, its
keys and values go into the traces, and it is let go. What stays between two layers are the hidden
states of all calls. Axes as in `mlxkv.port.llama`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxkv.engines.estimate import HEAD, STATES
from mlxkv.engines.job import Job
from mlxkv.engines.port import Begun, PortRunner, facts
from mlxkv.engines.progress import bar
from mlxkv.engines.recorder import Recorder
from mlxkv.engines.runner import Array, Batch, Run, put, runs_of
from mlxkv.port import ops
from mlxkv.port.cache import Cache, Layer
from mlxkv.port.llama import Block, Llama
from mlxkv.port.weights import Filling
from oracle.formats.plan import Call, New, Plan
from oracle.formats.tensors import Shapes, Writer
from oracle.formats.trace import CACHES, Meta, read, writer

TRACES = 200
"""Traces that are written at once. Each keeps its file open, and macOS allows a process 256."""
EMBEDDING = "model.embed_tokens.weight"


def serves(job: Job) -> bool:
    """Whether the job can be followed so: what its calls are is known before they are computed."""
    usual = job.guarded and not (job.masks or job.dither or job.caches or job.ranks)
    plain = all(isinstance(step, New | Call) for plan in job.plans for step in plan.steps)
    single = not any(plan.batched for plan in job.plans)
    return job.dtype == "float64" and usual and plain and single


@dataclass(slots=True, eq=False)
class Pass:
    """One call on its way through the layers: `hidden` [1, L, E] is what enters the next one.

    The logits of the tokens at `places` are the `rows` of its trace. Where `of` is given, its
    tokens are the first of that call's, and so is all that comes of them. `layer` is what the cache
    holds after a call that is another's `of`.
    """

    cache: Cache
    start: int
    ids: tuple[int, ...]
    places: tuple[int, ...]
    of: Pass | None = None
    serves: bool = False
    rows: slice = field(default_factory=lambda: slice(0))
    hidden: Any = None
    layer: Layer = field(default_factory=Layer)
    logits: Any = None


class BegunPass(Begun):
    """The call whose tokens another plan may begin with."""

    made: Pass


class Walk(PortRunner):
    """Follows a plan twice: first without its arithmetic, to see which calls there are and what is
    refused, then layer by layer.
    """

    def __init__(
        self,
        model: Llama,
        plan: Plan,
        *,
        begun: BegunPass | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(model, plan)
        self.first, self.recorder = begun, recorder
        self.passes: list[Pass] = []
        self.said: dict[str, dict[str, int]] = {}

    def forward(
        self, name: str, rows: Batch, index_pos: int | None, places: Sequence[int]
    ) -> Array:
        """(1, len(places), V) of nothing: they are computed later, and take no memory now."""
        cache, n = self.caches[name], len(rows[0])
        fresh = self.held(name) == 0
        self.model._ids(rows)
        with cache.call(1, n, index_pos, self.model) as start:
            if cache.use_kv_cache:
                cache.restore((Layer(None, start + n),) * len(cache.layers))
        made = Pass(cache, start, rows[0], tuple(places))
        if self.first is not None and fresh and cache.use_kv_cache:
            self._begin(made, self.first)
        self.passes.append(made)
        width = self.model.config.vocab_size
        return np.broadcast_to(np.zeros((), np.float64), (1, len(places), width))

    def _begin(self, made: Pass, begun: BegunPass) -> None:
        """Takes a first call from another plan's, or keeps it for one."""
        if begun.serves(made.ids, made.places):
            made.of, self.taken = begun.made, begun.plan
            made.of.serves = True
        else:
            begun.keep(self.plan.name, made.ids, made.places)
            begun.made = made

    def shapes(self) -> Shapes:
        """Of the trace's arrays, once the steps are known."""
        c, numbers = self.model.config, self.numbers()
        found: dict[str, tuple[type, tuple[int, ...]]]
        found = {"logits": (np.float64, (len(numbers["steps"]), c.vocab_size))}
        found |= {name: (np.int32, array.shape) for name, array in numbers.items()}
        for name, cache in self.caches.items():
            shape = np.float64, (c.num_key_value_heads, len(cache), c.head_dim)
            for i in range(c.num_hidden_layers if len(cache) else 0):
                found |= dict.fromkeys(_names(name, i), shape)
        if self.recorder is not None:
            found |= self.recorder.shapes(c)
        return found

    def begin(self, filling: Filling, out: Writer) -> None:
        """Empties the caches, and looks up what enters layer 0."""
        if self.recorder is not None:
            self.recorder.into(out.arrays)
        self.said = {name: _facts(cache) for name, cache in self.caches.items()}
        end = 0
        for made, rows in zip(self.passes, self.rows, strict=True):
            made.rows, made.places = slice(end, end + len(rows)), made.places[: len(rows)]
            end = made.rows.stop
            made.cache.reset()
            if made.of is None:
                made.hidden = filling.rows(EMBEDDING, np.array(made.ids))[None]

    def through(self, block: Block, out: Writer) -> None:
        """Every call through one layer, whose keys and values go into the trace and are let go."""
        begun, i = time.perf_counter(), block.self_attn.layer
        for made in self.passes:
            if made.of is not None:
                _restore(made.cache, i, made.of.layer.crop(len(made.ids)))
                continue
            made.hidden = self._computed(made, block)
            held = made.cache.layers[i]
            mx.eval(made.hidden, held.buffers or ())
            made.layer = held if made.serves else Layer()
        self.seconds += time.perf_counter() - begun
        for name, cache in self.caches.items():
            layer = cache.layers[i]
            if layer.buffers is not None:
                for key, array in zip(_names(name, i), (layer.keys, layer.values), strict=True):
                    put(out.arrays[key], array[0])
                self.said[name]["nbytes"] += layer.nbytes
                self.said[name]["allocated"] += sum(buffer.nbytes for buffer in layer.buffers)
        for made in self.passes:
            made.cache.reset()

    def _computed(self, made: Pass, block: Block) -> mx.array:
        """What leaves the layer, or what the recorder puts in its place."""
        x, i, recorder = made.hidden, block.self_attn.layer, self.recorder
        if recorder is None:
            return block(x, made.cache, made.start)
        recorder.begin(made.start)
        if i == 0:
            recorder(0, "embedding", x)
        return recorder(i, "hidden", block(x, made.cache, made.start, partial(recorder, i)))

    def ends(self, model: Llama) -> None:
        """What enters the head, for the rows that are kept."""
        for made in self.passes:
            if made.of is None:
                whole = len(made.places) == len(made.ids)
                kept = slice(None) if whole else mx.array(made.places, mx.int32)
                made.hidden = model.norm(made.hidden[:, kept]) if made.places else None
                mx.eval(made.hidden)

    def head(self, weight: mx.array, columns: slice, out: Writer) -> None:
        """The logits of some ids, by the head's rows of them (ids, E)."""
        begun = time.perf_counter()
        for made in self.passes:
            if not made.places:
                continue
            if made.of is None:
                made.logits = made.hidden @ weight.T  # [1, rows, ids]
            else:
                given = [made.of.places.index(place) for place in made.places]
                made.logits = made.of.logits[:, mx.array(given)]
            put(out.arrays["logits"][made.rows, columns], made.logits[0])
        self.seconds += time.perf_counter() - begun

    def says(self) -> dict[str, Any]:
        """As of a run whose caches still hold what they held."""
        return super().says() | {CACHES: self.said}


def follow(job: Job, filling: Filling, meta: Meta, label: str) -> None:
    """Writes the traces of all the job's plans, and the seconds spent in forward calls."""
    groups = groups_of(job, filling.model.config.hidden_size)
    total, seconds = len(groups) * (len(filling.model.layers) + 1), 0.0
    truth = None if job.truth is None else read(Path(job.truth))
    with ops.stream(mx.float64), bar(label, total) as advance:
        filling.fill("model.norm.")
        for group in groups:
            begun, walks = BegunPass(), []
            for run in group:
                fed = truth if run[1] == job.isolated(run[0]) else None
                recorder = Recorder.of(job.taps, run[0], fed, filling.model) if job.taps else None
                shared = begun if run[0].name in job.shared else None
                walks.append((run, Walk(filling.model, run[0], begun=shared, recorder=recorder)))
            seconds += _follow(walks, filling, meta, advance)
    job.write_seconds(seconds)


def groups_of(job: Job, width: int) -> list[list[Run]]:
    """The job's runs, as many at once as STATES and TRACES allow, with hidden states (n, width)."""
    runs = sorted(runs_of(job), key=lambda run: run[0].name not in job.shared)
    if job.truth is not None:
        runs += [(plan, job.isolated(plan), 0) for plan in job.plans]
    groups: list[list[Run]] = []
    numbers = 0
    for run in runs:
        own = width * sum(call.fed for call in run[0].calls())
        if not groups or numbers + own > STATES or len(groups[-1]) == TRACES:
            groups.append([])
            numbers = 0
        groups[-1].append(run)
        numbers += own
    return groups


def _follow(
    runs: Sequence[tuple[Run, Walk]],
    filling: Filling,
    meta: Meta,
    advance: Callable[[int], None],
) -> float:
    """Follows some runs through all layers; the seconds spent in forward calls."""
    model = filling.model
    walks: list[tuple[Walk, Meta, Writer]] = []
    with ExitStack() as stack:
        for (plan, path, repeat), walk in runs:
            walk.run()
            made = replace(meta, plan=plan, outcomes=walk.outcomes, repeat=repeat)
            out = stack.enter_context(writer(path, made, walk.shapes()))
            walk.begin(filling, out)
            walks.append((walk, made, out))
        for i, block in enumerate(model.layers):
            filling.fill(f"model.layers.{i}.")
            for walk, _, out in walks:
                walk.through(block, out)
            filling.empty(f"model.layers.{i}.")
            advance(1)
        _head(filling, walks)
        for walk, made, out in walks:
            said = dict(made.environment) | walk.says()
            out.finish(replace(made, environment=said).to_json())
        advance(1)
    return sum(walk.seconds for walk, _, _ in walks)


def _head(filling: Filling, walks: Sequence[tuple[Walk, Meta, Writer]]) -> None:
    """Every trace's logits, a block of the vocabulary after the other."""
    c = filling.model.config
    for walk, _, out in walks:
        walk.ends(filling.model)
        for name, array in walk.numbers().items():
            out.arrays[name][...] = array
    step = max(1, HEAD // c.hidden_size)
    for first in range(0, c.vocab_size, step):
        ids = slice(first, min(first + step, c.vocab_size))
        weight = filling.rows(EMBEDDING if c.tie_word_embeddings else "lm_head.weight", ids)
        for walk, _, out in walks:
            walk.head(weight, ids, out)
        del weight  # before the next


def _facts(cache: Cache) -> dict[str, int]:
    """What `facts` says before its layers are there one by one; bytes are added then."""
    return facts(cache) | {"nbytes": 0, "allocated": 0}


def _names(cache: str, layer: int) -> tuple[str, str]:
    return f"kv/{cache}/{layer:03d}/keys", f"kv/{cache}/{layer:03d}/values"


def _restore(cache: Cache, i: int, layer: Layer) -> None:
    cache.restore((*cache.layers[:i], layer, *cache.layers[i + 1 :]))

"""The port follows plans. `python -m mlxkv.engines.port JOB.json` is a process of its own.

So a BLAS loaded for MLX touches nothing else, memory is given back between the runs in the run's
dtype and in float64, and a library that aborts takes no report with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxkv.engines import machine, runner
from mlxkv.engines.job import Job
from mlxkv.engines.runner import Array, Batch, BrokenOff, PlanRunner, seen
from oracle.formats.plan import Plan
from oracle.formats.trace import CACHES, SHARED, Meta, Trace

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxkv.engines.rank import Ranks
    from mlxkv.port.cache import Cache
    from mlxkv.port.llama import Llama, ModelTap
    from mlxkv.port.weights import Filling


class Begun:
    """The first call of a plan, for another plan that begins with fewer of the same tokens.

    In float64 the probe's first 250 tokens take longer than all judged plans; its two plans are
    told apart by what follows.
    """

    plan: str = ""
    tokens: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    logits: Array
    cache: Cache

    def keep(self, plan: str, tokens: tuple[int, ...], places: Sequence[int]) -> None:
        self.plan, self.tokens, self.places = plan, tokens, tuple(places)

    def serves(self, tokens: tuple[int, ...], places: Sequence[int]) -> bool:
        n = len(tokens)
        return n < len(self.tokens) and self.tokens[:n] == tokens and {*places} <= {*self.places}


class PortRunner(PlanRunner):
    """Follows one plan on a model.

    `cache_dtype` makes caches of another dtype than the model's. With `keep_masks` the trace has
    the masks that its caches built: `mask/<cache>/<L>x<S>` (L, S) uint8, where 1 hides a key.
    `begun` is shared by the runners of plans of which one may begin with another's first call.
    """

    def __init__(
        self,
        model: Llama,
        plan: Plan,
        *,
        guarded: bool = True,
        cache_dtype: str | None = None,
        keep_masks: bool = False,
        begun: Begun | None = None,
    ) -> None:
        from mlxkv.port.ops import name_of

        super().__init__(plan)
        self.begun, self.taken = begun, ""
        self.model = model
        self.dtype = name_of(model.dtype)
        self.keep_masks = keep_masks
        self.tap: ModelTap | None = None
        # The truth turns a sequence by the factors for its whole length, so every cache of the
        # plan is made for it.
        longrope = model.config.rope.rope_type == "longrope"
        most = min(max(1, plan.longest), model.config.max_position_embeddings)
        self._cache: dict[str, Any] = {
            "dtype": cache_dtype or self.dtype,
            "guarded": guarded,
            "max_length": most if longrope else None,
            "part": model.part,
        }

    def new(self, name: str, use_kv_cache: bool) -> None:
        from mlxkv.port.cache import Cache

        self.caches[name] = Cache(self.model.config, use_kv_cache=use_kv_cache, **self._cache)

    def clone(self, source: str, target: str) -> None:
        self.caches[target] = self.caches[source].clone()

    def crop(self, name: str, length: int) -> None:
        self.caches[name].crop(length)

    def trim(self, name: str, tokens: int) -> None:
        self.caches[name].crop(self.held(name) - tokens)

    def reset(self, name: str) -> None:
        self.caches[name].reset()

    def reload(self, name: str) -> None:
        """By the port's own file, which is gone before the next step."""
        from mlxkv.port.cache import Cache

        with TemporaryDirectory() as folder:
            path = Path(folder) / "cache.safetensors"
            self.caches[name].save(path)
            self.caches[name] = Cache.load(path, self.model)

    def fail(self, name: str, tokens: tuple[int, ...]) -> None:
        """A tap raises in the layer in the middle. The cache undoes the call itself, if guarded;
        in candle's mode there is no way to.
        """
        middle = len(self.model.layers) // 2

        def broken(layer: int, _: str, array: mx.array) -> mx.array:
            if layer == middle:
                raise BrokenOff
            return array

        with suppress(BrokenOff):
            self.model([tokens], cache=self.caches[name], tap=broken)

    def held(self, name: str) -> int:
        return len(self.caches[name])

    def forward(
        self, name: str, rows: Batch, index_pos: int | None, places: Sequence[int]
    ) -> Array:
        """(B, len(places), V)"""
        begun = None if self.held(name) else self.begun
        if begun is not None and begun.serves(rows[0], places):
            self.caches[name], self.taken = begun.cache.clone(), begun.plan
            self.caches[name].crop(len(rows[0]))
            return begun.logits[:, [begun.places.index(place) for place in places]]
        logits = self._logits(name, rows, index_pos, places)
        if begun is not None:
            begun.keep(self.plan.name, rows[0], places)
            begun.logits, begun.cache = logits, self.caches[name].clone()
        return logits

    def _logits(
        self, name: str, rows: Batch, index_pos: int | None, places: Sequence[int]
    ) -> Array:
        whole = len(places) == len(rows[0])
        logits = self.model(
            rows,
            cache=self.caches[name],
            index_pos=index_pos,
            all_positions=whole,
            places=None if whole else places,
            tap=self.tap,
        )
        return seen(logits)

    def says(self) -> dict[str, Any]:
        found = {name: facts(cache) for name, cache in self.caches.items()}
        return {CACHES: found} | ({SHARED: self.taken} if self.taken else {})

    def nothing(self) -> Array:
        """(0, V)"""
        dtype = np.float64 if self.dtype == "float64" else np.float32
        return np.zeros((0, self.model.config.vocab_size), dtype)

    def kept(self) -> Iterator[tuple[str, int, Any, Any]]:
        for name, cache in self.caches.items():
            for i, layer in enumerate(cache.layers):
                if layer.keys is not None and layer.values is not None:
                    yield name, i, layer.keys, layer.values

    def beside(self) -> dict[str, Array]:
        """The masks, where they are kept."""
        kept = self.caches.items() if self.keep_masks else ()
        return {
            f"mask/{name}/{L}x{S}": np.array(mask)
            for name, cache in kept
            for (L, S), mask in cache.masks.items()
        }


def facts(cache: Cache) -> dict[str, int]:
    """What a cache says of itself beside what it holds, as `oracle.formats.trace.CACHES` has it.

    Allocated are its buffers; RoPE tables and masks, which it shares with others, are not rows.
    """
    buffers = {id(b): b.nbytes for layer in cache.layers for b in layer.buffers or ()}
    length = len(cache)
    return {
        "length": length,
        "size": length,
        "nbytes": cache.nbytes,
        "allocated": sum(buffers.values()),
        "rows": max((layer.length for layer in cache.layers), key=lambda n: abs(n - length)),
    }


def run(
    model: Llama,
    plan: Plan,
    *,
    meta: Meta | None = None,
    guarded: bool = True,
    begun: Begun | None = None,
) -> Trace:
    """The trace of one plan, in memory; `meta` says what only the caller knows."""
    runner = PortRunner(model, plan, guarded=guarded, begun=begun).run()
    base = meta or Meta(
        plan, "mlxkv", machine.version("mlxkv"), runner.dtype, weights_dtype=runner.dtype
    )
    base = replace(base, environment=dict(base.environment) | runner.says())
    return Trace(replace(base, plan=plan, outcomes=runner.outcomes), runner.arrays())


def follow(job: Job, ranks: Ranks | None = None) -> None:
    """Writes one trace per plan; the job's weights, or this rank's part, are read once for all."""
    environment, checkpoint = job.prepare("cpu" if job.dtype == "float64" else job.device)
    from mlxkv.port.weights import Filling

    if ranks is not None:
        ranks.require_alike(checkpoint)
        environment |= ranks.facts
    group, rounded = None if ranks is None else ranks.group, job.weights_dtype
    filling = Filling(checkpoint, job.dtype, rounded_to=rounded, group=group)
    meta = job.meta(
        checkpoint,
        environment | {"rope": filling.model.config.rope.words} | _ways(job, whole=ranks is None),
        engine="mlxkv" if job.guarded else "mlxkv (unguarded)",
        version=machine.version("mlxkv"),
        probes=probe() if job.dtype == "float64" else {},
    )
    follow_on(job, filling, meta, PortRunner if ranks is None else ranks.runner(PortRunner))


def _ways(job: Job, *, whole: bool) -> dict[str, str]:
    """Which of its ways the port takes: they add up in another order."""
    from mlxkv.port import joint, ops, step

    dtype = ops.dtype_of(job.dtype)
    return {
        "decode": step.words(dtype, whole=whole, tapped=bool(job.taps)),
        "layout": "input-major" if joint.input_major(dtype) else "output-major",
    }


def follow_on(job: Job, filling: Filling, meta: Meta, kind: type[PortRunner] = PortRunner) -> None:
    """As float64 allows all plans at once, as taps are asked for, or plan by plan."""
    from mlxkv.engines import exact, recorder

    label = f"port ({job.dtype}, {meta.device})"
    if job.dtype == "float64":
        label = "algebra (float64)"
    if exact.serves(job):
        exact.follow(job, filling, meta, label)
        return
    filling.fill()
    model, begun = filling.model, Begun()
    runner.dither(model.embed_tokens, job.dither)
    if job.taps:
        job.write_seconds(recorder.follow(job, model, meta))
        return

    def begin(plan: Plan) -> tuple[PortRunner, Meta]:
        runs = kind(
            model,
            plan,
            guarded=job.guarded,
            cache_dtype=job.caches.get(plan.name),
            keep_masks=job.masks,
            begun=begun if plan.name in job.shared else None,
        )
        return runs, meta

    runner.follow(job, label, begin)


def probe() -> dict[str, float]:
    """Largest errors of the float64 operations that the algebra rests on, against numpy's.

    Each is relative to the largest value of its result.
    """
    import mlx.core as mx

    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((64, 96)), generator.standard_normal((96, 48))

    def error(got: mx.array, expected: Array) -> float:
        return float(np.max(np.abs(np.array(got) - expected)) / np.max(np.abs(expected)))

    with mx.stream(mx.cpu):
        x, y = mx.array(a, mx.float64), mx.array(b, mx.float64)
        positive = mx.abs(x) + 0.5
        return {
            "matmul": error(x @ y, a @ b),
            "sqrt": error(mx.sqrt(positive), np.sqrt(np.abs(a) + 0.5)),
            "rsqrt": error(mx.rsqrt(positive), 1 / np.sqrt(np.abs(a) + 0.5)),
            "tanh": error(mx.tanh(x), np.tanh(a)),
            "sum": error(mx.sum(x * x, axis=-1), np.sum(a * a, axis=-1)),
            "divide": error(1.0 / positive, 1 / (np.abs(a) + 0.5)),
        }


if __name__ == "__main__":
    from mlxkv.engines.job import serve

    serve(follow)

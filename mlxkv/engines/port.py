"""The port follows plans and writes traces. `python -m mlxkv.engines.port JOB.json` is a process of its own.

A process, so that a BLAS loaded for MLX touches nothing else, memory is given back between the lanes, and a library that
aborts takes no report with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mlxkv.engines import runner
from mlxkv.engines.job import Job
from mlxkv.engines.runner import PlanRunner, host
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan
from oracle.formats.trace import Meta, Trace

if TYPE_CHECKING:
    from mlxkv.port.cache import Cache
    from mlxkv.port.llama import Llama, ModelTap

Array = npt.NDArray[Any]


class Runner(PlanRunner):
    """Follows one plan on a model."""

    def __init__(
        self,
        model: Llama,
        plan: Plan,
        *,
        guarded: bool = True,
        cache_dtype: str | None = None,
        keep_masks: bool = False,
    ) -> None:
        super().__init__(plan)
        self.keep_masks = keep_masks
        self.model = model
        self.guarded = guarded
        self.cache_dtype = cache_dtype
        self.tap: ModelTap | None = None
        self.caches: dict[str, Cache] = {}
        # The truth turns a sequence by the factors for its whole length, so every cache of the plan is made for it.
        longrope = model.config.rope.rope_type == "longrope"
        self.max_length = (
            min(max(1, plan.longest), model.config.max_position_embeddings) if longrope else None
        )

    def new(self, name: str, use_kv_cache: bool) -> None:
        """Guarded or not, as the runner is."""
        from mlxkv.port.cache import Cache

        dtype = self.cache_dtype or self._dtype
        self.caches[name] = Cache(
            self.model.config,
            dtype=dtype,
            use_kv_cache=use_kv_cache,
            guarded=self.guarded,
            max_length=self.max_length,
        )

    def clone(self, source: str, target: str) -> None:
        """The cache's own."""
        self.caches[target] = self.caches[source].clone()

    def crop(self, name: str, length: int) -> None:
        """The cache's own."""
        self.caches[name].crop(length)

    def reset(self, name: str) -> None:
        """The cache's own."""
        self.caches[name].reset()

    def held(self, name: str) -> int:
        """The cache's length."""
        return len(self.caches[name])

    def forward(self, name: str, tokens: tuple[int, ...], index_pos: int | None) -> Array:
        """(L, V), or (1, V)."""
        whole = self.plan.rows == "all"
        given = {"cache": self.caches[name], "index_pos": index_pos, "tap": self.tap}
        rows = host(self.model([tokens], all_positions=whole, **given)[0])
        return rows if whole else rows[None]

    def nothing(self) -> Array:
        """(0, V)"""
        return np.zeros(
            (0, self.model.config.vocab_size),
            np.float64 if self._dtype == "float64" else np.float32,
        )

    def kept(self) -> Iterator[tuple[str, int, Any, Any]]:
        """As the cache shows them."""
        for name, cache in self.caches.items():
            for i, layer in enumerate(cache.layers):
                if layer.keys is not None and layer.values is not None:
                    yield name, i, layer.keys[0], layer.values[0]

    def arrays(self) -> dict[str, Array]:
        """With the masks, where they are kept."""
        return super().arrays() | (self.masks() if self.keep_masks else {})

    def masks(self) -> dict[str, Array]:
        """The masks that each cache has built, 1 hides a key: `mask/<cache>/<new>x<all>` (new, all) uint8."""
        return {
            f"mask/{name}/{L}x{S}": np.array(m)
            for name, cache in self.caches.items()
            for (L, S), m in cache.masks.items()
        }

    @property
    def _dtype(self) -> str:
        from mlxkv.port.ops import name_of

        return name_of(self.model.dtype)


def run(model: Llama, plan: Plan, *, meta: Meta | None = None, guarded: bool = True) -> Trace:
    """The trace of one plan, in memory; `meta` says what only the caller knows (fingerprint, environment)."""
    from mlxkv.engines.machine import version
    from mlxkv.port.ops import name_of

    runner = Runner(model, plan, guarded=guarded).run()
    base = meta or Meta(
        plan, "mlxkv", version("mlxkv"), name_of(model.dtype), weights_dtype=name_of(model.dtype)
    )
    return Trace(replace(base, plan=plan, outcomes=runner.outcomes), runner.arrays())


def follow(job: Job) -> None:
    """Loads the job's model once and writes one trace per plan."""
    from mlxkv.engines import machine as runtime

    environment = runtime.prepare(
        "cpu" if job.dtype == "float64" else job.device, threads=job.threads
    )
    from mlxkv.port.weights import from_checkpoint
    from oracle.model.checkpoint import resolve

    checkpoint = resolve(job.folder, ignore_keys=job.ignore_keys)
    probes = probe() if job.dtype == "float64" else {}
    model = from_checkpoint(checkpoint, job.dtype, rounded_to=job.weights_dtype)
    named = "mlxkv" if job.guarded else "mlxkv (unguarded)"
    said = environment | {"rope": model.config.rope.words}
    meta = job.meta(checkpoint, said, engine=named, version=runtime.version("mlxkv"), probes=probes)
    if job.taps:
        from mlxkv.engines import recorder as taps

        job.report(taps.follow(job, model, meta))
        return
    label = (
        "algebra (float64)"
        if job.dtype == "float64"
        else f"port ({job.dtype}, {environment['device']})"
    )

    def begin(plan: Plan) -> tuple[Runner, Meta]:
        return Runner(
            model,
            plan,
            guarded=job.guarded,
            cache_dtype=job.caches.get(plan.name),
            keep_masks=job.masks,
        ), meta

    runner.follow(job, label, begin)


def probe() -> dict[str, float]:
    """Largest relative errors of the float64 operations that the algebra lane rests on, against numpy."""
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


def main() -> None:
    """The process's entry: one job file."""
    from mlxkv.engines.job import serve

    serve(follow)


if __name__ == "__main__":
    main()

__all__ = ["Refusal", "Runner", "follow", "probe", "run"]

"""The port follows plans and writes traces. `python -m mlxkv.engines.port JOB.json` is a process of its own.

A process, so that a BLAS loaded for MLX touches nothing else, memory is given back between the lanes, and a library that
aborts takes no report with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mlxkv.engines.job import Job
from oracle.plan import Call, Clone, Crop, Greedy, New, Plan, Refusal, Reset, Step
from oracle.trace import Meta, Outcome, Trace, write

if TYPE_CHECKING:
    from mlxkv.port.cache import Cache
    from mlxkv.port.llama import Llama

Array = npt.NDArray[Any]


class Runner:
    """Follows one plan on a model: named caches, the rows that calls returned, what became of each step."""

    def __init__(self, model: Llama, plan: Plan, *, guarded: bool = True) -> None:
        self.model = model
        self.plan = plan
        self.guarded = guarded
        self.caches: dict[str, Cache] = {}
        self.rows: list[Array] = []
        self.positions: list[Array] = []
        self.steps: list[Array] = []
        self.outcomes: list[Outcome] = []
        self.seconds = 0.0

    def run(self, advance: Callable[[int], None] = lambda _: None) -> Runner:
        """Every step in order; a step that fails keeps its error's text and the next one follows."""
        for i, step in enumerate(self.plan.steps):
            try:
                self.outcomes.append(Outcome(tokens=self._step(i, step)))
            except ValueError as error:
                self.outcomes.append(Outcome(error=" ".join(str(error).split())))
            advance(1)
        return self

    def arrays(self) -> dict[str, Array]:
        """The trace's arrays: all rows, and the keys and values that each cache holds at the end."""
        dtype = np.float64 if self._dtype == "float64" else np.float32
        V = self.model.config.vocab_size
        arrays = {
            "logits": np.concatenate(self.rows) if self.rows else np.zeros((0, V), dtype),
            "positions": np.concatenate(self.positions).astype(np.int32) if self.rows else np.zeros(0, np.int32),
            "steps": np.concatenate(self.steps).astype(np.int32) if self.rows else np.zeros(0, np.int32),
        }
        for name, cache in self.caches.items():
            for i, layer in enumerate(cache.layers):
                if layer.keys is not None and layer.values is not None:
                    arrays[f"kv/{name}/{i:03d}/keys"] = self._host(layer.keys[0])
                    arrays[f"kv/{name}/{i:03d}/values"] = self._host(layer.values[0])
        return arrays

    def _step(self, index: int, step: Step) -> list[int] | None:
        from mlxkv.port.cache import Cache

        match step:
            case New(name, use_kv_cache):
                self.caches[name] = Cache(self.model.config, dtype=self._dtype, use_kv_cache=use_kv_cache, guarded=self.guarded)
            case Call(name, tokens, index_pos):
                self._call(index, name, tokens, index_pos)
            case Greedy():
                return self._greedy(index, step)
            case Clone(source, target):
                self.caches[target] = self.caches[source].clone()
            case Crop(name, length):
                self.caches[name].crop(length)
            case Reset(name):
                self.caches[name].reset()
        return None

    def _call(self, index: int, name: str, tokens: tuple[int, ...], index_pos: int | None) -> Array:
        cache = self.caches[name]
        held = len(cache)
        whole = self.plan.rows == "all"
        begun = time.perf_counter()
        rows = self._host(self.model([tokens], cache=cache, index_pos=index_pos, all_positions=whole)[0])
        self.seconds += time.perf_counter() - begun
        rows = rows if whole else rows[None]
        last = held + len(tokens)
        self.rows.append(rows)
        self.positions.append(np.arange(last - len(rows), last))
        self.steps.append(np.full(len(rows), index))
        return rows[-1]

    def _greedy(self, index: int, step: Greedy) -> list[int]:
        chosen: list[int] = []
        tokens, position = step.tokens, step.index_pos
        for calls in range(1, step.n + 1):
            # numpy takes the first of equals, which is the lowest id.
            chosen.append(int(np.argmax(self._call(index, step.cache, tokens, position))))
            if position is not None and step.index_pos is not None:
                position = {"right": position + len(tokens), "zero": position, "by_calls": step.index_pos + calls}[step.advance]
            tokens = (chosen[-1],)
        return chosen

    @property
    def _dtype(self) -> str:
        from mlxkv.port.ops import name_of

        return name_of(self.model.dtype)

    def _host(self, array: Any) -> Array:
        """A numpy copy: numpy has no bfloat16, and float32 holds every half-precision value exactly."""
        import mlx.core as mx

        kept = array.dtype in (mx.float32, mx.float64)
        return np.array(array if kept else array.astype(mx.float32))


def run(model: Llama, plan: Plan, *, meta: Meta | None = None, guarded: bool = True) -> Trace:
    """The trace of one plan, in memory; `meta` says what only the caller knows (fingerprint, environment)."""
    from mlxkv.port.ops import name_of
    from mlxkv.runtime import version

    runner = Runner(model, plan, guarded=guarded).run()
    base = meta or Meta(plan, "mlxkv", version("mlxkv"), name_of(model.dtype), weights_dtype=name_of(model.dtype))
    return Trace(replace(base, plan=plan, outcomes=runner.outcomes), runner.arrays())


def follow(job: Job) -> None:
    """Loads the job's model once and writes one trace per plan."""
    from mlxkv import runtime
    from mlxkv.progress import bar

    environment = runtime.prepare("cpu" if job.dtype == "float64" else job.device, threads=job.threads)
    from mlxkv.port.weights import from_checkpoint
    from oracle.checkpoint import resolve

    checkpoint = resolve(job.folder)
    probes = probe() if job.dtype == "float64" else {}
    model = from_checkpoint(checkpoint, job.dtype, rounded_to=job.weights_dtype)
    meta = Meta(
        plan=job.plans[0],
        engine="mlxkv" if job.guarded else "mlxkv (unguarded)",
        engine_version=runtime.version("mlxkv"),
        dtype=job.dtype,
        weights_dtype=job.weights_dtype,
        device=environment["device"],
        fingerprint=checkpoint.fingerprint,
        config_digest=checkpoint.config_digest,
        environment=environment,
        probes=probes,
    )
    if job.taps:
        from mlxkv.engines import taps

        job.report(taps.follow(job, model, meta))
        return
    seconds = 0.0
    label = "algebra (float64)" if job.dtype == "float64" else f"port ({job.dtype}, {environment['device']})"
    with bar(label, sum(len(p.steps) for p in job.plans)) as advance:
        for plan in job.plans:
            runner = Runner(model, plan, guarded=job.guarded).run(advance)
            seconds += runner.seconds
            write(job.trace(plan), replace(meta, plan=plan, outcomes=runner.outcomes), runner.arrays())
    job.report(seconds)


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

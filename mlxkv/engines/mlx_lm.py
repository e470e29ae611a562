"""mlx-lm's own Llama follows plans. `python -m mlxkv.engines.mlx_lm JOB.json` is a process.

`import mlx_lm` imports transformers, which would import torch. torch is made unfindable here, so
nothing of the oracle's may run in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mlxkv.engines import machine, runner
from mlxkv.engines.job import Job
from mlxkv.engines.runner import Array, Batch, PlanRunner, host
from oracle.formats.errors import Inexpressible, Refusal, install, one_line
from oracle.formats.plan import Plan
from oracle.formats.trace import Meta

CACHES = ("KVCache", "ConcatenateKVCache", "RotatingKVCache")


class MlxLmRunner(PlanRunner):
    """Follows one plan on mlx-lm's model; `cache` names a class as a Job does.

    mlx-lm has no clone and no reset: as its users do, this copies a cache, and takes a new one. Any
    error of mlx-lm's ends its step alone.
    """

    failures = (Exception,)

    def __init__(self, model: Any, plan: Plan, *, cache: str = "KVCache") -> None:
        super().__init__(plan)
        self.model, self.cache = model, cache

    def new(self, name: str, use_kv_cache: bool) -> None:
        """A prompt cache, or None where there is to be no cache."""
        self.caches[name] = prompt_cache(self.model, self.cache) if use_kv_cache else None

    def crop(self, name: str, length: int) -> None:
        """Trims what is too much, as users of mlx-lm do."""
        from mlx_lm.models.cache import trim_prompt_cache

        cache, held = self.caches[name], self.held(name)
        self.check_crop(length, held)
        if cache is None:
            return
        trimmed = trim_prompt_cache(cache, held - length)
        if trimmed != held - length:
            what = f"trim_prompt_cache trimmed {trimmed} of {held - length} tokens"
            raise Inexpressible(f"{what} from a {self.cache}")

    def held(self, name: str) -> int:
        """The position that mlx-lm gives to the next token."""
        cache = self.caches[name]
        return 0 if cache is None else int(cache[0].offset)

    def forward(
        self, name: str, rows: Batch, index_pos: int | None, places: Sequence[int]
    ) -> Array:
        """(B, len(places), V). mlx-lm computes every position's logits in any case."""
        import mlx.core as mx

        why = "mlx-lm takes the position from its cache"
        self.check_position(index_pos, self.held(name), why)
        logits = self.model(mx.array(rows), cache=self.caches[name])
        return host(logits[:, mx.array([*places])])

    def nothing(self) -> Array:
        """(0, V)"""
        return np.zeros((0, self.model.args.vocab_size), np.float32)

    def kept(self) -> Iterator[tuple[str, int, Any, Any]]:
        """The part of each cache's state that is in use.

        A full RotatingKVCache has its rows in the order of its ring.
        """
        for name, cache in self.caches.items():
            for i, layer in enumerate(cache or []):
                if not layer.empty():
                    keys, values = layer.state[:2]
                    yield name, i, keys[:, :, : layer.offset], values[:, :, : layer.offset]


def prompt_cache(model: Any, kind: str) -> list[Any]:
    """mlx-lm's cache for every layer: its own choice for "KVCache", else of the class named."""
    name, colon, size = kind.partition(":")
    if name not in CACHES or not (size.isdecimal() if name == "RotatingKVCache" else not colon):
        what = f"{kind!r}, expected KVCache, ConcatenateKVCache or RotatingKVCache:SIZE"
        raise Refusal(what, where="cache")
    from mlx_lm.models import cache

    if name == "KVCache":
        return list(cache.make_prompt_cache(model))
    if name == "ConcatenateKVCache":
        return [cache.ConcatenateKVCache() for _ in model.layers]
    # make_prompt_cache ignores its max_kv_size for a model that makes its own caches, as Llama
    # does. For others it keeps 4.
    return [cache.RotatingKVCache(max_size=int(size), keep=4) for _ in model.layers]


def load(folder: str, dtype: str) -> Any:
    """mlx-lm's model of the folder, as its own loader reads it, in `dtype`."""
    import mlx.core as mx

    from mlxkv.port.ops import dtype_of

    # transformers, which mlx-lm imports for its tokenizers, would bring torch in: seconds, and a
    # second BLAS, for nothing.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    try:
        from mlx_lm.utils import load_model
    except ImportError as error:
        raise Refusal(
            f"mlx-lm cannot be imported ({one_line(error)})", remedy=install("port")
        ) from error
    try:
        model, _ = load_model(Path(folder))
    except Exception as error:  # whatever its code for some architecture raises
        why = f"mlx-lm cannot load it ({one_line(error, 300)}){runner.place(error)}"
        remedy = f"judge another model or engine, or {runner.more()}"
        raise Refusal(why, where=folder, remedy=remedy) from error
    model.set_dtype(dtype_of(dtype))
    mx.eval(model.parameters())
    return model


def _rope(model: Any) -> str:
    """The RoPE that mlx-lm took from the config, as far as its architectures name it alike.

    A key that mlx-lm lost is seen here.
    """
    args = getattr(model, "args", None)
    theta, scaling = getattr(args, "rope_theta", None), getattr(args, "rope_scaling", None)
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else "default"
    return f"{kind}, theta {theta:g}" if isinstance(theta, int | float) else ""


def follow(job: Job) -> None:
    """Loads the job's model once and writes one trace per plan."""
    environment, checkpoint = job.prepare(job.device)
    model = load(str(checkpoint.folder), job.dtype)
    facts = {name: machine.version(name) for name in ("mlx-lm", "transformers")}
    facts |= {"rope": _rope(model), "code of mlx-lm": machine.place("mlx_lm")}
    version = facts["mlx-lm"]
    meta = job.meta(checkpoint, environment | facts, engine="mlx-lm", version=version)

    def begin(plan: Plan) -> tuple[MlxLmRunner, Meta]:
        kind = job.caches.get(plan.name, "KVCache")
        runs = replace(meta, environment=meta.environment | {"cache": kind})
        return MlxLmRunner(model, plan, cache=kind), runs

    runner.follow(job, f"mlx-lm ({job.dtype}, {environment['device']})", begin)


if __name__ == "__main__":
    from mlxkv.engines.job import serve

    serve(follow)

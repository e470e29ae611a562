"""mlx-lm's own Llama follows plans and writes traces. `python -m mlxkv.engines.mlx_lm JOB.json` is a process of its own.

`import mlx_lm` imports transformers, which would import torch: it is made unfindable here, so never beside anything of the oracle's.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mlxkv.engines import runner
from mlxkv.engines.job import Job
from mlxkv.engines.runner import Array, PlanRunner, host
from oracle.formats.errors import Inexpressible, Refusal
from oracle.formats.plan import Plan
from oracle.formats.trace import Meta

CACHES = ("KVCache", "ConcatenateKVCache", "RotatingKVCache")


class Runner(PlanRunner):
    """Follows one plan on mlx-lm's model; `cache` names a class as a Job does. Any error of mlx-lm's ends its step alone."""

    failures = (Exception,)

    def __init__(self, model: Any, plan: Plan, *, cache: str = "KVCache") -> None:
        super().__init__(plan)
        self.model = model
        self.cache = cache
        self.caches: dict[str, list[Any] | None] = {}

    def new(self, name: str, use_kv_cache: bool) -> None:
        """A prompt cache, or None where there is to be no cache."""
        self.caches[name] = prompt_cache(self.model, self.cache) if use_kv_cache else None

    def clone(self, source: str, target: str) -> None:
        """mlx-lm has no clone; its users copy. An array that is copied shares memory until one side writes."""
        self.caches[target] = copy.deepcopy(self.caches[source])

    def crop(self, name: str, length: int) -> None:
        """As its users do: trim what is too much."""
        from mlx_lm.models.cache import trim_prompt_cache

        cache, held = self.caches[name], self.held(name)
        if length > held:
            raise Refusal(f"crop: length is {length}, expected at most the {held} tokens cached")
        if cache is None:
            return
        trimmed = trim_prompt_cache(cache, held - length)
        if trimmed != held - length:
            raise Inexpressible(
                f"trim_prompt_cache trimmed {trimmed} of {held - length} tokens from a {self.cache}"
            )

    def reset(self, name: str) -> None:
        """mlx-lm has no reset; its users take a new cache."""
        self.new(name, self.caches[name] is not None)

    def held(self, name: str) -> int:
        """The position that mlx-lm gives to the next token."""
        cache = self.caches[name]
        return 0 if cache is None else int(cache[0].offset)

    def forward(self, name: str, tokens: tuple[int, ...], index_pos: int | None) -> Array:
        """(L, V), or (1, V). mlx-lm computes every position's logits either way."""
        import mlx.core as mx

        held = self.held(name)
        if index_pos not in (None, held):
            raise Inexpressible(
                f"index_pos {index_pos} with {held} tokens cached, as mlx-lm takes the position from its cache"
            )
        logits = self.model(mx.array([tokens]), cache=self.caches[name])[0]
        return host(logits if self.plan.rows == "all" else logits[-1:])

    def nothing(self) -> Array:
        """(0, V)"""
        return np.zeros((0, self.model.args.vocab_size), np.float32)

    def kept(self) -> Iterator[tuple[str, int, Any, Any]]:
        """The part of each cache's state that is in use; a full RotatingKVCache has its rows in the order of its ring."""
        for name, cache in self.caches.items():
            for i, layer in enumerate(cache or []):
                if not layer.empty():
                    keys, values = layer.state[:2]
                    yield name, i, keys[0, :, : layer.offset], values[0, :, : layer.offset]


def prompt_cache(model: Any, kind: str) -> list[Any]:
    """mlx-lm's cache for every layer: its own choice for "KVCache", else of the class named."""
    name, colon, size = kind.partition(":")
    if name not in CACHES or not (size.isdecimal() if name == "RotatingKVCache" else not colon):
        raise Refusal(
            f"cache: {kind!r}, expected KVCache, ConcatenateKVCache or RotatingKVCache:SIZE"
        )
    from mlx_lm.models import cache

    if name == "KVCache":
        return list(cache.make_prompt_cache(model))
    if name == "ConcatenateKVCache":
        return [cache.ConcatenateKVCache() for _ in model.layers]
    # make_prompt_cache drops its max_kv_size for a model that makes its own caches, as Llama does. 4 is what it keeps for others.
    return [cache.RotatingKVCache(max_size=int(size), keep=4) for _ in model.layers]


def load(folder: str, dtype: str) -> Any:
    """mlx-lm's model of the folder, as its own loader reads it, in `dtype`."""
    import mlx.core as mx

    from mlxkv.port.ops import dtype_of

    # transformers, which mlx-lm imports for its tokenizers, would bring torch in: seconds, and a second BLAS, for nothing.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    try:
        from mlx_lm.utils import load_model
    except ImportError as error:
        raise Refusal(
            f"mlx-lm cannot be imported ({' '.join(str(error).split())}): pip install 'mlxkv[port]'"
        ) from error
    try:
        model, _ = load_model(Path(folder))
    except Exception as error:  # whatever its code for some architecture raises
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise Refusal(
            f"{folder}: mlx-lm cannot load it ({why}); judge another model or engine"
        ) from error
    model.set_dtype(dtype_of(dtype))
    mx.eval(model.parameters())
    return model


def _rope(model: Any) -> str:
    """What mlx-lm took from the config, as far as its architectures name it alike: a key that it lost is seen here."""
    args = getattr(model, "args", None)
    theta, scaling = getattr(args, "rope_theta", None), getattr(args, "rope_scaling", None)
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else "default"
    return f"{kind}, theta {theta:g}" if isinstance(theta, int | float) else ""


def follow(job: Job) -> None:
    """Loads the job's model once and writes one trace per plan."""
    from mlxkv.engines import machine as runtime

    environment = runtime.prepare(job.device, threads=job.threads)
    from oracle.model.checkpoint import resolve

    checkpoint = resolve(job.folder, ignore_keys=job.ignore_keys)
    versions = {name: runtime.version(name) for name in ("mlx-lm", "transformers")}
    model = load(str(checkpoint.folder), job.dtype)
    said = environment | versions | {"rope": _rope(model)}
    meta = job.meta(checkpoint, said, engine="mlx-lm", version=runtime.version("mlx-lm"))

    def begin(plan: Plan) -> tuple[Runner, Meta]:
        kind = job.caches.get(plan.name, "KVCache")
        return Runner(model, plan, cache=kind), replace(
            meta, environment=meta.environment | {"cache": kind}
        )

    runner.follow(job, f"mlx-lm ({job.dtype}, {environment['device']})", begin)


if __name__ == "__main__":
    from mlxkv.engines.job import serve

    serve(follow)

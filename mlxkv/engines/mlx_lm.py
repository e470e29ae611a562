"""mlx-lm's own Llama follows plans. `python -m mlxkv.engines.mlx_lm JOB.json` is a process.

`import mlx_lm` imports transformers, which would import torch. torch is made unfindable here, so
nothing of the oracle's may run in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxkv.engines import kinds, machine, prompt_cache, runner
from mlxkv.engines.job import Job
from mlxkv.engines.kinds import Kind
from mlxkv.engines.prompt_cache import BATCH
from mlxkv.engines.prompt_cache import caches_for as caches_for
from mlxkv.engines.runner import Array, Batch, BrokenOff, PlanRunner, blamed_on, host
from oracle.formats.disk import sha256
from oracle.formats.errors import Inexpressible, Refusal, install, one_line
from oracle.formats.plan import Plan
from oracle.formats.trace import CACHES, Meta

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxkv.engines.head import Head
    from mlxkv.engines.rank import Ranks

KVCACHE = kinds.parse("KVCache")
"""mlx-lm's usual one, for plans that name no other."""


class MlxLmRunner(PlanRunner):
    """Follows one plan on mlx-lm's model, with a cache of any kind that runs inside it.

    As mlx-lm's users do, this copies a cache where it is to be cloned, and takes a new one where it
    is to be empty. Any error of mlx-lm's, or of a person's own cache, ends its step alone. Tokens
    are counted here, since a cache that counts wrongly is to be judged and not believed.
    """

    failures = (Exception,)

    def __init__(
        self, model: Any, plan: Plan, *, kind: Kind = KVCACHE, head: Head | None = None
    ) -> None:
        """`head` is the model's where it can be given some rows of a long call."""
        super().__init__(plan)
        self.model, self.kind, self.head = model, kind, head
        self.fed: dict[str, tuple[Batch, ...]] = {}

    def new(self, name: str, use_kv_cache: bool) -> None:
        """A prompt cache, or None where there is to be no cache.

        A batch cache is made with its first call, which shows how many rows there are.
        """
        self.fed[name] = ()
        self.caches[name] = self._made(1, ()) if use_kv_cache else None
        if use_kv_cache and self.kind.base in BATCH:
            self.caches[name] = []

    def clone(self, source: str, target: str) -> None:
        with self._blamed("copy of a cache"):
            cache = self.caches[source]
            self.caches[target] = None if cache is None else prompt_cache.copied(cache)
        self.fed[target] = self.fed[source]

    def crop(self, name: str, length: int) -> None:
        """Trims what is too much, as users of mlx-lm do."""
        cache, held = self.caches[name], self.held(name)
        self.check_crop(length, held)
        if cache is None:
            return
        with self._blamed("trim()"):
            prompt_cache.trim(cache, held - length, self.kind.name)
        self._keep(name, length)

    def trim(self, name: str, tokens: int) -> None:
        """As mlx-lm trims: all that is there, where more is asked for."""
        held = self.held(name)
        if self.caches[name] is None:
            return
        with self._blamed("trim()"):
            prompt_cache.trim(self.caches[name], tokens, self.kind.name, held=held)
        self._keep(name, max(0, held - tokens))

    def reset(self, name: str) -> None:
        """By the layers' own `reset()` where every one has it, else a new cache."""
        cache = self.caches[name]
        if cache is None or not prompt_cache.resets(cache):
            super().reset(name)
        else:
            with self._blamed("reset()"):
                for layer in cache:
                    layer.reset()
            self.fed[name] = ()

    def pad(self, name: str, left: tuple[int, ...]) -> None:
        """Padding is what batch caches are made with, and others told by mlx-lm's `prepare`."""
        cache = self.caches[name]
        if self.kind.base in BATCH and cache == []:
            return
        if not cache or not all(callable(getattr(layer, "prepare", None)) for layer in cache):
            raise Inexpressible(f"a {self.kind.name} takes no padded rows")
        with self._blamed("prepare()"):
            for layer in cache:
                layer.prepare(left_padding=list(left))

    def reload(self, name: str) -> None:
        """Through a file of mlx-lm's."""
        if not self.caches[name]:
            raise Inexpressible("there is no cache to save")
        with self._blamed("save_prompt_cache and load_prompt_cache"):
            self.caches[name] = prompt_cache.reloaded(self.caches[name])

    def recall(self, source: str, target: str, length: int) -> None:
        """By mlx-lm's LRUPromptCache."""
        cache, fed = self.caches[source], self.fed[source]
        if not cache or not fed or len(fed[0]) > 1:
            raise Inexpressible("LRUPromptCache holds caches of one sequence")
        tokens = [token for rows in fed for token in rows[0]]
        with self._blamed("LRUPromptCache"):
            self.caches[target] = prompt_cache.recalled(cache, tokens, length)
        self.fed[target] = ((tuple(tokens[:length]),),) if length else ()

    def fail(self, name: str, tokens: tuple[int, ...]) -> None:
        """The layer in the middle raises; then each layer is trimmed by what it took."""
        cache = self._ready(name, (tokens,))
        before = [prompt_cache.largest(layer) for layer in cache or ()]
        with suppress(BrokenOff), prompt_cache.broken_off(self.model):
            self._logits((tokens,), cache)
        with self._blamed("trim()"):
            prompt_cache.trim_to(cache or [], before, self.kind.name)

    def held(self, name: str) -> int:
        """The tokens fed to a cache, padding among them."""
        return sum(len(rows[0]) for rows in self.fed[name])

    def forward(
        self, name: str, rows: Batch, index_pos: int | None, places: Sequence[int]
    ) -> Array:
        """(B, len(places), V). mlx-lm computes the logits of every position of a short call."""
        import mlx.core as mx

        why = "mlx-lm takes the position from its cache"
        self.check_position(index_pos, self.held(name), why)
        cache = self._ready(name, rows)
        some = self._some(rows, places)
        with self.head.given(some) if self.head and some else nullcontext():
            logits = self._logits(rows, cache)
        if cache is not None:
            self.fed[name] = (*self.fed[name], rows)
        return host(logits[:, mx.array([some.index(p) for p in places] if some else [*places])])

    def _some(self, rows: Batch, places: Sequence[int]) -> list[int] | None:
        """The rows of a long call that the head is given; None for all."""
        if self.head is None:
            return None
        return self.head.rows(len(rows), len(rows[0]), self.model.args.vocab_size, places)

    def says(self) -> dict[str, Any]:
        """What each cache says of itself beside what it holds, as `prompt_cache.facts`."""
        heads, whole = prompt_cache.heads_of(self.model), self.kind.whose == "own"
        kept = {name: cache for name, cache in self.caches.items() if cache is not None}
        facts = {n: prompt_cache.facts(cache, heads, whole=whole) for n, cache in kept.items()}
        return {CACHES: facts}

    def nothing(self) -> Array:
        """(0, V)"""
        return np.zeros((0, self.model.args.vocab_size), np.float32)

    def kept(self) -> Iterator[tuple[str, int, Any, Any]]:
        """What the layers' states show of the keys and values in use.

        Of a person's own cache all layers', or none.
        """
        heads, own = prompt_cache.heads_of(self.model), self.kind.whose == "own"
        for name, cache in self.caches.items():
            rows = [_shown(layer, heads, whole=own) for layer in cache or []]
            if own and None in rows:
                continue
            for i, pair in enumerate(rows):
                if pair is not None:
                    yield name, i, *pair

    def _made(self, batch: int, padding: Sequence[int]) -> list[Any]:
        return caches_for(self.model, self.kind, batch=batch, padding=padding)

    def _ready(self, name: str, rows: Batch) -> list[Any] | None:
        """The cache, made now if it is one for a batch that has not begun."""
        if self.caches[name] == []:
            self.caches[name] = self._made(len(rows), self.padding.get(name, ()))
        cache: list[Any] | None = self.caches[name]
        return cache

    def _logits(self, rows: Batch, cache: list[Any] | None) -> Any:
        """The model's logits, an mx.array (B, L, V)."""
        import mlx.core as mx

        with self._blamed("a call of mlx-lm's Llama"):
            logits = self.model(mx.array(rows), cache=cache)
            mx.eval(logits)  # what fails late must fail here, where it is known whose it is
        return logits

    def _keep(self, name: str, length: int) -> None:
        """Of what was fed, the first `length` tokens of each row."""
        kept: list[Batch] = []
        for rows in self.fed[name]:
            if length > 0:
                kept.append(tuple(row[:length] for row in rows))
            length -= len(rows[0])
        self.fed[name] = tuple(kept)

    @contextmanager
    def _blamed(self, what: str) -> Iterator[None]:
        """What a person's own cache raises is its step's error, in one line."""
        of_own = self.kind.whose == "own"
        with blamed_on(self.kind.name, what) if of_own else nullcontext():
            yield


def _shown(layer: Any, heads: tuple[int, int], *, whole: bool) -> tuple[Any, Any] | None:
    """The rows of a layer, or None where it shows none or its state fails, as one's own may."""
    with suppress(Exception):
        return prompt_cache.rows_of(layer, heads, whole=whole)
    return None


def load(folder: str, dtype: str, group: mx.distributed.Group | None = None) -> Any:
    """mlx-lm's model of the folder, as its own loader reads it, in `dtype`.

    With a group this rank's part of it.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

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
        model, _ = load_model(Path(folder), lazy=group is not None)
    except Exception as error:  # whatever its code for some architecture raises
        why = f"mlx-lm cannot load it ({one_line(error, 300)}){runner.place(error)}"
        remedy = f"judge another model or engine, or {runner.more()}"
        raise Refusal(why, where=folder, remedy=remedy) from error
    if group is not None:
        _shard(model, group, folder)
    model.set_dtype(dtype_of(dtype))
    # One at a time: many whole tensors may not fit beside each other on a rank.
    for _, array in tree_flatten(model.parameters()):
        mx.eval(array)
    return model


def _shard(model: Any, group: mx.distributed.Group, folder: str) -> None:
    """By mlx-lm's own `shard`; its ModelArgs then say how many KV heads the rank's caches hold."""
    if not callable(getattr(model, "shard", None)):
        what = f"mlx-lm's {type(model).__module__} has no shard(group)"
        raise Refusal(what, where=folder, remedy="judge it without --ranks")
    model.shard(group)
    heads = prompt_cache.heads_of(model)[0]
    model.args.num_key_value_heads = heads // group.size()


def _rope(model: Any) -> str:
    """The RoPE that mlx-lm took from the config, as far as its architectures name it alike.

    A key that mlx-lm lost is seen here.
    """
    args = getattr(model, "args", None)
    theta, scaling = getattr(args, "rope_theta", None), getattr(args, "rope_scaling", None)
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else "default"
    return f"{kind}, theta {theta:g}" if isinstance(theta, int | float) else ""


def _named(kind: Kind) -> dict[str, str]:
    """A cache's name, and of a person's own file its digest."""
    file = kind.file
    return {"cache": kind.name} | ({f"sha256 of {file.name}": sha256(file)} if file else {})


def follow(job: Job, ranks: Ranks | None = None) -> None:
    """Loads the job's model once, or this rank's part, and writes one trace per plan."""
    environment, checkpoint = job.prepare(job.device)
    if ranks is not None:
        ranks.require_alike(checkpoint)
        environment |= ranks.facts
    group, chosen = None, MlxLmRunner
    if ranks is not None:
        group, chosen = ranks.group, ranks.runner(MlxLmRunner)
    model = load(str(checkpoint.folder), job.dtype, group)
    if job.dither:
        runner.dither(model.model.embed_tokens, job.dither)
    facts = {name: machine.version(name) for name in ("mlx-lm", "transformers")}
    facts |= {"rope": _rope(model), "code of mlx-lm": machine.place("mlx_lm")}
    from mlxkv.engines.head import Head  # which needs MLX

    version = facts["mlx-lm"]
    meta = job.meta(checkpoint, environment | facts, engine="mlx-lm", version=version)

    calls = (call.fed * len(call.batch) for plan in job.plans for call in plan.calls())
    head = Head.of(model, checkpoint.vocab_size, calls)
    used = {name: kinds.parse(text) for name, text in job.caches.items()}
    for kind in {kind.text: kind for kind in used.values()}.values():
        caches_for(model, kind)  # what is refused of one is refused before anything runs

    def begin(plan: Plan) -> tuple[MlxLmRunner, Meta]:
        kind = used.get(plan.name, KVCACHE)
        runs = replace(meta, environment=meta.environment | _named(kind))
        return chosen(model, plan, kind=kind, head=head), runs

    runner.follow(job, f"mlx-lm ({job.dtype}, {environment['device']})", begin)


if __name__ == "__main__":
    from mlxkv.engines.job import serve

    serve(follow)

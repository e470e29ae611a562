"""A person's own MLX model follows plans. `python -m mlxkv.engines.own JOB.json` is a process.

`FILE.py:load` names a function `load(path, dtype)`: the checkpoint's folder and, say, "float32".
What it returns follows mlx-lm's convention: `model(tokens, cache=cache)` takes an mx.array (B, L)
and gives logits (B, L, V), `make_cache()` gives a list with one cache per layer. If the call has a
parameter `places`, it is given the places in L whose logits are kept, R of them, and gives those
alone, (B, R, V). The model may have `taps()` too (see `own_taps`). The file is executed because it
was named; what goes wrong in it becomes one line. Axes as in `mlxkv.port.llama`.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlxkv.engines import runner
from mlxkv.engines.job import Job
from mlxkv.engines.runner import Array, Batch, CropRefusal, PlanRunner, blamed_on, host
from oracle.formats.disk import sha256
from oracle.formats.errors import Inexpressible, Refusal
from oracle.formats.plan import Plan
from oracle.formats.trace import CACHES, Meta

CALL = "model(tokens, cache=cache)"
CONVENTION = (
    f"expected mlx-lm's convention: {CALL} -> logits (B, L, V), "
    "and make_cache() -> one cache per layer"
)


class Source(NamedTuple):
    """A function in a file; `name` is the engine's in reports."""

    file: Path
    function: str
    name: str


def find(engine: str) -> Source:
    """What FILE.py:load names; a Refusal where there is no such file. Nothing of it is executed."""
    path, _, function = engine.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        expected = "expected port or mlx-lm, or FILE.py:FUNCTION for a model of your own"
        raise Refusal(f"{engine!r}, {expected}", where="--engine")
    file = Path(path).absolute()
    if not file.is_file():
        what = f"no such file, expected the Python file that holds {function}"
        raise Refusal(what, where=f"--engine: {path}", remedy="check the path")
    return Source(file, function, f"{file.name}:{function}")


class OwnRunner(PlanRunner):
    """Follows one plan on a model of mlx-lm's convention.

    `name` is the model's in messages, `vocab` is V, `heads` K and D where they are known. Positions
    are counted here, since a cache that counts wrongly is to be judged and not believed.
    """

    failures = (Inexpressible, CropRefusal)

    def __init__(
        self, model: Any, plan: Plan, *, name: str, vocab: int, heads: tuple[int, ...] = ()
    ) -> None:
        super().__init__(plan)
        self.model, self.name, self.vocab, self.heads = model, name, vocab, heads
        self.chooses = takes_places(model)
        self.fed: dict[str, int] = {}

    def new(self, name: str, use_kv_cache: bool) -> None:
        """The model's own cache, or None where every call is to have a fresh one."""
        self.caches[name], self.fed[name] = self._made() if use_kv_cache else None, 0

    def clone(self, source: str, target: str) -> None:
        """The convention has no clone; its users copy."""
        with blamed_on(self.name, "copy of a cache"):
            super().clone(source, target)
        self.fed[target] = self.fed[source]

    def crop(self, name: str, length: int) -> None:
        """Has every layer `trim` what is too much, as mlx-lm's users do."""
        cache, held = self.caches[name], self.fed[name]
        self.check_crop(length, held)
        if cache is None:
            return
        if not all(hasattr(layer, "trim") for layer in cache):
            raise Inexpressible("a layer's cache has no trim()")
        with blamed_on(self.name, "trim()"):
            trimmed = {layer.trim(held - length) for layer in cache}
        if trimmed != {held - length}:
            found = sorted(map(str, trimmed))
            raise Inexpressible(f"trim() trimmed {found} of {held - length} tokens")
        self.fed[name] = length

    def held(self, name: str) -> int:
        return self.fed[name]

    def forward(
        self, name: str, rows: Batch, index_pos: int | None, places: Sequence[int]
    ) -> Array:
        """(B, len(places), V). A batch that the model does not take ends its step alone."""
        import mlx.core as mx

        held, cache = self.fed[name], self.caches[name]
        self.check_position(index_pos, held, "the cache has the position")
        given = self._made() if cache is None else cache
        try:
            logits = self._logits(rows, given, places if self.chooses else None)
        except Refusal as error:
            if len(rows) == 1:
                raise
            raise Inexpressible(f"a batch of {len(rows)}, as {error.what}") from error
        self.fed[name] = 0 if cache is None else held + len(rows[0])
        return host(logits if self.chooses else logits[:, mx.array([*places])])

    def _logits(self, rows: Batch, cache: Any, places: Sequence[int] | None = None) -> Any:
        """The model's logits, an mx.array (B, L, V), or those at `places` that it is to choose."""
        import mlx.core as mx

        more = {} if places is None else {"places": mx.array([*places])}
        with blamed_on(self.name, CALL):
            logits = self.model(mx.array(rows), cache=cache, **more)
            if isinstance(logits, mx.array):
                mx.eval(logits)  # what fails late must fail here, where it is known whose it is
        L = len(rows[0]) if places is None else len(places)
        _check(logits, [len(rows), L, self.vocab], self.name)
        return logits

    def says(self) -> dict[str, Any]:
        """What its caches say of themselves, as far as they follow mlx-lm's protocol."""
        from mlxkv.engines import prompt_cache

        heads = self.heads if len(self.heads) == 2 else (0, 0)
        kept = {name: cache for name, cache in self.caches.items() if cache}
        return {CACHES: {name: prompt_cache.facts(cache, heads) for name, cache in kept.items()}}

    def nothing(self) -> Array:
        """(0, V)"""
        return np.zeros((0, self.vocab), np.float32)

    def kept(self) -> Iterator[tuple[str, int, Any, Any]]:
        """The rows of caches whose layers all show them as mlx-lm's do, `state` up to `offset`."""
        for name, cache in self.caches.items():
            with blamed_on(self.name, "a cache's state"):
                batch = self.batches[name] or 1
                rows = [_rows(layer, batch, self.heads) for layer in cache or []]
            for i, pair in enumerate(rows):
                if pair is not None and None not in rows:
                    yield name, i, *pair

    def _made(self) -> list[Any]:
        with blamed_on(self.name, "make_cache()"):
            cache = self.model.make_cache()
        if not isinstance(cache, list | tuple):
            what = f"make_cache() gave a {type(cache).__name__}"
            raise Refusal(f"{what}, expected a list with one cache per layer", where=self.name)
        return list(cache)


def _check(logits: Any, expected: list[int], name: str) -> None:
    import mlx.core as mx

    if not isinstance(logits, mx.array):
        found = f"a {type(logits).__name__}, expected an mx.array {expected}"
        raise Refusal(f"{CALL} gave {found}", where=name)
    if list(logits.shape) != expected or not mx.issubdtype(logits.dtype, mx.floating):
        found = f"{list(logits.shape)} {str(logits.dtype).removeprefix('mlx.core.')}"
        expects = f"expected {expected} of floats: batch, tokens, vocabulary"
        raise Refusal(f"{CALL} gave {found}, {expects}", where=name)


def _rows(layer: Any, batch: int, heads: tuple[int, ...]) -> tuple[Any, Any] | None:
    """keys and values, each [B, K, S, D], of one layer's cache; None where it shows none.

    Those that it lays out in another way stay so; the judge asks whether it knows that way.
    """
    import mlx.core as mx

    state, offset = getattr(layer, "state", None), getattr(layer, "offset", None)
    if not isinstance(offset, int) or not isinstance(state, tuple | list) or len(state) < 2:
        return None
    if not all(isinstance(a, mx.array) and a.ndim == 4 and len(a) == batch for a in state[:2]):
        return None
    keys, values = (used(array, offset, heads) for array in state[:2])
    return keys, values


def used(array: Any, offset: int, heads: tuple[int, ...]) -> Any:
    """The tokens in use, cut along the axis that neither K nor D takes up; usually the third."""
    axis = next((i for i in (2, 1, 3) if _beside(array, i) == sorted(heads)), 2)
    return array[(slice(None),) * axis + (slice(offset),)]


def _beside(array: Any, axis: int) -> list[int]:
    return sorted(size for i, size in enumerate(array.shape) if i not in (0, axis))


def heads_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """K and D by a Llama's config.json; () where they are not plain numbers."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        return ()
    found = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
    return found if all(isinstance(n, int) for n in found) else ()


def require(model: Any, name: str) -> Any:
    """The model; a Refusal where it cannot be called or makes no caches."""
    if not callable(model) or not callable(getattr(model, "make_cache", None)):
        lacks = "make_cache()" if callable(model) else CALL
        raise Refusal(f"a {type(model).__name__} without {lacks}, {CONVENTION}", where=name)
    return model


def takes_places(model: Any) -> bool:
    """Whether a model's call has a parameter `places`."""
    try:
        return "places" in inspect.signature(model).parameters
    except (TypeError, ValueError):  # none can be seen, as of a function in C
        return False


def says(model: Any) -> dict[str, Any]:
    """What a model says of itself for its traces' environment.

    One with `deterministic = False` need not give the same bits when it is asked again.
    """
    return {"deterministic": False} if getattr(model, "deterministic", True) is False else {}


def function_of(source: Source, takes: str) -> Callable[..., Any]:
    """The function that a source names, its file executed as a module; it is called with `takes`.

    The file can import its neighbours, but neither it nor they take the name of anything that
    Python finds without them: the file's folder is the last that is searched.
    """
    spec = importlib.util.spec_from_file_location(f"engine {source.file.stem}", source.file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(source.file.parent))
    with blamed_on(source.name, "import"):
        spec.loader.exec_module(module)
    return named(module, source.function, takes, source.name, str(source.file))


def named(module: Any, function: str, takes: str, name: str, where: str) -> Callable[..., Any]:
    """The function of this name in a module; a Refusal where there is none."""
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        what = f"no function {function} in {where}, expected {function}({takes})"
        raise Refusal(what, where=name)
    return found


def load(source: Source, folder: str, dtype: str) -> Any:
    """What the function gives for the checkpoint's folder, to be computed in `dtype`."""
    function = function_of(source, "path, dtype")
    with blamed_on(source.name, f"{source.function}({folder!r}, {dtype!r})"):
        model = function(folder, dtype)
    return require(model, source.name)


def follow(job: Job) -> None:
    """Loads the job's model once and writes one trace per plan."""
    source = find(job.custom)
    environment, checkpoint = job.prepare(job.device)
    model = load(source, str(checkpoint.folder), job.dtype)
    facts = environment | {f"sha256 of {source.file.name}": sha256(source.file)} | says(model)
    meta = job.meta(checkpoint, facts, engine=source.name, version="")
    made: Callable[..., OwnRunner] = OwnRunner
    if job.taps and callable(getattr(model, "taps", None)):
        from mlxkv.engines.own_taps import OwnTapRunner
        from mlxkv.port.config.llama import LlamaConfig

        made = partial(OwnTapRunner, config=LlamaConfig.of(checkpoint))
    vocab, heads = checkpoint.vocab_size, heads_of(checkpoint.config)

    def begin(plan: Plan) -> tuple[OwnRunner, Meta]:
        return made(model, plan, name=source.name, vocab=vocab, heads=heads), meta

    runner.follow(job, f"{source.name} ({job.dtype}, {environment['device']})", begin)


if __name__ == "__main__":
    from mlxkv.engines.job import serve

    serve(follow)

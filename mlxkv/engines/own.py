"""A person's own MLX model follows plans and writes traces. `python -m mlxkv.engines.custom JOB.json` is a process of its own.

`FILE.py:load` names a function `load(path, dtype)`: the checkpoint's folder and, say, "float32". What it returns follows
mlx-lm's convention: `model(tokens, cache=cache)` takes an mx.array (B, L) and gives logits (B, L, V), `make_cache()` gives
a list with one cache per layer. The file is executed because it was named; what goes wrong in it is told in one line.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mlxkv.engines import runner
from mlxkv.engines.job import Job
from mlxkv.engines.runner import Array, PlanRunner, host
from oracle.formats.disk import sha256
from oracle.formats.errors import Inexpressible, Refusal
from oracle.formats.plan import Plan

CONVENTION = "expected mlx-lm's convention: model(tokens, cache=cache) -> logits (B, L, V), and make_cache() -> one cache per layer"


class TooShort(ValueError):
    """A crop to more tokens than the cache holds; the step ends alone."""


@dataclass(frozen=True, slots=True)
class Source:
    """A function in a file."""

    file: Path
    function: str

    @property
    def name(self) -> str:
        """The engine's name in reports."""
        return f"{self.file.name}:{self.function}"


def find(engine: str) -> Source:
    """What FILE.py:load names; refused where there is no such file, before anything of it is executed."""
    path, _, function = engine.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        raise Refusal(
            f"--engine: {engine!r}, expected port or mlx-lm, or FILE.py:FUNCTION for a model of your own"
        )
    if not Path(path).is_file():
        raise Refusal(
            f"--engine: {path}: no such file, expected the Python file that holds {function}; check the path"
        )
    return Source(Path(path).absolute(), function)


class Runner(PlanRunner):
    """Follows one plan on a model of mlx-lm's convention, named `name` where it goes wrong; `vocab` is V.

    Positions are counted here: a cache that counts wrongly is to be judged, not believed.
    """

    failures = (Inexpressible, TooShort)

    def __init__(self, model: Any, plan: Plan, *, name: str, vocab: int) -> None:
        super().__init__(plan)
        self.model = model
        self.name = name
        self.vocab = vocab
        self.caches: dict[str, list[Any] | None] = {}
        self.fed: dict[str, int] = {}

    def new(self, name: str, use_kv_cache: bool) -> None:
        """The model's own cache, or None where every call is to have a fresh one."""
        self.caches[name], self.fed[name] = self._made() if use_kv_cache else None, 0

    def clone(self, source: str, target: str) -> None:
        """The convention has no clone; its users copy."""
        with told(self.name, "copy of a cache"):
            self.caches[target] = copy.deepcopy(self.caches[source])
        self.fed[target] = self.fed[source]

    def crop(self, name: str, length: int) -> None:
        """Every layer's `trim` of what is too much, as mlx-lm's users do."""
        cache, held = self.caches[name], self.fed[name]
        if length > held:
            raise TooShort(f"crop: length is {length}, expected at most the {held} tokens cached")
        if cache is None:
            return
        if not all(hasattr(layer, "trim") for layer in cache):
            raise Inexpressible("a layer's cache has no trim()")
        with told(self.name, "trim()"):
            trimmed = {layer.trim(held - length) for layer in cache}
        if trimmed != {held - length}:
            raise Inexpressible(
                f"trim() trimmed {sorted(map(str, trimmed))} of {held - length} tokens"
            )
        self.fed[name] = length

    def reset(self, name: str) -> None:
        """The convention has no reset; its users take a new cache."""
        self.new(name, self.caches[name] is not None)

    def held(self, name: str) -> int:
        """The tokens fed into this cache."""
        return self.fed[name]

    def forward(self, name: str, tokens: tuple[int, ...], index_pos: int | None) -> Array:
        """(L, V), or (1, V)."""
        import mlx.core as mx

        held, cache = self.fed[name], self.caches[name]
        if index_pos not in (None, held):
            raise Inexpressible(
                f"index_pos {index_pos} with {held} tokens cached, as the cache has the position"
            )
        given = self._made() if cache is None else cache
        with told(self.name, "model(tokens, cache=cache)"):
            logits = self.model(mx.array([tokens]), cache=given)
            if isinstance(logits, mx.array):
                mx.eval(logits)  # what fails late must fail here, where it is known whose it is
        self._check(logits, [1, len(tokens), self.vocab])
        self.fed[name] = 0 if cache is None else held + len(tokens)
        rows = logits[0]
        return host(rows if self.plan.rows == "all" else rows[-1:])

    def nothing(self) -> Array:
        """(0, V)"""
        return np.zeros((0, self.vocab), np.float32)

    def kept(self) -> Iterator[tuple[str, int, Any, Any]]:
        """Of caches whose every layer shows its rows as mlx-lm's do, `state` (keys, values) up to `offset`; of others nothing."""
        for name, cache in self.caches.items():
            with told(self.name, "a cache's state"):
                rows = [_rows(layer) for layer in cache or []]
            for i, pair in enumerate(rows):
                if pair is not None and None not in rows:
                    yield name, i, *pair

    def _made(self) -> list[Any]:
        with told(self.name, "make_cache()"):
            cache = self.model.make_cache()
        if not isinstance(cache, list | tuple):
            raise Refusal(
                f"{self.name}: make_cache() gave a {type(cache).__name__}, expected a list with one cache per layer"
            )
        return list(cache)

    def _check(self, logits: Any, expected: list[int]) -> None:
        import mlx.core as mx

        if not isinstance(logits, mx.array):
            raise Refusal(
                f"{self.name}: model(tokens, cache=cache) gave a {type(logits).__name__}, expected an mx.array {expected}"
            )
        if list(logits.shape) != expected or not mx.issubdtype(logits.dtype, mx.floating):
            found = f"{list(logits.shape)} {str(logits.dtype).removeprefix('mlx.core.')}"
            raise Refusal(
                f"{self.name}: model(tokens, cache=cache) gave {found}, expected {expected} of floats: batch, tokens, vocabulary"
            )


def _rows(layer: Any) -> tuple[Any, Any] | None:
    """keys and values, each (K, S, D), of one layer's cache."""
    import mlx.core as mx

    state, offset = getattr(layer, "state", None), getattr(layer, "offset", None)
    if not isinstance(offset, int) or not isinstance(state, tuple | list) or len(state) < 2:
        return None
    keys, values = state[:2]
    if not all(
        isinstance(array, mx.array) and array.ndim == 4 and len(array) == 1
        for array in (keys, values)
    ):
        return None
    return keys[0, :, :offset], values[0, :, :offset]


@contextmanager
def told(name: str, what: str) -> Iterator[None]:
    """Turns what a person's code raises into one line that says what was asked of it, what came, and where."""
    try:
        yield
    except (Exception, SystemExit) as error:
        said = " ".join(traceback.format_exception_only(error)[-1].split())[:300]
        raise Refusal(
            f"{name}: {what} failed with {said}{_place(error, name.partition(':')[0])}; run it by itself to see more"
        ) from error


def _place(error: BaseException, file: str) -> str:
    """The innermost line of the person's own file, else of any but ours."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(_behind(error.__traceback__))
        if not frame.filename.startswith("<")
    ]
    own = [frame for frame in frames if Path(frame.filename).name == file]
    shown = (own or frames)[-1:]
    return (
        f" ({Path(shown[0].filename).name}:{shown[0].lineno} in {shown[0].name})" if shown else ""
    )


def _behind(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is not of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def require(model: Any, name: str) -> Any:
    """The model, if it can be called and makes caches."""
    if not callable(model) or not callable(getattr(model, "make_cache", None)):
        lacks = "make_cache()" if callable(model) else "model(tokens, cache=cache)"
        raise Refusal(f"{name}: a {type(model).__name__} without {lacks}, {CONVENTION}")
    return model


def load(source: Source, folder: str, dtype: str) -> Any:
    """What the function gives for the folder, its file executed as a module that can import its neighbours."""
    spec = importlib.util.spec_from_file_location(source.file.stem, source.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Ours are loaded already; a neighbour of the same name must not replace one.
    sys.modules.setdefault(spec.name, module)
    sys.path.insert(0, str(source.file.parent))
    with told(source.name, "import"):
        spec.loader.exec_module(module)
    if not callable(getattr(module, source.function, None)):
        raise Refusal(
            f"{source.name}: no function {source.function} in {source.file}, expected {source.function}(path, dtype)"
        )
    with told(source.name, f"{source.function}({folder!r}, {dtype!r})"):
        model = getattr(module, source.function)(folder, dtype)
    return require(model, source.name)


def follow(job: Job) -> None:
    """Loads the job's model once and writes one trace per plan."""
    from mlxkv.engines import machine as runtime

    source = find(job.custom)
    environment = runtime.prepare(job.device, threads=job.threads)
    from oracle.model.checkpoint import resolve

    checkpoint = resolve(job.folder, ignore_keys=job.ignore_keys)
    model = load(source, str(checkpoint.folder), job.dtype)
    said = environment | {f"sha256 of {source.file.name}": sha256(source.file)}
    meta = job.meta(checkpoint, said, engine=source.name, version="")
    label = f"{source.name} ({job.dtype}, {environment['device']})"
    runner.follow(
        job,
        label,
        lambda plan: (Runner(model, plan, name=source.name, vocab=checkpoint.vocab_size), meta),
    )


if __name__ == "__main__":
    from mlxkv.engines.job import serve

    serve(follow)

"""One decode step as a compiled function of arrays.

Building the graph of a step takes as long as computing it where the model is small, and it is the
same graph at every step. So the step is traced once, over whole buffers under a mask, and replayed:
what changes from step to step is an input, the position too. The layers are traced as they are;
`Rows` gives them arrays that are not known yet where a cache gives them known ones. It is traced
again when buffers grow, for another batch, and when anything about the model but its arrays is
another.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx
import mlx.core as mx
from mlx import nn

from mlxkv.port.joint import hollow
from mlxkv.port.watched import KINDS, Noted, latest, unchanged, watch

if TYPE_CHECKING:
    from mlxkv.port.cache import Buffers, Cache
    from mlxkv.port.llama import Llama

SHAPES = 8
"""Shapes of buffers beyond which what was traced is dropped, and traced again as it is needed. A
trace of 30 layers was seen to take 4 MB."""

Function = Callable[..., tuple[mx.array, list["Buffers"]]]


class Rows:
    """What the layers ask of a cache, of rows that a traced step reads and writes.

    `at` (1,) is the position of the new token, `held` (1,) the number of rows held before it, which
    only candle lets differ. Attention reads the whole buffers; `hidden` (1, capacity) is true where
    no row is.
    """

    def __init__(
        self,
        at: mx.array,
        held: mx.array,
        tables: tuple[mx.array, mx.array],
        buffers: list[Buffers],
        *,
        guarded: bool,
    ) -> None:
        self.turn = tuple(mx.take(table, at, axis=0) for table in tables)
        self.hidden = (mx.arange(buffers[0][0].shape[2]) > held)[None]
        self.held, self.buffers, self.guarded = held, buffers, guarded

    def rotation(self, start: Any, length: int) -> Any:
        """cos and sin of the new token, (1, D / 2) each."""
        return self.turn

    def extend(self, layer: int, keys: mx.array, values: mx.array) -> Buffers:
        """Writes one row [B, K, 1, D] each; the whole buffers, [B, K, capacity, D]."""
        pair = zip(self.buffers[layer], (keys, values), strict=True)
        old, new = (mx.slice_update(b, row, self.held, axes=[2]) for b, row in pair)
        self.buffers[layer] = old, new
        return old, new

    def mask(self, length: int, start: Any) -> mx.array:
        return self.hidden


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """A compiled function, what its traces take for given, and the shapes they were made for."""

    fixed: list[Any]
    function: Function
    shapes: list[tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A model's modules that have arrays and its function, for as long as `state` is the same."""

    state: tuple[object, ...]
    leaves: list[nn.Module]
    made: _Made


class Step(threading.local):
    """The compiled steps of one model, in each thread its own.

    MLX keeps what it traced by thread and by the function's address, and on the function's end
    forgets it in the last thread alone that called it: another would replay it for whatever comes
    to that address.
    """

    def __init__(self) -> None:
        self._made: dict[bool, _Made] = {}
        self._found: _Found | None = None

    def __deepcopy__(self, memo: Any) -> Step:
        return Step()

    def __call__(self, model: Llama, ids: mx.array, cache: Cache, start: int) -> mx.array | None:
        """Logits (B, V) of one new token (B, 1) each, or None where this step is not compiled."""
        known = type(model) in KINDS and type(cache) in KINDS and unchanged()
        found = self._as_before(model, cache.guarded) if known else None
        buffers = None if found is None else cache.room()
        if found is None or buffers is None:
            return None
        made = found.made
        at, held, traces = mx.array([start]), mx.array([len(cache)]), len(made.shapes)
        arrays = [array for leaf in found.leaves for array in leaf.values()]
        try:
            tables = cache.cos, cache.sin
            logits, buffers = made.function(ids, at, held, tables, buffers, arrays)
        finally:
            if len(made.shapes) > traces and _probe():
                _fusing(True)
        cache.wrote(buffers)
        return logits

    def _as_before(self, model: Llama, guarded: bool) -> _Found | None:
        """What was found for the step before, or, where anything has changed since, is found now.

        None where a module is of a class that is not known.
        """
        state = (latest(), guarded, *map(id, model["layers"]))
        before = self._found
        if before is not None and before.state == state and len(before.made.shapes) <= SHAPES:
            return before
        leaves = _leaves(model)
        if leaves is None:
            return None
        found = _Found(state, leaves, self._of(model, leaves, guarded))
        # Of others nobody tells when they change.
        self._found = found if all(isinstance(leaf, Noted) for leaf in leaves) else None
        return found

    def _of(self, model: Llama, leaves: list[nn.Module], guarded: bool) -> _Made:
        """The function for the model as it is now, but for its arrays."""
        found, fixed = self._made.get(guarded), _fixed(model, leaves)
        if found is None or found.fixed != fixed or len(found.shapes) > SHAPES:
            kept = [value.copy() if isinstance(value, dict) else value for value in fixed]
            shapes: list[tuple[int, ...]] = []
            function = mx.compile(_traced(model, leaves, shapes, guarded=guarded))
            found = self._made[guarded] = _Made(kept, function, shapes)
        return found


def _traced(
    model: Llama, leaves: Sequence[nn.Module], shapes: list[tuple[int, ...]], *, guarded: bool
) -> Function:
    """The step of a model; it keeps the model's form, and none of its arrays.

    At each trace it notes the shape [B, K, capacity, D] in `shapes`.
    """
    shells = [hollow(leaf) for leaf in leaves]
    names = [[*leaf] for leaf in leaves]
    form = _copied(model, {id(leaf): shell for leaf, shell in zip(leaves, shells, strict=True)})
    del form._step

    def step(
        ids: mx.array,
        at: mx.array,
        held: mx.array,
        tables: tuple[mx.array, mx.array],
        buffers: list[Buffers],
        arrays: list[mx.array],
    ) -> tuple[mx.array, list[Buffers]]:
        given, new = iter(arrays), {}
        for shell, keys in zip(shells, names, strict=True):
            new[id(shell)] = hollow(shell)
            for key in keys:
                new[id(shell)][key] = next(given)
        rows = Rows(at, held, tables, [*buffers], guarded=guarded)
        logits = _copied(form, new).forward(ids, rows, at, -1, None)
        shapes.append(buffers[0][0].shape)
        if _probe():
            _fusing(False)
        return logits, rows.buffers

    return step


def _leaves(model: Llama) -> list[nn.Module] | None:
    """The modules whose arrays a step takes; None where one is of a class that is not known."""
    found = [model["embed_tokens"], model["norm"]]
    if "lm_head" in model:
        found.append(model["lm_head"])
    for block in model["layers"]:
        if type(block) not in KINDS:
            return None
        attention, mlp = block["self_attn"], block["mlp"]
        if type(attention) not in KINDS or type(mlp) not in KINDS:
            return None
        found += (block["input_layernorm"], block["post_attention_layernorm"])
        found += (attention["o_proj"], mlp["down_proj"])
        for part in (attention, mlp):
            joint = part.joined()
            found += part.projections() if joint is None else (joint.whole,)
    return found if KINDS.issuperset({*map(type, found)}) else None


def _fixed(model: Llama, leaves: list[nn.Module]) -> list[Any]:
    """What a trace of the model takes for given."""
    found: list[Any] = [model.config.tie_word_embeddings]
    for block in model["layers"]:
        a = block["self_attn"]
        found += (type(a), a.layer, a.n_heads, a.n_kv_heads, a.head_dim, a.scale)
    for leaf in leaves:
        found += (type(leaf), vars(leaf), [*leaf])
    return found


def _copied(module: Any, new: dict[int, Any]) -> Any:
    """A module with those of its parts exchanged that `new` has, by id."""
    if id(module) in new:
        return new[id(module)]
    made = hollow(module)
    for name, value in module.items():
        if isinstance(value, list):
            dict.__setitem__(made, name, [_copied(one, new) for one in value])
        elif isinstance(value, nn.Module):
            dict.__setitem__(made, name, _copied(value, new))
    joint = vars(made).get("joint")
    if joint is not None:
        made.joint = joint.through(new[id(joint.whole)])
    return made


def serves(dtype: mx.Dtype, *, whole: bool) -> bool:
    """Whether decoding is compiled here.

    Not in float64, whose sums stay in one order, and not on one of several ranks, which speak with
    one another inside a layer; `whole` is a model that is not shared. On a CPU MLX compiles only
    beside a C++ compiler, though this module leaves nothing for that to do.
    """
    return whole and dtype != mx.float64 and compiles()


def words(dtype: mx.Dtype, *, whole: bool, tapped: bool) -> str:
    """How decoding goes, for a report."""
    if not tapped and serves(dtype, whole=whole):
        return "compiled"
    bare = whole and not tapped and dtype != mx.float64
    return "not compiled (no C++ compiler)" if bare else "not compiled"


def compiles() -> bool:
    """Whether MLX compiles on the device in use."""
    return _compiles(str(mx.default_device()))


@cache
def _compiles(device: str) -> bool:
    return _probe()


def _probe() -> bool:
    """Whether MLX compiles now: somebody may have told it not to."""
    traces = []

    def probe(x: mx.array) -> mx.array:
        traces.append(x.shape)
        return x + 1

    function, x = mx.compile(probe), mx.zeros((1,))
    function(x)
    function(x)
    return len(traces) == 1


def _fusing(on: bool) -> None:
    """Whether MLX makes one kernel of several elementwise operations in what it compiles next.

    On a GPU that is what pays. On a CPU it has a C++ compiler make a library for each kernel (a
    second each, once a machine, and two processes that do so at once can read each other's
    unfinished file), and no step is faster for it: 30 layers of width 64 decoded 1.97 times as
    fast as mlx-lm with it and 2.00 times without.
    """
    mode = _mode() if mx.default_device() == mx.Device(mx.cpu) else None
    if mode is not None:
        mode(3 if on else 2)


@cache
def _mode() -> Any:
    """MLX's `set_compile_mode`, which it has in C++ alone; None where it cannot be found."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    for folder in mlx.__path__:
        for path in Path(folder).glob(f"lib/libmlx.{suffix}"):
            library = ctypes.CDLL(str(path))
            return getattr(library, "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE", None)
    return None


watch(sys.modules[__name__], Rows)

"""The graph of arrays that are not computed yet, node by node, and what a GPU runs of it.

A CPU's graph holds what MLX makes of `mx.fast` there, dozens of small primitives in place of one
kernel. `as_on_a_gpu` puts one primitive in the place of each while a graph is built. All else, a
function under `mx.compile` too, gives the same graph on every device: what it fuses is one node.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxkv.commands.bench.kernels import Node


@dataclass(frozen=True, slots=True)
class Counted:
    """A graph's primitives, the kernels that a GPU runs for them, and the primitives by name."""

    primitives: int
    kernels: int
    kinds: Mapping[str, int]


_NODE = re.compile(r'\{ (\d+) \[label ="(.*)", shape=rectangle\]; \}')
_INPUT = re.compile(r'"(.*)" -> \d+')


def nodes(*outputs: mx.array) -> list[Node]:
    """What `mx.export_to_dot` shows behind arrays, up to those that are computed.

    A function that is compiled once and called by every layer has the same primitives in each
    call, so nodes are told apart by where they stand in the text and not by their numbers.
    """
    text = io.StringIO()
    mx.export_to_dot(text, *outputs, **{_mark(name): mark for name, mark in _MARKS.items()})
    found: list[tuple[str, list[str]]] = []
    for line in text.getvalue().splitlines():
        if node := _NODE.fullmatch(line):
            found.append((node[2], []))
        elif given := _INPUT.fullmatch(line):
            found[-1][1].append(given[1])
    return [_node(name, inputs) for name, inputs in found]


def count(*outputs: mx.array) -> Counted:
    """Of the graph behind arrays that are not computed yet."""
    found = nodes(*outputs)
    kinds = Counter(node.name for node in found)
    return Counted(len(found), sum(node.kernels for node in found), dict(kinds.most_common()))


# Beside what it takes, a stand-in depends on an array that names it.
_MARKS: dict[str, mx.array] = {}


def _mark(name: str) -> str:
    return f"mark of {name}"


def _node(name: str, inputs: list[str]) -> Node:
    for kind in _MARKS if name == "Depends" else ():
        if _mark(kind) in inputs:
            return Node(kind, len(inputs) - 1)
    return Node(name, len(inputs))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Within, a call of `mx.fast` makes one primitive, of the shape and dtype of its first array,
    and whoever asks for the default device is told that it is a GPU.

    What it computes is wrong. `mx.depends` is one primitive, takes any number of arrays, and is
    nothing that `mx.compile` would fuse with its neighbours. Functions that were compiled before
    keep what they were compiled to, so models must be loaded within.
    """
    marks = {kind: _MARKS.setdefault(kind, _marked(kind)) for kind, _ in _STAND_INS.values()}
    new = {name: stand_in(marks[kind]) for name, (kind, stand_in) in _STAND_INS.items()}
    gpu = mx.Device(mx.gpu)
    with _replaced(mx.fast, new), _replaced(mx, default_device=lambda: gpu, stream=_stream):
        yield


@contextmanager
def _replaced(module: Any, new: Mapping[str, Any] | None = None, **more: Any) -> Iterator[None]:
    """A module with other functions by these names."""
    put = {**(new or {}), **more}
    before = {name: getattr(module, name) for name in put}
    for name, function in put.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


_real_stream = mx.stream


def _stream(where: Any) -> AbstractContextManager[Any]:
    """`mx.stream`, which leaves the streams alone where it is given the GPU that is not there."""
    absent = isinstance(where, mx.Device) and where.type == mx.DeviceType.gpu
    return nullcontext() if absent else _real_stream(where)


def _marked(kind: str) -> mx.array:
    """An array that stands for a kind. Equal scalars would be made one by `mx.compile`."""
    mark = mx.array([ord(letter) for letter in kind])
    mx.eval(mark)
    return mark


StandIn = Callable[..., mx.array]
_depends = mx.depends


def _norm(mark: mx.array) -> StandIn:
    def stand_in(x: mx.array, weight: mx.array | None, *others: Any, **_: Any) -> mx.array:
        found: mx.array = _depends(x, [mark] if weight is None else [weight, mark])
        return found

    return stand_in


def _rope(mark: mx.array) -> StandIn:
    def stand_in(
        a: mx.array,
        dims: int,
        *,
        freqs: mx.array | None = None,
        offset: int | mx.array = 0,
        **_: Any,
    ) -> mx.array:
        beside = [x for x in (freqs, offset) if isinstance(x, mx.array)]
        found: mx.array = _depends(a, [*beside, mark])
        return found

    return stand_in


def _attention(mark: mx.array) -> StandIn:
    def stand_in(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
        **_: Any,
    ) -> mx.array:
        beside = [x for x in (mask, sinks) if isinstance(x, mx.array)]
        found: mx.array = _depends(q, [k, v, *beside, mark])
        return found

    return stand_in


_STAND_INS: dict[str, tuple[str, Callable[[mx.array], StandIn]]] = {
    "rms_norm": ("RMSNorm", _norm),
    "layer_norm": ("LayerNorm", _norm),
    "rope": ("RoPE", _rope),
    "scaled_dot_product_attention": ("ScaledDotProductAttention", _attention),
}
"""By its name in `mx.fast`: the primitive that a GPU's graph has, and what stands for it here."""

"""A model of transformers' in float64, one decoder layer at a time, and as it was afterwards.

Widening is exact, so it does not matter when it happens: a layer's weights are widened when the
layer is reached and given back behind it; of the embedding only the rows of the tokens at hand are,
and the head is widened in blocks of its rows. What else a model has, such as its last norm, is
widened for the whole call. So float64 takes no more memory than the largest layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, ModuleList
from torch.nn.functional import linear

from oracle.truth.weights import HEAD_BLOCK, Rows, row_blocks


class Wide(Protocol):
    """Makes a tensor of a model, or only some of its rows, float64.

    `out` may be written into: what it held is no longer needed.
    """

    def __call__(
        self, tensor: Tensor, rows: Rows | None = None, out: Tensor | None = None
    ) -> Tensor: ...


@contextmanager
def widened(model: Any, tokens: Tensor, wide: Wide) -> Iterator[None]:
    """The model computes in float64 within the block, on these tokens only.

    Where no list of layers is found in its class, or one is never called, all is widened at once.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    layers = decoder_layers(model)
    room: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_when_reached(layer, wide, room))
        later = {id(part) for layer in layers for part in layer.modules()}
        if type(head) is Linear:
            later.add(id(head))
            stack.enter_context(_in_blocks(head, wide))
        if isinstance(embedding, Embedding):
            later.add(id(embedding))
            stack.enter_context(_rows_of(embedding, tokens, wide))
        rest = [(name, part) for name, part in model.named_modules() if id(part) not in later]
        stack.enter_context(_all_of(rest, wide, {}))
        yield


def decoder_layers(model: Any) -> list[Module]:
    """The modules of the first list that has as many as the config says; none without one."""
    n = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    lists = [part for part in model.modules() if isinstance(part, ModuleList) and len(part) == n]
    return list(lists[0]) if lists else []


@contextmanager
def _all_of(
    parts: Iterable[tuple[str, Module]], wide: Wide, room: dict[str, Tensor]
) -> Iterator[None]:
    """The parameters and buffers of these modules are float64; then the same objects as before.

    `room` keeps the float64 tensors by their names within the layer, for the next layer.
    """
    kept: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (name, held, dict(held)) for name, p in parts for held in (p._parameters, p._buffers)
    ]
    try:
        for part, held, before in kept:
            for name, tensor in before.items():
                if tensor is not None and tensor.is_floating_point():
                    old = room.get(key := f"{part}.{name}")
                    fits = old is not None and old.shape == tensor.shape
                    held[name] = room[key] = wide(tensor, out=old if fits else None)
        yield
    finally:
        for _, held, before in kept:
            held.clear()
            held.update(before)


@contextmanager
def _when_reached(layer: Module, wide: Wide, room: dict[str, Tensor]) -> Iterator[None]:
    """The layer is widened whenever it is called, for the length of the call."""
    with ExitStack() as call:

        def before(*_: Any) -> None:
            call.enter_context(_all_of(layer.named_modules(), wide, room))

        def after(*_: Any) -> None:
            call.close()

        handles = layer.register_forward_pre_hook(before), layer.register_forward_hook(after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def _rows_of(embedding: Embedding, tokens: Tensor, wide: Wide) -> Iterator[None]:
    """The table in float64 with the rows of these tokens; the others, never read, take no memory.

    numpy's zeros are pages that the system has not handed out yet. The module may multiply what it
    looks up in its weights' dtype, so it must find all of the table in float64.
    """
    weight, ids = embedding.weight, torch.unique(tokens)
    table = torch.from_numpy(np.zeros(tuple(weight.shape)))
    table[ids] = wide(weight, ids)
    held: dict[str, Any] = embedding._parameters
    held["weight"] = table
    try:
        yield
    finally:
        held["weight"] = weight


@contextmanager
def _in_blocks(head: Linear, wide: Wide) -> Iterator[None]:
    """The head multiplies with a block of its rows after another."""
    weight, bias = head.weight, head.bias

    def forward(x: Tensor) -> Tensor:
        parts, room = [], None
        for rows in row_blocks(len(weight), weight.shape[1], HEAD_BLOCK):
            block = wide(weight, rows, room)
            room = block if room is None else room
            parts.append(linear(x, block, None if bias is None else wide(bias, rows)))
        return torch.cat(parts, dim=-1)

    head.__dict__["forward"] = forward
    try:
        yield
    finally:
        del head.__dict__["forward"]

"""A Llama shared by several ranks, each a process with its own heads and part of the MLP's width.

As `mlx.nn.layers.distributed` has it: q, k, v, gate and up lose the rows of other ranks, o and down
their columns, and the products of these two are added up among the ranks. Embedding, norms and head
are whole on every rank, and so are the rows between layers and the logits. A rank's cache holds its
own KV heads. Axes as in `mlxkv.port.llama`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx import nn
from mlx.nn.layers.distributed import ShardedToAllLinear
from mlx.utils import tree_flatten, tree_unflatten

from mlxkv.port import ops
from mlxkv.port.joint import arrange
from mlxkv.port.packed import Packed, PackedLinear
from mlxkv.port.part import COLUMNS, SPLIT, Part, require_divides
from oracle.formats.errors import Refusal

if TYPE_CHECKING:
    from mlxkv.port.llama import Llama


class SummedPacked(PackedLinear):
    """A PackedLinear that has some columns of the weight: adds up the products of all ranks."""

    def __init__(self, group: mx.distributed.Group, *, bits: int, group_size: int) -> None:
        super().__init__(bits=bits, group_size=group_size)
        self.group = group

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in / ranks] -> [..., out], the same on every rank"""
        out = mx.distributed.all_sum(self.as_linear(x), group=self.group)
        return out + self.bias if "bias" in self else out


def shard(model: Llama, group: mx.distributed.Group) -> None:
    """Makes a whole model this rank's part of it; raises Refusal for one that cannot be split."""
    _require(model, group.size())
    install(model, group)
    assert model.part is not None
    for block in model.layers:
        block.self_attn.joint = block.mlp.joint = None  # of the whole, which is to go
    for name, array in tree_flatten(model.parameters()):
        with ops.stream(model.dtype):
            # A copy, so that the whole can go.
            made = mx.contiguous(array[model.part.place(name, array.shape)])
            mx.eval(made)
        model.update(tree_unflatten([(name, made)]))
    arrange(model)


def install(model: Llama, group: mx.distributed.Group) -> None:
    """Tells the model which heads are its own, and has it add up what the ranks compute.

    Its weights are as they were.
    """
    model.part = Part(group.rank(), group.size())
    for block in model.layers:
        block.self_attn.n_heads //= group.size()
        block.self_attn.n_kv_heads //= group.size()
        for module, name in zip((block.self_attn, block.mlp), COLUMNS, strict=True):
            setattr(module, name, _summed(getattr(module, name), group))


def _summed(module: nn.Module, group: mx.distributed.Group) -> nn.Module:
    made: nn.Module
    if isinstance(module, Packed):
        made = SummedPacked(group, bits=module.bits, group_size=module.group_size)
        if "bias" in module:
            made.bias = module.bias
    else:
        # Its own weights are random, never computed, and replaced.
        made = ShardedToAllLinear(group.size(), 1, bias="bias" in module, group=group)
    made.update(module.parameters())
    return made


def _require(model: Llama, ranks: int) -> None:
    if model.part is not None:
        raise Refusal(f"is {model.part} already, expected a whole model", where="shard")
    config = asdict(model.config)
    groups = {
        f"{path}.weight": (module.scales.shape[-1] * module.group_size, module.group_size)
        for path, module in model.named_modules()
        if isinstance(module, Packed)
    }
    sizes = {name: config[name] for name in SPLIT}
    require_divides(sizes, ranks, groups=groups, where="shard")

"""How a model's weights lie in memory: side by side where they share an input, in the order in
which they are read fastest.

One product for q, k and v, and one for gate and up, costs a third of the calls of five. The arrays
of the projections become views of the one that is multiplied with, so every weight is there once,
under its own name, with its own shape. Whoever puts another array in the place of a view is
followed: the projections of that input are multiplied with one by one from then on.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

from mlxkv.port.watched import Noted, watch

if TYPE_CHECKING:
    from mlxkv.port.llama import Llama


class Linear(Noted, nn.Linear):
    """One whose changes are noted."""


class Embedding(Noted, nn.Embedding):
    """One whose changes are noted."""


class Joint:
    """Several projections of one input: `whole` has all their rows, and they have views of it."""

    def __init__(self, whole: nn.Module, projections: Sequence[nn.Module]) -> None:
        self.whole = whole
        self._own: Sequence[nn.Module] | None = projections
        self._held = [(one, name, one[name]) for one in projections for name in one]
        sizes = [projection["weight"].shape[0] for projection in projections]
        self._ends = [*accumulate(sizes)][:-1]

    def serves(self, projections: Sequence[nn.Module]) -> bool:
        """Whether these are the projections, with the arrays that they had then."""
        if self._own is None:
            return True
        kind = vars(self.whole)
        for found, own in zip(projections, self._own, strict=True):
            if found is not own or vars(own) != kind:
                return False
        for own, name, array in self._held:  # noqa: SIM110 at every step, so in no generator
            if own[name] is not array:
                return False
        return True

    def __call__(self, x: mx.array) -> list[mx.array]:
        """[..., in] -> what each projection gives, [..., out]"""
        return [*mx.split(self.whole(x), self._ends, axis=-1)]

    def through(self, whole: nn.Module) -> Joint:
        """One that multiplies with another module and asks for no projections; it keeps none."""
        other = object.__new__(Joint)
        other.__dict__.update(self.__dict__, whole=whole, _own=None, _held=[])
        return other


def arrange(model: Llama) -> None:
    """Joins and turns the weights of a whole model, a layer at a time.

    Beside the model one layer's weights are there twice meanwhile. Weights of another dtype, shape
    or packing than their neighbours' stay apart. In float64 nothing is changed: there one layer is
    in memory at a time, and its sums are compared in the order that they always had.
    """
    if model.dtype == mx.float64:
        return
    turned = input_major(model.dtype)
    for block in model.layers:
        attention, mlp = block.self_attn, block.mlp
        attention.joint = _join([attention.q_proj, attention.k_proj, attention.v_proj], turned)
        mlp.joint = _join([mlp.gate_proj, mlp.up_proj], turned)
        for module in (attention.o_proj, mlp.down_proj) if turned else ():
            _turn(module)
    if turned:
        _turn(model.embed_tokens if model.config.tie_word_embeddings else model.lm_head)
    mx.clear_cache()


def input_major(dtype: mx.Dtype) -> bool:
    """Whether a product with one row reads a weight faster where its inputs lie side by side.

    Measured over 538 MB of float32: BLIS reads them so at 26 GB/s, and the head, 49,152 outputs
    long, otherwise at 15. OpenBLAS is slower so; half precision and packed weights go through
    MLX's own kernels.
    """
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    return dtype == mx.float32 and on_cpu and sys.platform == "linux" and _blis()


def _blis() -> bool:
    """Whether the BLAS that this process multiplies with is BLIS."""
    return hasattr(ctypes.CDLL(None), "bli_arch_query_id")


def _join(projections: Sequence[nn.Module], turned: bool) -> Joint | None:
    first = projections[0]
    if not all(_alike(first, other) for other in projections[1:]):
        return None
    whole = hollow(first)
    for name in [*first]:
        axis = int(turned and name == "weight" and type(first) is Linear)
        arrays = [projection[name].T if axis else projection[name] for projection in projections]
        ends = [*accumulate(array.shape[axis] for array in arrays)][:-1]
        array = mx.concatenate(arrays, axis=axis)
        made = [array, *mx.split(array, ends, axis=axis)]
        whole[name], *parts = (one.T for one in made) if axis else made
        for projection, part in zip(projections, parts, strict=True):
            projection[name] = part
        del arrays, made
        mx.eval(whole[name], parts)
    return Joint(whole, projections)


def _alike(one: nn.Module, other: nn.Module) -> bool:
    if type(one) is not type(other) or vars(one) != vars(other) or {*one} != {*other}:
        return False
    pairs = [(one[name], other[name]) for name in one]
    return all(a.dtype == b.dtype and a.shape[1:] == b.shape[1:] for a, b in pairs)


def _turn(module: nn.Module) -> None:
    if type(module) in (Linear, Embedding):
        module["weight"] = mx.contiguous(module["weight"].T).T
        mx.eval(module["weight"])


def hollow(module: nn.Module) -> Any:
    """A module like this one, without its arrays."""
    kind: Any = type(module)
    made = kind.__new__(kind)
    vars(made).update(vars(module))
    return made


watch(sys.modules[__name__], Joint, Noted, Linear, Embedding, nn.Linear, nn.Embedding)

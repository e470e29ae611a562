"""transformers' own code with other arithmetic than it asks torch for.

Both modes change what single torch functions compute and no line of transformers, so they work for
any of its classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_Function = Callable[..., Any]
_Mean = Callable[[Tensor], Tensor]
_ROWS = 256  # whose partial sums are held at once: 8 MB where a row has 8,192 numbers


class _Otherwise(TorchFunctionMode):
    """Each function of torch goes through `do`."""

    def __torch_function__(
        self,
        func: _Function,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.do(func, args, kwargs or {})

    def do(self, func: _Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError


class Float64(_Otherwise):
    """Every float32 that a model's code names is float64 in here.

    After `model.double()` alone transformers still computes RMSNorm, softmax and the angles of RoPE
    in float32, since its code asks for that by name.
    """

    def do(self, func: _Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        func = Tensor.double if func is Tensor.float else func
        return func(*map(_wide, args), **{k: _wide(v) for k, v in kwargs.items()})


class Sequential(_Otherwise):
    """Norms add up a row in float32 strictly one number after another, as MLX's CPU does.

    torch adds in several lanes, whose roundings are far smaller. The squares of bfloat16 values
    have few bits; in one long sum of them the roundings repeat and do not cancel. `widest` is the
    longest row so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.widest = 0

    def do(self, func: _Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        own = _SEQUENTIAL.get(func)
        given = args if own is None else (self._mean, *args)
        return (own or func)(*given, **kwargs)

    def _mean(self, x: Tensor) -> Tensor:
        self.widest = max(self.widest, x.shape[-1])
        return sequential_mean(x)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def sequential_mean(x: Tensor) -> Tensor:
    """(..., E) -> (..., 1) in float32: the numbers added up in order, times 1 / E, as MLX does."""
    E = x.shape[-1]
    rows = x.to(torch.float32).reshape(-1, E).numpy()
    sums = np.empty((len(rows), 1), np.float32)
    for start in range(0, len(rows), _ROWS):
        part = slice(start, start + _ROWS)
        # torch.cumsum adds in another order.
        sums[part] = np.add.accumulate(rows[part], axis=-1)[:, -1:]
    return torch.from_numpy(sums * np.float32(1 / E)).reshape(*x.shape[:-1], 1)


def _mean(mean: _Mean, x: Tensor, dim: Any = None, keepdim: bool = False, **given: Any) -> Tensor:
    of_rows = dim in (-1, (-1,), [-1]) and keepdim and not given
    if of_rows and x.dtype == torch.float32:
        return mean(x)
    return torch.mean(x, dim, keepdim, **given) if dim is not None else torch.mean(x, **given)


def _rms_norm(
    mean: _Mean,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if len(shape) > 1 or x.dtype == torch.float64:
        return functional.rms_norm(x, list(shape), weight, eps)
    wide = x.float()
    least = torch.finfo(x.dtype).eps if eps is None else eps
    normed = (wide * torch.rsqrt(mean(wide * wide) + least)).to(x.dtype)
    return normed if weight is None else normed * weight


def _layer_norm(
    mean: _Mean,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if len(shape) > 1 or x.dtype == torch.float64:
        return functional.layer_norm(x, list(shape), weight, bias, eps)
    wide = x.float()
    wide = wide - mean(wide)
    normed = (wide * torch.rsqrt(mean(wide * wide) + eps)).to(x.dtype)
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


_SEQUENTIAL: dict[Any, _Function] = {
    Tensor.mean: _mean,
    torch.mean: _mean,
    functional.rms_norm: _rms_norm,
    functional.layer_norm: _layer_norm,
}

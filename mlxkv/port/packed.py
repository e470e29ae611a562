"""MLX's packed weights in the port: modules that multiply with them as they are.

`mx.quantized_matmul` has no float64, so float64 runs use unpacked weights and cover everything but
that product. Axes as in `mlxkv.port.llama`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from mlxkv.port.llama import Llama
from mlxkv.port.watched import Noted, watch

if TYPE_CHECKING:
    from oracle.model.checkpoint import Checkpoint


class Packed(Noted):
    """A weight (out, in) that is q * scale + bias of its group; `weight` holds the words of q."""

    def __init__(self, *, bits: int, group_size: int) -> None:
        super().__init__()
        self.bits, self.group_size = bits, group_size
        self.weight = mx.zeros((0,), mx.uint32)
        self.scales, self.biases = mx.zeros((0,)), mx.zeros((0,))

    def as_linear(self, x: mx.array) -> mx.array:
        """x [..., in] times the weight's transpose -> [..., out]; an embedding's tied head."""
        return product(
            x, self.weight, self.scales, self.biases, bits=self.bits, group_size=self.group_size
        )


class PackedLinear(Packed):
    """x @ weight.T + bias, where `install` gives it one."""

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] -> [..., out]"""
        out = self.as_linear(x)
        return out + self.bias if "bias" in self else out


class PackedEmbedding(Packed):
    """Rows of a packed weight (V, E), unpacked when they are looked up."""

    def __call__(self, ids: mx.array) -> mx.array:
        """[B, L] -> [B, L, E]"""
        rows = self.weight[ids], self.scales[ids], self.biases[ids]
        return mx.dequantize(*rows, group_size=self.group_size, bits=self.bits)


def product(
    x: mx.array, words: mx.array, scales: mx.array, biases: mx.array, *, bits: int, group_size: int
) -> mx.array:
    """x [..., in] times the transpose of a packed weight (out, in) -> [..., out] in x's dtype."""
    # MLX's CPU kernel adds up in x's own dtype: in bfloat16 576 products are off by 2.7e-2 and 1536
    # by 4.4e-2; rounded once, by 1.7e-3.
    wide = mx.float32 if mx.default_device() == mx.Device(mx.cpu) else x.dtype
    scales, biases = scales.astype(wide), biases.astype(wide)
    return mx.quantized_matmul(
        x.astype(wide), words, scales, biases, group_size=group_size, bits=bits
    ).astype(x.dtype)


def install(model: Llama, checkpoint: Checkpoint) -> None:
    """Puts packed modules, still without their weights, where the checkpoint packs a weight."""
    found: list[tuple[str, nn.Module]] = []
    for name, packed in checkpoint.packed.items():
        path = name.removesuffix(".weight")
        if path == "lm_head" and model.config.tie_word_embeddings:
            continue  # stored once more: the embedding is the head
        kind = PackedEmbedding if path == "model.embed_tokens" else PackedLinear
        module = kind(bits=packed.bits, group_size=packed.group_size)
        if f"{path}.bias" in checkpoint.tensors:
            module.bias = mx.zeros((0,))
        found.append((path.removeprefix("model."), module))
    model.update_modules(tree_unflatten(found))


def unpacked(
    words: mx.array, scales: mx.array, biases: mx.array, *, bits: int, group_size: int
) -> mx.array:
    """The float64 weight (out, in) of packed parts, on the CPU.

    `words` are uint32 (out, in * bits / 32), scales and biases float64 (out, in / group_size). MLX
    reads the whole numbers, in float32, which holds them all; the affine part is computed here.
    """
    ones, zeros = mx.ones(scales.shape, mx.float32), mx.zeros(scales.shape, mx.float32)
    numbers = mx.dequantize(words, ones, zeros, group_size=group_size, bits=bits).astype(mx.float64)
    grouped = numbers.reshape(*scales.shape, group_size)
    return (grouped * scales[..., None] + biases[..., None]).reshape(numbers.shape)


watch(sys.modules[__name__], Packed, PackedLinear, PackedEmbedding)

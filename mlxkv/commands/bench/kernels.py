"""How many kernels a GPU runs for a primitive, as MLX's sources have it."""

from __future__ import annotations

from dataclasses import dataclass

VIEWS = frozenset(
    (
        "AsStrided",
        "Broadcast",
        "BroadcastAxes",
        "Copy",
        "CustomTransforms",
        "Depends",
        "ExpandDims",
        "Flatten",
        "NumberOfElements",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "StopGradient",
        "Transpose",
        "Unflatten",
        "View",
    )
)
"""Primitives that run no kernel: their `eval_gpu` (MLX 0.32, mlx/backend/gpu/primitives.cpp) shares
the input's buffer under other strides. Reshape, Flatten, Unflatten and View copy what no strides
can express; a decode step has no such array, as its tokens' axis is 1."""

SEVERAL = {"DynamicSlice": 2, "DynamicSliceUpdate": 2, "Pad": 2}
"""Primitives of more than one kernel (there, and gpu/slicing.cpp): the first two compute an offset,
then copy; Pad fills, then copies. Both updates write in place, as into a buffer that nobody else
holds. Concatenate (metal/slicing.cpp) is a copy for each of its inputs."""


@dataclass(frozen=True, slots=True)
class Node:
    """A primitive, by MLX's name of it, and how many arrays it takes."""

    name: str
    inputs: int

    @property
    def kernels(self) -> int:
        if self.name in VIEWS:
            return 0
        return self.inputs if self.name == "Concatenate" else SEVERAL.get(self.name, 1)

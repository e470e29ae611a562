"""What a person's own model hands out of the inside of its layers: its method `taps()`.

After each call `model.taps()` gives a mapping of arrays by (layer, name), the layers by number and
the names those of `oracle.formats.trace.TAPS`, or (0, "embedding"). q, q_rope, k, k_rope and v are
(1, heads, L, D), scores (1, H, L, S) with -inf or -1e9 where a key is hidden, all others
(1, L, width): the L tokens of that call. Those that are handed out are looked at, none must be.
Axes as in `mlxkv.port.llama`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxkv.engines.own import OwnRunner
from mlxkv.engines.recorder import Recorder
from mlxkv.engines.runner import Array, Batch, blamed_on
from mlxkv.port.config.llama import LlamaConfig
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan
from oracle.formats.trace import TAPS

CALL = "taps()"
HIDDEN = -1e8
"""A score below this is one that an additive mask hides: -1e9 and the least float32 are usual."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of a Llama's taps in a call of L tokens, with S in the cache after it."""

    config: LlamaConfig

    def of(self, name: str, L: int, S: int) -> list[int]:
        c = self.config
        if name == "scores":
            return [1, c.num_attention_heads, L, S]
        if name in ("q", "q_rope"):
            return [1, c.num_attention_heads, L, c.head_dim]
        if name in ("k", "k_rope", "v"):
            return [1, c.num_key_value_heads, L, c.head_dim]
        wide = {"attention": c.num_attention_heads * c.head_dim}
        wide |= dict.fromkeys(("gate", "up", "activation"), c.intermediate_size)
        return [1, L, wide.get(name, c.hidden_size)]


class OwnTapRunner(OwnRunner):
    """An OwnRunner that keeps what the model hands out after each call."""

    def __init__(self, model: Any, plan: Plan, *, config: LlamaConfig, **of_model: Any) -> None:
        super().__init__(model, plan, **of_model)
        self.recorder, self.shapes = Recorder(plan.longest), Shapes(config)

    def forward(
        self, name: str, rows: Batch, index_pos: int | None, places: Sequence[int]
    ) -> Array:
        """(1, len(places), V): a plan that is looked into has no batch."""
        held, width = self.held(name), len(rows[0])
        self.recorder.begin(held)
        logits = super().forward(name, rows, index_pos, places)
        with blamed_on(self.name, CALL):
            found = self.model.taps()
        if not isinstance(found, Mapping):
            what = f"{CALL} gave a {type(found).__name__}, expected a mapping of arrays"
            raise Refusal(what, where=self.name, remedy="see FILE.py in README.md")
        for key, array in _in_order(found, self.name):
            self._keep(*key, array, L=width, S=held + width)
        return logits

    def beside(self) -> dict[str, Array]:
        """The taps."""
        return self.recorder.arrays

    def _keep(self, layer: int, tap: str, array: Any, *, L: int, S: int) -> None:
        layers = self.shapes.config.num_hidden_layers
        if tap not in (*TAPS, "embedding") or not 0 <= layer < layers:
            known = f"one of {', '.join(TAPS)}, of layers 0 to {layers - 1}"
            self._refuse(layer, tap, "is no place in a Llama", known)
        expected = self.shapes.of(tap, L, S)
        if not isinstance(array, mx.array) or not mx.issubdtype(array.dtype, mx.floating):
            given = array.dtype if isinstance(array, mx.array) else type(array).__name__
            self._refuse(layer, tap, f"is {given}", f"an mx.array of floats {expected}")
        if list(array.shape) != expected:
            self._refuse(layer, tap, f"has shape {list(array.shape)}", str(expected))
        if tap == "scores":
            array = mx.where(array < HIDDEN, -mx.inf, array.astype(mx.float32))[:, :, None]
            self.recorder.begin(self.recorder.first)  # all queries of the call come at once
        with blamed_on(self.name, f"the tap {tap} of layer {layer}"):
            self.recorder(layer, tap, array)

    def _refuse(self, layer: int, tap: str, what: str, expected: str) -> None:
        raise Refusal(f"{CALL}: ({layer}, {tap!r}) {what}, expected {expected}", where=self.name)


def _in_order(found: Mapping[Any, Any], name: str) -> list[tuple[tuple[int, str], Any]]:
    """By layer and in the order of computation, as the recorder wants them."""
    odd = [key for key in found if not _is_place(key)]
    if odd:
        what = f"{CALL}: key {odd[0]!r:.60}, expected (layer, name), such as (0, 'q_rope')"
        raise Refusal(what, where=name)
    order = {tap: i for i, tap in enumerate(TAPS)}
    return sorted(found.items(), key=lambda item: (item[0][0], order.get(item[0][1], -1)))


def _is_place(key: Any) -> bool:
    if not isinstance(key, tuple) or len(key) != 2:
        return False
    return isinstance(key[0], int) and isinstance(key[1], str)

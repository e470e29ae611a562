"""The port with a fault in one layer, as an engine of one's own: `--engine FILE.py:load`.

`text` gives the file. What it loads follows mlx-lm's convention, so that `mlxkv locate` takes it
for somebody else's model and knows nothing of the fault. Axes as in `mlxkv.port.llama`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxkv.commands.scale.result import Place

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxkv.port.cache import Cache
    from mlxkv.port.llama import Llama


@dataclass(frozen=True, slots=True)
class Scaled:
    """In one layer the rows of v_proj that make one KV head's values are `by` times too large."""

    layer: int
    head: int
    by: float

    @property
    def words(self) -> str:
        return f"in layer {self.layer} v_proj times {self.by:g} for head {self.head}"

    @property
    def place(self) -> Place:
        return Place(self.layer, "v", head=self.head)

    def load(self, path: str, dtype: str) -> Any:
        model = _port(path, dtype)
        _scale(model, self.layer, self.head, self.by)
        return Opened(model)


@dataclass(frozen=True, slots=True)
class Slipped:
    """In one layer one position is turned by the angles of the position before it.

    Nothing inside the layers is handed out: at 32,768 tokens that would be gigabytes.
    """

    layer: int
    position: int

    @property
    def words(self) -> str:
        return f"in layer {self.layer} RoPE turns position {self.position} as the one before it"

    @property
    def place(self) -> Place:
        return Place(self.layer, "keys", position=self.position)

    def load(self, path: str, dtype: str) -> Any:
        model = _port(path, dtype)
        layers: list[Any] = model.layers
        layers[self.layer] = _Slipped(layers[self.layer], self.position)
        return Faulty(model)


Planted = Scaled | Slipped


def text(fault: Planted) -> str:
    """The file that the engine is loaded from."""
    name = type(fault).__name__
    return (
        f'"""{fault.words[0].upper()}{fault.words[1:]}."""\n\n'
        f"from mlxkv.commands.scale.faulty import {name}\n\n"
        f"load = {fault!r}.load\n"
    )


class Faulty:
    """A model of the port's in mlx-lm's convention."""

    def __init__(self, model: Llama) -> None:
        self.model = model

    def make_cache(self) -> list[Rows]:
        """One cache per layer, all of them views of the port's one."""
        from mlxkv.port.cache import Cache

        cache = Cache(self.model.config, dtype=self.model.dtype)
        return [Rows(cache, layer) for layer in range(self.model.config.num_hidden_layers)]

    def __call__(
        self, tokens: mx.array, cache: Sequence[Rows], places: mx.array | None = None
    ) -> mx.array:
        """[B, L] -> [B, L, V], or [B, len(places), V]: 32,768 rows of logits would take 6 GB."""
        kept = None if places is None else [*map(int, places.tolist())]  # type: ignore[arg-type]
        whole = cache[0].whole
        return self.model(tokens, cache=whole, all_positions=True, places=kept, tap=self._tap)

    def _tap(self, layer: int, name: str, array: mx.array) -> mx.array:
        return array


class Opened(Faulty):
    """One that hands out what its last call computed inside its layers."""

    def __init__(self, model: Llama) -> None:
        super().__init__(model)
        self.seen: dict[tuple[int, str], mx.array] = {}

    def taps(self) -> Mapping[tuple[int, str], mx.array]:
        return self.seen

    def _tap(self, layer: int, name: str, array: mx.array) -> mx.array:
        self.seen[layer, name] = array
        return array


@dataclass(frozen=True, slots=True)
class Rows:
    """One layer of the port's cache, as mlx-lm's caches show themselves."""

    whole: Cache
    layer: int

    @property
    def offset(self) -> int:
        return len(self.whole)

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        """Keys and values, each [B, K, S, D]; None where nothing is held."""
        held = self.whole.layers[self.layer]
        return held.keys, held.values


def _port(path: str, dtype: str) -> Llama:
    from mlxkv.port.weights import load

    return load(path, dtype)


def _scale(model: Llama, layer: int, head: int, by: float) -> None:
    import mlx.core as mx

    attention = model.layers[layer].self_attn
    rows = mx.arange(attention.n_kv_heads * attention.head_dim) // attention.head_dim == head
    weight = attention.v_proj.weight  # [K * D, E]
    factors = mx.where(rows, by, 1.0).astype(weight.dtype)
    attention.v_proj.weight = weight * factors[:, None]
    mx.eval(attention.v_proj.weight)


class _Slipped:
    """A block whose cache gives one position the angles of the one before it."""

    def __init__(self, block: Any, position: int) -> None:
        self.block, self.position = block, position

    def __call__(self, x: mx.array, cache: Cache, *rest: Any) -> mx.array:
        return self.block(x, _Angles(cache, self.position), *rest)  # type: ignore[no-any-return]


class _Angles:
    """A cache, but for one row of its RoPE tables."""

    def __init__(self, cache: Cache, position: int) -> None:
        self._cache, self._position = cache, position

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def rotation(self, start: int, length: int) -> tuple[mx.array, mx.array]:
        """cos and sin, (L, D/2) each, of the positions from `start` on."""
        at = self._position - start
        tables = self._cache.rotation(start, length)
        if not 0 <= at < length:
            return tables
        before = self._cache.rotation(self._position - 1, 1)
        cos, sin = (_with_row(table, at, row) for table, row in zip(tables, before, strict=True))
        return cos, sin


def _with_row(table: mx.array, at: int, row: mx.array) -> mx.array:
    import mlx.core as mx

    return mx.concatenate([table[:at], row, table[at + 1 :]])

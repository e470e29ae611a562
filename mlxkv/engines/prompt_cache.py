"""What users of mlx-lm do with a prompt cache, which is a list of one cache per layer.

It is made, trimmed, copied, saved, kept in a store, and looked at. mlx-lm's own calls do it where
it has some. Axes as in `mlxkv.port.llama`.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from mlxkv.engines import kinds
from mlxkv.engines.kinds import Kind
from mlxkv.engines.own import used
from mlxkv.engines.runner import BrokenOff
from oracle.formats.errors import Inexpressible, Refusal

BATCH = ("BatchKVCache", "BatchRotatingKVCache")
"""Made for so many rows, with the padding on the left of each."""


def caches_for(model: Any, kind: Kind, *, batch: int = 1, padding: Sequence[int] = ()) -> list[Any]:
    """A new cache for every layer of mlx-lm's `model`; "KVCache" is the model's own choice.

    `batch` rows with so many tokens of `padding` on their left (none where it is empty) matter to
    the batch caches alone.
    """
    from mlx_lm.models import cache

    layers, given = len(model.layers), dict(kind.options)
    if kind.whose == "own":
        from mlxkv.engines import own_cache

        return own_cache.made(kind, model.args, layers)
    if kind.whose not in kinds.INSIDE:
        what = f"{kind.name} is no cache for mlx-lm's Llama, expected one of mlx-lm's or your own"
        raise Refusal(what, where="cache")
    kinds.require(kind, heads_of(model)[1])
    if kind.base == "KVCache":
        return list(cache.make_prompt_cache(model))
    if kind.whose == "ours":
        from mlxkv.engines import our_caches as cache
    named = {"size": "chunk_size" if kind.base == "ChunkedKVCache" else "max_size"}
    options: dict[str, Any] = {named.get(key, key): value for key, value in given.items()}
    if kind.base in BATCH:
        options["left_padding"] = list(padding) or [0] * batch
    return [getattr(cache, kind.base)(**options) for _ in range(layers)]


def heads_of(model: Any) -> tuple[int, int]:
    """K and D of mlx-lm's model, as its ModelArgs say."""
    args = model.args
    dim = getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads
    heads = getattr(args, "num_key_value_heads", None) or args.num_attention_heads
    return int(heads), int(dim)


def copied(cache: list[Any]) -> list[Any]:
    """An independent copy: by the layers' own `copy()` where they have one, else a deep one."""
    if cache and all(callable(getattr(layer, "copy", None)) for layer in cache):
        return [layer.copy() for layer in cache]
    return copy.deepcopy(cache)


def trim(cache: list[Any], n: int, name: str, *, held: int | None = None) -> None:
    """Takes the last `n` tokens away by mlx-lm's `trim_prompt_cache`; `name` is the cache's.

    It trims what is there where more is asked for: of no more than `held` tokens (None: of `n`).
    """
    from mlx_lm.models.cache import trim_prompt_cache

    for call in ("is_trimmable", "trim"):
        if not all(callable(getattr(layer, call, None)) for layer in cache):
            raise Inexpressible(f"{name} has no {call}()")
    trimmed = trim_prompt_cache(cache, n)
    if trimmed != (n if held is None else min(n, held)):
        what = f"trim_prompt_cache trimmed {trimmed} of {n} tokens"
        raise Inexpressible(f"{what} from a {name}")


def trim_to(cache: list[Any], before: Sequence[int], name: str) -> None:
    """Every layer back to the largest offset of a row that it had `before`.

    Not by `trim_prompt_cache`, which takes as much from layers that a broken call never reached.
    """
    for layer, offset in zip(cache, before, strict=True):
        if (more := largest(layer) - offset) > 0:
            trim([layer], more, name)


def reloaded(cache: list[Any]) -> list[Any]:
    """What mlx-lm's `load_prompt_cache` reads of what its `save_prompt_cache` wrote.

    It finds classes by their names in its own module, so those that it does not know are shown to
    it there meanwhile; else it fails, with a KeyError, or takes one of its own of the same name.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

    classes = {type(layer).__name__: type(layer) for layer in cache}
    for name, of in classes.items():
        if not (hasattr(of, "state") and callable(getattr(of, "from_state", None))):
            raise Inexpressible(f"class {name} has no state and from_state to be saved and read by")
    with tempfile.TemporaryDirectory() as folder, _known(classes):
        file = str(Path(folder) / "cache.safetensors")
        save_prompt_cache(file, cache)
        found = list(load_prompt_cache(file))
        mx.eval(arrays_of(found))  # MLX reads a file when it needs it, and this one will be gone
    return found


@contextmanager
def _known(classes: Mapping[str, type]) -> Iterator[None]:
    """Has mlx-lm find these classes by their names."""
    from mlx_lm.models import cache

    before = {name: vars(cache)[name] for name in classes if name in vars(cache)}
    vars(cache).update(classes)
    try:
        yield
    finally:
        for name in classes:
            del vars(cache)[name]
        vars(cache).update(before)


def recalled(cache: list[Any], tokens: Sequence[int], length: int) -> list[Any]:
    """What mlx-lm's LRUPromptCache, which holds `cache` for its `tokens`, gives to a sequence that
    shares the first `length` of them and goes on with another token.
    """
    try:
        from mlx_lm.models.cache import LRUPromptCache
    except ImportError as error:
        raise Inexpressible("this mlx-lm has no LRUPromptCache") from error
    # A cache that is right need not have what the store alone asks of it.
    for name in ("nbytes", "is_trimmable"):
        if lacks := next((type(one).__name__ for one in cache if not hasattr(one, name)), ""):
            raise Inexpressible(f"class {lacks} has no {name}, which LRUPromptCache asks for")
    store, shared = LRUPromptCache(), list(tokens[:length])
    length = len(shared)
    other = 1 if tokens[length : length + 1] == (0,) else 0
    store.insert_cache("model", list(tokens), cache)
    found, rest = store.fetch_nearest_cache("model", [*shared, other])
    served = length + 1 - len(rest)
    if found is None or served != length:
        gives = "nothing" if found is None else f"a cache of {served} tokens"
        raise Inexpressible(f"LRUPromptCache gives {gives} for {length} shared tokens")
    return list(found)


@contextmanager
def broken_off(model: Any) -> Iterator[None]:
    """A call of the model within fails at the layer in the middle."""
    layers, middle = model.layers, len(model.layers) // 2
    kept = layers[middle]
    layers[middle] = _Broken(kept)
    try:
        yield
    finally:
        layers[middle] = kept


class _Broken:
    """Stands in the place of a layer."""

    def __init__(self, layer: Any) -> None:
        self.use_sliding = getattr(layer, "use_sliding", False)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise BrokenOff


def rows_of(layer: Any, heads: tuple[int, int], *, whole: bool = False) -> tuple[Any, Any] | None:
    """Keys and values in use, each [B, K, S, D], by a layer's `state`; None where it shows none.

    Triples as mx.quantize gives them become what they stand for; `heads` are K and D. Those of a
    full RotatingKVCache stand in the order of its ring. `whole`: only where S are as many as it
    holds. Of a state whose order nobody knows, as a list of blocks, fewer say nothing.
    """
    found, length = getattr(layer, "state", None), said(layer)
    if not isinstance(found, tuple | list) or len(found) < 2 or length is None:
        return None
    keys, values = (_plain(side, heads[1]) for side in found[:2])
    if keys is None or values is None:
        return None
    pair = used(keys, length, heads), used(values, length, heads)
    if whole and any(one.shape[1:] != (heads[0], length, heads[1]) for one in pair):
        return None
    return pair


def _plain(side: Any, dim: int) -> Any:
    """An array of rows, unpacked where it is a triple of packed, scales and biases; or None."""
    import mlx.core as mx

    parts = side if isinstance(side, tuple | list) else (side,)
    if not all(isinstance(part, mx.array) and part.ndim == 4 for part in parts):
        return None
    if len(parts) == 1:
        return parts[0] if mx.issubdtype(parts[0].dtype, mx.floating) else None
    if len(parts) != 3 or parts[0].dtype != mx.uint32:
        return None
    # dim * bits fill whole words of 32 bits, since groups are of 32 or more.
    packed, scales, biases = parts
    groups, words = scales.shape[-1], packed.shape[-1]
    return mx.dequantize(packed, scales, biases, group_size=dim // groups, bits=32 * words // dim)


def said(layer: Any) -> int | None:
    """How many tokens a layer's cache says that it holds: its `offset`, or its `size()` where that
    is an offset for each row; None where it says neither.
    """
    import mlx.core as mx

    offset = getattr(layer, "offset", None)
    if isinstance(offset, int) or (isinstance(offset, mx.array) and offset.ndim == 0):
        return int(offset)
    return _told(partial(_size, layer))


def _size(layer: Any) -> Any:
    """By `size()`, which mlx-lm's base class has too, and there it is 0 whatever is held."""
    # A cache that has it from there has imported it; any other would wait for torch in vain.
    mlx_lm = sys.modules.get("mlx_lm.models.cache")
    base = getattr(mlx_lm, "_BaseCache", None)
    if base is not None and getattr(type(layer), "size", None) is getattr(base, "size", base):
        raise Inexpressible("its class has no size() of its own")
    return layer.size()


def _told(ask: Callable[[], Any]) -> int | None:
    """What a cache says, or None where it has no such call, or fails in it."""
    try:
        return int(ask())
    except Exception:
        return None


def largest(layer: Any) -> int:
    """A layer's offset, or the largest of those of a batch's rows; a number of its own, since
    MLX's `+=` changes the very array that was asked for.
    """
    import mlx.core as mx

    offset = layer.offset
    return int(mx.max(offset)) if isinstance(offset, mx.array) else int(offset)


def resets(cache: list[Any]) -> bool:
    """Whether every layer's cache has a call that empties it."""
    return bool(cache) and all(callable(getattr(layer, "reset", None)) for layer in cache)


def facts(cache: list[Any], heads: tuple[int, int], *, whole: bool = False) -> dict[str, Any]:
    """What a cache says of itself, beside what there is.

    `length`: tokens by `offset` (of a batch by `size()`); `size`: by `size()`; `nbytes`: bytes by
    `nbytes`; each None where it does not say. `allocated`: bytes of all arrays that can be reached
    from it. `rows`: those that it would give to attention; of several layers those of the layer
    that is furthest from `length`; `whole` as in `rows_of`. `reset`: how it is emptied.
    """
    length = _told(partial(said, cache[0])) if cache else None
    held = (_told(partial(_held, layer, heads, whole)) for layer in cache)
    rows = [n for n in held if n is not None]
    allocated = {id(array): array.nbytes for array in arrays_of(cache)}
    return {
        "length": length,
        "size": _told(partial(_size, cache[0])) if cache else None,
        "nbytes": _told(lambda: sum(layer.nbytes for layer in cache)),
        "allocated": sum(allocated.values()),
        "rows": max(rows, key=lambda n: abs(n - (length or 0)), default=None),
        "reset": "reset()" if resets(cache) else "a new one",
    }


def _held(layer: Any, heads: tuple[int, int], whole: bool) -> int:
    """Rows that a layer would give to attention, by `keys_and_values()`, else by its state."""
    if callable(given := getattr(layer, "keys_and_values", None)):
        keys = given()[0]
        return int((keys[0] if isinstance(keys, tuple | list) else keys).shape[2])
    keys, _ = rows_of(layer, heads, whole=whole) or (None, None)
    if keys is None:
        raise Inexpressible("its state shows no rows")
    return int(keys.shape[2])


_NO_ARRAYS = (str, bytes, int, float, type(None), type, ModuleType, FunctionType)


def arrays_of(root: Any) -> list[Any]:
    """Every array that can be reached from an object, each once."""
    import mlx.core as mx

    seen: dict[int, Any] = {}
    found, waiting = [], [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _NO_ARRAYS):
            continue
        seen[id(one)] = one
        if isinstance(one, mx.array):
            found.append(one)
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set):
            waiting += one
        else:
            waiting += getattr(one, "__dict__", {}).values()
            slots = [vars(of).get("__slots__", ()) for of in type(one).__mro__]
            names = [s for some in slots for s in ([some] if isinstance(some, str) else some)]
            waiting += [getattr(one, name, None) for name in names]
    return found

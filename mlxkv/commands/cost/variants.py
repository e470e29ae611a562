"""What is measured: one cache, the dtype computed in, and how the weights are rounded before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from mlxkv.engines import kinds
from mlxkv.engines.kinds import Kind, Lossy
from oracle.formats import stored
from oracle.formats.errors import Refusal

KNOWN = ("float16", "8 bits", "window 256", "window 256, keep 4")
"""Of the default variants those whose known answer the oracle computes too: one of each way to keep
less, and of sinks. Each costs it another pass through the layers."""
_BITS = (8, 6, 4, 3, 2)
_WINDOWS = (256, 1024)


@dataclass(frozen=True, slots=True)
class Variant:
    """`cache` is named as `kinds.parse` takes it, `lossy` what a person says of their own.

    `dtype` is computed in, `bits` are the weights' (0: as they are) in groups of `group_size`.
    `known` is the oracle's SPEC of what such a cache must cost, "" where there is none.
    """

    name: str
    cache: str = "KVCache"
    lossy: Lossy = ""
    dtype: str = "float32"
    bits: int = 0
    group_size: int = 64
    known: str = ""

    @property
    def kind(self) -> Kind:
        return kinds.parse(self.cache, lossy=self.lossy)

    @property
    def window(self) -> int | None:
        """How many tokens back it sees, where its name says so."""
        kind = self.kind
        size = kind.options.get("size") if kind.lossy == "window" else None
        return size if isinstance(size, int) else None

    @property
    def keeps_everything(self) -> bool:
        """Whether it must lose nothing: full precision around a cache that is not declared lossy,
        or whose options leave everything as it is.
        """
        kind = self.kind
        bits = [kind.options[key] for key in ("keys", "values") if key in kind.options]
        return self.rounds_cache_alone and (not kind.lossy or bits == [0, 0])

    @property
    def fault(self) -> str:
        """What is known to be wrong with a cache of others that is built in: no news here."""
        if self.kind.base == "RotatingKVCache" and self.kind.options["keep"]:
            return "known of mlx-lm: calls of several tokens do not see the sinks"
        return ""

    @property
    def rounds_cache_alone(self) -> bool:
        """Whether all that it loses is in the cache."""
        return self.dtype == "float32" and not self.bits


PLAIN = Variant("float32")
"""The full cache in the dtype that everything is computed in: its KL is the noise."""


def default() -> tuple[Variant, ...]:
    """The default variants, those of one kind together."""
    found = [PLAIN, _stored("float16"), _stored("bfloat16")]
    found += [_quantised(bits, 64) for bits in _BITS]
    found += [_split(8, 4), _split(4, 8)]
    found += [_window(size, keep) for size in _WINDOWS for keep in (0, 4)]
    found += [Variant(f"weights {bits} bits", bits=bits) for bits in (8, 4)]
    return tuple(_known(one) if one.name in KNOWN else one for one in found)


def everything() -> tuple[Variant, ...]:
    """Also half-precision compute and groups of 32, and every known answer there is."""
    more = [Variant(f"compute {dtype}", dtype=dtype) for dtype in ("float16", "bfloat16")]
    more += [_quantised(bits, 32) for bits in _BITS]
    return tuple(map(_known, (*default(), *more)))


def chosen(caches: Sequence[str], lossy: Lossy, known: str) -> tuple[Variant, ...]:
    """The full cache and those that a person named; `lossy` and `known` are of their own ones."""
    found = {PLAIN.name: PLAIN}
    spec = stored.parse(known).name if known else ""
    for text in caches:
        own = kinds.parse(text).whose == "own"
        kind = kinds.parse(text, lossy=lossy if own else "")
        if kind.whose not in kinds.INSIDE:
            what = f"{kind.name} is {kind.whose}'s, expected a cache that mlx-lm's Llama can run on"
            raise Refusal(what, where="--cache", remedy="`mlxkv pitfalls` runs it")
        if kind.name == "KVCache" or kind.text in found:
            continue
        name = _free(_short(kind), {one.name for one in found.values()})
        named = Variant(name, kind.text, lossy if own else "", known=spec if own else "")
        found[kind.text] = named if own else _known(named)
    if (lossy or known) and all(one.kind.whose != "own" for one in found.values()):
        what = "expected them beside a --cache of your own: what is built in is known"
        raise Refusal(what, where="--lossy, --known", remedy="leave them out")
    return tuple(found.values())


def _short(kind: Kind) -> str:
    """A cache's name without the options that are at their defaults."""
    if kind.whose == "own":
        return kind.name
    usual = kinds.BUILT_IN[kind.base].options
    given = [f"{key}={value}" for key, value in kind.options.items() if value != usual[key]]
    return ":".join([kind.base, *([",".join(given)] if given else [])])


def _free(name: str, taken: Collection[str]) -> str:
    """The name, numbered where files of one name lie in several folders."""
    numbers = (f"{name} ({i})" for i in range(2, len(taken) + 3))
    return next(one for one in (name, *numbers) if one not in taken)


def known(kind: Kind) -> str:
    """The oracle's SPEC for what such a cache keeps, "" where it has none."""
    has = kind.options
    match kind.base:
        case "StoredKVCache":
            return str(has["dtype"]) if has["dtype"] in ("float16", "bfloat16") else ""
        case "QuantizedKVCache":
            return f"affine:bits={has['bits']},group_size={has['group_size']}"
        case "SplitKVCache" if has["keys"] and has["values"]:
            given = f"keys={has['keys']},values={has['values']},group_size={has['group_size']}"
            return f"affine:{given}"
        case "RotatingKVCache":
            sinks = f",keep={has['keep']}" if has["keep"] else ""
            return f"window:size={has['size']}{sinks}"
    return ""


def _known(one: Variant) -> Variant:
    """With its known answer, if it has one."""
    spec = known(one.kind) if one.rounds_cache_alone else ""
    return replace(one, known=spec) if spec else one


def _stored(dtype: str) -> Variant:
    return Variant(dtype, f"StoredKVCache:dtype={dtype}")


def _quantised(bits: int, group_size: int) -> Variant:
    name = f"{bits} bits" + (f", groups of {group_size}" if group_size != 64 else "")
    return Variant(name, f"QuantizedKVCache:bits={bits},group_size={group_size}")


def _split(keys: int, values: int) -> Variant:
    cache = f"SplitKVCache:keys={keys},values={values},group_size=64"
    return Variant(f"keys {keys}, values {values} bits", cache)


def _window(size: int, keep: int) -> Variant:
    name = f"window {size}" + (f", keep {keep}" if keep else "")
    return Variant(name, f"RotatingKVCache:size={size},keep={keep}")

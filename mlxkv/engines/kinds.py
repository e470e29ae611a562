"""Which caches can be named, what each keeps of a sequence, and whose process runs it.

A cache of one's own is FILE.py:make or module:function: `make(config)`, given mlx-lm's ModelArgs,
returns one cache per layer with mlx-lm's protocol. It runs inside mlx-lm's Llama, as those of
mlx-lm and `ours` do. This module makes no cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from oracle.formats import cache_name
from oracle.formats.errors import Refusal, brief

Lossy = Literal["", "quantised", "depends", "window"]
"""What a cache keeps less than it is given for: fewer bits; fewer bits, and what is kept depends on
the calls in which it is fed (a block is packed when it is full, a scale grows); a window."""
_LOSES: dict[Lossy, str] = {"depends": "quantised, by the calls in which it is fed"}
Whose = Literal["mlx-lm", "ours", "port", "transformers", "own"]
INSIDE: tuple[Whose, ...] = ("mlx-lm", "ours", "own")
"""Whose caches run inside mlx-lm's Llama."""
BITS, GROUPS = (1, 2, 3, 4, 5, 6, 8), (32, 64, 128)
"""What mx.quantize takes in its mode "affine" (MLX 0.32)."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A cache that is known by name; `options` are its keys and defaults (None: must be given).

    `lossy` says in which way it keeps less than it is given, "" if in none.
    """

    whose: Whose
    what: str
    options: cache_name.Defaults = field(default_factory=dict)
    lossy: Lossy = ""


BUILT_IN: dict[str, BuiltIn] = {
    "KVCache": BuiltIn("mlx-lm", "mlx-lm's usual one"),
    "ConcatenateKVCache": BuiltIn("mlx-lm", "no spare rows: concatenates at each call"),
    "ChunkedKVCache": BuiltIn(
        "mlx-lm",
        "drops what lies before its chunk where a model asks it to, which a Llama does not",
        {"size": 8192},
    ),
    "RotatingKVCache": BuiltIn(
        "mlx-lm", "a window, and sinks", {"size": None, "keep": 0}, "window"
    ),
    "QuantizedKVCache": BuiltIn(
        "mlx-lm", "affine groups", {"bits": 8, "group_size": 64}, "quantised"
    ),
    "BatchKVCache": BuiltIn("mlx-lm", "rows of different lengths, padded on the left"),
    "BatchRotatingKVCache": BuiltIn("mlx-lm", "the same with a window", {"size": None}, "window"),
    "SwitchedKVCache": BuiltIn(
        "ours",
        "a KVCache that becomes a QuantizedKVCache (to_quantized) before the first call after "
        "`start` tokens, as mlx-lm's quantized_kv_start does",
        {"bits": 4, "group_size": 64, "start": 0},
        "quantised",
    ),
    "StoredKVCache": BuiltIn(
        "ours", "keys and values rounded to a dtype", {"dtype": "float16"}, "quantised"
    ),
    "SplitKVCache": BuiltIn(
        "ours",
        "affine groups, other bits for keys than for values (0: not quantised), unpacked before "
        "attention",
        {"keys": 8, "values": 4, "group_size": 64},
        "quantised",
    ),
    "port": BuiltIn("port", "the port's own Cache", {"mode": "guarded"}),
}
_TRANSFORMERS: dict[str, tuple[str, Lossy]] = {
    "DynamicCache": ("transformers' usual one", ""),
    "StaticCache": ("of one size from the start", ""),
    "DynamicSlidingCache": ("DynamicCache with a sliding window", "window"),
    "StaticSlidingCache": ("StaticCache with a sliding window", "window"),
    "QuantizedCache": ("its backend's own", "quantised"),
}
BUILT_IN |= {
    name: BuiltIn("transformers", what, cache_name.TRANSFORMERS[name], lossy)
    for name, (what, lossy) in _TRANSFORMERS.items()
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A cache as a person named it. `name` is its canonical spelling, with every option.

    `options` are checked; of one's own cache `file` (None: `module` is imported by its name) and
    `function` say where `make` is.
    """

    name: str
    whose: Whose
    lossy: Lossy
    options: Mapping[str, cache_name.Value] = field(default_factory=dict)
    file: Path | None = None
    module: str = ""
    function: str = ""

    @property
    def base(self) -> str:
        """The name without its options."""
        return self.name.partition(":")[0]

    @property
    def loses(self) -> str:
        """What it loses by design, in words; "" if nothing."""
        return _LOSES.get(self.lossy, self.lossy)

    @property
    def text(self) -> str:
        """What `parse` makes this of, from any folder; of one's own file its absolute path."""
        if self.whose != "own":
            return self.name
        return f"{self.file or self.module}:{self.function}"


def parse(text: str, *, lossy: Lossy = "") -> Kind:
    """What a person named; a Refusal that names what there is. Nothing is executed.

    `lossy` is what a person says of a cache of their own; what is built in is known.
    """
    base = text.partition(":")[0]
    if base not in BUILT_IN:
        return _own(text, lossy)
    about = BUILT_IN[base]
    found = cache_name.complete(text, {base: about.options})
    if lossy and lossy != about.lossy:
        what = f"--lossy {lossy}, expected it for a cache of your own: {base} is known"
        raise Refusal(what, remedy="leave it out")
    return Kind(str(found), about.whose, about.lossy, found.options)


def inside(
    text: str | None, *, engine: str | None = None, lossy: Lossy | None = None
) -> Kind | None:
    """The cache that a person named for mlx-lm's Llama, None where they named none.

    A Refusal for one that runs elsewhere, and beside another `engine`.
    """
    if text is None:
        if lossy:
            raise Refusal(f"--lossy {lossy}: expected it beside --cache", remedy="leave it out")
        return None
    if engine not in (None, "mlx-lm"):
        what = f"a cache runs inside mlx-lm's Llama, expected --engine mlx-lm, got {engine}"
        raise Refusal(what, where="--cache", remedy="leave --engine out")
    kind = parse(text, lossy=lossy or "")
    if kind.whose == "port":
        what = "the port's own cache runs in the port, which is judged without --cache"
        raise Refusal(what, where="--cache", remedy="leave it out")
    if kind.whose == "transformers":
        what = f"{kind.base} is transformers', which is what others are judged by"
        remedy = f"see how it behaves with `mlxkv pitfalls --cache {text}`"
        raise Refusal(what, where="--cache", remedy=remedy)
    return kind


def executed(texts: Iterable[str]) -> str:
    """The file or module of a person's own among caches as `Kind.text` has them; "" if none is."""
    for text in texts:
        where, colon, _ = text.rpartition(":")
        if colon and text.partition(":")[0] not in BUILT_IN:
            return Path(where).name
    return ""


def require(kind: Kind, head_dim: int) -> None:
    """Refuses bits and groups that mx.quantize does not have, or that a head does not fill."""
    where = f"cache {kind.base}"
    for key in ("bits", "keys", "values"):
        bits = kind.options.get(key)
        known = BITS if kind.base != "SplitKVCache" else (0, *BITS)
        if bits is not None and bits not in known:
            expected = f"expected one of {', '.join(map(str, known))}, which mx.quantize has"
            raise Refusal(f"{key} is {bits}, {expected}", where=where)
    size = kind.options.get("group_size")
    if isinstance(size, int) and (size not in GROUPS or head_dim % size):
        fit = [str(n) for n in GROUPS if head_dim % n == 0]
        expected = f"expected {' or '.join(fit) or 'none'}, which divides head_dim {head_dim}"
        remedy = "give that" if fit else "no quantised cache fits this model"
        raise Refusal(f"group_size is {size}, {expected}", where=where, remedy=remedy)
    least = int(kind.options.get("keep", 0)) + 1
    if int(kind.options.get("size", least)) < least:
        raise Refusal(f"size is {kind.options['size']}, expected {least} or more", where=where)


def _names_file(text: str) -> bool:
    """Whether a Python file is named, and no function of it."""
    return text.rstrip(":").endswith(".py")


def _own(text: str, lossy: Lossy) -> Kind:
    """FILE.py:make or module:function."""
    where, colon, function = text.rpartition(":")
    if not colon or not function.isidentifier():
        known = ", ".join(BUILT_IN)
        what = f"{brief(text)}, expected FILE.py:make, module:function, or one of {known}"
        meant = f"did you mean {text.rstrip(':')}:make?" if _names_file(text) else ""
        raise Refusal(what, where="--cache", remedy=meant)
    if not where.endswith(".py"):
        if not all(part.isidentifier() for part in where.split(".")):
            raise Refusal(f"{brief(where)}, expected a module's name or FILE.py", where="--cache")
        return Kind(text, "own", lossy, module=where, function=function)
    file = Path(where).absolute()
    if not file.is_file():
        what = f"no such file, expected the Python file that holds {function}"
        raise Refusal(what, where=f"--cache: {where}", remedy="check the path")
    return Kind(f"{file.name}:{function}", "own", lossy, file=file, function=function)

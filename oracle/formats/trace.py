"""A trace: what one engine computed for one plan, in one safetensors file.

`logits` (rows, vocab) float32 or float64, `positions` (rows,) int32 and `steps` (rows,) int32 say
what each row is: the logits after the token at that place of its own cache's sequence, returned by
that step of the plan. Optional are `kv/<cache>/<layer>/keys|values` (n_kv_heads, length, head_dim),
keys after RoPE, and `tap/<layer>/<name>`. The metadata is one key, `mlxkv`, holding JSON.

Where a plan has batches, `batch` (rows,) int32 says of which row of its call each row of logits is
(0 where the call is no batch), and the keys and values of a cache that holds a batch of B have B as
one more axis in front. Which positions have a row, `Plan.rows` says: row i is not position i.

Files are mapped into memory when read, so that a judge can go through a long trace position by
position. This module knows no engine and judges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np

from oracle.formats import strict_json, tensors
from oracle.formats.errors import Inexpressible, Refusal, brief, one_line
from oracle.formats.plan import Greedy, Plan, Whole, from_json
from oracle.formats.tensors import Array, Shapes, Writer

FORMAT = "mlxkv-trace/1"
_REMEDY = "write the trace again with this version"
TAPS: tuple[str, ...] = ("input_norm", "q", "k", "v", "q_rope", "k_rope", "scores", "attention")
TAPS += ("o_proj", "post_norm", "gate", "up", "activation", "down", "hidden")
"""The places inside a layer that can be recorded, in the order of computation;
`oracle.truth.config` gives their shapes."""
ROPE_TABLES = ("rope/cos", "rope/sin")
"""What the truth keeps of its RoPE: cos and sin of the angles, each (n, head_dim / 2)."""
_ARRAYS = {"logits": ("fF", 2), "positions": ("i", 1), "steps": ("i", 1), "batch": ("i", 1)}
"""The kinds of dtype and the axes of each."""


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What became of one step: the tokens that a greedy step chose, or an error's text, or neither.

    A step with an error was `refused`, or it `cannot be expressed`: the engine has no such call.
    """

    tokens: list[int] | None = None
    error: str | None = None
    kind: Literal["done", "refused", "cannot be expressed"] = "done"

    def __post_init__(self) -> None:
        if self.error is not None and self.kind == "done":
            msgspec.structs.force_setattr(self, "kind", "refused")
        if self.error is None and self.kind != "done":
            raise Refusal(f"an outcome is {self.kind!r} without an error, expected its text")

    @classmethod
    def failed(cls, error: Exception, tokens: list[int] | None = None) -> Self:
        """Of a step that ended with an error, after it chose these tokens."""
        kind: Literal["refused", "cannot be expressed"] = (
            "cannot be expressed" if isinstance(error, Inexpressible) else "refused"
        )
        return cls(tokens, one_line(error, 1000), kind)


SHARED = "first call taken from plan"
"""The key in a trace's environment that names the plan whose longer first call served for this
one's too."""
CACHES = "caches"
"""In a trace's environment: by each cache's name what it says of itself in the end beside what it
holds: `length`, `size` and `rows` in tokens, `nbytes` and `allocated`. None: it does not say."""


@dataclass(frozen=True, slots=True)
class Meta:
    """Where a trace comes from.

    `fingerprint` and `config_digest` name the weights and the config (None: not declared by the
    file's author). `dtype` is the dtype computed in; `weights_dtype` the one that the stored
    weights were rounded to first, which differs only in float64 runs. `environment` holds host,
    versions, threads and precision flags, as text to show. `no_cache` says why the keys and values
    of a cache are missing ("" if none are). `repeat` counts how often the same process had followed
    the plan before.
    """

    plan: Plan
    engine: str
    engine_version: str
    dtype: str
    weights_dtype: str = ""
    device: str = "cpu"
    fingerprint: str | None = None
    config_digest: str | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    probes: dict[str, float] = field(default_factory=dict)
    no_cache: str = ""
    repeat: Whole = 0

    def to_json(self) -> dict[str, Any]:
        value = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("no_cache", "repeat"):
            if not value[name]:
                del value[name]
        return value | {
            "format": FORMAT,
            "plan": self.plan.to_json(),
            "plan_digest": self.plan.digest,
            "outcomes": msgspec.to_builtins(self.outcomes),
        }


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace's metadata and its arrays by name (memory-mapped when read from a file)."""

    meta: Meta
    arrays: Mapping[str, Array]
    path: Path | None = None

    @property
    def logits(self) -> Array:
        """(rows, vocab)"""
        return self.arrays["logits"]

    @property
    def positions(self) -> Array:
        """(rows,)"""
        return self.arrays["positions"]

    @property
    def batch(self) -> Array:
        """(rows,): of which row of its call each is, 0 where there are no batches."""
        found = self.arrays.get("batch")
        return np.zeros(len(self.positions), np.int32) if found is None else found

    @property
    def label(self) -> str:
        """The file's path, or what the trace is."""
        what = f"{self.meta.engine} trace of plan {self.meta.plan.name!r}"
        return str(self.path) if self.path else what

    def kv(self, cache: str, layer: int) -> tuple[Array, Array] | None:
        """keys and values of one layer, each (n_kv_heads, length, head_dim), or None.

        Of a batch (B, n_kv_heads, length, head_dim).
        """
        prefix = f"kv/{cache}/{layer:03d}/"
        if prefix + "keys" not in self.arrays or prefix + "values" not in self.arrays:
            return None
        return self.arrays[prefix + "keys"], self.arrays[prefix + "values"]


def writer(path: Path, meta: Meta, shapes: Shapes) -> AbstractContextManager[Writer]:
    """A Writer with room for what `meta` will say once every step has run."""
    chosen = sum(s.n for s in meta.plan.steps if isinstance(s, Greedy))
    known = len(strict_json.encode(meta.to_json()))
    room = 2 * known + 1024 * len(meta.plan.steps) + 16 * chosen
    return tensors.writer(path, shapes, meta_bytes=room + 2**16)


def write(path: Path | str, meta: Meta, arrays: Mapping[str, Array]) -> None:
    with writer(Path(path), meta, {n: (a.dtype.type, a.shape) for n, a in arrays.items()}) as out:
        for name, array in arrays.items():
            out.arrays[name][...] = array
        out.finish(meta.to_json())


def read(path: Path | str) -> Trace:
    """The trace in a file, its arrays mapped; a Refusal where it is damaged or says too little."""
    path = Path(path)
    value, arrays = tensors.read(path)
    trace = Trace(_meta(value, str(path)), arrays, path)
    for name, (kinds, axes) in _ARRAYS.items():
        if name not in arrays:
            if name == "steps" or (name == "batch" and not trace.meta.plan.batched):
                continue
            expected = f"expected it beside {', '.join(sorted(arrays)[:3]) or 'nothing'}"
            remedy = "see the trace format in README.md"
            raise Refusal(f"no {name}, {expected}", where=path, remedy=remedy)
        array, rows = arrays[name], len(trace.logits) if trace.logits.ndim else 0
        if array.ndim != axes or array.dtype.kind not in kinds or len(array) != rows:
            found = f"{name} has shape {list(array.shape)} {array.dtype}"
            raise Refusal(f"{found}, expected {axes} axes and {rows} rows", where=path)
    return trace


def _meta(value: dict[str, Any], where: str) -> Meta:
    given = strict_json.of_format(value, FORMAT, where=where, remedy=_REMEDY)
    plan = from_json(given.get("plan"), where=f"{where}: plan")
    digest = given.pop("plan_digest", plan.digest)
    if digest != plan.digest:
        what = f"plan_digest is {brief(digest)}, expected {plan.digest} for its plan"
        raise Refusal(what, where=where, remedy="write the trace again")
    given = {"engine_version": ""} | given | {"plan": plan}
    meta = strict_json.typed(given, Meta, where=where, remedy=_REMEDY)
    for name in ("engine", "engine_version", "device"):  # a terminal shows them as they are
        if not (text := getattr(meta, name)).isprintable():
            what = f"{name} is {brief(text)}, expected letters that can be printed, on one line"
            raise Refusal(what, where=where, remedy=_REMEDY)
    return meta

"""A trace: what one engine computed for one plan, in one safetensors file.

`logits` (rows, vocab) float32 or float64, `positions` (rows,) int32 and `steps` (rows,) int32 say what each row is: the
logits after the token at that place of its own cache's sequence, returned by that step of the plan. Optional are
`kv/<cache>/<layer>/keys|values` (n_kv_heads, length, head_dim), keys after RoPE, and `tap/<layer>/<name>`. Everything
else is one metadata key, `mlxkv`, holding sorted JSON: one key, because several would be written in varying order.

Files are written under a temporary name and renamed; readers map them into memory, so that a judge can go through a
long trace position by position. This module knows no engine and judges nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

import numpy as np
import numpy.typing as npt

from oracle.formats import disk, strict_json
from oracle.formats.errors import Refusal, brief
from oracle.formats.plan import Greedy, Plan, from_json

FORMAT = "mlxkv-trace/1"
TAPS: tuple[str, ...] = (
    "input_norm",
    "q",
    "k",
    "v",
    "q_rope",
    "k_rope",
    "scores",
    "attention",
    "o_proj",
)
TAPS += ("post_norm", "gate", "up", "activation", "down", "hidden")
"""The places inside a layer that can be recorded, in the order of computation; `oracle.truth.config` gives their shapes."""
Array = npt.NDArray[Any]
_DTYPES: dict[str, type] = {
    "F64": np.float64,
    "F32": np.float32,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
}
_NAMES = {np.dtype(v): k for k, v in _DTYPES.items()}
_MOST_HEADER = 64 * 2**20
_MOST_AXES = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one step: the tokens that a greedy step chose, or the error's text, or neither."""

    tokens: list[int] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Meta:
    """Where a trace comes from.

    `fingerprint` and `config_digest` name the weights and the config (None: not declared by the file's author).
    `dtype` is the dtype computed in; `weights_dtype` the one that the stored weights were rounded to first, which differs
    only in float64 runs. `environment` holds host, versions, threads and precision flags, as text to show.
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

    def to_json(self) -> dict[str, Any]:
        """The metadata as plain JSON values."""
        rest = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("plan", "outcomes")
        }
        outcomes = [{k: v for k, v in asdict(o).items() if v is not None} for o in self.outcomes]
        return {
            "format": FORMAT,
            "plan": self.plan.to_json(),
            "plan_digest": self.plan.digest,
            "outcomes": outcomes,
        } | rest


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
    def label(self) -> str:
        """The file's path, or what the trace is."""
        return (
            str(self.path)
            if self.path
            else f"{self.meta.engine} trace of plan {self.meta.plan.name!r}"
        )

    def kv(self, cache: str, layer: int) -> tuple[Array, Array] | None:
        """keys and values of one layer, each (n_kv_heads, length, head_dim), or None where the trace has none."""
        prefix = f"kv/{cache}/{layer:03d}/"
        if prefix + "keys" not in self.arrays or prefix + "values" not in self.arrays:
            return None
        return self.arrays[prefix + "keys"], self.arrays[prefix + "values"]


class Writer:
    """Arrays of known shapes, filled in place in a memory map; the file appears under its name only when whole.

    `meta_bytes` bounds the metadata, which is written last (what became of the steps is known only then) into space kept
    for it in front.
    """

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, tuple[type, tuple[int, ...]]],
        *,
        meta_bytes: int = 2**16,
    ) -> None:
        self.path = path
        self._tensors: dict[str, Any] = {}
        end = 0
        # Largest items first, so that every array starts at a multiple of its item's size.
        for name, (dtype, shape) in sorted(
            shapes.items(), key=lambda s: (-np.dtype(s[1][0]).itemsize, s[0])
        ):
            start, end = end, end + np.dtype(dtype).itemsize * math.prod(shape)
            self._tensors[name] = {
                "dtype": _NAMES[np.dtype(dtype)],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
        self._header = 8 + -(-(len(json.dumps(self._tensors)) + meta_bytes) // 4096) * 4096
        self._part = disk.claim_part(path)
        try:
            _allocate(self._part, self._header + end)
            self.arrays = _map(self._part, self._header, self._tensors, "r+")
        except OSError as error:
            self.discard()
            raise disk.unwritable(path, error) from error

    def finish(self, meta: Mapping[str, Any]) -> None:
        """Writes the metadata and renames the file into place."""
        # JSON within JSON: quotes are escaped once more, which the bound above allows for.
        text = json.dumps(
            {"__metadata__": {"mlxkv": _sorted_json(meta)}, **self._tensors}, separators=(",", ":")
        ).encode()
        if len(text) > self._header - 8:
            raise ValueError(
                f"{self.path}: metadata of {len(text)} bytes, expected at most {self._header - 8}"
            )
        try:
            for array in self.arrays.values():
                if isinstance(array, np.memmap):
                    array.flush()
            self.arrays = {}
            with self._part.open("r+b") as file:
                file.write((self._header - 8).to_bytes(8, "little") + text.ljust(self._header - 8))
            self._part.replace(self.path)
        except OSError as error:
            raise disk.unwritable(self.path, error) from error

    def discard(self) -> None:
        """Drops what has been written, unless it was finished."""
        self.arrays = {}
        self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()


def writer(path: Path, meta: Meta, shapes: Mapping[str, tuple[type, tuple[int, ...]]]) -> Writer:
    """A Writer with room for what `meta` will say once every step has run."""
    chosen = sum(s.n for s in meta.plan.steps if isinstance(s, Greedy))
    room = 2 * len(_sorted_json(meta.to_json())) + 1024 * len(meta.plan.steps) + 16 * chosen
    return Writer(path, shapes, meta_bytes=room + 2**16)


def write(path: Path | str, meta: Meta, arrays: Mapping[str, Array]) -> None:
    """One trace from arrays in memory."""
    with writer(Path(path), meta, {n: (a.dtype.type, a.shape) for n, a in arrays.items()}) as out:
        for name, array in arrays.items():
            out.arrays[name][...] = array
        out.finish(meta.to_json())


def read(path: Path | str) -> Trace:
    """The trace in a file, its arrays mapped into memory; a Refusal where it is damaged or says too little."""
    path = Path(path)
    meta, arrays = read_arrays(path)
    trace = Trace(_meta(meta, str(path)), arrays, path)
    for name, dtypes, ndim in (("logits", "fF", 2), ("positions", "i", 1), ("steps", "i", 1)):
        if name not in arrays:
            if name == "steps":
                continue
            raise Refusal(
                f"{path}: no {name}, expected it beside {', '.join(sorted(arrays)[:3]) or 'nothing'}; see the trace format in README.md"
            )
        array = arrays[name]
        if (
            array.ndim != ndim
            or array.dtype.kind not in dtypes
            or len(array) != len(arrays["logits"])
        ):
            rows = len(arrays["logits"]) if arrays["logits"].ndim else 0
            raise Refusal(
                f"{path}: {name} has shape {list(array.shape)} {array.dtype}, expected {ndim} axes and {rows} rows"
            )
    return trace


def read_arrays(path: Path | str) -> tuple[dict[str, Any], dict[str, Array]]:
    """The metadata and the mapped arrays of any file that a Writer wrote."""
    path = Path(path)
    try:
        with disk.opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 2 <= length <= min(_MOST_HEADER, size - 8) else b""
    except OSError as error:
        raise Refusal(f"{path}: cannot be read ({error.strerror}); check the path") from error
    try:
        tensors = strict_json.decode(text)
        meta = strict_json.decode(tensors.pop("__metadata__")["mlxkv"])
        _check_tensors(tensors, size - 8 - length)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(
            f"{path}: not a whole trace file of {size} bytes ({_why(error)}); write or copy it again"
        ) from error
    if not isinstance(meta, dict):
        raise Refusal(
            f"{path}: metadata is a {type(meta).__name__}, expected a JSON object; write the file again"
        )
    return meta, _map(path, 8 + length, tensors, "r")


def _allocate(path: Path, size: int) -> None:
    # Blocks are claimed now: a full disk is an error here, and would be a bus error on writing into a sparse map.
    with path.open("r+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
            return
        for start in range(0, size, 2**24):
            file.write(bytes(min(2**24, size - start)))


def _map(
    path: Path, base: int, tensors: Mapping[str, Any], mode: Literal["r", "r+"]
) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for name, tensor in tensors.items():
        dtype, shape = _DTYPES[tensor["dtype"]], tuple(tensor["shape"])
        if math.prod(shape) == 0:
            arrays[name] = np.zeros(shape, dtype)
        else:
            arrays[name] = np.memmap(path, dtype, mode, base + tensor["data_offsets"][0], shape)
    return arrays


def _check_tensors(tensors: Mapping[str, Any], size: int) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda t: t[1]["data_offsets"]):
        start, stop = tensor["data_offsets"]
        shape = tensor["shape"]
        if (
            tensor["dtype"] not in _DTYPES
            or not strict_json.fits([shape, [start, stop]], list[list[int]])
            or min([*shape, start, stop]) < 0
        ):
            raise ValueError(
                f"{name} is {tensor['dtype']} {brief(shape)}, expected one of {', '.join(_DTYPES)}"
            )
        # An empty array has any other sizes for nothing, but numpy multiplies them too.
        if len(shape) > _MOST_AXES or math.prod(max(n, 1) for n in shape) >= 2**60:
            raise ValueError(
                f"{name} has shape {brief(shape)}, expected at most {_MOST_AXES} axes of a possible size"
            )
        if (
            start != end
            or stop - start != math.prod(shape) * np.dtype(_DTYPES[tensor["dtype"]]).itemsize
        ):
            raise ValueError(
                f"{name} has bytes {start} to {stop}, expected them from {end} on for shape {shape}"
            )
        end = stop
    if end != size:
        raise ValueError(f"its tensors end at byte {end}, its data at {size}")


def _meta(value: dict[str, Any], where: str) -> Meta:
    if value.get("format") != FORMAT:
        raise Refusal(f"{where}: format is {brief(value.get('format'))}, expected {FORMAT!r}")
    kinds = get_type_hints(Meta) | {
        "format": str,
        "plan": dict[str, Any],
        "plan_digest": str,
        "outcomes": list[dict[str, Any]],
    }
    unknown = sorted(set(value) - set(kinds))
    if unknown:
        raise Refusal(
            f"{where}: unknown metadata key {brief(unknown[0])}, expected {', '.join(sorted(kinds))}"
        )
    _require_kinds(value, {key: kinds[key] for key in value}, where)
    plan = from_json(value.get("plan", {}), where=f"{where}: plan")
    if value.get("plan_digest", plan.digest) != plan.digest:
        found = brief(value["plan_digest"])
        raise Refusal(
            f"{where}: plan_digest is {found}, expected {plan.digest} for its plan; write the trace again"
        )
    outcomes = value.get("outcomes", [])
    for i, outcome in enumerate(outcomes):
        _require_kinds(
            {"tokens": None, "error": None} | outcome,
            get_type_hints(Outcome),
            f"{where}: outcome {i}",
        )
    given = {
        k: v for k, v in value.items() if k not in ("format", "plan", "plan_digest", "outcomes")
    }
    missing = [key for key in ("engine", "dtype") if key not in given]
    if missing:
        raise Refusal(f"{where}: metadata incomplete, no {missing[0]}; write the trace again")
    return Meta(
        plan=plan, outcomes=[Outcome(**o) for o in outcomes], **({"engine_version": ""} | given)
    )


def _require_kinds(values: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> None:
    """Refuses values under other keys or of other kinds than these, by name."""
    odd = sorted(set(values) ^ set(kinds))
    if odd:
        how, expected = "unknown" if odd[0] in values else "missing", ", ".join(sorted(kinds))
        raise Refusal(
            f"{where}: {how} key {brief(odd[0])}, expected {expected}; make it again with this version"
        )
    for key, kind in kinds.items():
        if not strict_json.fits(values[key], kind):
            raise Refusal(
                f"{where}: {key} is {brief(values[key])}, expected {strict_json.named(kind)}; make it again with this version"
            )


def _sorted_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _why(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__

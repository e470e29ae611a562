"""Which weights an MLX checkpoint holds packed, and in how many bits; every other way is refused.

mlx-lm writes such a weight (out, in) as three tensors: `weight`, uint32 words (out, in * bits / 32)
of whole numbers q; `scales` and `biases`, floats (out, in / group_size). The weight is q * scale +
bias, each group of a row with its own. `quantization` in config.json speaks of all weights but
those that it names. The shapes say the same once more, and all must agree. No weight is read here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle.formats.errors import Refusal, brief
from oracle.formats.header import Tensor

KEYS = ("quantization", "quantization_config")
"""The keys of config.json on packed weights; mlx-lm writes the same value under both."""
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
_OPTIONS = ("group_size", "bits", "mode")
_FLOATS = ("F32", "F16", "BF16")
_REMEDY = "give the model's unquantised checkpoint or its GGUF, or quantise it again with mlx-lm"
# Other ways of quantising: a key of config.json, or tensors beside (or instead of) a weight.
_OTHER_KEYS = ("quantization_config", "quantization", "compression_config")
_OTHER_TENSORS = re.compile(
    r".*\.(qweight|qzeros|g_idx|scales|weight_scale(_inv)?|weight_packed|SCB"
    r"|(weight\.)?(absmax|quant_map|quant_state\..*))"
)

Tensors = Mapping[str, Tensor]
_Options = tuple[int, int]  # bits and group size


@dataclass(frozen=True, slots=True)
class Packed:
    """One packed weight: `shape` (out, in) once unpacked, and the names of its other tensors."""

    bits: int
    group_size: int
    shape: tuple[int, ...]
    scales: str
    biases: str


def read(where: Path, config: Mapping[str, Any], tensors: Tensors) -> dict[str, Packed]:
    """The packed weights by name. None are, if config.json says nothing of MLX's quantisation."""
    found = _read(where, config, tensors)
    _refuse_others(where, config, tensors, found)
    return found


def words(packed: Mapping[str, Packed]) -> str:
    """How the weights are packed, for titles; empty if none is."""
    kinds = sorted({(p.bits, p.group_size) for p in packed.values()})
    each = " and ".join(f"{bits}-bit in groups of {size}" for bits, size in kinds)
    return f"MLX {each}" if kinds else ""


def _read(where: Path, config: Mapping[str, Any], tensors: Tensors) -> dict[str, Packed]:
    key, other = KEYS
    values, again = config.get(key), config.get(other)
    if not isinstance(values, dict) or "quant_method" in values or "quant_type" in values:
        return {}
    if again is not None and again != values:
        what = f"{other} says {brief(again)}, expected {brief(values)} as {key} says"
        raise _refusal(where, what)
    at = f"{where}: {key}"
    usual = _options(at, {name: values[name] for name in values if name in _OPTIONS})
    own = {
        name: _own_options(f"{at}: {name}", name, values[name], usual, tensors)
        for name in values
        if name not in _OPTIONS
    }
    paths = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    if not paths:
        what = f"{key} says {brief(values)}, expected tensors with scales, found none"
        raise _refusal(where, what)
    found = {f"{path}.weight": _packed(path, own.get(path, usual), tensors) for path in paths}
    for name, tensor in tensors.items():
        if tensor.dtype == "U32" and name not in found:
            scales = f"{name.removesuffix('weight')}scales"
            raise _refusal(tensor.file, f"no {scales} beside {name} (U32), expected them")
    return found


def _refuse_others(
    where: Path, config: Mapping[str, Any], tensors: Tensors, packed: Mapping[str, Packed]
) -> None:
    """Stored integers mean nothing without their scales, and every method has its own."""
    expected = "expected plain float weights, or MLX's affine ones as mlx-lm writes them"
    remedy = "give the model's unquantised checkpoint or its GGUF"
    for key in _OTHER_KEYS:
        value = config.get(key)
        if value is not None and not (packed and key in KEYS):
            given = value if isinstance(value, dict) else {}
            method = given.get("quant_method") or given.get("quant_type") or brief(value)
            raise Refusal(f"{key} says {brief(method)}, {expected}", where=where, remedy=remedy)
    known = {p.scales for p in packed.values()}
    for name, tensor in tensors.items():
        foreign = _OTHER_TENSORS.fullmatch(name) and name not in known
        if foreign or tensor.dtype.startswith("F8_"):
            what = f"{name} ({tensor.dtype}) belongs to quantised weights, {expected}"
            raise Refusal(what, where=tensor.file, remedy=remedy)


def _options(where: str, values: Mapping[str, Any]) -> _Options:
    """bits and group size. Neither has a default: mlx-lm writes both."""
    unknown = sorted(set(values) - set(_OPTIONS))
    if unknown:
        what = f"unknown key {unknown[0]!r}, expected {', '.join(_OPTIONS)}"
        raise _refusal(where, what)
    mode = values.get("mode", "affine")
    if mode != "affine":
        what = f"mode is {brief(mode)}, expected 'affine', the only one that can be judged"
        raise _refusal(where, what)
    for key, known in (("bits", BITS), ("group_size", GROUPS)):
        value = values.get(key)
        if type(value) is not int or value not in known:
            what = f"{key} is {brief(value)}, expected one of {', '.join(map(str, known))}"
            raise _refusal(where, what)
    return values["bits"], values["group_size"]


def _own_options(
    where: str, path: str, value: Any, usual: _Options, tensors: Tensors
) -> _Options | None:
    """What config.json says of the weight of one module, `path`.

    An object is its own options, true the usual ones, and false says that it is not packed.
    """
    has_scales = f"{path}.scales" in tensors
    expected = None
    if f"{path}.weight" not in tensors:
        expected = f"{', '.join(_OPTIONS)} or the name of a weight"
    elif not isinstance(value, bool | dict):
        expected = "true, false, or an object with bits and group_size"
    elif has_scales != (value is not False):
        expected = f"{'no' if has_scales else 'its'} scales beside the weight"
    if expected:
        # `where` ends with the name, so that the line reads "NAME is VALUE".
        raise Refusal(f"{where} is {brief(value)}, expected {expected}", remedy=_REMEDY)
    return usual if value is True else None if value is False else _options(where, value)


def _packed(path: str, options: _Options | None, tensors: Tensors) -> Packed:
    assert options is not None  # a weight that is said not to be packed has no scales
    (bits, size), (weight, scales, biases) = options, _parts(path, tensors)
    shape, file = tensors[weight].shape, tensors[weight].file
    if len(shape) != 2 or shape[1] * 32 % (bits * size):
        expected = f"expected rows of whole groups of {size} numbers of {bits} bits"
        raise _refusal(file, f"{weight} has shape {list(shape)}, {expected}")
    rows, columns = shape[0], shape[1] * 32 // bits
    for name in (scales, biases):
        found, expected_shape = list(tensors[name].shape), [rows, columns // size]
        if found != expected_shape:
            beside = f"beside {weight} {list(shape)} of {bits} bits in groups of {size}"
            what = f"{name} has shape {found}, expected {expected_shape} {beside}"
            raise _refusal(tensors[name].file, what)
    return Packed(bits, size, (rows, columns), scales, biases)


def _parts(path: str, tensors: Tensors) -> tuple[str, str, str]:
    """The names of a packed weight's three tensors, once all are there and of the right dtype."""
    weight, scales, biases = (f"{path}.{part}" for part in ("weight", "scales", "biases"))
    for name in (weight, biases):
        if name not in tensors:
            what = f"no {name} beside {scales}, expected weight, scales and biases together"
            raise _refusal(tensors[scales].file, what)
    for name, known in ((weight, ("U32",)), (scales, _FLOATS), (biases, _FLOATS)):
        tensor = tensors[name]
        if tensor.dtype not in known:
            what = f"{name} is {tensor.dtype}, expected {', '.join(known)}"
            raise _refusal(tensor.file, what)
    return weight, scales, biases


def _refusal(where: object, what: str) -> Refusal:
    return Refusal(what, where=where, remedy=_REMEDY)

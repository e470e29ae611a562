"""Which weights an MLX checkpoint holds packed, and in how many bits: config.json and the headers, read strictly together.

mlx-lm writes such a weight (out, in) as three tensors: `weight`, uint32 words (out, in * bits / 32) of whole numbers q;
`scales` and `biases`, floats (out, in / group_size); the weight is q * scale + bias, each group of a row with its own. What
config.json says under `quantization` holds for all of them but those that it names. The shapes say the same once more, and
everything that does not add up is refused. Nothing here reads a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle.formats.errors import Refusal, brief
from oracle.formats.header import Tensor

KEYS = ("quantization", "quantization_config")
"""Where config.json says so, twice with the same value."""
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
_OPTIONS = ("group_size", "bits", "mode")
_FLOATS = ("F32", "F16", "BF16")
_REMEDY = "give the model's unquantised checkpoint or its GGUF, or quantise it again with mlx-lm"


@dataclass(frozen=True, slots=True)
class Packed:
    """One packed weight: `shape` (out, in) once unpacked, and the names of its other two tensors."""

    bits: int
    group_size: int
    shape: tuple[int, ...]
    scales: str
    biases: str


def read(
    where: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Packed]:
    """The packed weights by name; none where config.json does not speak of MLX's quantisation, or speaks of another's."""
    said = config.get(KEYS[0])
    if not isinstance(said, dict) or "quant_method" in said or "quant_type" in said:
        return {}
    again = config.get(KEYS[1])
    if again is not None and again != said:
        raise Refusal(
            f"{where}: {KEYS[1]} says {brief(again)}, expected {brief(said)} as {KEYS[0]} says; {_REMEDY}"
        )
    usual = _options(
        f"{where}: {KEYS[0]}", {key: value for key, value in said.items() if key in _OPTIONS}
    )
    named = {
        key: _named(f"{where}: {KEYS[0]}: {key}", key, said[key], usual, tensors)
        for key in said
        if key not in _OPTIONS
    }
    paths = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    if not paths:
        raise Refusal(
            f"{where}: {KEYS[0]} says {brief(said)}, expected tensors with scales, found none; {_REMEDY}"
        )
    found = {f"{path}.weight": _packed(path, named.get(path, usual), tensors) for path in paths}
    for name, tensor in tensors.items():
        if tensor.dtype == "U32" and name not in found:
            raise Refusal(
                f"{tensor.file}: no {name.removesuffix('weight')}scales beside {name} (U32), expected them; {_REMEDY}"
            )
    return found


def words(packed: Mapping[str, Packed]) -> str:
    """How the weights are packed, for titles; empty where none is."""
    kinds = sorted({(p.bits, p.group_size) for p in packed.values()})
    return (
        "MLX " + " and ".join(f"{bits}-bit in groups of {size}" for bits, size in kinds)
        if kinds
        else ""
    )


_Options = tuple[int, int]


def _options(where: str, said: Mapping[str, Any]) -> _Options:
    """bits and group size, neither with a default: mlx-lm writes both, and MLX's own are not those of the file."""
    unknown = sorted(set(said) - set(_OPTIONS))
    if unknown:
        raise Refusal(
            f"{where}: unknown key {unknown[0]!r}, expected {', '.join(_OPTIONS)}; {_REMEDY}"
        )
    mode = said.get("mode", "affine")
    if mode != "affine":
        raise Refusal(
            f"{where}: mode is {brief(mode)}, expected 'affine', the only one that can be judged; {_REMEDY}"
        )
    for key, known in (("bits", BITS), ("group_size", GROUPS)):
        if type(said.get(key)) is not int or said[key] not in known:
            raise Refusal(
                f"{where}: {key} is {brief(said.get(key))}, expected one of {', '.join(map(str, known))}; {_REMEDY}"
            )
    return said["bits"], said["group_size"]


def _named(
    where: str, path: str, said: Any, usual: _Options, tensors: Mapping[str, Tensor]
) -> _Options | None:
    """What config.json says of one weight by its module's name: options of its own, true for the usual ones, false for none."""
    if f"{path}.weight" not in tensors:
        raise Refusal(
            f"{where} is {brief(said)}, expected {', '.join(_OPTIONS)} or the name of a weight; {_REMEDY}"
        )
    if not isinstance(said, bool | dict):
        raise Refusal(
            f"{where} is {brief(said)}, expected true, false, or an object with bits and group_size; {_REMEDY}"
        )
    has = f"{path}.scales" in tensors
    if has != (said is not False):
        raise Refusal(
            f"{where} is {brief(said)}, expected {'its scales' if not has else 'no scales'} beside the weight; {_REMEDY}"
        )
    return usual if said is True else None if said is False else _options(where, said)


def _packed(path: str, options: _Options | None, tensors: Mapping[str, Tensor]) -> Packed:
    assert options is not None  # a weight said not to be packed has no scales
    (bits, size), (weight, scales, biases) = (
        options,
        (f"{path}.{part}" for part in ("weight", "scales", "biases")),
    )
    file = tensors[scales].file
    for name in (weight, biases):
        if name not in tensors:
            raise Refusal(
                f"{file}: no {name} beside {scales}, expected weight, scales and biases together; {_REMEDY}"
            )
    for name, known in ((weight, ("U32",)), (scales, _FLOATS), (biases, _FLOATS)):
        if tensors[name].dtype not in known:
            raise Refusal(
                f"{tensors[name].file}: {name} is {tensors[name].dtype}, expected {', '.join(known)}; {_REMEDY}"
            )
    shape = tensors[weight].shape
    if len(shape) != 2 or shape[1] * 32 % (bits * size):
        how = f"expected rows of whole groups of {size} numbers of {bits} bits"
        raise Refusal(f"{tensors[weight].file}: {weight} has shape {list(shape)}, {how}; {_REMEDY}")
    rows, columns = shape[0], shape[1] * 32 // bits
    for name in (scales, biases):
        if tensors[name].shape != (rows, columns // size):
            beside = f"expected {[rows, columns // size]} beside {weight} {list(shape)} of {bits} bits in groups of {size}"
            raise Refusal(
                f"{tensors[name].file}: {name} has shape {list(tensors[name].shape)}, {beside}; {_REMEDY}"
            )
    return Packed(bits, size, (rows, columns), scales, biases)

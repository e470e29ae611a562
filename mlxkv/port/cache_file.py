"""A cache in a file: its rows, and all that they depend on, so that no file is misused by mistake.

One safetensors file holds `<layer 000>/keys|values` [B, K, S, D] in the cache's own dtype, and one
metadata key, `mlxkv`, of sorted JSON: length, batch, dtype, use_kv_cache, guarded, the weights'
fingerprint, the whole config with its RoPE, a sha256 of the RoPE tables, of a rank's cache its rank
and how many there are, and a sha256 of all of these and the rows. Equal caches make equal bytes. The header follows from the metadata alone, so
that a reader accepts exactly what a writer wrote.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import mlx.core as mx
import numpy as np

from mlxkv.port import ops
from mlxkv.port.cache import Cache, CacheError, Layer, short
from mlxkv.port.config.llama import OF_READING
from mlxkv.port.config.values import flat
from mlxkv.port.ops import DTYPES, name_of
from oracle.formats.disk import atomic
from oracle.formats.errors import Refusal, one_line

if TYPE_CHECKING:
    from mlxkv.port.llama import Llama

FORMAT = "mlxkv-cache/1"

_STORED = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MOST_HEADER = 2**26
_OF_ROWS = {"length": int, "batch": int, "use_kv_cache": bool, "guarded": bool, "sha256": str}
_REMEDIES = {
    "format": "it was written by another version: fill a new cache",
    "dtype": "load the model with the file's dtype, or fill a new cache",
    # The host's sine and cosine may differ in the last bit from another machine's.
    "rope_tables": "the same config makes other angles here: fill a new cache",
}
_REMEDY = "load the model that filled it, or fill a new cache"
_DAMAGED = "save or copy it again"
_OTHER = "give a file that Cache.save wrote"
_MAGIC = {b"GGUF": "a GGUF file", b"PK": "a zip, as PyTorch writes", b"{": "a JSON file"}


class _Unfit(Refusal):
    """What is wrong with a file, for `load`, which names the file."""

    def __init__(self, what: str, remedy: str = _DAMAGED) -> None:
        super().__init__(what, remedy=remedy)


def save(cache: Cache, path: Path) -> None:
    """Writes `cache`; an earlier file of that name stays whole until the new one is."""
    cache.require_thread()
    _check(cache)
    meta = _made_of(cache, cache.fingerprint if len(cache) else None) | {
        "length": len(cache),
        "batch": cache.layers[0].batch or 0,
        "use_kv_cache": cache.use_kv_cache,
        "guarded": cache.guarded,
    }
    with atomic(path) as part, part.open("wb") as file, ops.stream(cache.dtype):
        file.write(_header(meta | {"sha256": "0" * 64}))
        digest = _digest(meta)
        for name, rows in _rows(cache):
            if not mx.all(mx.isfinite(rows)).item():
                what = f"{name} of {len(cache)} tokens holds nan or inf, expected finite rows"
                raise CacheError(what, where="cache", remedy="fill a new cache")
            data = _bytes_of(rows)
            digest.update(data)
            file.write(data)
        # The header's length does not depend on the digest, which is known only now.
        file.seek(0)
        file.write(_header(meta | {"sha256": digest.hexdigest()}))


def load(path: Path, model: Llama) -> Cache:
    """The cache in a file, once each field is known to be the model's and each byte as written."""
    try:
        with path.open("rb") as file, ops.stream(model.dtype):
            meta = _read_meta(file)
            most, part = _max_length(meta, model), model.part
            cache = Cache(model.config, dtype=model.dtype, max_length=most, part=part)
            _require_part(meta, cache)
            _compare(meta, _made_of(cache, model.fingerprint))
            cache.use_kv_cache, cache.guarded = meta["use_kv_cache"], meta["guarded"]
            cache.fingerprint = meta["fingerprint"]
            cache.restore(_read_layers(file, meta, cache))
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise CacheError(what, where=path, remedy="check the path") from error
    except _Unfit as error:
        raise CacheError(error.what, where=path, remedy=error.remedy) from error
    return cache


def _check(cache: Cache) -> None:
    lengths = sorted({layer.length for layer in cache.layers})
    if len(lengths) > 1:
        what = f"its layers hold {lengths[0]} to {lengths[-1]} tokens, expected one length"
        raise CacheError(what, where="cache", remedy="reset it")
    if len(cache) and cache.fingerprint is None:
        what = "the weights of its rows are not known, expected those of one model"
        raise CacheError(what, where="cache", remedy="fill it with a model from mlxkv.load")


def _made_of(cache: Cache, fingerprint: str | None) -> dict[str, Any]:
    config = json.loads(json.dumps(asdict(cache.config)))
    for key in OF_READING:
        del config[key]
    tables = hashlib.sha256()
    with ops.stream(cache.dtype):
        for table in (cache.cos, cache.sin):
            tables.update(_bytes_of(table))
    part = {} if cache.part is None else {"part": asdict(cache.part)}
    return part | {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "dtype": name_of(cache.dtype),
        "config": config,
        "max_length": cache.max_length,
        "rope_tables": tables.hexdigest(),
    }


def _rows(cache: Cache) -> Iterator[tuple[str, mx.array]]:
    for i, layer in enumerate(cache.layers):
        if layer.keys is not None and layer.values is not None:
            yield f"layer {i} keys", layer.keys
            yield f"layer {i} values", layer.values


def _header(meta: Mapping[str, Any]) -> bytes:
    """The file's first bytes, which say where each layer's rows lie."""
    shape, size = _sizes(meta)
    kind, tensors = _STORED[meta["dtype"]], {}
    for i in range(2 * meta["config"]["num_hidden_layers"] if size else 0):
        name = f"{i // 2:03d}/{('keys', 'values')[i % 2]}"
        offsets = [size * i, size * (i + 1)]
        tensors[name] = {"dtype": kind, "shape": shape, "data_offsets": offsets}
    value = {"__metadata__": {"mlxkv": _sorted_json(meta)}, **tensors}
    text = json.dumps(value, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _sizes(meta: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """[B, K, S, D] of a layer's keys, and their bytes."""
    K, D = meta["config"]["num_key_value_heads"], meta["config"]["head_dim"]
    K //= meta["part"]["size"] if "part" in meta else 1
    shape = (meta["batch"], K, meta["length"], D)
    return shape, math.prod(shape) * DTYPES[meta["dtype"]].size


def _read_meta(file: BinaryIO) -> dict[str, Any]:
    """The metadata, of which nothing is known but that it is a JSON object."""
    begin = file.read(8)
    if not begin:
        raise _Unfit(f"is empty, expected {FORMAT}")
    length = int.from_bytes(begin, "little")
    text = file.read(length) if 2 <= length <= _MOST_HEADER else b""
    try:
        header = json.loads(text) if length <= _MOST_HEADER else {}
        kind = _kind(begin, header)
        if kind:
            raise _Unfit(f"not an mlxkv cache but {kind}, expected {FORMAT}", _OTHER)
        meta = json.loads(header["__metadata__"]["mlxkv"])
        if not isinstance(meta, dict):
            raise ValueError(f"metadata is a {type(meta).__name__}")
        flat(meta)
    except _Unfit:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Unfit(f"not a whole {FORMAT} file ({one_line(error)})") from error
    return meta


def _kind(begin: bytes, header: Mapping[str, Any]) -> str:
    """What a file is that is not a cache of ours, as its first bytes and its header tell."""
    if int.from_bytes(begin, "little") > _MOST_HEADER:
        return next((k for magic, k in _MAGIC.items() if begin.startswith(magic)), "no safetensors")
    meta = header.get("__metadata__") or {}
    if "mlxkv" in meta:
        found = re.search(r"mlxkv-(?!cache)[a-z]+/\d+", str(meta["mlxkv"]))
        return f"of another kind, {found[0]}" if found else ""
    classes = [value for value in meta.values() if str(value).endswith("Cache")]
    if classes:
        return f"mlx-lm's prompt cache ({classes[0]})"
    names = [name for name in header if name != "__metadata__"]
    weights = any(name.endswith(".weight") for name in names)
    return "a model's weights" if weights else f"a safetensors file of {len(names)} other tensors"


def _max_length(meta: Mapping[str, Any], model: Llama) -> int | None:
    """How long the file's sequence may become, which the model leaves open.

    None where the file is to be refused anyway.
    """
    if meta.get("format") != FORMAT:
        return None
    length, most = meta.get("max_length"), model.config.max_position_embeddings
    if type(length) is not int or not 1 <= length <= most:
        raise _Unfit(f"max_length is {_brief('max_length', length)}, expected 1 to {most}")
    return length


def _require_part(meta: Mapping[str, Any], cache: Cache) -> None:
    """Refuses the rows of other KV heads than the model's rank has."""
    mine = None if cache.part is None else asdict(cache.part)
    if meta.get("format") != FORMAT or meta.get("part") == mine:
        return
    found = meta.get("part")
    theirs = "a whole model's"
    if isinstance(found, dict):
        theirs = f"that of rank {_brief('', found.get('rank'))} of {_brief('', found.get('size'))}"
    expected = cache.part or "a whole model's"
    what = f"part is {theirs}, expected {expected}"
    raise _Unfit(what, "give each rank the file that it saved, or fill a new cache")


def _compare(meta: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuses the first field that is not the model's, then one that no cache has."""
    found, wanted = flat(meta), flat(expected)
    for key, value in wanted.items():
        theirs = found.get(key, ...)
        if key == "fingerprint" and meta.get("length") == 0 and theirs is None:
            continue
        if type(theirs) is not type(value) or theirs != value:
            what = f"{key} is {_brief(key, theirs)}, expected {_brief(key, value)} as the model's"
            raise _Unfit(what, _REMEDIES.get(key, _REMEDY))
    for key in sorted(set(found) ^ {*wanted, *_OF_ROWS}):
        how = "not known" if key in found else "missing"
        raise _Unfit(f"{key} is {how}, expected the fields of {FORMAT}")
    for key, kind in _OF_ROWS.items():
        if type(meta[key]) is not kind:
            raise _Unfit(f"{key} is {meta[key]!r:.120}, expected {kind.__name__}")
    length, batch, most = meta["length"], meta["batch"], expected["max_length"]
    if not 0 <= length <= most or (batch < 1 if length else batch != 0):
        expects = f"expected 0 to {most} tokens and a batch where there are any"
        raise _Unfit(f"length is {length} and batch {batch}, {expects}")


def _read_layers(file: BinaryIO, meta: dict[str, Any], cache: Cache) -> tuple[Layer, ...]:
    """The rows, which must be all that the file holds and have the digest that it names."""
    _check_header(file, meta, len(cache.layers))
    (shape, size), claimed = _sizes(meta), meta.pop("sha256")
    digest, layers = _digest(meta), [Layer()] * len(cache.layers)
    for i in range(len(layers) if size else 0):
        keys, values = file.read(size), file.read(size)
        digest.update(keys)
        digest.update(values)
        # As a call appends them: buffers of another shape could take another way through a product.
        rows = _array(keys, cache.dtype, shape), _array(values, cache.dtype, shape)
        layers[i] = layers[i].append(*rows)
        mx.eval(layers[i].buffers)
    if digest.hexdigest() != claimed:
        what = f"sha256 is {digest.hexdigest()[:12]}, expected {claimed[:12]} as it says"
        raise _Unfit(what, f"it was changed: {_DAMAGED}")
    for i, layer in enumerate(layers):
        if not all(mx.all(mx.isfinite(rows)).item() for rows in layer.buffers or ()):
            what = f"layer {i} holds nan or inf, expected finite {meta['dtype']} rows"
            raise _Unfit(what, "fill a new cache")
    return tuple(layers)


def _check_header(file: BinaryIO, meta: Mapping[str, Any], layers: int) -> None:
    """Refuses a file of another size or header than its metadata make; leaves it at the rows."""
    header = _header(meta)
    whole = len(header) + 2 * layers * _sizes(meta)[1]
    found = file.seek(0, 2)
    if found != whole:
        raise _Unfit(f"has {found} bytes, expected {whole} for {meta['length']} tokens")
    file.seek(0)
    if file.read(len(header)) != header:
        sizes = f"length {meta['length']} and batch {meta['batch']}"
        raise _Unfit(f"its table of rows is another than {sizes} make, expected that one")


def _digest(meta: Mapping[str, Any]) -> Any:
    """The sha256 of all metadata but itself, ready for the rows."""
    return hashlib.sha256(_sorted_json(meta).encode())


# numpy has no bfloat16, and bits are all that is to be carried.
def _bytes_of(array: mx.array) -> bytes:
    return np.array(array.view(getattr(mx, f"uint{8 * array.dtype.size}"))).tobytes()


def _array(data: bytes, dtype: mx.Dtype, shape: tuple[int, ...]) -> mx.array:
    return mx.array(np.frombuffer(data, f"u{dtype.size}").reshape(shape)).view(dtype)


def _brief(key: str, value: Any) -> str:
    if value is ...:
        return "missing"
    if isinstance(value, str) and key in ("fingerprint", "rope_tables"):
        return short(value)
    return f"{value!r:.120}"


def _sorted_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)

"""The truth of one text, and what caches that store less make of it: a folder that is kept.

`mlxkv-oracle text MODEL --ids FILE.json --out DIR --stored SPEC` makes it or adds to it; `read`
reads it, on both sides, with numpy alone. Nothing is copied: arrays are mapped from their files.

`text.json` says of which weights and tokens the folder is, names every other file with its sha256,
and says which file is whose SPEC (see `oracle.formats.stored`).

`truth.safetensors`, of the checkpoint's own weights in strict float64 over all n tokens at once:
    logits   (n, V) float32, rounded from float64
    lse      (n,) float64, log(sum(exp(.))) of the float64 logits, in nats
    keys     (layers, K, n, D) float32, rounded from float64, after RoPE
    values   (layers, K, n, D) float32, rounded from float64
    hidden   (n, E) float64, what enters the head, so that more SPECs can be added later
`stored-<i>.safetensors`, of the same forward where each layer's attention reads what the cache of a
SPEC keeps, the current tokens included; all computed from float64 logits:
    kl             (n,) float64, KL(truth || stored) of the next token's distribution, in nats
    p_right        (n - 1,) float64, the probability of the token that follows, with the cache
    p_right_truth  (n - 1,) float64, the same of the truth
    top1_same      (n,) bool (bytes 0 and 1 in the file): the most probable token is the truth's
Row i is what follows token i. KL is 0 exactly where the two are bitwise equal; sums of V terms
leave 1e-15 of noise elsewhere.

To name a folder that is kept, use `inputs`: it changes with weights, tokens, torch's version and
the oracle's sources. `checked_for` refuses a folder that is of something else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from oracle.formats import run_folder, stored, strict_json, tensors
from oracle.formats.disk import hash_once, write_text
from oracle.formats.errors import Refusal, brief
from oracle.formats.plan import Whole
from oracle.formats.proofs import TRUTH as PROOFS
from oracle.formats.run_folder import TRUTH, Inputs
from oracle.formats.tensors import Array

FORMAT = "mlxkv-text/1"
TEXT = "text.json"
PROOF = "truth_agreement"
LIMIT = PROOFS[PROOF]
"""The text followed whole and in chunks must agree to this, in units of the largest |logit|."""
LEAST = 2
"""Tokens of a text: the last has none that follows."""
_FILE = re.compile(r"stored-(0|[1-9][0-9]{0,5})\.safetensors")
_BLOCK = 2**22  # numbers that are looked at together: 32 MB of float64
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
# Each array's dtype and axes; axes of one letter are of one size, and r is n - 1.
_TRUTH: dict[str, tuple[type, str]] = {
    "logits": (np.float32, "nv"),
    "lse": (np.float64, "n"),
    "keys": (np.float32, "lknd"),
    "values": (np.float32, "lknd"),
    "hidden": (np.float64, "ne"),
}
_STORED: dict[str, tuple[type, str]] = {
    "kl": (np.float64, "n"),
    "p_right": (np.float64, "r"),
    "p_right_truth": (np.float64, "r"),
    "top1_same": (np.uint8, "n"),
}
_RANGES = {"kl": (0, np.inf), "top1_same": (0, 1)} | dict.fromkeys(
    ("p_right", "p_right_truth"), (0, 1)
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `text.json` holds.

    `files` has each file's sha256, `stored` the file of each SPEC by its canonical name. `inputs`
    is the digest of all that the numbers depend on. `proofs` holds `truth_agreement` (largest
    difference of a logit, whole against chunks, over the largest |logit|), its limit, the chunk's
    length in tokens and `truth_max`, the largest |logit|. `environment` is text to show.
    """

    source: str
    name: str
    note: str
    revision: str | None
    fingerprint: str
    config_digest: str
    ignored_keys: list[str]
    tokens: list[Whole]
    inputs: str
    files: dict[str, _Digest]
    stored: dict[str, str]
    proofs: dict[str, float]
    environment: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lost:
    """The rows of one SPEC, as the module says."""

    kl: Array
    p_right: Array
    p_right_truth: Array
    top1_same: Array


@dataclass(frozen=True, slots=True)
class Text:
    """A folder, read: the arrays as the module says; `stored` by canonical SPEC."""

    manifest: Manifest
    logits: Array
    lse: Array
    keys: Array
    values: Array
    hidden: Array
    stored: Mapping[str, Lost]


def read(folder: Path) -> Text:
    """The folder, once every file is found unchanged, whole, finite, and of the others' sizes.

    A Refusal names the file and how the folder is made anew.
    """
    manifest = read_manifest(folder)
    n, lost = len(manifest.tokens), dict[str, Lost]()
    truth = _arrays(folder / TRUTH, _TRUTH, n, of="truth")
    for name, file in manifest.stored.items():
        found = _arrays(folder / file, _STORED, n, of=name)
        lost[name] = Lost(**found | {"top1_same": found["top1_same"].view(np.bool_)})
    return Text(manifest, **truth, stored=lost)


def read_manifest(folder: Path) -> Manifest:
    """What `text.json` says, once every file that it names is found unchanged."""
    path = folder / TEXT
    value = strict_json.read(path, remedy=_anew(path))
    given = strict_json.of_format(value, FORMAT, where=path, remedy=_anew(path))
    manifest = strict_json.typed(given, Manifest, where=path, remedy=_anew(path))
    for what in _odd(manifest):
        raise _damaged(path, what)
    for name, expected in sorted(manifest.files.items()):
        found = hash_once(folder / name)
        if found != expected:
            what = f"sha256 is {found[:16]}, expected {expected[:16]} as in {TEXT}"
            raise _damaged(folder / name, what)
    return manifest


def _odd(manifest: Manifest) -> Iterator[str]:
    """What no such folder says of itself: names become paths."""
    for name, file in manifest.stored.items():
        if not _FILE.fullmatch(file):
            yield f"stored holds {brief(file)}, expected stored-<i>.safetensors"
        elif stored.parse(name).name != name:
            yield f"stored holds {brief(name)}, expected {stored.parse(name).name!r}"
    files = sorted([TRUTH, *manifest.stored.values()])
    if sorted(manifest.files) != files:
        yield f"files are {', '.join(sorted(manifest.files))}, expected {', '.join(files)}"
    value = manifest.proofs.get(PROOF)
    if not (value is not None and value <= LIMIT):
        yield f"proof {PROOF} is {value}, expected at most {LIMIT:g}"
    if len(manifest.tokens) < LEAST:
        yield f"{len(manifest.tokens)} tokens, expected at least {LEAST}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Written last: a folder without it is not finished."""
    value = {"format": FORMAT} | asdict(manifest)
    text = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / TEXT, text + "\n")


def write_arrays(path: Path, lost: Lost, *, of: str) -> None:
    """The file of one SPEC, whose canonical name is `of`."""
    arrays = {name: getattr(lost, name) for name in _STORED}
    bytes_ = lost.top1_same.astype(np.uint8)
    tensors.write(path, arrays | {"top1_same": bytes_}, about(of))


def about(of: str) -> dict[str, str]:
    """The metadata of a file: of the truth, or of a SPEC."""
    return {"format": FORMAT, "of": of}


def shapes(n: int, *, vocab: int, cache: tuple[int, int, int], hidden: int) -> tensors.Shapes:
    """The arrays of `truth.safetensors`; `cache` is layers, K, D."""
    layers, heads, width = cache
    sizes = {"n": n, "v": vocab, "l": layers, "k": heads, "d": width, "e": hidden}
    return {
        name: (kind, tuple(sizes[axis] for axis in axes)) for name, (kind, axes) in _TRUTH.items()
    }


def inputs(fingerprint: str, config_digest: str, tokens: Sequence[int]) -> str:
    """One digest of all that the numbers depend on, to name a folder that is kept."""
    asked = Inputs(tokens=tuple(tokens), prompt_tokens=len(tokens), dtype="float32", taps=())
    digest = run_folder.inputs_digest(fingerprint, config_digest, asked)
    return hashlib.sha256(f"{FORMAT} {digest}".encode()).hexdigest()


def require(
    manifest: Manifest, folder: Path, *, weights: str, config: str, tokens: Sequence[int]
) -> None:
    """Refuses a folder of other weights (a fingerprint), another config (a digest) or tokens, or
    one that other sources made.
    """
    if list(tokens) != manifest.tokens:
        raise _foreign(folder, "other tokens")
    for what, found, expected in (
        ("weights", manifest.fingerprint, weights),
        ("config", manifest.config_digest, config),
        (
            "inputs (versions of torch or of these sources)",
            manifest.inputs,
            inputs(weights, config, tokens),
        ),
    ):
        if found != expected:
            raise _foreign(folder, f"{what} {found[:16]}, expected {expected[:16]}")


def _arrays(
    path: Path, wanted: Mapping[str, tuple[type, str]], n: int, *, of: str
) -> dict[str, Array]:
    """The arrays of a file, mapped, once their names, dtypes, shapes and numbers are right."""
    value, arrays = tensors.read(path)
    if value != about(of):
        raise _damaged(path, f"its metadata is {brief(value)}, expected {about(of)}")
    if sorted(arrays) != sorted(wanted):
        found, expected = (", ".join(sorted(names)) or "nothing" for names in (arrays, wanted))
        raise _damaged(path, f"holds {found}, expected {expected}")
    sizes = {"n": n, "r": n - 1}
    for name, (kind, axes) in wanted.items():
        array = arrays[name]
        same = array.dtype == kind and array.ndim == len(axes)
        pairs = zip(axes, array.shape, strict=True) if same else ()
        if not same or any(sizes.setdefault(axis, size) != size for axis, size in pairs):
            shape = ", ".join(str(sizes.get(axis, axis)) for axis in axes)
            what = f"{name} has shape {list(array.shape)} {array.dtype}"
            raise _damaged(path, f"{what}, expected [{shape}] {np.dtype(kind)}")
        _require_numbers(path, name, array)
    return arrays


def _require_numbers(path: Path, name: str, array: Array) -> None:
    """Refuses what is not finite, or not in the range of its kind; NaN is in none."""
    least, most = _RANGES.get(name, (-np.inf, np.inf))
    flat = array.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        if not (np.isfinite(block).all() and block.min() >= least and block.max() <= most):
            expected = f"finite numbers from {least:g} to {most:g}".replace(" from -inf to inf", "")
            raise _damaged(path, f"{name} holds others, expected {expected}")
    tensors.release(array)


def _damaged(path: Path, what: str) -> Refusal:
    return Refusal(what, where=path, remedy=_anew(path))


def _foreign(folder: Path, what: str) -> Refusal:
    remedy = "name another folder, or make it anew with --force"
    return Refusal(f"made of {what}", where=folder / TEXT, remedy=remedy)


def _anew(path: Path) -> str:
    return f"make the folder anew with `mlxkv-oracle text --out {path.parent} --force`"

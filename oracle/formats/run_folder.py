"""What a run folder says of itself: its manifest, and the digest of all that its results depend on."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from oracle.formats import disk, strict_json
from oracle.formats.disk import sha256, write_text
from oracle.formats.errors import Refusal, brief
from oracle.formats.trace import _require_kinds, _sorted_json, _why

TRUTH, MEAN = "truth.safetensors", "mean.safetensors"
"""What a run folder measures by: the strict float64 truth, or where none is written out the mean of transformers' runs."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `manifest.json` of a run folder says: the inputs, the plans' digests, each file's sha256, the proofs.

    `tokens` is the whole judged sequence, of which the first `prompt_tokens` are the prompt; `texts` is each token as
    text. `inputs` digests all that the results depend on, so that they can be used again. `proofs` holds measured values.
    """

    source: str
    name: str
    note: str
    revision: str | None
    fingerprint: str
    config_digest: str
    dtype: str
    prompt: str | None
    prompt_tokens: int
    tokens: list[int]
    texts: list[str]
    plans: dict[str, str]
    files: dict[str, str]
    proofs: dict[str, float]
    environment: dict[str, Any]
    inputs: str

    @property
    def has_truth(self) -> bool:
        """Whether the folder measures by the truth; else by the mean of transformers' own runs."""
        return MEAN not in self.files

    @property
    def measure(self) -> str:
        """The file that the folder measures by."""
        return TRUTH if self.has_truth else MEAN


_MANIFEST_FORMAT = "mlxkv-oracle/1"
_FILE = re.compile(r"(plans/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished run folder, after every file named in it has been read and found unchanged."""
    path = folder / "manifest.json"
    try:
        value = strict_json.decode(disk.read_bytes(path))
    except OSError as error:
        raise Refusal(
            f"{path}: cannot be read ({error.strerror}); make the folder with `mlxkv-oracle run --out {folder}`"
        ) from error
    except ValueError as error:
        raise Refusal(f"{path}: not JSON ({_why(error)}); copy or make the folder again") from error
    if (
        not isinstance(value, dict)
        or value.get("format") != _MANIFEST_FORMAT
        or value.get("complete") is not True
    ):
        raise Refusal(
            f"{path}: not a complete {_MANIFEST_FORMAT} manifest; copy or make the folder again"
        )
    given = {k: v for k, v in value.items() if k not in ("format", "complete")}
    _require_kinds(given, get_type_hints(Manifest), str(path))
    manifest = Manifest(**given)
    _check_manifest(manifest, path)
    for name, expected in sorted(manifest.files.items()):
        found = sha256(folder / name)
        if found != expected:
            raise Refusal(
                f"{folder / name}: sha256 is {found[:16]}, expected {expected[:16]} as in {path.name}; copy or make the folder again"
            )
    return manifest


def _check_manifest(manifest: Manifest, path: Path) -> None:
    """Refuses values of the right kinds that no run writes: names become paths, tokens are looked up."""
    ids = [
        *manifest.tokens,
        *(
            generated
            if strict_json.fits(generated := manifest.environment.get("generated", []), list[int])
            else [-1]
        ),
    ]
    odd = {
        "files": [name for name in manifest.files if not _FILE.fullmatch(name)],
        "plans": [name for name in manifest.plans if not _FILE.fullmatch(f"plans/{name}")],
        "sha256": [
            digest
            for digest in (*manifest.files.values(), *manifest.plans.values())
            if not _DIGEST.fullmatch(digest)
        ],
        "tokens": [id for id in ids if not 0 <= id < 2**31],
        "prompt_tokens": []
        if 1 <= manifest.prompt_tokens <= len(manifest.tokens)
        else [manifest.prompt_tokens],
        "texts": [] if len(manifest.texts) in (0, len(manifest.tokens)) else [len(manifest.texts)],
    }
    for key, values in odd.items():
        if values:
            raise Refusal(
                f"{path}: {key} holds {brief(values[0])}, which no run writes; copy or make the folder again"
            )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Written last: a folder without it is not finished."""
    value = {"format": _MANIFEST_FORMAT, "complete": True} | asdict(manifest)
    write_text(
        folder / "manifest.json",
        json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
    )


def suspects_digest(manifest: Manifest) -> str:
    """Of everything that the usual suspects of a run folder depend on here, whatever made the folder."""
    return inputs_digest(
        fingerprint=manifest.fingerprint,
        config_digest=manifest.config_digest,
        tokens=manifest.tokens,
        prompt_tokens=manifest.prompt_tokens,
        steps=0,
        chunks=None,
        dtype=manifest.dtype,
        threads=0,
    )


def inputs_digest(
    *,
    fingerprint: str,
    config_digest: str,
    tokens: Sequence[int],
    prompt_tokens: int,
    steps: int,
    chunks: Sequence[int] | None,
    dtype: str,
    threads: int,
    taps: Collection[str] = ("hidden",),
) -> str:
    """One digest of all that an oracle's results depend on; torch and transformers are asked for their versions, not imported.

    `tokens` are those given, before the `steps` greedy ones. A folder without a tap must not pass for one with it.
    """
    from importlib import metadata

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "not installed"

    inputs = {
        "weights": [fingerprint, config_digest],
        "tokens": [list(tokens), prompt_tokens, steps, None if chunks is None else list(chunks)],
        "run": [dtype, threads, sorted(taps)],
        "versions": [version("torch"), version("transformers")],
        "sources": sources(),
    }
    return hashlib.sha256(_sorted_json(inputs).encode()).hexdigest()


def sources() -> dict[str, str]:
    """The sha256 of every source of the package, by its path in it."""
    package = Path(__file__).parents[1]
    return {
        path.relative_to(package).as_posix(): sha256(path) for path in sorted(package.rglob("*.py"))
    }

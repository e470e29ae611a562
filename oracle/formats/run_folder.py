"""What a run folder says of itself: its manifest, its floors, and the digest of what made them."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from oracle.formats import plan as plans
from oracle.formats import strict_json, tensors
from oracle.formats.disk import hash_once, sha256, write_text
from oracle.formats.errors import Refusal, brief
from oracle.formats.plan import Plan, Whole
from oracle.formats.tensors import Array

TRUTH, MEAN = "truth.safetensors", "mean.safetensors"
"""What a run folder measures by: the strict float64 truth, or where none is written out the mean of
transformers' runs."""
FLOORS = "floors.safetensors"
SEQUENTIAL = "sequential-full"
"""The member of the pool whose norms add up their rows one number after another. It is never held
out, and where there is no truth, it has no part in the mean."""
PROBE = "probe"
"""The run folder within a run folder that holds the same model's probe: see `probe_inputs`."""

_FORMAT, _FLOORS_FORMAT = "mlxkv-oracle/2", "mlxkv-floors/1"
_OLD = "mlxkv-oracle/1"  # of version 0.1, without the mixed plan and the probe
_FILE = re.compile(r"(plans/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_COPY = "copy or make the folder again"
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `manifest.json` of a run folder holds.

    `tokens` is the whole judged sequence, of which the first `prompt_tokens` are the prompt;
    `texts` is each token as text (none without a tokenizer); `generated` are the greedy tokens, of
    which the last is not judged. `plans` are the plans' digests, `files` each file's sha256.
    `pool` names transformers' runs, of which `pool_distinct` differ bitwise; `left_out` are the
    kinds of attention too far from the model's own in float64, and how far. `ignored_keys` were
    taken out of the config; `packed` says how weights are stored ("" if they are plain). `proofs`
    holds measured values. `inputs` is the digest of all that the results depend on.
    `environment` is text to show. `original` is the length beyond which the model has other RoPE
    factors (None: no such length). `probe` says that the tokens are those of the probe. `all_rows`:
    each position has its row of logits, however long the sequence is (`oracle.formats.rows`).
    """

    source: str
    name: str
    note: str
    revision: str | None
    fingerprint: str
    config_digest: str
    dtype: str
    prompt: str | None
    prompt_tokens: Whole
    tokens: list[Whole]
    texts: list[str]
    generated: list[Whole]
    plans: Annotated[dict[str, _Digest], msgspec.Meta(min_length=1)]
    files: dict[str, _Digest]
    proofs: dict[str, float]
    pool: list[str]
    pool_distinct: int
    left_out: dict[str, float]
    ignored_keys: list[str]
    packed: str
    environment: dict[str, Any]
    inputs: str
    original: int | None = None
    probe: bool = False
    all_rows: bool = False

    @property
    def has_truth(self) -> bool:
        """Whether the folder measures by the truth; else by the mean of transformers' own runs."""
        return MEAN not in self.files

    @property
    def measure(self) -> str:
        """The file that the folder measures by."""
        return TRUTH if self.has_truth else MEAN

    @property
    def cached(self) -> str:
        """The plan that shows a cache at work: `step`, or the probe's `chunked`."""
        return _cached(self.probe)

    @property
    def title(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name

    @property
    def surroundings(self) -> dict[str, Any]:
        """What a report's table of environments shows: the environment and the pool."""
        names = ("pool", "pool_distinct", "left_out", "ignored_keys", "packed")
        special = {name: getattr(self, name) for name in names}
        return self.environment | {name: value for name, value in special.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What an oracle computes on a model: all that its results depend on beside that.

    `tokens` are those given, of which the first `prompt_tokens` are the prompt; `steps` greedy ones
    follow, of which the last is not part of the sequence. `chunks` are the sizes in which the
    chunked plan sends the prompt (None: the usual ones), `taps` the places inside a layer that the
    truth records. `probe` says that the tokens are those of the probe, which has plans of its own.
    `all_rows`: logits of every position are kept, and not of a long sequence a sample.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    steps: int = 0
    chunks: tuple[int, ...] | None = None
    dtype: str
    threads: int = 0
    taps: Collection[str] = ("hidden",)
    probe: bool = False
    all_rows: bool = False

    @property
    def cached(self) -> str:
        """The plan that shows a cache at work, as in the manifest."""
        return _cached(self.probe)


def _cached(probe: bool) -> str:
    return "chunked" if probe else "step"


def probe_inputs(vocab_size: int, context: int, *, dtype: str, threads: int) -> Inputs | None:
    """What the probe asks of a model with that vocabulary and that many positions.

    It asks the same whatever the prompt, so that one answer serves every question about a model in
    this dtype. None where the context has no room for two tokens.
    """
    ids = plans.probe_tokens(vocab_size, context)
    if len(ids) < 2:
        return None
    prompt = plans.probe_sizes(len(ids))[0]
    return Inputs(
        tokens=ids, prompt_tokens=prompt, dtype=dtype, threads=threads, taps=(), probe=True
    )


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `floors.safetensors` says of its rows: the pool's members, and their kinds of attention.

    `distinct` of the members differ bitwise. `widest` is the longest row whose numbers the
    sequential member added up one after another.
    """

    members: list[str]
    kinds: list[str]
    distinct: int
    widest: Whole = 0

    def to_json(self) -> dict[str, Any]:
        return {"format": _FLOORS_FORMAT, **msgspec.structs.asdict(self)}


def ordinary(members: Iterable[str]) -> list[str]:
    """The members of a pool that add up as torch does: all but the sequential one."""
    return [name for name in members if name != SEQUENTIAL]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished run folder, once every file that it names is found unchanged."""
    path = folder / "manifest.json"
    made = "probe" if folder.name == PROBE else "run"
    remedy = f"make the folder anew with `mlxkv-oracle {made} --out {folder} --force`"
    value = strict_json.read(path, remedy=remedy)
    if isinstance(value, dict) and value.get("format") == _OLD:
        what = f"format is {_OLD!r}, of version 0.1, expected {_FORMAT!r}"
        raise Refusal(what, where=path, remedy=_anew(value, folder, remedy))
    given = strict_json.of_format(value, _FORMAT, where=path, remedy=remedy)
    if given.pop("complete", None) is not True:
        raise Refusal("not a complete manifest", where=path, remedy=remedy)
    manifest = strict_json.typed(given, Manifest, where=path, remedy=remedy)
    _check(manifest, path)
    for name, expected in sorted(manifest.files.items()):
        found = hash_once(folder / name)
        if found != expected:
            what = f"sha256 is {found[:16]}, expected {expected[:16]} as in {path.name}"
            raise Refusal(what, where=folder / name, remedy=_COPY)
    return manifest


def probe_of(folder: Path, manifest: Manifest) -> Path | None:
    """The probe in a run folder, once it is found to be of the same model and dtype.

    None where there is none.
    """
    path = folder / PROBE
    if not path.is_dir():
        return None
    probe = read_manifest(path)
    for name, wanted in {"probe": True, **_model_of(manifest)}.items():
        if (found := getattr(probe, name)) != wanted:
            what = f"{name} is {brief(found)}, expected {brief(wanted)} as beside its run folder"
            raise Refusal(what, where=path / "manifest.json", remedy=_COPY)
    its, wanted = (read_floors(of / FLOORS)[0].widest for of in (path, folder))
    if its != wanted:
        what = (
            f"the sequential member added up rows of {its}, expected {wanted} as in its run folder"
        )
        raise Refusal(what, where=path / FLOORS, remedy=_COPY)
    return path


def _model_of(manifest: Manifest) -> dict[str, str]:
    return {name: getattr(manifest, name) for name in ("fingerprint", "config_digest", "dtype")}


def _anew(value: Mapping[str, Any], folder: Path, otherwise: str) -> str:
    """The command that makes a folder of version 0.1 anew, by what its manifest says."""
    given = {key: of for key, of in value.items() if key not in ("format", "complete")}
    try:
        old = strict_json.typed(given, Manifest, where=folder, remedy=otherwise)
    except Refusal:
        return otherwise
    words = ["mlxkv-oracle", "run", *([] if old.source == "default" else [old.source])]
    words += ["--revision", old.revision] if old.revision else []
    if old.prompt is not None and old.prompt.isprintable():
        words += ["--prompt", old.prompt]
    else:
        tokens = old.tokens[: len(old.tokens) - max(0, len(old.generated) - 1)]
        words += ["--tokens", ",".join(map(str, tokens))]
        rest = not old.generated and old.prompt_tokens < len(tokens)
        words += ["--prompt-tokens", str(old.prompt_tokens)] if rest else []
    words += ["--steps", str(len(old.generated)), "--dtype", old.dtype]
    words += [f"--ignore-key={key}" for key in old.ignored_keys]
    return f"make it anew: {shlex.join([*words, '--out', str(folder), '--force'])}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Written last: a folder without it is not finished."""
    value = {"format": _FORMAT, "complete": True} | asdict(manifest)
    text = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / "manifest.json", text + "\n")


def read_floors(path: Path) -> tuple[Pool, Mapping[str, Array]]:
    """The pool and its measures, mapped: see `oracle.pool.errors`."""
    value, arrays = tensors.read(path)
    given = strict_json.of_format(value, _FLOORS_FORMAT, where=path, remedy=_COPY)
    return strict_json.typed(given, Pool, where=path, remedy=_COPY), arrays


def _check(manifest: Manifest, path: Path) -> None:
    """Refuses values of the right types that no run writes: names become paths."""
    given, texts = len(manifest.tokens), len(manifest.texts)
    odd: dict[str, Sequence[object]] = {
        "files": [name for name in manifest.files if not _FILE.fullmatch(name)],
        "plans": [name for name in manifest.plans if not _FILE.fullmatch(f"plans/{name}")],
        "prompt_tokens": () if 1 <= manifest.prompt_tokens <= given else (manifest.prompt_tokens,),
        "texts": () if texts in (0, given) else (texts,),
    }
    for key, values in odd.items():
        if values:
            what = f"{key} holds {brief(values[0])}, which no run writes"
            raise Refusal(what, where=path, remedy=_COPY)


def read_plans(folder: Path, manifest: Manifest) -> dict[str, Plan]:
    """The plans of a run folder, by name; a Refusal where one is not what the manifest says."""
    found = {}
    for name, digest in manifest.plans.items():
        path = folder / "plans" / f"{name}.json"
        found[name] = plans.read(path)
        if found[name].digest != digest:
            what = f"digest is {found[name].digest[:16]}, expected {digest[:16]}"
            raise Refusal(what, where=path, remedy="make the folder again")
    return found


def suspects_digest(manifest: Manifest, plan: str) -> str:
    """The digest of all that a run folder's usual suspects depend on here, whatever made it.

    `plan` is the one at whose borders of calls mistakes are tried too.
    """
    tokens, n = tuple(manifest.tokens), manifest.prompt_tokens
    inputs = Inputs(tokens=tokens, prompt_tokens=n, dtype=manifest.dtype)
    digest = inputs_digest(manifest.fingerprint, manifest.config_digest, inputs)
    return hashlib.sha256(f"{digest} {plan} {manifest.plans.get(plan)}".encode()).hexdigest()


def inputs_digest(fingerprint: str, config_digest: str, inputs: Inputs) -> str:
    """One digest of all that an oracle's results depend on.

    torch and transformers are asked for their versions, not imported. A folder without a tap must
    not pass for one with it.
    """
    from importlib import metadata

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "not installed"

    value = {
        "weights": [fingerprint, config_digest],
        "tokens": [inputs.tokens, inputs.prompt_tokens, inputs.steps, inputs.chunks],
        "run": [inputs.dtype, inputs.threads, sorted(inputs.taps), inputs.probe, inputs.all_rows],
        "versions": [version("torch"), version("transformers")],
        "sources": sources(),
    }
    return hashlib.sha256(strict_json.encode(value).encode()).hexdigest()


def sources() -> dict[str, str]:
    """The sha256 of every source of the package, by its path in it."""
    package = Path(__file__).parents[1]
    return {
        path.relative_to(package).as_posix(): sha256(path) for path in sorted(package.rglob("*.py"))
    }

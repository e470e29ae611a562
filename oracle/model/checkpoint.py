"""Where a model comes from: the default, a Hugging Face folder, a Hub id or a GGUF file.

Each of them becomes a Checkpoint, which names a local folder. Both engines load that folder, and
its fingerprint goes into every trace. Nothing here knows what the weights mean: any model is
carried, and `require_llama` is for those who cannot compute another. No code of a checkpoint is
run and no pickle is opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oracle.formats.errors import Refusal, brief
from oracle.formats.header import Tensor
from oracle.formats.progress import Progress, silent
from oracle.model import cache_folder, fingerprint, packing, safetensors
from oracle.model.packing import Packed

DEFAULT = "default"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_POSITIONS = "max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder, what it was asked for as, and what it holds.

    `source` is what the user named, `name` is short and for titles, `note` says how it got here (""
    for a plain folder), `revision` is the Hub's commit, `without` the keys that a person took out
    of the config, `packed` the weights that are stored quantised, as MLX does it. By tensor,
    `hashes` are the sha256 of the bytes, `largest` the largest magnitudes (0 for what is no float).
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
    hashes: dict[str, str] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return str(self.folder / "config.json")

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape. A packed one has the shape that it unpacks to."""
        beside = {name for p in self.packed.values() for name in (p.scales, p.biases)}
        stored = {name: tensor.shape for name, tensor in self.tensors.items() if name not in beside}
        return stored | {name: packed.shape for name, packed in self.packed.items()}

    @property
    def parameters(self) -> int:
        """How many numbers the weights are, once unpacked."""
        return sum(math.prod(shape) for shape in self.weights.values())

    @property
    def model_config(self) -> dict[str, Any]:
        """The config without its keys on packed weights, which `packed` holds already."""
        known = packing.KEYS if self.packed else ()
        return {key: value for key, value in self.config.items() if key not in known}

    @property
    def vocab_size(self) -> int:
        return self._whole("vocab_size")

    @property
    def max_positions(self) -> int:
        if self.config.get("model_type") == "llama" and _POSITIONS not in self.config:
            return 2048  # transformers' own
        return self._whole(_POSITIONS)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a text, by config.json and generation_config.json together."""
        path = self.folder / "generation_config.json"
        generation = safetensors.read_object(path) if os.path.exists(path) else {}
        pairs = (self.config, self.where), (generation, path)
        return frozenset().union(*(_eos_of(of, where, self.vocab_size) for of, where in pairs))

    def _whole(self, key: str) -> int:
        value = self.config.get(key)
        if type(value) is not int or value < 1:
            what = f"{key} is {value!r}, expected a whole number from 1"
            raise Refusal(what, where=self.where, remedy="correct the config")
        return value


def _eos_of(config: Mapping[str, Any], where: object, vocab: int) -> frozenset[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id) is int for id in ids):
        what = f"eos_token_id is {brief(value)}, expected a token id or a list of them"
        raise Refusal(what, where=where, remedy="correct it")
    if beyond := [id for id in ids if not 0 <= id < vocab]:
        what = (
            f"eos_token_id is {brief(beyond[0])}, expected 0 to {vocab - 1}, the vocabulary's ids"
        )
        raise Refusal(what, where=where, remedy="correct it")
    return frozenset(ids)


def resolve(
    model: str | None = None,
    *,
    revision: str | None = None,
    ignore_keys: Sequence[str] = (),
    progress: Progress = silent,
) -> Checkpoint:
    """The checkpoint that `model` names: None or "default", a folder, a .gguf file, or a Hub id.

    A folder of the name goes before a Hub id; "./default" is a folder of that name. Only a Hub id
    has a `revision`. `ignore_keys` are taken out of the config, so nobody reads them; each reader
    refuses those that it knows to matter.
    """
    found = _found(DEFAULT if model is None else os.fspath(model), revision, progress)
    return _without(found, sorted(set(ignore_keys))) if ignore_keys else found


def _found(source: str, revision: str | None, progress: Progress) -> Checkpoint:
    path = Path(os.path.expanduser(source))
    _require_text(source)
    is_gguf = path.suffix.lower() == ".gguf"
    is_hub_id = not is_gguf and not os.path.exists(path) and _HUB_ID.fullmatch(source) is not None
    if revision is not None and not is_hub_id:
        what = "has no revisions, expected a Hub id (org/name) beside --revision"
        raise Refusal(what, where=source, remedy="leave the revision out")
    if source == DEFAULT:
        return _default(progress)
    if is_hub_id:
        return _from_hub(source, revision, progress)
    if source and os.path.isdir(path):
        return _opened(path, source, path.resolve().name, progress)
    if is_gguf and os.path.isfile(path):
        return _from_gguf(path, source, progress)
    if source and os.path.exists(path):
        what = "a file, expected a folder with config.json and safetensors, or a .gguf file"
        raise Refusal(what, where=source, remedy="give the folder")
    what = "no such folder or file, expected one, or a Hub id (org/name)"
    raise Refusal(what, where=repr(source), remedy="check the spelling")


def _require_text(source: str) -> None:
    try:
        source.encode()
    except UnicodeEncodeError as error:
        what = f"not text ({error.reason}), expected a path in UTF-8, as reports name it"
        raise Refusal(what, where=repr(source), remedy="rename it") from error


def _without(found: Checkpoint, names: list[str]) -> Checkpoint:
    """The checkpoint with keys taken out of its config, and a note that names them."""
    for name in names:
        if found.packed and name in packing.KEYS:
            what = f"--ignore-key {name} would change the weights, expected a key that does not"
            raise Refusal(what, where=found.where, remedy="leave the option out")
        if name not in found.config:
            what = f"no key {name!r}, expected one as --ignore-key says"
            raise Refusal(what, where=found.where, remedy="leave it out")
    config = {key: value for key, value in found.config.items() if key not in names}
    return replace(
        found,
        config=config,
        config_digest=_digest(config),
        note=_notes(found.note, f"ignoring {' and '.join(names)} in config.json"),
        without=tuple(names),
    )


def is_neighbour(checkpoint: Checkpoint) -> bool:
    """Whether the config names another architecture than Llama, the one that the port computes."""
    found = checkpoint.config.get("model_type")
    return isinstance(found, str) and found != "llama"


def require_llama(checkpoint: Checkpoint) -> None:
    """Refuses a model that is not a Llama: neither the port nor the truth computes another."""
    found = checkpoint.config.get("model_type")
    if found != "llama":
        remedy = "give a Llama's checkpoint"
        if is_neighbour(checkpoint):
            remedy = "judge mlx-lm on it with `mlxkv compare --engine mlx-lm`"
        what = f"model_type is {found!r}, expected 'llama'"
        raise Refusal(what, where=checkpoint.where, remedy=remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A Llama as a person names it: MODEL (None is the default one), --revision, --ignore-key."""

    model: str | None = None
    revision: str | None = None
    ignore_keys: tuple[str, ...] = ()

    def checkpoint(self, progress: Progress = silent) -> Checkpoint:
        """What is named; a Refusal where it is no Llama."""
        keys = self.ignore_keys
        found = resolve(self.model, revision=self.revision, ignore_keys=keys, progress=progress)
        require_llama(found)
        return found


def _opened(
    folder: Path,
    source: str,
    name: str,
    progress: Progress,
    *,
    note: str = "",
    revision: str | None = None,
) -> Checkpoint:
    path = folder / "config.json"
    if not os.path.exists(path):
        ggufs = sorted(p.name for p in folder.glob("*.gguf"))
        remedy = "give the folder of a Hugging Face checkpoint"
        if ggufs:
            remedy = f"name the file {folder / ggufs[0]} itself"
        what = "no config.json, expected it beside the safetensors"
        raise Refusal(what, where=folder, remedy=remedy)
    config = safetensors.read_object(path)
    tensors = safetensors.tensors(folder)
    packed = packing.read(path, config, tensors)
    contents = fingerprint.contents(tensors, progress=progress)
    assumed = f"{_POSITIONS} 2048 assumed, as in transformers"
    absent = config.get("model_type") == "llama" and _POSITIONS not in config
    return Checkpoint(
        folder=folder,
        source=source,
        name=name,
        note=_notes(note, packing.words(packed), assumed if absent else ""),
        revision=revision,
        config=config,
        config_digest=_digest(config),
        tensors=tensors,
        fingerprint=fingerprint.fingerprint(tensors, contents.hashes),
        packed=packed,
        hashes=contents.hashes,
        largest=_finite(tensors, contents.largest),
    )


def _finite(tensors: Mapping[str, Tensor], largest: Mapping[str, int]) -> dict[str, float]:
    """The largest magnitude of each tensor; a Refusal where one is infinite or no number."""
    found = {n: fingerprint.magnitude(tensors[n].dtype, bits) for n, bits in largest.items()}
    for name, most in found.items():
        if not most < math.inf:
            odd = "NaN" if math.isnan(most) else "infinity"
            what = f"{name} holds {odd}, expected finite weights"
            raise Refusal(what, where=tensors[name].file, remedy="download or save it again")
    return found


def _notes(*notes: str) -> str:
    return ", ".join(filter(None, notes))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _from_hub(source: str, revision: str | None, progress: Progress) -> Checkpoint:
    from oracle.model import hub

    folder = hub.snapshot(source, revision, progress)
    name = source.split("/")[1]
    return _opened(folder, source, name, progress, note="hub", revision=folder.name)


def _default(progress: Progress) -> Checkpoint:
    from oracle.model import default

    folder = cache_folder.made_once(
        default.FOLDER, lambda made: default.make(made, progress=progress)
    )
    found = _converted(folder, DEFAULT, default.NAME, default.NOTE, progress)
    default.require_default(found)
    return found


def _from_gguf(path: Path, source: str, progress: Progress) -> Checkpoint:
    from oracle.model import gguf, gguf_llama

    files = {f.name: Tensor(f, "U8", (), 0, f.stat().st_size) for f in gguf.shards(path)}
    found = list(fingerprint.contents(files, progress=progress).hashes.values())
    digest = found[0] if len(found) == 1 else _digest(found)

    def make(folder: Path) -> None:
        kind, _ = gguf_llama.convert(path, folder, progress=progress)
        lacks = "" if (folder / "tokenizer.json").exists() else ", no tokenizer: give token ids"
        (folder / "note.txt").write_text(f"GGUF {kind}{lacks}", encoding="utf-8")

    # The number goes up when a conversion starts to give other files.
    folder = cache_folder.made_once(f"gguf-1-{digest[:32]}", make)
    note = folder / "note.txt"
    words = note.read_text(encoding="utf-8", errors="replace") if note.exists() else "GGUF"
    name = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    return _converted(folder, source, name, words, progress)


def _converted(folder: Path, source: str, name: str, note: str, progress: Progress) -> Checkpoint:
    """The checkpoint in a folder that was converted here: if it is damaged, deleting it helps."""
    try:
        return _opened(folder, source, name, progress, note=note)
    except Refusal as error:
        if not error.where.startswith(str(folder)):
            raise
        remedy = f"delete {folder} to have it made again"
        raise Refusal(error.what, where=error.where, remedy=remedy) from error

"""The folder of a text: its truth, and what stored caches lose on it. `oracle.formats.text` says
what is in it.

It is made beside its place and renamed, so that it is there whole or not at all; so it is when
SPECs are added: the files that stay are linked. torch is imported only while it is being made.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Required, TypedDict

from oracle import place, sizes
from oracle.folder import require
from oracle.formats import disk, stored, strict_json, text
from oracle.formats.errors import Refusal, brief
from oracle.formats.progress import Note, Progress, silent
from oracle.formats.stored import Affine, Spec
from oracle.formats.text import TEXT, Manifest, Text
from oracle.model.checkpoint import Checkpoint, require_llama, resolve
from oracle.model.tokenizer import check_ids
from oracle.question import check_range, check_run, rough
from oracle.truth.config import Config, checked

_OURS = (TEXT, "truth.safetensors", "stored-*.safetensors")
_DTYPE = "float32"  # of weights: the widest that a checkpoint of half precision or plain has

# Measured on two x86-64 cores with SmolLM2: seconds of imports, float64 operations a second,
# seconds that each logit takes in softmax and sums.
_IMPORTS, _OPERATIONS, _ROW = 5.0, 4e10, 1e-8


class Texting(TypedDict, total=False):
    """The keywords of `make` beside the model and the place."""

    ids: Required[Path]
    specs: Sequence[str]
    threads: int | None
    force: bool
    revision: str | None
    ignore_keys: Sequence[str]


def make(
    model: str | None = None,
    *,
    ids: Path,
    out: Path | str,
    specs: Sequence[str] = (),
    threads: int | None = None,
    force: bool = False,
    revision: str | None = None,
    ignore_keys: Sequence[str] = (),
    progress: Progress = silent,
    note: Note = silent,
) -> Manifest:
    """Makes the folder `out` for a model and the token ids in a JSON file, or adds to it.

    A folder that is there keeps what it holds, and only the SPECs that it lacks are computed; one
    that is damaged, or of something else, is refused unless `force` makes it anew. Returns its
    manifest.
    """
    require("torch")
    out = Path(out).absolute()
    place.check(out, ours=_OURS, force=True)
    check_run(_DTYPE, threads)
    wanted = {spec.name: spec for spec in map(stored.parse, specs)}
    tokens = _read_ids(ids)
    checkpoint = resolve(model, revision=revision, ignore_keys=ignore_keys, progress=progress)
    config = _checked(checkpoint, ids, tokens, wanted)
    kept = None if force else _kept(out, checkpoint, tokens)
    missing = [spec for name, spec in wanted.items() if kept is None or name not in kept.stored]
    if kept is not None and not missing:
        return kept.manifest
    asked = _Asked(checkpoint, config, tuple(tokens), missing, threads)
    note(asked.estimate(known=kept is not None))
    with place.whole(out, ours=_OURS, force=True) as folder:
        manifest = _made(folder, out, asked, kept, progress)
        text.write_manifest(folder, manifest)
    return manifest


@dataclass(frozen=True, slots=True)
class _Asked:
    """A model, a text's tokens, and the SPECs that are to be computed on it."""

    checkpoint: Checkpoint
    config: Config
    tokens: tuple[int, ...]
    specs: Sequence[Spec]
    threads: int | None

    def estimate(self, *, known: bool) -> str:
        """One line: about what it takes, if the truth is known already or not."""
        c, n = self.config, len(self.tokens)
        ways = len(self.specs) + (0 if known else 2)
        megabytes = n * (25 * len(self.specs) + (0 if known else _row_bytes(c))) / 1e6
        what = f"the truth of {n:,} tokens" if not known else f"{n:,} tokens, whose truth is kept,"
        caches = f"{len(self.specs)} stored cache{'s' * (len(self.specs) != 1)}"
        return (
            f"oracle: {what} and {caches}, about {rough(_seconds(c, n, ways))} s, "
            f"{rough(_memory(c, n, ways) / 1e6)} MB of memory and {rough(megabytes)} MB on disk"
        )


def _row_bytes(c: Config) -> int:
    """What a token leaves in the truth's file."""
    return 4 * c.vocab_size + 4 * c.cache_width + 8 * c.hidden + 8


def _seconds(c: Config, n: int, ways: int) -> float:
    sizes = {name: math.prod(shape) for name, shape in c.shapes().items()}
    layers = sum(size for name, size in sizes.items() if name.startswith("model.layers."))
    head = c.vocab_size * c.hidden
    products = 2 * n * (layers + head) + 4 * c.n_layers * n * n * c.n_heads * c.head_dim
    return _IMPORTS + ways * (products / _OPERATIONS + n * c.vocab_size * _ROW)


def _memory(c: Config, n: int, ways: int) -> float:
    """Bytes: those of the truth, its weights of a layer, and six blocks of logits beside a head."""
    logits = 6 * 2**22  # of `oracle.truth.losses`
    layer = 2 * sizes.layer(c) + logits
    return sizes.PROCESS + sizes.truth(c, n, ways=ways, rows=n) + 8 * layer


def _read_ids(path: Path) -> list[int]:
    found = strict_json.read(path, remedy="write the token ids as one JSON list: [504, 3575]")
    if not isinstance(found, list):
        what = f"{brief(found)}, expected one list of token ids"
        raise Refusal(what, where=path, remedy="write them as [504, 3575]")
    return found


def _checked(
    checkpoint: Checkpoint, ids: Path, tokens: Sequence[int], specs: Mapping[str, Spec]
) -> Config:
    """The model's config, once it has a truth, a place for each token, and groups for each SPEC."""
    require_llama(checkpoint)
    config = checked(checkpoint)
    check_range(checkpoint, _DTYPE)
    try:
        check_ids(tokens, vocab_size=config.vocab_size, max_positions=config.max_positions)
    except Refusal as error:
        raise Refusal(error.what, where=f"{ids}: {error.where}", remedy=error.remedy) from error
    if len(tokens) < text.LEAST:
        what = f"{len(tokens)} of them, expected at least {text.LEAST}, as none follows the last"
        raise Refusal(what, where=f"{ids}: tokens", remedy="take a longer text")
    for name, spec in specs.items():
        if isinstance(spec, Affine) and config.head_dim % spec.group_size:
            what = f"group_size is {spec.group_size}, expected a divisor of head_dim"
            remedy = "leave it out: MLX quantises whole groups of a head"
            raise Refusal(f"{what} {config.head_dim}", where=f"--stored {name}", remedy=remedy)
    return config


def _kept(out: Path, checkpoint: Checkpoint, tokens: Sequence[int]) -> Text | None:
    """What the folder holds, once it is found whole and of the same; None where there is none."""
    if not out.is_dir() or not any(out.iterdir()):
        return None
    found = text.read(out)
    weights, config = checkpoint.fingerprint, checkpoint.config_digest
    text.require(found.manifest, out, weights=weights, config=config, tokens=tokens)
    return found


def _made(
    folder: Path, out: Path, asked: _Asked, kept: Text | None, progress: Progress
) -> Manifest:
    """Fills an empty folder, with what `out` holds and with what is asked; returns its manifest."""
    progress("loading torch", 0, 1)
    import torch

    from oracle.truth import losses
    from oracle.truth.weights import Weights

    torch.set_num_threads(asked.threads or os.cpu_count() or 1)
    files = [] if kept is None else list(kept.manifest.files)
    for name in files:
        disk.linked(out / name, folder / name)
    free = (name for i in itertools.count() if (name := f"stored-{i}.safetensors") not in files)
    specs = dict(zip(free, asked.specs, strict=False))
    given = losses.Asked(
        weights=Weights(asked.checkpoint, dtype=_DTYPE),
        config=asked.config,
        tokens=asked.tokens,
        stored=specs,
    )
    known = None if kept is None else kept.hidden
    proofs = losses.write(folder, given, known=known, progress=progress)
    before = _begun(asked, proofs) if kept is None else kept.manifest
    new = [path.name for path in sorted(folder.iterdir()) if path.name not in before.files]
    return replace(
        before,
        files=before.files | {name: disk.sha256(folder / name) for name in new},
        stored=before.stored | {spec.name: file for file, spec in specs.items()},
    )


def _begun(asked: _Asked, proofs: dict[str, float]) -> Manifest:
    """The manifest of a folder before its files are listed."""
    import torch

    c = asked.checkpoint
    named = "source", "name", "note", "revision", "fingerprint", "config_digest"
    return Manifest(
        **{name: getattr(c, name) for name in named},
        ignored_keys=list(c.without),
        tokens=list(asked.tokens),
        inputs=text.inputs(c.fingerprint, c.config_digest, asked.tokens),
        files={},
        stored={},
        proofs=proofs,
        environment={
            "os": " ".join([platform.system(), *platform.libc_ver()]),
            "arch": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "rope": asked.config.rope,
        },
    )

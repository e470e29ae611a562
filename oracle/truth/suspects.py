"""The usual suspects: the truth of a run folder again, each time with a mistake that engines make.

A wrong engine whose logits are those of one of them has very probably made that mistake. All are
followed at once, a layer's weights at a time. The first positions are enough to tell them apart:
what a position is given depends on nothing after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oracle.formats import disk, run_folder, trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, New, Plan
from oracle.formats.progress import Progress, silent
from oracle.formats.run_folder import Manifest
from oracle.model.checkpoint import Checkpoint, require_llama, resolve
from oracle.truth import llama
from oracle.truth.config import Config, checked
from oracle.truth.weights import DTYPES, EMBEDDING, HEAD, NORM, Weights

FORMAT = "mlxkv-suspects/1"
# Some 12 MB a suspect with a vocabulary of 49152, and as many as transformers' .double() is asked
# for in the truth's second proof.
POSITIONS = 32
_THETAS = (10000.0, 500000.0, 1000000.0)
_EPSILONS = (1e-6, 1e-5, 1e-8)
_ROUNDED = {"float16": "F16", "bfloat16": "BF16"}
_GROUPS = {
    "all": re.compile("."),
    "attention": re.compile(r"\.self_attn\."),
    "mlp": re.compile(r"\.mlp\."),
    "embedding": re.compile(r"embed_tokens|lm_head"),
}
Change = Callable[[str, Tensor], Tensor]
_QUERIES_AND_KEYS = re.compile(r"\.self_attn\.[qk]_proj\.")


@dataclass(frozen=True, slots=True)
class Suspect:
    """One mistake: the config that it amounts to, and what it does to the weights."""

    name: str
    words: str
    config: Config
    change: Change | None = None

    def changed(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor as the mistaken engine has it."""
        return tensor if self.change is None else self.change(name, tensor)

    @property
    def head(self) -> str:
        """The name of the matrix that makes logits."""
        return EMBEDDING if self.config.tied else HEAD


def usual(config: Config, *, dtype: str, stored: frozenset[str]) -> list[Suspect]:
    """All that differ from what `config`, the run's `dtype` and the `stored` dtypes say."""
    found = [*_constants(config), *_orders(config), *_losses(config)]
    found = [suspect for suspect in found if suspect.change or suspect.config != config]
    for to, kind in _ROUNDED.items():
        if dtype != to and stored != {kind}:
            for group in _GROUPS:
                words = f"{group} weights rounded to {to}"
                found.append(Suspect(f"{to}-{group}", words, config, _rounding(to, group)))
    return found


def _constants(config: Config) -> Iterator[Suspect]:
    for theta in _THETAS:
        words = _instead("rope_theta", theta, config.theta)
        yield Suspect(f"rope_theta-{theta:.0f}", words, replace(config, theta=theta))
    for eps in _EPSILONS:
        words = _instead("rms_norm_eps", eps, config.eps)
        yield Suspect(f"rms_norm_eps-{_short(eps)}", words, replace(config, eps=eps))


def _orders(config: Config) -> Iterator[Suspect]:
    words = "interleaved RoPE: pairs (2i, 2i + 1) turned instead of split halves"
    yield Suspect("interleaved", words, replace(config, interleaved=True))
    words = (
        "q and k rows of each head in the order 0, head_dim / 2, 1, ... of Meta's and GGUF files"
    )
    yield Suspect("paired-rows", f"{words}, not undone", config, _paired(config.head_dim))


def _losses(config: Config) -> Iterator[Suspect]:
    """What an engine loses if it does not read a key of the config."""
    plain, theta = replace(config, scaling=None), _THETAS[0]
    yield Suspect("scaling-lost", "RoPE scaling lost: the type is default", plain)
    if config.scaling is not None and config.theta != theta:
        words = f"RoPE lost whole: type default, and {_instead('rope_theta', theta, config.theta)}"
        yield Suspect("rope-lost", words, replace(plain, theta=theta))
    words = "lm_head tied to the embedding, its own weights lost"
    yield Suspect("head-tied", words, replace(config, tied=True))


def write(
    folder: Path,
    out: Path,
    *,
    model: str | None = None,
    revision: str | None = None,
    progress: Progress = silent,
) -> None:
    """One trace a suspect into `out`, then `suspects.json`; `model` None: the one of the folder."""
    manifest = run_folder.read_manifest(folder)
    source = manifest.source if model is None else model
    revision = manifest.revision if model is None else revision
    checkpoint = resolve(source, revision=revision, progress=progress)
    config = _config(checkpoint, manifest)
    weights = Weights(checkpoint, dtype=manifest.dtype)
    stored = frozenset(tensor.dtype for tensor in checkpoint.tensors.values())
    suspects = usual(config, dtype=manifest.dtype, stored=stored)
    plan = Plan("full", (New("a"), Call("a", tuple(manifest.tokens[:POSITIONS]), 0)))
    hidden = _follow(weights, config, suspects, manifest.tokens[:POSITIONS], progress)
    written = _write_all(out, weights, suspects, plan, hidden)
    value = {
        "format": FORMAT,
        "inputs": run_folder.suspects_digest(manifest),
        "fingerprint": manifest.fingerprint,
        "suspects": [_listed(s, written[s.name]) for s in suspects if s.name in written],
    }
    disk.write_text(out / "suspects.json", json.dumps(value, indent=1) + "\n")


def _listed(suspect: Suspect, path: Path) -> dict[str, str]:
    digest = disk.sha256(path)
    return {"name": suspect.name, "words": suspect.words, "file": path.name, "sha256": digest}


def _config(checkpoint: Checkpoint, manifest: Manifest) -> Config:
    for what, found, expected in (
        ("weights", checkpoint.fingerprint, manifest.fingerprint),
        ("config", checkpoint.config_digest, manifest.config_digest),
    ):
        if found != expected:
            differ = f"{what} {found[:16]}, expected {expected[:16]} as in the run folder"
            remedy = "name the model it was made with"
            raise Refusal(differ, where=checkpoint.folder, remedy=remedy)
    require_llama(checkpoint)
    return checked(checkpoint)


@torch.inference_mode()
def _follow(
    weights: Weights, config: Config, suspects: list[Suspect], ids: list[int], progress: Progress
) -> list[Tensor]:
    """What enters each suspect's head, (n, E)."""
    n = len(ids)
    embedded, norm = weights(EMBEDDING, rows=torch.tensor(ids)), weights(NORM)
    hidden = [s.changed(EMBEDDING, embedded).clone() for s in suspects]
    streams = [llama.Stream([(0, n)], x) for x in hidden]
    tables = [llama.rope_tables(s.config, n) for s in suspects]
    for i in range(config.n_layers):
        progress("usual suspects (float64), layers", i, config.n_layers)
        layer = weights.layer(config, i)
        for suspect, stream, table in zip(suspects, streams, tables, strict=True):
            prefix = f"model.layers.{i}."
            changed = {name: suspect.changed(prefix + name, t) for name, t in layer.items()}
            llama.Layer(suspect.config, changed, table).run(stream, {})
    return [
        llama.rms_norm(stream.hidden, s.changed(NORM, norm), s.config.eps)
        for s, stream in zip(suspects, streams, strict=True)
    ]


@torch.inference_mode()
def _write_all(
    out: Path, weights: Weights, suspects: list[Suspect], plan: Plan, hidden: list[Tensor]
) -> dict[str, Path]:
    """The files by suspect. A mistake that makes infinities has none: it is seen without one."""
    written = {}
    for name in sorted({s.head for s in suspects}):
        head = weights(name)
        for s, x in zip(suspects, hidden, strict=True):
            path = out / f"{s.name}.safetensors"
            if s.head == name and _write_one(path, weights, s, plan, x, s.changed(name, head)):
                written[s.name] = path
    return written


def _write_one(
    path: Path, weights: Weights, suspect: Suspect, plan: Plan, hidden: Tensor, head: Tensor
) -> bool:
    n, engine = len(hidden), f"truth with {suspect.words}"
    digest, dtypes = weights.checkpoint.fingerprint, ("float64", weights.dtype)
    meta = trace.Meta(plan, engine, torch.__version__, *dtypes, fingerprint=digest)
    shapes = {"logits": (np.float64, (n, len(head))), "positions": (np.int32, (n,))}
    with trace.writer(path, meta, shapes) as file:
        try:
            llama.write_logits({suspect.name: hidden}, head, file.arrays["logits"])
        except Refusal:
            return False
        file.arrays["positions"][...] = np.arange(n)
        file.finish(meta.to_json())
    return True


def _paired(head_dim: int) -> Change:
    def change(name: str, tensor: Tensor) -> Tensor:
        if not _QUERIES_AND_KEYS.search(name):
            return tensor
        halves = tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)

    return change


def _rounding(dtype: str, group: str) -> Change:
    def change(name: str, tensor: Tensor) -> Tensor:
        if not _GROUPS[group].search(name):
            return tensor
        return tensor.to(DTYPES[dtype]).to(tensor.dtype)

    return change


def _instead(key: str, value: float, right: float) -> str:
    return f"{key} {_short(value)} instead of {_short(right)}"


def _short(value: float) -> str:
    """As people write it: 10000, 1e-5."""
    return f"{value:.0f}" if value == int(value) else re.sub(r"e-0(\d)$", r"e-\1", repr(value))

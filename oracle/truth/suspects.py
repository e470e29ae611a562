"""The usual suspects: the truth of a run folder once more, each time with one mistake that engines often make.

A wrong engine whose logits are those of one of them has very probably made that mistake. All are followed at once, a
layer's weights at a time, over the first positions only, which are enough to tell them apart: what a position is given
depends on nothing after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oracle.formats import disk, run_folder, trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, New, Plan
from oracle.formats.run_folder import Manifest
from oracle.model.checkpoint import Checkpoint, require_llama, resolve
from oracle.truth import llama as truth
from oracle.truth.config import Config, check_weights, config_of

FORMAT = "mlxkv-suspects/1"
POSITIONS = 32  # some 12 MB a suspect with a vocabulary of 49152, and as far as transformers' .double() is asked for the proof
_THETAS = (10000.0, 500000.0, 1000000.0)
_EPSILONS = (1e-6, 1e-5, 1e-8)
_ROUNDED = {"float16": "F16", "bfloat16": "BF16"}
_GROUPS = {
    "all": re.compile("."),
    "attention": re.compile(r"\.self_attn\."),
    "mlp": re.compile(r"\.mlp\."),
    "embedding": re.compile(r"embed_tokens|lm_head"),
}
_QUERIES_AND_KEYS = re.compile(r"\.self_attn\.[qk]_proj\.")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Suspect:
    """One mistake: the config that it amounts to, and what it does to the weights."""

    name: str
    words: str
    config: Config
    change: truth.Change | None = None


def usual(config: Config, *, dtype: str, stored: frozenset[str]) -> list[Suspect]:
    """Those that are not simply what `config`, the run's `dtype` and the `stored` dtypes already say."""
    found = [
        Suspect(
            f"rope_theta-{theta:.0f}",
            _instead("rope_theta", theta, config.theta),
            _theta(config, theta),
        )
        for theta in _THETAS
    ]
    found += [
        Suspect(
            f"rms_norm_eps-{_short(eps)}",
            _instead("rms_norm_eps", eps, config.eps),
            replace(config, eps=eps),
        )
        for eps in _EPSILONS
    ]
    found.append(
        Suspect(
            "interleaved",
            "interleaved RoPE: pairs (2i, 2i + 1) turned instead of split halves",
            replace(config, interleaved=True),
        )
    )
    words = "q and k rows of each head in the order 0, head_dim / 2, 1, ... of Meta's and GGUF files, not undone"
    found.append(Suspect("paired-rows", words, config, _paired(config.head_dim)))
    if config.scaling is not None:
        found.append(
            Suspect(
                "scaling-lost",
                "RoPE scaling lost: the type is default",
                replace(config, scaling=None),
            )
        )
        if config.theta != _THETAS[0]:
            words = f"RoPE lost whole: type default, and {_instead('rope_theta', _THETAS[0], config.theta)}"
            found.append(
                Suspect("rope-lost", words, replace(_theta(config, _THETAS[0]), scaling=None))
            )
    if not config.tied:
        found.append(
            Suspect(
                "head-tied",
                "lm_head tied to the embedding, its own weights lost",
                replace(config, tied=True),
            )
        )
    found = [suspect for suspect in found if suspect.change or suspect.config != config]
    for to, kind in _ROUNDED.items():
        if dtype != to and stored != {kind}:
            found += [
                Suspect(
                    f"{to}-{group}",
                    f"{group} weights rounded to {to}",
                    config,
                    _rounding(to, group),
                )
                for group in _GROUPS
            ]
    return found


def write(
    folder: Path,
    out: Path,
    *,
    model: str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> None:
    """One trace a suspect into `out`, and last `suspects.json`, which names them all. `model` must be the run folder's."""
    manifest = run_folder.read_manifest(folder)
    checkpoint = resolve(
        model or manifest.source,
        revision=revision if model else manifest.revision,
        progress=progress,
    )
    config = _config(checkpoint, manifest)
    weights = truth.Weights(checkpoint, dtype=manifest.dtype)
    suspects = usual(
        config, dtype=manifest.dtype, stored=frozenset(t.dtype for t in checkpoint.tensors.values())
    )
    ids = manifest.tokens[:POSITIONS]
    streams = _follow(weights, config, suspects, ids, progress or (lambda what, done, total: None))
    written = _write_all(out, weights, suspects, ids, streams)
    listed = [
        {
            "name": s.name,
            "words": s.words,
            "file": written[s.name].name,
            "sha256": disk.sha256(written[s.name]),
        }
        for s in suspects
        if s.name in written
    ]
    value = {
        "format": FORMAT,
        "inputs": run_folder.suspects_digest(manifest),
        "fingerprint": manifest.fingerprint,
        "suspects": listed,
    }
    disk.write_text(out / "suspects.json", json.dumps(value, indent=1) + "\n")


def _config(checkpoint: Checkpoint, manifest: Manifest) -> Config:
    for what, found, expected in (
        ("weights", checkpoint.fingerprint, manifest.fingerprint),
        ("config", checkpoint.config_digest, manifest.config_digest),
    ):
        if found != expected:
            raise Refusal(
                f"{checkpoint.folder}: {what} {found[:16]}, expected {expected[:16]} as in the run folder; name the model it was made with"
            )
    require_llama(checkpoint)
    config = config_of(checkpoint)
    check_weights(config, checkpoint)
    return config


@torch.inference_mode()
def _follow(
    weights: truth.Weights, config: Config, suspects: list[Suspect], ids: list[int], tell: Progress
) -> list[Tensor]:
    """What enters each suspect's head, (n, E)."""
    n = len(ids)
    embedded = weights("model.embed_tokens.weight", rows=torch.tensor(ids))
    streams = [
        truth.Stream([(0, n)], _changed(s, "model.embed_tokens.weight", embedded).clone())
        for s in suspects
    ]
    tables = [truth.rope_tables(s.config, n) for s in suspects]
    for i in range(config.n_layers):
        tell("usual suspects (float64), layers", i, config.n_layers)
        layer = weights.layer(config, i)
        for suspect, stream, table in zip(suspects, streams, tables, strict=True):
            changed = {
                name: _changed(suspect, f"model.layers.{i}.{name}", tensor)
                for name, tensor in layer.items()
            }
            truth.Layer(suspect.config, changed, table).run(stream, {})
    norm = weights("model.norm.weight")
    return [
        truth.rms_norm(stream.hidden, _changed(s, "model.norm.weight", norm), s.config.eps)
        for s, stream in zip(suspects, streams, strict=True)
    ]


@torch.inference_mode()
def _write_all(
    out: Path,
    weights: truth.Weights,
    suspects: list[Suspect],
    ids: list[int],
    streams: list[Tensor],
) -> dict[str, Path]:
    """The files by suspect, each head read once. A mistake that makes infinities is left out: it is seen without a suspect."""
    written = {}
    heads = [
        (suspect, "model.embed_tokens.weight" if suspect.config.tied else "lm_head.weight")
        for suspect in suspects
    ]
    for name in sorted({head for _, head in heads}):
        head = weights(name)
        for (suspect, its), hidden in zip(heads, streams, strict=True):
            if its == name and _write_one(
                out / f"{suspect.name}.safetensors",
                weights,
                suspect,
                ids,
                hidden,
                _changed(suspect, name, head),
            ):
                written[suspect.name] = out / f"{suspect.name}.safetensors"
    return written


def _write_one(
    path: Path,
    weights: truth.Weights,
    suspect: Suspect,
    ids: list[int],
    hidden: Tensor,
    head: Tensor,
) -> bool:
    n, plan = len(ids), Plan("full", (New("a"), Call("a", tuple(ids), 0)))
    engine, fingerprint = f"truth with {suspect.words}", weights.checkpoint.fingerprint
    meta = trace.Meta(
        plan, engine, torch.__version__, "float64", weights.dtype, fingerprint=fingerprint
    )
    shapes: dict[str, tuple[type, tuple[int, ...]]] = {
        "logits": (np.float64, (n, len(head))),
        "positions": (np.int32, (n,)),
    }
    with trace.writer(path, meta, shapes) as file:
        try:
            truth.write_logits({suspect.name: hidden}, head, file.arrays["logits"])
        except Refusal:
            return False
        file.arrays["positions"][...] = np.arange(n)
        file.finish(meta.to_json())
    return True


def _changed(suspect: Suspect, name: str, tensor: Tensor) -> Tensor:
    return tensor if suspect.change is None else suspect.change(name, tensor)


def _theta(config: Config, theta: float) -> Config:
    return replace(config, theta=theta)


def _paired(head_dim: int) -> truth.Change:
    def change(name: str, tensor: Tensor) -> Tensor:
        if not _QUERIES_AND_KEYS.search(name):
            return tensor
        return (
            tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:])
            .transpose(1, 2)
            .reshape(tensor.shape)
        )

    return change


def _rounding(dtype: str, group: str) -> truth.Change:
    def change(name: str, tensor: Tensor) -> Tensor:
        return (
            tensor.to(truth.DTYPES[dtype]).to(tensor.dtype)
            if _GROUPS[group].search(name)
            else tensor
        )

    return change


def _instead(key: str, value: float, right: float) -> str:
    return f"{key} {_short(value)} instead of {_short(right)}"


def _short(value: Any) -> str:
    """As people write it: 10000, 1e-5."""
    return f"{value:.0f}" if value == int(value) else re.sub(r"e-0(\d)$", r"e-\1", repr(value))

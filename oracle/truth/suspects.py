"""The usual suspects: the truth of a run folder again, each time with a mistake that engines make.

A wrong engine whose logits are those of one of them has very probably made that mistake; and a
mistake whose errors lie within a run's limits is one that the run cannot see. Of each suspect its
errors are kept, and of its logits a sample of columns. All are followed at once, as many rows of
one matrix product: a row for each suspect and position.

Axes: S suspects, n positions, R = S n rows, C sampled columns; the others as in `llama`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from oracle.formats import disk, run_folder, tensors, trace
from oracle.formats.errors import Refusal
from oracle.formats.progress import Progress, silent
from oracle.formats.run_folder import Manifest
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace
from oracle.model.checkpoint import Checkpoint, require_llama, resolve
from oracle.truth import llama
from oracle.truth.config import Config, checked
from oracle.truth.mistakes import Change, Spans, Suspect, View, in_calls, usual
from oracle.truth.weights import EMBEDDING, NORM, Weights

FORMAT = "mlxkv-suspects/2"
ARRAYS = "suspects.safetensors"
COLUMNS = 1024
"""Logits that are kept of each row, in float32: its rounding adds 0.3 at most to a sigma, whose
limit is 8, as no floor is below one unit in the last place of a row's largest logit."""
LEAST, MOST = 32, 128
"""Positions that are followed: as many as `_WORK` allows between these."""
_WORK = 250_000_000_000  # rows times parameters: 44 suspects of 42 positions on SmolLM2
_BLOCK = 2**23  # float64 logits at once: 64 MB
_SAME = 1e-10  # of the largest logit: two ways of adding up in float64 are 1e-14 apart


def write(
    folder: Path,
    out: Path,
    *,
    plan: str = "full",
    model: str | None = None,
    revision: str | None = None,
    progress: Progress = silent,
) -> None:
    """The suspects of a run folder into `out`; those at the borders of calls in full and `plan`.

    `model` None: the one of the folder.
    """
    manifest = run_folder.read_manifest(folder)
    source = manifest.source if model is None else model
    revision = manifest.revision if model is None else revision
    checkpoint = resolve(source, revision=revision, progress=progress)
    config = _config(checkpoint, manifest)
    weights = Weights(checkpoint, dtype=manifest.dtype)
    stored = frozenset(tensor.dtype for tensor in checkpoint.tensors.values())
    known = usual(config, dtype=manifest.dtype, stored=stored)
    calls = {name: _spans(folder, manifest, name) for name in dict.fromkeys(("full", plan))}
    right = trace.read(folder / run_folder.TRUTH)
    n = min(_leading(right), MOST)
    each = len(known + _at_borders(config, calls, n, manifest.dtype)) * checkpoint.parameters
    n = min(n, max(LEAST, _WORK // each))
    suspects = known + _at_borders(config, calls, n, manifest.dtype)
    arrays = _arrays(weights, Rows(config, suspects, n, tuple(manifest.tokens)), right, progress)
    _write(out, manifest, plan, config, suspects, arrays)


def _leading(right: Trace) -> int:
    """How many positions from the start on have a row of logits: of a sample not all have."""
    rows = np.arange(len(right.positions))
    return int(np.count_nonzero(np.cumprod(right.positions == rows)))


def _spans(folder: Path, manifest: Manifest, plan: str) -> list[tuple[int, int]]:
    """The calls of a plan that feed the sequence through one cache; none of another plan."""
    if plan not in manifest.plans:
        return []
    calls = list(run_folder.read_plans(folder, manifest)[plan].calls())
    spans = [(call.held, call.held + call.fed) for call in calls if call.keeps]
    return spans if spans and spans[-1][1] == len(manifest.tokens) else []


def _at_borders(config: Config, calls: Mapping[str, Spans], n: int, dtype: str) -> list[Suspect]:
    """The mistakes at the borders of each plan's calls, as the first n positions show them.

    A mask that lets later tokens be seen needs each call whole.
    """
    found = []
    for plan, spans in calls.items():
        first = [(start, min(stop, n)) for start, stop in spans if start < n]
        whole = any(stop == n for _, stop in spans)
        of = in_calls(config, plan, first, dtype=dtype) if first else []
        found += [s for s in of if whole or s.view.mask is None]
    return found


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


@dataclass(frozen=True)
class Rows:
    """R rows: the first n tokens of each suspect in turn."""

    config: Config
    suspects: list[Suspect]
    n: int
    tokens: tuple[int, ...]

    def alike(self, *names: str) -> Iterator[tuple[tuple[Change | None, ...], Tensor]]:
        """What is made of the tensors of these names, and the rows for which it is the same."""
        groups: dict[tuple[Change | None, ...], list[int]] = {}
        for i, suspect in enumerate(self.suspects):
            changes = tuple(suspect.changes(name) for name in names)
            groups.setdefault(changes, []).append(i)
        for changes, members in groups.items():
            yield changes, (torch.tensor(members)[:, None] * self.n + torch.arange(self.n)).ravel()

    def norm(self, x: Tensor, name: str, weight: Tensor) -> Tensor:
        """RMSNorm of x (R, E), each row with its suspect's eps and weight."""
        eps = torch.tensor([s.config.eps for s in self.suspects], dtype=torch.float64)
        eps, out = eps.repeat_interleave(self.n)[:, None], torch.empty_like(x)
        for (change,), at in self.alike(name):
            out[at] = llama.rms_norm(x[at], _changed(change, name, weight), eps[at])
        return out

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin, each (R, D / 2)."""
        first = torch.arange(self.n)
        each = [
            llama.rope_tables(
                s.config,
                len(self.tokens),  # not n: longrope's factors are those of the whole sequence
                at=first if s.view.positions is None else s.view.positions,
            )
            for s in self.suspects
        ]
        cos, sin = (torch.cat(tables) for tables in zip(*each, strict=True))
        return cos, sin


class _Layer(llama.Layer):
    """One layer of all suspects at once, over R rows.

    Rows for which a tensor is the same are multiplied together: 24 rows alone take as long as ten
    times as many.
    """

    def __init__(self, rows: Rows, prefix: str, weights: Mapping[str, Tensor]) -> None:
        super().__init__(rows.config, weights, rows.tables)
        self.rows, self.prefix = rows, prefix

    def _linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        names = [f"{self.prefix}{name}.{part}" for part in ("weight", "bias")]
        out = x.new_empty(len(x), len(weight))
        for (of_weight, of_bias), at in self.rows.alike(*names):
            changed = _changed(of_weight, names[0], weight)
            added = None if bias is None else _changed(of_bias, names[1], bias)
            out[at] = linear(x[at], changed, added)
        return out

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return self.rows.norm(x, f"{self.prefix}{name}.weight", weight)

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        turned = llama.rotate(x, *self.tables)
        for i, suspect in enumerate(self.rows.suspects):
            if suspect.config.interleaved:
                at = slice(i * self.rows.n, (i + 1) * self.rows.n)
                cos, sin = (table[at] for table in self.tables)
                turned[:, at] = llama.rotate(x[:, at], cos, sin, interleaved=True)
        return turned

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, start: int, seen: dict[str, Any]
    ) -> Tensor:
        out, n = [], self.rows.n
        for i, suspect in enumerate(self.rows.suspects):
            its = (t[:, i * n : (i + 1) * n] for t in (queries, keys, values))
            out.append(_attend(suspect.view, *its))
        return torch.cat(out)


def _attend(view: View, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention as a suspect sees it; what its cache makes of keys and values replaces them."""
    if view.mask is None and view.kept is None:
        return llama.attend(queries, keys, values, start=0)
    (H, n, D), K = queries.shape, len(keys)
    kept = [t if view.kept is None else view.kept(t) for t in (keys, values)]
    fresh = torch.zeros(n, n, dtype=torch.bool) if view.fresh is None else view.fresh
    grouped = queries.reshape(K, H // K, n, D) / math.sqrt(D)
    as_made, as_kept = (grouped @ t[:, None].transpose(-1, -2) for t in (keys, kept[0]))
    scores = torch.where(fresh, as_made, as_kept)  # [K, G, n, n]
    if view.mask is None:
        scores = scores.masked_fill(llama.hides(0, n, n), -math.inf)
    else:
        scores = scores + view.mask
    shares = torch.softmax(scores, dim=-1)
    mixed = (shares * fresh) @ values[:, None] + (shares * ~fresh) @ kept[1][:, None]
    keys[...], values[...] = kept
    return mixed.flatten(0, 1).transpose(0, 1).reshape(n, H * D)


def _changed(change: Change | None, name: str, tensor: Tensor) -> Tensor:
    return tensor if change is None else change(name, tensor)


@torch.inference_mode()
def _arrays(weights: Weights, rows: Rows, right: Trace, progress: Progress) -> dict[str, Array]:
    """What is kept of the suspects, S the first axis of each array."""
    config, n, R = rows.config, rows.n, rows.n * len(rows.suspects)
    embedded = weights(EMBEDDING, rows=torch.tensor(rows.tokens[:n]))
    stream = llama.Stream([(0, R)], torch.empty(R, config.hidden, dtype=torch.float64))
    for (change,), at in rows.alike(EMBEDDING):
        stream.hidden[at] = _changed(change, EMBEDDING, embedded).repeat(len(at) // n, 1)
    cache = []
    for i in range(config.n_layers):
        progress("usual suspects (float64), layers", i, config.n_layers)
        made = _Layer(rows, f"model.layers.{i}.", weights.layer(config, i)).run(stream, {})
        both = zip(made, right.kv("a", i) or (), strict=True)
        cache.append([_apart(mine, its, n) for mine, its in both])
    hidden = rows.norm(stream.hidden, NORM, weights(NORM))
    found = _logits(weights, rows, hidden, right)
    return found | {"cache": np.stack([np.stack(pair, 1) for pair in cache], 2)}


def _apart(mine: Tensor, its: Array, n: int) -> Array:
    """rms over D of the suspects' keys or values (K, R, D) against the truth's: (S, K, n)."""
    K, _, D = mine.shape
    e = mine.view(K, -1, n, D) - torch.from_numpy(its[:, :n].copy())[:, None]
    return np.asarray(e.square().mean(-1).sqrt().transpose(0, 1).to(torch.float32))


def _logits(weights: Weights, rows: Rows, hidden: Tensor, right: Trace) -> dict[str, Array]:
    """The errors of the logits, each (S, n), and the sampled ones."""
    n, R, V = rows.n, len(hidden), right.logits.shape[1]
    sampled = columns(V)
    true = torch.from_numpy(right.logits[:n].copy())
    errors = {name: torch.empty(R, dtype=torch.float64) for name in ("rms", "shift", "peak")}
    sample = torch.empty(R, len(sampled), dtype=torch.float32)
    for name in sorted({s.head for s in rows.suspects}):
        head = weights(name)
        its = torch.tensor([s.head == name for s in rows.suspects]).repeat_interleave(n)
        for (change,), at in rows.alike(name):
            changed = _changed(change, name, head)
            mine, step = at[its[at]], max(1, _BLOCK // V)
            for start in range(0, len(mine), step):
                block = mine[start : start + step]
                logits = hidden[block] @ changed.T
                sample[block] = logits[:, sampled].to(torch.float32)
                e = logits - true[block % n]
                errors["shift"][block] = shift = e.mean(1)
                e -= shift[:, None]
                errors["rms"][block] = e.square().mean(1).sqrt()
                errors["peak"][block] = e.abs().amax(1)
    found = {name: of.view(-1, n).numpy() for name, of in errors.items()}
    return found | {"logits": sample.view(-1, n, len(sampled)).numpy()}


def columns(vocab: int) -> Array:
    """The columns of logits that are kept, spread over the vocabulary."""
    return np.linspace(0, vocab - 1, min(vocab, COLUMNS)).round().astype(np.int32)


def _listed(config: Config, suspects: list[Suspect], arrays: Mapping[str, Array]) -> dict[int, str]:
    """Which are written, with their words: no infinities, which are seen without a suspect.

    A change of weights or of attention that changes no logit is no mistake on this model. Of those
    that are the same here only the first is written, with the words of all.
    """
    errors = np.stack([arrays[name] for name in ("rms", "shift", "peak")], axis=1)
    finite, found = np.isfinite(errors).all((1, 2)), dict[int, str]()
    apart = _SAME * float(np.abs(arrays["logits"][finite]).max(initial=0.0))
    for i, suspect in enumerate(suspects):
        alike = [j for j in found if np.abs(errors[j] - errors[i]).max() <= apart]
        silent = np.abs(errors[i]).max() <= apart
        again = [j for j in alike if suspects[j].plan == suspect.plan and not silent]
        idle = silent and suspect.config == config
        for j in again[:1]:
            found[j] += f", or {suspect.words}"
        if finite[i] and not again and not idle:
            found[i] = suspect.words
    return found


def _write(
    out: Path,
    manifest: Manifest,
    plan: str,
    config: Config,
    suspects: list[Suspect],
    arrays: dict[str, Array],
) -> None:
    keep = _listed(config, suspects, arrays)
    kept = {name: np.ascontiguousarray(array[list(keep)]) for name, array in arrays.items()}
    n = len(manifest.tokens)
    # What a change of theta makes of the frequencies, where it is not its plain power.
    near = llama.inverse_frequencies(replace(config, theta=config.theta * (1 + 1e-6)), n)
    frequencies = llama.inverse_frequencies(config, n)
    kept |= {
        "columns": columns(config.vocab_size),
        "frequencies": frequencies.numpy(),
        "powers": ((near / frequencies).log() / math.log1p(1e-6)).numpy(),
    }
    tensors.write(out / ARRAYS, kept, {"format": FORMAT})
    value = {
        "format": FORMAT,
        "inputs": run_folder.suspects_digest(manifest, plan),
        "fingerprint": manifest.fingerprint,
        "theta": config.theta,
        "sha256": disk.sha256(out / ARRAYS),
        "suspects": [
            {"name": s.name, "words": words, "plan": s.plan, "rough": s.rough}
            for words, s in ((words, suspects[i]) for i, words in keep.items())
        ],
    }
    disk.write_text(out / "suspects.json", json.dumps(value, indent=1) + "\n")

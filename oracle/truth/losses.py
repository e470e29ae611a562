"""The truth of a text and what stored caches lose, written to files a block of rows at a time.

Nothing of (n, V) stands in memory: logits of a block go to the mapped file in float32, and those of
every other way are reduced to a few numbers a row.

Axes: n tokens, E hidden, V vocabulary; R rows of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oracle.formats import tensors, text
from oracle.formats.errors import Refusal
from oracle.formats.progress import Progress, silent
from oracle.formats.run_folder import TRUTH
from oracle.formats.stored import Spec
from oracle.formats.tensors import Array
from oracle.formats.text import Lost
from oracle.truth import llama
from oracle.truth.config import Config
from oracle.truth.stored import Layer
from oracle.truth.weights import HEAD_BLOCK, Weights

_BLOCK = 2**22  # float64 logits of one block: 32 MB, of which six stand in memory at once
_WHOLE, _CHUNKED = "truth", "truth in chunks"
_CHUNK = 64  # tokens of a call, as the cost of caches is measured by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The text, and the SPECs to be measured on it, by the name of each one's file."""

    weights: Weights
    config: Config
    tokens: Sequence[int]
    stored: Mapping[str, Spec]

    @property
    def ways(self) -> dict[str, list[int]]:
        """How each SPEC's cache is filled: whole."""
        return {spec.name: [len(self.tokens)] for spec in self.stored.values()}


@torch.inference_mode()
def write(
    folder: Path, asked: Asked, *, known: Array | None = None, progress: Progress = silent
) -> dict[str, float]:
    """Writes the file of each SPEC, and the truth's unless its hidden states (n, E) are `known`.

    Returns the truth's proofs; of a truth that is known there are none.
    """
    if known is not None:
        hidden = _followed(asked, asked.ways, None, progress)
        lost, proofs = _reduced(asked, hidden | {_WHOLE: torch.tensor(known)}, None, progress)
    else:
        c, n = asked.config, len(asked.tokens)
        sizes = {"vocab": c.vocab_size, "hidden": c.hidden}
        shapes = text.shapes(n, cache=(c.n_layers, c.n_kv_heads, c.head_dim), **sizes)
        ways = {_WHOLE: [n]} | asked.ways | {_CHUNKED: _chunks(n)}
        with tensors.writer(folder / TRUTH, shapes) as out:
            hidden = _followed(asked, ways, out.arrays, progress)
            out.arrays["hidden"][...] = hidden[_WHOLE].numpy()
            lost, proofs = _reduced(asked, hidden, out.arrays, progress)
            out.finish(text.about("truth"))
    for file, spec in asked.stored.items():
        text.write_arrays(folder / file, lost[spec.name], of=spec.name)
    return proofs


def _followed(
    asked: Asked,
    ways: Mapping[str, Sequence[int]],
    out: Mapping[str, Array] | None,
    progress: Progress,
) -> dict[str, Tensor]:
    """What enters the head, (n, E), in each way; the first one's keys and values go to `out`.

    All ways pass through a layer before the next, so that its weights are read and widened once.
    """

    def sink(i: int, seen: dict[str, Tensor]) -> None:
        for name, array in (out or {}).items():
            if name in seen:
                array[i] = seen[name].numpy()
                tensors.release(array)

    makers = {spec.name: partial(Layer, spec=spec) for spec in asked.stored.values()}
    given = asked.weights, asked.config, asked.tokens
    return llama.follow(*given, segments=ways, sink=sink, makers=makers, progress=progress)


def _reduced(
    asked: Asked,
    hidden: Mapping[str, Tensor],
    out: Mapping[str, Array] | None,
    progress: Progress,
) -> tuple[dict[str, Lost], dict[str, float]]:
    """What each SPEC loses, and the proofs of the truth whose logits go to `out`."""
    times_head, n = _times_head(asked), len(asked.tokens)
    following = torch.tensor([*asked.tokens[1:], 0])  # what the last row says of 0 is left out
    found: dict[str, list[dict[str, Tensor]]] = {name: [] for name in asked.ways}
    most = apart = 0.0
    step = max(1, _BLOCK // asked.config.vocab_size)
    for start in range(0, n, step):
        progress("truth (float64), logits", start, n)
        rows = slice(start, start + step)
        logits = times_head(hidden[_WHOLE][rows], _WHOLE, start)
        if out is not None:
            again = times_head(hidden[_CHUNKED][rows], _CHUNKED, start)
            apart = max(apart, float((again - logits).abs().max()))
            most = max(most, float(logits.abs().max()))
            _keep(out, rows, logits)
        true = torch.log_softmax(logits, dim=-1)
        for name, its in found.items():
            other = times_head(hidden[name][rows], name, start)
            its.append(_rows(true, torch.log_softmax(other, dim=-1), following[rows]))
    lost = {name: _joined(its) for name, its in found.items()}
    return lost, {} if out is None else _proofs(apart, most, n)


def _times_head(asked: Asked) -> Callable[[Tensor, str, int], Tensor]:
    """What gives the logits (R, V) of what enters the head (R, E); see `llama.logits_of`.

    A head of several blocks is widened anew for each block of rows: that of an 8B model would take
    4.2 GB in float64.
    """
    weights, config = asked.weights, asked.config
    if config.vocab_size * config.hidden <= HEAD_BLOCK:
        head = weights.head(config)
        return lambda rows, name, at: llama.logits_of(rows, head, name, at=at)

    def of_blocks(rows: Tensor, name: str, at: int) -> Tensor:
        blocks = weights.head_blocks(config)
        return torch.cat([llama.logits_of(rows, block, name, at=at) for block in blocks], dim=1)

    return of_blocks


def _keep(out: Mapping[str, Array], rows: slice, logits: Tensor) -> None:
    out["logits"][rows] = logits.numpy()
    out["lse"][rows] = torch.logsumexp(logits, dim=-1).numpy()
    tensors.release(out["logits"])


def _rows(true: Tensor, other: Tensor, following: Tensor) -> dict[str, Tensor]:
    """What a block loses: log-probabilities (R, V) of the truth and a stored way, and the ids (R,)
    of the tokens that follow.
    """
    at = following[:, None]
    return {
        # Rounding can make a sum of nothing negative.
        "kl": (true.exp() * (true - other)).sum(-1).clamp_min(0.0),
        "p_right": other.gather(1, at)[:, 0].exp().clamp_max(1.0),
        "p_right_truth": true.gather(1, at)[:, 0].exp().clamp_max(1.0),
        "top1_same": other.argmax(-1) == true.argmax(-1),
    }


def _joined(blocks: Sequence[Mapping[str, Tensor]]) -> Lost:
    rows = {name: torch.cat([block[name] for block in blocks]).numpy() for name in blocks[0]}
    return Lost(**rows | {name: rows[name][:-1] for name in ("p_right", "p_right_truth")})


def _proofs(apart: float, most: float, n: int) -> dict[str, float]:
    value = apart / max(most, float(np.finfo(np.float64).tiny))
    if not value <= text.LIMIT:
        what = f"whole and in chunks it differs by {value:.1e} of max |T|"
        remedy = "nothing can be measured by this truth"
        raise Refusal(f"{what}, expected at most {text.LIMIT:g}", where="truth", remedy=remedy)
    limit = {f"{text.PROOF}_limit": text.LIMIT, "chunk": float(_chunks(n)[0])}
    return {text.PROOF: value, "truth_max": most} | limit


def _chunks(n: int) -> list[int]:
    """Sizes of 64 and the rest; of half a shorter text, as one chunk would be the whole again."""
    size = min(_CHUNK, -(-n // 2))
    return [min(size, n - start) for start in range(0, n, size)]

"""The usual mistakes of an engine: what each makes of the config, the weights, or attention.

Those of `usual` show in every plan alike. Those of `in_calls` are mistakes at the borders of calls,
and show only in the plan whose calls those are.

Axes: n tokens of the sequence, H query heads, K key/value heads, G = H / K, D head_dim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oracle.truth.config import Config
from oracle.truth.rope import LongRope, Yarn
from oracle.truth.stored import affine
from oracle.truth.weights import DTYPES, EMBEDDING, HEAD

_THETAS = (10000.0, 500000.0, 1000000.0)
_EPSILONS = (1e-6, 1e-5, 1e-8)
_ROUNDED = {"float16": "F16", "bfloat16": "BF16"}
_GROUPS = {
    "all": re.compile("."),
    "attention": re.compile(r"\.self_attn\."),
    "mlp": re.compile(r"\.mlp\."),
    "embedding": re.compile(r"embed_tokens|lm_head"),
}
_QUERIES = re.compile(r"\.self_attn\.q_proj\.")
_QUERIES_AND_KEYS = re.compile(r"\.self_attn\.[qk]_proj\.")
_QUERIES_AND_OUT = re.compile(r"\.self_attn\.[qo]_proj\.weight|\.self_attn\.q_proj\.bias")
_NORMS = re.compile(r"norm\.weight$")
_FINAL_NORM = re.compile(r"^model\.norm\.weight$")
_BIASES = {
    "": re.compile(r"\.bias$"),
    "attention": re.compile(r"\.self_attn\..*\.bias$"),
    "mlp": re.compile(r"\.mlp\..*\.bias$"),
}
_MASKED = -1e30  # finite, as in many engines: a row that sees nothing sees its whole call alike

Change = Callable[[str, Tensor], Tensor]
Kept = Callable[[Tensor], Tensor]
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What attention does otherwise.

    `mask` (n, n) is added to the scores; `positions` (n,) are those that RoPE is given. `kept` is
    what the cache makes of keys and values; `fresh` (n, n) says which of them a query reads as they
    were before (None: none).
    """

    mask: Tensor | None = None
    positions: Tensor | None = None
    kept: Kept | None = None
    fresh: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Suspect:
    """One mistake: the config that it amounts to, what it does to weights, and to attention.

    `plan` names the plan in which alone it shows, "" if it shows in all alike. `rough` mistakes
    round what was computed, and no two engines round alike.
    """

    name: str
    words: str
    config: Config
    change: Change | None = None
    of: re.Pattern[str] = _GROUPS["all"]
    view: View = View()
    plan: str = ""
    rough: bool = False

    def changes(self, name: str) -> Change | None:
        """What it does to the tensor of that name."""
        return self.change if self.of.search(name) else None

    @property
    def head(self) -> str:
        """The name of the matrix that makes logits."""
        return EMBEDDING if self.config.tied else HEAD


def usual(config: Config, *, dtype: str, stored: frozenset[str]) -> list[Suspect]:
    """All that differ from what `config`, the run's `dtype` and the `stored` dtypes say."""
    found = [*_constants(config), *_orders(config), *_losses(config), *_scales(config)]
    changed = [s for s in found if s.change or s.config != config]
    for to, kind in _ROUNDED.items():
        if dtype != to and stored != {kind}:
            for group, of in _GROUPS.items():
                words = f"{group} weights rounded to {to}"
                changed.append(Suspect(f"{to}-{group}", words, config, _ROUND[to], of))
    return changed + [
        Suspect(
            f"cache-{to}", f"a cache in {to} precision", config, view=View(kept=kept), rough=True
        )
        for to, kept in _caches(dtype)
    ]


def _constants(config: Config) -> Iterator[Suspect]:
    for theta in _THETAS:
        words = _instead("rope_theta", theta, config.theta)
        yield Suspect(f"rope_theta-{theta:.0f}", words, replace(config, theta=theta))
    for eps in _EPSILONS:
        words = _instead("rms_norm_eps", eps, config.eps)
        yield Suspect(f"rms_norm_eps-{short(eps)}", words, replace(config, eps=eps))


def _orders(config: Config) -> Iterator[Suspect]:
    words = "interleaved RoPE (pairs 2i and 2i + 1 turned instead of halves)"
    yield Suspect("interleaved", words, replace(config, interleaved=True))
    words = "q and k rows of each head in the order of Meta's and GGUF files"
    yield Suspect("paired-rows", words, config, _paired(config.head_dim), _QUERIES_AND_KEYS)
    if 1 < config.n_kv_heads < config.n_heads:
        words = "key/value heads tiled over the query heads instead of repeated"
        yield Suspect("kv-heads-tiled", words, config, _tiled(config), _QUERIES_AND_OUT)


def _losses(config: Config) -> Iterator[Suspect]:
    """What an engine loses if it does not read a key of the config."""
    plain, theta, s = replace(config, scaling=None), _THETAS[0], config.scaling
    yield Suspect("scaling-lost", "lost RoPE scaling", plain)
    if s is not None and config.theta != theta:
        words = f"lost RoPE (no scaling and {_instead('rope_theta', theta, config.theta)})"
        yield Suspect("rope-lost", words, replace(plain, theta=theta))
    if isinstance(s, Yarn | LongRope):
        lost = replace(config, scaling=replace(s, attention=1.0))
        yield Suspect("attention-factor-lost", "RoPE's attention_factor dropped", lost)
    if isinstance(s, LongRope):
        for used, dropped in (("long", "short"), ("short", "long")):
            same = replace(s, **{dropped: getattr(s, used)})
            words = f"longrope's {dropped}_factor ignored ({used}_factor at every length)"
            yield Suspect(f"longrope-{used}", words, replace(config, scaling=same))
    words = "lm_head tied to the embedding (its own weights lost)"
    yield Suspect("head-tied", words, replace(config, tied=True))
    biased = {"attention": config.attention_bias, "mlp": config.mlp_bias}
    for group in ["", *biased] if all(biased.values()) else [""] * any(biased.values()):
        words = " ".join(["dropped", *filter(None, [group]), "biases"])
        yield Suspect(words.replace(" ", "-"), words, config, _zeros, _BIASES[group])


def _scales(config: Config) -> Iterator[Suspect]:
    """Attention's scale, and the weights of norms."""
    D, width = config.head_dim, config.hidden / config.n_heads
    scales = {1.0: "1", 1 / D: "1 / head_dim", width**-0.5: "1 / sqrt(hidden_size / heads)"}
    for scale, of in scales.items():
        if not math.isclose(scale, D**-0.5):
            words = f"attention's scale {of} instead of 1 / sqrt(head_dim)"
            name = f"scale-{of.replace(' ', '')}"
            yield Suspect(name, words, config, _times(scale * D**0.5), _QUERIES)
    yield Suspect("norms-1+w", "norms' weights taken as 1 + weight", config, _plus_one, _NORMS)
    yield Suspect("norms-without-w", "norms without their weights", config, _ones, _NORMS)
    words = "the final norm without its weight"
    yield Suspect("final-norm-without-w", words, config, _ones, _FINAL_NORM)


def in_calls(config: Config, plan: str, spans: Spans, *, dtype: str) -> list[Suspect]:
    """The mistakes at the borders of a plan's calls, each from a position up to another."""
    found = {f"{name}-{plan}": (words, view) for name, words, view in _masks(spans)}
    found |= {f"{name}-{plan}": (words, view) for name, words, view in _positions(spans)}
    start, _, at, _ = _calls(spans)
    fresh = at >= start
    suspects = [
        Suspect(name, words, config, view=view, plan=plan) for name, (words, view) in found.items()
    ]
    if bool(fresh.all() | (start == 0).all()):
        return suspects
    return suspects + [
        Suspect(
            f"cache-held-{to}-{plan}",
            f"a cache that holds the rows of earlier calls in {to} precision",
            config,
            view=View(kept=kept, fresh=fresh),
            plan=plan,
            rough=True,
        )
        for to, kept in _caches(dtype)
    ]


def _calls(spans: Spans) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each position its call's start and stop, each (n, 1); keys' positions (1, n), its own."""
    rows = torch.tensor([span for span in spans for _ in range(*span)])
    at = torch.arange(len(rows))
    return rows[:, :1], rows[:, 1:], at[None], at[:, None]


def _masks(spans: Spans) -> Iterator[tuple[str, str, View]]:
    start, stop, key, own = _calls(spans)
    several, later = stop - start > 1, start > 0
    off = "a mask off by one in a call after the first"
    hidden = {
        ("no-mask", "no causal mask"): several & (key < 0),
        ("mask-ahead", "a mask off by one (each token sees the next)"): key > own + 1,
        ("mask-behind", "a mask off by one (no token sees itself)"): key >= own,
    }
    chunks = {
        ("mask-offset", "a mask without its offset in a call after the first"): key > own - start,
        ("no-later-mask", "no mask in a call of several tokens after the first"): later & (key < 0),
        ("later-mask-ahead", f"{off} (each token sees the next)"): key > own + 1,
        ("later-mask-behind", f"{off} (no token sees itself)"): key >= own,
    }
    for where, masks in ((several, hidden), (several & later, chunks)):
        for (name, words), hides in masks.items():
            mask = torch.where(where, hides, key > own).to(torch.float64) * _MASKED
            if bool(where.any()):
                yield name, words, View(mask=mask.masked_fill(key >= stop, -math.inf))


def _positions(spans: Spans) -> Iterator[tuple[str, str, View]]:
    start, _, _, own = _calls(spans)
    later = start > 0
    for name, words, wrong in (
        ("position-high", "positions one too high after the first call", own + 1),
        ("position-low", "positions one too low after the first call", own - 1),
        ("position-zero", "positions that start at 0 in every call", own - start),
    ):
        if bool(later.any()):
            yield name, words, View(positions=torch.where(later, wrong, own)[:, 0])


def _caches(dtype: str) -> Iterator[tuple[str, Kept]]:
    """The precisions that a cache may lose in a run of `dtype`."""
    lost = {"float32": ("float16", "bfloat16"), "float16": ("bfloat16",), "bfloat16": ()}
    for to in lost[dtype]:
        yield to, _rounded_to(to)
    yield "8-bit", _eight_bits


def _paired(head_dim: int) -> Change:
    def change(_: str, tensor: Tensor) -> Tensor:
        halves = tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)

    return change


def _tiled(config: Config) -> Change:
    """Query head h reads key/value head h mod K: as where the heads stand in that order."""
    H, K, D = config.n_heads, config.n_kv_heads, config.head_dim
    order = torch.arange(H).view(H // K, K).T.flatten()

    def change(name: str, tensor: Tensor) -> Tensor:
        if "o_proj" in name:
            return tensor.view(-1, H, D)[:, order].reshape(tensor.shape)
        return tensor.view(H, D, *tensor.shape[1:])[order].reshape(tensor.shape)

    return change


def _times(factor: float) -> Change:
    return lambda _, tensor: tensor * factor


def _plus_one(_: str, tensor: Tensor) -> Tensor:
    return tensor + 1.0


def _ones(_: str, tensor: Tensor) -> Tensor:
    return torch.ones_like(tensor)


def _zeros(_: str, tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor)


def _rounded_to(dtype: str) -> Kept:
    return lambda tensor: tensor.to(DTYPES[dtype]).to(tensor.dtype)


def _rounding(dtype: str) -> Change:
    kept = _rounded_to(dtype)
    return lambda _, tensor: kept(tensor)


_ROUND = {to: _rounding(to) for to in _ROUNDED}
"""One function for each dtype, so that suspects that share it can be followed together."""


def _eight_bits(tensor: Tensor) -> Tensor:
    """As MLX's affine quantisation does in groups of 64 along D, or of 32, or of all of it."""
    D = tensor.shape[-1]
    size = next((size for size in (64, 32) if D % size == 0), D)
    return affine(tensor, bits=8, group_size=size)


def _instead(key: str, value: float, right: float) -> str:
    return f"{key} {short(value)} instead of {short(right)}"


def short(value: float) -> str:
    """As people write it: 10000, 1e-5."""
    return f"{value:.0f}" if value == int(value) else re.sub(r"e-0(\d)$", r"e-\1", repr(value))

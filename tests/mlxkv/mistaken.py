"""A Llama in float32 numpy, with a cache, that makes one mistake: for the cause of a difference.

The formulas once more, as in `models.forward`; what an engine may do wrong is a field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import models
import numpy as np
import numpy.typing as npt

from oracle.formats.plan import Plan
from oracle.formats.trace import Meta, Trace

Array = npt.NDArray[Any]


def causal(start: int, own: Array, keys: Array, stop: int) -> Array:
    """Which keys (S,) the tokens of a call, at `own` (L, 1) from `start` on, may not see."""
    return np.asarray(keys > own)


def as_it_is(x: Array) -> Array:
    return x


@dataclass
class Engine:
    """`rope` are the frequencies, `turned` what RoPE's cosines and sines are multiplied by.

    `held` is what becomes of rows of earlier calls, `kept` of all rows that are attended to.
    """

    config: Mapping[str, Any]
    weights: Mapping[str, Array]
    rope: Array | None = None
    turned: float = 1.0
    interleaved: bool = False
    scale: float | None = None
    hides: Callable[[int, Array, Array, int], Array] = causal
    position: Callable[[int, Array], Array] = lambda start, own: own
    reads: Callable[[int, int], Array] = lambda H, K: np.arange(H) // (H // K)
    norm_weight: Callable[[str, Array], Array] = lambda name, weight: weight
    kept: Callable[[Array], Array] = as_it_is
    held: Callable[[Array], Array] = as_it_is
    round: Callable[[Array], Array] = as_it_is
    cache: list[tuple[Array, Array]] = field(default_factory=list)

    def follow(self, plan: Plan) -> Trace:
        self.cache, rows = [], []
        for call in plan.calls():
            rows.append(self.forward(np.array(call.step.tokens), call.held))
        logits = np.concatenate(rows)
        arrays = {"logits": logits, "positions": np.arange(len(logits), dtype=np.int32)}
        for i, pair in enumerate(self.cache):
            for name, array in zip(("keys", "values"), pair, strict=True):
                arrays[f"kv/a/{i:03d}/{name}"] = array
        meta = Meta(plan, "mistaken", "1", "float32", weights_dtype="float32")
        return Trace(meta, arrays)

    def linear(self, name: str, x: Array) -> Array:
        w = self.weights
        return self.round(x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", np.float32(0)))

    def norm(self, name: str, x: Array) -> Array:
        weight = self.norm_weight(name, self.weights[f"{name}.weight"])
        mean = (x**2).mean(-1, keepdims=True) + np.float32(self.config["rms_norm_eps"])
        return self.round(x / np.sqrt(mean) * weight)

    def turn(self, x: Array, at: Array) -> Array:
        """x (heads, L, D)."""
        plain = models._frequencies(self.config) if self.rope is None else self.rope
        angles = at[:, None] * plain
        cos, sin = (
            np.float32(f(angles) * self.turned).astype(np.float32) for f in (np.cos, np.sin)
        )
        D = x.shape[-1]
        a, b = (x[..., ::2], x[..., 1::2]) if self.interleaved else (
            x[..., : D // 2], x[..., D // 2 :])  # fmt: skip
        pair = a * cos - b * sin, b * cos + a * sin
        return np.stack(pair, -1).reshape(x.shape) if self.interleaved else np.concatenate(pair, -1)

    def attention(self, i: int, x: Array, start: int) -> Array:
        name, (L, _), D = f"model.layers.{i}.self_attn", x.shape, self.config["head_dim"]
        q, k, v = (
            self.linear(f"{name}.{n}_proj", x).reshape(L, -1, D).swapaxes(0, 1) for n in "qkv"
        )
        own = np.arange(start, start + L)
        at = self.position(start, own)
        q, k = self.round(self.turn(q, at)), self.round(self.turn(k, at))
        k, v = self.kept(k), self.kept(v)
        if start:
            before = [self.held(a) for a in self.cache[i]]
            k, v = (np.concatenate(p, 1) for p in zip(before, (k, v), strict=True))
            self.cache[i] = k, v
        else:
            self.cache.append((k, v))
        of = self.reads(len(q), len(k))
        scale = D**-0.5 if self.scale is None else self.scale
        scores = q @ k[of].swapaxes(1, 2) * np.float32(scale)
        hidden = self.hides(start, own[:, None], np.arange(start + L), start + L)
        scores = np.where(hidden, np.float32(-1e30), scores)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = self.round(shares / shares.sum(-1, keepdims=True)) @ v[of]
        return self.linear(f"{name}.o_proj", self.round(mixed.swapaxes(0, 1).reshape(L, -1)))

    def forward(self, tokens: Array, start: int) -> Array:
        x = self.round(self.weights["model.embed_tokens.weight"][tokens])
        for i in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            normed = self.norm(f"{layer}.input_layernorm", x)
            x = self.round(x + self.attention(i, normed, start))
            h = self.norm(f"{layer}.post_attention_layernorm", x)
            gate, up = (self.linear(f"{layer}.mlp.{n}_proj", h) for n in ("gate", "up"))
            activation = self.round(self.round(gate / (1 + np.exp(-gate))) * up)
            x = self.round(x + self.linear(f"{layer}.mlp.down_proj", activation))
        head = "model.embed_tokens" if self.config.get("tie_word_embeddings") else "lm_head"
        return self.linear(head, self.norm("model.norm", x)).astype(np.float32)

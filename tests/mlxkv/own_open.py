"""A person's own Llama that can be looked into: biases, a tied head, and `taps()`.

Every step is a method, so that a test can plant a fault in it. For `--engine own_open.py:load`.
"""

import json
from pathlib import Path

import mlx.core as mx
import own_llama
from own_llama import LayerCache


class OpenLlama(own_llama.OwnLlama):
    def __init__(self, config, weights):
        super().__init__(config, weights)
        self.seen = {}

    def taps(self):
        """What the last call computed, by layer and name."""
        return self.seen

    def show(self, layer, **arrays):
        self.seen |= {(layer, name): array for name, array in arrays.items()}

    def linear(self, name, x):
        if f"{name}.weight" not in self.weights:
            name = "model.embed_tokens"
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def norm(self, name, x):
        return mx.fast.rms_norm(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def rope(self, x, layer, offset):
        D, theta = self.config["head_dim"], self.config["rope_theta"]
        return mx.fast.rope(x, D, traditional=False, base=theta, scale=1.0, offset=offset)

    def mask(self, layer, start, L):
        """True where a query sees a key, (L, S)."""
        return mx.arange(start + L)[None, :] <= mx.arange(start, start + L)[:, None]

    def write(self, layer, cache, keys, values):
        return cache.update(keys, values)

    def scores(self, layer, queries, keys, mask):
        scores = queries @ keys.swapaxes(-1, -2) * self.config["head_dim"] ** -0.5
        return mx.where(mask, scores, -mx.inf)

    def shared(self, layer, keys, heads):
        return mx.repeat(keys, heads // keys.shape[1], axis=1)

    def mix(self, layer, scores, values):
        return mx.softmax(scores, axis=-1) @ values

    def attend(self, layer, x, cache):
        B, L, _ = x.shape
        name = f"model.layers.{layer}.self_attn"
        q, k, v = (
            self.linear(f"{name}.{n}_proj", x)
            .reshape(B, L, -1, self.config["head_dim"])
            .swapaxes(1, 2)
            for n in "qkv"
        )
        start, H = cache.offset, q.shape[1]
        q_rope, k_rope = (self.rope(a, layer, start) for a in (q, k))
        keys, values = self.write(layer, cache, k_rope, v)
        keys, values = (self.shared(layer, a, H) for a in (keys, values))
        scores = self.scores(layer, q_rope, keys, self.mask(layer, start, L))
        mixed = self.mix(layer, scores, values).swapaxes(1, 2).reshape(B, L, -1)
        out = self.linear(f"{name}.o_proj", mixed)
        self.show(layer, input_norm=x, q=q, k=k, v=v, q_rope=q_rope, k_rope=k_rope)
        self.show(layer, scores=scores, attention=mixed, o_proj=out)
        return out

    def mlp(self, layer, x):
        name = f"model.layers.{layer}.mlp"
        gate, up = self.linear(f"{name}.gate_proj", x), self.linear(f"{name}.up_proj", x)
        activation = self.silu(gate) * up
        down = self.linear(f"{name}.down_proj", activation)
        self.show(layer, post_norm=x, gate=gate, up=up, activation=activation, down=down)
        return down

    def silu(self, x):
        return x * mx.sigmoid(x)

    def block(self, layer, x, cache):
        name = f"model.layers.{layer}"
        x = x + self.attend(layer, self.norm(f"{name}.input_layernorm", x), cache)
        return x + self.mlp(layer, self.norm(f"{name}.post_attention_layernorm", x))

    def __call__(self, tokens, cache):
        x = self.weights["model.embed_tokens.weight"][tokens]
        self.show(0, embedding=x)
        for i, layer_cache in enumerate(cache):
            x = self.block(i, x, layer_cache)
            self.show(i, hidden=x)
        return self.linear("lm_head", self.norm("model.norm", x))


def load(path, dtype, kind=OpenLlama):
    config = json.loads((Path(path) / "config.json").read_text())
    weights = mx.load(f"{path}/model.safetensors")
    return kind(config, {name: a.astype(getattr(mx, dtype)) for name, a in weights.items()})


__all__ = ["LayerCache", "OpenLlama", "load"]

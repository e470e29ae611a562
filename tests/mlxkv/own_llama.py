"""A person's own Llama in MLX, which knows nothing of mlxkv: for `--engine own_llama.py:load`."""

import json
from pathlib import Path

import mlx.core as mx


class LayerCache:
    def __init__(self):
        self.keys = self.values = None
        self.offset = 0

    @property
    def state(self):
        return self.keys, self.values

    def update(self, keys, values):
        if self.keys is not None:
            keys, values = (
                mx.concatenate(pair, axis=2) for pair in ((self.keys, keys), (self.values, values))
            )
        self.keys, self.values, self.offset = keys, values, keys.shape[2]
        return keys, values

    def trim(self, n):
        self.offset -= n
        self.keys, self.values = self.keys[:, :, : self.offset], self.values[:, :, : self.offset]
        return n


class OwnLlama:
    def __init__(self, config, weights):
        self.config, self.weights = config, weights

    def make_cache(self):
        return [LayerCache() for _ in range(self.config["num_hidden_layers"])]

    def linear(self, name, x):
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, name, x):
        return mx.fast.rms_norm(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def attention(self, name, x, cache):
        B, L, _ = x.shape
        D, theta = self.config["head_dim"], self.config["rope_theta"]
        queries, keys, values = (
            self.linear(f"{name}.{n}_proj", x).reshape(B, L, -1, D).swapaxes(1, 2) for n in "qkv"
        )
        queries, keys = (
            mx.fast.rope(a, D, traditional=False, base=theta, scale=1.0, offset=cache.offset)
            for a in (queries, keys)
        )
        keys, values = cache.update(keys, values)
        mixed = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=D**-0.5, mask="causal" if L > 1 else None
        )
        return self.linear(f"{name}.o_proj", mixed.swapaxes(1, 2).reshape(B, L, -1))

    def __call__(self, tokens, cache):
        x = self.weights["model.embed_tokens.weight"][tokens]
        for i, layer_cache in enumerate(cache):
            layer = f"model.layers.{i}"
            x = x + self.attention(
                f"{layer}.self_attn", self.norm(f"{layer}.input_layernorm", x), layer_cache
            )
            h = self.norm(f"{layer}.post_attention_layernorm", x)
            gate, up = (
                self.linear(f"{layer}.mlp.gate_proj", h),
                self.linear(f"{layer}.mlp.up_proj", h),
            )
            x = x + self.linear(f"{layer}.mlp.down_proj", gate * mx.sigmoid(gate) * up)
        return self.linear("lm_head", self.norm("model.norm", x))


def load(path, dtype):
    config = json.loads((Path(path) / "config.json").read_text())
    weights = mx.load(f"{path}/model.safetensors")
    return OwnLlama(
        config, {name: array.astype(getattr(mx, dtype)) for name, array in weights.items()}
    )

"""config.json -> what the truth needs of it. The port reads the same file by itself: two readings that agree are evidence.

Every key is used, ignored because it cannot change a logit, or refused by name. Defaults are those of transformers'
LlamaConfig where one is harmless; sizes have none. This module knows no torch and reads no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from oracle.formats.errors import Refusal
from oracle.truth.rope import MOST_POSITIONS, Scaling, number, read_rope, show, whole

if TYPE_CHECKING:
    from oracle.model.checkpoint import Checkpoint

# Of no effect on the logits of a trained Llama, by what they are for.
IGNORED = {
    "training": "initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop gradient_checkpointing pretraining_tp",
    "special tokens": "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id",
    "text generation": """use_cache max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups temperature
        top_k top_p typical_p diversity_penalty repetition_penalty length_penalty exponential_decay_length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens num_return_sequences remove_invalid_values""",
    "book-keeping": """_name_or_path name_or_path torch_dtype dtype transformers_version transformers.js_config is_llama_config
        tokenizer_class prefix task_specific_params finetuning_task problem_type id2label label2id num_labels output_attentions
        output_hidden_states output_scores return_dict return_dict_in_generate torchscript use_bfloat16 tf_legacy_loss
        chunk_size_feed_forward _attn_implementation_autoset unsloth_version unsloth_fixed""",
    "other models": "sliding_window",
}
_WITHOUT_EFFECT = {key for keys in IGNORED.values() for key in keys.split()}
# These would change the model, so only the value that leaves it a Llama is accepted. Null always counts as absent.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "architectures": (["LlamaForCausalLM"], []),
    "hidden_act": ("silu",),
    "rope_interleaved": (False,),
    "rope_traditional": (False,),
    "partial_rotary_factor": (1.0, 1),
    "use_sliding_window": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, []),
}
# And the largest that is believed, far above every Llama: nothing is looped over or made for a number that is a mistake.
_SIZES = {
    "num_hidden_layers": 10_000,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_attention_heads": 10_000,
    "vocab_size": 2**24,
    "max_position_embeddings": MOST_POSITIONS,
}
_MOST_HEAD_DIM = 2**16
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")
_USED = {
    *_SIZES,
    *_ROPE,
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
}
STORED = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class Config:
    """A Llama's sizes and constants.

    `interleaved` turns the pairs (2i, 2i + 1) instead of (i, i + head_dim / 2): read_config never says so, it is a suspect.
    """

    n_layers: int
    hidden: int
    mlp: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    eps: float
    theta: float
    scaling: Scaling | None
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    interleaved: bool = False

    @property
    def rope(self) -> str:
        """The type, theta and the type's numbers, for a report; lists by their length."""
        told = asdict(self.scaling) if self.scaling else {}
        shown = [
            f"{key} {f'{len(value)} numbers' if isinstance(value, tuple) else json.dumps(value)}"
            for key, value in told.items()
        ]
        return ", ".join(
            [
                type(self.scaling).__name__.lower() if self.scaling else "default",
                f"theta {self.theta:g}",
                *shown,
            ]
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the checkpoint must hold, and its shape."""
        q, kv, e, f = (
            self.n_heads * self.head_dim,
            self.n_kv_heads * self.head_dim,
            self.hidden,
            self.mlp,
        )
        linear = {
            "self_attn.q_proj": (q, e),
            "self_attn.k_proj": (kv, e),
            "self_attn.v_proj": (kv, e),
            "self_attn.o_proj": (e, q),
        }
        linear |= {"mlp.gate_proj": (f, e), "mlp.up_proj": (f, e), "mlp.down_proj": (e, f)}
        layer: dict[str, tuple[int, ...]] = {
            f"{name}.weight": shape for name, shape in linear.items()
        }
        layer |= {"input_layernorm.weight": (e,), "post_attention_layernorm.weight": (e,)}
        biased = {"self_attn": self.attention_bias, "mlp": self.mlp_bias}
        layer |= {
            f"{name}.bias": shape[:1]
            for name, shape in linear.items()
            if biased[name.split(".")[0]]
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, e),
            "model.norm.weight": (e,),
        }
        shapes |= {
            f"model.layers.{i}.{name}": shape
            for i in range(self.n_layers)
            for name, shape in layer.items()
        }
        return shapes | ({} if self.tied else {"lm_head.weight": (self.vocab_size, e)})

    def taps(self, n: int) -> dict[str, tuple[int, ...]]:
        """Every place inside a layer that can be recorded, in the order of computation, and its shape for n tokens.

        `scores` are scaled, and 0 where the mask hides a key; `activation` is silu(gate) * up, `hidden` what leaves the layer.
        """
        h, k, d, e, f = self.n_heads, self.n_kv_heads, self.head_dim, self.hidden, self.mlp
        heads: dict[str, tuple[int, ...]] = {
            "q": (h, n, d),
            "k": (k, n, d),
            "v": (k, n, d),
            "q_rope": (h, n, d),
            "k_rope": (k, n, d),
            "scores": (h, n, n),
        }
        rows = {
            "attention": h * d,
            "o_proj": e,
            "post_norm": e,
            "gate": f,
            "up": f,
            "activation": f,
            "down": e,
            "hidden": e,
        }
        return {"input_norm": (n, e), **heads, **{name: (n, width) for name, width in rows.items()}}


def config_of(checkpoint: Checkpoint) -> Config:
    """The oracle's reading of a checkpoint's config."""
    return read_config(
        checkpoint.model_config,
        where=str(checkpoint.folder / "config.json"),
        without=checkpoint.without,
    )


def read_config(
    values: Mapping[str, Any], *, where: str = "config.json", without: Sequence[str] = ()
) -> Config:
    """The Config of a decoded config.json, or a Refusal that names the key; `without` are keys that a person took out of it."""
    for key in without:
        if key in _USED or key in _NEUTRAL:
            raise Refusal(
                f"{where}: --ignore-key {key} would change the model, expected a key that does not; leave the option out"
            )
    given = {key: value for key, value in values.items() if value is not None}
    if "model_type" not in given:
        raise Refusal(f"{where}: no model_type, expected 'llama'; only Llama models can be run")
    for key, value in given.items():
        if key in _NEUTRAL and not any(
            type(value) is type(v) and value == v for v in _NEUTRAL[key]
        ):
            raise Refusal(
                f"{where}: {key} is {show(value)}, expected {_NEUTRAL[key][0]!r}; only plain Llama models can be run"
            )
        if (
            key not in _NEUTRAL
            and key not in _WITHOUT_EFFECT
            and key not in _USED
            and value is not False
        ):
            raise Refusal(
                f"{where}: unknown key {key!r} ({show(value)}), which may change the logits; --ignore-key if it does not"
            )
    sizes = {key: whole(given, key, where, most=most) for key, most in _SIZES.items()}
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    kv_heads = (
        whole(given, "num_key_value_heads", where, most=_SIZES["num_attention_heads"])
        if "num_key_value_heads" in given
        else heads
    )
    if heads % kv_heads:
        raise Refusal(
            f"{where}: num_key_value_heads is {kv_heads}, expected a divisor of num_attention_heads {heads}; correct config.json"
        )
    if "head_dim" not in given and hidden % heads:
        raise Refusal(
            f"{where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}; give head_dim"
        )
    head_dim = (
        whole(given, "head_dim", where, most=_MOST_HEAD_DIM)
        if "head_dim" in given
        else hidden // heads
    )
    if head_dim % 2:
        raise Refusal(
            f"{where}: head_dim is {head_dim}, expected an even number, as RoPE turns pairs; correct config.json"
        )
    theta, scaling = read_rope(
        given, where, max_positions=sizes["max_position_embeddings"], head_dim=head_dim
    )
    return Config(
        n_layers=sizes["num_hidden_layers"],
        hidden=hidden,
        mlp=sizes["intermediate_size"],
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=sizes["vocab_size"],
        max_positions=sizes["max_position_embeddings"],
        eps=number(given, "rms_norm_eps", where) if "rms_norm_eps" in given else 1e-6,
        theta=theta,
        scaling=scaling,
        tied=_flag(given, "tie_word_embeddings", where),
        attention_bias=_flag(given, "attention_bias", where),
        mlp_bias=_flag(given, "mlp_bias", where),
    )


def effective(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that can change a logit: what transformers is given, where a sliding_window would shorten the cache."""
    return {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT}


def check_weights(config: Config, checkpoint: Checkpoint) -> None:
    """Refuses a checkpoint whose tensors are not those of the config: names both ways, then shapes, then dtypes."""
    wanted, stored, where = config.shapes(), checkpoint.weights, checkpoint.folder
    missing = sorted(set(wanted) - set(stored))
    if missing:
        raise Refusal(
            f"{where}: no tensor {missing[0]}, expected {len(wanted)} as config.json says; {len(missing)} missing"
        )
    # A tied head may be stored once more (the truth checks that it is the same); old files keep RoPE's frequencies.
    extra = {n for n in set(stored) - set(wanted) if not n.endswith(".rotary_emb.inv_freq")} - {
        "lm_head.weight"
    }
    if extra:
        raise Refusal(
            f"{where}: unknown tensor {min(extra)}, expected {len(wanted)} as config.json says; {len(extra)} unknown"
        )
    for name, shape in wanted.items():
        if tuple(stored[name]) != shape:
            unpacked = " unpacked" if name in checkpoint.packed else ""
            raise Refusal(
                f"{where}: {name} has shape {list(stored[name])}{unpacked}, expected {list(shape)} as config.json says"
            )
        dtype = checkpoint.tensors[name].dtype
        if dtype not in STORED and name not in checkpoint.packed:
            raise Refusal(
                f"{where}: {name} is {dtype}, expected {', '.join(STORED)}; quantised weights cannot be run"
            )


def _flag(values: Mapping[str, Any], key: str, where: str) -> bool:
    value = values.get(key, False)
    if type(value) is not bool:
        raise Refusal(
            f"{where}: {key} is {show(value)}, expected true or false; correct config.json"
        )
    return value

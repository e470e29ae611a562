"""config.json -> what the truth needs of it.

The port reads the same file by itself: two readings that agree are evidence. Every key is used,
ignored because it cannot change a logit, or refused by name, whatever its value. Defaults are those
of transformers' LlamaConfig where one is harmless; sizes have none. This module knows no torch and
reads no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from oracle.formats.errors import Refusal, brief
from oracle.truth.keys import Keys, described
from oracle.truth.rope import MOST_POSITIONS, LongRope, Scaling, read_rope

if TYPE_CHECKING:
    from oracle.model.checkpoint import Checkpoint

Shapes = dict[str, tuple[int, ...]]

# Of no effect on the logits of a trained Llama, by what they are for.
IGNORED = {
    "training": """initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop
        gradient_checkpointing pretraining_tp""",
    "special tokens": """bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
        forced_bos_token_id forced_eos_token_id""",
    "text generation": """use_cache max_length min_length max_new_tokens do_sample early_stopping
        num_beams num_beam_groups temperature top_k top_p typical_p diversity_penalty
        repetition_penalty length_penalty exponential_decay_length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens
        num_return_sequences remove_invalid_values""",
    "book-keeping": """_name_or_path name_or_path torch_dtype dtype transformers_version
        transformers.js_config is_llama_config tokenizer_class prefix task_specific_params
        finetuning_task problem_type id2label label2id num_labels output_attentions
        output_hidden_states output_scores return_dict return_dict_in_generate torchscript
        use_bfloat16 tf_legacy_loss chunk_size_feed_forward _attn_implementation
        _attn_implementation_autoset _flash_attn_2_enabled _commit_hash unsloth_version
        unsloth_fixed""",
    "other models": """sliding_window max_window_layers seq_length max_sequence_length
        model_max_length""",
}
_WITHOUT_EFFECT = {key for keys in IGNORED.values() for key in keys.split()}
# These would change the model, so only the value that leaves it a Llama is accepted. Null always
# counts as absent.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "architectures": (["LlamaForCausalLM"], ["LLaMAForCausalLM"], ["LlamaModel"], []),
    "hidden_act": ("silu", "swish"),
    "is_causal": (True,),
    "rope_interleaved": (False,),
    "rope_traditional": (False,),
    "partial_rotary_factor": (1.0, 1),
    "use_sliding_window": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, []),
}
# What transformers takes where the key is absent; a null says nothing that could be followed.
_ABSENT = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
# The largest that is believed is far above every Llama, so that nothing is looped over or made for
# a number that is a mistake.
_SIZES = {
    "num_hidden_layers": 10_000,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_attention_heads": 10_000,
    "vocab_size": 2**24,
    "max_position_embeddings": MOST_POSITIONS,
}
_MOST_HEAD_DIM = 2**16
_OPTIONAL = """num_key_value_heads head_dim rms_norm_eps tie_word_embeddings attention_bias mlp_bias
    rope_theta rope_scaling rope_parameters original_max_position_embeddings layer_types"""
_USED = {*_SIZES, *_OPTIONAL.split()}
OLD_FREQUENCIES = ".rotary_emb.inv_freq"
"""The end of the names under which old files keep RoPE's frequencies, which nobody reads."""
STORED = ("F32", "BF16", "F16")
"""The dtypes of plain weights, as safetensors spells them."""


@dataclass(frozen=True, slots=True)
class Config:
    """A Llama's sizes and constants.

    `interleaved` turns the pairs (2i, 2i + 1) instead of (i, i + head_dim / 2). read_config never
    sets it; it is one of the suspects.
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
    def cache_width(self) -> int:
        """How many numbers a token leaves in the cache."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim

    @property
    def original(self) -> int | None:
        """The length beyond which longrope has other factors; None without longrope."""
        s = self.scaling
        return s.original_max_position_embeddings if isinstance(s, LongRope) else None

    @property
    def rope(self) -> str:
        """The type, theta and the type's numbers, for a report; lists by their length."""
        words = [type(self.scaling).__name__.lower() if self.scaling else "default"]
        words.append(f"theta {self.theta:g}")
        for key, value in (asdict(self.scaling) if self.scaling else {}).items():
            listed = isinstance(value, tuple)
            words.append(f"{key} {f'{len(value)} numbers' if listed else json.dumps(value)}")
        return ", ".join(words)

    def shapes(self) -> Shapes:
        """Every tensor that the checkpoint must hold, and its shape."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        e, f = self.hidden, self.mlp
        attention = {"q_proj": (q, e), "k_proj": (kv, e), "v_proj": (kv, e), "o_proj": (e, q)}
        mlp = {"gate_proj": (f, e), "up_proj": (f, e), "down_proj": (e, f)}
        layer: Shapes = {"input_layernorm.weight": (e,), "post_attention_layernorm.weight": (e,)}
        for block, linear, biased in (
            ("self_attn", attention, self.attention_bias),
            ("mlp", mlp, self.mlp_bias),
        ):
            layer |= {f"{block}.{name}.weight": shape for name, shape in linear.items()}
            if biased:
                layer |= {f"{block}.{name}.bias": shape[:1] for name, shape in linear.items()}
        shapes: Shapes = {"model.embed_tokens.weight": (self.vocab_size, e)}
        shapes["model.norm.weight"] = (e,)
        for i in range(self.n_layers):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes | ({} if self.tied else {"lm_head.weight": (self.vocab_size, e)})

    def taps(self, n: int) -> Shapes:
        """The places inside a layer that can be recorded, as computed, and their shapes.

        `n` is the number of tokens. `scores` are scaled, and 0 where the mask hides a key;
        `activation` is silu(gate) * up, `hidden` is what leaves the layer.
        """
        h, k, d, e, f = self.n_heads, self.n_kv_heads, self.head_dim, self.hidden, self.mlp
        taps: Shapes = {"input_norm": (n, e)}
        for name, heads in {"q": h, "k": k, "v": k, "q_rope": h, "k_rope": k}.items():
            taps[name] = (heads, n, d)
        taps["scores"] = (h, n, n)
        widths = {"attention": h * d, "o_proj": e, "post_norm": e, "gate": f, "up": f}
        widths |= {"activation": f, "down": e, "hidden": e}
        return taps | {name: (n, width) for name, width in widths.items()}


def config_of(checkpoint: Checkpoint) -> Config:
    """The oracle's reading of a checkpoint's config."""
    c = checkpoint
    return read_config(c.model_config, where=c.where, without=c.without)


def checked(checkpoint: Checkpoint) -> Config:
    """The oracle's reading of a checkpoint's config, once its weights are those of the config."""
    config = config_of(checkpoint)
    check_weights(config, checkpoint)
    return config


def read_config(
    values: Mapping[str, Any], *, where: str = "config.json", without: Sequence[str] = ()
) -> Config:
    """The Config of a decoded config.json, from which a person took the keys `without`."""
    refuse_taken_out(without, {*_USED, *_NEUTRAL}, where)
    _refuse_unknown(Keys(values, where))
    given = Keys(_ABSENT | {k: v for k, v in values.items() if v is not None}, where)
    missing = [key for key in _SIZES if key not in given.values]
    if len(missing) > 1:
        what = f"no {', '.join(missing)}, expected a whole number from 1 for each"
        raise given.refusal(what, "correct config.json")
    sizes = {key: given.whole(key, most=most) for key, most in _SIZES.items()}
    full = ["full_attention"] * sizes["num_hidden_layers"]
    if given.values.get("layer_types", full) != full:
        raise given.wrong("layer_types", f"'full_attention' for each of {len(full)} layers")
    heads, positions = sizes["num_attention_heads"], sizes["max_position_embeddings"]
    most = _SIZES["num_attention_heads"]
    kv_heads = given.whole("num_key_value_heads", most=most, default=heads)
    if heads % kv_heads:
        raise given.wrong("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    head_dim = _head_dim(given, sizes["hidden_size"], heads)
    theta, scaling = read_rope(given, max_positions=positions, head_dim=head_dim)
    return Config(
        n_layers=sizes["num_hidden_layers"],
        hidden=sizes["hidden_size"],
        mlp=sizes["intermediate_size"],
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=sizes["vocab_size"],
        max_positions=positions,
        eps=given.number("rms_norm_eps"),
        theta=theta,
        scaling=scaling,
        tied=given.flag("tie_word_embeddings"),
        attention_bias=given.flag("attention_bias"),
        mlp_bias=given.flag("mlp_bias"),
    )


def refuse_taken_out(without: Sequence[str], known: set[str], where: str) -> None:
    """Refuses --ignore-key for a key that matters to the model."""
    for key in without:
        if key in known:
            what = f"--ignore-key {key} would change the model, expected a key that does not"
            raise Refusal(what, where=where, remedy="leave the option out")


def _refuse_unknown(given: Keys) -> None:
    if given.values.get("model_type") is None:
        raise given.refusal("no model_type, expected 'llama'", "only Llama models can be run")
    unknown = [k for k in given.values if k not in {*_NEUTRAL, *_WITHOUT_EFFECT, *_USED}]
    if unknown:
        named = ", ".join(f"{key!r} ({brief(given.values[key])})" for key in unknown)
        what = f"unknown key{'s' * (len(unknown) > 1)} {named}, which may change the logits"
        ignoring = " ".join(f"--ignore-key {key}" for key in unknown)
        raise given.refusal(what, f"{ignoring} if it does not")
    for key, value in given.values.items():
        if value is None and key in _ABSENT:
            what = f"{key} is null, expected a value, or no such key for {_ABSENT[key]!r}"
            raise given.refusal(what, "take the key out or correct it")
        neutral = _NEUTRAL.get(key, ())
        if (
            neutral
            and value is not None
            and not any(type(value) is type(v) and value == v for v in neutral)
        ):
            what = f"{key} is {described(value)}, expected {neutral[0]!r}"
            raise given.refusal(what, "only plain Llama models can be run")


def _head_dim(given: Keys, hidden: int, heads: int) -> int:
    if "head_dim" not in given.values and hidden % heads:
        what = f"hidden_size {hidden} is no multiple of num_attention_heads {heads}"
        raise given.refusal(what, "give head_dim")
    head_dim = given.whole("head_dim", most=_MOST_HEAD_DIM, default=hidden // heads)
    if head_dim % 2:
        raise given.wrong("head_dim", "an even number, as RoPE turns pairs", found=head_dim)
    return head_dim


def effective(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that transformers is given: a sliding_window, for one, would shorten its cache.

    Of a null, which it refuses in some places, it would make the default that it takes anyway.
    """
    return {k: v for k, v in values.items() if k not in _WITHOUT_EFFECT and v is not None}


def check_weights(config: Config, checkpoint: Checkpoint) -> None:
    """Refuses tensors other than the config's: by name both ways, then by shape, then by dtype."""
    wanted, stored, where = config.shapes(), checkpoint.weights, checkpoint.folder
    says = f"expected {len(wanted)} as config.json says"
    missing = sorted(set(wanted) - set(stored))
    if missing:
        raise Refusal(f"{where}: no tensor {missing[0]}, {says}; {len(missing)} missing")
    # A tied head may be stored once more, if it is the same.
    extra = {n for n in set(stored) - set(wanted) if not n.endswith(OLD_FREQUENCIES)}
    extra -= {"lm_head.weight"}
    if extra:
        raise Refusal(f"{where}: unknown tensor {min(extra)}, {says}; {len(extra)} unknown")
    for name, shape in wanted.items():
        found, packed = list(stored[name]), name in checkpoint.packed
        if found != list(shape):
            has = f"{name} has shape {found}{' unpacked' if packed else ''}"
            raise Refusal(f"{where}: {has}, expected {list(shape)} as config.json says")
        if not packed:
            require_plain(name, checkpoint.tensors[name].dtype, checkpoint.tensors[name].file)
    if config.tied:
        _check_tied(checkpoint)


def _check_tied(checkpoint: Checkpoint) -> None:
    """Refuses a stored head that is not the embedding: which of them counts differs by engine."""
    tensors, hashes = checkpoint.tensors, checkpoint.hashes
    for part in ("weight", "scales", "biases"):
        head, its = f"lm_head.{part}", f"model.embed_tokens.{part}"
        same = its in tensors and head in tensors and tensors[head].dtype == tensors[its].dtype
        if head in tensors and not (same and hashes[head] == hashes[its]):
            what = f"{head} differs from {its} though tie_word_embeddings is true"
            remedy = "correct tie_word_embeddings in config.json, or take the head out"
            raise Refusal(what, where=tensors[head].file, remedy=remedy)


def require_plain(name: str, dtype: str, where: object) -> None:
    """Refuses a stored dtype that the oracle does not compute with."""
    if dtype not in STORED:
        what = f"{name} is {dtype}, expected {', '.join(STORED)}"
        raise Refusal(what, where=where, remedy="save it in F32")

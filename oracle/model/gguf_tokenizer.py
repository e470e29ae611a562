"""tokenizer.json of a GGUF file's vocabulary, for the one kind of it that is known: SmolLM's."""

from __future__ import annotations

from typing import Any

from oracle.formats import strict_json

_NORMAL, _CONTROL = 1, 3  # ggml's types of tokens; control tokens are special ones


def tokenizer_of(metadata: dict[str, Any]) -> dict[str, Any] | None:
    """The file's content; None for another vocabulary, so that only token ids can be given."""

    def value(key: str) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}")

    tokens, merges, kinds = value("tokens"), value("merges"), value("token_type")
    if (
        (value("model"), value("pre")) == ("gpt2", "smollm")
        and not (value("add_bos_token") or value("add_eos_token"))
        and strict_json.fits([tokens, merges], list[list[str]])
        and strict_json.fits(kinds, list[int])
        and (tokens and merges)
        and len(kinds) == len(tokens)
        and set(kinds) <= {_NORMAL, _CONTROL}
    ):
        special = [i for i, kind in enumerate(kinds) if kind == _CONTROL]
        return _file(tokens, merges, special)
    return None


def _file(tokens: list[str], merges: list[str], special: list[int]) -> dict[str, Any]:
    """A tokenizer.json of BPE on bytes with single digits, as `tokenizers` writes it."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": tokens[i]} | plain | {"special": True} for i in special]
    digits = {"type": "Digits", "individual_digits": True}
    level = {"type": "ByteLevel", "add_prefix_space": False} | dict.fromkeys(
        ("trim_offsets", "use_regex"), True
    )
    affixes = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    model = {
        "type": "BPE",
        **dict.fromkeys(affixes),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, level]},
        "post_processor": None,
        "decoder": level,
        "model": model,
    }

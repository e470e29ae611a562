"""What the oracle is asked: a model, a sequence, a dtype. Everything that can be refused is refused here, before torch is
imported; and what answering will take, in seconds and bytes, is estimated here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan, judged_plans
from oracle.formats.run_folder import inputs_digest
from oracle.model import tokenizer as tokenizers
from oracle.model.checkpoint import Checkpoint, is_neighbour, resolve
from oracle.pool.neighbour import Neighbour, neighbour_of
from oracle.truth.config import Config, check_weights, config_of
from oracle.truth.rope import Dynamic, LongRope

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}  # and their bytes
Progress = Callable[[str, int, int], None]
Note = Callable[[str], None]

# Measured on two x86-64 cores with SmolLM2: imports; bytes of weights a second when decoding; operations a second in prefill.
_IMPORTS, _BYTES, _OPERATIONS = 8.0, 6e9, 3e10


@dataclass(frozen=True, slots=True)
class Question:
    """`tokens` are those given; `steps` greedy ones follow, of which the last is not part of the sequence.

    `prompt_tokens` says how many of them the prompt has; `taps` are the places inside a layer that the truth records.
    """

    checkpoint: Checkpoint
    config: Config | Neighbour
    prompt: str | None
    tokens: tuple[int, ...]
    prompt_tokens: int
    steps: int
    chunks: tuple[int, ...] | None
    dtype: str
    threads: int
    taps: frozenset[str]
    tokenizer: tokenizers.Tokenizer | None

    @property
    def length(self) -> int:
        """Tokens of the judged sequence."""
        return len(self.tokens) + max(0, self.steps - 1)

    def sequence(self, generated: Sequence[int]) -> list[int]:
        """The judged sequence: the tokens given and all greedy ones but the last."""
        return [*self.tokens, *generated[: self.length - len(self.tokens)]]

    def plans(self, generated: Sequence[int]) -> dict[str, Plan]:
        """The judged plans, once the greedy tokens are known."""
        chunks = None if self.chunks is None else list(self.chunks)
        return judged_plans(self.sequence(generated), prompt=self.prompt_tokens, chunks=chunks)

    def check(self) -> None:
        """Refuses what the model has no place for."""
        # "hidden" is everybody's default: of a neighbour nothing inside a layer is recorded.
        known = ["hidden"] if isinstance(self.config, Neighbour) else list(self.config.taps(1))
        most, unknown = self.config.max_positions, sorted(self.taps - set(known))
        if self.length > most:
            why = "max_position_embeddings"
            if isinstance(self.config, Config) and isinstance(self.config.scaling, Dynamic):
                why += ", beyond which dynamic RoPE has other frequencies at every length, and cached keys differ from uncached ones"
            raise Refusal(
                f"tokens: {len(self.tokens)} and {max(0, self.steps - 1)} more, expected at most {most} ({why}); take fewer steps"
            )
        if unknown:
            raise Refusal(f"taps: {unknown[0]!r}, expected some of {', '.join(known)}")
        plans = self.plans([0] * self.steps)  # refuses chunks that do not add up
        if self.original is not None:
            self._check_sides(plans, self.original)

    @property
    def original(self) -> int | None:
        """The length beyond which longrope has other factors, None where the model has no longrope."""
        if isinstance(self.config, Neighbour):
            return self.config.original
        scaling = self.config.scaling
        return scaling.original_max_position_embeddings if isinstance(scaling, LongRope) else None

    def _check_sides(self, plans: Mapping[str, Plan], original: int) -> None:
        """transformers chooses longrope's factors at every call: a cache filled on both sides of the original length mixes them."""
        for name, plan in plans.items():
            first = next(call.fed for call in plan.calls())
            if first <= original < self.length:
                raise Refusal(
                    f"tokens: plan {name} begins with {first} of {self.length}, expected both on one side of {original}, up to which "
                    "longrope has short factors (transformers would change them in the middle); take a longer first chunk or fewer tokens"
                )

    def digest(self) -> str:
        """Of everything that the answer depends on."""
        return inputs_digest(
            fingerprint=self.checkpoint.fingerprint,
            config_digest=self.checkpoint.config_digest,
            tokens=self.tokens,
            prompt_tokens=self.prompt_tokens,
            steps=self.steps,
            chunks=self.chunks,
            dtype=self.dtype,
            threads=self.threads,
            taps=self.taps,
        )

    def segments(self, plans: Mapping[str, Plan]) -> dict[str, list[int]]:
        """How the truth follows the sequence: whole; the prompt, then singles; the prompt in chunks, the rest as one more.

        The last chunk is what the chunked plan does not have: many queries over a long history.
        """
        n, p = self.length, self.prompt_tokens
        chunks = [p]
        if "chunked" in plans:
            sizes = [call.fed for call in plans["chunked"].calls()]
            chunks = sizes[: len(sizes) - (n - p)]
        ways = {
            "full": [n],
            "step": [p] + [1] * (n - p),
            "chunked": [size for size in [*chunks, n - p] if size],
        }
        return {name: sizes for name, sizes in ways.items() if name == "full" or len(sizes) > 1}

    def estimate(self) -> str:
        """One line: the sequence, and about what its answer will take."""
        return f"oracle: {self.length} tokens, about {_round(self._seconds())} s and {_round(self._bytes() / 1e6)} MB on disk"

    def _seconds(self) -> float:
        shapes = self.config.shapes if isinstance(self.config, Neighbour) else self.config.shapes()
        size = sum(math.prod(shape) for shape in shapes.values())
        n, singles = self.length, self.length - self.prompt_tokens + self.steps
        decode = (3 * singles * DTYPES[self.dtype] + 8 * singles) * size / _BYTES
        prefill = (
            2 * size * (6 * n + 3 * 2 * n) / _OPERATIONS
        )  # six whole calls, three ways in float64 at half the speed
        return _IMPORTS + decode + prefill

    def _bytes(self) -> float:
        c, n = self.config, self.length
        if isinstance(c, Neighbour):
            return (8 + 5 * 4) * n * (c.vocab_size + c.cache_width)
        kv = 2 * c.n_layers * c.n_kv_heads * c.head_dim * n
        tapped = (
            sum(math.prod(shape) for name, shape in c.taps(n).items() if name in self.taps)
            * c.n_layers
        )
        return 8 * (n * c.vocab_size + kv + tapped) + 5 * 4 * (n * c.vocab_size + kv)


class Asked(TypedDict, total=False):
    """What a person may say about the sequence and the run."""

    prompt: str | None
    tokens: Sequence[int] | None
    prompt_tokens: int | None
    steps: int
    chunks: Sequence[int] | None
    dtype: str
    threads: int | None
    taps: Sequence[str]
    revision: str | None
    ignore_keys: Sequence[str]


def ask(
    model: str | None = None,
    *,
    progress: Progress | None = None,
    note: Note | None = None,
    **asked: Unpack[Asked],
) -> Question:
    """The question, or the one line that says why it cannot be asked."""
    prompt, tokens, prompt_tokens = (
        asked.get("prompt"),
        asked.get("tokens"),
        asked.get("prompt_tokens"),
    )
    steps, chunks, threads = asked.get("steps", 20), asked.get("chunks"), asked.get("threads")
    _check_options(asked, steps)
    checkpoint = resolve(
        model,
        revision=asked.get("revision"),
        ignore_keys=asked.get("ignore_keys", ()),
        progress=progress,
    )
    config = _config(checkpoint)
    tokenizer = tokenizers.load(checkpoint.folder)
    ids = (
        list(tokens)
        if tokens is not None
        else _encode(checkpoint.folder, tokenizer, prompt or "", note)
    )
    tokenizers.check_ids(ids, vocab_size=config.vocab_size, max_positions=config.max_positions)
    question = Question(
        checkpoint=checkpoint,
        config=config,
        prompt=prompt,
        tokens=tuple(ids),
        prompt_tokens=len(ids) if prompt_tokens is None else prompt_tokens,
        steps=steps,
        chunks=None if chunks is None else tuple(chunks),
        dtype=asked.get("dtype", "float32"),
        threads=threads or os.cpu_count() or 1,
        taps=frozenset(asked.get("taps", ("hidden",))),
        tokenizer=tokenizer,
    )
    question.check()
    return question


def _config(checkpoint: Checkpoint) -> Config | Neighbour:
    if is_neighbour(checkpoint):
        return neighbour_of(checkpoint)
    config = config_of(checkpoint)
    check_weights(config, checkpoint)
    return config


def _check_options(asked: Asked, steps: int) -> None:
    prompt, tokens, prompt_tokens, threads = (
        asked.get("prompt"),
        asked.get("tokens"),
        asked.get("prompt_tokens"),
        asked.get("threads"),
    )
    if (prompt is None) == (tokens is None):
        raise Refusal(
            f"prompt: {'neither text nor' if prompt is None else 'text and'} token ids given, expected one of them"
        )
    dtype = asked.get("dtype", "float32")
    if dtype not in DTYPES:
        raise Refusal(f"dtype: {dtype!r}, expected one of {', '.join(DTYPES)}")
    if type(steps) is not int or steps < 0:
        raise Refusal(f"steps: {steps!r}, expected a whole number from 0")
    check_threads(threads)
    if prompt_tokens is None:
        return
    given = len(tokens or ())
    if tokens is None or type(prompt_tokens) is not int or not 1 <= prompt_tokens <= given:
        raise Refusal(
            f"prompt-tokens: {prompt_tokens!r}, expected 1 to the number of token ids given, {given}"
        )
    if prompt_tokens < given and steps:
        raise Refusal(
            f"prompt-tokens: {prompt_tokens} of {given} with {steps} greedy steps, expected steps 0 where not all is prompt"
        )


def check_threads(threads: int | None) -> None:
    """Refuses a number of threads at which torch would die, or only wait for itself."""
    most = max(64, 4 * (os.cpu_count() or 1))
    if threads is not None and (type(threads) is not int or not 1 <= threads <= most):
        raise Refusal(
            f"threads: {threads!r}, expected 1 to {most} here; more only wait for each other, and torch dies where none are left"
        )


def _encode(
    folder: Path, tokenizer: tokenizers.Tokenizer | None, prompt: str, note: Note | None
) -> list[int]:
    if tokenizer is None:
        raise Refusal(
            f"{folder}: no tokenizer.json, expected one for a prompt of text; give token ids"
        )
    ids = tokenizer.encode(prompt)
    if tokenizer.warning and note:
        note(f"warning: {tokenizer.warning}")
    return ids


def _round(value: float) -> str:
    """Two digits: it is an estimate."""
    step = 10 ** max(0, math.floor(math.log10(max(value, 1.0))) - 1)
    return f"{max(1, round(value / step)) * step:,}"

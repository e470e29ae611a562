"""What the oracle is asked: a model, a sequence, a dtype.

Everything that can be refused is refused here, before torch is imported. What the answer will take,
in seconds and bytes, is estimated here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self, TypedDict

from oracle.formats.contents import DTYPES, KINDS, members_of
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan, judged_plans, probe_plans, probe_sizes, prompt_calls
from oracle.formats.progress import Note, Progress, silent
from oracle.formats.rows import WHOLE
from oracle.formats.run_folder import Inputs, probe_inputs
from oracle.model import tokenizer as tokenizers
from oracle.model.checkpoint import Checkpoint, is_neighbour, resolve
from oracle.pool.neighbour import Neighbour, neighbour_of
from oracle.truth.config import OLD_FREQUENCIES, Config, checked
from oracle.truth.rope import Dynamic

# The least number that each dtype rounds to infinity.
_INFINITE = {"float32": 2.0**128 - 2.0**103, "float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119}

# Measured on two x86-64 cores with SmolLM2: seconds of imports; weights that a call reads, and
# operations that it does, a second (1.5e9 weights are 6 GB). In float64 half the operations.
IMPORTS, _WEIGHTS, _OPERATIONS = 8.0, 1.5e9, 1e11


class Computed(TypedDict, total=False):
    """Keywords that say which of a model's commits and keys to read, and how to compute."""

    revision: str | None
    ignore_keys: Sequence[str]
    dtype: str
    threads: int | None


class Asked(Computed, total=False):
    """The keywords of `ask` beside the model."""

    prompt: str | None
    tokens: Sequence[int] | None
    prompt_tokens: int | None
    steps: int
    chunks: Sequence[int] | None
    taps: Sequence[str]
    all_rows: bool


class Making(Asked, total=False):
    """The keywords of `folder.run` beside the model and the place."""

    probe: bool
    probe_out: Path | None
    keep_pool: bool
    force: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Question(Inputs):
    """A model, as the oracle reads it, and what is computed on it."""

    checkpoint: Checkpoint
    config: Config | Neighbour
    prompt: str | None
    tokenizer: tokenizers.Tokenizer | None

    @property
    def length(self) -> int:
        return len(self.tokens) + max(0, self.steps - 1)

    def sequence(self, generated: Sequence[int]) -> list[int]:
        """The judged sequence: the tokens given and all greedy ones but the last."""
        return [*self.tokens, *generated[: self.length - len(self.tokens)]]

    def plans(self, generated: Sequence[int]) -> dict[str, Plan]:
        """The judged plans, once the greedy tokens are known."""
        if self.probe:
            return probe_plans(self.tokens)
        chunks = None if self.chunks is None else list(self.chunks)
        return judged_plans(
            self.sequence(generated),
            prompt=self.prompt_tokens,
            chunks=chunks,
            original=self.config.original,
            all_rows=self.all_rows,
        )

    def probed(self) -> Question:
        """What the same model's probe asks; a Refusal where it has none."""
        if not isinstance(self.config, Config):
            raise Refusal("there is none without a truth", where="probe")
        sizes = self.config.vocab_size, self.config.max_positions
        inputs = probe_inputs(*sizes, dtype=self.dtype, threads=self.threads)
        if inputs is None:
            raise Refusal("the model has a place for one token only", where="probe")
        asked = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
        probe = replace(self, prompt=None, **asked)
        return probe.checked()

    def checked(self) -> Self:
        """This question. Refuses what the model has no place for, and a dtype that cannot hold its
        weights.
        """
        check_range(self.checkpoint, self.dtype)
        config, most = self.config, self.config.max_positions
        if self.length > most:
            why = "max_position_embeddings"
            if isinstance(config, Config) and isinstance(config.scaling, Dynamic):
                why += ", beyond which dynamic RoPE has other frequencies at every length, and "
                why += "cached keys differ from uncached ones"
            given, more = len(self.tokens), max(0, self.steps - 1)
            what = f"{given} and {more} more, expected at most {most} ({why})"
            raise Refusal(what, where="tokens", remedy="take fewer steps")
        # "hidden" is everybody's default. Of a neighbour nothing inside a layer is recorded.
        known = list(config.taps(1)) if isinstance(config, Config) else ["hidden"]
        for tap in sorted(set(self.taps) - set(known)):
            raise Refusal(f"taps: {tap!r}, expected some of {', '.join(known)}")
        self._check_sides(self.plans([0] * self.steps))  # refuses chunks that do not add up
        return self

    def _check_sides(self, plans: Mapping[str, Plan]) -> None:
        """Refuses a cache that is filled on both sides of longrope's original length.

        transformers chooses longrope's factors at every call, so such a cache mixes them.
        """
        original = self.config.original
        for name, plan in plans.items():
            first = next(call.fed for call in plan.calls())
            if original is not None and first <= original < self.length:
                raise Refusal(
                    f"plan {name} begins with {first} of {self.length}, expected both on one side "
                    f"of {original}, up to which longrope has short factors "
                    "(transformers would change them in the middle)",
                    where="tokens",
                    remedy="take a longer first chunk or fewer tokens",
                )

    def members(self, plans: Collection[str], kinds: Sequence[str] = KINDS) -> list[str]:
        """The pool that follows these plans, the probe's with the model's own attention only."""
        return members_of(plans, kinds[-1:] if self.probe else kinds, length=self.length)

    def segments(self, plans: Mapping[str, Plan]) -> dict[str, list[int]]:
        """How the truth follows the sequence: whole, by steps and in chunks, as segment lengths.

        By steps is the prompt, then singles. In chunks is the prompt in chunks, then the rest as
        one more, which the chunked plan does not have: many queries over a long history.
        The mixed plan as it is. A long sequence, whose every way takes much time and memory, is
        followed whole and as the chunked plan is, which has chunks and singles.
        """
        n, p = self.length, self.prompt_tokens
        if self.probe:
            return {name: [call.fed for call in plan.calls()] for name, plan in plans.items()}
        chunks = prompt_calls(plans["chunked"], n, p) if "chunked" in plans else [p]
        ways = {"full": [n], "step": [p] + [1] * (n - p), "chunked": [*chunks, n - p]}
        if n > WHOLE:
            ways = {"full": [n], "chunked": [*chunks, *[1] * (n - p)]}
        elif "mixed" in plans:
            ways["mixed"] = [call.fed for call in plans["mixed"].calls()]
        ways["chunked"] = [size for size in ways["chunked"] if size]
        return {name: sizes for name, sizes in ways.items() if name == "full" or len(sizes) > 1}

    @property
    def shared(self) -> int:
        """How many positions the probe's second way takes from the first: its first chunk, which
        is computed alike. For the main sequence none, whose ways are short.
        """
        return probe_sizes(self.length)[0] if self.probe else 0

    def estimate(self, *others: Question) -> str:
        """One line: the sequences of this and other questions, and about what all will take."""
        asked = [self, *others]
        seconds = rough(IMPORTS + sum(one.seconds() for one in asked))
        megabytes = rough(sum(one.disk_bytes() for one in asked) / 1e6)
        what = " and ".join(one.named for one in asked)
        return f"oracle: {what}, about {seconds} s and {megabytes} MB on disk"

    @property
    def named(self) -> str:
        """The sequence in words."""
        tokens = f"{self.length} token{'s' * (self.length != 1)}"
        return f"a probe of {tokens}" if self.probe else tokens

    def seconds(self) -> float:
        """About how long the answer takes on two cores, without the imports."""
        size = sum(math.prod(shape) for shape in self.config.shapes().values())
        plans = self.plans([0] * self.steps)
        pool = [plans[name.split("-")[1]] for name in self.members(plans)]
        ways = list(self.segments(plans).values())
        calls = sum(len(list(plan.calls())) for plan in pool) + sum(map(len, ways)) + self.steps
        tokens = self.length * (len(pool) + 2 * len(ways)) + self.steps
        return size * (calls / _WEIGHTS + 2 * tokens / _OPERATIONS)

    def disk_bytes(self) -> float:
        """The truth in float64 with its taps, and the pool in float32."""
        c, n, tapped = self.config, self.length, 0
        if isinstance(c, Config):
            sizes = {name: math.prod(shape) for name, shape in c.taps(n).items()}
            tapped = c.n_layers * sum(sizes[name] for name in self.taps)
        plans = self.plans([0] * self.steps)
        (full,) = plans["full"].calls()
        rows, pool = len(plans["full"].kept(full)), len(self.members(plans))
        return (8 + pool * 4) * (rows * c.vocab_size + n * c.cache_width) + 8 * tapped


def ask(
    model: str | None = None,
    *,
    prompt: str | None = None,
    tokens: Sequence[int] | None = None,
    prompt_tokens: int | None = None,
    steps: int = 20,
    chunks: Sequence[int] | None = None,
    dtype: str = "float32",
    threads: int | None = None,
    taps: Sequence[str] = ("hidden",),
    all_rows: bool = False,
    revision: str | None = None,
    ignore_keys: Sequence[str] = (),
    progress: Progress = silent,
    note: Note = silent,
) -> Question:
    """The question, or the one line that says why it cannot be asked."""
    check_run(dtype, threads)
    _check_sequence(prompt, tokens, prompt_tokens, steps)
    source = resolve(model, revision=revision, ignore_keys=ignore_keys, progress=progress)
    config = neighbour_of(source) if is_neighbour(source) else checked(source)
    tokenizer = tokenizers.load(source.folder)
    ids = _encode(source.folder, tokenizer, prompt or "", note) if tokens is None else list(tokens)
    tokenizers.check_ids(ids, vocab_size=config.vocab_size, max_positions=config.max_positions)
    return Question(
        checkpoint=source,
        config=config,
        prompt=prompt,
        tokens=tuple(ids),
        prompt_tokens=len(ids) if prompt_tokens is None else prompt_tokens,
        steps=steps,
        chunks=None if chunks is None else tuple(chunks),
        dtype=dtype,
        threads=threads or os.cpu_count() or 1,
        taps=taps,
        all_rows=all_rows,
        tokenizer=tokenizer,
    ).checked()


def _check_sequence(
    prompt: str | None, tokens: Sequence[int] | None, prompt_tokens: int | None, steps: int
) -> None:
    if (prompt is None) == (tokens is None):
        given = "neither text nor" if prompt is None else "text and"
        raise Refusal(f"prompt: {given} token ids given, expected one of them")
    if type(steps) is not int or steps < 0:
        raise Refusal(f"steps: {steps!r}, expected a whole number from 0")
    if prompt_tokens is None:
        return
    n = len(tokens or ())
    where = f"prompt-tokens: {prompt_tokens!r}"
    if tokens is None or type(prompt_tokens) is not int or not 1 <= prompt_tokens <= n:
        raise Refusal(f"{where}, expected 1 to the number of token ids given, {n}")
    if prompt_tokens < n and steps:
        expected = "expected steps 0 where not all is prompt"
        raise Refusal(f"{where} of {n} with {steps} greedy steps, {expected}")


def check_run(dtype: str, threads: int | None) -> None:
    """Refuses a dtype of no name, and threads at which torch would die, or wait for itself."""
    if dtype not in DTYPES:
        raise Refusal(f"dtype: {dtype!r}, expected one of {', '.join(DTYPES)}")
    most = max(64, 4 * (os.cpu_count() or 1))
    if threads is not None and (type(threads) is not int or not 1 <= threads <= most):
        why = "more only wait for each other, and torch dies where none are left"
        raise Refusal(f"threads: {threads!r}, expected 1 to {most} here; {why}")


def check_range(checkpoint: Checkpoint, dtype: str) -> None:
    """Refuses weights that become infinite when they are rounded to the run's dtype."""
    for name, most in checkpoint.largest.items():
        if most >= _INFINITE[dtype] and not name.endswith(OLD_FREQUENCIES):
            what = f"{name} holds {most:.6g}, which is infinite in {dtype}, expected finite weights"
            file = checkpoint.tensors[name].file
            raise Refusal(what, where=file, remedy="use another --dtype")


def _encode(
    folder: Path, tokenizer: tokenizers.Tokenizer | None, prompt: str, note: Note
) -> list[int]:
    if tokenizer is None:
        what = "no tokenizer.json, expected one for a prompt of text"
        raise Refusal(what, where=folder, remedy="give token ids")
    ids = tokenizer.encode(prompt)
    if tokenizer.warning:
        note(f"warning: {tokenizer.warning}")
    return ids


def rough(value: float) -> str:
    """Two digits: it is an estimate."""
    step = 10 ** max(0, math.floor(math.log10(max(value, 1.0))) - 1)
    return f"{max(1, round(value / step)) * step:,}"

"""What both halves of `pitfalls` ask the oracle: how two talks that begin alike should go."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mlxkv.commands.pitfalls import behaviour
from mlxkv.commands.pitfalls.behaviour import Right
from mlxkv.commands.pitfalls.scenarios import Setting
from mlxkv.engines import oracle
from mlxkv.engines.progress import say
from mlxkv.judge.case import read_case
from oracle.formats.errors import Refusal
from oracle.model import tokenizer
from oracle.model.checkpoint import Checkpoint, Named

PROMPTS = ("The capital of France is", "The capital of Germany is")

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Named):
    """Two prompts that begin alike, as text or as ids, and how many greedy tokens follow each."""

    prompt: str | None = None
    other_prompt: str | None = None
    tokens: Ids | None = None
    other_tokens: Ids | None = None
    steps: int = 20
    device: str = "auto"

    def __post_init__(self) -> None:
        if (self.tokens is None) != (self.other_tokens is None):
            raise Refusal("--tokens and --other-tokens: one is given, expected both or none")
        if self.tokens is not None and (self.prompt, self.other_prompt) != (None, None):
            raise Refusal("--prompt and --tokens: expected text or ids; leave one kind out")

    @property
    def ids(self) -> tuple[Ids, Ids] | None:
        """Both prompts as ids, if they were given so."""
        given = self.tokens, self.other_tokens
        return None if given[0] is None or given[1] is None else (given[0], given[1])

    @property
    def texts(self) -> tuple[str, str]:
        """Both prompts as text, where they were not given as ids."""
        return self.prompt or PROMPTS[0], self.other_prompt or PROMPTS[1]


def setting(request: Request, checkpoint: Checkpoint) -> Setting:
    """The prompts, before anything is known of what follows them.

    What would show nothing is refused before the oracle works; what the model answers changes
    nothing of it.
    """
    first, second = prompts(request, checkpoint)
    unknown = (0,) * request.steps
    limit = checkpoint.max_positions
    draft = Setting(first, second, unknown, unknown, limit=limit, steps=request.steps)
    draft.check()
    return draft


def answered(draft: Setting, rights: Mapping[str, Right]) -> Setting:
    """The prompts, and what follows them."""
    return replace(draft, right=rights["first"].tokens, other=rights["second"].tokens)


def prompts(request: Request, checkpoint: Checkpoint) -> tuple[Ids, Ids]:
    most = checkpoint.max_positions
    if request.ids is not None:
        first, second = request.ids
    else:
        words = tokenizer.load(checkpoint.folder)
        if words is None:
            raise Refusal(
                f"{checkpoint.folder}: no tokenizer.json, expected one for prompts of text; "
                "give ids with --tokens and --other-tokens"
            )
        first, second = (tuple(words.encode(text)) for text in request.texts)
    for ids in (first, second):
        tokenizer.check_ids(list(ids), vocab_size=checkpoint.vocab_size, max_positions=most)
    longest = len(first) + len(second) + 2 * request.steps
    if longest > most:
        raise Refusal(
            f"--steps {request.steps}: both prompts and their answers take {longest} positions, "
            f"expected at most {most} (max_position_embeddings); take fewer steps or "
            "shorter prompts"
        )
    return first, second


def question(request: Request, checkpoint: Checkpoint, name: str, prompt: Ids) -> oracle.Question:
    """What the oracle is asked of one of the talks, by its name."""
    texts = {} if request.ids else dict(zip(("first", "second"), request.texts, strict=True))
    return oracle.Question(
        checkpoint=checkpoint,
        prompt=texts.get(name),
        tokens=prompt,
        prompt_tokens=len(prompt),
        steps=request.steps,
        chunks=None,
        dtype="float32",
        threads=os.cpu_count() or 1,
    )


def rights(
    request: Request, checkpoint: Checkpoint, prompts: Mapping[str, Ids]
) -> dict[str, Right]:
    """How each talk should go: its greedy tokens, and the truth of its rows."""
    return rights_and_probe(request, checkpoint, prompts, None)[0]


def rights_and_probe(
    request: Request,
    checkpoint: Checkpoint,
    prompts: Mapping[str, Ids],
    probe: oracle.Question | None,
) -> tuple[dict[str, Right], oracle.Answer | None]:
    """The same, and the answer on the model's probe; one process of the oracle makes all."""
    for prompt in prompts.values():
        tokens = f"{len(prompt)} tokens and {request.steps} steps"
        say(f"oracle: the truth of {tokens} on {checkpoint.name}")
    asked = [question(request, checkpoint, name, prompt) for name, prompt in prompts.items()]
    answers, probed = oracle.ask_all(asked, probe)
    found = zip(prompts, answers, strict=True)
    return {name: _right(request, oracle.told(answer)) for name, answer in found}, probed


def _right(request: Request, answer: oracle.Answer) -> Right:
    case, steps = read_case(answer.folder), request.steps
    generated = case.manifest.generated
    if len(generated) != steps:
        raise Refusal(
            f"manifest.json: {steps} generated tokens expected, found {generated!r}; "
            "run again with --fresh"
        )
    return behaviour.right(case, generated)

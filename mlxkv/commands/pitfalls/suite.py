"""The lives of a cache in the caller's own process, on a small random model: no oracle, no torch.

What is right is what mlx-lm's KVCache gives when it is fed straight, in float32; the noise floor is
how far dithered runs of it differ. So it cannot see what KVCache itself has wrong, which `mlxkv
pitfalls` and `mlxkv compare` measure against the float64 truth.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast, get_args

import numpy as np

from mlxkv.commands.pitfalls.lives import WHAT, Talks
from mlxkv.commands.pitfalls.lives import straight as fed_straight
from mlxkv.commands.pitfalls.scenarios import Setting
from mlxkv.commands.pitfalls.straight import DITHERS, Talk, left_at, noise, rows_of
from mlxkv.commands.pitfalls.trial import Came, Trial
from mlxkv.engines import own_cache
from mlxkv.engines.kinds import Kind, Lossy
from mlxkv.engines.mlx_lm import MlxLmRunner
from oracle.formats.errors import Refusal
from oracle.formats.plan import Ids, Plan
from oracle.formats.trace import Meta, Trace

PROMPT, LONG = 5, 264
"""Tokens of each prompt, and of the talk that crosses 256 rows."""
SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}
"""Heads of 64, so that groups of 32 and 64 fit; two of them, so that a head mixed up is seen."""
SHARP = 3.0
"""By how much queries and keys exceed random ones: flat attention hides which row is read."""
DITHER, MORE = 2.0**-23, 2.0**-20
"""By how much the embedding is dithered: as float32 rounds it; and for a lossy cache by more, since
on so small a model hardly a bucket would turn, and what counts is how far one that does goes."""


class _Runner(MlxLmRunner):
    """On the caches that a function makes."""

    def __init__(self, model: Any, plan: Plan, kind: Kind, make: Callable[[Any], Any]) -> None:
        super().__init__(model, plan, kind=kind)
        self.make = make

    def _made(self, batch: int, padding: Sequence[int]) -> list[Any]:
        return own_cache.checked(self.make, self.model.args, len(self.model.layers), self.kind)


def small() -> Any:
    """A random Llama of mlx-lm's in float32, the same at every call."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten
    from mlx_lm.models.llama import Model, ModelArgs

    model, random = Model(ModelArgs.from_dict(SMALL)), np.random.default_rng(0)
    made = []
    for name, array in tree_flatten(model.parameters()):
        values = random.standard_normal(array.shape)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif "embed" not in name:
            values *= array.shape[-1] ** -0.5
        if "q_proj" in name or "k_proj" in name:
            values *= SHARP**0.5
        made.append((name, mx.array(values.astype(np.float32))))
    model.update(tree_unflatten(made))
    mx.eval(model.parameters())
    return model


def tried(
    make: Callable[[Any], Any],
    *,
    lossy: str = "",
    model: Any = None,
    only: Collection[str] = (),
) -> tuple[Trial, list[Came]]:
    """What came of every life of the caches that `make` makes, or of `only` some."""
    if lossy not in get_args(Lossy):
        what = f"{lossy!r}, expected {' or '.join(map(repr, get_args(Lossy)))}"
        raise Refusal(what, where="lossy")
    if unknown := sorted(set(only) - set(WHAT)):
        what = f"{unknown[0]!r}, expected some of {', '.join(WHAT)}"
        raise Refusal(what, where="scenarios")
    model, talks, truths = _usual(_device()) if model is None else _known(model)
    name = getattr(make, "__qualname__", type(make).__name__).rpartition(".")[2]
    kind = Kind(
        name, "own", cast(Lossy, lossy), module=getattr(make, "__module__", ""), function=name
    )
    trial = Trial(kind, talks, None, tuple(only))

    own_cache.checked(make, model.args, len(model.layers), kind)

    def run(plan: Plan, dither: int = 0) -> Trace:
        with dithered(model, dither, by=MORE):
            return _trace(_Runner(model, plan, kind, make))

    if lossy == "window":
        trial = Trial(kind, talks, _window(run, truths["long"]), tuple(only))
    traces = {plan.name: run(plan) for plan in trial.plans}
    again = [{p.name: run(p, n) for p in trial.straights} for n in DITHERS]
    return trial, trial.judge(traces, truths, trial.measure(traces, again, truths))


def _known(model: Any) -> tuple[Any, Talks, dict[str, Talk]]:
    """A model, what it is told, and how KVCache goes on it."""
    talks = Talks(_setting(model), _ids(model, LONG, seed=2))
    return model, talks, {name: _truth(model, name, ids) for name, ids in talks.tokens.items()}


@cache
def _usual(device: str) -> tuple[Any, Talks, dict[str, Talk]]:
    """The same of the small random model on a device: once for all caches that a suite tries."""
    return _known(small())


def _device() -> str:
    import mlx.core as mx

    return str(mx.default_device())


def _trace(runner: MlxLmRunner) -> Trace:
    runner.run()
    meta = Meta(runner.plan, "mlx-lm", "", "float32", outcomes=runner.outcomes)
    meta.environment.update(runner.says())
    return Trace(meta, runner.arrays())


@contextmanager
def dithered(model: Any, seed: int, *, by: float = DITHER) -> Iterator[None]:
    """The embedding is off by `by` times normal numbers for the block; where seed is 0, not."""
    import mlx.core as mx

    if seed == 0:
        yield
        return
    embedding = model.model.embed_tokens
    kept = embedding.weight
    chance = np.random.default_rng(seed).standard_normal(kept.shape)
    embedding.weight = kept * mx.array(1 + by * chance, dtype=kept.dtype)
    try:
        yield
    finally:
        embedding.weight = kept


def _ids(model: Any, n: int, *, seed: int) -> Ids:
    vocab = int(model.args.vocab_size)
    return tuple(int(i) for i in np.random.default_rng(seed).integers(1, vocab, n))


def _setting(model: Any) -> Setting:
    """Two talks of random tokens, of which the first three are the same."""
    first, second = _ids(model, 24, seed=0), _ids(model, 24, seed=1)
    second = (*first[:3], *(i if i != first[3] else i - 1 or 2 for i in second[3:]))
    p = PROMPT
    return Setting(
        first[:p],
        second[:p],
        right=(*first[p:], 0),
        other=(*second[p:], 0),
        limit=int(getattr(model.args, "max_position_embeddings", None) or 2**31 - 1),
        steps=24 - p + 1,
    )


def _truth(model: Any, name: str, tokens: Ids) -> Talk:
    """How KVCache goes, fed straight; the floor is how far dithered runs are apart."""
    prompt = 250 if len(tokens) > 250 else PROMPT
    plan = fed_straight(name, tokens, [prompt, *[1] * (len(tokens) - prompt)])
    runs = []
    for seed in (0, *DITHERS):
        with dithered(model, seed):
            runs.append(_trace(MlxLmRunner(model, plan)).logits)
    least = np.spacing(np.abs(runs[0]).max()).astype(np.float64)
    floor = noise(runs, np.array([least]))
    positions = np.arange(len(tokens))
    return Talk(tokens, positions, runs[0].astype(np.float64), np.full(len(tokens), floor))


def _window(run: Callable[[Plan], Trace], truth: Talk) -> int | None:
    """How many tokens a window keeps: fed one by one, where its rows leave the truth."""
    tokens = truth.tokens
    return left_at(rows_of(run(fed_straight("window", tokens, [1] * len(tokens))), truth), truth)

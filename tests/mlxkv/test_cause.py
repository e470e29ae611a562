"""A mistake is named, whichever it is and wherever it shows; what cannot be seen is named too."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import models
import numpy as np
import pytest
from command import torch_python
from mistaken import Array, Engine, causal

from mlxkv.commands.compare.suspects import Suspects, _plan
from mlxkv.judge import cause
from mlxkv.judge.angles import estimate
from mlxkv.judge.case import Case, read_case
from mlxkv.judge.result import Verdict
from mlxkv.judge.verdict import judge
from oracle.formats.run_folder import read_plans
from oracle.formats.trace import Trace

PLANS = ("full", "step", "chunked")
LONG = [1.0, 2.0, 3.0, 4.0]
SHORT = [1.0, 1.1, 1.3, 1.7]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 2.0}
LONGROPE |= {"original_max_position_embeddings": 32}
LAYOUTS: dict[str, Any] = {
    "mha": models.config("mha"),
    "gqa": models.config("gqa"),
    "mqa": models.config("mqa"),
    "llama3": models.config("llama3"),
    "wide": models.config("gqa", num_attention_heads=8, head_dim=16, num_key_value_heads=4),
    # As Llama 3.2 has it: at few tokens scaling changes little.
    "mild": models.config("llama3", rope_scaling=models.LLAMA3 | {"factor": 1.5}),
    "blended": models.config("llama3", head_dim=16),
    "llama32": models.config(
        "llama3",
        head_dim=64,
        rope_theta=500000.0,
        max_position_embeddings=131072,
        rope_scaling=models.LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
    ),
    "many": models.config("gqa", vocab_size=3000),
    "longrope": models.config("gqa", rope_scaling=LONGROPE),
}


@dataclass
class Known:
    """A tiny model, its run folder, and the suspects by the plan that was asked for."""

    folder: Path
    config: Mapping[str, Any]
    weights: dict[str, Array]
    case: Case
    suspects: dict[str, cause.Suspects]

    def engine(self, **mistake: Any) -> Engine:
        return Engine(self.config, self.weights, **mistake)

    def run(self, engine: Engine, plans: tuple[str, ...] = PLANS) -> dict[str, Trace]:
        found = read_plans(self.folder, self.case.manifest)
        return {plan: engine.follow(found[plan]) for plan in plans}

    def of(self, verdict: Verdict) -> cause.Suspects:
        plan = _plan(verdict)
        if plan not in self.suspects:
            out = self.folder.with_name(f"{self.folder.name}-{plan}")
            command = ["oracle", "suspects", str(self.folder), "--plan", plan, "--out", str(out)]
            subprocess.run(torch_python("-m", *command), check=True, capture_output=True)
            self.suspects[plan] = cause.read_suspects(out, self.case.manifest.fingerprint)
        return self.suspects[plan]

    def named(self, **mistake: Any) -> cause.Cause | str:
        return self.explained(self.run(self.engine(**mistake)))

    def explained(self, runs: dict[str, Trace]) -> cause.Cause | str:
        verdict = judge(self.case, runs)
        assert verdict.outcome == "differ", verdict.reasons
        return cause.find(self.case, runs, self.of(verdict))

    def unseen(self, runs: dict[str, Trace]) -> tuple[str, ...]:
        verdict = judge(self.case, runs)
        assert verdict.outcome == "agree", [g for g in verdict.gates if g.failed]
        return cause.blind(self.case, runs, verdict.gates, self.of(verdict))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Known]:
    made: dict[tuple[str, str, int], Known] = {}
    room = tmp_path_factory.mktemp("known")

    def make(layout: str, dtype: str = "float32", n: int = 24) -> Known:
        if (key := (layout, dtype, n)) not in made:
            config = LAYOUTS[layout]
            weights = models.weights(config)
            model = models.save(room / layout, config, weights)
            folder = room / f"{layout}-{dtype}-{n}"
            ids = ",".join(map(str, models.ids(n, seed=5)))
            # longrope's plans must begin on one side of its original length, 32.
            prompt, chunks = ("36", "33,3") if n == 40 else ("8", "3,5")
            options = ["--tokens", ids, "--prompt-tokens", prompt, "--steps", "0"]
            options += ["--dtype", dtype, "--chunks", chunks, "--out", str(folder)]
            command = torch_python("-m", "oracle", "run", str(model), *options)
            subprocess.run(command, check=True, capture_output=True)
            made[key] = Known(folder, config, weights, read_case(folder), {})
        return made[key]

    return make


def several(own: Array) -> bool:
    return len(own) > 1


def no_mask(start: int, own: Array, keys: Array, stop: int) -> Array:
    return causal(start, own, keys, stop) & (len(own) == 1)


def ahead(start: int, own: Array, keys: Array, stop: int) -> Array:
    return np.asarray(keys > own + several(own))


def behind(start: int, own: Array, keys: Array, stop: int) -> Array:
    return np.asarray(keys > own - several(own))


def offset(start: int, own: Array, keys: Array, stop: int) -> Array:
    return np.asarray(keys > own - (start if several(own) else 0))


def no_later_mask(start: int, own: Array, keys: Array, stop: int) -> Array:
    return causal(start, own, keys, stop) & (start == 0 or len(own) == 1)


def in_later_calls(hides: Callable[..., Array]) -> Callable[..., Array]:
    return lambda start, *rest: (hides if start else causal)(start, *rest)


def to_half(x: Array) -> Array:
    return x.astype(np.float16).astype(np.float32)


def to_bfloat16(x: Array) -> Array:
    return np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32))


def in_8_bits(x: Array) -> Array:
    size = 16 if x.shape[-1] == 16 else x.shape[-1]
    assert x.shape[-1] == size
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    edge = np.where(abs(low) > abs(high), low, high)
    scale = (high - low) / 255 * np.where(edge == low, 1, -1)
    scale = edge / np.round(edge / scale)
    return np.float32(np.clip(np.round((x - edge) / scale), 0, 255) * scale + edge)


MISTAKES: dict[str, dict[str, Any]] = {
    "no causal mask": {"hides": no_mask},
    "a mask off by one (each token sees the next)": {"hides": ahead},
    "a mask off by one (no token sees itself)": {"hides": behind},
    "a mask without its offset in a call after the first": {"hides": offset},
    "no mask in a call of several tokens after the first": {"hides": no_later_mask},
    "a mask off by one in a call after the first (each token sees the next)": {
        "hides": in_later_calls(ahead)
    },
    "a mask off by one in a call after the first (no token sees itself)": {
        "hides": in_later_calls(behind)
    },
    "positions one too high after the first call": {
        "position": lambda start, own: own + (start > 0)
    },
    "positions one too low after the first call": {
        "position": lambda start, own: own - (start > 0)
    },
    "positions that start at 0 in every call": {"position": lambda start, own: own - start},
    "attention's scale 1 instead of 1 / sqrt(head_dim)": {"scale": 1.0},
    "norms' weights taken as 1 + weight": {"norm_weight": lambda name, w: 1 + w},
    "norms without their weights": {"norm_weight": lambda name, w: np.ones_like(w)},
    "the final norm without its weight": {
        "norm_weight": lambda name, w: np.ones_like(w) if name == "model.norm" else w
    },
    "a cache in float16 precision": {"kept": to_half},
    "a cache in bfloat16 precision": {"kept": to_bfloat16},
    "a cache in 8-bit precision": {"kept": in_8_bits},
    "a cache that holds the rows of earlier calls in bfloat16 precision": {"held": to_bfloat16},
}


@pytest.mark.parametrize("layout", ["gqa", "mqa"])
@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_named(known: Callable[..., Known], layout: str, words: str) -> None:
    found = known(layout).named(**MISTAKES[words])
    assert not isinstance(found, str), found
    assert found.words == words
    bordered = "call" in words or "mask" in words  # what these do depends on the plan's calls
    assert (" in plan " in found.against) == bordered


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        ("attention's scale 1 / head_dim instead of 1 / sqrt(head_dim)", {"scale": 1 / 16}),
        (
            "attention's scale 1 / sqrt(hidden_size / heads) instead of 1 / sqrt(head_dim)",
            {"scale": 0.5},
        ),
        (
            "key/value heads tiled over the query heads instead of repeated",
            {"reads": lambda H, K: np.arange(H) % K},
        ),
        ("interleaved RoPE (pairs 2i and 2i + 1 turned instead of halves)", {"interleaved": True}),
    ],
)
def test_a_mistake_of_heads_is_named(
    known: Callable[..., Known], words: str, mistake: dict[str, Any]
) -> None:
    found = known("wide").named(**mistake)
    assert not isinstance(found, str), found
    assert found.words == words


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("dropped biases", ".bias"),
        ("dropped attention biases", "attn.*bias"),
        ("dropped mlp biases", "mlp.*bias"),
    ],
)
def test_dropped_biases_are_named(known: Callable[..., Known], words: str, part: str) -> None:
    one = known("mqa")
    engine = one.engine()
    engine.weights = {name: a for name, a in one.weights.items() if not re.search(part, name)}
    found = one.explained(one.run(engine))
    assert not isinstance(found, str), found
    assert found.words == words


TURNED = (1 + np.log(2) / np.log(32)) ** 0.5


def plain(theta: float = 10000.0, D: int = 8) -> Array:
    return np.asarray(theta ** (-np.arange(0, D, 2) / D))


@pytest.mark.parametrize(
    ("n", "divisors", "turned", "words"),
    [
        (24, SHORT, 1.0, "RoPE's attention_factor dropped"),
        (24, LONG, TURNED, "longrope's short_factor ignored (long_factor at every length)"),
        (40, SHORT, TURNED, "longrope's long_factor ignored (short_factor at every length)"),
        (24, [1.0] * 4, 1.0, "lost RoPE scaling"),
    ],
)
def test_a_lost_key_of_longrope_is_named(
    known: Callable[..., Known], n: int, divisors: list[float], turned: float, words: str
) -> None:
    found = known("longrope", n=n).named(rope=plain() / divisors, turned=turned)
    assert not isinstance(found, str), found
    assert found.words == words


def test_the_right_longrope_has_no_cause_and_cannot_show_the_other_lengths_list(
    known: Callable[..., Known],
) -> None:
    for n, used, other in ((24, SHORT, "long"), (40, LONG, "short")):
        one = known("longrope", n=n)
        runs = one.run(one.engine(rope=plain() / used, turned=TURNED))
        used_name = {"long": "short", "short": "long"}[other]
        assert one.unseen(runs) == (
            f"longrope's {other}_factor ignored ({used_name}_factor at every length)",
        )


@pytest.mark.parametrize("layout", ["mha", "gqa", "mqa", "llama3", "wide"])
def test_a_correct_engine_has_no_cause_and_in_float32_sees_all(
    known: Callable[..., Known], layout: str
) -> None:
    one = known(layout)
    runs = one.run(one.engine())
    assert one.unseen(runs) == ()
    assert cause.find(one.case, runs, one.of(judge(one.case, runs))) == (
        "the cause was not looked for: sigma is within its limit at the first 24 positions of "
        "plans full, step and chunked"
    )


@pytest.mark.parametrize("layout", ["gqa", "mqa", "wide"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w * (10010 / 10000) ** -POWERS(w), "rope_theta 10010 instead of 10000"),
        (lambda w: w * 0.99 ** -POWERS(w), "rope_theta 9900 instead of 10000"),
        (lambda w: w * 1.05 ** -POWERS(w), "rope_theta 10500 instead of 10000"),
        (lambda w: w * 123.4 ** -POWERS(w), "rope_theta 1234000 instead of 10000"),
        (lambda w: w / 1.1, "RoPE's angles divided by 1.1 (as linear scaling does)"),
        (lambda w: w * 2, "RoPE's angles divided by 0.5 (as linear scaling does)"),
    ],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_theta_or_factor_is_estimated_from_keys(
    known: Callable[..., Known],
    layout: str,
    change: Callable[[Array], Array],
    words: str,
    interleaved: bool,
) -> None:
    one = known(layout)
    D = one.config["head_dim"]
    found = one.named(rope=change(plain(D=D)), interleaved=interleaved)
    assert not isinstance(found, str), found
    assert found.words == ("interleaved RoPE and " if interleaved else "") + words
    assert found.against == "the truth's keys of layer 0 turned so"
    assert found.sigma < 3


def POWERS(w: Array) -> Array:
    return np.arange(len(w)) / len(w)


def test_a_theta_is_estimated_from_keys_whose_rows_are_in_pairs(
    known: Callable[..., Known],
) -> None:
    one = known("gqa")
    runs = one.run(one.engine(rope=plain(10100.0)))
    for name, keys in runs["step"].arrays.items():
        if name.endswith("keys"):
            pairs = np.stack(np.split(keys, 2, axis=-1), -1).reshape(keys.shape)
            runs["step"] = replace(runs["step"], arrays=dict(runs["step"].arrays) | {name: pairs})
    runs = {"full": without_cache(runs)["full"], "step": runs["step"]}
    found = one.explained(runs)
    assert not isinstance(found, str), found
    assert found.words == "rope_theta 10100 instead of 10000"


@pytest.mark.parametrize("start", [1, 2])
def test_positions_that_start_elsewhere_are_read_from_keys(
    known: Callable[..., Known], start: int
) -> None:
    # RoPE turns by distances, so no logit changes.
    one = known("gqa")
    runs = one.run(one.engine(position=lambda _, own: own + start))
    found = estimate(one.case, runs["step"], one.of(judge(one.case, runs)).angles)
    assert found is not None
    assert found.words == f"positions that start at {start} instead of 0"


def test_a_theta_beside_llama3s_scaling_is_estimated(known: Callable[..., Known]) -> None:
    # One of the eight pairs is blended, and follows theta in another way than the others.
    one = known("blended")
    found = one.named(rope=models._frequencies(one.config | {"rope_theta": 10100.0}))
    assert not isinstance(found, str), found
    assert found.words == "rope_theta 10100 instead of 10000"


def test_two_mistakes_of_rope_are_named_together(known: Callable[..., Known]) -> None:
    found = known("llama3").named(rope=plain(12345.0))
    assert not isinstance(found, str), found
    assert found.words == "lost RoPE scaling and rope_theta 12345 instead of 10000"


@pytest.mark.parametrize("layout", ["mha", "gqa", "llama3"])
def test_a_mistake_that_is_none_of_them_has_no_cause(
    known: Callable[..., Known], layout: str
) -> None:
    one = known(layout)
    engine = one.engine()
    head = "model.embed_tokens" if one.config["tie_word_embeddings"] else "lm_head"
    for name, row in ((f"{head}.weight", 7), ("model.layers.1.mlp.up_proj.weight", 3)):
        engine.weights = dict(one.weights)
        engine.weights[name] = one.weights[name].copy()
        engine.weights[name][row] *= 1.5
        found = one.explained(one.run(engine))
        assert isinstance(found, str), found
        assert re.fullmatch(r"none of \d+ usual suspects explains the difference", found)


def test_a_wrong_row_of_the_head_that_is_not_sampled_has_no_cause(
    known: Callable[..., Known],
) -> None:
    # Several suspects are within bfloat16's noise, and so is the error of all sampled columns.
    one = known("many", "bfloat16", 12)
    engine = rounded(one)
    engine.weights["lm_head.weight"][7] *= 200
    runs = in_dtype(one.run(engine), "bfloat16")
    assert 7 not in one.of(judge(one.case, runs)).columns
    assert isinstance(one.explained(runs), str)


def test_keys_of_another_layer_zero_are_not_explained_by_angles(
    known: Callable[..., Known],
) -> None:
    one = known("gqa")
    engine = one.engine(rope=plain(11000.0))
    name = "model.layers.0.self_attn.k_proj.weight"
    engine.weights = dict(one.weights) | {name: one.weights[name] * np.float32(1.01)}
    assert isinstance(one.explained(one.run(engine)), str)


def rounded(known: Known) -> Engine:
    """An engine in the run's half precision throughout."""
    to = {"bfloat16": to_bfloat16, "float16": to_half}[known.case.manifest.dtype]
    weights = {name: to(array) for name, array in known.weights.items()}
    return Engine(known.config, weights, round=to)


def in_dtype(runs: dict[str, Trace], dtype: str) -> dict[str, Trace]:
    return {
        plan: replace(run, meta=replace(run.meta, dtype=dtype, weights_dtype=dtype))
        for plan, run in runs.items()
    }


def without_cache(runs: dict[str, Trace]) -> dict[str, Trace]:
    keep = ("logits", "positions")
    return {
        plan: replace(run, arrays={name: run.arrays[name] for name in keep})
        for plan, run in runs.items()
    }


def test_what_bfloat16_hides_is_named_and_float32_shows_it(known: Callable[..., Known]) -> None:
    one = known("mild", "bfloat16", 12)
    engine = rounded(one)
    engine.rope = plain()
    runs = without_cache(in_dtype(one.run(engine), "bfloat16"))
    assert "lost RoPE scaling" in one.unseen(runs)
    right = rounded(one)
    cached = in_dtype(one.run(right), "bfloat16")
    unseen = one.unseen(without_cache(cached))
    assert "lost RoPE scaling" in unseen
    # Keys show it where they are judged.
    assert "lost RoPE scaling" not in one.unseen(cached)
    assert set(one.unseen(cached)) < set(unseen)
    assert "rms_norm_eps 1e-6 instead of 1e-5" in unseen
    assert "no causal mask" not in unseen
    exact = known("mild", n=12)
    found = exact.named(rope=plain())
    assert not isinstance(found, str), found
    assert found.words == "lost RoPE scaling"


@pytest.mark.parametrize("layout", ["gqa", "llama3"])
def test_whatever_is_not_listed_is_seen(known: Callable[..., Known], layout: str) -> None:
    # The list must never be too short: each mistake that it leaves out is planted, and differs.
    one = known(layout, "bfloat16", 12)
    runs = in_dtype(one.run(rounded(one)), "bfloat16")
    unseen, planted = one.unseen(runs), MISTAKES | {"lost RoPE scaling": {"rope": plain()}}
    known_words = {s.words for s in one.of(judge(one.case, runs)).listed}
    tried = sorted(({*planted} & known_words) - {*unseen})
    assert len(tried) >= 8, tried
    for words in tried:
        engine = rounded(one)
        for name, value in planted[words].items():
            setattr(engine, name, value)
        found = judge(one.case, in_dtype(one.run(engine), "bfloat16"))
        assert found.outcome == "differ", words
    assert "a cache in 8-bit precision" in unseen


@pytest.mark.parametrize(("dtype", "n"), [("bfloat16", 12), ("bfloat16", 100), ("float16", 12)])
def test_llama_32s_scaling_is_seen_or_said_to_be_unseen(
    known: Callable[..., Known], dtype: str, n: int
) -> None:
    one = known("llama32", dtype, n)
    engine = rounded(one)
    engine.rope = plain(500000.0, 64)
    runs = without_cache(in_dtype(one.run(engine), dtype))
    verdict = judge(one.case, runs)
    assert verdict.outcome == "agree"
    assert "lost RoPE scaling" in one.unseen(runs)


@pytest.mark.parametrize(
    ("probe", "says"),
    [
        (None, "this run cannot see: "),
        (object(), "these mistakes can show in the probe alone, if at all: "),
    ],
)
def test_of_a_run_that_had_its_probe_nothing_is_said_that_the_probe_may_show(
    known: Callable[..., Known], probe: object, says: str
) -> None:
    one = known("mild", "bfloat16", 12)
    runs = in_dtype(one.run(rounded(one)), "bfloat16")
    verdict = judge(one.case, runs)
    suspects = Suspects(SimpleNamespace(case=one.case, probe=probe))  # type: ignore[arg-type]
    suspects._known = {_plan(verdict): one.of(verdict)}
    (note,) = suspects.explain(verdict, runs).notes[len(verdict.notes) :]
    assert note.startswith(f"at 12 tokens in bfloat16 {says}")
    assert "a cache in 8-bit precision" in note


def test_a_mistake_that_one_plan_shows_is_seen(known: Callable[..., Known]) -> None:
    one = known("gqa")
    runs = one.run(one.engine())
    verdict = judge(one.case, runs)
    suspects = one.of(verdict)
    words = "no causal mask"
    (full,) = (s for s in suspects.listed if s.words == words and s.plan == "full")
    zeros = {name: 0 * getattr(full, name) for name in ("rms", "shift", "peak", "cache")}
    nothing = replace(full, plan="chunked", **zeros)
    for listed, unseen in (((full, nothing), ()), ((nothing,), (words,))):
        found = cause.blind(one.case, runs, verdict.gates, replace(suspects, listed=listed))
        assert found == unseen


def test_numbers_that_are_none_have_no_usual_cause(known: Callable[..., Known]) -> None:
    one = known("gqa")
    runs = one.run(one.engine())
    for run in runs.values():
        run.logits[3] = np.nan
    assert re.fullmatch(r"none of \d+ usual suspects .*", str(one.explained(runs)))

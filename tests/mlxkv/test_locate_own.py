"""An engine of one's own with a fault in it: the place that its cache shows, and that its taps do.

In float32, as such an engine is judged. Every word of a hint must be implied by what was measured.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import models
import own_faults as faults
import own_open
import pytest
from command import mlxkv, torch_python

from mlxkv.commands.locate import place
from mlxkv.commands.locate.found import Located
from mlxkv.commands.locate.layers import WALK
from mlxkv.commands.locate.opened import Opened
from mlxkv.commands.locate.opened import look as first_tap
from mlxkv.engines import own_taps, recorder
from mlxkv.engines.own import OwnRunner
from mlxkv.judge.case import Case, read_case
from mlxkv.judge.verdict import judge
from mlxkv.port.config.llama import LlamaConfig
from mlxkv.port.llama import Llama
from oracle.formats import run_folder
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan
from oracle.formats.trace import TAPS, Meta, Trace

FolderOf = Callable[[str], Path]
NAME = "mine.py:load"
LAYERS = 3


@pytest.fixture(scope="module")
def tapped(folder_of: FolderOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The oracle's folder over models.SEQUENCE with every tap."""
    out = tmp_path_factory.mktemp("tapped") / "gqa"
    ids = ",".join(map(str, models.SEQUENCE))
    options = ["--tokens", ids, "--prompt-tokens", str(models.PROMPT), "--steps", "0"]
    command = ["oracle", "run", str(folder_of("gqa")), *options, "--taps", ",".join(TAPS)]
    done = torch_python("-m", *command, "--out", str(out))
    subprocess.run(done, check=True, capture_output=True)
    return out


def traces(model: own_open.OpenLlama, case: Case, folder: Path) -> dict[str, Trace]:
    found, vocab = {}, case.truth.logits.shape[1]
    for name, plan in run_folder.read_plans(folder, case.manifest).items():
        run = OwnRunner(model, plan, name=NAME, vocab=vocab).run()
        found[name] = Trace(meta(plan, case), run.arrays())
    return found


def meta(plan: Plan, case: Case) -> Meta:
    return Meta(plan, "own", "1", "float32", fingerprint=case.manifest.fingerprint)


def from_outside(folder: Path, model: own_open.OpenLlama) -> Located:
    case = read_case(folder)
    runs = traces(model, case, folder)
    return place.locate(case, judge(case, runs), arithmetic=runs)


def faulty(folder: Path, plant: faults.Plant, at: int) -> own_open.OpenLlama:
    return own_open.load(str(folder), "float32", faults.model(plant(at)))


# What the cache shows.

ATTENTION = "made in layer {before}, after its keys and values: its attention (mask, "
BETWEEN = "between the two: in layer {before} its attention, o_proj or MLP"
STALE = "the cache: row 9 of its {kind} in layer {at}, head 0, is the truth's row 8: stale"
SCALED = "what its keys and values are made of is scaled"

C1 = {
    "a key row copied": (faults.copied("keys"), "step", 9, STALE.format(kind="keys", at="{at}")),
    "a value row copied": (
        faults.copied("values"),
        *("step", 9, STALE.format(kind="values", at="{at}")),
    ),
    "a mask off by one in one layer": (
        faults.masked(faults.ahead, everywhere=False),
        *("full", 0, "made in layer {at}, "),
    ),
    "a mask off by one in all layers": (
        faults.masked(faults.ahead),
        "full",
        0,
        "made in layer 0, ",
    ),
    "a chunk's mask without its offset": (
        faults.masked(faults.without_offset),
        *("mixed", 2, "made in layer 0, after its keys and values: its attention (mask, "),
    ),
    "a mask that is wrong in the plan chunked alone": (
        faults.masked(faults.in_chunked_alone),
        *("chunked", 3, "made in layer 0, after its keys and values: its attention (mask, "),
    ),
}


@pytest.mark.parametrize("layout", ["mha", "gqa", "mqa"])
@pytest.mark.parametrize("name", C1)
def test_the_cache_of_the_plan_that_failed_shows_the_layer(
    name: str, layout: str, folder_of: FolderOf, oracle_of: FolderOf
) -> None:
    plant, plan, position, words = C1[name]
    for at in range(LAYERS):
        found = from_outside(oracle_of(layout), faulty(folder_of(layout), plant, at))
        assert (found.outcome, found.plan, found.position) == ("located", plan, position)
        layer = 0 if "{at}" not in words else at
        assert found.layer == layer, found.hint
        assert found.layers == ()  # nobody fed its layers the truth's input
        assert found.hint is not None
        assert words.format(at=at) in found.hint


OUTSIDE: dict[str, tuple[faults.Plant, int | None, str | None, str]] = {
    "rsqrt off by 5e-6": (faults.normed(faults.rough_rsqrt), 0, "input_norm", SCALED),
    "a mean over E - 1": (
        faults.normed(faults.over_one_less),
        *(0, "input_norm", "is scaled (every row is 0.98425"),
    ),
    "eps in layer 1's first norm": (
        faults.normed(faults.large_eps, of="input_layernorm"),
        *(1, "input_norm", "the first norm, its mean, eps or rsqrt"),
    ),
    "eps in layer 1's second norm": (
        faults.normed(faults.large_eps, of="post_attention_layernorm"),
        *(2, None, BETWEEN.format(before=1)),
    ),
    "eps in the final norm": (
        faults.normed(faults.large_eps, of="model.norm"),
        *(None, None, "behind the layers: each row is the truth's times a factor of its own"),
    ),
    "a window of 16": (faults.masked(faults.window), 0, None, ATTENTION.format(before=0)),
    "capped scores": (
        faults.scored(lambda s: 5 * mx.tanh(s / 5)),
        *(0, None, ATTENTION.format(before=0)),
    ),
    "a swapped pair": (
        faults.turned(lambda p, w: p[:, None] * w, swap=True),
        *(0, "keys", "RoPE: its pairing: each row keeps its length, and its pairs do not"),
    ),
    "interleaved RoPE": (faults.interleaved, 0, "keys", "RoPE: its pairing"),
    "another theta": (
        faults.turned(lambda p, w: p[:, None] * w**1.01),
        *(0, "keys", "RoPE: each pair turns at another speed"),
    ),
    "angles in float16": (
        faults.turned(faults.in_half),
        *(0, "keys", "rad: the precision of its angles or tables"),
    ),
    "decoding one position late": (
        faults.turned(faults.late),
        0,
        "keys",
        "from position 5 on, those of single tokens, while its values are right: RoPE: each wrong "
        "row is turned by the same angles: counted from another position",
    ),
    "KV heads swapped": (
        faults.heads_swapped,
        *(1, "keys", "head 0 is the truth's head 1, head 1 is the truth's head 0"),
    ),
    "values of a layer in float16": (
        faults.stored(mx.float16),
        *(1, "values", "the values of layer 1, at every position, are rounded to float16"),
    ),
    "NaN in a value row": (
        faults.not_a_number,
        *(1, "values", "row 9 of its values in layer 1, head 0, is missing or not a number"),
    ),
    "GQA's head order": (faults.head_order, 1, None, BETWEEN.format(before=0)),
    "another silu": (faults.silu, 1, None, BETWEEN.format(before=0)),
    "no residual": (faults.no_residual, 2, None, BETWEEN.format(before=1)),
    "one weight of k_proj": (
        faults.one_weight("self_attn.k_proj"),
        *(1, "keys", "while its values are right: k_proj, RoPE, or the cache"),
    ),
    "one weight of o_proj": (
        faults.one_weight("self_attn.o_proj"),
        *(2, None, BETWEEN.format(before=1)),
    ),
    "a tied head": (faults.tied, None, None, "the head's weights (tied to the embedding or not)"),
    "logits times 1.001": (
        faults.logits(lambda x: x * 1.001),
        *(None, None, "every row is 1.001 times the truth's: the final norm (its mean, eps or "),
    ),
    "logits off by 0.05": (
        faults.logits(lambda x: x + 0.05),
        *(None, None, "all logits of a position are off by one number"),
    ),
    "NaN in the last logits of each call": (
        faults.logits(faults.last_is_none),
        *(None, None, "or the final norm's weight, the head's weights (tied to the embedding or "),
    ),
    "keys and values kept in steps": (faults.in_steps, 0, None, "or by the cache of layer 1 ("),
    "logits in bfloat16": (
        faults.logits(lambda x: x.astype(mx.bfloat16).astype(mx.float32)),
        *(None, None, "the logits of this float32 run are rounded to bfloat16"),
    ),
    "matrix products with 10 bits": (
        faults.ten_bits,
        *(0, None, "as matrix products with 10 bits make it (TF32, MLX_ENABLE_TF32=0)"),
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_words_are_those_that_the_cache_implies(
    name: str, folder_of: FolderOf, answer: Path
) -> None:
    plant, layer, tap, words = OUTSIDE[name]
    found = from_outside(answer, faulty(folder_of("gqa"), plant, 1))
    assert (found.outcome, found.layer, found.tap) == ("located", layer, tap), found.hint
    assert found.hint is not None
    assert words in found.hint
    for misleading in ("precision of RoPE's", "TF32"):
        if misleading not in words:
            assert misleading not in found.hint


@pytest.mark.parametrize("layout", ["mha", "gqa", "mqa"])
def test_a_right_engine_is_left_in_peace(
    layout: str, folder_of: FolderOf, oracle_of: FolderOf
) -> None:
    found = from_outside(oracle_of(layout), own_open.load(str(folder_of(layout)), "float32"))
    assert (found.outcome, found.hint, found.notes) == ("nothing", None, ())


# What its taps show.


def opened(model: own_open.OpenLlama, port: Llama, case: Case, folder: Path, plan: str) -> Opened:
    followed = run_folder.read_plans(folder, case.manifest)[plan]
    about = {"config": port.config, "vocab": port.config.vocab_size, "name": NAME}
    run = own_taps.OwnTapRunner(model, followed, **about).run()
    beside, _ = recorder.run(port, followed, meta(followed, case))
    return Opened(Trace(meta(followed, case), run.arrays()), beside)


def from_inside(folder: Path, model: own_open.OpenLlama, port: Llama) -> Located:
    case = read_case(folder)
    runs = traces(model, case, folder)
    verdict = judge(case, runs)
    plan = verdict.first_wrong.plan if verdict.first_wrong else "step"
    inside = opened(model, port, case, folder, plan)
    return place.locate(case, verdict, arithmetic=runs, opened=inside)


INSIDE: dict[str, tuple[faults.Plant, int | None, str | None, str]] = {
    "a key row copied": (faults.copied("keys"), 1, "keys", "is the truth's row 8: stale"),
    "a mask off by one": (
        faults.masked(faults.ahead, everywhere=False),
        *(1, "scores", "the mask: position 0 sees the key of position 1"),
    ),
    "a chunk's mask": (
        faults.masked(faults.without_offset),
        *(0, "scores", "the mask: the offset of the call that starts at position 2 is missing"),
    ),
    "a window of 16": (
        faults.masked(faults.window),
        *(0, "scores", "the mask: a window of 16: a token sees itself and the 15 before it"),
    ),
    "rsqrt off by 5e-6": (
        faults.normed(faults.rough_rsqrt),
        *(0, "input_norm", "factor of its own: its mean, eps or rsqrt"),
    ),
    "a mean over E - 1": (
        faults.normed(faults.over_one_less),
        *(0, "input_norm", "its mean, or one factor on its weight"),
    ),
    "eps in layer 1's second norm": (
        faults.normed(faults.large_eps, of="post_attention_layernorm"),
        *(1, "post_norm", "that of an eps larger by 0.00099)"),
    ),
    "a norm's channel": (
        faults.channel,
        *(1, "input_norm", "RMSNorm: the norm's weight (channel 0 of 32)"),
    ),
    "eps in the final norm": (
        faults.normed(faults.large_eps, of="model.norm"),
        *(None, None, "each of the 52 taps is within its limits, what leaves the last layer too"),
    ),
    "attention's scale": (
        faults.scored(lambda s: 1.001 * s),
        *(0, "scores", "the attention's scale: every score is 1.001 times the truth's"),
    ),
    "capped scores": (
        faults.scored(lambda s: 5 * mx.tanh(s / 5)),
        *(0, "scores", "each keeps its rank: a cap or another function"),
    ),
    "a swapped pair": (
        faults.turned(lambda p, w: p[:, None] * w, swap=True),
        *(0, "k_rope", "RoPE: its pairing"),
    ),
    "decoding one position late": (
        faults.turned(faults.late),
        *(0, "q_rope", "RoPE: positions: position 5 is turned as position 6 is (index_pos)"),
    ),
    "GQA's head order": (
        faults.head_order,
        *(0, "scores", "GQA's head order: query head 1 reads head 1, expected 0"),
    ),
    "one head scaled": (
        faults.head_scaled,
        *(1, "attention", "every row is 0.9 times the truth's in head 0"),
    ),
    "another silu": (faults.silu, 0, "activation", "the activation: silu"),
    "no residual": (faults.no_residual, 1, "post_norm", "the residual before the norm"),
    "one weight of o_proj": (
        faults.one_weight("self_attn.o_proj"),
        *(1, "o_proj", "self_attn.o_proj.weight: the single weight [3, 4]"),
    ),
    "one weight of down_proj": (
        faults.one_weight("mlp.down_proj"),
        *(1, "down", "mlp.down_proj.weight: the single weight [3, 4]"),
    ),
}


@pytest.mark.parametrize("name", INSIDE)
def test_the_first_tap_that_stands_out_is_named(
    name: str, folder_of: FolderOf, tapped: Path, model_of: Callable[..., Llama]
) -> None:
    plant, layer, tap, words = INSIDE[name]
    found = from_inside(tapped, faulty(folder_of("gqa"), plant, 1), model_of("gqa"))
    assert (found.outcome, found.layer, found.tap) == ("located", layer, tap), found.hint
    assert found.hint is not None
    assert words in found.hint
    assert (found.layers, {row.isolated for row in found.rows}) == ((), {None})


def test_no_tap_of_a_right_engine_stands_out(
    folder_of: FolderOf, tapped: Path, model_of: Callable[..., Llama]
) -> None:
    case, model = read_case(tapped), own_open.load(str(folder_of("gqa")), "float32")
    for plan in ("full", "step", "chunked", "mixed"):
        found = opened(model, model_of("gqa"), case, tapped, plan)
        rest = first_tap(Located("located"), case.truth, found)
        assert rest is not None
        assert rest.layer is None
        assert [row.tap for row in rest.rows] == [*WALK, *WALK[1:], *WALK[1:]]
        # Attention in one kernel and in several steps: 3 to 5.5 of the limit for a row, 30.
        assert max(row.floors or 0.0 for row in rest.rows) < 8


def test_a_tap_whose_source_was_not_handed_out_is_not_explained_beyond_it(
    folder_of: FolderOf, tapped: Path, model_of: Callable[..., Llama]
) -> None:
    class Few(own_open.OpenLlama):  # type: ignore[misc, name-defined]
        def taps(self) -> dict[tuple[int, str], mx.array]:
            return {key: a for key, a in self.seen.items() if key[1] in ("input_norm", "hidden")}

        def silu(self, x: mx.array) -> mx.array:
            return x * mx.sigmoid(1.702 * x)

    model = own_open.load(str(folder_of("gqa")), "float32", Few)
    found = from_inside(tapped, model, model_of("gqa"))
    assert (found.layer, found.tap) == (0, "hidden")
    assert found.hint is not None
    assert found.hint.startswith(
        "made between input_norm and hidden: o_proj and down, which would say more, were not "
        "recorded"
    )


# Odd taps.


def odd(taps: object) -> str:
    class Odd(own_open.OpenLlama):  # type: ignore[misc, name-defined]
        def taps(self) -> object:
            return taps

    config = LlamaConfig.from_json(models.config("gqa"))
    weights = {name: mx.array(a) for name, a in models.weights(models.config("gqa")).items()}
    plan = Plan("p", run_folder_steps())
    with pytest.raises(Refusal) as refused:
        own_taps.OwnTapRunner(
            Odd(models.config("gqa"), weights),
            plan,
            config=config,
            name=NAME,
            vocab=40,
        ).run()
    return str(refused.value)


def run_folder_steps() -> tuple[object, ...]:
    from oracle.formats.plan import Call, New

    return New("a"), Call("a", (1, 2, 3), 0)


@pytest.mark.parametrize(
    ("taps", "words"),
    [
        ([], "taps() gave a list, expected a mapping of arrays; see FILE.py in README.md"),
        ({"q": mx.zeros(1)}, "taps(): key 'q', expected (layer, name), such as (0, 'q_rope')"),
        ({(0, "qq"): mx.zeros(1)}, "taps(): (0, 'qq') is no place in a Llama, expected one of "),
        ({(3, "q"): mx.zeros(1)}, "taps(): (3, 'q') is no place in a Llama, expected one of "),
        (
            {(0, "q"): mx.zeros((1, 3, 32))},
            "taps(): (0, 'q') has shape [1, 3, 32], expected [1, 4, 3, 8]",
        ),
        (
            {(1, "scores"): mx.zeros((1, 4, 3, 4))},
            "taps(): (1, 'scores') has shape [1, 4, 3, 4], expected [1, 4, 3, 3]",
        ),
        ({(0, "gate"): [1.0]}, "taps(): (0, 'gate') is list, expected an mx.array of floats "),
        (
            {(0, "gate"): mx.zeros((1, 3, 48), mx.int32)},
            "taps(): (0, 'gate') is mlx.core.int32, expected an mx.array of floats [1, 3, 48]",
        ),
    ],
)
def test_odd_taps_are_refused_by_name(taps: object, words: str) -> None:
    assert odd(taps).startswith(f"{NAME}: {words}")


def test_an_error_within_taps_says_where() -> None:
    class Broken(dict[tuple[int, str], mx.array]):
        def items(self) -> None:  # type: ignore[override]
            raise RuntimeError("no")

    class Failing(own_open.OpenLlama):  # type: ignore[misc, name-defined]
        def taps(self) -> object:
            raise KeyError("q")

    config = models.config("gqa")
    weights = {name: mx.array(a) for name, a in models.weights(config).items()}
    plan = Plan("p", run_folder_steps())
    runner = own_taps.OwnTapRunner(
        Failing(config, weights), plan, config=LlamaConfig.from_json(config), name=NAME, vocab=40
    )
    with pytest.raises(Refusal, match=r"mine\.py:load: taps\(\) failed with KeyError: 'q'"):
        runner.run()


# As a person does it.


def written(folder: Path, *changes: tuple[str, str]) -> Path:
    """The person's two files, the one with taps with some of its text replaced."""
    folder.mkdir()
    here = Path(own_open.__file__)
    (folder / "own_llama.py").write_text((here.parent / "own_llama.py").read_text())
    text = here.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "mine.py").write_text(text)
    return folder / "mine.py"


def test_the_command_looks_into_a_file_that_hands_out_taps(answer: Path, tmp_path: Path) -> None:
    mine = written(tmp_path / "own", ("x * mx.sigmoid(x)", "x * mx.sigmoid(1.702 * x)"))
    env = {"MLXKV_CACHE": str(tmp_path / "cache")}
    options = ("--engine", f"{mine}:load", "--oracle", answer, "--out", tmp_path / "out")
    done = mlxkv("locate", *options, env=env)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert "located: position 0, layer 0, activation" in lines
    assert any(line.split()[:4] == ["layer", "tap", "error", "noise"] for line in lines)
    (hint,) = [line for line in lines if line.startswith("hint ")]
    assert hint.removeprefix("hint").strip().startswith("the activation: silu, or its product with")


def test_what_shows_in_the_probe_alone_is_looked_for_there(answer: Path, tmp_path: Path) -> None:
    """A window of 32: the 24 tokens are right."""
    seen = "mx.arange(start + L)[None, :] <= mx.arange(start, start + L)[:, None]"
    far = "mx.arange(start + L)[None, :] > mx.arange(start, start + L)[:, None] - 32"
    mine = written(tmp_path / "own", (seen, f"({seen}) & ({far})"))
    env = {"MLXKV_CACHE": str(tmp_path / "cache")}
    options = ("--engine", f"{mine}:load", "--oracle", answer, "--out", tmp_path / "out")
    done = mlxkv("locate", *options, "--json", env=env)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["notes"][-1] == (
        "the tokens themselves show nothing: this is in the probe's 64 tokens"
    )
    assert (found["position"], found["layer"]) == (32, 0)
    assert "after its keys and values: its attention (mask, " in found["hint"]


def test_a_file_without_taps_is_looked_at_from_outside_and_that_is_said(
    answer: Path, tmp_path: Path
) -> None:
    mine = written(tmp_path / "own", ("x * mx.sigmoid(x)", "x * mx.sigmoid(1.702 * x)"),
                   ("    def taps(self)", "    def tips(self)"))  # fmt: skip
    env = {"MLXKV_CACHE": str(tmp_path / "cache")}
    options = ("--engine", f"{mine}:load", "--oracle", answer, "--out", tmp_path / "out")
    done = mlxkv("locate", *options, env=env)
    assert done.returncode == 1, done.stderr
    note = "note: mine.py:load has no taps(): nothing inside its layers was looked at"
    assert note in done.stdout.splitlines()
    assert "located: position 0, layer 1" in done.stdout.splitlines()

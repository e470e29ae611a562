"""Other architectures than Llama are judged on mlx-lm by transformers' own noise; the verdict says
that there is no truth.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from command import Done, mlxkv, torch_python

from mlxkv.commands.compare.ask import Request
from mlxkv.commands.compare.run import run
from mlxkv.commands.locate.place import locate
from mlxkv.judge import floors, measure
from mlxkv.judge.admission import by_plan
from mlxkv.judge.case import read_case
from mlxkv.judge.result import Gate, Verdict
from mlxkv.judge.verdict import judge
from mlxkv.report.phrases import sentence
from mlxkv.testing import assert_agrees
from oracle.formats import run_folder, trace
from oracle.formats.disk import alone
from oracle.formats.errors import Refusal

MAKER = Path(__file__).parent.parent / "oracle" / "neighbours.py"
FIVE = ("qwen2", "qwen3", "mistral", "gemma2", "phi3")
FAULTS = ("theta", "eps", "norm", "head")
POOL = (
    "the mean of transformers' own runs (sdpa-full, sdpa-step, eager-full, eager-step, "
    "eager-chunked)"
)

# One process for all of mlx-lm's runs: importing it takes longer than they do.
FOLLOW = """
import sys
from pathlib import Path
from mlxkv.engines import machine as runtime
from mlxkv.engines import mlx_lm
from mlxkv.engines.job import read
found = runtime.prepare("cpu")
runtime.prepare = lambda *_, **__: found
for path in sys.argv[1:]:
    mlx_lm.follow(read(Path(path)))
"""


@pytest.fixture(scope="session")
def made(room: Path) -> Path:
    """ROOM/models and ROOM/runs, made by whichever half of the tests is first."""
    place = room / "neighbours"
    with alone(room / "neighbours.lock", waiting=lambda: None):
        if not (place / "runs" / "windowed" / "manifest.json").exists():
            subprocess.run(torch_python(str(MAKER), str(place)), check=True, capture_output=True)
    return place


def planted(model: Path, to: Path, fault: str) -> Path:
    """A model for mlx-lm alone with one mistake in its config or its weights."""
    shutil.copytree(model, to)
    config = json.loads((to / "config.json").read_text())
    tensors = safetensors.numpy.load_file(to / "model.safetensors")
    if fault == "theta":
        config["rope_theta"] *= 1.1
        config["rope_parameters"]["rope_theta"] *= 1.1
    elif fault == "eps":
        config["rms_norm_eps"] *= 10
    elif fault == "norm":
        tensors["model.layers.1.input_layernorm.weight"][7] += 1
    else:
        # Of one token, in the head or in the embedding that is the head.
        tensors["lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"][
            11
        ] *= 1.001
    (to / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, to / "model.safetensors", {"format": "mlx"})
    return to


@pytest.fixture(scope="session")
def runs(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[trace.Trace]]:
    """mlx-lm's traces of the judged plans by model, and by model and fault."""
    from mlxkv.engines.job import Job

    place = tmp_path_factory.mktemp("mlx-lm")
    wanted = {name: made / "models" / name for name in (*FIVE, "windowed")}
    wanted |= {
        f"{name}-{fault}": planted(made / "models" / name, place / f"{name}-{fault}", fault)
        for name in FIVE
        for fault in FAULTS
    }
    jobs = {}
    for name, model in wanted.items():
        run = made / "runs" / name.split("-")[0]
        plans = run_folder.read_plans(run, run_folder.read_manifest(run))
        kept = tuple(plans.values()) if name in FIVE else (plans["full"], plans["step"])
        jobs[name] = Job(str(model), kept, place / "traces" / name, "float32", "float32", "cpu")
    files = [str(job.save()) for job in jobs.values()]
    subprocess.run([sys.executable, "-c", FOLLOW, *files], check=True, capture_output=True)
    return {name: [trace.read(job.trace(plan)) for plan in job.plans] for name, job in jobs.items()}


@pytest.fixture(scope="session")
def verdict_on(made: Path, runs: dict[str, list[trace.Trace]]) -> Callable[[str], Verdict]:
    def judged(name: str) -> Verdict:
        case = read_case(made / "runs" / name.split("-")[0])
        # The planted weights are others, and mlx-lm would be told so.
        traces = [
            replace(t, meta=replace(t.meta, fingerprint=case.manifest.fingerprint))
            for t in runs[name]
        ]
        return judge(case, by_plan(case.manifest, traces))

    return judged


def worst(verdict: Verdict) -> dict[str, Gate]:
    return {gate.name: gate for gate in verdict.worst}


@pytest.mark.parametrize("name", FIVE)
def test_mlx_lm_agrees_with_transformers(verdict_on: Callable[[str], Verdict], name: str) -> None:
    verdict = verdict_on(name)
    assert (verdict.outcome, verdict.against, verdict.scopes, verdict.reasons) == (
        "agree",
        "transformers",
        ("logits", "cache"),
        (),
    )
    assert verdict.plans == ("full", "step", "prefixes", "chunked", "mixed")
    gates = worst(verdict)
    # Seen on these models: sigma 0.9 to 1.7, shift up to 4, the worst row of a cache 4.
    assert 0.45 < gates["sigma"].value < 4
    assert gates["keys worst row"].value < 12
    assert [g.reason for g in verdict.gates if not g.ran] == [
        "not run: no float64 run of this engine"
    ]
    assert [(c.expected, c.passed) for c in verdict.controls] == [
        ("agree", True),
        ("differ", True),
        *[("agree", True)] * 3,
    ]
    assert verdict.controls[0].name == "eager-step, held out"
    assert verdict.controls[1].value > 100
    assert verdict.distinct == (3 if name == "gemma2" else 5)
    assert sentence(verdict) == "agrees with transformers (logits, cache)"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", FIVE)
def test_a_planted_mistake_differs(
    verdict_on: Callable[[str], Verdict], name: str, fault: str
) -> None:
    verdict = verdict_on(f"{name}-{fault}")
    assert verdict.outcome == "differ"
    assert worst(verdict)["sigma"].value > 20
    assert verdict.first_wrong is not None
    assert verdict.first_wrong.position == (1 if fault == "theta" else 0)
    assert sentence(verdict).startswith("differs from transformers (logits")


def test_a_window_that_mlx_lm_does_not_read_differs_and_no_key_is_compared(
    verdict_on: Callable[[str], Verdict],
) -> None:
    # mlx-lm 0.32.2 reads a Mistral as a Llama, without its window.
    verdict = verdict_on("windowed")
    assert (verdict.outcome, verdict.first_wrong and verdict.first_wrong.position) == ("differ", 8)
    reasons = {g.reason for g in verdict.gates if g.name.startswith(("keys", "values"))}
    assert reasons == {"not run: layer 0 of transformers' cache keeps 7 of 20 tokens"}


def test_a_cache_of_another_shape_is_not_compared_and_leaves_the_logits_judged(
    made: Path, runs: dict[str, list[trace.Trace]]
) -> None:
    case = read_case(made / "runs" / "qwen2")
    traces = by_plan(case.manifest, runs["qwen2"])
    step = traces["step"]
    other = {
        name: array[:1] if name.startswith("kv/") else array for name, array in step.arrays.items()
    }
    verdict = judge(case, traces | {"step": replace(step, arrays=other)})
    assert (verdict.outcome, verdict.scopes) == ("agree", ("logits",))
    of = [g for g in verdict.gates if g.plan == "step" and g.name.startswith("keys")]
    (reason,) = {g.reason for g in of}
    assert reason is not None
    assert "has shape [1, 20, 12], expected [2, 20, 12]" in reason


def test_a_mean_that_is_not_vouched_for_cannot_tell(
    made: Path, runs: dict[str, list[trace.Trace]]
) -> None:
    case = read_case(made / "runs" / "qwen2")
    traces = by_plan(case.manifest, runs["qwen2"])
    for name in ("mean_double", "members_apart"):
        for proofs in (
            case.manifest.proofs | {name: 2e-5},
            {k: v for k, v in case.manifest.proofs.items() if k != name},
        ):
            verdict = judge(replace(case, manifest=replace(case.manifest, proofs=proofs)), traces)
            assert verdict.outcome == "cannot tell"
            assert (
                f"mean's proof {name}: {proofs.get(name)}, expected at most" in verdict.reasons[0]
            )
    one = replace(case.manifest, pool_distinct=1)
    equal = replace(case, manifest=one, pool=run_folder.Pool(case.pool.members, case.pool.kinds, 1))
    assert "1 bitwise distinct members, expected 2 or more" in judge(equal, traces).reasons[0]


def test_errors_too_wide_of_a_pool_with_a_mean_cannot_tell(made: Path) -> None:
    case = read_case(made / "runs" / "qwen2")
    traces = {name: case.references[name] for name in ("full", "step")}
    assert judge(case, traces).outcome == "agree"
    for member, words in ((0, "beside them"), (2, "'stored rms of eager-full'")):
        rms = np.array(case.floors["rms"])
        rms[member] *= 60
        verdict = judge(replace(case, floors=dict(case.floors) | {"rms": rms}), traces)
        assert verdict.outcome == "cannot tell"
        assert words in verdict.reasons[0]


def test_a_member_held_out_is_measured_against_the_mean_of_the_others(made: Path) -> None:
    run = made / "runs" / "qwen2"
    case = read_case(run)
    pool = [
        trace.read(run / f"{n}.safetensors")
        for n in ("pool-sdpa-full", "pool-sdpa-step", "reference-full", "reference-chunked")
    ]
    others = np.mean([np.asarray(one.logits, np.float64) for one in pool], axis=0)
    direct = measure.measure(
        case.references["step"],
        replace(case.truth, arrays={"logits": others, "positions": case.truth.positions}),
    )
    through = floors.held_out(measure.measure(case.references["step"], case.truth), case)
    for name in ("rms", "shift", "peak"):
        np.testing.assert_allclose(
            getattr(through, name), getattr(direct, name), rtol=1e-7, atol=1e-16
        )
    assert floors.widening(case) == pytest.approx((5 / 4) ** 0.5)


def test_the_layer_is_read_from_keys_and_values(
    made: Path, runs: dict[str, list[trace.Trace]], verdict_on: Callable[[str], Verdict]
) -> None:
    case = read_case(made / "runs" / "qwen3")
    found = locate(
        case, verdict_on("qwen3-norm"), arithmetic=by_plan(case.manifest, runs["qwen3-norm"])
    )
    assert (found.outcome, found.position, found.layer) == ("located", 0, 1)
    assert locate(case, verdict_on("qwen3"), arithmetic={}).outcome == "nothing"


# As a person does it.


def command(*arguments: str | Path, **environment: str) -> Done:
    return mlxkv(*arguments, env=environment)


def test_compare_asks_the_oracle_and_says_that_the_truth_is_missing(
    made: Path, tmp_path: Path
) -> None:
    model, out = made / "models" / "qwen3", tmp_path / "out"
    ids = ["--tokens", "5,15,39,16,7", "--steps", "6"]
    done = command(
        "compare",
        model,
        *ids,
        "--engine",
        "mlx-lm",
        "--out",
        out,
        MLXKV_CACHE=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stdout.splitlines()[-1]
        == f"mlx-lm: agrees with transformers (logits, cache)    report: {out / 'compare.md'}"
    )
    assert "no truth: mean of 5 runs of transformers, each within " in done.stdout.splitlines()[2]
    assert (
        f"\nnote: no truth for this architecture: the reference is {POOL}, and an error that all "
        f"of them share is not seen\n" in done.stdout
    )
    assert "\ncontrols: eager-step, held out: agrees (sigma " in done.stdout
    value = json.loads((out / "compare.json").read_text())
    assert (value["outcome"], value["against"], value["exit_code"]) == ("agree", "transformers", 0)
    report = (out / "compare.md").read_text()
    assert "\n**agrees with transformers (logits, cache)**\n" in report
    assert "\n| no truth " in report
    assert "float64 truth" not in report
    assert "Against the mean of transformers' runs, over all rows" in report
    assert "transformers alone: no truth for this architecture" in report


OWN = """
from pathlib import Path

from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model


class Own:
    def __init__(self, model):
        self.model = model

    def __call__(self, tokens, cache):
        return self.model(tokens, cache=cache)

    def make_cache(self):
        return make_prompt_cache(self.model)


def load(path, dtype):
    return Own(load_model(Path(path))[0])
"""


def test_a_person_judges_a_model_of_their_own_and_what_differs_has_no_suspects(
    made: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    model = planted(made / "models" / "gemma2", tmp_path / "gemma2", "eps")
    shutil.copy(made / "models" / "gemma2" / "model.safetensors", model)
    engine = f"{tmp_path / 'own.py'}:load"
    done = command(
        "compare",
        model,
        "--engine",
        engine,
        "--oracle",
        made / "runs" / "gemma2",
        "--out",
        tmp_path / "out",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "\nown.py:load: differs from transformers (logits, cache): first wrong " in done.stdout
    assert "; gates: sigma, " in done.stdout
    assert (
        "the mean of transformers' own runs (eager-full, eager-step, eager-chunked)" in done.stdout
    )
    assert (
        "\nnote: the cause was not looked for: the usual suspects are mistakes in a Llama, tried "
        "on its truth\n" in done.stdout
    )
    assert "looks like" not in done.stdout


def test_stored_traces_are_judged_and_compared(
    made: Path, runs: dict[str, list[trace.Trace]], tmp_path: Path
) -> None:
    run, files = made / "runs" / "mistral", [str(t.path) for t in runs["mistral"]]
    done = command("judge", run, *files, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nmlx-lm: agrees with transformers (logits, cache)" in done.stdout
    assert done.stdout.count("\nno truth: mean of 5 runs of transformers, ") == 1
    shown = command("delta", files[0], run / "mean.safetensors")
    assert shown.returncode == 0, shown.stderr
    assert "transformers' mean full" in shown.stdout
    assert_agrees({t.meta.plan.name: t for t in runs["mistral"]}, run)


@pytest.mark.parametrize("name", FIVE)
@pytest.mark.parametrize("stored", [False, True])
def test_the_port_refuses_them_by_name(made: Path, name: str, stored: bool) -> None:
    model = made / "models" / name
    request = (
        Request(oracle=made / "runs" / name) if stored else Request(model=str(model), tokens=(1, 2))
    )
    line = (
        f"config.json: model_type is '{name}', expected 'llama'; judge mlx-lm on it with `mlxkv "
        f"compare --engine mlx-lm`$"
    )
    with pytest.raises(Refusal, match=line), run([request]):
        pass


@pytest.mark.parametrize("verb", ["compare", "locate", "inspect"])
def test_commands_of_the_port_say_so_in_one_line(made: Path, tmp_path: Path, verb: str) -> None:
    more = [] if verb == "inspect" else ["--tokens", "1,2", "--out", tmp_path / "out"]
    done = command(verb, made / "models" / "qwen2", *more)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "model_type is 'qwen2', expected 'llama'; judge mlx-lm on it with" in line
    assert not (tmp_path / "out").exists()

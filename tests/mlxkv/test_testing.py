"""`mlxkv.testing`, as somebody's own suite uses it: in this process, which it leaves as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import own_llama
import pytest

import mlxkv
from mlxkv.engines import port
from mlxkv.port.llama import Llama
from mlxkv.testing import assert_agrees
from oracle.formats import run_folder, trace
from oracle.formats.errors import Refusal


@pytest.fixture
def own(folder_of: Callable[[str], Path]) -> own_llama.OwnLlama:
    return own_llama.load(str(folder_of("gqa")), "float32")


@pytest.fixture(scope="module")
def wrong(folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """The same weights, another theta."""
    folder = models.save(
        tmp_path_factory.mktemp("wrong") / "model", models.config("gqa", rope_theta=10100.0)
    )
    return mlxkv.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def traces(answer: Path, model_of: Callable[..., Llama]) -> dict[str, trace.Trace]:
    """The port's, by plan."""
    return {
        name: port.run(model_of(), plan)
        for name, plan in run_folder.read_plans(answer, run_folder.read_manifest(answer)).items()
    }


def failing(model: Any, answer: Path, **options: Any) -> str:
    with pytest.raises(AssertionError) as failed:
        assert_agrees(model, answer, **options)
    return str(failed.value)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_right_llama_passes_in_both_lanes(
    answer: Path, model_of: Callable[..., Llama], dtype: str
) -> None:
    assert_agrees(model_of("gqa", dtype), answer)
    assert_agrees(model_of("gqa", dtype), str(answer), plans=["step"], dtype=dtype)


def test_a_wrong_llama_fails_with_the_verdict_as_compare_prints_it(
    answer: Path, wrong: Llama
) -> None:
    said = failing(wrong, answer).splitlines()
    assert said[0].startswith("model  float32  mlx 0.") or said[0].startswith(
        "gqa  float32  mlx 0."
    ), said[0]
    assert said[4].split() == ["gate", "plan", "value", "limit", "headroom", "where"]
    assert said[-1].startswith("differ (logits, cache): first wrong position 1 (plan ")
    assert "; gates: sigma, worst position, " in said[-1]


def test_a_wrong_llama_fails_in_float64_too(answer: Path, tmp_path: Path) -> None:
    folder = models.save(tmp_path / "model", models.config("gqa", rms_norm_eps=1.01e-5))
    said = failing(mlxkv.load(folder, dtype="float64"), answer, plans=["full"])
    assert said.splitlines()[-1].startswith(
        "differ (algebra): first wrong position 0 (plan full, algebra (float64)); gates: algebra "
    )


def test_other_weights_cannot_be_told_and_that_fails(
    answer: Path, model_of: Callable[..., Llama]
) -> None:
    said = failing(model_of("mha"), answer)
    assert said.splitlines()[-1] == "cannot tell"
    assert "weights fingerprint is " in said


def test_an_object_of_mlx_lms_convention_passes_and_fails(
    answer: Path, own: own_llama.OwnLlama
) -> None:
    assert_agrees(own, answer)
    own.config["rope_theta"] = 10100.0
    said = failing(own, answer, plans=["full", "step"])
    last = said.splitlines()[-1]
    assert last.startswith("OwnLlama: differ (logits, cache): first wrong position 1 (plan full, ")
    assert "; gates: sigma, " in last
    assert "note: not compared: prefixes and chunked (no usable trace of those plans)" in said


def test_what_does_not_follow_the_convention_is_refused(
    answer: Path, own: own_llama.OwnLlama
) -> None:
    with pytest.raises(
        Refusal, match=r"function: a function without make_cache\(\), expected mlx-lm's convention"
    ):
        assert_agrees(lambda tokens, cache: tokens, answer)
    with pytest.raises(
        Refusal, match=r"dtype: 'float64', expected 'float32': only an mlxkv\.Llama"
    ):
        assert_agrees(own, answer, dtype="float64")
    assert failing(own, answer, dtype="float16").splitlines()[-1] == "OwnLlama: cannot tell"


def test_an_error_of_the_model_keeps_its_traceback(answer: Path, own: own_llama.OwnLlama) -> None:
    del own.weights["model.norm.weight"]
    with pytest.raises(
        Refusal,
        match=r"OwnLlama: model\(tokens, cache=cache\) failed with KeyError: .* \(own_llama\.py:",
    ) as failed:
        assert_agrees(own, answer)
    assert isinstance(failed.value.__cause__, KeyError)


def test_traces_pass_however_they_are_given(
    answer: Path, traces: dict[str, trace.Trace], tmp_path: Path
) -> None:
    assert_agrees(traces, answer)
    assert_agrees(traces, answer, plans=("full", "step"))
    assert_agrees(traces["step"], answer)
    trace.write(tmp_path / "step.safetensors", traces["step"].meta, dict(traces["step"].arrays))
    assert_agrees(tmp_path / "step.safetensors", answer)
    assert_agrees({"step": str(tmp_path / "step.safetensors")}, answer, plans=["step"])


def test_a_wrong_trace_fails(answer: Path, traces: dict[str, trace.Trace]) -> None:
    one = traces["step"]
    bad = replace(one, arrays=dict(one.arrays) | {"logits": one.logits * 1.001})
    said = failing(bad, answer).splitlines()[-1]
    assert said.startswith("differ (logits): first wrong position 0 (plan step, sigma); gates: ")
    # Only what is asked for is judged.
    assert_agrees(traces | {"step": bad}, answer, plans=["full"])
    # Under another plan's name it is not what it says.
    assert failing({"full": one}, answer).splitlines()[-1] == "cannot tell"


def probed(answer: Path, model: Llama) -> dict[str, trace.Trace]:
    """The port's traces of the probe's plans, as a mapping may name them."""
    inside = answer / "probe"
    plans = run_folder.read_plans(inside, run_folder.read_manifest(inside))
    return {f"probe {name}": port.run(model, plan) for name, plan in plans.items()}


def test_the_probe_is_run_unless_it_is_left_out(
    answer: Path, own: own_llama.OwnLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Right up to the sequence's last position, wrong after it.
    attention = own_llama.OwnLlama.attention

    def late(self: own_llama.OwnLlama, name: str, x: mx.array, cache: Any) -> mx.array:
        turned = attention(self, name, x, cache)
        far = cache.offset - x.shape[1] + mx.arange(x.shape[1]) >= len(models.SEQUENCE)
        return mx.where(far[None, :, None], 1.01 * turned, turned)

    assert_agrees(own, answer)
    monkeypatch.setattr(own_llama.OwnLlama, "attention", late)
    last = failing(own, answer).splitlines()[-1]
    assert last.startswith("OwnLlama: differ (logits, cache): ")
    # Of keys each position is compared, of the probe's logits only some.
    assert f"first wrong position {len(models.SEQUENCE)} (plan probe chunked, keys " in last
    assert_agrees(own, answer, quick=True)
    assert_agrees(own, answer, plans=["full", "step"])


def test_traces_of_the_probe_are_judged_by_it(
    answer: Path, model_of: Callable[..., Llama], traces: dict[str, trace.Trace]
) -> None:
    more = probed(answer, model_of())
    assert_agrees(traces | more, answer)
    name, one = next(iter(more.items()))
    bad = replace(one, arrays=dict(one.arrays) | {"logits": one.logits * 1.001})
    assert f"({name.replace('probe ', 'plan probe ')}, sigma)" in failing(
        traces | {name: bad}, answer
    )
    assert_agrees(traces | {name: bad}, answer, quick=True)
    # Alone it is known by its plan; but with no run of the sequence nothing was compared.
    assert failing(one, answer).splitlines()[-1] == "none: cannot tell"


def test_a_model_that_changes_from_call_to_call_fails_unless_it_says_so(
    answer: Path, own: own_llama.OwnLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, calls = own_llama.OwnLlama.__call__, []

    def unsteady(self: own_llama.OwnLlama, tokens: mx.array, cache: Any) -> mx.array:
        calls.append(tokens)
        logits = head(self, tokens, cache)
        return logits * (1 + 1e-7 * (len(calls) % 2))

    monkeypatch.setattr(own_llama.OwnLlama, "__call__", unsteady)
    assert "; gates: repeat" in failing(own, answer).splitlines()[-1]
    own.deterministic = False
    assert_agrees(own, answer)


def test_nothing_to_judge_is_refused_and_no_pass(
    answer: Path, traces: dict[str, trace.Trace], own: own_llama.OwnLlama
) -> None:
    for model in (own, traces):
        for plans in ([], ["stpe"]):
            with pytest.raises(
                Refusal, match=r"plans: (none|stpe), expected some of chunked, full, mixed"
            ):
                assert_agrees(model, answer, plans=plans)
    with pytest.raises(Refusal, match=r"traces: none of plan full, expected one"):
        assert_agrees(traces["step"], answer, plans=["full"])
    with pytest.raises(Refusal, match="traces: none of plan any name"):
        assert_agrees({}, answer)


def test_a_llama_of_another_dtype_than_was_said_is_refused(
    answer: Path, model_of: Callable[..., Llama]
) -> None:
    with pytest.raises(
        Refusal, match="dtype: 'float16', expected 'float32' as the model's own; load it in float16"
    ):
        assert_agrees(model_of(), answer, dtype="float16")


def test_the_process_is_left_as_it_was(answer: Path, folder_of: Callable[[str], Path]) -> None:
    code = (
        "import os, sys\n"
        "def blas(): return sorted({l.split()[-1] for l in open('/proc/self/maps') if 'blas' in "
        "l or 'blis' in l})\n"
        "import mlx.core as mx, numpy, mlxkv\n"
        f"model = mlxkv.load({str(folder_of('gqa'))!r}, dtype='float32')\n"
        "before = dict(os.environ), mx.default_device(), blas() if sys.platform == 'linux' else "
        "[]\n"
        f"mlxkv.testing.assert_agrees(model, {str(answer)!r})\n"
        "assert before == (dict(os.environ), mx.default_device(), blas() if sys.platform == "
        "'linux' else [])\n"
        "assert not {'torch', 'transformers', 'mlx_lm', 'matplotlib'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


def test_it_is_a_public_name_and_a_trace_needs_no_mlx(
    answer: Path, traces: dict[str, trace.Trace], tmp_path: Path
) -> None:
    assert "testing" in dir(mlxkv)
    trace.write(tmp_path / "step.safetensors", traces["step"].meta, dict(traces["step"].arrays))
    code = (
        "import sys; sys.modules['mlx'] = None\nimport mlxkv\n"
        f"mlxkv.testing.assert_agrees({str(tmp_path / 'step.safetensors')!r}, {str(answer)!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_logits_are_asked_for_on_the_device_that_the_caller_chose(
    answer: Path, own: own_llama.OwnLlama
) -> None:
    before = mx.default_device()
    assert_agrees(own, answer, plans=["full"])
    assert mx.default_device() == before

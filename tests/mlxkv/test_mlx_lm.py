"""mlx-lm's own Llama follows plans and is judged as the port is; what it gets wrong is named. In
processes of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import command
import models
import numpy as np
import pytest
from command import refused

from mlxkv.engines import port
from mlxkv.engines.job import Job
from mlxkv.port.weights import load
from oracle.formats import trace
from oracle.formats.plan import Call, Clone, Crop, Greedy, New, Plan, Reset, judged_plans

TOKENS = [3, 7, 11, 2, 19]
SEQUENCE = models.SEQUENCE


def compare(*arguments: str | Path, **environment: str) -> command.Done:
    return mlxkv("compare", *arguments, **environment)


def mlxkv(*arguments: str | Path, **environment: str) -> command.Done:
    return command.mlxkv(*arguments, env=environment)


def asked(folder: Path, out: Path) -> Path:
    """The oracle's run folder of a model."""
    ids = ",".join(map(str, SEQUENCE))
    options = ["--tokens", ids, "--prompt-tokens", "5", "--steps", "0", "--out", str(out)]
    line = command.torch_python("-m", "oracle", "run", str(folder), *options)
    subprocess.run(line, check=True, capture_output=True)
    return out


def with_config(folder: Path, to: Path, config: dict[str, Any]) -> Path:
    """The same weights under another config.json."""
    to.mkdir()
    (to / "model.safetensors").symlink_to(folder / "model.safetensors")
    (to / "config.json").write_text(json.dumps(config))
    return to


def follow(
    folder: Path, out: Path, *plans: Plan, cache: str = "KVCache", dtype: str = "float32"
) -> dict[str, trace.Trace]:
    """The traces that mlx-lm's process leaves, by plan."""
    job = Job(
        str(folder),
        plans,
        out,
        dtype,
        dtype,
        "cpu",
        caches=dict.fromkeys((plan.name for plan in plans), cache),
    )
    with job.begin("mlxkv.engines.mlx_lm") as process:
        job.end(process)
    return {plan.name: trace.read(job.trace(plan)) for plan in plans}


MISUSE = Plan(
    "misuse",
    (
        New("a"),
        Call("a", tuple(TOKENS), 0),
        Clone("a", "b"),
        Call("a", (4, 6), None),
        Call("b", (8,), 5),
        Call("a", (4,), 0),
        Crop("a", 5),
        Crop("a", 6),
        Call("a", (8,), 5),
        Reset("a"),
        Call("a", tuple(TOKENS), 0),
        New("n", use_kv_cache=False),
        Call("n", tuple(TOKENS), 0),
        Call("n", (8,), 5),
        New("g"),
        Greedy("g", tuple(TOKENS), 0, 4),
        New("z"),
        Greedy("z", tuple(TOKENS), 0, 4, "zero"),
    ),
)


@pytest.fixture(scope="module")
def kept(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, trace.Trace]]:
    """The misuse plan and the judged ones, on each of mlx-lm's caches."""
    plans = [MISUSE, *judged_plans(SEQUENCE, prompt=5).values()]
    caches = ("KVCache", "ConcatenateKVCache", "RotatingKVCache:size=6,keep=4")
    return {
        cache: follow(folder_of("gqa"), tmp_path_factory.mktemp("jobs"), *plans, cache=cache)
        for cache in caches
    }


BATCH = Plan(
    "batch",
    (New("a"), Call("a", ((3, 7, 11), (2, 19, 5)), 0), Call("a", ((1,), (8,)), 3)),
    rows=(0, 2, 3),
)


def test_rows_by_position_and_batches_are_what_the_port_gives(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    some = replace(judged_plans(SEQUENCE, prompt=5)["mixed"], rows=(0, 7, 9, 20))
    found = follow(folder_of("gqa"), tmp_path, BATCH, some)
    model = load(folder_of("gqa"), "float32")
    for plan in (BATCH, some):
        ours, theirs = port.run(model, plan).arrays, found[plan.name].arrays
        assert theirs.keys() == ours.keys()
        for name, array in ours.items():
            np.testing.assert_allclose(theirs[name], array, atol=2e-4, err_msg=name)
    assert found["batch"].batch.tolist() == [0, 0, 1, 1, 0, 1]
    assert found["mixed"].positions.tolist() == [0, 7, 9, 20]


def test_a_trace_says_whose_it_is(
    kept: dict[str, dict[str, trace.Trace]], folder_of: Callable[[str], Path]
) -> None:
    from oracle.model.checkpoint import resolve

    meta, checkpoint = (
        kept["RotatingKVCache:size=6,keep=4"]["step"].meta,
        resolve(str(folder_of("gqa"))),
    )
    assert (meta.engine, meta.dtype, meta.weights_dtype, meta.device) == (
        "mlx-lm",
        "float32",
        "float32",
        "cpu",
    )
    assert (meta.fingerprint, meta.config_digest) == (
        checkpoint.fingerprint,
        checkpoint.config_digest,
    )
    assert {"mlx", "mlx-lm", "transformers", "blas", "os", "MLX_ENABLE_TF32"} <= set(
        meta.environment
    )
    assert (meta.environment["mlx-lm"], meta.environment["cache"]) == (
        meta.engine_version,
        "RotatingKVCache:size=6,keep=4",
    )


def test_every_judged_plan_has_the_ports_positions_steps_and_cache(
    kept: dict[str, dict[str, trace.Trace]], folder_of: Callable[[str], Path]
) -> None:
    model = load(folder_of("gqa"), "float32")
    for name, plan in judged_plans(SEQUENCE, prompt=5).items():
        ours, theirs = port.run(model, plan), kept["KVCache"][name]
        assert sorted(ours.arrays) == sorted(theirs.arrays)
        for array in ours.arrays:
            assert ours.arrays[array].shape == theirs.arrays[array].shape
            assert np.abs(ours.arrays[array] - theirs.arrays[array]).max() < 2e-4, (name, array)


def errors(found: trace.Trace) -> dict[int, str]:
    return {i: o.error for i, o in enumerate(found.meta.outcomes) if o.error is not None}


def test_what_mlx_lm_cannot_express_is_its_steps_error(
    kept: dict[str, dict[str, trace.Trace]],
) -> None:
    says = (
        "cannot be expressed: index_pos {} with {} tokens cached, as mlx-lm takes the position "
        "from its cache"
    )
    too_long = "crop: length is 6, expected at most the 5 tokens cached"
    expected = {5: says.format(0, 7), 7: too_long, 13: says.format(5, 0), 17: says.format(0, 5)}
    assert errors(kept["KVCache"]["misuse"]) == expected
    assert errors(kept["ConcatenateKVCache"]["misuse"]) == expected
    rotating = errors(kept["RotatingKVCache:size=6,keep=4"]["misuse"])
    assert rotating[6] == (
        "cannot be expressed: trim_prompt_cache trimmed 0 of 2 tokens from a "
        "RotatingKVCache:size=6,keep=4"
    )
    assert rotating[8] == says.format(5, 7)


def test_clone_crop_and_reset_are_what_users_do(kept: dict[str, dict[str, trace.Trace]]) -> None:
    found = kept["KVCache"]["misuse"]
    steps = {step: found.logits[np.asarray(found.arrays["steps"]) == step] for step in range(18)}
    positions = {
        step: found.positions[np.asarray(found.arrays["steps"]) == step].tolist()
        for step in range(18)
    }
    assert positions[3] == [5, 6]
    assert positions[4] == positions[8] == [5]
    # The clone knows nothing of what came into the original after it, and nothing is left of what
    # was cropped.
    assert np.array_equal(steps[4], steps[8])
    for again in (10, 12):
        assert positions[again] == [0, 1, 2, 3, 4]
        assert np.abs(steps[again] - steps[1]).max() < 1e-4
    assert found.kv("b", 0)[0].shape == (2, 6, 8)  # type: ignore[index]
    assert found.kv("n", 0) is None
    chosen = found.meta.outcomes[15].tokens
    assert chosen is not None
    assert chosen == steps[15][4:].argmax(1).tolist()
    assert positions[15] == list(range(8))


def test_a_trimmed_concatenating_cache_brings_its_tokens_back(
    kept: dict[str, dict[str, trace.Trace]],
) -> None:
    # mlx-lm 0.32.2: trim moves the counter and not the arrays.
    plain, concatenating = kept["KVCache"]["misuse"], kept["ConcatenateKVCache"]["misuse"]
    rows = np.asarray(plain.arrays["steps"]) == 8
    assert np.abs(plain.logits[rows] - concatenating.logits[rows]).max() > 0.1


def test_a_rotating_cache_keeps_its_size(kept: dict[str, dict[str, trace.Trace]]) -> None:
    found = kept["RotatingKVCache:size=6,keep=4"]["step"].kv("a", 2)
    assert found is not None
    assert found[0].shape == found[1].shape == (2, 6, 8)
    full = kept["KVCache"]["step"].kv("a", 2)
    assert full is not None
    assert np.abs(found[0][:, :4] - full[0][:, :4]).max() < 1e-3  # the first four are kept


def test_half_precision_and_last_rows(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    plan = Plan("p", (New("a"), Call("a", tuple(TOKENS), 0), Call("a", (1,), None)), "last")
    found = follow(folder_of("gqa"), tmp_path, plan, dtype="bfloat16")["p"]
    assert found.positions.tolist() == [4, 5]
    assert found.logits.dtype == np.float32
    assert np.array_equal(
        found.logits.view(np.uint32) & 0xFFFF, np.zeros_like(found.logits, np.uint32)
    )


@pytest.mark.parametrize("layout", ["gqa", "llama3"])
def test_mlx_lm_agrees_on_a_config_that_it_reads(
    folder_of: Callable[[str], Path], oracle_of: Callable[[str], Path], tmp_path: Path, layout: str
) -> None:
    done = compare(
        folder_of(layout), "--engine", "mlx-lm", "--oracle", oracle_of(layout), "--out", tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stdout.splitlines()[-1]
        == f"mlx-lm: agree (logits, cache)    report: {tmp_path / 'compare.md'}"
    )
    assert "  mlx-lm 0." in done.stdout.splitlines()[0]
    verdict = json.loads((tmp_path / "compare.json").read_text())
    assert (verdict["subject"]["engine"], verdict["scopes"], verdict["cause"]) == (
        "mlx-lm",
        ["logits", "cache"],
        None,
    )
    assert sorted(verdict["environment"]) == ["mlx-lm", "oracle"]
    assert [g["reason"] for g in verdict["gates"] if not g["ran"]] == [
        "not run: no float64 run of this engine"
    ]
    report = (tmp_path / "compare.md").read_text()
    assert report.startswith("# mlx-lm against transformers: ")
    # What is not exercised names whose caches `pitfalls` tries.
    assert " port" not in report.replace("of the port and of mlx-lm", "")
    assert "mlxkv cached" not in report


def test_rope_parameters_alone_are_lost_on_mlx_lm_and_the_cause_is_named(tmp_path: Path) -> None:
    # As transformers 5 writes it.
    config = models.config("gqa", rope_parameters={"rope_type": "default", "rope_theta": 100000.0})
    del config["rope_theta"]
    folder = models.save(tmp_path / "model", config)
    env = {"MLXKV_CACHE": str(tmp_path / "cache")}
    ids = ["--tokens", "3,7,11,2,19", "--steps", "6", "--json"]
    first, second = (
        compare(folder, *ids, "--engine", "mlx-lm", "--out", tmp_path / "out", **env)
        for _ in range(2)
    )
    assert first.returncode == 1, first.stderr
    verdict = json.loads(first.stdout)
    assert (verdict["outcome"], verdict["cause"]["words"]) == (
        "differ",
        "rope_theta 10000 instead of 100000",
    )
    assert verdict["cause"]["sigma"] < 3
    # What each engine took from the config stands in the report.
    said = verdict["environment"]
    assert [said[who]["rope"] for who in ("mlx-lm", "oracle")] == [
        "default, theta 10000",
        "default, theta 100000",
    ]
    assert sorted(verdict["took"]) == ["mlx-lm", "oracle", "suspects"]
    assert verdict["took"]["mlx-lm"]["forward"] > 0
    # What was computed for it is used again.
    again = json.loads(second.stdout)
    assert again["cause"] == verdict["cause"]
    assert "suspects" not in again["took"]
    (listed,) = (tmp_path / "cache" / "suspects").glob("*/suspects.json")
    listed.write_text("{}")
    shown = compare(folder, *ids[:-1], "--engine", "mlx-lm", "--out", tmp_path / "out", **env)
    line = "looks like rope_theta 10000 instead of 100000 (sigma "
    said = f"differ (logits, cache): {line}"
    assert f"\nmlx-lm: {said}" in shown.stdout
    assert "; gates: sigma, " in shown.stdout
    assert f"\n**{said}" in (tmp_path / "out" / "compare.md").read_text()
    # Without lane A the place is read from the cache, and the cause is said beside it.
    found = mlxkv("locate", folder, *ids, "--engine", "mlx-lm", "--out", tmp_path / "out", **env)
    assert found.returncode == 1, found.stderr
    place = json.loads(found.stdout)
    assert [place[key] for key in ("engine", "position", "layer", "tap", "kind")] == [
        "mlx-lm",
        1,
        0,
        "keys",
        "RoPE or the mask",
    ]
    assert place["cause"].startswith(line)


@pytest.mark.parametrize(
    ("layout", "engine", "changes", "words"),
    [
        ("gqa", "port", {"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-6 instead of 1e-5"),
        ("mha", "port", {"rope_theta": 500000.0}, "rope_theta 500000 instead of 10000"),
        (
            "mha",
            "mlx-lm",
            {"rope_traditional": True},
            "interleaved RoPE (pairs 2i and 2i + 1 turned instead of halves)",
        ),
        ("llama3", "port", {"rope_scaling": None}, "lost RoPE scaling"),
        # mlx-lm ties the head where the config does not say; transformers does not.
        (
            "gqa",
            "mlx-lm",
            {"tie_word_embeddings": None},
            "lm_head tied to the embedding (its own weights lost)",
        ),
    ],
)
def test_a_planted_mistake_is_named(
    folder_of: Callable[[str], Path],
    oracle_of: Callable[[str], Path],
    tmp_path: Path,
    layout: str,
    engine: str,
    changes: dict[str, Any],
    words: str,
) -> None:
    config = {
        key: value for key, value in models.config(layout, **changes).items() if value is not None
    }
    other = with_config(folder_of(layout), tmp_path / "other", config)
    done = compare(
        other, "--engine", engine, "--oracle", oracle_of(layout), "--out", tmp_path / "out"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"): looks like {words} (sigma " in done.stdout.splitlines()[-2]


@pytest.mark.parametrize(("to", "bits"), [("float16", None), ("bfloat16", 0xFFFF0000)])
def test_rounded_weights_of_a_third_engine_are_named(
    folder_of: Callable[[str], Path],
    oracle_of: Callable[[str], Path],
    tmp_path: Path,
    to: str,
    bits: int | None,
) -> None:
    weights = models.weights(models.config("gqa"))
    for name, array in weights.items():
        if ".mlp." in name:
            if bits is None:
                weights[name] = array.astype(np.float16).astype(np.float32)
            else:  # round to nearest even: add half of what is cut, and the last bit kept
                raw = array.view(np.uint32)
                weights[name] = ((raw + 0x7FFF + ((raw >> 16) & 1)) & np.uint32(bits)).view(
                    np.float32
                )
    rounded = load(models.save(tmp_path / "rounded", models.config("gqa"), weights), "float32")
    found = port.run(rounded, judged_plans(SEQUENCE, prompt=5)["step"])
    trace.write(
        tmp_path / "third.safetensors",
        replace(found.meta, engine="third", fingerprint=None),
        found.arrays,
    )
    done = compare(
        folder_of("gqa"),
        "--oracle",
        oracle_of("gqa"),
        "--candidate",
        tmp_path / "third.safetensors",
        "--out",
        tmp_path / "out",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"): looks like mlp weights rounded to {to} (sigma " in done.stdout.splitlines()[-1]
    assert (
        f"): looks like mlp weights rounded to {to} (sigma "
        in (tmp_path / "out" / "compare.md").read_text()
    )
    assert (
        json.loads((tmp_path / "out" / "compare.json").read_text())["third"]["cause"]["name"]
        == f"{to}-mlp"
    )


def test_rows_of_q_and_k_in_pairs_order_are_named(
    folder_of: Callable[[str], Path], oracle_of: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = models.weights(models.config("gqa"))
    for name, array in weights.items():
        if (
            "q_proj" in name or "k_proj" in name
        ):  # each head's rows 0, d/2, 1, d/2 + 1, ..., as GGUF and Meta store them
            head_dim = models.config("gqa")["head_dim"]
            weights[name] = (
                array.reshape(-1, 2, head_dim // 2, array.shape[-1])
                .swapaxes(1, 2)
                .reshape(array.shape)
                .copy()
            )
    paired = load(models.save(tmp_path / "paired", models.config("gqa"), weights), "float32")
    found = port.run(paired, judged_plans(SEQUENCE, prompt=5)["full"])
    trace.write(
        tmp_path / "third.safetensors",
        replace(found.meta, engine="third", fingerprint=None),
        found.arrays,
    )
    done = compare(
        folder_of("gqa"),
        "--oracle",
        oracle_of("gqa"),
        "--candidate",
        tmp_path / "third.safetensors",
        "--out",
        tmp_path / "out",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "): looks like q and k rows of each head in the order of Meta's and GGUF "
        in done.stdout.splitlines()[-1]
    )
    third = json.loads((tmp_path / "out" / "compare.json").read_text())["third"]
    # Nothing turns at position 0, but its keys have the other order too.
    assert third["first_wrong"]["position"] == 0


def test_a_theta_that_no_suspect_has_is_read_from_keys(
    folder_of: Callable[[str], Path], oracle_of: Callable[[str], Path], tmp_path: Path
) -> None:
    other = with_config(
        folder_of("gqa"), tmp_path / "other", models.config("gqa", rope_theta=11000.0)
    )
    done = compare(other, "--oracle", oracle_of("gqa"), "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "looks like rope_theta 11000 instead of 10000 (sigma " in done.stdout
    assert " against the truth's keys of layer 0 turned so)" in done.stdout


def test_a_mistake_that_is_none_of_them_is_not_explained(
    folder_of: Callable[[str], Path], oracle_of: Callable[[str], Path], tmp_path: Path
) -> None:
    other = with_config(
        folder_of("gqa"), tmp_path / "other", models.config("gqa", rms_norm_eps=3e-5)
    )
    done = compare(other, "--oracle", oracle_of("gqa"), "--out", tmp_path / "out")
    assert done.returncode == 1
    assert re.search(r"\nnote: none of \d+ usual suspects explains the difference\n", done.stdout)
    assert "looks like" not in done.stdout


def hidden(package: str, room: Path) -> str:
    """A PYTHONPATH under which a package cannot be imported."""
    room.mkdir()
    text = "import sys\nclass Hide:\n    def find_spec(self, name, path=None, target=None):\n"
    text += (
        f"        if name.split('.')[0] == {package!r}:\n            raise "
        f"ModuleNotFoundError(f'No module named {{name!r}}', name=name)\n"
    )
    (room / "sitecustomize.py").write_text(f"{text}sys.meta_path.insert(0, Hide())\n")
    return os.pathsep.join([str(room), os.environ.get("PYTHONPATH", "")])


def test_without_torch_the_cause_is_not_looked_for(
    folder_of: Callable[[str], Path], oracle_of: Callable[[str], Path], tmp_path: Path
) -> None:
    other = with_config(
        folder_of("gqa"), tmp_path / "other", models.config("gqa", rms_norm_eps=1e-6)
    )
    env = {"PYTHONPATH": hidden("torch", tmp_path / "hide"), "MLXKV_CACHE": str(tmp_path / "cache")}
    done = compare(other, "--oracle", oracle_of("gqa"), "--out", tmp_path / "out", **env)
    assert done.returncode == 1, done.stderr
    assert "\nnote: the cause was not looked for: torch is not installed\n" in done.stdout
    assert (
        "- the cause was not looked for: torch is not installed"
        in (tmp_path / "out" / "compare.md").read_text()
    )


def test_without_the_oracles_own_model_the_verdict_stands(
    oracle_of: Callable[[str], Path], tmp_path: Path
) -> None:
    gone = models.save(tmp_path / "gone", models.config("mha"))
    answer = asked(gone, tmp_path / "answer")
    other = tmp_path / "other"
    shutil.move(gone, other)
    (other / "config.json").write_text(json.dumps(models.config("mha", rms_norm_eps=1e-6)))
    done = compare(
        other, "--oracle", answer, "--out", tmp_path / "out", MLXKV_CACHE=str(tmp_path / "cache")
    )
    assert done.returncode == 1, done.stderr
    assert f"\nnote: the cause was not looked for: {str(gone)!r}: no such folder" in done.stdout


def test_an_unknown_engine_is_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    refused(
        compare(folder_of("gqa"), "--engine", "mlx_lm", "--out", tmp_path),
        "--engine: 'mlx_lm', expected port or mlx-lm",
    )


def test_mlx_lm_that_is_not_there_is_refused_before_the_oracle_is_asked(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    env = {
        "PYTHONPATH": hidden("mlx_lm", tmp_path / "hide"),
        "MLXKV_CACHE": str(tmp_path / "cache"),
    }
    done = compare(
        folder_of("gqa"), "--tokens", "1,2", "--engine", "mlx-lm", "--out", tmp_path / "out", **env
    )
    refused(done, "mlx-lm is not installed; pip install -c constraints.txt '.[port]' in a clone")
    assert not (tmp_path / "cache" / "oracle").exists()


def test_mlx_lm_that_cannot_be_imported_is_refused(
    folder_of: Callable[[str], Path], oracle_of: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "broken" / "mlx_lm").mkdir(parents=True)
    (tmp_path / "broken" / "mlx_lm" / "__init__.py").write_text("import not_there\n")
    env = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "broken"), os.environ.get("PYTHONPATH", "")])
    }
    done = compare(
        folder_of("gqa"),
        "--engine",
        "mlx-lm",
        "--oracle",
        oracle_of("gqa"),
        "--out",
        tmp_path / "out",
        **env,
    )
    refused(done, "mlx-lm cannot be imported (No module named 'not_there'); pip install")


def test_a_model_that_mlx_lm_cannot_load_is_refused(
    folder_of: Callable[[str], Path], oracle_of: Callable[[str], Path], tmp_path: Path
) -> None:
    other = with_config(
        folder_of("gqa"), tmp_path / "other", models.config("gqa", model_file="own.py")
    )
    done = compare(
        other, "--engine", "mlx-lm", "--oracle", oracle_of("gqa"), "--out", tmp_path / "out"
    )
    refused(done, str(other), "mlx-lm cannot load it", "own.py")
    assert not (tmp_path / "out").exists()


def test_the_default_model_agrees_on_mlx_lm(default_oracle: Path, tmp_path: Path) -> None:
    done = compare(
        "--quick", "--engine", "mlx-lm", "--oracle", default_oracle, "--out", tmp_path / "right"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nmlx-lm: agree (logits, cache)" in done.stdout
    verdict = json.loads((tmp_path / "right" / "compare.json").read_text())
    assert max(g["value"] for g in verdict["gates"] if g["name"] == "sigma") < 3

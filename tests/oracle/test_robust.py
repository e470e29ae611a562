"""Odd files, places and networks: one line and exit code 2; no file that runs code is opened."""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from command import Done, oracle, torch_python
from command import refused as refused_at_once
from folders import INDEX, SHARDS, folder_of
from folders import refused as refused_model

from oracle import folder
from oracle.formats import disk, exits, plan, run_folder, trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import New, Plan
from oracle.model import checkpoint
from oracle.model import tokenizer as tokens

PYTHON = [sys.executable, "-m", "oracle"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MLXKV_CACHE", str(place))
    return place


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make(tmp_path_factory.mktemp("models") / "tiny", "mqa")


def process(
    *arguments: object, env: dict[str, str] | None = None, limit: int | None = None
) -> Done:
    """A process of its own, all of whose files may have `limit` bytes at most."""

    def set_limit() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [*PYTHON, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | (env or {}),
        preexec_fn=set_limit,
    )


refused = partial(refused_at_once, notes="about")


def refusal(call: object, *arguments: object) -> str:
    with pytest.raises(Refusal) as caught:
        call(*arguments)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def put(path: Path, kind: str) -> None:
    """Something that is not a regular file at a place where one is expected."""
    if path.exists():
        path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            os.chdir(path.parent)  # its address may have 107 bytes
            made.bind(path.name)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", INDEX, "tokenizer.json", "a.safetensors", "model.gguf"],
)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    place = folder_of(tmp_path / "m", SHARDS if name in (INDEX, "a.safetensors") else None)
    put(place / name, kind)
    if name == "tokenizer.json":
        said = refusal(tokens.load, place)
    elif name == "model.gguf":
        said = refused_model(place / name)
        assert (
            "no config.json" if kind == "folder" else "expected a folder with config.json"
        ) in said
        return
    else:
        said = refused_model(place)
    assert f"{place / name}: " in said
    assert "not a regular file" in said


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_trace_a_plan_and_a_manifest_are_regular_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "manifest.json"
    put(path, kind)
    for read, given in (
        (trace.read, path),
        (plan.read, path),
        (run_folder.read_manifest, tmp_path),
        (disk.sha256, path),
    ):
        assert "not a regular file" in refusal(read, given)


def test_a_name_too_long_for_any_file_system(tmp_path: Path) -> None:
    long = "x" * 300
    place = folder_of(
        tmp_path / "m",
        {
            f"{'y' * 200}.safetensors": ["lm_head.weight", "model.norm.weight"],
            "b.safetensors": ["model.embed_tokens.weight"],
        },
    )
    index = json.loads((place / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = f"{long}.safetensors"
    (place / INDEX).write_text(json.dumps(index))
    assert "no such file, expected it as" in refused_model(place)
    assert "no such folder or file" in refused_model(tmp_path / long)
    refused(oracle("check", tmp_path / long), "File name too long")


@pytest.mark.parametrize(
    "shard", ["../a.safetensors", "/etc/a.safetensors", "a\0.safetensors", "", 3, None, ["a"]]
)
def test_an_index_names_files_beside_it(tmp_path: Path, shard: object) -> None:
    place = folder_of(tmp_path / "m", SHARDS)
    (place / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    assert "expected the name of a safetensors file beside it" in refused_model(place)


def test_an_output_folder_with_a_name_too_long(model: Path, tmp_path: Path) -> None:
    refused(
        oracle("run", model, "--tokens", "1", "--out", tmp_path / ("x" * 300)),
        "cannot be written (File name too long)",
    )


def test_the_root_is_no_place_for_a_run(model: Path) -> None:
    refused(
        oracle("run", model, "--tokens", "1,2", "--out", "/"),
        "/: the root of the file system, expected a new folder",
    )


def test_paths_may_hold_spaces_and_other_alphabets_and_lines(model: Path, tmp_path: Path) -> None:
    name = "größe 日本\nlines'\"$HOME"
    place = shutil.copytree(model, tmp_path / name)
    done = oracle(
        "run",
        place,
        "--tokens",
        "1,2",
        "--steps",
        "1",
        "--threads",
        "1",
        "--out",
        tmp_path / f"out {name}",
    )
    assert done.returncode == 0, done.stderr
    assert run_folder.read_manifest(tmp_path / f"out {name}").source == str(place)
    refused(oracle("show", tmp_path / f"no {name}"), "cannot be read")


def test_a_path_that_is_no_text_is_refused_or_shown(model: Path, tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    shutil.copytree(model, odd)
    refused(
        oracle("run", odd, "--tokens", "1,2", "--out", tmp_path / "out"),
        "not text",
        "expected a path in UTF-8",
    )
    small = ["run", str(model), "--tokens", "1,2", "--steps", "1", "--threads", "1"]
    command = torch_python("-m", "oracle", *small, "--out", odd + "out")
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/\\udcffout\n"), done.stderr


def test_threads_are_bounded_with_a_reason(model: Path, tmp_path: Path) -> None:
    refused(
        oracle("run", model, "--tokens", "1,2", "--threads", "100000", "--out", tmp_path / "x"),
        "threads: 100000",
        "torch dies",
    )
    (tmp_path / "p.json").write_text(json.dumps(Plan("p", (New("a"),)).to_json()))
    done = oracle(
        "follow",
        model,
        "--plan",
        tmp_path / "p.json",
        "--threads",
        "100000",
        "--out",
        tmp_path / "x",
    )
    refused(done, "threads: 100000")


def test_a_full_disk_is_one_line_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    done = process(
        "run", model, "--tokens", "1,2,3", "--threads", "1", "--out", tmp_path / "out", limit=20_000
    )
    refused(done, "cannot be written (File too large)", "free some space")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["plan", "step"])
def test_a_plan_with_a_key_that_nobody_reads_is_refused(where: str) -> None:
    value = Plan("p", (New("a"),)).to_json()
    assert plan.from_json(value).steps == (New("a"),)
    (value if where == "plan" else value["steps"][0])["index_poss"] = 3
    assert "index_poss" in refusal(plan.from_json, value)


def test_tensors_of_a_trace_that_overlap_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    meta = trace.Meta(Plan("p", (New("a"), plan.Call("a", (1,), 0))), "x", "1", "float32")
    logits, place = np.zeros((1, 3), np.float32), np.zeros(1, np.int32)
    trace.write(path, meta, {"logits": logits, "positions": place, "steps": place})
    assert trace.read(path).logits.shape == (1, 3)
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    for name, offsets in (("logits", [0, 12]), ("positions", [8, 12]), ("steps", [12, 16])):
        header[name]["data_offsets"] = offsets
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[begin : begin + 16])
    assert "positions" in refusal(trace.read, path)


@pytest.mark.parametrize("name", ["../x", "a/b", "", "nul\0", "x" * 101, "..", "/etc/x", "\ud800"])
def test_a_plans_name_is_a_files_name(name: str) -> None:
    assert "its name becomes a file's" in refusal(Plan, name, (New("a"),))


# What quantised checkpoints look like: named by their method, whatever else they hold.


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (
            "quantization_config",
            {"quant_method": "awq", "bits": 4},
            "quantization_config says 'awq'",
        ),
        (
            "quantization_config",
            {"quant_method": "gptq", "bits": 4},
            "quantization_config says 'gptq'",
        ),
        (
            "quantization_config",
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            "quantization_config says 'fp8'",
        ),
        (
            "quantization_config",
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quantization_config says 'bitsandbytes'",
        ),
        ("quantization_config", {"bits": 4}, "quantization_config says \"{'bits': 4}\""),
        (
            "compression_config",
            {"quant_method": "compressed-tensors"},
            "compression_config says 'compressed-tensors'",
        ),
        ("quantization", {"group_size": 64, "bits": 4}, "quantization says"),
    ],
)
def test_a_quantised_config_is_refused_by_its_method(
    tmp_path: Path, key: str, value: object, says: str
) -> None:
    config = {"model_type": "llama", "vocab_size": 11, "max_position_embeddings": 32, key: value}
    said = refused_model(folder_of(tmp_path / "m", config=config))
    assert says in said
    assert "give the model's unquantised checkpoint or its GGUF" in said


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("model.layers.0.mlp.up_proj.qweight", torch.zeros(2, 2, dtype=torch.int32)),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", torch.ones(1, 1)),
        ("model.layers.0.mlp.up_proj.weight.absmax", torch.ones(4)),
        (
            "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4",
            torch.zeros(9, dtype=torch.uint8),
        ),
        ("model.layers.0.mlp.up_proj.SCB", torch.ones(4)),
        ("model.layers.0.mlp.up_proj.scales", torch.ones(4)),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(2, 2, dtype=torch.float8_e4m3fn)),
    ],
)
def test_quantised_tensors_are_refused_by_name(
    tmp_path: Path, name: str, array: torch.Tensor
) -> None:
    config = models.config_of("mqa")
    place = models.write(tmp_path / "m", config, models.tensors_of(config) | {name: array})
    assert f"{name} (" in refused_model(place)


def test_weights_stored_in_float64_are_refused_as_by_the_port(tmp_path: Path) -> None:
    config = models.config_of("mqa")
    wide = {name: tensor.double() for name, tensor in models.tensors_of(config).items()}
    place = models.write(tmp_path / "m", config, wide)
    done = oracle("run", place, "--tokens", "1,2", "--out", tmp_path / "out")
    refused(done, "is F64, expected F32, BF16, F16")


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    place = folder_of(tmp_path / "m")
    for name in ("pytorch_model.bin", "model.pt", "modeling_custom.py", "training_args.bin"):
        put(place / name, "pipe")  # whoever opened one would wait for ever
    assert checkpoint.resolve(str(place)).tensors
    (place / "model.safetensors").unlink()
    assert "is never opened (pickle files run code)" in refused_model(place)


# The network.


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes calls and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(50)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def hub(tmp_path: Path, endpoint: str) -> dict[str, str]:
    return {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hub"),
        "NO_PROXY": "127.0.0.1",
    }


def test_a_hub_that_never_answers_is_given_up(tmp_path: Path, silent: str) -> None:
    begun = time.monotonic()
    done = process(
        "run", "org/name", "--tokens", "1", "--out", tmp_path / "out", env=hub(tmp_path, silent)
    )
    refused(
        done,
        "org/name: no such folder here, and the Hub did not give it",
        "timed out",
        "check the spelling and the network",
    )
    assert (
        time.monotonic() - begun < 40
    )  # 10 s by the clock of the request, and imports on a busy machine


def test_a_hub_that_is_not_there_and_no_hub_at_all(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        asked = ("run", "org/name", "--tokens", "1", "--out", tmp_path / "out")
        gone = hub(tmp_path, endpoint)
        refused(process(*asked, env=gone), "check the spelling and the network")
        refused(process(*asked, env=gone | {"HF_HUB_OFFLINE": "1"}), "HF_HUB_OFFLINE is set")


# Processes.


def test_what_a_killed_run_left_is_removed_by_the_next_and_a_living_ones_is_not(
    tmp_path: Path,
) -> None:
    dead = tmp_path / "tmp01234567"
    (dead / "run").mkdir(parents=True)
    with disk.own_folder(tmp_path, prefix="tmp") as living:
        assert not dead.exists()
        with disk.own_folder(tmp_path, prefix="tmp") as other:
            assert living.exists()
            assert living != other
        assert not other.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["mkdir", "open", "flock"])
def test_a_folder_goes_with_a_signal_that_comes_as_soon_as_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    owner = {"mkdir": Path, "open": os, "flock": fcntl}[moment]
    real = getattr(owner, moment)

    def stopped(*arguments: object, **options: object) -> None:
        real(*arguments, **options)
        monkeypatch.undo()
        sys.exit(143)

    monkeypatch.setattr(owner, moment, stopped)
    with pytest.raises(SystemExit), disk.own_folder(tmp_path, prefix=".out.", suffix=".part"):
        pytest.fail("the signal came first")
    assert list(tmp_path.iterdir()) == []


def test_a_run_killed_while_it_writes_is_swept_by_the_next(model: Path, tmp_path: Path) -> None:
    asked = ["run", str(model), "--tokens", "1,2,3", "--threads", "1"]
    asked += ["--out", str(tmp_path / "out")]
    first = subprocess.Popen(
        [*PYTHON, *asked], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not list(tmp_path.glob(".out.*.part/plans")) and first.poll() is None:
        time.sleep(0.005)
    first.kill()
    assert first.wait() == -signal.SIGKILL
    assert list(tmp_path.glob(".out.*.part"))
    assert oracle(*asked).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_process_ends_with_its_parent(model: Path, tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [
        *PYTHON,
        "run",
        str(model),
        "--tokens",
        "1,2,3",
        "--steps",
        "100",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        command, env=os.environ | {exits.PARENT: str(gone.pid)}, capture_output=True, timeout=60
    )
    assert done.returncode == 143
    assert b"Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("library", ["_multiarray_umath", "libtorch_cpu", "libtorch_python"])
def test_an_interrupt_of_the_imports_is_silent(model: Path, tmp_path: Path, library: str) -> None:
    asked = ["run", str(model), "--tokens", "1,2,3", "--steps", "100"]
    started = subprocess.Popen(
        [*PYTHON, *asked, "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    maps = Path(f"/proc/{started.pid}/maps")
    while library not in maps.read_text() and started.poll() is None:
        time.sleep(0.002)
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 130
    assert b"Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_waits_for_the_lock_and_says_so(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from oracle.formats import disk\n"
        "with disk.alone(Path(sys.argv[1]), waiting=lambda: None):\n"
        "    print('held', flush=True); time.sleep(1)"
    )
    lock, said = tmp_path / "lock", []
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with disk.alone(lock, waiting=lambda: said.append("waiting")):
            assert holder.poll() is not None or holder.wait(timeout=5) == 0
    assert said == ["waiting"]


def edited(made: Path, key: str, value: object) -> None:
    manifest = json.loads((made / "manifest.json").read_text())
    manifest[key] = value
    (made / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    folder.run(str(model), out=out, tokens=[1, 2, 3], steps=2, threads=1)
    return out


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("fingerprint", 7, "fingerprint is 7, expected str"),
        ("fingerprint", {}, "fingerprint is {}, expected str"),
        (
            "proofs",
            {"truth_agreement": "small"},
            "proofs[...]: expected float, got str",
        ),
        ("proofs", {"truth_agreement": float("nan")}, "NaN is not finite"),
        ("texts", [1, 2, 3, 4], "texts[0] is 1, expected str"),
        ("texts", ["a"], "texts holds 1, which no run writes"),
        ("tokens", [1, True], "tokens[1] is True, expected int"),
        ("tokens", [1, 2**70], "does not fit into 64 bits"),
        ("prompt_tokens", 99, "prompt_tokens holds 99"),
        ("plans", {"../x": "0" * 64}, "plans holds '../x'"),
        ("plans", {"full": 1}, "plans[...]: expected str, got int"),
        ("files", {"../../etc/passwd": "0" * 64}, "files holds '../../etc/passwd'"),
        ("files", {"/etc/passwd": "0" * 64}, "files holds '/etc/passwd'"),
        ("files", {"a\0b": "0" * 64}, "files holds 'a\\x00b'"),
        ("files", {"a": "short"}, "files[...]: expected str matching regex"),
        ("generated", "many", "generated is 'many', expected array"),
        ("generated", [-1], "generated[0] is -1, expected int >= 0"),
        ("pool", None, "pool is None, expected array"),
        (
            "environment",
            {"threads": float("inf")},
            "Infinity is not finite",
        ),
        ("name", "\ud800", "surrogates not allowed"),
        ("inputs", None, "inputs is None, expected str"),
    ],
)
def test_a_manifest_of_odd_kinds_is_refused_by_key(
    run: Path, tmp_path: Path, key: str, value: object, says: str
) -> None:
    made = shutil.copytree(run, tmp_path / "run")
    edited(made, key, value)
    assert says in refusal(run_folder.read_manifest, made)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("fingerprint", 3, "fingerprint is 3, expected str | null"),
        ("outcomes", [{"tokens": "all"}], "outcomes[0].tokens is 'all', expected array | null"),
        ("outcomes", [7], "outcomes[0] is 7, expected object"),
        ("outcomes", [{"result": 1}], "outcomes[0]: object contains unknown field result"),
        ("probes", {"matmul": [1]}, "probes[...]: expected float, got array"),
        ("environment", {"x": float("nan")}, "NaN is not finite"),
        ("plan_digest", [1], "plan_digest is [1], expected "),
        (
            "plan",
            {"format": "mlxkv-plan/1", "name": "p", "steps": [{"do": []}]},
            "plan: steps[0].do is [], expected str",
        ),
    ],
)
def test_a_traces_metadata_of_odd_kinds_is_refused_by_key(
    tmp_path: Path, key: str, value: object, says: str
) -> None:
    path = tmp_path / "t.safetensors"
    meta = trace.Meta(Plan("p", (New("a"),)), "e", "1", "float32").to_json() | {key: value}
    header = {
        "__metadata__": {"mlxkv": json.dumps(meta)},
        "logits": {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    assert says in refusal(trace.read, path)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ([1] * 100, "has shape"),
        ([2**70, 0], "does not fit into 64 bits"),
        ([2**40, 2**40, 0], "has shape"),
        ("", "shape is '', expected array"),
        ([-1], "shape[0] is -1, expected int >= 0"),
        ([], "bytes"),
    ],
)
def test_a_shape_that_numpy_has_no_array_for_is_refused(
    tmp_path: Path, shape: object, says: str
) -> None:
    path = tmp_path / "t.safetensors"
    meta = trace.Meta(Plan("p", (New("a"),)), "e", "1", "float32").to_json()
    end = 4 if isinstance(shape, list) and shape and set(shape) == {1} else 0
    header = {
        "__metadata__": {"mlxkv": json.dumps(meta)},
        "kv/a/000/keys": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    assert says in refusal(trace.read, path)


def test_text_that_is_no_unicode_is_written_as_what_it_is(tmp_path: Path) -> None:
    disk.write_text(tmp_path / "t.md", os.fsdecode(b"a \xff b"))
    assert (tmp_path / "t.md").read_text() == "a \\udcff b"


def test_every_reported_fault_has_a_test_of_its_kind() -> None:
    here = Path(__file__).parents[1]
    rows = [
        line.split("|")
        for line in (here / "README.md").read_text(encoding="utf-8").splitlines()
        if re.match(r"\| \d\d \|", line)
    ]
    assert [int(row[1]) for row in rows] == list(range(1, 50, 2))
    known = {
        name
        for path in here.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
    }
    named = {name for row in rows for name in re.findall(r"`(test_\w+)`", row[3])}
    assert named - known == set()
    assert all("`test_" in row[3] for row in rows)

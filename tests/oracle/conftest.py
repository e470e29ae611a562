import shutil

import pytest

import oracle
from oracle.formats.disk import alone
from oracle.formats.run_folder import read_manifest
from oracle.model import checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny Llama's folder, which nobody changes."""
    import models  # it needs torch, and not every file does

    return str(models.make(tmp_path_factory.mktemp("models") / "tiny", "gqa"))


@pytest.fixture
def copy(kept, tmp_path):
    """A copy, to be changed, of the run folder that a file makes as `kept`."""
    return shutil.copytree(kept, tmp_path / "copy")


@pytest.fixture(scope="session")
def default_checkpoint() -> checkpoint.Checkpoint:
    """The real default model, fetched and converted once per machine.

    Tests that need it fail where it cannot be had.
    """
    return checkpoint.resolve(None)


@pytest.fixture(scope="session")
def default_run(default_checkpoint, room):
    """A run folder of the default model, made once a session, for the port's tests too."""
    out = room / "default-oracle"
    with alone(room / "default-oracle.lock", waiting=lambda: None):
        if (out / "manifest.json").exists():
            return out, read_manifest(out)
        return out, oracle.run(out=out, prompt="The capital of France is", threads=2)

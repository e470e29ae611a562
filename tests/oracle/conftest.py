import pytest

from oracle import checkpoint


@pytest.fixture(scope="session")
def default_checkpoint() -> checkpoint.Checkpoint:
    """The real default model; fetched and converted once per machine. Tests that need it fail where it cannot be had."""
    return checkpoint.resolve(None)

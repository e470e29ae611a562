import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from folders import INDEX, SHARDS, folder_of, refused
from huggingface_hub import constants

from oracle.model.checkpoint import resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """snapshot_download, which finds the local cache itself and gives an answer of ours for the
    network.
    """

    def __init__(self, answer: Path | Exception) -> None:
        from huggingface_hub import snapshot_download

        self.real, self.answer, self.calls = snapshot_download, answer, []

    def __call__(self, model: str, **options: object) -> str:
        if options["local_files_only"]:
            return str(self.real(model, **options))
        self.calls.append((model, options))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    from huggingface_hub import errors

    fake = Hub(errors.LocalEntryNotFoundError("no network"))
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    return fake


def cached(tmp_path: Path, commit: str = COMMIT, ref: str = "main") -> Path:
    base = tmp_path / "hub/models--org--name"
    (base / "refs").mkdir(parents=True, exist_ok=True)
    (base / "snapshots").mkdir(exist_ok=True)
    (base / "refs" / ref).write_text(commit)
    folder = folder_of(base / "snapshots" / commit, SHARDS)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_model_that_is_whole_in_the_hubs_cache_needs_no_network(tmp_path: Path, hub: Hub) -> None:
    folder = cached(tmp_path)
    other = cached(tmp_path, "f" * 40, "v2")
    found = resolve("org/name")
    assert (found.folder, found.source, found.name, found.note, found.revision) == (
        folder,
        "org/name",
        "name",
        "hub",
        COMMIT,
    )
    assert resolve("org/name", revision="v2").folder == other
    assert resolve("org/name", revision="f" * 40).revision == "f" * 40
    assert hub.calls == []


def test_what_the_cache_lacks_is_asked_for_by_name(tmp_path: Path, hub: Hub) -> None:
    (cached(tmp_path) / "b.safetensors").unlink()
    hub.answer = cached(tmp_path, "f" * 40, "v2")
    assert resolve("org/name").revision == "f" * 40
    ((model, options),) = hub.calls
    assert model == "org/name"
    wanted = ["config.json", "generation_config.json", "tokenizer.json", INDEX, "*.safetensors"]
    assert options["allow_patterns"] == wanted
    assert options["ignore_patterns"] == ["*/*", "consolidated*"]
    assert options["revision"] is None


def test_without_its_tokenizer_a_cached_model_is_used_only_when_the_hub_is_away(
    tmp_path: Path, hub: Hub
) -> None:
    folder = cached(tmp_path)
    (folder / "tokenizer.json").unlink()
    assert resolve("org/name").folder == folder
    assert len(hub.calls) == 1


def hub_error(name: str) -> Exception:
    from huggingface_hub import errors

    kind: type[Exception] = getattr(errors, name)
    return kind.__new__(kind, "404 Client Error\n\nRepository Not Found")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            "RepositoryNotFoundError",
            "no such folder here, and the Hub has no such model (or a private one); check the "
            "spelling",
        ),
        ("GatedRepoError", "gives this model only to those it let in"),
        ("RevisionNotFoundError", "has this model but no revision 'v9' of it"),
        (
            "LocalEntryNotFoundError",
            "(it cannot be reached, and its cache here lacks the model); check the spelling and "
            "the network",
        ),
        ("HFValidationError", "the Hub did not give it (404 Client Error Repository Not Found)"),
    ],
)
def test_each_failure_of_the_hub_is_one_line_of_its_own(hub: Hub, error: str, says: str) -> None:
    hub.answer = hub_error(error)
    message = refused("org/nmae", revision="v9")
    assert message.startswith("org/nmae: ")
    assert says in message


def test_a_mistyped_folder_is_told_from_a_missing_repository(tmp_path: Path, hub: Hub) -> None:
    folder_of(tmp_path / "tiny")
    (tmp_path / "models").mkdir()
    assert "models/tniy: models is a folder here but holds no tniy, and the Hub" in refused(
        "models/tniy"
    )


def test_offline_mode_is_named(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set with no such model in the Hub's cache" in refused("org/name")
    cached(tmp_path)
    assert resolve("org/name").revision == COMMIT


def test_a_folder_of_the_name_goes_before_the_hub(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "org").mkdir()
    folder_of(tmp_path / "org/name")
    assert resolve("org/name").note == ""
    assert hub.calls == []


def test_a_full_disk_is_not_called_the_network(hub: Hub) -> None:
    hub.answer = OSError(errno.ENOSPC, "No space left on device")
    full = "cannot be written (No space left on device)"
    remedy = "free some space or name another folder in HF_HOME"
    folder = constants.HF_HUB_CACHE
    assert refused("org/name") == f"{folder}: {full}; {remedy}"


STALLED = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import huggingface_hub

def stalled(*_, local_files_only, **__):
    if local_files_only:
        raise OSError("not here")
    print("stalls", flush=True)
    with ThreadPoolExecutor() as pool:
        pool.submit(time.sleep, 300).result()

huggingface_hub.snapshot_download = stalled
huggingface_hub.HfApi.model_info = lambda *_, **__: None
from oracle.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_download_that_stalls(tmp_path: Path, number: signal.Signals) -> None:
    arguments = ["run", "org/name", "--tokens", "1", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-c", STALLED, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stalls\n"
    process.send_signal(number)
    try:
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []

"""A model of the Hugging Face Hub: from its local cache if all is there, else from the network."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from oracle.formats.errors import Refusal, one_line
from oracle.formats.progress import Progress
from oracle.model import safetensors

_FILES = ["config.json", "generation_config.json", "tokenizer.json"]
_FILES += [safetensors.INDEX, "*.safetensors"]
_OTHERS = ["*/*", "consolidated*"]
_SECONDS = 10
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def snapshot(model: str, revision: str | None, progress: Progress) -> Path:
    """The folder of a model's snapshot. Its name is the commit."""
    cached = _snapshot(model, revision, local_files_only=True)
    here = isinstance(cached, Path) and _loadable(cached)
    if isinstance(cached, Path) and here and (cached / "tokenizer.json").exists():
        return cached
    progress(f"downloading {model}", 0, 1)
    fetched = _interruptible(model, revision)
    progress(f"downloading {model}", 1, 1)
    if isinstance(fetched, Path):
        return fetched
    if isinstance(cached, Path) and here:
        return cached
    raise _refusal(model, revision, fetched) from fetched


def _interruptible(model: str, revision: str | None) -> Path | Exception:
    """The snapshot from the network. It waits for threads of its own, and an interrupt with it."""
    found: list[Path | Exception] = []
    thread = threading.Thread(target=lambda: found.append(_snapshot(model, revision)), daemon=True)
    thread.start()
    while thread.is_alive():
        # Not for ever: a signal that comes just before a wait without end would not be seen in it.
        thread.join(0.2)
    return found[0]


def _snapshot(
    model: str, revision: str | None, *, local_files_only: bool = False
) -> Path | Exception:
    from huggingface_hub import HfApi, snapshot_download

    try:
        if not local_files_only:
            # What snapshot_download asks first has no time limit of its own.
            HfApi().model_info(model, revision=revision, timeout=_SECONDS)
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=_FILES,
                ignore_patterns=_OTHERS,
                local_files_only=local_files_only,
                etag_timeout=_SECONDS,
            )
        )
    except Exception as error:  # the HTTP client's own errors among them, which differ by version
        return error


def _loadable(folder: Path) -> bool:
    try:
        return os.path.exists(folder / "config.json") and bool(safetensors.tensors(folder))
    except Refusal:
        return False


def _refusal(model: str, revision: str | None, error: Exception) -> Refusal:
    if isinstance(error, OSError) and error.errno in _FULL:
        from huggingface_hub import constants

        what = f"cannot be written ({error.strerror})"
        remedy = "free some space or name another folder in HF_HOME"
        return Refusal(what, where=constants.HF_HUB_CACHE, remedy=remedy)
    return Refusal(_why_not(model, revision, error), where=model)


def _why_not(model: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors

    parent, name = Path(model).parent, Path(model).name
    here = f"{parent} is a folder here but holds no {name}, and"
    if not parent.is_dir():
        here = "no such folder here, and"
    log_in = "log in with `hf auth login`"
    if constants.HF_HUB_OFFLINE:
        lacks = "HF_HUB_OFFLINE is set with no such model in the Hub's cache"
        return f"{here} {lacks}; check the spelling or unset it"
    if isinstance(error, errors.GatedRepoError):
        only = "the Hub gives this model only to those it let in"
        return f"{here} {only}; ask for access there and {log_in}"
    if isinstance(error, errors.RepositoryNotFoundError):
        lacks = "the Hub has no such model (or a private one)"
        return f"{here} {lacks}; check the spelling or {log_in}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the Hub has this model but no revision {revision!r} of it; check the spelling"
    why = one_line(error)
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = "it cannot be reached, and its cache here lacks the model"
    return f"{here} the Hub did not give it ({why}); check the spelling and the network"

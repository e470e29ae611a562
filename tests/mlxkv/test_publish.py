"""A report is written whole or not at all, whatever the disk does."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import mlxkv, refused

from mlxkv.report import publish
from oracle.formats.errors import Refusal

FILES = {"a.svg": "s" * 9000, "deep/b.json": "j" * 9000, "a.md": "m" * 9000}


def names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a disk can be mounted by root on Linux alone")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("free", range(0, 64, 8))
@pytest.mark.parametrize("old", [False, True])
def test_on_a_full_disk_a_report_is_whole_or_not_there(small: Path, free: int, old: bool) -> None:
    files = {name: text.upper() for name, text in FILES.items()}
    if old:
        publish.write(small / "out", files)
        free = min(free, 24)
    used = sum(p.stat().st_blocks * 512 for p in small.rglob("*") if p.is_file())
    (small / "fill").write_bytes(bytes(65536 - used - free * 1024))
    before = {p: p.read_text() for p in small.rglob("*") if p.is_file()}
    if free >= 36:
        publish.write(small / "out", FILES)
        assert {name: (small / "out" / name).read_text() for name in FILES} == FILES
        return
    with pytest.raises(Refusal, match=r"out: cannot be written \(No space left on device\)"):
        publish.write(small / "out", FILES)
    assert {p: p.read_text() for p in small.rglob("*") if p.is_file()} == before
    assert old or names(small) == ["fill"]


def test_a_full_disk_is_found_before_the_work(small: Path) -> None:
    (small / "fill").write_bytes(bytes(65536))
    done = mlxkv("judge", "nowhere", "none.safetensors", "--out", small / "out")
    refused(done, f"{small / 'out'}: cannot be written (No space left on device)")
    assert names(small) == ["fill"]


@pytest.mark.parametrize("at", range(3))
def test_a_file_that_cannot_be_renamed_takes_the_others_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    replace, last = Path.replace, list(FILES)[at]

    def fails(self: Path, target: Path) -> Any:
        if str(target).endswith(last):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(Refusal, match="Operation not permitted"):
        publish.write(tmp_path / "out", FILES)
    assert names(tmp_path) == []


def test_a_folder_in_a_files_place_is_refused_before_anything_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.md").mkdir()
    (tmp_path / "a.svg").write_text("old")
    with pytest.raises(Refusal, match=r"a\.md: cannot be written \(is a folder\)"):
        publish.write(tmp_path, FILES)
    assert names(tmp_path) == ["a.md", "a.svg"]
    assert (tmp_path / "a.svg").read_text() == "old"

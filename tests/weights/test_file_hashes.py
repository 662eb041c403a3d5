"""Hashes are remembered while a file stays the same, whoever sets its times back."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from lmworks.weights import verified
from lmworks.weights.verified import hash_files


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verified, "_WORTH", 0)
    monkeypatch.setattr(verified, "_SETTLED", 0.05)
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 1000)
    time.sleep(0.1)
    return path


def digest(file: Path) -> str:
    return hash_files([file])[file]


def test_an_unchanged_file_is_not_read_again(file: Path) -> None:
    before = digest(file)
    (place,) = verified.directory().iterdir()
    place.write_text(place.read_text().replace(before, "0" * 64))  # shows whether it is read
    assert digest(file) == "0" * 64
    place.write_text("damaged")
    assert digest(file) == before == hashlib.sha256(b"a" * 1000).hexdigest()


def test_a_changed_file_is_read_again_even_with_its_old_times(file: Path) -> None:
    before, stat = digest(file), file.stat()
    with file.open("r+b") as handle:
        handle.write(b"b")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert digest(file) != before
    replaced = file.with_name("other")
    replaced.write_bytes(b"c" * 1000)
    replaced.replace(file)
    assert digest(file) == hashlib.sha256(b"c" * 1000).hexdigest()


def test_a_file_that_has_just_been_written_is_not_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "_SETTLED", 3600)
    digest(file)
    assert not verified.directory().exists()


def test_without_a_place_for_hashes_files_are_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", "/dev/null/nowhere")
    assert digest(file) == digest(file) == hashlib.sha256(b"a" * 1000).hexdigest()

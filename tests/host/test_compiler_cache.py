"""Libraries that a compiler has written in part are made again: those of a real compiler, cut off anywhere."""

from __future__ import annotations

import _ctypes
import os
import time
from pathlib import Path

import pytest

from lmworks.host.compiler_cache import remove_partial_libraries

WHOLE = Path(_ctypes.__file__).read_bytes()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "6c" / "c6ckr.main.so"
    path.parent.mkdir()
    return path


@pytest.mark.parametrize("size", [0, 1, 16, 63, 64, 4096, len(WHOLE) - 1])
def test_a_part_is_removed(library: Path, size: int) -> None:
    library.write_bytes(WHOLE[:size])
    os.utime(library, (1, 1))
    assert remove_partial_libraries(library.parents[1]) == ([] if 0 < size < 5 else [library])
    assert library.exists() == (0 < size < 5), "what is no ELF file yet is left to the loader"


def test_what_is_whole_or_of_another_system_or_still_written_stays(library: Path) -> None:
    library.write_bytes(WHOLE)
    other, fresh = library.with_name("other.so"), library.with_name("fresh.so")
    other.write_bytes(bytes.fromhex("cffaedfe") + bytes(100))  # a 64-bit library of macOS
    for path in (library, other):
        os.utime(path, (1, 1))
    fresh.touch()
    assert remove_partial_libraries(library.parents[1]) == []
    assert fresh.stat().st_mtime > time.time() - 60 and library.read_bytes() == WHOLE


def test_there_may_be_no_cache(tmp_path: Path) -> None:
    assert remove_partial_libraries(tmp_path / "absent") == []

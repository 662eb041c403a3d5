"""Libraries that a compiler has written in part are made again: those of a real compiler, cut off anywhere."""

from __future__ import annotations

import _ctypes
import os
import signal
import subprocess
import sys
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


COMPILED = """
import sys
from pathlib import Path
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
from lmworks.host.compiler_cache import remove_partial_libraries
if "remove" in sys.argv:
    print(len(remove_partial_libraries(Path(cache_dir()))))
print(float(torch.compile(lambda x: (x.sin() * 3 + 1).sum())(torch.ones(8))))
"""


@pytest.mark.slow
def test_torch_compiles_again_what_its_compiler_has_left(tmp_path: Path) -> None:
    """A library that torch has compiled itself, cut off: every process that needs it dies (SIGBUS) or fails, until the part is removed."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        return subprocess.run([sys.executable, "-c", COMPILED, *words], env=environment, capture_output=True, encoding="utf-8", check=False)

    whole = run()
    libraries = list(tmp_path.glob("*/*.main.so"))
    assert whole.returncode == 0 and libraries, whole.stderr
    for size, code in ((4096, -signal.SIGBUS), (0, 1)):
        for path in libraries:
            path.write_bytes(path.read_bytes()[:size])
            os.utime(path, (1, 1))
        died = run()
        assert died.returncode == code and ("file too short" in died.stderr) == (size == 0), died.stderr
    again = run("remove")
    assert again.stdout.split() == [str(len(libraries)), *whole.stdout.split()], again.stderr


def test_there_may_be_no_cache(tmp_path: Path) -> None:
    assert remove_partial_libraries(tmp_path / "absent") == []

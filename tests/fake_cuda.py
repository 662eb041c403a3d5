"""A CUDA device on which nothing is computed, so that training and decode steps can be traced without a GPU."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent / "gpu"
_SOURCE = _HERE / "fake_cuda.cpp"


def missing() -> str | None:
    """Why there is no such device here; None if there can be one."""
    import torch

    if not sys.platform.startswith("linux"):
        return "the library that stands in for CUDA is built on Linux only"
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "this torch is built for GPUs: the library that stands in for CUDA needs one that is not"
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        return f"torch {torch.__version__}: the library that stands in for CUDA is written for torch 2.13"
    if compiler() is None:
        return "no C++ compiler (c++, g++ or clang++) to build the library that stands in for CUDA"
    return None


def compiler() -> list[str] | None:
    """The command of the C++ compiler: CXX, or what is found in PATH."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    return next(([found] for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


@dataclass(frozen=True)
class FakeCuda:
    """A torch with one CUDA device, in a process of its own, and in another for each set of planted mistakes."""

    library: Path
    _processes: dict[str, _Process] = field(default_factory=dict)

    @classmethod
    def build(cls, folder: Path) -> FakeCuda:
        """Compile the library for this torch, unless `folder` has it already: a few seconds."""
        import torch

        command, root = compiler(), Path(torch.__file__).parent
        assert command is not None
        key = hashlib.sha256(f"{torch.__version__} {root} {command}".encode() + _SOURCE.read_bytes()).hexdigest()[:16]
        library = folder / f"fake_cuda-{key}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            made = library.with_suffix(f".{os.getpid()}")
            flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
            flags += ["-Wl,--no-as-needed", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}", "-o", str(made)]
            flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
            subprocess.run([*command, *flags, str(_SOURCE)], check=True)
            os.replace(made, library)
        return cls(library)

    def run(self, called: str, planted: Sequence[tuple[str, str, str]] = (), **arguments: Any) -> Any:
        """What `called`, "MODULE:FUNCTION" of the tests, returns in a fork of a process that has the device, within a `FakeTensorMode`:
        JSON.

        `planted`: mistakes in the sources that the process reads, each a module of lmworks, text in it, and the text in its place.
        """
        mistakes = json.dumps(planted)
        if mistakes not in self._processes:
            self._processes[mistakes] = _Process(self.library, mistakes)
        return self._processes[mistakes].run(called, arguments)

    def close(self) -> None:
        for process in self._processes.values():
            process.close()


class _Process:
    """`on_fake_cuda.py`: importing torch takes longer than most of what is traced. What it says on stderr is shown as the test's."""

    def __init__(self, library: Path, planted: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / "on_fake_cuda.py"), str(library), planted], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            encoding="utf-8", env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(self, called: str, arguments: dict[str, Any]) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([called, arguments]) + "\n")
        self._process.stdin.flush()
        last, printed = "", ""
        for line in self._process.stdout:
            if line == "end 0\n":
                return json.loads(last)
            if line.startswith("end "):
                break
            last, printed = line, printed + line
        raise RuntimeError(f"{called} failed on the fake CUDA device:\n{printed[-10_000:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

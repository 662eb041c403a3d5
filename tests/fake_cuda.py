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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patience import PATIENCE

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
    """A torch with one CUDA device, in processes of their own."""

    library: Path

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
        """What `called`, "MODULE:FUNCTION" of the tests, returns in a process that has the device, within a `FakeTensorMode`: JSON.

        `planted`: mistakes in the sources that the process reads, each a module of lmworks, text in it, and the text in its place.
        """
        command = [sys.executable, str(_HERE / "on_fake_cuda.py"), str(self.library), called, json.dumps(arguments), json.dumps(planted)]
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=PATIENCE, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{called} failed on the fake CUDA device:\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}")
        return json.loads(done.stdout.splitlines()[-1])

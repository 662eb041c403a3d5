"""What the compiler generates for an H100 from the layers of a model, with a torch that is built with CUDA and without a GPU.

torch for CPUs, as in `constraints.txt`, cannot do this: it is skipped there, and run with the oldest torch that is supported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from absent_gpu import CASES

from fake_cuda import compiler
from patience import PATIENCE

_HERE = Path(__file__).resolve().parent
pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None or torch.cuda.is_available(), reason="needs a torch built with CUDA, and no GPU"),
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
]
_SHARED_MEMORY = 227 * 1024  # bytes that one block of an H100 can have (CUDA C++ Programming Guide, compute capability 9.0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, root, command = tmp_path_factory.mktemp("absent"), Path(torch.__file__).parent, compiler()
    assert command is not None
    library = folder / "absent_gpu.so"
    flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}", "-Wl,--no-as-needed"]
    flags += ["-Wl,-soname,libcuda.so.1", "-o", str(library), str(_HERE / "absent_gpu.cpp"), "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    subprocess.run([*command, *flags], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    arguments = [sys.executable, str(_HERE / "absent_gpu.py"), str(library), *CASES]
    done = subprocess.run(arguments, env=environment, capture_output=True, encoding="utf-8", timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return kernels


@pytest.mark.parametrize("case", CASES)
def test_attention_is_one_kernel_on_tensor_cores_in_each_direction(found: dict[str, Any], case: str) -> None:
    kernels = {kernel["name"]: kernel for kernel in found[case]["kernels"]}
    fused = [name for name in kernels if name.startswith("triton_tem") and "flex_attention" in name]
    assert sorted("backward" in name for name in fused) == [False, True], list(kernels)
    assert all(kernels[name]["tensor_core_products"] for name in fused)
    assert not {name for name in found[case]["called"] if "bmm" in name or "attention" in name}, "attention in separate products"


@pytest.mark.parametrize("case", CASES)
def test_every_kernel_fits_the_shared_memory_of_a_block(found: dict[str, Any], case: str) -> None:
    assert found[case]["kernels"]
    assert all(kernel["shared_memory"] <= _SHARED_MEMORY and kernel["bytes"] for kernel in found[case]["kernels"])


def test_experts_are_grouped_products(found: dict[str, Any]) -> None:
    assert "_grouped_mm" in found["experts"]["called"]
    assert not {"nonzero", "item", "_local_scalar_dense"} & set(found["experts"]["called"]), "a loop over experts"

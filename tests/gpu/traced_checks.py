"""The checks of the commands on a GPU at their full sizes, on fake CUDA tensors: no device is measured, but every call is made.

For `on_fake_cuda.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from host_waits import HostWaits
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _utils
from torch.utils._python_dispatch import _disable_current_modes

from lmworks.metrics import system
from lmworks.optim import muon
from lmworks.parallel import parallelize

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
MEMORY = 80 * 10**9


def rows(checks: dict[str, list[str]], integer: int = 1) -> dict[str, list[dict[str, Any]]]:
    """What these checks, by command, find on the device, by name; a time is 1 s, an error 0, and a whole number that the device has
    `integer`."""
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
    _without_values()
    return {check.name: _run(check, integer) for name in checks for check in _load(name).checks() if check.name in checks[name]}


def _run(check: Any, integer: int) -> list[dict[str, Any]]:
    from gpu.runner import plain

    with HostWaits(integer):
        found = []
        for row in check.run(False):
            assert "refused" not in row and "out_of_memory" not in row, row
            found.append(plain(row))
        return found


def _load(command: str) -> Any:
    spec = importlib.util.spec_from_file_location(command, FOLDER / f"{command}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _without_values() -> None:
    """Stand in for what needs a device that computes: clocks, profilers, differences; and for initial values."""
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(total_memory=MEMORY)  # type: ignore[assignment, return-value]
    system.measure_peak = lambda *_: 1e15
    parallelize.initialize = lambda *_: None  # type: ignore[assignment, return-value]
    for place, name in ((_utils, "_compute_local_shape_and_global_offset"), (DeviceMesh, "__init__")):
        setattr(place, name, _with_values(getattr(place, name)))
    muon.plan_exchange = _with_values(muon.plan_exchange)  # type: ignore[assignment]
    from gpu import models

    def seconds(work: Callable[[], object], *_: Any, **__: Any) -> float:
        work()
        return 1.0

    models.seconds, models.error = seconds, lambda *_: 0.0  # type: ignore[assignment]
    from gpu import training

    def timed_steps(model: Any, optimizer: Any, batch: Any, micro: int, ranks: int = 1) -> Any:
        models.step(model, optimizer, batch.rows(0, micro), micro, ranks=ranks)
        return {"step_seconds": 1.0, "tokens_per_second": float(batch.tokens.size)}, lambda: 1.0

    training.timed_steps, training.kernels = timed_steps, lambda *_: {}  # type: ignore[assignment]
    from gpu import one_rank

    one_rank.Ranks = _with_values(one_rank.Ranks)  # type: ignore[assignment, misc]


def _with_values(compute: Callable[..., Any]) -> Callable[..., Any]:
    def computed(*given: Any, **options: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return compute(*given, **options)

    return computed

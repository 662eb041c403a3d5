"""What the machine says about itself."""

from __future__ import annotations

import mmap
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from lmworks.host import machine
from lmworks.metrics import system
from lmworks.metrics.names import describe


def test_memory_grows_with_what_is_held():
    if torch.cuda.is_available():
        pytest.skip("resident memory is asked for where there is no GPU")
    before = system.memory_bytes()
    with mmap.mmap(-1, 64 << 20) as block:  # not from the heap, which may have kept as much of what was freed
        block.write(b"x" * (64 << 20))
        assert 40e6 < system.memory_bytes() - before < 250e6


def test_the_peak_is_of_the_fastest_product(monkeypatch):
    """With a clock that only products move forward: 2n^3 operations at 1 TFLOP/s, every other product disturbed by something else."""
    now, calls = [0.0], [0]

    def product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        calls[0] += 1
        now[0] += 2 * len(left) ** 3 / 1e12 * (3 if calls[0] % 2 else 1)

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(system.time, "perf_counter", lambda: now[0])
    assert system._measure(torch.device("cpu"), torch.float32, 0.2) == pytest.approx(1e12, rel=1e-9)


def test_the_peak_is_measured_once_per_process(monkeypatch):
    monkeypatch.delenv(machine.VARIABLE)
    peak = system.measure_peak(0.2)
    assert peak > 1e9
    monkeypatch.delattr(system, "_measure")
    assert system.measure_peak(0.2) == peak
    monkeypatch.setenv(machine.VARIABLE, "peak=3e12")
    assert system.measure_peak(0.2) == 3e12


def test_utilisation_is_the_share_of_the_peak():
    assert system.mfu(model_flops=6e9, seconds=2.0, peak=10e9) == pytest.approx(0.3)


def test_gpu_metrics_have_their_fixed_names():
    metrics = system.gpu_metrics()
    assert all(describe(name) for name in metrics)
    if not torch.cuda.is_available():
        assert metrics == {}


def test_a_value_that_nvml_does_not_report_is_left_out(monkeypatch, capsys):
    """As on a MIG slice or a vGPU: the other values are recorded, the absence is printed once, and other errors are raised."""
    nvml = ModuleType("pynvml")
    nvml.__spec__ = ModuleSpec("pynvml", None)
    nvml.NVMLError = type("NVMLError", (Exception,), {})

    def fail(error: Exception):
        raise error

    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(system, "_unreported", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "temperature", lambda: 40)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: fail(nvml.NVMLError("Not Supported")))
    monkeypatch.setattr(torch.cuda, "utilization", lambda: 85)
    assert [system.gpu_metrics() for _ in range(2)] == [{"system/gpu_temp": 40.0, "perf/gpu_utilization": 0.85}] * 2
    assert capsys.readouterr().err.count("system/power is not recorded: NVML reports no value (Not Supported)") == 1
    monkeypatch.setattr(torch.cuda, "temperature", lambda: fail(nvml.NVMLError("Not Supported")))
    assert system.gpu_metrics() == {"perf/gpu_utilization": 0.85}
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: fail(RuntimeError("another fault")))
    with pytest.raises(RuntimeError, match="another fault"):
        system.gpu_metrics()

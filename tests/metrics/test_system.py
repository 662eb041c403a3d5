"""What the machine says about itself."""

from __future__ import annotations

import mmap
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lmworks.host import counters, machine
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


class Nvml(ModuleType):
    """NVML as it answers: recorded values of an H100, in the place of the package."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_Timeout(NVMLError):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.__spec__ = ModuleSpec("pynvml", None)
        self.reasons, self.ecc, self.xids = 0x4, 3, 0  # at the power cap
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetHandleByUUID = {"GPU-5b": "handle"}.__getitem__
        self.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: self.reasons
        self.nvmlEventSetCreate = lambda: "events"
        self.nvmlDeviceRegisterEvents = lambda handle, kinds, events: None

    def nvmlEventSetWait(self, events: str, milliseconds: int) -> None:
        if not self.xids:
            raise self.NVMLError_Timeout("Timeout")
        self.xids -= 1

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, since: int) -> int:
        if self.ecc is None:
            raise self.NVMLError_NotSupported("Not Supported")
        return self.ecc


@pytest.fixture
def nvml(monkeypatch):
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(system, "_unreported", set())
    for name, value in (("is_available", True), ("temperature", 40), ("power_draw", 512_000), ("utilization", 85), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="5b"))
    return found


def test_gpu_metrics_have_their_fixed_names(nvml):
    found = system.GpuSignals().metrics()
    assert all(describe(name) for name in found)
    assert found == {
        "system/gpu_temp": 40, "system/power": 512.0, "perf/gpu_utilization": 0.85, "system/gpu_throttled": 0.0, "system/gpu_errors": 0.0,
    }  # fmt: skip


def test_without_a_gpu_there_are_none():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert system.GpuSignals().metrics() == {}


@pytest.mark.parametrize(("reasons", "throttled"), [(0x1, 0), (0x4, 0), (0x8, 1), (0x20, 1), (0x44, 1), (0x80, 1), (0x0, 0)])
def test_heat_and_slowdowns_are_throttling_and_the_power_cap_is_not(nvml, reasons, throttled):
    nvml.reasons = reasons
    assert system.GpuSignals().metrics()["system/gpu_throttled"] == throttled


def test_errors_of_a_gpu_are_counted_since_the_last_line(nvml):
    """XIDs and uncorrected memory errors; those of before the run do not count, and a GPU without ECC has XIDs."""
    signals, found = system.GpuSignals(), []
    for ecc, xids in ((3, 0), (3, 2), (5, 1), (5, 0), (None, 1)):
        nvml.ecc, nvml.xids = ecc, xids
        found.append(signals.metrics()["system/gpu_errors"])
    assert found == [0, 2, 3, 0, 1]


def test_a_value_that_nvml_does_not_report_is_left_out(nvml, monkeypatch, capsys):
    """As on a MIG slice or a vGPU: the other values are recorded, the absence is printed once, and other errors are raised."""

    def fail(error: Exception):
        raise error

    monkeypatch.setattr(torch.cuda, "power_draw", lambda: fail(nvml.NVMLError("Not Supported")))
    signals = system.GpuSignals()
    assert [signals.metrics().keys() for _ in range(2)] == [
        {"system/gpu_temp", "perf/gpu_utilization", "system/gpu_throttled", "system/gpu_errors"}
    ] * 2
    assert capsys.readouterr().err.count("system/power is not recorded: NVML reports no value (Not Supported)") == 1
    monkeypatch.setattr(torch.cuda, "temperature", lambda: fail(nvml.NVMLError("Not Supported")))
    assert "system/gpu_temp" not in signals.metrics()
    monkeypatch.setattr(torch.cuda, "power_draw", lambda: fail(RuntimeError("another fault")))
    with pytest.raises(RuntimeError, match="another fault"):
        signals.metrics()


def test_reading_the_machine_takes_half_a_per_cent_of_the_time_at_most(monkeypatch):
    """By its own timer: with readings of 2 ms, lines every 10 ms read it once in 0.4 s."""
    now = [100.0]
    monkeypatch.setattr(system.time, "monotonic", lambda: now[0])

    def read() -> counters.Counters:
        now[0] += 0.002
        return counters.Counters(now[0])

    monkeypatch.setattr(counters, "read_counters", read)
    signals = system.MachineSignals()
    filled = []
    for _ in range(100):
        now[0] += 0.01
        filled.append(bool(signals.metrics()))
    assert filled[0] and sum(filled) == 3


def test_what_is_counted_between_two_lines():
    before = counters.Counters(10.0, cpu_pressure=1.0, throttled=2.0, oom_kills=4.0, network=1e6, disk_read=0.0, disk_written=7.0)
    now = counters.Counters(14.0, cpu_pressure=3.0, throttled=2.5, oom_kills=5.0, network=9e6, disk_read=8.0, disk_written=7.0)
    assert system.counted(before, now) == {
        "system/cpu_pressure": 0.5, "system/throttled_seconds": 0.5, "system/oom_kills": 1.0, "system/network_bytes_per_second": 2e6,
        "system/disk_read_bytes_per_second": 2.0, "system/disk_write_bytes_per_second": 0.0,
    }  # fmt: skip


def test_a_process_counts_its_own_time_and_memory():
    signals, began = system.ProcessSignals(), time.monotonic()
    while time.process_time() - signals._cpu < 0.2:
        assert time.monotonic() < began + 60
    first = signals.metrics()
    with mmap.mmap(-1, 64 << 20) as block:
        block.write(b"x" * (64 << 20))
        second = signals.metrics()
    assert first["perf/cpu_seconds"] >= 0.2 and second["perf/cpu_seconds"] < first["perf/cpu_seconds"] + 0.2
    assert 40e6 < second["perf/resident_memory"] - first["perf/resident_memory"] < 250e6

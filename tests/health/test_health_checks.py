"""Each check of a node on recordings: silent on a healthy node, and the only one to speak of what was planted."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import node_recording
from lmworks.health import checks, disks, network, stress
from lmworks.health.checks import CHECKS, Check, Request, check_node, judged
from lmworks.health.gpu import diagnostics
from lmworks.health.node import DRIVER, Node, NotThere, Process, record_processes
from lmworks.health.report import Report, Result, Status
from lmworks.watch.ledger import RunLock
from node_recording import CHRONYC, LIMITS, XID_LINE, measured, record
from patience import PATIENCE


@pytest.fixture
def node(tmp_path: Path) -> Node:
    (tmp_path / "scratch").mkdir()
    return Node(record(tmp_path / "recording", tmp_path / "scratch"))


def results(node: Node) -> dict[str, Result]:
    assert node.recorded
    request = Request(node.recorded.parent / "scratch", 20.0, quick=True)
    return {check.name: judged(node, request, check) for check in CHECKS}


def test_a_healthy_node_passes_every_check(node: Node) -> None:
    found = results(node)
    assert {name: result.status for name, result in found.items() if result.status != "ok"} == {"reach": "skip"}, found
    assert found["gpu_errors"].text == "8 x NVIDIA H100 80GB HBM3 without uncorrected memory errors"
    assert "8 ports active at 400 Gb/s" in found["infiniband"].text and "18 active links on each of 8 GPUs" in found["nvlink"].text


def gpu(index: int, **values: Any) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        path = root / "nvml.json"
        gpus = json.loads(path.read_text())
        gpus[index] |= values
        path.write_text(json.dumps(gpus))

    return plant


def lost_gpu(root: Path) -> None:
    path = root / "nvml.json"
    path.write_text(json.dumps(json.loads(path.read_text())[:7]))


def text(path: str, content: str) -> Callable[[Path], None]:
    return lambda root: (root / path).write_text(content) and None


def processes(*found: Process) -> Callable[[Path], None]:
    return text("processes.json", record_processes(found))


def both(*plants: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda root: [plant(root) for plant in plants] and None


def faster(name: str, **values: Any) -> str:
    def change(found: list[dict[str, Any]]) -> None:
        next(one for one in found if one["name"] == name).update(values)

    return json.dumps(measured(change))


IB, MC = "sys/class/infiniband/mlx5_3/ports/1", "sys/devices/system/edac/mc/mc2"
DCGM, diagnosed = "programs/dcgmi", node_recording.diagnostics
MOUNTS = "proc/self/mounts"
HOT = "sys/devices/system/cpu/cpu1/thermal_throttle/package_throttle_total_time_ms"
RANK = Process(4242, 1, "ada", "S", "python -m lmworks.cli.rank run", 5.0, "/runs/old/launch")
SERVED = replace(RANK, parent=500)
SICK: list[tuple[str, Callable[[Path], None], str, Status, str]] = [
    ("uncorrected ECC", gpu(3, ecc_volatile=2), "gpu_errors", "fail", "GPU 3: uncorrected ECC errors since the driver was loaded: 2"),
    ("remapping failed", gpu(0, rows_failed=1), "gpu_errors", "fail", "GPU 0: row remapping failed"),
    ("row pending", gpu(1, rows_pending=1), "gpu_errors", "warn", "GPU 1: a row waits for a reset"),
    ("page pending", gpu(1, pages_pending=1), "gpu_errors", "warn", "GPU 1: a page waits"),
    ("fallen off", text("dev/kmsg", XID_LINE.format(number=79)), "gpu_xids", "fail", "PCI:0000:1b:00: XID 79, the GPU has"),
    ("contained", text("dev/kmsg", XID_LINE.format(number=94)), "gpu_xids", "warn", "XID 94, contained memory error"),
    ("thermal", gpu(6, throttle=0x48), "gpu_clocks", "fail", "GPU 6: hardware slowdown; GPU 6: hardware thermal slowdown"),
    ("power brake", gpu(6, throttle=0x80), "gpu_clocks", "fail", "power brake"),
    ("warm", gpu(6, throttle=0x20), "gpu_clocks", "warn", "software thermal slowdown"),
    ("narrow PCIe", gpu(2, pcie_width=8), "gpu_clocks", "warn", "GPU 2: PCIe x8 instead of x16"),
    ("NVLink", gpu(4, nvlinks=[1] * 17 + [0]), "nvlink", "fail", "GPU 4 has 17 active links, others have 18"),
    ("orphan", both(gpu(0, processes=[[4242, 7e10]]), processes(RANK)), "gpu_processes", "fail", "70.0 GB of GPU 0 are held by process"),
    ("busy", both(gpu(0, processes=[[4242, 7e10]]), processes(SERVED)), "gpu_processes", "warn", "are held by process 4242"),
    ("unseen", gpu(0, processes=[[99, 1e9]]), "gpu_processes", "warn", "held by process 99, which cannot be seen here"),
    ("no port", text(f"{IB}/state", "1: DOWN"), "infiniband", "warn", "mlx5_3/1 is down (LinkUp)"),
    ("slow port", text(f"{IB}/rate", "100 Gb/sec (4X EDR)"), "infiniband", "fail", "mlx5_3/1 runs at 100 Gb/s, others"),
    ("bad memory", text(f"{MC}/ue_count", "1"), "memory_errors", "fail", "1 uncorrected and 0 corrected errors of 4"),
    ("worn memory", text(f"{MC}/ce_count", "40"), "memory_errors", "warn", "40 corrected"),
    ("hot", text(HOT, "200000000"), "throttling", "fail", "200,000 s of 864,000 s"),
    ("killed", text("proc/vmstat", "oom_kill 3\n"), "oom", "warn", "killed 3 processes"),
    ("memlock", text("proc/self/limits", LIMITS.replace("unlimited", "8388608")), "limits", "fail", "8 MiB of locked memory: InfiniBand"),
    ("files", text("proc/self/limits", LIMITS.replace("1048576", "256")), "limits", "fail", "256 open files"),
    ("slow clock", text("programs/chronyc", CHRONYC.format(offset="31.5")), "clock", "fail", "the clock is 31.5 s slow"),
    ("no clock server", text("programs/chronyc", CHRONYC.replace("Normal", "Not synchronised")), "clock", "warn", "not synchronized"),
    ("before time", text("clock_offset", "-1e9"), "clock", "fail", "which is before 2026"),
    ("file server's clock", text("clock_offset", "-3600"), "write", "fail", "this clock is 3,600 s behind that of the file system"),
    ("clock ahead", text("clock_offset", "3600"), "write", "fail", "this clock is 3,600 s ahead of that of the file system"),
    ("stopped rank", processes(replace(SERVED, state="T")), "leftovers", "fail", "is a rank of /runs/old/launch that is stopped"),
    ("leftover rank", processes(RANK), "leftovers", "fail", "process 4242 of ada (python -m lmworks.cli.rank run) is a rank of /runs"),
    ("stale mount", text(MOUNTS, "filer:/gone /gone/away nfs rw 0 0\n"), "mounts", "fail", "/gone/away (nfs) cannot be read: No"),
    ("read-only", text("proc/self/mounts", "/dev/sda1 / ext4 ro 0 0\n"), "mounts", "fail", "/ is mounted read-only"),
    ("read-only below", lambda root: text(MOUNTS, f"/dev/a / ext4 rw 0 0\n/dev/b {root.parent} ext4 ro 0 0\n")(root), "mounts", "fail",
     "is mounted read-only"),
    ("fallen mount", text(MOUNTS, "/dev/a / ext4 rw 0 0\n/dev/b /b xfs ro,emergency_ro 0 0\n"), "mounts", "warn", "/b may have become"),
    ("core's bits", text("programs/stress", faster("core 2", equal=False)), "stress", "fail", "core 2 computed other bits the second time"),
    ("GPU's bits", text("programs/stress", faster("GPU 2", digest="1")), "stress", "fail", "GPU 2 computed other bits than the other"),
    ("slow GPU", text("programs/stress", faster("GPU 7", flops=4e14)), "stress", "fail", "GPU 7 has 57% of the median speed"),
    ("no measurement", text("programs/stress", "Killed"), "stress", "unknown", "no measurement"),
    ("dcgm", text(DCGM, diagnosed("Fail", "Persistence mode is off")), "dcgm", "fail", "Software on GPU 5: Persistence mode"),
    ("dcgm 3", text(DCGM, diagnosed("Warn", "PM is off", newer=False)), "dcgm", "warn", "Software on GPU 5: PM is off"),
    ("dcgm says nothing", text(DCGM, "Error: unable to connect to host engine"), "dcgm", "unknown", "unable to connect"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "name", "status", "said"), [row[1:] for row in SICK], ids=[row[0] for row in SICK])
def test_what_is_planted_is_named_by_its_check(node: Node, plant: Callable[[Path], None], name: str, status: Status, said: str) -> None:
    assert node.recorded
    plant(node.recorded)
    found = results(node)
    assert found[name].status == status and said in found[name].text, found[name]
    assert found[name].advice or status == "unknown"
    others = {other for other, result in found.items() if result.status not in ("ok", "skip")} - {name}
    assert others <= {"leftovers", "write", "clock"}, others  # a rank that holds memory is left over; a clock is seen twice


def test_a_gpu_that_the_driver_has_lost_is_missed(node: Node) -> None:
    assert node.recorded
    lost_gpu(node.recorded)
    assert results(node)["gpu_errors"].text == "the driver finds 7 of 8 GPUs on the PCI bus"


GPU_CHECKS = {"gpu_errors", "gpu_xids", "gpu_clocks", "nvlink", "gpu_processes"}


def test_gpus_without_their_driver_fail_every_check_of_gpus(node: Node) -> None:
    """A recording has no nvml.json then. GPUs that are set aside for virtual machines, and those of other makers, need no driver here."""
    assert node.recorded
    bus = node.recorded / "sys/bus/pci/devices"
    for index in range(4):
        (bus / f"0000:{index:02x}:00.0/uevent").write_text("DRIVER=vfio-pci\nPCI_CLASS=30200\n")
    nvml = node.recorded / "nvml.json"
    nvml.write_text(json.dumps(json.loads(nvml.read_text())[:4]))
    assert results(node)["gpu_errors"].status == "ok", "four of eight are for virtual machines"
    nvml.unlink()
    shutil.rmtree(node.recorded / "proc/driver")
    found = results(node)
    assert {name for name, result in found.items() if result.status == "fail"} == GPU_CHECKS
    assert {found[name].text for name in GPU_CHECKS} == {"4 NVIDIA GPUs are on the PCI bus, and no driver is loaded"}
    for index in range(4, 8):
        (bus / f"0000:{index:02x}:00.0/vendor").write_text("0x1002\n")
    found = results(node)
    assert {found[name].status for name in GPU_CHECKS} == {"skip"} and found["gpu_errors"].text == "there is no NVIDIA driver"


def test_locked_memory_is_limited_without_harm_where_no_adapter_needs_it(node: Node) -> None:
    assert node.recorded
    (node.recorded / "proc/self/limits").write_text(LIMITS.replace("unlimited", "8388608"))
    shutil.rmtree(node.recorded / "sys/class/infiniband")
    assert results(node)["limits"].status == "ok"


class Nvml:
    """The package that reads GPUs, with one GPU; what it is not told here it does not support. Constants have their names as values."""

    __spec__ = object()

    class NVMLError(Exception):
        pass

    def __init__(self, **answers: Any) -> None:
        self.answers = {"nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 1, "nvmlDeviceGetHandleByIndex": "gpu",
                        "nvmlSystemGetDriverVersion": b"570.1"} | answers  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML_"):
            return 18 if name == "NVML_NVLINK_MAX_LINKS" else name

        def call(*given: Any) -> Any:
            answer = self.answers.get(name, self.NVMLError("not supported"))
            answer = answer(*given) if callable(answer) else answer
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


WORN = {
    "nvmlDeviceGetRemappedRows": (2, 0, 1, 0),  # by correctable and by uncorrectable errors, pending, failed
    "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter: 5 if kind == "NVML_MEMORY_ERROR_TYPE_CORRECTED" else 0,
}


@pytest.mark.parametrize(("package", "status", "said"), [
    (Nvml(**WORN), "warn", "GPU 0: a row waits for a reset to be remapped"),
    (Nvml(nvmlDeviceGetRemappedRows=(0, 1, 0, 1)), "fail", "GPU 0: row remapping failed"),
    (Nvml(nvmlInit=Nvml.NVMLError("Driver Not Loaded")), "fail", "NVML finds no GPU (Driver Not Loaded)"),
    (None, "unknown", "nvidia-ml-py is not installed"),
])  # fmt: skip
def test_gpus_are_read_through_the_package_of_their_maker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: Nvml | None, status: Status, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", package)
    monkeypatch.setattr(Node, "read", lambda self, path: "NVRM version" if path == DRIVER else None)
    found = judged(Node(), Request(tmp_path, 20.0), CHECKS[0])
    assert CHECKS[0].name == "gpu_errors" and found.status == status and found.text.startswith(said), found


def test_every_check_has_a_plant() -> None:
    assert {check.name for check in CHECKS} - {row[2] for row in SICK} == {"ports", "reach", "space"}, "which have tests of their own"


@pytest.mark.parametrize("said", ["", "{", "[]", "{}", '{"a": 3}', '{"a": {"test_categories": [{"tests": [{"results": "x"}, 7]}]}}'])
def test_foreign_output_of_dcgmi_has_no_results(said: str) -> None:
    assert list(diagnostics(said)) == []


def test_a_disk_that_is_slow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: time.sleep(1.0))
    found = disks.write(Node(), tmp_path, 1)
    assert found.status == "fail" and "a save would take minutes per gigabyte" in found.text
    monkeypatch.setattr(os, "fsync", lambda fd: time.sleep(0.1))
    assert disks.write(Node(), tmp_path, 1).status == "warn"


def test_a_disk_that_changes_bytes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = os.write

    def flips(fd: int, block: memoryview) -> int:
        return honest(fd, bytes([block[0] ^ 1]) + bytes(block[1:]))

    monkeypatch.setattr(os, "write", flips)
    found = disks.write(Node(), tmp_path, 1)
    assert found.status == "fail" and "other bytes were read than were written" in found.text


@pytest.mark.parametrize(
    ("number", "said"), [(errno.EIO, "Input/output error"), (errno.EROFS, "Read-only"), (errno.ENOSPC, "No space left")]
)
def test_a_disk_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str) -> None:
    def fails(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    found = disks.write(Node(), tmp_path, 1)
    assert found.status == "fail" and said in found.text
    assert not list(tmp_path.iterdir()), "nothing is left"


@pytest.mark.parametrize(("override", "status"), [("disk=1e6", "fail"), ("disk=1e18", "ok")])
def test_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, status: str) -> None:
    monkeypatch.setenv("LMWORKS_MACHINE", override)
    assert disks.space(tmp_path).status == status


@pytest.mark.parametrize(("free", "size", "status"), [(2e9, 1e13, "warn"), (5e8, 1e13, "fail"), (5e8, 2e9, "ok"), (1e8, 2e9, "fail")])
def test_a_gigabyte_or_a_tenth_of_a_small_disk_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, size: float, status: str
) -> None:
    for name, value in (("free_disk", int(free)), ("disk_size", int(size)), ("inodes", (0, 0))):
        monkeypatch.setattr(f"lmworks.host.machine.{name}", lambda path, value=value: value)
    assert disks.space(tmp_path).status == status


def test_few_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.host.machine.inodes", lambda path: (3, 1000))
    assert disks.space(tmp_path).status == "fail" and "3 inodes" in disks.space(tmp_path).text


def test_mounts_that_hang_cost_their_time_limit_once() -> None:
    def answers(point: str) -> None:
        if "hangs" in point:
            time.sleep(1000)
        if "stale" in point:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    began = time.monotonic()
    found = disks.ask_all(["/hangs", "/hangs too", "/good", "/stale"], answers, seconds=0.5)
    assert time.monotonic() - began < 5
    hangs = "does not answer within 0.5 s"
    assert found == {"/hangs": hangs, "/hangs too": hangs, "/good": "", "/stale": "cannot be read: Stale file handle"}


def test_every_core_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = stress.measure(0.05)
    assert len(found) == len(os.sched_getaffinity(0)) and len({one["digest"] for one in found}) == 1
    assert all(one["equal"] and one["flops"] > 1e8 for one in found) and stress.judge(found).status in ("ok", "fail")
    assert "other bits" not in stress.judge(found).text


def test_ports_that_are_taken_and_addresses_that_are_not_reached() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert network.free_ports((port,)).status == "fail" and str(port) in network.free_ports((port,)).text
        assert network.reach((f"127.0.0.1:{port}",)).status == "ok"
    found = network.reach((f"127.0.0.1:{port}",))
    assert found.status == "fail" and f"cannot connect to 127.0.0.1:{port}: Connection refused" in found.text
    assert network.free_ports(()).status == "ok"


def test_the_lock_of_a_run_is_said(node: Node) -> None:
    assert node.recorded
    folder = node.recorded.parent / "scratch"
    program = f"from lmworks.watch.ledger import RunLock; import sys; RunLock({str(folder)!r}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdin
        holder.stdout.readline()
        assert "is in use by a running process" in results(node)["leftovers"].text
        holder.stdin.close()
    assert results(node)["leftovers"].text == "no rank of an earlier run is left"
    assert RunLock(folder).release() is None


HANGS = 60.0  # seconds


def hang(node: Node, request: Request) -> Result:
    time.sleep(HANGS)
    raise AssertionError


def crash(node: Node, request: Request) -> Result:
    os._exit(3)


def fails(node: Node, request: Request) -> Result:
    raise ValueError("a bug")


def absent(node: Node, request: Request) -> Result:
    raise NotThere("no such thing")


def test_a_check_that_hangs_or_crashes_costs_one_check(tmp_path: Path) -> None:
    """A driver that does not answer is broken; of another check nothing is known. What hangs is killed."""
    others = {one.pid for one in psutil.Process().children()}
    wanted = [Check("driver", "", hang, "the driver hangs"), Check("other", "", hang), Check("crash", "", crash), Check("bug", "", fails)]
    began = time.monotonic()
    report = check_node(Node(), Request(tmp_path, 2.0), [*wanted, Check("absent", "", absent), Check("late", "", hang, alone=True)])
    assert time.monotonic() - began < 10
    found = {one.name: (one.result.status, one.result.text) for one in report.checks}
    assert found == {
        "driver": ("fail", "the driver hangs: no answer within 2 s"), "other": ("unknown", "not ended within 2 s"),
        "crash": ("unknown", "its process ended without a result"), "bug": ("unknown", "ValueError: a bug"),
        "absent": ("skip", "no such thing"), "late": ("unknown", "not ended within 2 s"),
    }  # fmt: skip
    assert report.code == 1 and report.failures == [": the driver hangs: no answer within 2 s"]
    assert not psutil.wait_procs([one for one in psutil.Process().children() if one.pid not in others], timeout=PATIENCE)[1]
    assert time.monotonic() - began < HANGS, "what hangs has ended by itself"


def test_a_check_that_measures_runs_beside_no_other(tmp_path: Path) -> None:
    def busy(node: Node, request: Request) -> Result:
        time.sleep(0.5)
        (tmp_path / "ended").touch()
        return Result("ok", "")

    def measures(node: Node, request: Request) -> Result:
        return Result("ok" if (tmp_path / "ended").exists() else "fail", "")

    report = check_node(Node(), Request(tmp_path, 60.0), [Check("measures", "", measures, alone=True), Check("busy", "", busy)])
    assert [(one.name, one.result.status) for one in report.checks] == [("measures", "ok"), ("busy", "ok")]


def report(*found: Status) -> Report:
    return Report(
        "n1", 1.0, 2.0, [checks.Checked(str(place), "a check", Result(one, "said")) for place, one in enumerate(found)], {"torch": "2"}
    )


@pytest.mark.parametrize(
    ("found", "code"),
    [(("ok", "warn", "skip"), 0), (("ok", "fail", "unknown"), 1), (("ok", "unknown"), 2), (("skip", "skip"), 2)],
)
def test_exit_codes(found: tuple[Status, ...], code: int) -> None:
    assert report(*found).code == code
    assert Report.from_json(json.dumps(report(*found).to_json())) == report(*found)


@pytest.mark.parametrize(
    "said",
    ["", "null", "[]", '{"version": 1}', "[" * 100_000, json.dumps(report("ok").to_json()).replace('"ok"', '"fine"'),
     json.dumps(report("ok").to_json() | {"version": 2})],
)
def test_what_is_no_report_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Report.from_json(said)

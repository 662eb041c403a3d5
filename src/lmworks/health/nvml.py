"""The values that NVML reports of each GPU, as plain numbers by name; a value that a GPU does not report is left out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


def read_gpus() -> list[dict[str, Any]] | str:
    """The values of all GPUs, or the reason why NVML does not find them. Needs the package nvidia-ml-py.

    uuid, name, pci, driver; ecc_volatile, ecc_aggregate, ecc_corrected: uncorrected and corrected memory errors; rows_remapped,
    rows_pending, rows_failed: row remapping; pages_retired, pages_pending; throttle: NVML's bits; clock, max_clock in MHz; temperature,
    slowdown_temperature in degrees C; pcie_width, max_pcie_width; nvlinks: state of each link, nvlink_errors; memory_used in bytes;
    processes: pairs of process id and bytes.
    """
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return f"NVML finds no GPU ({error})"
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        return [_one(nvml, nvml.nvmlDeviceGetHandleByIndex(index), driver) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def _one(nvml: Any, gpu: Any, driver: str) -> dict[str, Any]:
    corrected, uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    causes = nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR, nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS
    reads: dict[str, Callable[[], Any]] = {
        "uuid": lambda: _text(nvml.nvmlDeviceGetUUID(gpu)),
        "name": lambda: _text(nvml.nvmlDeviceGetName(gpu)),
        "pci": lambda: _text(nvml.nvmlDeviceGetPciInfo(gpu).busId),
        "ecc_volatile": lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, uncorrected, nvml.NVML_VOLATILE_ECC),
        "ecc_aggregate": lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, uncorrected, nvml.NVML_AGGREGATE_ECC),
        "ecc_corrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, corrected, nvml.NVML_VOLATILE_ECC),
        "pages_retired": lambda: sum(len(nvml.nvmlDeviceGetRetiredPages(gpu, cause)) for cause in causes),
        "pages_pending": lambda: nvml.nvmlDeviceGetRetiredPagesPendingStatus(gpu),
        "throttle": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
        "clock": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "max_clock": lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
        "temperature": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        "slowdown_temperature": lambda: nvml.nvmlDeviceGetTemperatureThreshold(gpu, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        "pcie_width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
        "max_pcie_width": lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
        "memory_used": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
        "processes": lambda: [[one.pid, one.usedGpuMemory or 0] for one in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)],
    }
    found: dict[str, Any] = {"driver": driver}
    for name, read in reads.items():
        with suppress(nvml.NVMLError):
            found[name] = read()
    with suppress(nvml.NVMLError):
        rows = nvml.nvmlDeviceGetRemappedRows(gpu)  # by correctable and by uncorrectable errors, pending, failed
        found |= {"rows_remapped": rows[0] + rows[1], "rows_pending": int(rows[2]), "rows_failed": int(rows[3])}
    links, errors = [], 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            links.append(int(nvml.nvmlDeviceGetNvLinkState(gpu, link)))
        except nvml.NVMLError:  # there are fewer
            break
        for counter in (nvml.NVML_NVLINK_ERROR_DL_REPLAY, nvml.NVML_NVLINK_ERROR_DL_RECOVERY):
            with suppress(nvml.NVMLError):
                errors += nvml.nvmlDeviceGetNvLinkErrorCounter(gpu, link, counter)
    return found | ({"nvlinks": links, "nvlink_errors": errors} if links else {})


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)

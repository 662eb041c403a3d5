"""Versions, machine and environment for a bundle: what does not change between two calls on a machine, so that bundles are equal."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from lmworks import __version__
from lmworks.bundle.contents import environment_names
from lmworks.bundle.redact import Redactor, public_packages
from lmworks.host import machine

_MODEL = re.compile(r"(?:NVIDIA|AMD|Intel|Tesla|GeForce|Quadro|ARM|Ampere|Apple|Neoverse)[\w .()@/+-]{0,80}")
_KERNEL = re.compile(r"\d+(?:\.\d+){1,2}")


def describe(run_dir: Path | None, redactor: Redactor) -> dict[str, Any]:
    """The machine on which `lmworks bundle` runs, which may differ from that of the run."""
    kernel = _KERNEL.match(platform.release())
    return {
        "versions": {"lmworks": __version__, "python": platform.python_version(), **_packages()},
        "machine": {
            "system": redactor.text(platform.system()), "kernel": kernel[0] if kernel else "",
            "architecture": redactor.text(platform.machine()),
            "cores": machine.cores(), "memory": machine.memory(), "processor": _processor(), "gpus": _gpus(),
            "filesystem": redactor.text(machine.file_system(run_dir)) if run_dir else "",
        },
        "environment": {name: redactor.text(os.environ[name]) for name in environment_names()},
    }  # fmt: skip


def _packages() -> dict[str, str]:
    found = {}
    for name in public_packages():
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _processor() -> str:
    """The model of the processor, if its name has the form of a vendor's."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name") and (found := _MODEL.fullmatch(line.partition(":")[2].strip())):
                return found[0]
    return ""


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    names = (torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
    return [name if _MODEL.fullmatch(name) else "unknown" for name in names]

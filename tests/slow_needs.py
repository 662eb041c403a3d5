"""What slow tests need besides the packages of the extra `slow`, how it is found, and how it is installed.

python tests/slow_needs.py [--slice K/N] [--until EPOCH] [--system] installs what the tests of that slice need: engines into environments of
their own below LMWORKS_ENGINES, and with --system packages of the system by apt-get. What cannot be installed is reported; the tests that
need it are then left out, with the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path

import pytest

import durations
import slurm_cluster
from export import engines

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Need:
    """Tests that need it are marked `needs(name)`."""

    name: str
    absent: Callable[[], str | None]  # why it cannot be used here
    packages: tuple[str, ...] = ()  # of Debian
    large: bool = False  # an engine of `engines.sh`, which takes minutes to install

    def missing(self) -> str | None:
        why = self.absent()
        if why and (note := failure(self.name)).exists():
            why += f" ({note.read_text().strip()})"
        return why


def folder() -> Path | None:
    found = os.environ.get("LMWORKS_ENGINES")
    return Path(found) if found else None


def failure(name: str) -> Path:
    return (folder() or HERE) / f"{name}.failed"


def _sshd() -> str | None:
    found = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")
    return None if found else "no sshd: apt-get install openssh-server"


def _libaio() -> str | None:
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder
    except ImportError:
        return "DeepSpeed is not installed (extra: deepspeed)"
    return None if AsyncIOBuilder().is_compatible(verbose=False) else "no libaio: apt-get install libaio-dev"


def _prometheus() -> str | None:
    found = shutil.which("prometheus") and shutil.which("promtool")
    return None if found else "no prometheus: apt-get install prometheus"


def _debootstrap() -> str | None:
    """Why no container file can be executed here."""
    if os.geteuid() != 0:
        return "debootstrap and chroot need root"
    if not shutil.which("debootstrap"):
        return "no debootstrap: apt-get install debootstrap"
    mounts = subprocess.run(["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    return None if mounts.returncode == 0 else "root may not mount here, as in most containers"


NEEDS = {
    need.name: need
    for need in (
        Need("llama", partial(engines.missing, "llama"), large=True),
        Need("vllm", partial(engines.missing, "vllm"), large=True),
        Need("compress", partial(engines.missing, "compress"), large=True),
        Need("fla", partial(engines.missing, "fla"), large=True),
        Need("slime", partial(engines.missing, "slime"), large=True),
        Need("slurm", slurm_cluster.missing, ("slurm-wlm", "munge")),
        Need("sshd", _sshd, ("openssh-server",)),
        Need("libaio", _libaio, ("libaio-dev",)),
        Need("debootstrap", _debootstrap, ("debootstrap",)),
        Need("prometheus", _prometheus, ("prometheus",)),
    )
}


class Asked:
    """A plugin that collects what the selected tests need."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names.update(name for item in session.items for mark in item.iter_markers("needs") for name in mark.args)


def asked(arguments: list[str]) -> list[str]:
    """What the tests of a slice need."""
    found = Asked()
    with redirect_stdout(StringIO()) as output:
        code = pytest.main(["--slow-suite", "--collect-only", "-qq", f"--rootdir={HERE.parent}", *arguments, str(HERE)], plugins=[found])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(output.getvalue()[-4000:])
    return sorted(found.names)


def install(need: Need, until: float, system: bool) -> float | None:
    """The seconds that it took; where it fails, a note of why, which `missing` shows."""
    failure(need.name).unlink(missing_ok=True)
    if need.large:
        command = ["sh", str(HERE / "export" / "engines.sh"), str(folder()), need.name]
    elif system and os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["sh", "-c", f"apt-get update -qq && apt-get install -qq -y --no-install-recommends {' '.join(need.packages)}"]
    else:
        print(f"{need.name}: {need.absent()}; `make slow SYSTEM=--system` installs it as root", flush=True)
        return None
    print(f"{need.name}: {' '.join(command)}", flush=True)
    log = failure(need.name).with_suffix(".log")
    began = time.time()
    try:
        with open(log, "w", encoding="utf-8") as output:
            environment = os.environ | {"PYTHON": sys.executable, "DEBIAN_FRONTEND": "noninteractive"}
            done = subprocess.run(command, stdout=output, stderr=output, env=environment, timeout=max(until - time.time(), 1))
        why = f"installing it failed: {' '.join(log.read_text().split())[-200:]}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"installing it was stopped after {time.time() - began:.0f} s, when the time was over"
    if why:
        failure(need.name).write_text(why + "\n")
        print(f"{need.name}: {why}", flush=True)
        return None
    print(f"{need.name}: installed in {time.time() - began:.0f} s", flush=True)
    return round(time.time() - began, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", help="K/N, as for pytest")
    parser.add_argument("--until", type=float, default=float("inf"), help="when to stop, in seconds since 1970")
    parser.add_argument("--system", action="store_true", help="install packages of the system, too")
    parser.add_argument("--record-durations", action="store_true", help=f"write the measured times into {durations.PATH.name}")
    options = parser.parse_args()
    place = folder()
    if place is None:
        sys.exit("say where engines go: LMWORKS_ENGINES=DIR")
    place.mkdir(parents=True, exist_ok=True)
    for name in asked(["--slice", options.slice] if options.slice else []):
        if NEEDS[name].absent():
            lasted = install(NEEDS[name], options.until, options.system)
            if lasted and options.record_durations:
                durations.write(durations.read() | {f"install {name}": lasted})


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))  # as `python -m pytest` has it: tests import from `tests`
    main()

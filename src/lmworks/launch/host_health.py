"""The health of the hosts of a launch: `lmworks health` on each through the command that reaches it, and the hosts compared.

A host whose driver, libraries, adapters or clock differ from those of the others trains slowly or not at all, and only a comparison
shows it.
"""

from __future__ import annotations

import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from lmworks.health.checks import FULL_SECONDS, QUICK_SECONDS
from lmworks.health.report import Checked, Report, Result
from lmworks.launch.torchrun import Host

_CONNECT = 30.0  # seconds more, to reach the host and to start Python there
_AT_ONCE = 64  # hosts that are asked at the same time
_SKEW = 1.0  # seconds by which the clock of a host may differ from that of this process
_SLOW_DISK = 1 / 3  # of the median of the hosts
_MUST_AGREE = ("torch", "lmworks", "nvidia driver", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


@dataclass(frozen=True)
class HostChecker:
    """Checks hosts. `command` makes a command of this machine from a shell script and the host on which it is to run; `reach`: HOST:PORT to
    which the hosts must be able to connect; `ports` must be free there; `only`: the names of the checks, by default all; `limit`: of the
    checks of a host, in seconds."""

    command: Callable[[str, Host], Sequence[str]]
    run_dir: Path
    reach: tuple[str, ...] = ()
    quick: bool = True
    only: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    limit: float | None = None

    @property
    def seconds(self) -> float:
        return self.limit or (QUICK_SECONDS if self.quick else FULL_SECONDS)

    def script(self) -> str:
        """Shell commands that print the report of a host."""
        words = [sys.executable, "-P", "-m", "lmworks.cli.main", "health", str(self.run_dir.absolute()), "--json"]
        words += ["--timeout", f"{self.seconds:g}", *(["--quick"] if self.quick else [])]
        repeated = (("--reach", self.reach), ("--only", self.only), ("--port", self.ports))
        words += [word for option, values in repeated for value in values for word in (option, str(value))]
        return f"cd {shlex.quote(str(Path.cwd()))} || exit 255\nexec {shlex.join(words)}\n"

    def check(self, hosts: Sequence[Host]) -> dict[str, Report]:
        """The reports of the hosts by name; see `compare`."""
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="health") as pool:
            return dict(zip((host.name for host in hosts), pool.map(self._check, hosts), strict=True))

    def _check(self, host: Host) -> Report:
        sent, began = time.time(), time.monotonic()  # the clock may be set meanwhile
        limit = self.seconds + _CONNECT
        try:
            command = self.command(self.script(), host)
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return unreachable(host.name, sent, time.monotonic() - began, f"no answer within {limit:.0f} s")
        except OSError as error:
            return unreachable(host.name, sent, time.monotonic() - began, f"{self.command('', host)[0]}: {error.strerror}")
        try:
            report = Report.from_json(done.stdout.decode("utf-8", errors="replace"))
        except ValueError:
            lines = [line for line in done.stderr.decode("utf-8", errors="replace").splitlines() if line.strip()]
            last = f": {' '.join(lines[-1].split())[:300]}" if lines else ""
            return unreachable(host.name, sent, time.monotonic() - began, f"the check exited with code {done.returncode}{last}")
        return with_clock(replace(report, host=host.name), sent, sent + time.monotonic() - began)


def unreachable(name: str, began: float, seconds: float, why: str) -> Report:
    """The report of a host that gave none, which was asked at `began` and waited for so many seconds."""
    return Report(name, began, began + seconds, [Checked("answer", "answer", Result("fail", why, "check ssh, and the installation there"))])


def with_clock(report: Report, sent: float, received: float) -> Report:
    """Add what the clock of this process says of the host's: the check began after it was asked for, and ended before its report came."""
    behind, ahead = sent - report.began, report.ended - received
    off = max(behind, ahead)
    if off <= _SKEW:
        result = Result("ok", "the clock agrees with that of the launcher", figures={"skew_seconds": max(0.0, off)})
    else:
        how = f"the clock is at least {off:,.1f} s {'behind' if behind > ahead else 'ahead of'} that of the launcher"
        result = Result("fail", how, "set the clocks: chronyc makestep", {"skew_seconds": -off if behind > ahead else off})
    return with_check(report, Checked("skew", "clock beside the launcher's", result))


def with_check(report: Report, checked: Checked) -> Report:
    return replace(report, checks=[*report.checks, checked])


def answered(report: Report) -> bool:
    """Whether a host gave this report itself."""
    return all(checked.name != "answer" for checked in report.checks)


def compare(reports: dict[str, Report]) -> dict[str, Report]:
    """Add to each report of several hosts what differs from the other hosts: versions, adapters, the speed of the disk."""
    given = [report for report in reports.values() if answered(report)]
    if len(given) < 2:
        return reports
    usual = {name: Counter(report.versions.get(name, "none") for report in given).most_common(1)[0] for name in _MUST_AGREE}
    rates = [rate for report in given if (rate := _figure(report, "write", "write_bytes_per_second"))]
    ports = [count for report in given if (count := _figure(report, "infiniband", "active_ports"))]

    def differs(report: Report) -> Result:
        found, slow = [], ""
        for name, (version, count) in usual.items():
            own = report.versions.get(name, "none")
            if own != version:
                # of two hosts with two versions, both are named: nobody knows which one is meant
                found.append(f"{name} {own}, {count} of {len(given)} hosts have {version}")
            elif count * 2 <= len(given) and count < len(given):
                others = sorted({other.versions.get(name, "none") for other in given} - {own})
                found.append(f"{name} {own}, others have {', '.join(others)}")
        own_ports = _figure(report, "infiniband", "active_ports")
        if own_ports and own_ports < statistics.median(ports):
            found.append(f"{own_ports:.0f} active InfiniBand ports, others have {statistics.median(ports):.0f}")
        rate = _figure(report, "write", "write_bytes_per_second")
        if rate and rate < _SLOW_DISK * statistics.median(rates):
            slow = f"writes {rate / 1e6:,.0f} MB/s, the median of the hosts is {statistics.median(rates) / 1e6:,.0f} MB/s"
        if found:
            return Result("fail", "; ".join([*found, *filter(None, [slow])]), "install the same versions, and repair what is missing")
        if slow:  # the hosts may write to one file server, so this alone does not show a broken host
            return Result("warn", slow, "see whether its disk is slow when it alone writes: lmworks health --only write")
        return Result("ok", f"versions, adapters and disk are those of the {len(given)} hosts")

    return {
        name: with_check(report, Checked("others", "beside the other hosts", differs(report))) if report in given else report
        for name, report in reports.items()
    }


def _figure(report: Report, check: str, name: str) -> float | None:
    return next((checked.result.figures.get(name) for checked in report.checks if checked.name == check), None)

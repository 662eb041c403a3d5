"""`lmworks health`: check a node, or the nodes of a host file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from lmworks.cli.options import JsonOption, console, print_json
from lmworks.errors import UserError
from lmworks.ui.terminal import console as notes

if TYPE_CHECKING:
    from lmworks.health.report import Checked, HostsReport, Report
    from lmworks.launch.torchrun import Host
    from lmworks.recipe.schema.launch import Launch

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim", "unknown": "magenta"}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("health")(health)


_OnlyOption = Annotated[
    list[str],
    typer.Option("--only", metavar="CHECK", default_factory=list, show_default=False, help="Run only this check; may be repeated."),
]
_PortOption = Annotated[
    list[int],
    typer.Option("--port", metavar="P", default_factory=list, show_default=False, help="A port that must be free; may be repeated."),
]
_ReachOption = Annotated[
    list[str],
    typer.Option("--reach", metavar="HOST:PORT", default_factory=list, show_default=False, help="Address to connect to; may be repeated."),
]


def health(
    only: _OnlyOption,
    port: _PortOption,
    reach: _ReachOption,
    folder: Annotated[Path, typer.Argument(metavar="[RUN]", help="A run directory, or a folder whose disk is tested.")] = Path("."),
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", metavar="HOSTS", help="Check these hosts: a host file as of `lmworks launch hosts`, or names: n1,n2."),
    ] = None,
    links: Annotated[
        bool, typer.Option("--links", help="Measure latency and bandwidth between ranks: one for each slot of a host, or each GPU here.")
    ] = False,
    address: Annotated[
        str | None, typer.Option("--address", metavar="A", help="Address at which the hosts reach this machine; by default its host name.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Without stress test and NVIDIA's diagnostics: a few seconds.")] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="S", min=1, help="Limit of a host in seconds; 55, or 20 with --quick.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this node, or several: GPUs, network, disks, memory, clock, processes. Exit code 0 healthy, 1 failed, 2 could not judge."""
    from lmworks.health.checks import CHECKS
    from lmworks.health.network import parse_address

    names = [check.name for check in CHECKS]
    for name in only:
        if name not in names:
            raise UserError(f"--only {name!r} is no check; these are: {', '.join(names)}")
    for one in reach:
        try:
            parse_address(one)
        except ValueError:
            raise UserError(f"--reach {one!r} is not an address; write HOST:PORT") from None
    asked = _Asked(folder, tuple(only), tuple(port), tuple(reach), quick and not only, timeout)
    found = _check_here(asked, links) if hosts is None else _check_hosts(asked, hosts, links, address)
    if as_json:
        print_json(found.to_json())
    else:
        show(found)
    raise typer.Exit(found.code)


@dataclass(frozen=True)
class _Asked:
    """What to check of each host, as the options say."""

    folder: Path
    only: tuple[str, ...]
    ports: tuple[int, ...]
    reach: tuple[str, ...]
    quick: bool
    timeout: float | None


def _check_here(asked: _Asked, links: bool) -> Report:
    from lmworks.health.checks import CHECKS, FULL_SECONDS, QUICK_SECONDS, Request, check_node
    from lmworks.health.disks import nearest
    from lmworks.health.node import Node

    node = Node.here()
    if node.recorded is not None and not node.recorded.is_dir():
        raise UserError(f"LMWORKS_MACHINE: recorded={node.recorded} is not a folder")
    wanted = [check for check in CHECKS if not asked.only or check.name in asked.only]
    seconds = asked.timeout or (QUICK_SECONDS if asked.quick else FULL_SECONDS)
    place = nearest(asked.folder)
    report = check_node(node, Request(place, seconds, asked.quick, asked.ports, asked.reach), wanted)
    if not links:
        return report
    import torch

    from lmworks.launch.links import measure_here

    ranks = torch.cuda.device_count() if torch.cuda.is_available() else 2
    return replace(report, checks=[*report.checks, *measure_here(_launch_options(asked.folder), place, ranks)])


def _check_hosts(asked: _Asked, text: str, links: bool, address: str | None) -> HostsReport:
    from lmworks.health.disks import nearest
    from lmworks.health.report import HostsReport
    from lmworks.launch.host_health import HostChecker, answered, compare
    from lmworks.launch.torchrun import command_on, find_hosts

    hosts, options = find_hosts(text), _launch_options(asked.folder)

    def command(script: str, host: Host) -> Sequence[str]:
        return command_on(host, script, options.ssh)

    notes.print(f"checking {len(hosts)} hosts", style="dim")
    checker = HostChecker(command, asked.folder, asked.reach, asked.quick, asked.only, asked.ports, asked.timeout)
    reports = compare(checker.check(hosts))
    if not links:
        return HostsReport(reports)
    from lmworks.launch.links import measure_hosts  # which loads torch

    notes.print("measuring the links between ranks", style="dim")
    left = [host for host in hosts if answered(reports[host.name])]
    return HostsReport(reports, measure_hosts(options, nearest(asked.folder), left, address))


def _launch_options(folder: Path) -> Launch:
    """How the hosts of a run are reached, with its environment variables; of a folder that is no run, as by default."""
    from lmworks.recipe.schema.launch import Launch
    from lmworks.run.run_dir import require_run

    return require_run(folder).launch if (folder / "resolved.json").exists() else Launch()


def show(found: Report | HostsReport) -> None:
    """Print a report as a table and a verdict."""
    from lmworks.health.report import Report

    if isinstance(found, Report):
        _show_checks(found.checks)
        count = {status: sum(one.result.status == status for one in found.checks) for status in _STYLES}
        verdict = f"{count['fail']} failed" if count["fail"] else "could not judge" if found.code else "healthy"
        rest = f"{count['ok']} ok, {count['warn']} with a warning, {count['unknown']} could not judge, {count['skip']} not checked"
        console().print(f"{found.host}: {verdict} ({rest}) in {found.ended - found.began:.0f} s")
        return
    width = max(map(len, found.hosts))
    for name, report in found.hosts.items():
        _show_checks(report.checks, f"{name:<{width}}  ")
    _show_checks(found.checks, f"{'':<{width}}  ")
    hosts = {code: [name for name, report in found.hosts.items() if report.code == code] for code in (0, 1, 2)}
    sick = [f"{words}: {', '.join(hosts[code])}" for code, words in ((1, "failed"), (2, "could not judge")) if hosts[code]]
    between = [f"failed between hosts: {one.title}" for one in found.checks if one.result.status == "fail"]
    console().print("; ".join([f"{len(hosts[0])} of {len(found.hosts)} hosts are healthy", *sick, *between]))


def _show_checks(checks: Sequence[Checked], host: str = "") -> None:
    """A row for each check, after the name of its host."""
    out = console()
    for checked in checks:
        found = checked.result
        name = "not checked" if found.status == "skip" else found.status
        mark, title = (f"{name:<11}", _STYLES[found.status]), (checked.title, "bold" if found.status != "skip" else "dim")
        out.print(Text.assemble(mark, f" {host}{checked.seconds:5.1f} s  ", title, f": {found.text}"))
        if found.advice:
            out.print(Text.assemble(f"{'':{21 + len(host)}}", ("do:", "bold"), f" {found.advice}"))

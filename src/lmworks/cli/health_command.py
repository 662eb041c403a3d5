"""`lmworks health`: check a node, or the nodes of a host file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from lmworks.cli.options import JsonOption, console, print_json
from lmworks.errors import UserError

if TYPE_CHECKING:
    from lmworks.health.report import Report

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim", "unknown": "magenta"}
_FULL, _QUICK = 55.0, 20.0  # seconds; Slurm ends a HealthCheckProgram after 60


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
    quick: Annotated[bool, typer.Option("--quick", help="Without stress test and NVIDIA's diagnostics: a few seconds.")] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="S", min=1, help="Limit in seconds; 55, or 20 with --quick.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this node: GPUs, network, disks, memory, clock, processes. Exit code 0 healthy, 1 a check failed, 2 could not judge."""
    from lmworks.health.checks import CHECKS, Request, check_node
    from lmworks.health.network import parse_address
    from lmworks.health.node import Node

    names = [check.name for check in CHECKS]
    for name in only:
        if name not in names:
            raise UserError(f"--only {name!r} is no check; these are: {', '.join(names)}")
    for address in reach:
        try:
            parse_address(address)
        except ValueError:
            raise UserError(f"--reach {address!r} is not an address; write HOST:PORT") from None
    node = Node.here()
    if node.recorded is not None and not node.recorded.is_dir():
        raise UserError(f"LMWORKS_MACHINE: recorded={node.recorded} is not a folder")
    wanted = [check for check in CHECKS if not only or check.name in only]
    request = Request(_existing(folder), timeout or (_QUICK if quick else _FULL), quick and not only, tuple(port), tuple(reach))
    report = check_node(node, request, wanted)
    if as_json:
        print_json(report.to_json())
    else:
        show(report)
    raise typer.Exit(report.code)


def show(report: Report) -> None:
    """Print a report as a table and a verdict."""
    out = console()
    for checked in report.checks:
        found = checked.result
        name = "not checked" if found.status == "skip" else found.status
        mark, title = (f"{name:<11}", _STYLES[found.status]), (checked.title, "bold" if found.status != "skip" else "dim")
        out.print(Text.assemble(mark, f" {checked.seconds:5.1f} s  ", title, f": {found.text}"))
        if found.advice:
            out.print(Text.assemble(f"{'':21}", ("do:", "bold"), f" {found.advice}"))
    count = {status: sum(one.result.status == status for one in report.checks) for status in _STYLES}
    verdict = f"{count['fail']} failed" if count["fail"] else "could not judge" if report.code else "healthy"
    rest = f"{count['ok']} ok, {count['warn']} warnings, {count['unknown']} could not judge, {count['skip']} not checked"
    out.print(f"{report.host}: {verdict} ({rest}) in {report.ended - report.began:.0f} s")


def _existing(folder: Path) -> Path:
    """The folder, or the first above it that exists."""
    from lmworks.health.disks import nearest

    return nearest(folder)

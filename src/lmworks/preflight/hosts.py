"""Checks of the hosts of a run: their health, and a host that is lost once before it costs anything.

The loss is rehearsed with a scaled-down model: two hosts train, one of them kills its agent and its rank, a spare takes its place, and the
training must end with the losses that nobody has interrupted.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from lmworks.errors import UserError
from lmworks.health.report import Report
from lmworks.host import machine
from lmworks.io import jsonl
from lmworks.io.files import write_text
from lmworks.launch.host_health import HostChecker, compare
from lmworks.launch.launch_dir import LaunchDir, reason_of_end
from lmworks.launch.launcher import Launch, launch_on_hosts
from lmworks.launch.torchrun import Host
from lmworks.preflight import small_model
from lmworks.preflight.check_result import CheckContext, CheckResult
from lmworks.preflight.disks import nearest, scratch
from lmworks.preflight.host_rank import LOSSES, RECIPE, STEPS, VICTIM, losses_of, seconds_between
from lmworks.preflight.layouts import TOLERANCE
from lmworks.preflight.small_model import small_recipe
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.units import Seconds
from lmworks.ui.terminal import output_to
from lmworks.watch.ledger import events_of

LOCAL = "local"  # in place of a host file: agents on this machine
_HOSTS = 2  # that train in the rehearsal
_TIMEOUT = "30 s"


def healthy(context: CheckContext) -> CheckResult:
    """Run `lmworks health --quick` on every machine, and compare the machines; collective."""
    own: Report | None = None
    if machine.ranks_here()[0] == 0:
        name = socket.gethostname()
        own = HostChecker(lambda script, host: ["sh", "-c", script], context.run_dir).check([Host(name, 1)])[name]
    found = [own]
    if context.ranks is not None and context.ranks.distributed:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
    given = [report for report in found if report is not None]
    names = [report.host for report in given]
    named = {
        name if names.count(name) == 1 else f"{name} ({place})": report
        for place, (name, report) in enumerate(zip(names, given, strict=True))
    }
    return of_reports(compare(named))


def of_reports(reports: dict[str, Report]) -> CheckResult:
    """The result of the reports of all machines."""
    failed = [f"{name}: {failure}" for name, report in reports.items() for failure in report.failures]
    doubts = [
        f"{name}: {checked.title}: {checked.result.text}"
        for name, report in reports.items()
        for checked in report.checks
        if checked.result.status in ("warn", "unknown")
    ]
    if failed:
        return CheckResult("fail", "; ".join(failed), "lmworks health on that host shows all checks and their remedies")
    if doubts:
        return CheckResult("warn", "; ".join(doubts), "lmworks health on that host shows all checks and their remedies")
    left_out = sum(checked.result.status == "skip" for report in reports.values() for checked in report.checks)
    count = sum(len(report.checks) for report in reports.values()) - left_out
    return CheckResult("ok", f"{count} checks of {len(reports)} hosts, {left_out} do not apply to them")


def replaced(context: CheckContext) -> CheckResult:
    """Lose a host of a small run, and see a spare take its place."""
    if not context.hosts:
        how = f"lmworks preflight {context.name} --hosts FILE, or --hosts {LOCAL} for this machine"
        return CheckResult("skip", "no hosts were given", how)
    if context.ranks is not None:
        return CheckResult("skip", "this process is a rank", f"lmworks preflight {context.name} --hosts FILE")
    launch_options = {"timeout": Seconds.parse(_TIMEOUT), "max_restarts": 3, "grace_period": Seconds.parse("5 s")}
    recipe = small_recipe(context.recipe)
    recipe = recipe.model_copy(
        update={"launch": recipe.launch.model_copy(update=launch_options), "layout": Layout(), "threads": 1, "name": "preflight"}
    )
    with scratch(nearest(context.run_dir)) as folder, output_to(folder / "output.log"):
        write_text(folder / RECIPE, recipe.model_dump_json())
        hosts = [Host(host.name, 1) for host in context.hosts[: _HOSTS + 1]]
        if len(hosts) <= _HOSTS:
            return CheckResult("skip", f"{len(hosts)} hosts are too few: two train and one is the spare", "list three hosts or more")
        write_text(folder / VICTIM, hosts[1].name)
        launch = launch_on_hosts(recipe, folder, hosts, None, [str(folder)], None, spares=1)
        if hosts[0].name.startswith(f"{LOCAL}-"):
            launch = Launch(recipe, folder, hosts, _HOSTS, "127.0.0.1", [str(folder)], spares=1)
        try:
            code = replace(launch, module="lmworks.preflight.host_rank").run()
        except UserError as error:
            return CheckResult("fail", f"the run did not go on: {error}", "see that hosts reach each other and this machine (--address)")
        return _judged(recipe.model_dump_json(), folder, hosts, code)


def _judged(recipe: str, folder: Path, hosts: Sequence[Host], code: int) -> CheckResult:
    started = events_of(folder, "host_started")
    excluded = {event["host"]: event["reason"] for event in events_of(folder, "host_excluded")}
    lines = jsonl.read(folder / LOSSES) if (folder / LOSSES).exists() else []
    if code or not started or hosts[1].name not in excluded:
        why = reason_of_end(folder) or LaunchDir.of(folder).last_words()
        lost = f"was{' not' if (folder / VICTIM).exists() else ''} lost at step {STEPS // 2 + 1}"
        text = f"{hosts[1].name} {lost}, and the run ended with code {code}{f': {why}' if why else ''}"
        return CheckResult("fail", text, "see that the hosts reach each other and this machine, and share the run directory")
    found = {line["step"]: line["loss"] for line in lines}
    expected, *_ = small_model.run_ranks(losses_of, _HOSTS, recipe)
    if sorted(found) != list(range(STEPS)) or {line["ranks"] for line in lines} != {_HOSTS}:
        return CheckResult("fail", f"steps {sorted(set(range(STEPS)) - set(found))} are missing", "report this with resolved.json")
    off = max(abs(found[step] - loss) / abs(loss) for step, loss in enumerate(expected))
    before, after = next(pair for pair in itertools.pairwise(lines) if pair[0]["pid"] != pair[1]["pid"])
    resumed, gap = after["step"], seconds_between(before, after)
    figures = {"loss": off, "seconds_without_a_step": gap}
    if off > TOLERANCE:
        text = f"after {started[0]['host']} had taken the place, losses are off by {off:.0e}"
        return CheckResult("fail", text, "report this with resolved.json", figures)
    text = (
        f"{started[0]['host']} took the place of {hosts[1].name}, which was lost at step {STEPS // 2 + 1}; training went on after "
        f"{gap:.0f} s from step {resumed} on {_HOSTS} hosts, losses off by {off:.0e}"
    )
    return CheckResult("ok", text, figures=figures)


def local_hosts() -> list[Host]:
    """Agents on this machine that play the hosts of the rehearsal."""
    return [Host(f"{LOCAL}-{number}", 1) for number in range(_HOSTS + 1)]

"""A launch as a Slurm job: the job script, and whether the job is requeued after its ranks have exited."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.io.files import rendered, write_text
from lmworks.io.urls import reveal
from lmworks.launch.agent import report_exits
from lmworks.launch.launch_dir import VARIABLE, LaunchDir, reason_of_end
from lmworks.launch.launch_lock import lock_launch
from lmworks.launch.launcher import MEASUREMENTS, Launch, last_stage
from lmworks.launch.torchrun import Agent, CountRange, Host, HostTable, read_table
from lmworks.recipe.schema.layout import layout_for
from lmworks.recipe.schema.recipe import Recipe
from lmworks.ui.exit_codes import ExitCode
from lmworks.watch.alerting import alerting
from lmworks.watch.heartbeat import HOST
from lmworks.watch.ledger import LAUNCH_LOCK, LEDGER, Ledger
from lmworks.watch.run_end import RunEnd

REQUEUE = ExitCode.PREEMPTED.value
# Rendezvous endpoint and id, known only inside the job. The port is below Linux's range of ephemeral ports.
_ENDPOINT = '"$head:$((16000 + SLURM_JOB_ID % 16000))"'
_ON_NODE = """bash -c 'on_node "$@"' job"""  # the function of the script, in place of ssh
_NODES = "nodes"  # file of the launch directory: the nodes that the job has got, as a host file
_LMWORKS = (sys.executable, "-P", "-m", "lmworks.cli.main", "launch")
_EARLIER_ENDS = 120.0  # seconds for an earlier job of the run, as one that is requeued because a node was lost, whose locks outlive it
_RENDEZVOUS_ID = '"$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"'


@dataclass(frozen=True)
class Job:
    """A run on `nodes` nodes (it continues while the minimum number is left) with `ranks` ranks and `gpus` GPUs on each.

    `spares`: further nodes, which replace those that fail. `again`: recipe and options of the launch, with which a job that has spares
    supervises its nodes (`lmworks launch nodes`).
    """

    recipe: Recipe
    run_dir: Path
    nodes: CountRange
    ranks: int
    arguments: Sequence[str]
    gpus: int = 0
    spares: int = 0
    again: Sequence[str] = ()

    def script(self) -> str:
        """The script for `sbatch`. The job ends when the run is done, requeues itself after a preemption or a crash, and omits excluded
        nodes."""
        folder, options = LaunchDir.of(self.run_dir), self.recipe.launch.slurm
        grace, variables = float(self.recipe.launch.grace_period), self.recipe.launch.environment
        agent = Agent(folder, self.nodes, self.ranks, "@ENDPOINT", "@JOB", self.arguments, grace, variables=variables)
        return rendered(
            "lmworks.launch", "job.sh.jinja", sbatch=self._sbatch_options(), elastic=self.nodes.minimum < self.nodes.maximum,
            options=options, setup=reveal(options.setup), here=str(Path.cwd()), environment=agent.environment(),
            job=shlex.join([*_LMWORKS, "job", str(folder.path.parent)]), spares=self.spares, ranks=self.ranks,
            variable=VARIABLE, host=HOST, agent=" \\\n  ".join(_lines(agent.command())), requeue=REQUEUE, nodes=str(folder.path / _NODES),
            lock=str(folder.path.parent / LAUNCH_LOCK), to=last_stage(self.arguments),
            supervisor=shlex.join([*_LMWORKS, "nodes", *self.again, "--least", str(self.nodes.minimum), "--spares", str(self.spares)]),
        )  # fmt: skip

    @property
    def _cpus(self) -> int:
        return self.recipe.launch.slurm.cpus_per_rank * self.ranks

    def _sbatch_options(self) -> dict[str, str | None]:
        """Options of `sbatch`; one agent per node starts the ranks there."""
        folder, options = LaunchDir.of(self.run_dir), self.recipe.launch.slurm
        return {
            "job-name": f"lmworks-{self.recipe.name}",
            "partition": options.partition,
            "account": options.account,
            "qos": options.qos,
            "time": options.time_limit,
            "nodes": "-".join(str(count + self.spares) for count in sorted({self.nodes.minimum, self.nodes.maximum})),
            "exclude": ",".join(host.name for host in read_table(folder.hosts) if host.excluded),
            "ntasks-per-node": "1",
            "gpus-per-node": str(self.gpus) if self.gpus else None,
            "cpus-per-task": str(self._cpus),
            "mem": "0" if options.memory == "all" else options.memory,
            "output": f"{folder.path}/slurm-%j.log",
            "open-mode": "append",
            "signal": f"B:USR1@{int(options.warning)}",
        }

    def submit(self) -> str:
        """Submit the script to Slurm; returns the job id."""
        if shutil.which("sbatch") is None:
            raise UserError("lmworks launch slurm needs sbatch, which is not installed here; run this on a login node, or add --dry-run")
        path = LaunchDir.of(self.run_dir).path / "job.sh"
        write_text(path, self.script(), private=True)  # overrides and the setup may contain credentials
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode:
            raise UserError(f"sbatch rejected {path}: {' '.join(done.stderr.split())}; change launch.slurm")
        return done.stdout.strip().partition(";")[0]


def _lines(command: Sequence[str]) -> list[str]:
    """A `torchrun` command in readable lines: one per option, then the command of each rank."""
    first = next(index for index, word in enumerate(command) if word.startswith("--"))
    last = command.index("-m", first)
    options = [shlex.quote(word).replace("@ENDPOINT", _ENDPOINT).replace("@JOB", _RENDEZVOUS_ID) for word in command[first:last]]
    return [shlex.join(command[:first]), *options, shlex.join(command[last:])]


def job_for(
    recipe: Recipe, run_dir: Path, nodes: CountRange, ranks: int, arguments: Sequence[str], gpus: int | None = None, spares: int = 0,
    again: Sequence[str] = (),
) -> Job:  # fmt: skip
    """The job of a run. `gpus` per node is the default for `launch.slurm.gpus_per_node`; `spares`, `again`: see `Job`.

    Raises `UserError` if the layout does not fit some number of nodes in the range.
    """
    for count in range(nodes.minimum, nodes.maximum + 1):
        layout_for(recipe.layout, count * ranks)
    given = recipe.launch.slurm.gpus_per_node
    return Job(recipe, run_dir, nodes, ranks, arguments, (gpus or 0) if given is None else given, spares, again)


def launch_on_nodes(
    recipe: Recipe, run_dir: Path, nodes: Sequence[Host], min_nodes: int, arguments: Sequence[str], address: str, spares: int
) -> Launch:
    """The launch within a job that has spares, at the end of `nodes`; the script of the job says how a node is reached."""
    return Launch(recipe, run_dir, nodes, min_nodes, address, arguments, _ON_NODE, spares=spares)


def begin(run_dir: Path, lock: int) -> None:
    """Prepare the launch directory at the start of a job. `lock`: the lock of the launch as the shell of the job has opened it, which holds
    it from then on until it ends."""
    lock_launch(run_dir, _EARLIER_ENDS, _EARLIER_ENDS, lock)
    LaunchDir.of(run_dir).begin()


@dataclass(frozen=True)
class JobResult:
    """How a job ends: `code` is `REQUEUE` if it is to be requeued, without the `excluded` nodes."""

    code: int
    excluded: tuple[str, ...]
    reason: str


def finish_job(recipe: Recipe, run_dir: Path, code: int, to: str | None = None) -> JobResult:
    """Decide whether a job is requeued, and write it to the ledger: a preempted job is, a job that is done or has a user error is not, and
    a crashed one is at most `launch.max_restarts` times in a row without a new checkpoint. Sends the alert of the end, unless its ranks
    only measure (`to`, see `last_stage`)."""
    with alerting(recipe, run_dir, owner=True):
        found = _decide(recipe, run_dir, code)
        if found.code != REQUEUE and to not in MEASUREMENTS:
            over = LaunchDir.of(run_dir).outcome() is not None
            RunEnd.of_code(found.code, reason_of_end(run_dir) if over else found.reason).record(run_dir, to)
    return found


def _decide(recipe: Recipe, run_dir: Path, code: int) -> JobResult:
    folder = LaunchDir.of(run_dir)
    outcome = folder.outcome()
    report_exits(folder, run_dir)
    with Ledger(run_dir / LEDGER) as ledger:
        events = ledger.read()
        since = events[max((place + 1 for place, event in enumerate(events) if event["event"] == "checkpoint"), default=0) :]
        _exclude_failing(folder, since, recipe.launch.exclude_after_failures)
        excluded = tuple(host.name for host in read_table(folder.hosts) if host.excluded)
        if outcome is not None and outcome["code"] != REQUEUE:
            return JobResult(int(outcome["code"]), excluded, "the run is over")
        if outcome is None:
            in_a_row = 1 + sum(event["event"] == "requeue" and bool(event["crashed"]) for event in since)
            reason = f"the ranks exited with code {code}, failure {in_a_row} in a row without a new checkpoint"
            if in_a_row > recipe.launch.max_restarts:
                return JobResult(code or 1, excluded, f"{reason} (launch.max_restarts); fix the cause and launch again")
        else:
            reason = "the job was preempted, and the run was saved"
        ledger.write("requeue", reason=reason, crashed=outcome is None, excluded=excluded)
    return JobResult(REQUEUE, excluded, f"{reason}; the job is requeued")


def _exclude_failing(folder: LaunchDir, events: Sequence[dict[str, Any]], max_failures: int) -> None:
    """Exclude nodes that, as the only cause, have made the ranks fail `max_failures` times since the last checkpoint, and since they were
    last readmitted."""
    known = {host.name: host for host in read_table(folder.hosts)}
    since = {name: host.since or 0.0 for name, host in known.items()}
    causes = [(event["hosts"], event["time"]) for event in events if event["event"] == "restart"]
    failures = Counter(str(hosts[0]) for hosts, when in causes if len(hosts) == 1 and when > since.get(hosts[0], 0.0))
    failing = [name for name, count in failures.items() if count >= max_failures and (name not in known or not known[name].excluded)]
    if failing:
        table = HostTable(folder.hosts, [*known.values(), *(Host(name, 1) for name in failing if name not in known)])
        for name in failing:
            table.exclude(name, f"its ranks failed {failures[name]} times without a new checkpoint")

"""A launch as a Slurm job: its script, and what becomes of the job when its ranks have ended."""

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

from lmworks.credentials import reveal
from lmworks.errors import UserError
from lmworks.files import write_text
from lmworks.interrupt import Preempted
from lmworks.launch.folder import VARIABLE, Folder
from lmworks.launch.hosts import Host, Table, read_table
from lmworks.launch.torchrun import Agent, CountRange
from lmworks.parallel.process_group import layout_for
from lmworks.recipe.schema.recipe import Recipe
from lmworks.watch.heartbeat import HOST
from lmworks.watch.ledger import Ledger

AGAIN = Preempted.EXIT_CODE
# What only the job knows: where its agents meet, at a port below those that Linux hands out by itself, and under which name.
_MEETING = '"$head:$((16000 + SLURM_JOB_ID % 16000))"'
_NAME = '"$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"'


@dataclass(frozen=True)
class Job:
    """A run on `nodes` nodes (it goes on while the least are left) with `ranks` ranks and `gpus` GPUs on each."""

    recipe: Recipe
    run_dir: Path
    nodes: CountRange
    ranks: int
    work: Sequence[str]
    gpus: int = 0

    def script(self) -> str:
        """What `sbatch` is given. It ends by itself when the run is done, queues itself again after a pre-emption or a crash, and leaves
        out nodes that were excluded."""
        folder, node = Folder.of(self.run_dir), self.recipe.launch.slurm
        agent = Agent(folder, self.nodes, self.ranks, "@MEETING", "@JOB", self.work, float(self.recipe.launch.grace_period))
        elastic = self.nodes.least < self.nodes.most
        return "\n".join([
            "#!/bin/bash",
            *(f"#SBATCH --{name}={shlex.quote(value)}" for name, value in self._reserved().items() if value),
            "#SBATCH --requeue",
            *(["#SBATCH --no-kill"] if elastic else []),
            *(f"#SBATCH {option}" for option in node.options),
            "",
            f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
            *reveal(node.setup),
            *(f"export {name}={shlex.quote(value)}" for name, value in agent.environment().items()),
            f"job=({shlex.join([sys.executable, '-P', '-m', 'lmworks.cli.main', 'launch', 'job', str(folder.path.parent)])})",
            "",
            '"${job[@]}" begin || exit',
            "# Slurm warns this shell before its time is up, and the agents alone when another job comes first; the ranks save and leave.",
            "heed() {",
            f"  trap 'echo SIGUSR1 >\"${VARIABLE}/stop\"' USR1 TERM",
            '  "$@" &',
            "  while wait $!; code=$?; kill -0 $! 2>/dev/null; do :; done  # a signal interrupts a wait",
            "  return $code",
            "}",
            "export -f heed",
            "",
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            " \\\n  ".join([
                f"heed srun {'--no-kill --kill-on-bad-exit=0 ' if elastic else ''}--ntasks-per-node=1 --cpus-per-task={self._cpus}",
                f"bash -c 'export {HOST}=$SLURMD_NODENAME; heed \"$@\"' agent",
                *_lines(agent.command()),
            ]),
            "code=$?",
            "",
            'excluded=$("${job[@]}" end --code "$code")',
            "code=$?",
            "# A job that a person has cancelled runs no more, and nobody wants it again.",
            f'if [ $code = {AGAIN} ] && [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; then',
            '  scontrol requeue "$SLURM_JOB_ID"',
            '  [ -z "$excluded" ] || scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$excluded"',
            "fi",
            "exit $code",
            "",
        ])  # fmt: skip

    @property
    def _cpus(self) -> int:
        return self.recipe.launch.slurm.cpus_per_rank * self.ranks

    def _reserved(self) -> dict[str, str | None]:
        """Options of `sbatch`; one agent per node starts the ranks there."""
        folder, node = Folder.of(self.run_dir), self.recipe.launch.slurm
        return {
            "job-name": f"lmworks-{self.recipe.name}",
            "partition": node.partition,
            "account": node.account,
            "qos": node.qos,
            "time": node.time_limit,
            "nodes": str(self.nodes.most) if self.nodes.least == self.nodes.most else f"{self.nodes.least}-{self.nodes.most}",
            "exclude": ",".join(host.name for host in read_table(folder.hosts) if host.excluded),
            "ntasks-per-node": "1",
            "gpus-per-node": str(self.gpus) if self.gpus else None,
            "cpus-per-task": str(self._cpus),
            "mem": "0" if node.memory == "all" else node.memory,
            "output": f"{folder.path}/slurm-%j.log",
            "open-mode": "append",
            "signal": f"B:USR1@{int(node.warning)}",
        }

    def submit(self) -> str:
        """Hand the script to Slurm; returns the number of the job."""
        if shutil.which("sbatch") is None:
            raise UserError("lmworks launch slurm needs sbatch, which is not on this machine; run this on a login node, or add --dry-run")
        path = Folder.of(self.run_dir).path / "job.sh"
        write_text(path, self.script(), private=True)  # overrides and the setup may have credentials in them
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode:
            raise UserError(f"sbatch refused {path}: {' '.join(done.stderr.split())}; mend launch.slurm")
        return done.stdout.strip().partition(";")[0]


def _lines(command: Sequence[str]) -> list[str]:
    """A command of `torchrun` for people: its options line by line, then what each rank runs."""
    first = next(place for place, word in enumerate(command) if word.startswith("--"))
    last = command.index("-m", first)
    options = [shlex.quote(word).replace("@MEETING", _MEETING).replace("@JOB", _NAME) for word in command[first:last]]
    return [shlex.join(command[:first]), *options, shlex.join(command[last:])]


def job_for(recipe: Recipe, run_dir: Path, nodes: CountRange, ranks: int, work: Sequence[str], gpus: int | None = None) -> Job:
    """`gpus` of each node where the recipe does not say (`launch.slurm.gpus_per_node`).

    Raises `UserError` if the layout cannot be had on some number of nodes between the least and the most.
    """
    for count in range(nodes.least, nodes.most + 1):
        layout_for(recipe.layout, count * ranks)
    asked = recipe.launch.slurm.gpus_per_node
    return Job(recipe, run_dir, nodes, ranks, work, (gpus or 0) if asked is None else asked)


def begin(run_dir: Path) -> None:
    """At the start of a job."""
    Folder.of(run_dir).begin()


@dataclass(frozen=True)
class After:
    """What a job ends with: `code` is `AGAIN` where it is to be queued again, without the `excluded` nodes."""

    code: int
    excluded: tuple[str, ...]
    reason: str


def after(recipe: Recipe, run_dir: Path, code: int) -> After:
    """Decide, and write it to the ledger: a job that was pre-empted goes on, one that is done or that the user must mend ends, and one
    that broke is tried again at most `launch.max_restarts` times in a row without a new checkpoint."""
    folder = Folder.of(run_dir)
    outcome = folder.outcome()
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        events = ledger.read()
        since = events[max((place + 1 for place, event in enumerate(events) if event["event"] == "checkpoint"), default=0) :]
        _exclude_failing(folder, since, recipe.launch.exclude_after)
        excluded = tuple(host.name for host in read_table(folder.hosts) if host.excluded)
        if outcome is not None and outcome["code"] != AGAIN:
            return After(int(outcome["code"]), excluded, "the run is over")
        if outcome is None:
            in_a_row = 1 + sum(event["event"] == "requeue" and bool(event["crashed"]) for event in since)
            reason = f"the ranks ended with code {code}, for the {in_a_row}. time in a row without a new checkpoint"
            if in_a_row > recipe.launch.max_restarts:
                return After(code or 1, excluded, f"{reason} (launch.max_restarts); mend the cause and launch again")
        else:
            reason = "the job was pre-empted, and the run saved"
        ledger.write("requeue", reason=reason, crashed=outcome is None, excluded=excluded)
    return After(AGAIN, excluded, f"{reason}; the job is queued again")


def _exclude_failing(folder: Folder, events: Sequence[dict[str, Any]], most: int) -> None:
    """Nodes whose ranks alone have broken the world so often since the last checkpoint."""
    hosts = [event["hosts"] for event in events if event["event"] == "restart"]
    alone = Counter(str(one[0]) for one in hosts if len(one) == 1)
    failing = [name for name, count in alone.items() if count >= most]
    known = {host.name: host for host in read_table(folder.hosts)}
    if any(name not in known or known[name].excluded is None for name in failing):
        table = Table(folder.hosts, [*known.values(), *(Host(name, 1) for name in failing if name not in known)])
        for name in failing:
            table.exclude(name, f"its ranks failed {alone[name]} times without a new checkpoint")

"""A Slurm on this machine, for as long as a test lasts; jobs of the partition `urgent` pre-empt those of `all`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4000 Gres=gpu:2 State=UNKNOWN"
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={controller}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=120 State=UP
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF State=UP
"""


def missing() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    absent = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)}): apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "the daemons of Slurm and munge need root"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def cluster(folder: Path, nodes: int = 1, options: str = "") -> Iterator[Path]:
    """Begin the daemons of nodes n1, n2, ..., or of one with the name of this machine, which its ranks can look up; yields the
    configuration file for SLURM_CONF, and ends them. options: more lines of it."""
    names = [f"n{number + 1}" for number in range(nodes)] if nodes > 1 else [socket.gethostname()]
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    conf = folder / "slurm.conf"
    host = socket.gethostname()
    lines = "\n".join(_NODE.format(name=name, host=host, port=_free_port(), cpus=os.cpu_count()) for name in names)
    conf.write_text(_CONF.format(folder=folder, host=host, controller=_free_port(), nodes=lines) + options)
    for number in range(2):  # GPUs to be asked for; nothing opens them
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
    aside = {name: f"{folder}/munge.{name}" for name in ("socket", "pid", "seed", "log")}
    munge = ["munged", "--foreground", "--force", "--key-file", str(key), "--socket", aside["socket"], "--pid-file", aside["pid"],
             "--seed-file", aside["seed"], "--log-file", aside["log"]]  # fmt: skip
    daemons = [["slurmd", "-D", "-f", str(conf), "-N", name] for name in names]
    commands = (munge, ["slurmctld", "-D", "-f", str(conf)], *daemons)
    environment = os.environ | {"PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin", "SLURM_CONF": str(conf)}
    running = []
    try:
        for command in commands:
            log = subprocess.DEVNULL
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            time.sleep(1)
        for _ in range(60):
            ask = ["sinfo", "-h", "--Node", "--partition=all", "--format=%T"]
            told = subprocess.run(ask, env=environment, capture_output=True, encoding="utf-8", check=False)
            if told.stdout.split() == ["idle"] * nodes:
                break
            time.sleep(1)
        else:
            raise RuntimeError(f"Slurm did not come up: {told.stdout}{told.stderr}")
        yield conf
    finally:
        for _ in range(60):  # jobs would outlive the daemons
            subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True, check=False)
            left = subprocess.run(["squeue", "--noheader"], env=environment, capture_output=True, encoding="utf-8", check=False)
            if not left.stdout.strip():
                break
            time.sleep(0.5)
        for process in reversed(running):
            process.terminate()
        for process in reversed(running):
            process.wait(30)

"""What `lmworks launch` makes of its options; nothing is started."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Lmworks

from lmworks.errors import UserError
from lmworks.launch.launch_dir import COMMAND, VARIABLE, LaunchDir
from lmworks.launch.launcher import Launch
from lmworks.launch.torchrun import Host, HostTable
from lmworks.run import runner
from lmworks.watch.ledger import LAUNCH_LOCK, LOCK, Ledger, RunLock

CLUSTER = """
nodes: 2
devices_per_node: 4
device: {device}
tflops: 989
memory_gib: 74
layout: {{pp: 2, dp_shard: 4, layers_per_pipeline_stage: [2, 3]}}
"""


@pytest.mark.parametrize("way", ["local", "slurm"])
def test_the_layout_of_a_cluster_reaches_every_rank(lmworks: Lmworks, tmp_path: Path, way: str) -> None:
    (tmp_path / "ours.yaml").write_text(CLUSTER.format(device="H100"))
    done = lmworks("launch", way, "quickstart", "--cluster", tmp_path / "ours.yaml", "--set", f"run_dir={tmp_path}", "--dry-run")
    assert done.code == 0, done.err
    words = ("--set layout.pp=2", "--set layout.dp_shard=4", "--set 'layout.layers_per_pipeline_stage=[2, 3]'", f"--set run_dir={tmp_path}")
    assert [word for word in words if word not in done.out] == []
    assert f"--nproc-per-node={8 if way == 'local' else 4}" in done.out
    assert not (tmp_path / "launch").exists()


@pytest.mark.parametrize(("device", "asked_for"), [("H100", True), ("2 CPU cores", False)])
def test_a_job_asks_for_the_gpus_of_the_cluster(lmworks: Lmworks, tmp_path: Path, device: str, asked_for: bool) -> None:
    (tmp_path / "ours.yaml").write_text(CLUSTER.format(device=device))
    done = lmworks("launch", "slurm", "quickstart", "--cluster", tmp_path / "ours.yaml", "--set", f"run_dir={tmp_path}", "--dry-run")
    assert done.code == 0, done.err
    assert ("#SBATCH --gpus-per-node=4" in done.out) == asked_for
    assert "#SBATCH --nodes=2" in done.out


def test_a_job_of_no_known_size_is_refused(lmworks: Lmworks, tmp_path: Path) -> None:
    assert "--nodes N --ranks-per-node M" in lmworks("launch", "slurm", "quickstart", "--set", f"run_dir={tmp_path}", "--dry-run").error


@pytest.mark.parametrize(("words", "said"), [
    (("local", "quickstart", "--set", "layout.tp=2", "--ranks", "3"), "3 ranks are not a multiple of 2"),
    (("slurm", "quickstart", "--nodes", "1", "--ranks-per-node", "2", "--dry-run"), "#SBATCH --nodes=1"),
])  # fmt: skip
def test_torch_takes_no_seconds_of_a_launch_that_starts_nothing(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "lmworks.cli.main", "launch", *words, "--set", f"run_dir={tmp_path}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    imported = {line.rpartition("|")[2].strip() for line in done.stdout.splitlines() if line.startswith("import time:")}
    assert said in done.stdout and "lmworks.launch.launcher" in imported and "torch" not in imported


@pytest.mark.parametrize("key", ["options", "partition", "account", "qos", "time_limit"])
def test_an_option_of_sbatch_stays_within_its_line(lmworks: Lmworks, tmp_path: Path, key: str) -> None:
    """A line of its own would be a command of the job."""
    value = "x\ntouch stolen"
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"name": "x", "launch": {"slurm": {key: [value] if key == "options" else value}}}))
    assert f"launch.slurm.{key}" in lmworks("show", tmp_path / "own.yaml").error


def test_what_is_asked_for_reaches_every_rank_and_no_password_is_printed(lmworks: Lmworks, tmp_path: Path) -> None:
    asked = ("--size", "3M", "--allow", "train.phases", "--set", "checkpoints.copy_to=s3://me:pass5word@host/bucket", "--time", "10min")
    done = lmworks("launch", "local", "quickstart", "--ranks", "2", *asked, "--set", f"run_dir={tmp_path}", "--dry-run")
    assert done.code == 0, done.err
    assert done.out.count("--size 3M") == done.out.count("--allow train.phases") == 2, "to the rank, and in the command that resumes"
    words = ("checkpoints.copy_to=s3://***@host/bucket", "--set time=10min")
    assert [word for word in words if word not in done.out] == []
    assert "pass5word" not in done.out + done.err


def test_a_price_that_the_recipe_says_is_kept_and_the_clusters_is_the_default(lmworks: Lmworks, tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(CLUSTER.format(device="H100") + "dollars_per_device_hour: 2.5\nwatts_per_device: 700\n")
    own = ("--set", "metrics.watts_per_device=350", "--set", f"run_dir={tmp_path}", "--dry-run")
    done = lmworks("launch", "local", "quickstart", "--cluster", tmp_path / "ours.yaml", *own)
    assert done.code == 0, done.err
    assert "--set metrics.dollars_per_device_hour=2.5" in done.out
    assert "metrics.watts_per_device=350" in done.out and "watts_per_device=700" not in done.out


def test_a_rank_gets_the_allowed_keys_and_the_command_of_its_launcher(
    lmworks: Lmworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def look(resolved: object, **options: Any) -> Path:
        given.update(options)
        raise UserError("enough")

    monkeypatch.setattr(runner, "run_stages", look)
    monkeypatch.setenv(COMMAND, "lmworks launch local mine.yaml")
    command = ("run", "quickstart", "--to", "pretrain", "--allow", "train.phases", "--set", f"run_dir={tmp_path}")
    assert lmworks(*command).error == "enough"
    assert (given["resume_command"], list(given["allow"])) == ("lmworks launch local mine.yaml", ["train.phases"])
    assert given["last"] == "pretrain"
    monkeypatch.delenv(COMMAND)
    assert lmworks(*command).error == "enough"
    assert given["resume_command"] == shlex.join(["lmworks", *map(str, command)])


@pytest.mark.parametrize(
    ("name", "told"),
    [("RANK", "is set by"), ("MASTER_ADDR", "is set by"), ("LMWORKS_LAUNCH", "is set by"), ("SLURM_PROCID", "is set by"),
     ("LOCAL_WORLD_SIZE", "is set by"), ("PYTHONSAFEPATH", "is set by"), ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "is set by"),
     ("WANDB_API_KEY", "looks like a secret"), ("HF_TOKEN", "looks like a secret"), ("A B", "is not the name"),
     ("X=$(touch y)", "is not the name")],
)  # fmt: skip
def test_a_variable_that_is_not_the_recipes_to_set_is_refused(lmworks: Lmworks, tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"name": "x", "launch": {"environment": {name: "pass5word"}}}))
    done = lmworks("show", tmp_path / "own.yaml")
    assert told in done.error and "pass5word" not in done.out + done.err


@pytest.mark.parametrize("keys", [
    {"launch": {"environment": {"GIT_TOK": "hf_Q8sXo2kLm3nPq4rSt5uVw6xYz7aBc8dEf9"}}},
    {"launch": {"ssh": "sshpass -p pass5word ssh"}},
    {"alerts": {"targets": [{"name": "a", "command": ["curl", "-H", "Authorization: Bearer pass5word", "https://host"]}]}},
], ids=["token", "password", "header"])  # fmt: skip
@pytest.mark.parametrize("by_option", [False, True])
def test_a_secret_is_known_by_its_form(lmworks: Lmworks, tmp_path: Path, keys: dict[str, Any], by_option: bool) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"name": "x", **({} if by_option else keys)}))
    ((section, value),) = keys.items()
    done = lmworks("show", tmp_path / "own.yaml", *(["--set", f"{section}={json.dumps(value)}"] if by_option else []))
    assert re.search(rf"{section}\.\S+ holds a key, a token or a password, and a recipe is stored and printed; export it", done.error)
    assert not re.search("pass5word|hf_Q8", done.out + done.err)


def test_what_is_no_secret_is_no_secret(lmworks: Lmworks, tmp_path: Path) -> None:
    own = {"launch": {"ssh": "sshpass -p $PW ssh -i key", "environment": {"A": "hf_transfer", "B": "https://me:hf_Q8sXo2kLm3nPq4rSt5uVw6xYz7@h"}}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"name": "x", **own}))
    assert "holds a key" not in lmworks("show", tmp_path / "own.yaml").error


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("stage", ["pretrain", "profile", "preflight"])
@pytest.mark.parametrize("user", [LOCK, LAUNCH_LOCK])
def test_a_launch_on_a_run_in_use_changes_nothing(
    lmworks: Lmworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str, stage: str
) -> None:
    """It would stop the ranks of the first one, and write into its ledger how it has ended itself."""
    monkeypatch.setattr(Launch, "supervise", lambda self: pytest.fail("ranks are started"))
    folder = LaunchDir.of(tmp_path)
    folder.begin()
    folder.request_stop(signal.SIGTERM)
    folder.conclude(0, 0)
    HostTable(folder.hosts, [Host("local-0", 2)])
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.write("step")
    with RunLock(tmp_path, user):
        before = contents(tmp_path)
        for way in (("local", "quickstart", "--ranks", "2"), ("hosts", "quickstart", "--hosts", tmp_path / "hosts")):
            done = lmworks("launch", *way, "--to", stage, "--set", f"run_dir={tmp_path}")
            assert done.error.startswith(f"{tmp_path} is in use by process {os.getpid()} on ")
        assert contents(tmp_path) | {LAUNCH_LOCK: b""} == before | {LAUNCH_LOCK: b""}


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, None])
def test_a_collective_that_fails_because_the_ranks_stop_is_no_bug(
    lmworks: Lmworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: signal.Signals | None
) -> None:
    def cut(resolved: object, **options: Any) -> Path:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:47331")

    folder = LaunchDir.of(tmp_path)
    folder.begin()
    if by is not None:
        folder.request_stop(by)
    monkeypatch.setattr(runner, "run_stages", cut)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(VARIABLE, str(folder.path))
    done = lmworks("run", "quickstart", "--set", f"run_dir={tmp_path}")
    if by is None:
        assert done.code == 70 and "this is a bug" in done.err
    else:
        assert done.code == (130 if by == signal.SIGINT else 75)
        assert done.err == f"stopped by {by.name} before it had saved; the same command resumes it\n"


@pytest.mark.parametrize("way", ["local", "slurm"])
def test_variables_of_the_recipe_reach_every_rank(lmworks: Lmworks, tmp_path: Path, way: str) -> None:
    (tmp_path / "ours.yaml").write_text(CLUSTER.format(device="H100"))
    variables = {"NCCL_IB_PKEY": "0x1", "TOKENIZERS_PARALLELISM": "a b; touch x", "HTTPS_PROXY": "http://me:pass5word@host:1"}
    given = [word for name, value in variables.items() for word in ("--set", f"launch.environment.{name}={value}")]
    run = ("quickstart", "--cluster", tmp_path / "ours.yaml", "--set", f"run_dir={tmp_path}", "--dry-run")
    done = lmworks("launch", way, *run, *given)
    assert done.code == 0, done.err
    words = ("NCCL_IB_PKEY=0x1", "TOKENIZERS_PARALLELISM='a b; touch x'", "HTTPS_PROXY=http://***@host:1")
    assert [word for word in words if word not in done.out.replace("'http://***@host:1'", "http://***@host:1")] == []
    assert "pass5word" not in done.out + done.err


def test_a_launcher_ends_with_the_exit_code_of_its_ranks(lmworks: Lmworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for the ranks records how the run ended, as a rank does, and ends without an error itself."""
    launch_dir = f"LaunchDir.of(Path({str(tmp_path)!r}))"
    ended = f"from pathlib import Path; from lmworks.launch.launch_dir import LaunchDir; {launch_dir}.conclude(75, 0)"
    monkeypatch.setattr("lmworks.launch.torchrun.Agent.command", lambda self: [sys.executable, "-c", ended])
    assert lmworks("launch", "local", "quickstart", "--ranks", "2", "--set", f"run_dir={tmp_path}").code == 75


def test_a_job_with_spares_asks_for_more_nodes_and_supervises_them(lmworks: Lmworks, tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(CLUSTER.format(device="H100"))
    words = ("launch", "slurm", "quickstart", "--cluster", tmp_path / "ours.yaml", "--set", f"run_dir={tmp_path}", "--to", "pretrain")
    done = lmworks(*words, "--spares", "1", "--dry-run")
    assert done.code == 0, done.err
    assert "#SBATCH --nodes=3\n" in done.out and "#SBATCH --no-kill\n" in done.out
    (line,) = (line for line in done.out.splitlines() if " launch nodes quickstart --set " in line)
    assert line.endswith("--to pretrain --least 2 --spares 1 \\") and "--set layout.pp=2" in line
    assert " launch nodes " not in lmworks(*words, "--dry-run").out


def test_the_supervisor_of_a_job_starts_what_the_launch_asked_for(
    lmworks: Lmworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Launch] = []
    monkeypatch.setattr(Launch, "supervise", lambda self: launched.append(self) or 75)
    monkeypatch.setenv(COMMAND, "lmworks launch slurm quickstart --spares 1")
    (tmp_path / "nodes").write_text("n1 slots=2\nn2 slots=2\nn3 slots=2\n")
    nodes = ("--hosts", tmp_path / "nodes", "--least", "1", "--spares", "1", "--address", "n1")
    assert lmworks("launch", "nodes", "quickstart", "--to", "pretrain", "--set", f"run_dir={tmp_path}", *nodes).code == 75
    (made,) = launched
    assert (made.size, made.min_hosts, made.spares, made.address) == (2, 1, 1, "n1")
    assert made.arguments == ["pretrain", "quickstart", "--set", f"run_dir={tmp_path}"]
    assert os.environ[COMMAND] == "lmworks launch slurm quickstart --spares 1", "what a user repeats is not what the job runs"

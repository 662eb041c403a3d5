"""The state of a run: which stages are done, and whether it is active."""

from __future__ import annotations

import socket
import time
from collections.abc import Container
from pathlib import Path

from lmworks import machine
from lmworks.checkpoint import listing
from lmworks.doctor import schema
from lmworks.doctor.record_files import mapping, number, read_document
from lmworks.doctor.run_records import Json, Training
from lmworks.model_stages import INPUTS, MODEL_STAGES

STAGES = (
    ("corpus", "corpus"),
    ("tokenizer", "tokenizer"),
    ("shards", "shards"),
    *((stage.stage, stage.folder or stage.checkpoints) for stage in MODEL_STAGES),
    ("evaluate", "evaluate"),
    ("export", "export"),
)
_TRAINING = [stage.stage for stage in MODEL_STAGES]
_FRESH = 600  # seconds without output after which a run on another machine counts as stopped


def read_stages(run_dir: Path, omitted: Container[str] = ()) -> list[Json]:
    """The stages of a run, without the `omitted` ones, each with its state and the seconds that it took."""
    found: list[Json] = []
    weights: dict[str, str] = {}  # folder of checkpoints -> hash of its newest one, if a stage has it among its inputs
    retrained = False
    for name, folder in STAGES:
        if name in omitted:
            continue
        stamp = read_document(run_dir / folder / "stage.json", schema.STAGE)
        state = "done" if stamp.get("done") is True else "begun" if "done" in stamp else "open"
        read = {key: value for key, value in mapping(stamp.get("inputs")).items() if key in INPUTS}
        weights |= {key: listing.content(run_dir / key) for key in read if key not in weights}
        if state == "done" and (retrained or any(weights[key] != value for key, value in read.items())):
            state = "stale"
        retrained |= name in _TRAINING and state in ("begun", "stale")
        found.append({"name": name, "state": state, "seconds": stamp.get("seconds")})
    return found


def run_state(run_dir: Path, stages: list[Json], training: dict[str, Training], has_events: bool) -> str:
    if all(stage["state"] == "done" for stage in stages):
        return "finished"
    if _alive(run_dir):
        return "running"
    begun = [stage for stage in stages if stage["state"] == "begun"]
    if not has_events and not any(stage["state"] != "open" for stage in stages) and not training["pretrain"].series:
        return "not started"
    ended = training["pretrain"].done and all(stage["name"] == "pretrain" for stage in begun)
    return "finished" if ended and not any(stage["state"] == "stale" for stage in stages) else "stopped"


def _alive(run_dir: Path) -> bool:
    """Whether the process that holds the lock is alive. The lock itself is not acquired, because a starting run would then fail."""
    holder = read_document(run_dir / "lock", schema.LOCK)
    pid = holder.get("pid")
    if not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return False
    if holder.get("host") != socket.gethostname():
        times = [path.stat().st_mtime for path in run_dir.glob("*.jsonl")]
        return time.time() - max([number(holder.get("since")), *times]) < _FRESH
    return machine.is_running(pid)

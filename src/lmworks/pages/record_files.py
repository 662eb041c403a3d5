"""Reads the JSON and JSONL files of a run, any of which may be missing, incomplete or damaged; and its state: which stages are done, and
whether it is active.

Each record has a schema; values that do not match it are omitted. A form is a type (float takes whole numbers too, nothing takes true and
false), a list of one form, or a map of forms by key, in which "*" stands for every other key. A key that a form does not have is left as it
is.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.io.files import open_regular, read_regular
from lmworks.io.run_layout import INPUTS, MODEL_STAGES
from lmworks.pages.run_records import Json, Training
from lmworks.watch.run_files import LONGEST_LINE

MOST = 1e100
"""What is larger is no measurement, and charts calculate with squares."""

_DEEPEST = 64
_COUNT = {"documents": int, "bytes": float}
_SCORE = {"score": float, "interval": [float], "n": int, "baseline": float, "verdict": str, "form": str}
_MODEL = {
    "bits_per_byte": {"*": {"bits_per_byte": float}},
    "scores": {"*": _SCORE},
    "samples": [{"prompt": str, "completion": str}],
    "unavailable": {"*": str},
}
RESULTS = {
    "models": {"*": _MODEL},
    "references": {"bits_per_byte": {"*": {"*": float}}, "how": {"*": str}},
    "compared": {"*": {"difference": float, "interval": [float], "verdict": str}},
    "not_clean": {"*": str},
    "forgetting": {"summary": str},
    "forgetting_since_start": {"summary": str},
}
_SOURCE = {
    "name": str, "domain": str, "license": str, "came": _COUNT, "train": _COUNT, "validation": _COUNT, "not_drawn": _COUNT,
    "quarantined": {"*": _COUNT}, "steps": [{"step": str, "dropped": {"*": _COUNT}}],
}  # fmt: skip
CORPUS = {"sources": [_SOURCE], "missing": {"*": str}}
_ROW = {"tokenizer": str, "source": str, "domain": str, "bytes_per_token": float, "fertility": float, "round_trip_failures": int}
TOKENIZER = {"evaluation": [_ROW]}
STAGE = {"seconds": float}
LOCK = {"pid": int, "since": float}
EVENT = {"event": str, "stage": str, "time": float, "reason": str, "step": int, "source": str}
SAMPLE = {"prompt": str, "completion": str, "step": int}


def conform(value: Any, form: Any, depth: int = 0) -> Any:
    """`value` without what is not of its form; None if that is all of it. Whatever the form says, numbers that no figure can be made of
    are None, and so is what lies too deep."""
    if form is object and isinstance(value, dict | list):
        form = {} if isinstance(value, dict) else [object]
    if depth > _DEEPEST:
        return None
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return None
        found = {key: conform(item, form.get(key, form.get("*", object)), depth + 1) for key, item in value.items()}
        unread = {key for key, item in value.items() if item is None and key not in form and "*" not in form}
        return {key: item for key, item in found.items() if item is not None or key in unread}
    if isinstance(form, list):
        items = (conform(item, form[0], depth + 1) for item in value) if isinstance(value, list) else ()
        return [item for item in items if item is not None]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if form is object or (isinstance(value, form) and not isinstance(value, bool)) else None
    fits = form in (object, float) or isinstance(value, form)
    return value if fits and -MOST < value < MOST else None


def lines(path: Path) -> Iterator[Json]:
    """The records of a JSONL file one by one; none if it is no file. Invalid lines are skipped, and so is all that follows one without an
    end. Numbers may have any size."""
    try:
        handle = open_regular(path)
    except (OSError, UserError):
        return
    with handle:
        while (text := handle.readline(LONGEST_LINE)) and (len(text) < LONGEST_LINE or text.endswith(b"\n")):
            try:
                record = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def read_document(path: Path, form: Json = {}) -> Json:  # noqa: B006  (not modified)
    try:
        return conform(json.loads(read_regular(path)), form) or {}
    except (OSError, ValueError, RecursionError, UserError):
        return {}


def number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def mapping(value: object) -> Json:
    return value if isinstance(value, dict) else {}


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
        stamp = read_document(run_dir / folder / "stage.json", STAGE)
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
    holder = read_document(run_dir / "lock", LOCK)
    pid = holder.get("pid")
    if not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return False
    if holder.get("host") != socket.gethostname():
        times = [path.stat().st_mtime for path in run_dir.glob("*.jsonl")]
        return time.time() - max([number(holder.get("since")), *times]) < _FRESH
    return machine.is_running(pid)

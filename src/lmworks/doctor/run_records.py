"""Reads the records of a run directory in one pass. Any part may be missing, and the run may be active."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmworks.checkpoint import listing
from lmworks.doctor import schema
from lmworks.doctor.schema import MOST, conform
from lmworks.doctor.series import Series
from lmworks.errors import UserError
from lmworks.recipe.loading.load import load_resolved
from lmworks.recipe.schema.recipe import Recipe

STAGES = (
    ("corpus", "corpus"),
    ("tokenizer", "tokenizer"),
    ("shards", "shards"),
    ("pretrain", "checkpoints"),
    ("tune", "tune"),
    ("evaluate", "evaluate"),
    ("export", "export"),
)
_WEIGHTS = ("checkpoints/", "tune/checkpoints/")  # as stages name what they read of them
_PER_LAYER = 120  # buckets of a per-layer series, of which there may be hundreds
_FIRST_EVENTS, _LAST_EVENTS = 40, 260
_MARKS = 400
_SAMPLES = 32  # kept per prompt
_PROMPTS = 12
_FRESH = 600  # seconds after which a run on another machine that has written nothing counts as stopped

Json = dict[str, Any]


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step of a training stage."""

    kind: str
    step: int
    text: str


@dataclass(frozen=True)
class Start:
    """A process began to train at `time`: on so many ranks, each a GPU, or (`cores` above 0) so many CPU cores."""

    time: float
    ranks: int = 1
    cores: int = 0


@dataclass
class Training:
    """What a training stage (pretraining or tuning) has recorded."""

    series: dict[str, Series] = field(default_factory=dict)
    samples: dict[str, list[Json]] = field(default_factory=dict)  # prompt -> lines, oldest first
    marks: list[Mark] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    starts: list[Start] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)
    planned_steps: int = 0
    planned_tokens: int = 0
    seconds: float = 0.0  # of training, pauses between processes left out
    elapsed: Series = field(default_factory=Series)  # these seconds by step
    device_seconds: float = 0.0  # the same, counted for every rank
    core_seconds: float = 0.0  # and for every CPU core; 0 on GPUs
    tokens_per_second: float = 0.0  # by the wall clock, saves and validation included, lately
    done: bool = False

    def last(self, name: str) -> float | None:
        return self.series[name].last[1] if name in self.series else None

    @property
    def step(self) -> int:
        return int(max((series.last[0] for series in self.series.values()), default=0))


@dataclass
class Run:
    """A run as far as it has come. Missing parts are empty."""

    directory: Path
    name: str
    recipe: Recipe | None
    tree: Json
    training: dict[str, Training]  # pretrain, tune
    events: list[Json]
    events_left_out: int
    corpus: Json
    tokenizer: Json
    results: Json
    parity: Json
    stages: list[Json]  # name, state (done | stale: of an earlier model | begun | open), seconds
    state: str
    reason: str

    @property
    def pretrain(self) -> Training:
        return self.training["pretrain"]

    def stale(self, stage: str) -> bool:
        """Whether what the stage has made is of an earlier model than the run's."""
        return any(one["name"] == stage and one["state"] == "stale" for one in self.stages)


def read_run(run_dir: Path) -> Run:
    """Read all records. Raises `UserError` only if `run_dir` is not a directory."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a run directory; make one with: lmworks run RECIPE")
    tree = _json(run_dir / "resolved.json")
    recipe = _recipe(run_dir / "resolved.json") if tree else None
    training = {"pretrain": Training(), "tune": Training()}
    events, left_out, reason = _ledger(run_dir / "ledger.jsonl", training)
    for name, folder in (("pretrain", run_dir), ("tune", run_dir / "tune")):
        _metrics(folder / "metrics.jsonl", training[name])
        _read_samples(folder / "samples.jsonl", training[name])
    _followed(run_dir / "follow.jsonl", training)
    stages = _stages(run_dir, tunes=tree.get("tune") is not None or (run_dir / "tune").is_dir())
    return Run(
        run_dir,
        str(tree.get("name") or run_dir.resolve().name),
        recipe,
        tree,
        training,
        events,
        left_out,
        _json(run_dir / "corpus" / "report.json", schema.CORPUS),
        _json(run_dir / "tokenizer" / "report.json", schema.TOKENIZER),
        _json(run_dir / "evaluate" / "results.json", schema.RESULTS),
        _json(run_dir / "export" / "parity.json"),
        stages,
        _state(run_dir, stages, training, bool(events)),
        reason,
    )


def lines(path: Path) -> Iterator[Json]:
    """The records of a JSONL file one by one; none if it does not exist. What is torn or broken is passed over. Numbers are of any size."""
    try:
        handle = open(path, "rb")  # noqa: SIM115
    except OSError:
        return
    with handle:
        for text in handle:
            try:
                record = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def _json(path: Path, form: Json = {}) -> Json:  # noqa: B006  which nobody changes
    try:
        return conform(json.loads(path.read_bytes()), form) or {}
    except (OSError, ValueError, RecursionError):
        return {}


def _recipe(path: Path) -> Recipe | None:
    try:
        return load_resolved(path)
    except UserError:  # of an older lmworks: its numbers are still worth a page
        return None


def _metrics(path: Path, training: Training) -> None:
    series = training.series
    recent: deque[tuple[float, float]] = deque(maxlen=200)
    starts = deque(sorted(training.starts, key=lambda start: start.time))
    before, own = None, Start(0.0)
    for record in lines(path):
        step, now = record.get("step"), record.get("time")
        if not isinstance(step, int | float) or not isinstance(now, int | float) or not (0 <= step < MOST and 0 <= now < MOST):
            continue
        while starts and starts[0].time <= now:
            own = starts.popleft()
            before = own.time
            recent.clear()
        if before is not None and now > before:
            training.seconds += now - before
            training.device_seconds += own.ranks * (now - before)
            training.core_seconds += own.ranks * own.cores * (now - before)
        before = now
        training.elapsed.add(step, training.seconds)
        for name, value in record.items():
            if isinstance(value, int | float) and -MOST < value < MOST and name not in ("step", "time"):
                if name not in series:
                    series[name] = Series(_PER_LAYER if name.startswith("experts/") and name.count("/") == 2 else 500)
                series[name].add(step, value)
        if isinstance(tokens := record.get("train/tokens"), int | float) and -MOST < tokens < MOST:
            recent.append((now, tokens))
    if len(recent) > 1 and recent[-1][0] > recent[0][0]:
        training.tokens_per_second = (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])


def _followed(path: Path, training: dict[str, Training]) -> None:
    """Add the scores of a process that follows the run; of a checkpoint that was evaluated again, the last ones."""
    found: dict[tuple[str, str], dict[float, float]] = {}
    for record in lines(path):
        stage, step = record.get("stage"), record.get("step")
        if stage not in training or not isinstance(step, int) or not 0 <= step < MOST:
            continue
        for name, value in record.items():
            if name.startswith("eval/") and isinstance(value, int | float) and -MOST < value < MOST:
                found.setdefault((stage, name), {})[step] = value
    for (stage, name), points in found.items():
        series = training[stage].series
        own = dict(series[name].means()) if name in series else {}
        series[name] = Series()
        for step, value in sorted((own | points).items()):
            series[name].add(step, value)


def _ledger(path: Path, training: dict[str, Training]) -> tuple[list[Json], int, str]:
    """Spread the events over the training stages. Returns those to show, how many are left out between them, and why it stopped."""
    first: list[Json] = []
    rest: deque[Json] = deque(maxlen=_LAST_EVENTS)
    shown, reason = 0, ""
    stage, changed = "pretrain", ""
    for event in (conform(line, schema.EVENT) for line in lines(path)):
        what = str(event.get("event", ""))
        if event.get("stage") in training:
            stage = event["stage"]
        part = training[stage]
        step = event["step"] if isinstance(event.get("step"), int) else 0
        part.counts[what] += 1
        if what in ("start", "resume"):
            cores = max(1, int(_number(event.get("threads")))) if event.get("device", "cpu") == "cpu" else 0
            part.starts.append(Start(_number(event.get("time")), max(1, int(_number(event.get("ranks")))), cores))
            part.done, reason = False, ""
        if what == "start" or (what == "resume" and "planned_tokens" in event):  # a phase may have been added in between
            planned = event.get("tokens" if what == "start" else "planned_tokens")
            part.planned_steps, part.planned_tokens = int(_number(event.get("steps"))), int(_number(planned))
        if what == "resume":
            part.marks.append(Mark("resume", step, "resumed"))
            if changed:
                part.marks.append(Mark("recipe", step, changed))
                changed = ""
        elif what == "phase":
            part.phases = [*((at, name) for at, name in part.phases if at < step), (step, str(event.get("phase")))]
        elif what == "finish":
            part.done = True
        elif what == "bad_step":
            part.marks.append(Mark("bad", step, "not finite, no update"))
        elif what in _TROUBLES:
            part.marks.append(Mark(what, step, _trouble(event)))
        elif what == "recipe_changed":
            changes = [*_records(event.get("allowed")), *_records(event.get("harmless"))]
            changed = "changed " + ", ".join(str(change.get("key")) for change in changes)
        elif what == "checkpoint":
            if "path" not in event:
                continue  # the trainer's word for it; this line follows when it is whole
            part.marks.append(Mark("checkpoint", step, "checkpoint"))
        elif what == "stopped":
            reason = str(event.get("reason", ""))
        elif what == "checkpoint_pruned":
            continue
        if len(part.marks) > 2 * _MARKS:
            part.marks = _thinned(part.marks)
        shown += 1
        (first if len(first) < _FIRST_EVENTS else rest).append(event)
    return [*first, *rest], shown - len(first) - len(rest), reason


_TROUBLES = ("spike", "rollback", "corruption", "slow_rank")


def _trouble(event: Json) -> str:
    match event.get("event"):
        case "spike":
            return f"spike of the loss or gradient norm ({event.get('action', '')})"
        case "rollback":
            return f"rolled back to step {event.get('to_step')}"
        case "corruption":
            return f"silent corruption on rank {', '.join(map(str, _list(event.get('ranks'))))}"
        case _:
            return f"rank {event.get('rank')} is slow ({event.get('what', '')})"


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _thinned(marks: list[Mark]) -> list[Mark]:
    """Every other mark of each kind."""
    seen: Counter[str] = Counter()
    kept = []
    for mark in marks:
        if seen[mark.kind] % 2 == 0:
            kept.append(mark)
        seen[mark.kind] += 1
    return kept


def _read_samples(path: Path, training: Training) -> None:
    for record in (conform(line, schema.SAMPLE) for line in lines(path)):
        prompt = record.get("prompt")
        if not isinstance(prompt, str) or not isinstance(record.get("step"), int):
            continue
        if prompt not in training.samples and len(training.samples) == _PROMPTS:
            continue
        kept = training.samples.setdefault(prompt, [])
        kept[:] = [one for one in kept if one["step"] < record["step"]]  # a resumed run writes again what it had written before
        if len(kept) == _SAMPLES:
            del kept[1::2]
        kept.append(record)


def _stages(run_dir: Path, tunes: bool) -> list[Json]:
    found: list[Json] = []
    weights: dict[str, str] = {}  # folder of checkpoints -> what its newest holds, where a stage says what it read of it
    trained_anew = False
    for name, folder in STAGES:
        if name == "tune" and not tunes:
            continue
        stamp = _json(run_dir / folder / "stage.json", schema.STAGE)
        state = "done" if stamp.get("done") is True else "begun" if "done" in stamp else "open"
        read = {key: value for key, value in _dict(stamp.get("inputs")).items() if key in _WEIGHTS}
        weights |= {key: listing.content(run_dir / key) for key in read if key not in weights}
        if state == "done" and (trained_anew or any(weights[key] != value for key, value in read.items())):
            state = "stale"
        trained_anew |= name in ("pretrain", "tune") and state in ("begun", "stale")
        found.append({"name": name, "state": state, "seconds": stamp.get("seconds")})
    return found


def _state(run_dir: Path, stages: list[Json], training: dict[str, Training], told: bool) -> str:
    if all(stage["state"] == "done" for stage in stages):
        return "finished"
    if _alive(run_dir):
        return "running"
    begun = [stage for stage in stages if stage["state"] == "begun"]
    if not told and not any(stage["state"] != "open" for stage in stages) and not training["pretrain"].series:
        return "not started"
    ended = training["pretrain"].done and all(stage["name"] == "pretrain" for stage in begun)
    return "finished" if ended and not any(stage["state"] == "stale" for stage in stages) else "stopped"


def _alive(run_dir: Path) -> bool:
    """Whether the process that the lock names lives. The lock itself is not tried: a run that starts just now would be refused."""
    holder = _json(run_dir / "lock", schema.LOCK)
    pid = holder.get("pid")
    if not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return False
    if holder.get("host") != socket.gethostname():
        times = [path.stat().st_mtime for path in run_dir.glob("*.jsonl")]
        return time.time() - max([_number(holder.get("since")), *times]) < _FRESH
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _dict(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _records(value: object) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []

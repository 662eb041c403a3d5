"""Evaluates the checkpoints of a run while it trains, in a process of its own, on any device.

    RUN/follow.jsonl   one line per evaluation: stage, step, time, content of the checkpoint, what was asked, and metrics (`eval/...`)

No other file of the run is written, and checkpoints are only read. A checkpoint has its name once it is complete; one that the run prunes
before it is read is passed over. One that was asked something else, other sets or other rows, is evaluated again.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmworks.checkpoint import listing, manifest
from lmworks.errors import UserError
from lmworks.evaluate.sets.benchmarks import CHOICE, check_names, contents
from lmworks.evaluate.sets.scoring import ALL_SETS, measure
from lmworks.io import jsonl
from lmworks.io.files import explain_os_errors, try_lock
from lmworks.io.run_layout import MODEL_STAGES
from lmworks.metrics.names import describe
from lmworks.recipe.changes import canonical
from lmworks.recipe.load import load_resolved
from lmworks.recipe.schema.evaluate import Benchmark
from lmworks.recipe.schema.recipe import Recipe
from lmworks.ui.terminal import Interrupted, clock, console
from lmworks.watch.ledger import GREW, LEDGER, read_ledger
from lmworks.weights.open import OpenModel, open_model
from lmworks.weights.run_models import stages_of

FILE = "follow.jsonl"
POLL_SECONDS = 5.0
WAIT_SECONDS = 1800.0

Measure = Callable[[OpenModel], Mapping[str, float]]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. `content` is a hash of its tensors: a step that is trained again after a rollback is another checkpoint."""

    stage: str
    step: int
    content: str
    path: Path


@dataclass(frozen=True)
class Scores:
    """A measure: scores of `benchmarks` on at most `items` items of each that says nothing else."""

    benchmarks: Sequence[Benchmark]
    items: int

    @property
    def asked(self) -> str:
        """A hash of what is asked, the rows of local files included."""
        return hashlib.sha256(canonical([contents(self.benchmarks), self.items])).hexdigest()[:16]

    def __call__(self, opened: OpenModel) -> dict[str, float]:
        values = {}
        for score in measure(opened, self.benchmarks, self.items).scores.values():
            if score["set"] != ALL_SETS:
                values[f"eval/{score['set']}/{score['form']}-{score['shots']}-shot"] = score["score"]
                values |= {f"eval/{score['set']}/items": score["n"], f"eval/{score['set']}/chance": score["chance"]}
                if "bits_per_byte" in score:
                    values[f"eval/{score['set']}/bits_per_byte"] = score["bits_per_byte"]
        return values


def scores_in_loop(recipe: Recipe, benchmarks: Sequence[Benchmark] = (), items: int | None = None) -> Scores:
    """The scores that a run measures in its loop, on the same items: sets in cloze form without examples.

    `benchmarks` replace those of the recipe. Raises `UserError` if there are none that can be scored so.
    """
    listed = benchmarks or recipe.evaluate.benchmarks
    check_names(listed)
    wanted = [one.model_copy(update={"form": "cloze", "shots": 0}) for one in listed if one.file is not None or one.name in CHOICE]
    if not wanted:
        raise UserError("the recipe of this run lists no multiple-choice set; name some: --tasks arc-easy,hellaswag")
    return Scores(wanted, items or recipe.evaluate.every_items)


def follow(
    run_dir: Path, evaluate: Measure, device: torch.device | str | None = None, wait: float = WAIT_SECONDS, poll: float = POLL_SECONDS,
    asked: str = "",
) -> int:  # fmt: skip
    """Call `evaluate` on every checkpoint of the run once, oldest first, until its training has finished; returns the number evaluated.

    Checkpoints that earlier calls asked the same (`asked` identifies it) are not evaluated again. A run that has not finished is waited for
    until nothing in it has changed for `wait` seconds; 0 evaluates the checkpoints that are there. Raises `UserError` if `run_dir` is no
    run or another process follows it, and `Interrupted` on Ctrl-C, when all finished lines are kept.
    """
    recipe = load_resolved(_resolved(run_dir))
    path = run_dir / FILE
    count, passed = 0, set[Checkpoint]()
    quiet_since, before = time.monotonic(), _signs(run_dir)
    with _append(path) as (fd, records):
        done = {(one.get("stage"), one.get("step"), one.get("content")) for one in records if one.get("asked", "") == asked}
        pace = _Pace(run_dir)
        try:
            while True:
                finished = _finished(run_dir, recipe)  # before the listing: the last checkpoint comes before the word that all is done
                found = [one for one in checkpoints(run_dir) if one not in passed and (one.stage, one.step, one.content) not in done]
                if found:
                    record = _evaluate(found[0], evaluate, device, asked)
                    if record is None:
                        passed.add(found[0])
                        continue
                    with explain_os_errors(path):
                        jsonl.append(fd, record)
                        os.fsync(fd)
                    done.add((found[0].stage, found[0].step, found[0].content))
                    count += 1
                    console.print(_line(record, pace.eta(record, len(found) - 1)))
                    quiet_since = time.monotonic()
                elif finished:
                    return count
                else:
                    if (signs := _signs(run_dir)) != before:
                        quiet_since, before = time.monotonic(), signs
                    left = wait - (time.monotonic() - quiet_since)
                    if left <= 0:
                        if wait:
                            console.print(f"nothing in {run_dir} has changed for {clock(wait)}; the same command goes on later")
                        return count
                    time.sleep(min(poll, left))
        except KeyboardInterrupt:
            raise Interrupted(f"evaluated {count} checkpoints, which are kept in {path}; the same command evaluates the others") from None


def checkpoints(run_dir: Path) -> Iterator[Checkpoint]:
    """The checkpoints that are complete now, stage by stage, by rising step."""
    for stage in MODEL_STAGES:
        for path in listing.directories(run_dir / stage.checkpoints):
            if content := listing.content_of(path):
                yield Checkpoint(stage.stage, listing.step_of(path), content, path)


def _evaluate(one: Checkpoint, evaluate: Measure, device: torch.device | str | None, asked: str) -> dict[str, Any] | None:
    """The line of a checkpoint; None if it is damaged, or if the run has removed it meanwhile."""
    begun = time.monotonic()
    try:
        values = dict(evaluate(open_model(one.path, device)))
    except (UserError, OSError) as error:
        if not one.path.exists():
            console.print(f"step {one.step} of {one.stage} was removed by the run before it was read; it is left out", style="dim")
            return None
        if manifest.problem(one.path):
            console.print(f"step {one.step} of {one.stage} is left out: {error}", style="yellow")
            return None
        raise
    for name in values:
        describe(name)
    seconds = round(time.monotonic() - begun, 3)
    about = {"stage": one.stage, "step": one.step, "time": round(time.time(), 3), "seconds": seconds, "content": one.content}
    return about | {"asked": asked} | values


def _line(record: dict[str, Any], eta: str) -> str:
    shown = {name.removeprefix("eval/"): value for name, value in record.items() if name.startswith("eval/") and describe(name).better}
    scores = ", ".join(f"{name} {value:.3f}" for name, value in shown.items())
    return f"{record['stage']} step {record['step']:,}: {scores} ({record['seconds']:.0f} s{eta})"


class _Pace:
    """When the last checkpoint will have been evaluated, from the steps between the checkpoints that this process has seen."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.first: dict[str, tuple[int, float]] = {}

    def eta(self, record: dict[str, Any], behind: int) -> str:
        planned, done = _progress(self.run_dir).get(record["stage"], (0, False))
        step, now = record["step"], time.monotonic()
        first_step, first_time = self.first.setdefault(record["stage"], (step, now - record["seconds"]))
        waiting = behind * record["seconds"]
        if done or step >= planned or step <= first_step:
            return f", ETA {clock(waiting)}" if behind else ""
        return f", ETA of {record['stage']} {clock(max(waiting, (planned - step) * (now - first_time) / (step - first_step)))}"


def _progress(run_dir: Path) -> dict[str, tuple[int, bool]]:
    """Training stage -> its planned steps, and whether it has finished."""
    found: dict[str, tuple[int, bool]] = {}
    stages = [stage.stage for stage in MODEL_STAGES]
    for event in read_ledger(run_dir / LEDGER):
        stage = event.get("stage")
        if stage not in stages:
            continue
        planned = found.get(stage, (0, False))[0]
        if event["event"] in ("start", "resume", GREW):
            steps = event.get("steps")
            found[stage] = (steps if isinstance(steps, int) else planned, False)
        elif event["event"] == "finish":
            found[stage] = (planned, True)
    return found


def _finished(run_dir: Path, recipe: Recipe) -> bool:
    return _progress(run_dir).get(stages_of(recipe)[-1].stage, (0, False))[1]


def _signs(run_dir: Path) -> tuple[object, ...]:
    """What changes while a run is active."""
    files = (run_dir / LEDGER, *(stage.place(run_dir) / "metrics.jsonl" for stage in MODEL_STAGES))
    sizes = tuple(file.stat().st_size if file.exists() else 0 for file in files)
    return (*sizes, *(path.name for stage in MODEL_STAGES for path in listing.directories(run_dir / stage.checkpoints)))


def _resolved(run_dir: Path) -> Path:
    path = run_dir / "resolved.json"
    if not path.is_file():
        raise UserError(f"{run_dir} is not a run directory (no resolved.json); start the run first with: lmworks run RECIPE")
    return path


@contextmanager
def _append(path: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The file, opened at its end and locked against a second process that follows the run, and its records."""
    with explain_os_errors(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not try_lock(fd):
            raise UserError(f"{path.parent} is followed by another process, which writes {path.name}; stop it first")
        with explain_os_errors(path):
            end = jsonl.open_append(path)
        try:
            yield end, jsonl.read(path)
        finally:
            os.close(end)
    finally:
        os.close(fd)

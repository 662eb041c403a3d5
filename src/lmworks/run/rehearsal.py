"""The time of a run without pretraining, measured by a rehearsal: all of its stages on the real weights and data, with few steps and items.

What a stage does once (reading data, loading weights, the last save) is counted as it was. Steps, validations, samples, saves, reference
scores and items are counted as often as the run will do them. A stage is rehearsed because the run has it, so none can be left out.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.evaluate.generation.replies import MOST_ROWS
from lmworks.host import machine
from lmworks.io import files
from lmworks.io.files import read_json, temporary_folder, write_json
from lmworks.metrics.log import read
from lmworks.metrics.names import ELAPSED
from lmworks.plan.stages import StageData, recipe_until
from lmworks.recipe.changes import as_tree
from lmworks.recipe.document import Keys
from lmworks.recipe.load import Resolved
from lmworks.recipe.schema.align import Dpo, Grpo
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import Tune
from lmworks.recipe.schema.units import Tokens
from lmworks.ui import terminal
from lmworks.watch.ledger import events_of

if TYPE_CHECKING:
    from lmworks.tokenizer.tokenizer import Tokenizer

STEPS = 4  # of each stage, of which the first is not counted; of grpo two, both counted
ITEMS = 40  # of each benchmark set; fewer make what a set costs once look like the cost of its items
REPLIES = MOST_ROWS  # of each task: a whole batch, whose time does not grow with its rows in proportion
START = "start"  # what the command does before its stages: checks, and the reading of all data
_WHY = "in a rehearsal"
_LEFT_OUT = ("name", "run_dir", "time")  # keys of the recipe on which no time depends


@dataclass(frozen=True)
class Rehearsed:
    """Seconds of a whole run by stage and by what they go to, the MFU of the first stage's steps, and how all that was measured."""

    stages: Mapping[str, Mapping[str, float]]
    mfu: float
    how: str

    def seconds(self, stage: str) -> float:
        return sum(self.stages.get(stage, {}).values())


def rehearse(resolved: Resolved, data: Mapping[str, StageData], tokenizer: Tokenizer | None, last: str | None = None) -> Rehearsed:
    """Run the recipe in little, up to and including the stage `last`, in a temporary folder, and return what the run will take. The result
    is kept for the prediction that a run of all stages records. Raises `UserError` for what the run would refuse."""
    from lmworks.run.runner import run_stages
    from lmworks.run.stages import stages_for

    recipe = recipe_until(resolved.recipe, [stage.name for stage in stages_for(resolved.recipe, last)])
    assert recipe.run_dir
    beside = Path(recipe.run_dir).absolute().parent  # on the disk to which the run will write
    while not beside.is_dir():
        beside = beside.parent
    began = time.monotonic()
    with temporary_folder(beside, ".lmworks-rehearsal-") as folder, _without_output():
        run_dir = folder / "run"
        little = resolved.settled(_little(recipe, data, run_dir))
        run_stages(little, last=last, on_event=lambda event: None, resume_command="")
        whole = time.monotonic() - began
        stages, mfu = _extrapolated(recipe, little.recipe, data, run_dir, tokenizer, whole, last)
    how = f"measured here, in a rehearsal of {whole:.0f} s with {STEPS} steps of each stage"
    found = Rehearsed(stages, mfu, how)
    if last is None:
        kept = _kept_at(recipe, data)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, asdict(found))
    return found


def kept(recipe: Recipe, data: Mapping[str, StageData]) -> Rehearsed | None:
    """The last rehearsal of this recipe with these data on this machine, if there was one."""
    path = _kept_at(recipe, data)
    return Rehearsed(**read_json(path)) if path.is_file() else None


def _kept_at(recipe: Recipe, data: Mapping[str, StageData]) -> Path:
    tree = {key: value for key, value in as_tree(recipe).items() if key not in _LEFT_OUT}
    about = [tree, {name: [found.examples, found.steps, found.read] for name, found in sorted(data.items())}, machine.cores()]
    return files.cache_directory("rehearsals") / f"{hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()}.json"


@contextmanager
def _without_output() -> Iterator[None]:
    """Print a progress bar in place of the stages' output, which is printed when the run is made."""
    before = terminal.console.quiet
    with terminal.bar("rehearse the run"):
        terminal.console.quiet = True
        try:
            yield
        finally:
            terminal.console.quiet = before


def _little(recipe: Recipe, data: Mapping[str, StageData], run_dir: Path) -> dict[Keys, tuple[Any, str]]:
    """The keys that make the run a little one."""
    found: dict[Keys, Any] = {("run_dir",): str(run_dir)}
    found["train", "save_every"] = "100%"
    for what in ("validate", "sample", "log"):
        found["train", f"{what}_every"] = "1 steps"
    for name, section in recipe.later_stages.items():
        found[name, "lr_schedule"] = {"kind": "constant", "warmup": "0%"}
        found[name, "early_stopping"] = None
        if isinstance(section, Tune):
            found |= {(name, "tokens"): Tokens(STEPS * section.global_batch_tokens).text(), (name, "epochs"): None}
            found[name, "final_weights"] = "last"
        elif isinstance(section, Grpo):
            found[name, "steps"] = min(STEPS // 2, section.steps)
        else:
            found |= _fewer_pairs(section, data.get(name))
    wanted = recipe.evaluate
    found["evaluate", "task_items"] = min(REPLIES, wanted.task_items)
    found["evaluate", "benchmark_items"] = min(ITEMS, wanted.benchmark_items)
    for number, one in enumerate(wanted.benchmarks):
        if one.items is not None:
            found["evaluate", "benchmarks", number, "items"] = min(ITEMS, one.items)
    return {keys: (value, _WHY) for keys, value in found.items()}


def _fewer_pairs(options: Dpo, found: StageData | None) -> dict[Keys, Any]:
    """Pairs for `STEPS` steps, with as many held out as in the run, so that a validation takes as long."""
    held = found.held_out if found is not None else 0
    wanted = STEPS * options.pairs_per_step + held
    known = found.examples + found.held_out if found is not None else 0
    changes: dict[Keys, Any] = {("dpo", "epochs"): 1.0}
    if known and known <= wanted:
        return changes | {("dpo", "epochs"): STEPS * options.pairs_per_step / max(1, known - held)}
    changes["dpo", "validation_fraction"] = min(0.5, held / wanted) if held else options.validation_fraction
    for number in range(len(options.data)):
        changes["dpo", "data", number, "max_rows"] = math.ceil(wanted / len(options.data))
    return changes


def _extrapolated(
    recipe: Recipe, little: Recipe, data: Mapping[str, StageData], run_dir: Path, tokenizer: Tokenizer | None, whole: float,
    last: str | None,
) -> tuple[dict[str, dict[str, float]], float]:  # fmt: skip
    """Seconds of the run up to `last` by stage and part, and the MFU."""
    from lmworks.run.run_dir import seconds_by_stage
    from lmworks.run.stages import stages_for

    took = {stage: float(seconds or 0) for stage, seconds in seconds_by_stage(run_dir).items()}
    stages: dict[str, dict[str, float]] = {START: {"checks and data": max(0.0, whole - sum(took.values()))}}
    mfu = 0.0
    for stage in stages_for(recipe, last):
        if stage.name in recipe.later_stages:
            stages[stage.name] = _training(recipe, stage.name, data.get(stage.name), run_dir, took[stage.name])
            mfu = mfu or statistics.median(line.get("perf/mfu", 0.0) for line in read(run_dir / stage.name))
        elif stage.name == "evaluate":
            stages[stage.name] = _evaluation(recipe, little, run_dir, took[stage.name], tokenizer)
        else:
            stages[stage.name] = {"all": took[stage.name]}
    return stages, mfu


def _training(recipe: Recipe, name: str, found: StageData | None, run_dir: Path, took: float) -> dict[str, float]:
    """Seconds of a stage that trains, of which the rehearsal took `took`."""
    from lmworks.plan.costs import phase_steps
    from lmworks.plan.stages import stages_as_phases

    section, lines, events = recipe.later_stages[name], list(read(run_dir / name)), events_of(run_dir, "checkpoint")
    (phase,) = (one for one in stages_as_phases(recipe, {name: found} if found else {}).train.phases if one.name == name)
    steps, tokens = phase_steps(phase)
    own = [line["perf/step_seconds"] for line in lines]
    checks = [line.get("perf/validation_seconds", 0.0) for line in lines]
    gaps = [after[ELAPSED] - before[ELAPSED] for before, after in pairwise(lines)]
    others = [gap - step - check for gap, step, check in zip(gaps, own[1:], checks[1:], strict=True)]
    check, sample = statistics.median(checks), max(0.0, statistics.median(others)) if others else 0.0
    counted = own if isinstance(section, Grpo) else own[1:] or own
    if isinstance(section, Dpo):  # their steps differ in rows
        read_tokens = [line["train/tokens"] for line in lines]
        sizes = [after - before for before, after in pairwise([0, *read_tokens])][-len(counted) :]
        training = sum(counted) / sum(sizes) * tokens
    else:
        training = statistics.median(counted) * steps
    parts = {"steps": training, "validation": check * recipe.train.validate_every.times(steps, tokens)}
    parts["samples"] = sample * recipe.train.sample_every.times(steps, tokens)
    saves = recipe.train.save_every.times(steps, tokens)
    if getattr(section, "final_weights", "last") == "best" or recipe.checkpoints.keep_best:
        saves = max(saves, recipe.train.validate_every.times(steps, tokens))  # those that are the best so far
    save = statistics.median([event["seconds"] for event in events if event.get("step") and f"/{name}/" in str(event.get("path"))] or [0.0])
    parts["saves"] = save * (saves - 1)
    references = [event for event in events_of(run_dir, "reference_scores") if event["stage"] == name]
    scored = sum(event["seconds"] for event in references)
    pairs = {} if found is None else {"train": found.examples, "validation": found.held_out}
    parts["reference scores"] = sum(one["seconds"] * pairs.get(one["split"], one["pairs"]) / one["pairs"] for one in references)
    parts["loading and the rest"] = max(0.0, took - scored - sum(own) - sum(checks) - sample * len(lines))
    return {part: seconds for part, seconds in parts.items() if seconds}


def _evaluation(recipe: Recipe, little: Recipe, run_dir: Path, took: float, tokenizer: Tokenizer | None) -> dict[str, float]:
    """Seconds of the evaluation of all models, of which the rehearsal took `took`."""
    measured = [model["speed"]["seconds"] for model in read_json(run_dir / "evaluate" / "results.json")["models"].values()]
    sums = {part: sum(one[part] for one in measured) for part in measured[0]}
    rest = max(0.0, took - sum(sums.values()))
    sums["tasks"] *= math.ceil(recipe.evaluate.task_items / REPLIES) / math.ceil(little.evaluate.task_items / REPLIES)
    if recipe.evaluate.benchmarks:
        asked, done = (_tokens_of_items(one, tokenizer) for one in (recipe, little))
        sums["benchmarks"] *= asked / done if done else 1.0
    return {part: seconds for part, seconds in (sums | {"loading and the rest": rest}).items() if seconds}


def _tokens_of_items(recipe: Recipe, tokenizer: Tokenizer | None) -> float:
    """Tokens of all benchmark items of a recipe, with all choices; bytes without a tokenizer."""
    from lmworks.run.time_estimate import tokens_per_item

    wanted = recipe.evaluate

    def length(text: str) -> int:
        return len(text) if tokenizer is None else len(tokenizer.encode(text))

    return sum(mean * count for mean, count in tokens_per_item(wanted.benchmarks, length, wanted.benchmark_items).values())

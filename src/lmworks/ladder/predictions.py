"""Predictions of a ladder: written before the target runs, scored afterwards, and never changed.

`DIR/predictions.jsonl` has one line for each prediction. The hash of a line covers its contents and the hash of the line before, so a line
that is changed or removed later is found out.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.io import jsonl
from lmworks.io.files import explain_damage, sha256_file, write_json
from lmworks.ladder.comparable import (
    Batch,
    require_batch_rule,
    require_comparable,
    require_one_ladder,
    require_same_schedule,
)
from lmworks.ladder.design import BenchmarkScore
from lmworks.ladder.points import (
    batches_of,
    epochs_of,
    finished,
    held_out_text,
    require_annealed,
    require_mixture_kept,
    require_trained,
    require_whole,
    size_and_tokens,
    tokenizer_of,
)
from lmworks.pages.read_run import read_run
from lmworks.pages.run_records import Run
from lmworks.plan.laws import BENCHMARK_NAME, LAW_FILE, MOST_ITEMS, DownstreamLaw, load_law
from lmworks.recipe.changes import as_tree
from lmworks.recipe.former import translated
from lmworks.recipe.load import Resolved, load_resolved
from lmworks.recipe.scaling_laws import EPOCHS_AS_NEW
from lmworks.recipe.schema.evaluate import Evaluate
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.timeline import Timeline

FILE = "predictions.jsonl"
SCORES = "scores.json"
LEVEL = 0.9  # of the prediction interval
# Time constants of weight decay in a run, and times those of the ladder's longest run, from which on its effect is told (LOG.md).
_DECAYS, _MORE_DECAY = 1.0, 1.5


class _Compared:
    """A prediction with its interval, and the measurement; each is None where there is none."""

    predicted: float | None
    low: float | None
    high: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        return None if self.measured is None or self.predicted is None else self.predicted - self.measured

    @property
    def inside(self) -> bool | None:
        return None if self.measured is None or self.low is None or self.high is None else self.low <= self.measured <= self.high

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"error": self.error, "inside": self.inside}


@dataclass(frozen=True)
class BenchmarkComparison(_Compared):
    """The predicted score of a benchmark on `items` items, which is None without a signal in the ladder, and the measured one."""

    name: str
    items: int
    predicted: float | None
    low: float | None
    high: float | None
    measured: float | None = None


@dataclass(frozen=True)
class Score(_Compared):
    """The predicted loss of a run and the measured one, which is None while the run is not finished; and its benchmarks."""

    run_dir: str
    parameters: int
    tokens: int
    predicted: float
    low: float
    high: float
    measured: float | None
    benchmarks: tuple[BenchmarkComparison, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"benchmarks": [one.to_json() for one in self.benchmarks]}


_Share = Annotated[float, Field(ge=0, le=1)]


class _BenchmarkLine(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    name: str = Field(pattern=BENCHMARK_NAME)
    items: int = Field(gt=0, le=MOST_ITEMS)
    predicted: _Share | None
    low: _Share | None
    high: _Share | None


class _Line(BaseModel):
    """What is read of a line. Those of earlier versions have no benchmarks, and nothing to recognize the run by but its size and tokens."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    time: float
    run_dir: str
    parameters: int
    tokens: int
    predicted: float
    low: float
    high: float
    benchmarks: tuple[_BenchmarkLine, ...] = Field((), max_length=1000)
    held_out_text: str | None = None
    tokenizer: str = ""
    resolved: dict[str, Any] | None = None


def predict(folder: Path, target: Resolved) -> Score:
    """Write the prediction of the run that the recipe would make.

    Raises `UserError` if the run has begun to train, if it has a prediction already, if its corpus is there and is another one, if its
    learning rate does not decay, or if it differs from the runs of the ladder in more than its size and its token budget.
    """
    law, recipe, settings = load_law(folder), target.recipe, _settings(folder)
    assert recipe.run_dir
    if not recipe.train.phases:
        raise UserError("the recipe has no phases to train; add train.phases to it")
    if recipe.time is not None and target.path.name != "resolved.json":
        raise UserError(f"{target.path}: its token budgets depend on time; add --set time=null to take those that are written")
    run_dir = Path(recipe.run_dir)
    known = read(folder)
    if listing.has_checkpoints(run_dir / "checkpoints") or (run_dir / "metrics.jsonl").exists():
        raise UserError(f"{run_dir} has begun to train, and a prediction has to be older than its run; choose another run_dir with --set")
    if any(Path(one["run_dir"]).resolve() == run_dir.resolve() for one in known):
        raise UserError(f"{run_dir} has a prediction already; choose another run_dir with --set")
    if (run_dir / "corpus" / "manifest.json").exists() and held_out_text(run_dir) != settings.held_out_text:
        raise UserError(f"{run_dir} is validated on other text than the ladder; its loss cannot be predicted")
    size, tokens = size_and_tokens(recipe)
    name = str(target.path)
    require_one_ladder(settings.recipe, recipe, name, "the runs of the ladder")
    require_batch_rule(settings.batches, Batch.of(name, recipe, size, tokens))
    interval = law.interval(size, tokens, LEVEL)
    assert interval is not None, "a ladder's law has bootstrap fits"
    losses = law.draws(size, tokens)
    record = {
        "time": time.time(), "run_dir": str(run_dir), "recipe": target.fingerprint, "parameters": size, "tokens": tokens,
        "predicted": law.predict(size, tokens), "low": interval[0], "high": interval[1], "level": LEVEL, "unit": law.unit,
        "benchmarks": [_predict_score(one, losses, recipe.evaluate) for one in law.benchmarks],
        "held_out_text": settings.held_out_text, "tokenizer": settings.tokenizer, "resolved": as_tree(recipe),
        "law": hashlib.sha256((folder / LAW_FILE).read_bytes()).hexdigest(), "before": known[-1]["hash"] if known else "",
    }  # fmt: skip
    fd = jsonl.open_append(folder / FILE)
    try:
        jsonl.append(fd, record | {"hash": _hash(record)})
        os.fsync(fd)
    finally:
        os.close(fd)
    return _score(record)


def _predict_score(law: DownstreamLaw, losses: np.ndarray, evaluate: Evaluate) -> dict[str, Any]:
    """The score on as many items as the run will have: at most those of the ladder."""
    asked = next((evaluate.items_in_loop(one) for one in evaluate.benchmarks if one.name == law.name.partition("/")[0]), law.items)
    items = min(asked, law.items)
    predicted, low, high = law.predict(losses, items, LEVEL) or (None, None, None)
    return {"name": law.name, "items": items, "predicted": predicted, "low": low, "high": high}


def not_scored(score: Score, evaluate: Evaluate) -> list[str]:
    """The predicted benchmarks that the run will not score by itself."""
    scored = [] if evaluate.every == "never" else [one.name for one in evaluate.benchmarks]
    return [one.name for one in score.benchmarks if one.name.partition("/")[0] not in scored]


def read(folder: Path) -> list[dict[str, Any]]:
    """All predictions, oldest first. Raises `UserError` if a line was changed or removed after it was written."""
    path, before, found = folder / FILE, "", []
    if not path.exists():
        return []
    with explain_damage(path, "restore the file as it was written"):
        for line in jsonl.read(path):
            record = {key: value for key, value in line.items() if key != "hash"}
            if line["hash"] != _hash(record) or record["before"] != before:
                raise UserError(f"{path}: the prediction of {record['run_dir']} was changed, or the line before it was; restore the file")
            _Line.model_validate(record)
            before = line["hash"]
            found.append(line)
    return found


def score(folder: Path) -> list[Score]:
    """Compare every prediction with its run; also written to `DIR/scores.json`.

    Raises `UserError` if a finished run is not the one that was predicted, or older than its prediction.
    """
    scores = [_score(one) for one in read(folder)]
    if not scores:
        raise UserError(f"{folder} has no predictions; write one with: lmworks ladder predict {folder} RECIPE")
    write_json(folder / SCORES, {"scores": [one.to_json() for one in scores], **summary(scores)})
    return scores


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """How many predictions have a measurement, the mean and the largest absolute error, and the fraction of intervals that hold: of the
    loss, and of each benchmark."""
    rows = [one for score in scores for one in score.benchmarks]
    names = sorted({one.name for one in rows})
    return _summary(scores) | {"benchmarks": {name: _summary([one for one in rows if one.name == name]) for name in names}}


def _summary(scores: Sequence[_Compared]) -> dict[str, Any]:
    errors = [abs(one.error) for one in scores if one.error is not None]
    if not errors:
        return {"finished": 0, "mean_error": None, "largest_error": None, "coverage": None}
    mean, inside = sum(errors) / len(errors), sum(bool(one.inside) for one in scores)
    return {"finished": len(errors), "mean_error": mean, "largest_error": max(errors), "coverage": inside / len(errors)}


def save_settings(folder: Path, runs: list[Path]) -> None:
    """Record what a ladder was fitted to. `law.json` is written beside it."""
    recipes = [load_resolved(run / "resolved.json") for run in runs]
    write_json(folder / "ladder.json", {
        "runs": [str(run) for run in runs], "held_out_text": held_out_text(runs[0]), "tokenizer": tokenizer_of(runs[0]),
        "weight_decay": max(map(_weight_decay, recipes)), "recipe": as_tree(recipes[0]),
        "batches": list(map(vars, batches_of(runs, recipes))),
    })  # fmt: skip


def _weight_decay(recipe: Recipe) -> float:
    """Length of a run in time constants of its weight decay, which is 1 / (learning rate x weight decay) steps at the peak rate."""
    options = recipe.optimizer
    return Timeline(recipe.train.phases).steps * (options.learning_rate or 0.0) * options.weight_decay


@dataclass(frozen=True)
class _Settings:
    """What a ladder was fitted to; `recipe` is that of its first run, and `weight_decay` the largest of all (None: not recorded)."""

    held_out_text: str
    tokenizer: str
    first_run: Path
    recipe: Recipe
    batches: tuple[Batch, ...]
    weight_decay: float | None


def _settings(folder: Path) -> _Settings:
    path = folder / "ladder.json"
    again = f"fit the ladder again: lmworks ladder fit {folder} RUN..."
    if not path.is_file():
        raise UserError(f"{folder} is not a ladder; make one with: lmworks ladder fit {folder} RUN...")
    with explain_damage(path, again):
        found = json.loads(path.read_text(encoding="utf-8"))
        if "batches" not in found:
            raise UserError(f"{path} is of an earlier version, and does not tell what its runs have in common; {again}")
        batches = tuple(
            Batch(str(one["name"]), *(int(one[name]) for name in ("parameters", "tokens", "batch"))) for one in found["batches"]
        )
        recipe = Recipe.model_validate(translated(found["recipe"]))
        decay = float(found["weight_decay"]) if "weight_decay" in found else None
        return _Settings(str(found["held_out_text"]), str(found["tokenizer"]), Path(found["runs"][0]), recipe, batches, decay)


def more_weight_decay(folder: Path, recipe: Recipe) -> str:
    """What to say of a predicted run that is longer, in time constants of weight decay, than the runs of the ladder; empty if it is not."""
    largest, own = _settings(folder).weight_decay, _weight_decay(recipe)
    if largest is None or own < _DECAYS or own < _MORE_DECAY * largest:
        return ""
    return (
        f"weight decay: the run lasts {own:.1f} times 1 / (learning_rate x weight_decay) steps, and the ladder's longest {largest:.1f} "
        "times. It raises the loss of long runs by more than the ladder shows, so the predicted loss is likely too low: use a smaller "
        "optimizer.weight_decay, or 0, in both (docs/sizing.md)"
    )


def repeated_text(folder: Path, recipe: Recipe) -> str:
    """What to say of a predicted run that reads its text more than `EPOCHS_AS_NEW` times; empty if it does not, or if it is not known."""
    found = epochs_of(_settings(folder).first_run, recipe)
    if found <= EPOCHS_AS_NEW:
        return ""
    return (
        f"repeated text: with the shards of the ladder, the run reads a source {found:,.0f} times. The law counts tokens that are read "
        f"again as new ones, and beyond about {EPOCHS_AS_NEW} times they are worth less (arXiv:2305.16264), so the predicted loss is "
        "likely too low: add text, or lower tokens"
    )


def other_tokenizer(folder: Path, recipe: Recipe) -> str:
    """What to say of a predicted run of which it is not known that it will have the tokenizer of the ladder; empty if it is."""
    settings = _settings(folder)
    assert recipe.run_dir
    path = Path(recipe.tokenizer.path or "")
    if settings.tokenizer in ("", tokenizer_of(Path(recipe.run_dir)), sha256_file(path) if path.is_file() else None):
        return ""
    return (
        "the run is scored only if its tokenizer is that of the ladder, and it makes its own; to be sure that it is the same, run it with "
        f"--set tokenizer.path={settings.first_run / 'tokenizer' / 'tokenizer.json'}"
    )


def _score(record: dict[str, Any]) -> Score:
    run_dir = Path(record["run_dir"])
    line = _Line.model_validate(record)
    measured = None
    if run_dir.is_dir() and (measured := finished(run := read_run(run_dir, judge=False))) is not None:
        _require_predicted(line, run)
    values = {name: getattr(line, name) for name in ("run_dir", "parameters", "tokens", "predicted", "low", "high")}
    scores = measured.scores if measured else {}
    benchmarks = tuple(BenchmarkComparison(**vars(one), measured=_measured(one, scores)) for one in line.benchmarks)
    return Score(**values, measured=measured.loss if measured else None, benchmarks=benchmarks)


def _require_predicted(line: _Line, run: Run) -> None:
    """Raises `UserError` if a finished run is not the predicted one, or older than the prediction."""
    where, remedy = run.directory, "move it away, and run the predicted recipe there"
    if run.recipe is None:
        raise UserError(f"{where} has no recipe, so it is not known whether it is the predicted run; {remedy}")
    began = min((start.time for start in run.pretrain.starts), default=0.0)
    if began <= line.time:
        raise UserError(f"{where} began to train before its prediction was written, so it does not test the prediction; {remedy}")
    size, tokens = size_and_tokens(run.recipe)
    for what, predicted, found in (("active parameters", line.parameters, size), ("tokens", line.tokens, tokens)):
        if found != predicted:
            raise UserError(f"{where} is not the predicted run: it has {found:,} {what}, and the prediction {predicted:,}; {remedy}")
    if line.held_out_text is not None and held_out_text(where) != line.held_out_text:
        raise UserError(f"{where} is validated on other text than the ladder, so its loss cannot be compared; {remedy}")
    if line.tokenizer and tokenizer_of(where) != line.tokenizer:
        raise UserError(f"{where} has another tokenizer than the ladder: {remedy}, with the ladder's tokenizer (tokenizer.path)")
    if line.resolved is not None:
        predicted_recipe = Recipe.model_validate(translated(line.resolved))
        require_one_ladder(predicted_recipe, run.recipe, str(where), "the predicted recipe", remedy)
        require_comparable(predicted_recipe, run.recipe, str(where), "the predicted recipe", True, remedy)
        require_same_schedule(predicted_recipe, run.recipe, str(where), "the predicted recipe", remedy)
    require_whole(run)
    require_trained(where, remedy="it tests no prediction: move it away")
    require_mixture_kept(where)
    require_annealed(run)


def _measured(line: _BenchmarkLine, scores: Mapping[str, BenchmarkScore]) -> float | None:
    """The score of a finished run, if it has at least the items for which the interval holds."""
    found = scores.get(line.name)
    return None if found is None or found.items < line.items else found.score


def _hash(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

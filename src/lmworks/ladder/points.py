"""Reads finished runs as points of a ladder: size, tokens, held-out loss, and scores on benchmarks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.io.files import sha256_file
from lmworks.ladder.comparable import Batch, Course, require_batch_rule, require_one_ladder, same_training
from lmworks.ladder.design import BenchmarkScore, Point
from lmworks.metrics.divergence import divergence
from lmworks.metrics.log import read
from lmworks.metrics.names import is_score
from lmworks.pages.read_run import read_run
from lmworks.pages.run_records import Run
from lmworks.plan.counts import count_by_component
from lmworks.plan.laws import BENCHMARK_NAME, MOST_ITEMS
from lmworks.recipe import scaling_laws
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.manifest import Manifest
from lmworks.shards.order import Order
from lmworks.train.data.mixture import read_changes

MEASURE = "validation/bits_per_byte"
UNIT = "bits per byte"
_EVAL = "eval/"
DECAYED = 0.5  # of the peak learning rate: a run that ends above it has not been annealed


def size_and_tokens(recipe: Recipe) -> tuple[int, int]:
    """Active parameters without the embedding look-up, and training tokens, of a resolved recipe."""
    return count_by_component(recipe.model).active_computed, sum(int(phase.tokens) for phase in recipe.train.phases)


def fewest_parameters(recipe: Recipe) -> int:
    """Active parameters of the smallest size (`size`) with the vocabulary and the experts of a recipe; its own where no size is derived."""
    model = recipe.model
    if model.mla is not None:
        return size_and_tokens(recipe)[0]
    sketch = Model(vocab_size=model.vocab_size, tie_word_embeddings=model.tie_word_embeddings, moe=model.moe)
    shape: dict[str, Any] = dict(scaling_laws.shape(1, sketch))
    width = shape.pop("moe_intermediate_size", None)
    if model.moe is not None:
        shape["moe"] = model.moe.model_copy(update={"moe_intermediate_size": width})
    return count_by_component(sketch.model_copy(update=shape)).active_computed


def epochs_of(run_dir: Path, recipe: Recipe) -> float:
    """How often a recipe reads the source that it reads most, with the shards of a run; 0 where there are none, or they lack a source."""
    endless = recipe.model_copy(update={"shards": recipe.shards.model_copy(update={"max_epochs": math.inf})})
    try:
        return max(share.epochs for share in Order(endless, Manifest.load(run_dir / "shards")).shares())
    except UserError:
        return 0.0


def held_out_text(run_dir: Path) -> str:
    """A hash of the corpus that a run is validated on."""
    manifest = run_dir / "corpus" / "manifest.json"
    if not manifest.is_file():
        raise UserError(f"{run_dir} has no corpus, so its held-out text is not known; name a run directory that `lmworks run` has made")
    return sha256_file(manifest)


def tokenizer_of(run_dir: Path) -> str:
    """A hash of the tokenizer of a run; empty without one."""
    path = run_dir / "tokenizer" / "tokenizer.json"
    return sha256_file(path) if path.is_file() else ""


def require_annealed(run: Run) -> None:
    """Raises `UserError` if the learning rate of a finished run has not decayed."""
    rate = run.pretrain.series.get("optim/learning_rate")
    if rate and rate.last[1] > DECAYED * rate.high[1]:
        raise UserError(
            f"{run.directory} ends at {rate.last[1] / rate.high[1]:.0%} of its peak learning rate, so its loss is not that of a finished "
            "model; let the schedule of its last phase decay (min_lr_ratio)"
        )


def require_whole(run: Run) -> None:
    """Raises `UserError` if a finished run ended before its token budget, as by early stopping."""
    assert run.recipe is not None
    if (step := run.pretrain.step) < (steps := Course.of(run.recipe).timeline.steps):
        raise UserError(
            f"{run.directory} ended at step {step:,} of {steps:,}, so its loss is not that of its token budget; run the recipe again "
            "without train.early_stopping"
        )


def require_trained(run_dir: Path, remedy: str = "leave it out, or run it again at a lower learning rate") -> None:
    """Raises `UserError` if a run has diverged: its loss is not that of its recipe."""
    if why := divergence(run_dir, read(run_dir)):
        raise UserError(f"{run_dir} has diverged ({why}), so its loss is not that of its recipe; {remedy}")


def require_mixture_kept(run_dir: Path) -> None:
    """Raises `UserError` if the mixture was changed while the run was active."""
    if (run_dir / "ledger.jsonl").is_file() and (changed := read_changes(run_dir).applied):
        raise UserError(
            f"the mixture of {run_dir} was changed at step {changed[0].step:,}, so its loss is not that of its recipe; run the recipe again"
        )


@dataclass(frozen=True)
class Finished:
    """Held-out bits per byte behind the last step of pretraining, and the scores that were measured there, by benchmark."""

    loss: float
    scores: dict[str, BenchmarkScore]


def finished(run: Run) -> Finished | None:
    """What a run has measured behind its last step; None while it is not finished. Raises `UserError` for impossible scores."""
    loss = _last(run, MEASURE)
    if not run.pretrain.done or loss is None:
        return None
    names = [name for name in run.pretrain.series if is_score(name) and re.fullmatch(BENCHMARK_NAME, name.removeprefix(_EVAL))]
    scores = {name.removeprefix(_EVAL): score for name in names if (score := _score(run, name)) is not None}
    return Finished(loss, scores)


def _last(run: Run, name: str) -> float | None:
    """The value of a metric behind the last step."""
    series = run.pretrain.series.get(name)
    return None if not series or series.last[0] < run.pretrain.step else series.last[1]


def _score(run: Run, name: str) -> BenchmarkScore | None:
    """A score with its items; None if it is of an earlier step, or of a version that did not record the number of items."""
    score, items, chance = (_last(run, one) for one in (name, *(f"{name.rpartition('/')[0]}/{of}" for of in ("items", "chance"))))
    if score is None or items is None or chance is None:
        return None
    if not (0 <= score <= 1 and 0 <= chance <= 1 and 1 <= items <= MOST_ITEMS and items == int(items)):
        raise UserError(
            f"{run.directory}: {name} cannot be {score:g} of {items:g} items with chance {chance:g}; remove the line from metrics.jsonl or "
            "follow.jsonl and score the run again"
        )
    return BenchmarkScore(score, int(items), chance)


def read_points(runs: list[Path]) -> list[Point]:
    """The points of finished runs, in this order.

    Raises `UserError` for a run that is not finished, that ended early, whose learning rate did not decay, that is listed twice (a copy of
    a run too), that differs from the first in its held-out text, tokenizer, mixture, optimizer or final learning rate, or in more than the
    size of its model; and if the batch sizes follow no rule.
    """
    points: list[Point] = []
    recipes: list[Recipe] = []
    text, tokenizer = held_out_text(runs[0]), tokenizer_of(runs[0])
    for index, run_dir in enumerate(runs):
        if run_dir.resolve() in [one.resolve() for one in runs[:index]]:
            raise UserError(f"{run_dir} is listed twice; each run counts once")
        held_out_text(run_dir)
        run = read_run(run_dir, judge=False)
        require_trained(run_dir)
        if run.recipe is None or not run.pretrain.done:
            raise UserError(f"{run_dir} has not finished pretraining; run: lmworks pretrain {run_dir}")
        require_whole(run)
        if (measured := finished(run)) is None:
            raise UserError(
                f"{run_dir} has no finite {MEASURE} behind its last step; leave it out, or run it again with train.validate_every=100%"
            )
        if held_out_text(run_dir) != text:
            raise UserError(f"{run_dir} is validated on other text than {runs[0]}; a ladder needs one corpus for all its runs")
        if tokenizer_of(run_dir) != tokenizer:
            raise UserError(
                f"{run_dir} has another tokenizer than {runs[0]}; a ladder needs one for all its runs: --set tokenizer.path="
                f"{runs[0]}/tokenizer/tokenizer.json"
            )
        require_annealed(run)
        require_mixture_kept(run_dir)
        if recipes:
            require_one_ladder(recipes[0], run.recipe, str(run_dir), str(runs[0]))
        size, tokens = size_and_tokens(run.recipe)
        seed, epochs = run.recipe.training_seed, epochs_of(run_dir, run.recipe)
        points.append(Point(size, tokens, measured.loss, measured.scores, seed, fewest_parameters(run.recipe), epochs))
        for other, point, recipe in zip(runs, points, recipes, strict=False):
            same = (point.parameters, point.tokens, point.seed) == (size, tokens, seed)
            if same and same_training(recipe, run.recipe):
                raise UserError(
                    f"{run_dir} is the same run as {other}: same recipe and same seed; each run counts once, leave one of them out"
                )
        recipes.append(run.recipe)
    require_batch_rule(batches_of(runs, recipes))
    return points


def batches_of(runs: Sequence[Path], recipes: Sequence[Recipe]) -> list[Batch]:
    """The batch sizes of runs."""
    return [Batch.of(str(run), recipe, *size_and_tokens(recipe)) for run, recipe in zip(runs, recipes, strict=True)]

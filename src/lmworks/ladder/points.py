"""Reads finished runs as points of a ladder: size, tokens, and held-out loss."""

from __future__ import annotations

from pathlib import Path

from lmworks.doctor.read_run import read_run
from lmworks.errors import UserError
from lmworks.files import sha256_file
from lmworks.ladder.fit import Point
from lmworks.plan.counts import count_by_component
from lmworks.recipe.schema.recipe import Recipe

MEASURE = "validation/bits_per_byte"
UNIT = "bits per byte"
_DECAYED = 0.5  # of the peak learning rate: a run that ends above it has not been annealed


def size_and_tokens(recipe: Recipe) -> tuple[int, int]:
    """Active parameters without the embedding look-up, and training tokens, of a resolved recipe."""
    return count_by_component(recipe.model).active_computed, sum(int(phase.tokens) for phase in recipe.train.phases)


def held_out_text(run_dir: Path) -> str:
    """A hash of the corpus that a run is validated on."""
    manifest = run_dir / "corpus" / "manifest.json"
    if not manifest.is_file():
        raise UserError(f"{run_dir} has no corpus, so its held-out text is not known; name a run directory that `lmworks run` has made")
    return sha256_file(manifest)


def finished_loss(run_dir: Path) -> float | None:
    """Held-out bits per byte behind the last step of pretraining; None while it is not finished."""
    part = read_run(run_dir).pretrain
    series = part.series.get(MEASURE)
    if not part.done or series is None or series.last[0] < part.step:
        return None
    return series.last[1]


def read_points(runs: list[Path]) -> list[Point]:
    """The points of finished runs, in this order.

    Raises `UserError` for a run that is not finished, whose learning rate did not decay, that is listed twice, or that was validated on
    other text than the first.
    """
    points: list[Point] = []
    text = held_out_text(runs[0])
    for index, run_dir in enumerate(runs):
        if run_dir.resolve() in [one.resolve() for one in runs[:index]]:
            raise UserError(f"{run_dir} is listed twice; each run counts once")
        held_out_text(run_dir)
        run = read_run(run_dir)
        if run.recipe is None or (loss := finished_loss(run_dir)) is None:
            raise UserError(f"{run_dir} has not finished pretraining with a validation at its end; run: lmworks pretrain {run_dir}")
        if held_out_text(run_dir) != text:
            raise UserError(f"{run_dir} is validated on other text than {runs[0]}; a ladder needs one corpus for all its runs")
        rate = run.pretrain.series.get("optim/learning_rate")
        if rate is not None and rate.last[1] > _DECAYED * rate.high[1]:
            raise UserError(
                f"{run_dir} ends at {rate.last[1] / rate.high[1]:.0%} of its peak learning rate, so its loss is not that of a finished "
                "model; let the schedule of its last phase decay (min_lr_ratio)"
            )
        size, tokens = size_and_tokens(run.recipe)
        points.append(Point(size, tokens, loss))
    return points

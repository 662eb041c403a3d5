"""How often a stage of training saves, validates, samples and logs, in steps."""

from __future__ import annotations

from dataclasses import dataclass

from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Duration
from lmworks.train.curriculum import Curriculum


@dataclass(frozen=True)
class Intervals:
    """Steps between two events of each kind; None where the recipe asks for none.

    save, validate, sample, log: `train.save_every` and so on. recheck: `stability.recheck_every`, the test for silent corruption.
    detail: `metrics.detail_every`, the statistics of each layer. evaluate: `evaluate.every`. rollback_after: the first step whose spike may
    lead to a rollback (`stability.spike.rollback_after`).
    """

    save: int
    validate: int
    sample: int
    log: int
    recheck: int | None
    detail: int | None
    evaluate: int | None
    rollback_after: int

    @classmethod
    def of(cls, recipe: Recipe, curriculum: Curriculum) -> Intervals:
        def steps(interval: Duration) -> int:
            return interval.interval(curriculum.steps, curriculum.tokens)

        train, spike = recipe.train, recipe.stability.spike
        recheck, detail = recipe.stability.recheck_every, recipe.metrics.detail_every
        evaluate = recipe.evaluate.every if isinstance(recipe.evaluate.every, Duration) else None
        return cls(
            steps(train.save_every), steps(train.validate_every), steps(train.sample_every), steps(train.log_every),
            None if recheck is None else steps(recheck), None if detail is None else steps(detail),
            None if evaluate is None else steps(evaluate), spike.rollback_after.before(curriculum.steps, curriculum.tokens) if spike else 0,
        )  # fmt: skip


def is_due(step: int, interval: int | None) -> bool:
    """Whether an event that happens every `interval` steps happens after `step` steps."""
    return interval is not None and step % interval == 0

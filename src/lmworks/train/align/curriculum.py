"""The steps of a stage that trains on answers, as a `Curriculum` of one phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from lmworks.recipe.schema.dpo import Dpo
from lmworks.recipe.schema.grpo import Grpo
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.read.batch import Batch
from lmworks.train.curriculum import OnePhase, PhaseSettings


class AnswerCurriculum(OnePhase):
    """`rows[step]` rows in each step, which `batch` makes."""

    def __init__(
        self, name: str, recipe: Recipe, options: Dpo | Grpo, rows: Sequence[int], batch: Callable[[int], Batch]
    ) -> None:
        self._rows, self._batch = rows, batch
        self._tokens = [0, *(count * int(options.sequence_length) for count in accumulate(rows))]
        super().__init__(name, recipe, options, len(rows))

    def sequences(self, step: int) -> int:
        return self._rows[step]

    def batch(self, step: int, start: int, stop: int) -> Batch:
        return self._batch(step).sequences(start, stop)

    def tokens_before(self, step: int) -> int:
        return self._tokens[step]

    def sequences_before(self, phase: PhaseSettings, count: int) -> Iterator[Batch]:
        """Nothing: these stages have no elastic weight consolidation."""
        return iter(())

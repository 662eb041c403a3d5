"""The steps of a stage that trains on answers, as a `Curriculum` of one phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from lmworks.optim.schedules import Schedules
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import LrSchedule, Phase
from lmworks.shards.read.batch import Batch
from lmworks.train.curriculum import PhaseSettings


class AnswerCurriculum:
    """`rows[step]` rows of `length` tokens in each step, which `batch` makes; the RoPE is that of the model.

    The expert biases stay as they are: their update rate is 0.
    """

    def __init__(
        self, recipe: Recipe, name: str, rows: Sequence[int], length: int, learning_rate_scale: float, lr_schedule: LrSchedule,
        batch: Callable[[int], Batch],
    ) -> None:  # fmt: skip
        self.steps, self._rows, self._batch = len(rows), rows, batch
        self._tokens = [0, *(count * length for count in accumulate(rows))]
        self.tokens = self._tokens[-1]
        self._phase = PhaseSettings(0, name, 0, length, None, 0.0)
        phase = Phase(
            name=name, tokens=f"{self.tokens} tokens", mixture={"answers": 1.0}, sequence_length="1 tokens", global_batch_size="1 tokens",
            learning_rate_scale=learning_rate_scale, lr_schedule=lr_schedule,
        )  # fmt: skip
        self._schedules = Schedules([phase], [self.steps], self.tokens_before)

    def sequences(self, step: int) -> int:
        return self._rows[step]

    def batch(self, step: int, start: int, stop: int) -> Batch:
        return self._batch(step).sequences(start, stop)

    def lr_factor(self, step: int) -> float:
        return self._schedules.lr_factor(step)

    def phase(self, step: int) -> PhaseSettings:
        return self._phase

    def steady_since(self, step: int) -> int:
        return self._schedules.warmup_end(step)

    def tokens_before(self, step: int) -> int:
        return self._tokens[step]

    def sequences_before(self, phase: PhaseSettings, count: int) -> Iterator[Batch]:
        """Nothing: these stages have no elastic weight consolidation."""
        return iter(())

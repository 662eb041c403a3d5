"""Growth of the batch while a run is active (`batch_ramp.kind: loss`), at the same step on all ranks and once for all.

The first rank decides before a step, from the mean training loss of the last `batch_ramp.window_steps` steps that were applied. The growth
is written to the ledger, all ranks change their order, and the step is trained with the larger batch. A run that resumes before the growth
follows the ledger and decides nothing about the steps up to it; so does one of another layout, whose losses are rounded otherwise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from lmworks.io.run_layout import BASE
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.train import BatchRamp
from lmworks.recipe.timeline import GrowingSteps, Growth
from lmworks.shards.batches import Batches
from lmworks.train.curriculum import PretrainingCurriculum
from lmworks.ui import terminal
from lmworks.watch.batch_growth import growths, kept, skip_of_rollback
from lmworks.watch.ledger import GREW, Ledger, Skips


class BatchGrowth:
    """Decides when the batch of a run grows. `known` are the growths so far: those of the ledger."""

    def __init__(self, ledger: Ledger, batches: Batches, curriculum: PretrainingCurriculum, ranks: Ranks) -> None:
        self._ledger, self._batches, self._curriculum, self._ranks = ledger, batches, curriculum, ranks
        self._phases = batches.recipe.train.phases
        self._losses: deque[float] = deque(maxlen=max(ramp.window_steps for phase in self._phases if (ramp := phase.loss_ramp)))
        self._since = -1  # the first step of the phase and mixture that the losses are of
        self.known: tuple[Growth, ...] = ()
        self.read()

    @classmethod
    def of(cls, ledger: Ledger, batches: Batches | None, curriculum: object, ranks: Ranks) -> BatchGrowth | None:
        """None where no batch grows with the loss."""
        if batches is None or not isinstance(curriculum, PretrainingCurriculum):
            return None
        return cls(ledger, batches, curriculum, ranks) if any(phase.loss_ramp for phase in batches.recipe.train.phases) else None

    def read(self) -> None:
        """Follow the ledger; all ranks call this together."""
        self._follow(self._ranks.first(lambda: growths(self._ledger.read())))

    def observe(self, step: int, loss: float) -> None:
        """Record the training loss of a step that was neither bad nor a spike."""
        since = self._batches.order.mixture_since(step)
        if since != self._since:
            self._since = since
            self._losses.clear()
        self._losses.append(loss)

    def is_due(self, step: int, skips: Skips) -> bool:
        """Whether the batch is to grow before `step`. Never before a step that is fixed by its number already: a growth that the ledger
        knows, a change of the mixture, or data that a rollback skips."""
        return self._grown(step, skips) is not None

    def _grown(self, step: int, skips: Skips) -> int | None:
        """The tokens per step to which the batch grows before `step`; None if it does not."""
        index = self._curriculum.timeline.phase_of(step)
        steps, ramp = self._curriculum.timeline.phases[index], self._phases[index].loss_ramp
        if ramp is None or len(self._losses) < ramp.window_steps or self._since != self._batches.order.mixture_since(step):
            return None
        fixed = [change.step for change in self._batches.changes] + [stop for _, stop in skips.windows]
        if any(one.step >= step for one in self.known) or any(other > step for other in fixed):
            return None
        mean = self._mean(ramp)
        size = max((size for size, loss in ramp.growths if mean <= loss), default=0)
        assert isinstance(steps, GrowingSteps)
        return size if size > steps.sizes[-1][1] * steps.sequence_length else None

    def grow(self, step: int, skips: Skips) -> None:
        """Grow from `step` on, after all ranks have heard that it is due."""
        tokens = self._ranks.first(lambda: self._grown(step, skips))
        assert tokens is not None, "due on the first rank"
        index = self._curriculum.timeline.phase_of(step)
        phase, steps = self._phases[index], self._curriculum.timeline.phases[index]
        assert phase.loss_ramp is not None and isinstance(steps, GrowingSteps)
        before, loss = steps.sizes[-1][1] * steps.sequence_length, self._mean(phase.loss_ramp)
        made = Growth(phase.name, step, tokens)
        self._follow((*self.known, made))
        self._write(made, before=before, loss=loss)
        if self._ranks.is_first:
            terminal.console.print(
                f"step {step:,}: the batch grows from {before:,} to {tokens:,} tokens at a loss of {loss:.3f}; the run now has at most "
                f"{self._curriculum.steps:,} steps", style="dim",
            )  # fmt: skip

    def skip_of_rollback(self, to_step: int, skip: tuple[int, int] | None, skips: Skips) -> tuple[int, int] | None:
        """The steps that a rollback to `to_step` skips; see `lmworks.watch.batch_growth`."""
        return skip_of_rollback(self._phases, self.known, skips.windows, to_step, skip)

    def roll_back(self, to_step: int) -> None:
        """Forget the growths after `to_step`."""
        self._follow(tuple(kept(self.known, to_step)))

    def meta(self) -> dict[str, Any]:
        """For the checkpoint's meta: the state from which a resumed run makes the same decisions."""
        made = [[one.phase, one.step, one.tokens] for one in self.known]
        return {"batch_growth": {"since": self._since, "losses": list(self._losses), "made": made}}

    def load(self, meta: Mapping[str, Any]) -> None:
        """Continue from a checkpoint with this meta. Growths that are missing in the ledger (a lost file) are written to it again."""
        state = meta.get("batch_growth", {"since": -1, "losses": [], "made": []})
        self._since = int(state["since"])
        self._losses.clear()
        self._losses.extend(state["losses"])
        before = [Growth(phase, int(step), int(tokens)) for phase, step, tokens in state["made"] if step <= int(meta["step"])]
        lost = [one for one in before if one not in self.known]
        for one in lost:
            self._write(one)
        self._follow(tuple(sorted((*self.known, *lost), key=lambda one: one.step)))

    def _mean(self, ramp: BatchRamp) -> float:
        return math.fsum(list(self._losses)[-ramp.window_steps :]) / ramp.window_steps

    def _write(self, made: Growth, **about: float) -> None:
        fields: dict[str, Any] = {"stage": BASE.stage, "phase": made.phase, "step": made.step, "tokens_per_step": made.tokens}
        self._ledger.write(GREW, **fields, **about, steps=self._curriculum.steps)

    def _follow(self, known: tuple[Growth, ...]) -> None:
        self.known = known
        self._batches.set_growths(known)
        self._curriculum.follow_order()

"""The policy for bad steps and spikes: a pure function of the steps so far, the rollbacks in the ledger, and the recipe.

The trainer reports each step and carries out the decision. All ranks see the same global values, so all make the same decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.schema.stability import Stability
from lmworks.watch.bad_steps import Arrays, BadSteps
from lmworks.watch.skips import Rollback
from lmworks.watch.spike import Limits, Spikes


@dataclass(frozen=True)
class RollbackRequest:
    """A rollback to the newest good checkpoint of `step` or earlier. If there is none, or no rollback is left, the run ends with the error
    `stop`, or continues if that is None. `skip`: skip the data of the bad steps."""

    step: int
    reason: str
    stop: str | None
    skip: bool = True


class Policy:
    """Decides about each step. `state()` is stored in the checkpoint's meta; the number of rollbacks comes from the ledger."""

    def __init__(self, options: Stability, bad_steps: BadSteps, report: Callable[..., None], rollback_after: int = 0) -> None:
        self.options, self.bad_steps, self.report, self.rollback_after = options, bad_steps, report, rollback_after
        self.spikes = Spikes(options.spike)
        self._spike_began = 0
        self._lowered_at: int | None = None
        self.spike_total = 0

    def limits(self, step: int, since: int) -> Limits:
        """The limits below which the step must stay; see `Spikes.limits`."""
        return self.spikes.limits(step, since)

    def lr_factor(self, step: int) -> float:
        """The factor on the learning rate after a spike with `action: reduce_lr`; 1 otherwise."""
        spike = self.options.spike
        if spike is None or self._lowered_at is None or not 0 < step - self._lowered_at <= spike.reduced_lr_steps:
            return 1.0
        return spike.reduced_lr_factor + (1 - spike.reduced_lr_factor) * (step - self._lowered_at - 1) / spike.reduced_lr_steps

    def observe(
        self, step: int, loss: float, grad_norm: float, limits: Limits, batch: Arrays | Callable[[], Arrays]
    ) -> RollbackRequest | None:
        """Record a step; returns the rollback that it requires, or None. The update of a bad step was not applied."""
        if not self.bad_steps.observe(step, loss, grad_norm, batch):
            if not self.bad_steps.too_many:
                return None
            reason = self.bad_steps.reason(loss)
            advice = f"they changed no weight; {self.bad_steps.where}; lower optimizer.learning_rate or inspect the batches"
            return RollbackRequest(self.bad_steps.first, reason, f"{reason}; {advice}")
        if self.options.spike is None or not self.spikes.observe(step, loss, grad_norm, limits):
            return None
        return self._spiked(step, loss, grad_norm, limits, batch)

    def _spiked(
        self, step: int, loss: float, grad_norm: float, limits: Limits, batch: Arrays | Callable[[], Arrays]
    ) -> RollbackRequest | None:
        assert self.options.spike
        spike, in_a_row = self.options.spike, self.spikes.in_a_row
        self._spike_began = step if in_a_row == 1 else self._spike_began
        self.spike_total += 1
        enough = in_a_row >= spike.max_in_a_row
        action = "rollback" if enough else spike.action
        if action == "rollback" and step < self.rollback_after:
            action = "skip"
        kept = self.bad_steps.save(step, batch)
        self.report(
            "spike", step=step, loss=loss, loss_limit=limits.loss, grad_norm=grad_norm, grad_norm_limit=limits.grad_norm,
            in_a_row=in_a_row, action=action, batch=kept and str(kept),
        )  # fmt: skip
        if action == "reduce_lr":
            self._lowered_at = step
        if action != "rollback":
            if enough:
                self.accept(step)
            return None
        return RollbackRequest(self._spike_began, f"{in_a_row} spike{'s' if in_a_row > 1 else ''} in a row (stability.spike)", None)

    def accept(self, step: int) -> None:
        """Accept the loss after a spike as the new level, where there is no rollback."""
        self.spikes.forget(self.spikes.since)
        self.report("spike_accepted", step=step)

    def may_roll_back(self, history: Sequence[Rollback], first_step: int) -> bool:
        """Whether a phase that began at `first_step` has a rollback left; rollbacks that a user requested do not count."""
        return sum(one.step >= first_step and bool(one.reason) for one in history) < self.options.max_rollbacks

    def give_up(self, step: int, request: RollbackRequest, history: Sequence[Rollback]) -> UserError:
        """The error of a run that cannot continue."""
        self.report("stopped", step=step, reason=request.reason)
        tried = sum(bool(one.reason) for one in history)
        after = f" after {tried} rollback{'s' if tried > 1 else ''}" if tried else ""
        return UserError(f"stopped at step {step}{after}: {request.stop}")

    def window(self, step: int, to_step: int) -> tuple[int, int]:
        """The steps whose data a rollback from `step` to `to_step` skips."""
        return max(to_step, step + 1 - self.options.skip_steps), step + 1

    def state(self) -> dict[str, Any]:
        """For the checkpoint's meta. `streak_began` is read by retention (`lmworks.checkpoint.retention`)."""
        bad, spikes = self.bad_steps, self.spikes
        began = bad.first if bad.in_a_row else self._spike_began if spikes.in_a_row else None
        return {
            "streak_began": began, "bad_in_a_row": bad.in_a_row, "bad_first": bad.first, "spikes": spikes.state(),
            "spike_began": self._spike_began, "spike_total": self.spike_total, "lowered_at": self._lowered_at,
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self.bad_steps.in_a_row, self.bad_steps.first = int(state["bad_in_a_row"]), int(state["bad_first"])
        self._spike_began, self.spike_total, self._lowered_at = int(state["spike_began"]), int(state["spike_total"]), state["lowered_at"]
        self.spikes.load(state["spikes"])

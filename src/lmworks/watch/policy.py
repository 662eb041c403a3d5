"""The policy for bad steps and spikes: a pure function of the steps so far, the rollbacks in the ledger, and the recipe.

The trainer reports each step and carries out the decision. All ranks see the same global values, so all make the same decision.

Bad steps have a loss or gradient norm that is not finite: they are counted, and their batches are saved for replay. The weights are safe
before this code runs: the trainer discards the update on the device (`torch.where`), on all ranks alike.

Spikes have a loss or gradient norm far above those of the last steps, by median and MAD. The limits of a step are computed from the steps
before it. The step compares with them on the device and does not apply its update if it is a spike; the host does not wait.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lmworks.errors import UserError
from lmworks.io.files import atomic_path
from lmworks.recipe.schema.launch import Spike, Stability
from lmworks.ui.terminal import console
from lmworks.watch.ledger import Rollback

if TYPE_CHECKING:
    import numpy as np


Arrays = Mapping[str, "np.ndarray"]


def _ignore(event: str, **fields: object) -> None:
    """The default report: no ledger."""


class BadSteps:
    """Counts bad steps in a row.

    `directory` (run_dir/bad_batches) gets at most `keep` batches over the whole run, as `step-00000012.npz`. Once it is full, no more are
    saved, because the first bad batch of a streak is the most useful one. `in_a_row` and `first` (the first step of the streak) are
    stored in the checkpoint's meta, so that a resumed run makes the same decisions as an uninterrupted one.
    """

    def __init__(self, directory: Path, max_in_a_row: int, keep: int, report: Callable[..., None] = _ignore) -> None:
        self.directory, self.max_in_a_row, self.keep, self.report = Path(directory), max_in_a_row, keep, report
        self.in_a_row, self.first = 0, 0

    def observe(self, step: int, loss: float, grad_norm: float, batch: Arrays | Callable[[], Arrays]) -> bool:
        """Record one step; returns whether it was finite. `batch` (or a function that returns it) is used only if it was not."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_a_row = 0
            return True
        self.first = self.first if self.in_a_row else step
        self.in_a_row += 1
        saved = self.save(step, batch)
        self.report("bad_step", step=step, loss=str(loss), grad_norm=str(grad_norm), in_a_row=self.in_a_row, batch=saved and str(saved))
        return False

    @property
    def too_many(self) -> bool:
        """Whether there were `max_in_a_row` bad steps in a row, so that skipping them is not enough."""
        return self.in_a_row >= self.max_in_a_row

    @staticmethod
    def fault(loss: float) -> str:
        """Why a step is bad."""
        return "the gradient norm was not finite" if math.isfinite(loss) else "the loss was not finite"

    def reason(self, loss: float) -> str:
        """Why the run is rolled back or stopped, once there are too many."""
        return f"{self.fault(loss)} in {self.in_a_row} steps in a row (stability.max_bad_steps)"

    @property
    def where(self) -> str:
        """Where the batches are saved, for messages."""
        return f"the saved batches are in {self.directory}" if self.keep else "no batch was saved (stability.save_bad_batches is 0)"

    def save(self, step: int, batch: Arrays | Callable[[], Arrays]) -> Path | None:
        """Save a batch for replay if fewer than `keep` have been saved; returns its path, or None, also where it cannot be written: a full
        disk is for the next save to judge."""
        import numpy as np  # here: commands that only read a ledger do not wait for it

        path = self.directory / f"step-{step:08d}.npz"
        if not path.exists() and len(list(self.directory.glob("step-*.npz"))) >= self.keep:
            return None
        arrays: dict[str, Any] = dict(batch() if callable(batch) else batch)
        try:
            with atomic_path(path) as aside, open(aside, "wb") as handle:
                np.savez_compressed(handle, **arrays)
                handle.flush()
                os.fsync(handle.fileno())
        except (OSError, UserError) as error:
            console.print(f"the batch of step {step:,} was not saved for replay: {error}", style="yellow")
            return None
        return path


def load_bad_batch(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a saved batch, for replay. Raises `UserError` if the file cannot be read."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged, or not a batch that a run has saved ({type(error).__name__}: {error})") from None


_TINY = 1e-30


@dataclass(frozen=True)
class Limits:
    """The limits of loss and gradient norm; the update of a step is applied if both are below."""

    loss: float = math.inf
    grad_norm: float = math.inf

    def fault(self, loss: float, grad_norm: float) -> str:
        """Why a step is a spike."""
        over = [("loss", loss, self.loss), ("gradient norm", grad_norm, self.grad_norm)]
        found = " and ".join(f"the {what} of {value:.4g} is not below {limit:.4g}" for what, value, limit in over if not value < limit)
        return f"{found} (stability.spike)"


def upper_limit(values: Collection[float], threshold: float, floor: float) -> float:
    """median + max(threshold * MAD, floor). Neither outliers (up to half of the values) nor a slow trend move it much."""
    middle = median(values)
    return middle + max(threshold * median(abs(value - middle) for value in values), floor)


class Spikes:
    """Detects spikes step by step; a pure function of the steps since `since`, up to the length of the window.

    Spikes do not enter the window. Norms are compared by their logarithm, because their noise is multiplicative. With `options` None
    no step is a spike.
    """

    def __init__(self, options: Spike | None) -> None:
        self.options = options
        window = options.window_steps if options else 1
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)
        self.since = -1
        self.in_a_row = 0

    def limits(self, step: int, since: int) -> Limits:
        """The limits of a step. `since`: the first step with the same settings (phase, warm-up and mixture considered); it may lie in the
        future. There are no limits until a quarter of the window is filled."""
        if since != self.since:
            self.forget(since)
        if self.options is None or step < since or len(self._losses) < self.options.window_steps // 4:
            return Limits()
        threshold = self.options.threshold_mads
        norm = upper_limit(self._norms, threshold, math.log(self.options.norm_factor))
        return Limits(upper_limit(self._losses, threshold, self.options.min_rise_nats), math.exp(min(norm, 700.0)))

    def observe(self, step: int, loss: float, grad_norm: float, limits: Limits) -> bool:
        """Record a finite step and its limits; returns whether it was a spike."""
        if not (loss < limits.loss and grad_norm < limits.grad_norm):
            self.in_a_row += 1
            return True
        self.in_a_row = 0
        if step >= self.since:
            self._losses.append(loss)
            self._norms.append(math.log(max(grad_norm, _TINY)))
        return False

    def forget(self, since: int) -> None:
        """Start a new window at a step: another phase, or an accepted level."""
        self.since, self.in_a_row = since, 0
        self._losses.clear()
        self._norms.clear()

    def state(self) -> dict[str, Any]:
        """For the checkpoint's meta."""
        return {"since": self.since, "in_a_row": self.in_a_row, "losses": list(self._losses), "norms": list(self._norms)}

    def load(self, state: dict[str, Any]) -> None:
        self.forget(int(state["since"]))
        self.in_a_row = int(state["in_a_row"])
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])


@dataclass(frozen=True)
class RollbackRequest:
    """A rollback to the newest good checkpoint of `step` or earlier. If there is none, or no rollback is left, the run ends with the error
    `stop`, or continues if that is None. `skip`: skip the data of the bad steps. `to_step`: the step of the checkpoint, if it is known.
    `reason`: empty if a user requested it."""

    step: int
    reason: str
    stop: str | None
    skip: bool = True
    to_step: int | None = None


class Policy:
    """Decides about each step. `fault` says why the last one was bad, or a spike, and is empty for a sound one. `state()` is stored in the
    checkpoint's meta; the number of rollbacks comes from the ledger."""

    def __init__(self, options: Stability, bad_steps: BadSteps, report: Callable[..., None], rollback_after: int = 0) -> None:
        self.options, self.bad_steps, self.report, self.rollback_after = options, bad_steps, report, rollback_after
        self.spikes = Spikes(options.spike)
        self._spike_began = 0
        self._lowered_at: int | None = None
        self.spike_total = 0
        self.fault = ""

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
        self.fault = ""
        if not self.bad_steps.observe(step, loss, grad_norm, batch):
            self.fault = self.bad_steps.fault(loss)
            if not self.bad_steps.too_many:
                return None
            reason = self.bad_steps.reason(loss)
            advice = f"such updates change no weight; {self.bad_steps.where}; lower optimizer.learning_rate or inspect the batches"
            return RollbackRequest(self.bad_steps.first, reason, f"{reason}; {advice}")
        if self.options.spike is None or not self.spikes.observe(step, loss, grad_norm, limits):
            return None
        self.fault = limits.fault(loss, grad_norm)
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
        return UserError(f"stopped at step {step + 1}{after}: {request.stop}")

    def window(self, step: int, to_step: int) -> tuple[int, int]:
        """The steps whose data a rollback from `step` to `to_step` skips."""
        return max(to_step, step + 1 - self.options.skip_steps), step + 1

    @property
    def last_sound(self) -> bool:
        """Whether the last step was neither bad nor a spike that is not accepted."""
        return not self.bad_steps.in_a_row and not self.spikes.in_a_row

    def state(self) -> dict[str, Any]:
        """For the checkpoint's meta. `streak_began` is read by retention (`lmworks.checkpoint.listing`)."""
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

"""What changes at the boundary between two phases: the model in force (`lmworks.recipe.derivation.phases`), the penalty of `ewc`."""

from __future__ import annotations

from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.errors import UserError
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.train import Ewc
from lmworks.train.curriculum import Curriculum, PhaseSettings
from lmworks.train.ewc import EwcPenalty
from lmworks.train.faults.handler import FaultHandler
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.ledger import Ledger


class PhaseBoundary:
    """The phase that is being trained (`phase`, None before the first step) and its penalty (`penalty`, None without `ewc`)."""

    def __init__(
        self, stage: str, model: ParallelModel, curriculum: Curriculum, checkpoints: Checkpoints, ledger: Ledger, heartbeat: Heartbeat,
        faults: FaultHandler,
    ) -> None:  # fmt: skip
        self.phase: PhaseSettings | None = None
        self.penalty: EwcPenalty | None = None
        self._stage, self._model, self._curriculum = stage, model, curriculum
        self._checkpoints, self._ledger, self._heartbeat, self._faults = checkpoints, ledger, heartbeat, faults
        self._kept = True  # whether the penalty is on the disk

    def enter(self, phase: PhaseSettings, step: int, saved: int, loss_scale: float) -> None:
        """Apply the settings of a phase before its `step`; weights and optimizer state are left unchanged.

        `saved` is the step of the checkpoint that the run was resumed from, or of the newest since.
        """
        self._kept = True
        self.penalty = None if phase.ewc is None else self._ewc_penalty(phase, phase.ewc, step, saved, loss_scale)
        if phase.model is not None:
            self._model.configure(phase.model)
        if step == phase.first_step or self.phase is not None:
            self._ledger.write("phase", stage=self._stage, phase=phase.name, step=step, sequence_length=phase.sequence_length)
        self.phase = phase

    def _ewc_penalty(self, phase: PhaseSettings, options: Ewc, step: int, saved: int, loss_scale: float) -> EwcPenalty:
        """The penalty of a phase: estimated at the weights that the phase begins with, or loaded where the run resumes inside it."""
        penalty = EwcPenalty(self._model, options)
        if saved > phase.first_step:
            penalty.load(self._checkpoints, phase.name, phase.first_step)
            return penalty
        before = self._curriculum.phase(max(phase.first_step, 1) - 1)
        if before.model is not None and phase.first_step:  # weights of start_from already have their own
            self._model.configure(before.model)
        self._heartbeat.beat(step, "ewc")
        penalty.estimate(self._curriculum.sequences_before(phase, options.sequences), loss_scale)
        self._kept = False
        try:
            penalty.save(self._checkpoints, phase.name, phase.first_step)
        except UserError as error:  # on all ranks alike
            self._faults.save_failed(step, error)
        else:
            self._kept = True
        self._ledger.write("ewc", stage=self._stage, phase=phase.name, step=step, sequences=options.sequences)
        return penalty

    def keep_penalty(self) -> None:
        """Save the penalty of the phase, if that failed when it began; all ranks call it together. Raises `UserError` if it fails again: a
        checkpoint inside the phase cannot be resumed from without it."""
        if self._kept:
            return
        assert self.phase is not None and self.penalty is not None
        self.penalty.save(self._checkpoints, self.phase.name, self.phase.first_step)
        self._kept = True

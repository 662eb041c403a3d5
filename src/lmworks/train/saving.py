"""What a stage of training saves, and when: its state, its files, the intervals of its work in steps, and the saver.

`TrainingState` has the tensors: model, optimizer, averaged weights, expert counts, loss scale. `StageFiles` are what a stage writes:
checkpoints, metrics, samples, bad batches, and lines in the run's ledger. `Intervals` says how often it saves, validates, samples and logs.
`Saver` saves at intervals, asynchronously, and handles saves that fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.checkpoint.run_bundle import run_files_of
from lmworks.errors import UserError
from lmworks.io.run_layout import ModelStage
from lmworks.optim.clip import LossScaler
from lmworks.optim.groups import local
from lmworks.optim.optimizer import Updates
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.changes import as_tree
from lmworks.recipe.schema.artifacts import save_interval
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Duration
from lmworks.train.curriculum import Curriculum, PhaseSettings
from lmworks.train.fault_handler import FaultHandler
from lmworks.train.observe.sampling import Sampler
from lmworks.train.step import StepResult
from lmworks.watch.ledger import LEDGER, Ledger, NoLedger
from lmworks.watch.periodic import PeriodicDiagnosis
from lmworks.watch.policy import BadSteps


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
            return interval.interval(curriculum.planned_steps, curriculum.tokens)

        train, spike = recipe.train, recipe.stability.spike
        recheck, detail = recipe.stability.recheck_every, recipe.metrics.detail_every
        evaluate = recipe.evaluate.every if isinstance(recipe.evaluate.every, Duration) else None
        return cls(
            steps(train.save_every), steps(train.validate_every), steps(train.sample_every), steps(train.log_every),
            None if recheck is None else steps(recheck), None if detail is None else steps(detail),
            None if evaluate is None else steps(evaluate),
            spike.rollback_after.before(curriculum.planned_steps, curriculum.tokens) if spike else 0,
        )  # fmt: skip


def is_due(step: int, interval: int | None) -> bool:
    """Whether an event that happens every `interval` steps happens after `step` steps."""
    return interval is not None and step % interval == 0


class TrainingState:
    """Everything that a later step depends on, and that a checkpoint therefore holds. `scaler` is the loss scale of fp16, else None.

    `OPTIONAL` are the kinds of tensors that a resumed run may switch on: checkpoints from before do not have them.
    """

    OPTIONAL = ("average", "scaler")

    def __init__(self, recipe: Recipe, model: ParallelModel, optimizer: Updates) -> None:
        self._model, self.optimizer = model, optimizer
        self.scaler = LossScaler(device=model.device) if recipe.train.precision == "fp16" else None
        moe, moe_layers = model.config.moe, model.num_moe_layers
        self._expert_counts: torch.Tensor | None = None
        if moe and moe_layers:
            self._expert_counts = torch.zeros(moe_layers, moe.n_routed_experts, dtype=torch.float64, device=model.device)

    @property
    def loss_scale(self) -> float:
        """The current scale of the loss; 1 without a scaler."""
        return 1.0 if self.scaler is None else float(self.scaler.scale)

    def tensors(self, values: bool = True) -> dict[str, Any]:
        """The live tensors by kind and name; with `values` False, places to load a checkpoint into."""
        optimizer = self.optimizer.state_dict(values)
        state: dict[str, Any] = {
            "model": self._model.state_dict(values),
            "optimizer": {key: tensor for key, tensor in optimizer.items() if not key.startswith("average.")},
        }
        if self.optimizer.ema is not None:  # separate, since readers of the finished model load it without the optimizer
            state["average"] = dict(self.optimizer.ema.average)
        if self._expert_counts is not None:
            state["experts"] = {"counts": self._expert_counts}
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def loaded(self, state: dict[str, Any]) -> None:
        """Use the `tensors` that were loaded. What the checkpoint does not have begins as in a run that starts from its weights."""
        self._model.state_loaded(state)
        if self.optimizer.ema is not None and "average" not in state:
            self.optimizer.ema.restart()
        if self.scaler is not None and "scaler" not in state:
            self.scaler.restart()

    def add_expert_counts(self, result: StepResult) -> None:
        """Add the tokens per expert of a step whose update was applied. On the device: the host does not wait."""
        if result.counts_LE is not None and self._expert_counts is not None:
            self._expert_counts += torch.where(result.applied, result.counts_LE.double(), 0.0)


@dataclass
class StageFiles:
    """The files of a stage. `folder` gets its metrics."""

    folder: Path
    checkpoints: Checkpoints
    ledger: Ledger
    bad_steps: BadSteps
    sampler: Sampler


@contextmanager
def open_stage(
    recipe: Recipe, run_dir: Path, stage: ModelStage, ranks: Ranks, identity: dict[str, Any], total_tokens: int,
    make_sampler: Callable[[Path | None], Sampler], use_best: bool = False,
) -> Iterator[StageFiles]:  # fmt: skip
    """Open the files of a stage; ranks other than the first write checkpoints only. `identity` is that of the checkpoints, `make_sampler`
    gets the file of the samples, and with `use_best` the best checkpoint is kept, since the stage ends with it."""
    folder, saved = stage.place(run_dir), run_dir / stage.checkpoints
    options, stability = recipe.checkpoints.of(stage.checkpoints), recipe.stability
    if use_best:
        options = options.model_copy(update={"keep_best": True})
    with (
        Ledger(run_dir / LEDGER, patient=True) if ranks.is_first else NoLedger() as ledger,
        Checkpoints(
            saved, options, identity, report=partial(ledger.write, stage=stage.stage), recipe=as_tree(recipe), total_tokens=total_tokens,
            run_files=lambda: run_files_of(run_dir, saved),
        ) as checkpoints,
        PeriodicDiagnosis(run_dir, stage.stage, recipe.metrics.diagnose_every if ranks.is_first else None, ledger.write),
    ):  # fmt: skip
        keep = stability.save_bad_batches if ranks.is_first else 0
        bad_steps = BadSteps(folder / "bad_batches", stability.max_bad_steps, keep, partial(ledger.write, stage=stage.stage))
        yield StageFiles(folder, checkpoints, ledger, bad_steps, make_sampler(folder / "samples.jsonl" if ranks.is_first else None))


class Saver:
    """The saves of a stage. `saved` is the step of the newest checkpoint; -1 after an asynchronous save has failed."""

    def __init__(self, recipe: Recipe, checkpoints: Checkpoints, faults: FaultHandler, interval: int, ranks: int) -> None:
        self.saved = 0
        self._ranks = ranks
        self._pause: float | None = None
        self._checkpoints, self._faults, self._interval = checkpoints, faults, interval
        self._asynchronous, self._every_seconds = recipe.checkpoints.asynchronous, recipe.train.save_every_time
        self._in_progress = False  # an asynchronous save whose outcome is not known yet
        self._saved_at = self._began_at = time.monotonic()
        self._began = 0

    def start_timer(self, step: int) -> None:
        """Begin to count the time since the last save, and the time of the steps from `step` on."""
        self._saved_at = self._began_at = time.monotonic()
        self._began = step

    def every(self, interval: int) -> None:
        """Save every `interval` steps from now on."""
        self._interval = interval

    def step_seconds(self, step: int) -> float:
        """Seconds per step so far, with everything that is done between steps."""
        return (time.monotonic() - self._began_at) / max(1, step - self._began)

    def paused(self, seconds: float) -> None:
        """Note how long training stood still for a save."""
        self._pause = seconds

    @property
    def every_seconds(self) -> float:
        """`train.save_every_time`, or what follows from the last save and the expected failures (`save_interval`)."""
        return save_interval(self._pause, self._ranks) if self._every_seconds is None else float(self._every_seconds)

    def begin_phase(self, phase: PhaseSettings) -> None:
        self._faults.saves.every = phase.save_every or self._interval

    def is_due(self, step: int, phase: PhaseSettings | None) -> bool:
        """Whether a checkpoint is to be saved after `step` steps."""
        if phase is None or phase.save_every is None:
            return is_due(step, self._interval)
        return is_due(step - phase.first_step, phase.save_every)

    def is_due_by_time(self) -> bool:
        """Whether `every_seconds` have passed since the last save, by the clock of this rank."""
        return time.monotonic() - self._saved_at > self.every_seconds

    def retry_due(self, step: int) -> bool:
        """Whether a save that failed is to be tried again after `step` steps: not while the outcome of a later one is not known."""
        return not self._in_progress and self._faults.saves.retry_due(step)

    def save(
        self, step: int, state: Mapping[str, Any], meta: dict[str, Any], metric: float | None, wait: bool, before: Callable[[], None]
    ) -> UserError | None:
        """Save after `step` steps; returns why it failed, on all ranks alike. With `wait` the save has ended when this returns, and the
        caller decides about a failure; otherwise `FaultHandler` does. `metric` was measured on these weights, for the choice of the best
        checkpoint. `before` is run first, by all ranks; where it fails, the save has failed."""
        failure = None
        try:
            before()
            self._checkpoints.save(step, dict(state), meta, metric=metric, wait=wait)
        except UserError as error:
            failure = error
            if not wait:
                self._faults.save_failed(step, error)
        else:
            self.saved, self._in_progress = step, True
            if wait or not self._asynchronous:
                self.wait(step)
        self._saved_at = time.monotonic()
        return failure

    def wait(self, step: int) -> None:
        """Wait for the asynchronous save, if there is one, and report its outcome."""
        try:
            self._checkpoints.wait()
        except UserError as error:
            self.saved = -1
            self._faults.save_failed(step, error)
        else:
            if self._in_progress:
                self._faults.saves.succeeded()
        self._in_progress = False


def refuse_if_all_damaged(checkpoints: Checkpoints) -> None:
    """Raise `UserError` if checkpoints were set aside as damaged and no good one is left: training would silently start over."""
    directory = checkpoints.directory
    bad = [path.name for path in sorted(directory.glob("step-*.bad-*"), reverse=True)]
    if bad:
        reason = f" (the newest: {checkpoints.refused[0][1]})" if checkpoints.refused else ""
        raise UserError(
            f"no checkpoint in {directory} is good, and {len(bad)} were set aside as damaged{reason}: {', '.join(bad[:3])}; "
            "restore one from a copy, or delete that folder to train from the start"
        )


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements that this rank holds are numbers. The host waits once for each device that they are on."""
    flags: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        flags.setdefault(tensor.device, []).append(local(tensor).isfinite().all())
    return all(bool(torch.stack(of_device).all()) for of_device in flags.values())

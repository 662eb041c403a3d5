"""The training loop.

Data, phases and learning rates come from the `Curriculum`, which also knows what changes between phases. Each other subject has a file of
its own: what a step computes (`step.py`), saving (`saving.py`), validation and early stopping (`validation.py`), metrics
(`observe/step_metrics.py`), bad steps and rollbacks (`step_inspector.py`, `fault_handler.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lmworks.errors import UserError
from lmworks.host.counters import process_identity
from lmworks.host.machine import keep_freed_memory
from lmworks.io import jsonl
from lmworks.io.run_layout import USED, ModelStage
from lmworks.metrics.log import FILE as METRICS
from lmworks.metrics.log import MetricLog, NoMetrics
from lmworks.metrics.names import ELAPSED, describe
from lmworks.model import linear_kernels
from lmworks.optim.optimizer import Updates
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import is_compiled
from lmworks.recipe.schema.model import SECTIONS
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import EarlyStopping as EarlyStoppingOptions
from lmworks.recipe.weights import ARCHITECTURE, recorded
from lmworks.shards.batch import Batch
from lmworks.shards.batches import Batches, Prefetch
from lmworks.train.batch_growth import BatchGrowth
from lmworks.train.curriculum import Curriculum, PhaseBoundary
from lmworks.train.data.mixture import MixtureUpdates
from lmworks.train.ewc import EwcPenalty
from lmworks.train.fault_handler import FaultHandler
from lmworks.train.observe.detail_lines import DetailLines
from lmworks.train.observe.layer_statistics import LayerStatistics
from lmworks.train.observe.step_metrics import FlopsPerToken, StepMetrics, attention_metrics, source_metrics
from lmworks.train.observe.trained_rows import StepRecord, combined, row_hashes
from lmworks.train.saving import Intervals, Saver, StageFiles, TrainingState, all_finite, is_due, refuse_if_all_damaged
from lmworks.train.step import (
    Objective,
    StepFlags,
    StepResult,
    StepValues,
    Trained,
    all_reduce_flags,
    micro_batch_of,
    seed_dropout,
    train_step,
)
from lmworks.train.step_inspector import FirstNonFinite, StepInspector
from lmworks.train.validation import Validator
from lmworks.ui import terminal
from lmworks.ui.terminal import Interrupted, Preempted
from lmworks.watch.batch_growth import describe as describe_growth
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.policy import Limits, RollbackRequest
from lmworks.watch.stop_signals import Stop, graceful_stop

_LOOK_EVERY = 0.5  # seconds, for a request to stop while a save waits for room
_LOSSES = ("train/loss", "validation/loss")  # of the objective, where a stage has one
_NEXT_TOKEN = ("train/perplexity", "train/z_loss", "train/mtp_loss")  # metrics that mean nothing with another objective


@dataclass
class StageSetup:
    """What a stage trains.

    curriculum: its batches, phases and learning rates.
    validate: returns metrics after so many steps and leaves the model unchanged; `validation/bits_per_byte` or `validation/loss` decides
        which checkpoint is best.
    objective: what a step computes where that is not the loss of the next token. A step then makes the updates of the objective, the
        curriculum's batches are not trained on, and there are no limits for spikes.
    use_best: whether the stage ends with the best weights instead of the last.
    evaluate: returns metrics `eval/...`, every `evaluate.every`.
    batches: the token files, if their mixture may be changed during training.
    meta: added to that of each checkpoint.
    prepare: called before the first step, with the trainer as it was resumed; raises `UserError` if that does not fit.
    """

    curriculum: Curriculum
    validate: Callable[[int], dict[str, float]]
    objective: Objective | None = None
    early_stopping: EarlyStoppingOptions | None = None
    use_best: bool = False
    evaluate: Callable[[], dict[str, float]] | None = None
    batches: Batches | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Trainer], None] = lambda trainer: None


class Trainer:
    """Trains the curriculum of a stage from the newest good checkpoint to its end. `step` is the next to train, `saved` that of the newest
    checkpoint, and `resumed_meta` the meta of the one that was resumed from."""

    def __init__(
        self, recipe: Recipe, model: ParallelModel, optimizer: Updates, setup: StageSetup, files: StageFiles, stage: ModelStage,
        flops_per_token: FlopsPerToken, heartbeat: Heartbeat, resume_command: str = "",
    ) -> None:  # fmt: skip
        self.recipe, self.model, self.optimizer, self.setup, self.files = recipe, model, optimizer, setup, files
        self.stage, self.heartbeat, self.resume_command = stage.stage, heartbeat, resume_command
        self.curriculum, self.objective = setup.curriculum, setup.objective
        self.mixture = None if setup.batches is None else MixtureUpdates(files.ledger, setup.batches, model.ranks)
        self.step = 0
        self.resumed_meta: dict[str, Any] = {}
        self._lr_factor = 0.0  # of the last step
        self._objective_tokens = 0  # that the last step trained on
        self._intervals = Intervals.of(recipe, self.curriculum)
        self._state = TrainingState(recipe, model, optimizer)
        self._faults = FaultHandler(
            recipe.stability, files.bad_steps, files.checkpoints, files.ledger,
            stage=self.stage, save_every=self._intervals.save, rollback_after=self._intervals.rollback_after,
            cached=recipe.shards.cache is not None,
        )  # fmt: skip
        self._inspector = StepInspector(recipe, model, self._state, self._faults, heartbeat, self._intervals.recheck)
        self._boundary = PhaseBoundary(self.stage, model, self.curriculum, files.checkpoints, files.ledger, heartbeat, self._faults)
        self._saver = Saver(recipe, files.checkpoints, self._faults, self._intervals.save, model.ranks.world)
        self.growth = BatchGrowth.of(files.ledger, setup.batches, self.curriculum, model.ranks)
        self._validator = Validator(
            setup.validate, model, self.curriculum, files.ledger, stage=self.stage, keep_best=recipe.checkpoints.keep_best,
            early_stopping=setup.early_stopping, use_best=setup.use_best,
        )  # fmt: skip
        self._details = DetailLines(recipe.train.deepspeed is None)
        self._record = StepRecord(self.stage, files.ledger.write)
        self._metrics = StepMetrics(
            recipe, model, optimizer, self.curriculum, self._state, self._boundary, self._faults, self._record.rows, flops_per_token
        )  # fmt: skip

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        return self._saver.saved

    @property
    def penalty(self) -> EwcPenalty | None:
        """The penalty of the phase that is being trained (`ewc`)."""
        return self._boundary.penalty

    def run(self) -> None:
        """Train to the end of the curriculum, and write metrics. Raises `Interrupted` after saving when asked to stop."""
        with self.metric_log():
            self._run()

    @contextmanager
    def metric_log(self) -> Iterator[MetricLog]:
        """The log of the stage, from the step on from which it is trained."""
        log = (self.files.folder, self.recipe.metrics, self._saver.saved + 1, self.heartbeat.directory)
        with MetricLog(*log) if self.model.ranks.is_first else NoMetrics() as self._log:
            yield self._log

    def measure_at(self, step: int) -> None:
        """Save and validate after `step` steps, and do nothing else besides the steps before: for a profile, before `run`."""
        self._intervals = replace(self._intervals, save=step, validate=step, log=1, sample=2 * self.curriculum.steps + 1, evaluate=None)
        self._saver.every(step)

    def _begin_step(self) -> None:
        """Seed the dropout of a step, and set the temperature of its routers and the share of its QK norm."""
        seed_dropout(self.recipe.training_seed, self.step, self.model.ranks.global_rank, self.model.device)
        assert self._boundary.phase is not None
        self._boundary.phase.begin_step(self.model, self.step)

    def _micro_batch(self, batch: Batch) -> int:
        return micro_batch_of(self.recipe, batch.tokens.shape[1], self.model.pipeline is not None)

    def _run(self) -> None:
        self._start()
        total, done = self.curriculum.tokens, self.curriculum.tokens_before(self.step)
        patience = float(self.recipe.stability.data_timeout)
        with graceful_stop() as stop, terminal.bar(self.stage, total, done) as bar:
            while not self._done:
                end = self._faults.skips.until(self.step, self.curriculum.steps)
                with Prefetch(self._rank_batch, self.step, end, patience=patience) as batches:
                    grows = self._train_until(end, batches, stop, bar)
                if grows and self.growth is not None:  # now that nothing is read ahead with the smaller batch
                    self.growth.grow(self.step, self._faults.skips)
                if self._validator.stops:
                    break
                self._advance(self._next(self.step), bar)
            if self.step != self._saver.saved:  # the last steps were skipped
                if self._boundary.phase is None:  # all that were left: the model has the RoPE of the recipe's beginning, not its weights'
                    self._enter_phase(max(self._saver.saved, 1) - 1)
                self._observe(None, 0, {}, (), bar)
                self._save_last(stop)
            self._stop_if_requested(self._reduce_flags(stop), stop)
        self.files.ledger.write("finish", stage=self.stage, step=self.step, tokens=total)

    def _train_until(self, end: int, batches: Prefetch, stop: Stop, bar: terminal.Bar) -> bool:
        """Train to step `end`, or until the run is rolled back or ends early, or the batch is to grow before the next step: then this
        returns True."""
        while self.step < end and not self._done:
            began = time.monotonic()
            self._enter_phase(self.step)
            self.heartbeat.beat(self.step, "data")
            batch = next(batches)
            own, saved = time.monotonic() - began, self._metrics.clock.save
            hashes = row_hashes(batch) if self.objective is None else []  # an objective makes rows of its own
            flags = self._reduce_flags(stop, batch.valid_tokens, combined(hashes), batch.tokens_by_source)
            self._act_on(flags, batches, stop)
            if flags.batch_grows and not flags.mixture_changed:
                return True
            spikes = self._faults.policy.spike_total
            found, batch, rollback, statistics = self._train_step(batch, flags.valid_tokens, flags.detail)
            if self._faults.policy.bad_steps.in_a_row or self._faults.policy.spike_total > spikes:
                self._details.event()
            if rollback is not None and self._roll_back(rollback, bar):
                return False
            if self.growth is not None and self._faults.policy.last_sound:
                self.growth.observe(self.step, found.loss)
            self._record.add(self.step, hashes, flags.rows, found.loss, self._metrics.learning_rate(self._lr_factor))
            planned = self._advance(self.step + 1, bar)
            tokens = planned if self.objective is None else self._objective_tokens
            seconds = time.monotonic() - began - (self._metrics.clock.save - saved)
            self._metrics.add_step(
                seconds=seconds, own=own, data_wait=batches.waited, tokens=tokens, sequence_length=batch.tokens.shape[1]
            )  # fmt: skip
            self._details.step(seconds)
            self._faults.observe_data_wait(self.step, batches.waited, seconds)
            self._observe(found, batch.tokens.shape[1], statistics, flags.sources, bar)
            if self._done:
                self._save_last(stop)
            elif self._validator.is_best(self.step) or self._saver.is_due(self.step, self._boundary.phase):
                self._save(wait=False)
        return False

    def _train_step(
        self, batch: Batch, valid_tokens: int, detail: bool
    ) -> tuple[StepValues, Batch, RollbackRequest | None, dict[str, float]]:
        """Train one step: what it has found, the rows that this rank trained on, the rollback that it calls for, and the statistics of its
        layers where they are due, or asked for by `detail`."""
        phase = self._boundary.phase
        assert phase is not None
        self._begin_step()
        limits = Limits() if self.objective else self._faults.policy.limits(self.step, self.curriculum.steady_since(self.step))
        self._lr_factor = self.curriculum.lr_factor(self.step) * self._faults.policy.lr_factor(self.step)
        self.heartbeat.beat(self.step, "update")
        began, whole = time.monotonic(), is_due(self.step + 1, self._intervals.detail)
        layers = LayerStatistics(self.model, whole) if whole or detail else None
        spent = time.monotonic() - began
        watched = FirstNonFinite(self.model.parts) if self.recipe.stability.detect_anomaly else None
        with watched or nullcontext():
            if self.objective is None:
                rows = self.curriculum.sequences(self.step)
                result = self._update(batch, sequences=rows, valid_tokens=valid_tokens, limits=limits)
                updates = [Trained(batch, rows, max(valid_tokens, 1), partial(self.curriculum.batch, self.step, 0, rows))]
            else:
                result, updates = self._optimize(self.objective)
                batch = updates[-1].batch
        statistics: dict[str, float] = {}
        if layers is not None:
            began = time.monotonic()
            statistics = layers.metrics(batch)  # now: what follows may drop the gradients
            self._details.taken(spent + time.monotonic() - began, asked=whole)
        self._state.add_expert_counts(result)
        found = self._metrics.read(result, for_line=self._may_end_in_a_line(self.step + 1))
        if layers is not None:
            statistics |= attention_metrics(self.model.config, 0.0, found, heads=True)
        first = None if watched is None else watched.found
        rollback = self._inspector.inspect(self.step, found, updates, limits, first)
        if rollback is None and self.objective is None:
            rollback = self._inspector.recheck(self.step, batch)
        return found, batch, rollback, statistics

    def _may_end_in_a_line(self, step: int) -> bool:
        """Whether a metrics line may follow after `step` steps: where one is due, and where the stage ends or a validation may end it."""
        return step >= self.curriculum.steps or is_due(step, self._intervals.log) or is_due(step, self._intervals.validate)

    def _update(self, batch: Batch, **options: Any) -> StepResult:
        assert self._boundary.phase is not None
        return train_step(
            self.model, self.optimizer, batch,
            micro_batch_size=self._micro_batch(batch), lr_factor=self._lr_factor, max_grad_norm=self.recipe.optimizer.max_grad_norm,
            bias_update_rate=self._boundary.phase.bias_update_rate, scaler=self._state.scaler, penalty=self._boundary.penalty, **options,
        )  # fmt: skip

    def _optimize(self, objective: Objective) -> tuple[StepResult, list[Trained]]:
        """Make the updates of a step: the last one's result, applied only if all were, with the mean loss and the largest gradient norm.

        Updates after one that is not finite change nothing. The device sees to that: to leave them out, the host would have to wait for
        each."""
        results: list[StepResult] = []
        updates: list[Trained] = []
        self._objective_tokens = 0
        for update in objective.updates(self.step):
            whole, rows = update.batch, len(update.batch.tokens)
            own = whole.rows(*self.model.rank_sequences(rows))
            updates.append(Trained(own, rows, update.normalizer, whole))
            self._objective_tokens += whole.tokens.size
            done = self._update(
                own, sequences=rows, valid_tokens=whole.valid_tokens, normalizer=update.normalizer,
                allowed=results[-1].applied if results else None,
            )  # fmt: skip
            loss = done.loss.new_full((), float(update.loss))  # the objective is computed on the CPU: nothing is waited for
            results.append(replace(done, loss=torch.where(torch.isfinite(done.loss), loss, done.loss)))
        assert results, "a step has at least one update"
        loss, norm, applied = (
            torch.stack([getattr(one, name) for one in results]).float() for name in ("loss", "grad_norm", "applied")
        )  # fmt: skip
        return replace(
            results[-1], loss=loss.mean(), grad_norm=norm.amax(), applied=applied.bool().all(), updates=applied.sum(),
            valid_tokens=sum(one.valid_tokens for one in results),
        ), updates  # fmt: skip

    def _observe(
        self, found: StepValues | None, length: int, values: dict[str, float], tokens_by_source: Sequence[int], bar: terminal.Bar
    ) -> None:
        """Validate, evaluate, write metrics and samples, each when it is due. `found` is of the last step, with sequences of `length`
        tokens, or None if it was skipped. `values` are the metrics that the step has so far, and `tokens_by_source` the valid tokens of
        each source of the whole step."""
        if self._done or is_due(self.step, self._intervals.validate):
            self.heartbeat.beat(self.step, "validation")
            values |= self._validator.run(self.step, self.optimizer.ema)
        done = self._done  # the validation may have ended the stage
        if self.setup.evaluate is not None and self._intervals.evaluate and (done or is_due(self.step, self._intervals.evaluate)):
            self.heartbeat.beat(self.step, "evaluation")
            began = time.monotonic()
            with self.model.ema_weights(self.optimizer.ema):
                values |= self.setup.evaluate()
            values["perf/evaluation_seconds"] = time.monotonic() - began
        self._metrics.clock.measuring += values.get("perf/validation_seconds", 0.0) + values.get("perf/evaluation_seconds", 0.0)
        if found is not None and (done or is_due(self.step, self._intervals.log)):
            values |= self._metrics.line(self.step, found, length, self._lr_factor, self._inspector.bad_steps)
            values |= source_metrics(self.curriculum.sources, tokens_by_source, found)
            if self.objective is not None:
                values = {name: value for name, value in values.items() if name not in _NEXT_TOKEN} | self.objective.metrics()
        if values:
            self._log.write(self.step, values)
        bar.note(self._note(None if found is None else found.loss, values))
        sound = found is None or math.isfinite(found.loss)
        if sound and (done or is_due(self.step, self._intervals.sample)) and self.model.whole is not None:
            self.heartbeat.beat(self.step, "samples")
            began = time.monotonic()
            with self.model.ema_weights(self.optimizer.ema):
                self.files.sampler.write(self.model.whole, self.step)
            self._metrics.clock.measuring += time.monotonic() - began

    @property
    def _done(self) -> bool:
        """Whether nothing is left to train."""
        return self.step >= self.curriculum.steps or self._validator.stops

    def _rank_batch(self, step: int) -> Batch:
        """The sequences of a step that this rank reads."""
        return self.curriculum.batch(step, *self.model.rank_sequences(self.curriculum.sequences(step)))

    def _next(self, step: int) -> int:
        """The first step from `step` on that is trained, or the end: a window may reach beyond it."""
        return min(self._faults.skips.next(step), max(step, self.curriculum.steps))

    def _enter_phase(self, step: int) -> None:
        """Enter the phase that contains a step."""
        phase = self.curriculum.phase(step)
        if phase != self._boundary.phase:
            self._saver.begin_phase(phase)
            self._details.event()
            self._boundary.enter(phase, self.step, self._saver.saved, self._state.loss_scale)

    def _reduce_flags(self, stop: Stop, valid_tokens: int = 0, rows: int = 0, sources: tuple[int, ...] = ()) -> StepFlags:
        changed = self.mixture is not None and self.mixture.has_pending()
        failed, save_due = self.files.checkpoints.failed, self._saver.is_due_by_time()
        detail = self._details.due(self.step + 1, self.curriculum.steps)
        grows = self.growth is not None and self.step < self.curriculum.steps and self.growth.is_due(self.step, self._faults.skips)
        own = StepFlags(valid_tokens, rows, stop.requested, stop.preempted, save_due, failed, changed, detail, grows, sources)
        return all_reduce_flags(own, self.model.ranks)

    def _act_on(self, flags: StepFlags, batches: Prefetch, stop: Stop) -> None:
        """Save, stop and change the mixture, as the flags of all ranks say."""
        if flags.save_failed:
            self._saver.wait(self.step)
        if flags.save_due or self._saver.retry_due(self.step):
            self._save(wait=False)
        self._stop_if_requested(flags, stop)
        if flags.mixture_changed and self.mixture is not None:
            self.mixture.apply_pending(self.step + batches.ahead)

    def _stop_if_requested(self, flags: StepFlags, stop: Stop) -> None:
        """Save and raise `Interrupted` or `Preempted`, if a signal has asked to stop."""
        if not flags.stop:
            return
        self._saver.wait(self.step)
        if self.step != self._saver.saved and (failure := self._save(wait=True)) is not None:
            raise failure
        raise (Preempted if flags.preempted else Interrupted)(stop.message(self._saver.saved, self.resume_command))

    def _advance(self, step: int, bar: terminal.Bar) -> int:
        """Make `step` the next to train; returns the tokens between."""
        tokens = self.curriculum.tokens_before(step) - self.curriculum.tokens_before(self.step)
        self.step = step
        bar.advance(tokens)
        return tokens

    def _save_last(self, stop: Stop) -> None:
        """Save where nothing is left to train. If that fails, as on a full disk, it is tried again like any other save
        (`stability.max_failed_saves`); what was trained is lost otherwise."""
        while (failure := self._save(wait=True)) is not None:
            seconds = self._faults.last_save_failed(self.step, failure, self._saver.step_seconds(self.step))
            began = time.monotonic()
            while True:
                due = time.monotonic() - began >= seconds
                flags = StepFlags(0, 0, stop.requested, stop.preempted, due, save_failed=False, mixture_changed=False)
                flags = all_reduce_flags(flags, self.model.ranks)
                if flags.stop:
                    raise failure
                if flags.save_due:
                    break
                self.heartbeat.beat(self.step, "waiting to save")
                time.sleep(min(seconds, _LOOK_EVERY))

    def _save(self, wait: bool) -> UserError | None:
        """Save; returns why a save for which this waits has failed."""
        began = time.monotonic()
        self.heartbeat.beat(self.step, "saving")
        self._saver.wait(self.step)
        phase = self._boundary.phase
        meta = {
            "step": self.step, "tokens": self.curriculum.tokens_before(self.step), "phase": phase.name if phase else None,
            **self._inspector.meta(), **self._validator.meta(), USED: self._validator.used_step(self.step),
            ARCHITECTURE: recorded(self.model.config), **self._record.meta(), **self._faults.meta(), **self.setup.meta,
            **(self.growth.meta() if self.growth is not None else {}),
        }  # fmt: skip
        state = self.model.without_duplicates(self._state.tensors())
        if not self._are_finite(state):
            return None
        # A checkpoint is only compared by a metric that was measured on its own weights.
        failure = self._saver.save(self.step, state, meta, self._validator.measured.get(self.step), wait, self._prepare_save)
        self._saver.paused(time.monotonic() - began)
        self._metrics.clock.save += time.monotonic() - began
        return failure

    def _prepare_save(self) -> None:
        """What no checkpoint may be newer than; all ranks call it together, and raise `UserError` alike."""
        self._boundary.keep_penalty()
        self._faults.run_on_all(self._flush)

    def _flush(self) -> None:
        """Write and sync metrics and events. No checkpoint is newer than they are: a full disk that keeps them out fails the save."""
        try:
            self._log.flush()
            self.files.ledger.flush()
        except OSError as error:
            raise UserError(f"metrics and events cannot be written to {self.files.folder}: {error}") from error

    def _are_finite(self, state: dict[str, Any]) -> bool:
        """Whether all weights are numbers, on all ranks. Those that are not are never saved: everything would go on from them. The policy
        rolls back a run with bad steps; at its end this raises `UserError`."""
        tensors = [tensor for kind in ("model", "average") for tensor in state.get(kind, {}).values() if tensor.is_floating_point()]
        if not self.model.ranks.all_reduce_max(float(not all_finite(tensors))):
            return True
        self.files.ledger.write("weights_not_finite", stage=self.stage, step=self.step)
        found = f"the weights after step {self.step:,} are not finite, and were not saved; the newest checkpoint is of step"
        found = f"{found} {self._saver.saved:,}"
        if self._done:
            raise UserError(f"{found}; lower the learning rate, or look at what the ledger says of the steps since then, and run it again")
        terminal.console.print(found, style="yellow")
        return False

    def resume(self) -> None:
        """Load the newest good checkpoint, if there is one. Raises `UserError` if all are damaged."""
        meta = self._load()
        for path, reason in self.files.checkpoints.refused:
            terminal.console.print(f"{path} is not used: {reason}", style="yellow")
        if meta is None:
            refuse_if_all_damaged(self.files.checkpoints)
            self._faults.begin()
            if self.growth is not None:
                self.growth.read()  # what a start over has left
            self.step = self._next(0)
            return
        self.resumed_meta = meta
        self._record.resumed()
        self._details.event()
        steps, tokens = self.curriculum.steps, self.curriculum.tokens  # more than at the start where a phase was added
        self.files.ledger.write(
            "resume", stage=self.stage, step=self.step, tokens=self.curriculum.tokens_before(self.step),
            steps=steps, planned_tokens=tokens, **self._trained_until(), **self._environment(),
        )  # fmt: skip
        terminal.console.print(f"{self.stage} resumes from step {self.step:,} of {steps:,}", style="dim")

    def _trained_until(self) -> dict[str, float | None]:
        """Time, elapsed seconds and step of the last metrics line, which is cut if its step is trained again: its cost was paid."""
        last = jsonl.last(self.files.folder / METRICS) if self.model.ranks.is_first else {}
        return {"trained_until": last.get("time"), "trained_for": last.get(ELAPSED), "reached": last.get("step")}

    def _load(self) -> dict[str, Any] | None:
        """Load the newest good checkpoint that no rollback has undone; its meta, or None if there is none."""
        state = self._state.tensors(values=False)
        meta = self.files.checkpoints.load_latest(state, self._faults.is_undone, self._state.OPTIONAL)
        if meta is None:
            return None
        self._state.loaded(state)
        self._faults.load(meta)
        self._saver.saved = int(meta["step"])
        if self.growth is not None:
            self.growth.load(meta)
        self._require_same_tokens(meta)
        self.step = self._next(self._saver.saved)
        self._inspector.load(meta)
        self._validator.load(meta)
        self._record.load(meta)
        return meta

    def _require_same_tokens(self, meta: dict[str, Any]) -> None:
        """Raise `UserError` if the steps of a checkpoint were others than those of the recipe: text would be trained twice or left out."""
        saved = self._saver.saved
        trained, planned = meta.get("tokens"), self.curriculum.tokens_before(min(saved, self.curriculum.steps))
        if trained is not None and trained != planned:
            raise UserError(
                f"the checkpoint of step {saved:,} was saved after {trained:,} tokens, and by the recipe that step comes after "
                f"{planned:,}: text would be trained twice or left out; restore the batch and the phases that this run began with, or "
                "choose another run_dir"
            )

    def _roll_back(self, rollback: RollbackRequest, bar: terminal.Bar) -> bool:
        """Load an earlier checkpoint, as a resumed run would; returns whether that was possible."""
        assert self._boundary.phase is not None
        self._saver.wait(self.step)
        tokens = self.curriculum.tokens_before(self.step)
        skips_same = None if self.growth is None else self.growth.skip_of_rollback
        if not self._faults.roll_back(self.step, self._boundary.phase.first_step, rollback, skips_same):
            return False
        if self.growth is not None:
            self.growth.roll_back(self._faults.history[-1].to_step)
        meta = self._load()
        assert meta is not None
        bar.advance(self.curriculum.tokens_before(self.step) - tokens)  # back by the tokens between
        self._log.rewind(self._saver.saved + 1)
        self.files.sampler.truncate(self._saver.saved + 1)
        self._boundary.phase = None
        self._details.event()
        self._metrics.restart_clock()
        return True

    def _start(self) -> None:
        """Prepare model, ledger and samples for the first step."""
        if self.model.device.type == "cpu":
            keep_freed_memory()
        self.model.train(self.objective is None)
        if self.step == 0:
            self._report_start()
        self.files.sampler.truncate(self._saver.saved + 1)
        if self.model.whole is None:
            terminal.console.print("no samples are written during the run: its layers are on several pipeline stages", style="dim")
        if self.mixture is not None:
            self.mixture.apply_pending(self.step)
        self._saver.start_timer(self.step)
        self._metrics.restart_clock()

    def _report_start(self) -> None:
        steps, tokens, environment = self.curriculum.steps, self.curriculum.tokens, self._environment()
        layers = "compiled in the first step" if is_compiled(self.recipe, self.model.device) else "eager"
        if (version := environment.get("flash_linear_attention")) is not None:
            layers += f", linear attention in half precision by flash-linear-attention {version}"
        devices = f"{environment['ranks']} x {environment['device']} in {environment['precision']}"
        most = "at most " if self.growth is not None else ""
        terminal.console.print(f"{most}{steps:,} steps, {tokens:,} tokens, on {devices}; layers {layers}", style="dim")
        for line in [] if self.growth is None else describe_growth(self.recipe.train.phases, self.growth.known):
            terminal.console.print(line, style="dim")
        self.files.ledger.write("start", stage=self.stage, steps=steps, tokens=tokens, **environment, **self.setup.meta)

    def _environment(self) -> dict[str, Any]:
        """What the machine decides where the recipe leaves it open, and the number of ranks: the cost of the run is computed from it. And
        which process this is: one that is killed can write nothing, but a later reader can see that it has ended, and what the kernel has
        counted since."""
        device = self.model.device
        found: dict[str, Any] = {"device": device.type, "precision": str(self.model.compute_dtype).removeprefix("torch.")}
        found |= {"ranks": self.model.ranks.world, "threads": torch.get_num_threads()}
        found |= process_identity()
        found |= {"layers": "compiled" if is_compiled(self.recipe, device) else "eager"}
        linear = any(getattr(self.recipe.model, section) for section in SECTIONS) and linear_kernels.installed(device)
        return found | {"flash_linear_attention": linear} if linear else found

    def _note(self, loss: float | None, values: dict[str, float]) -> str:
        parts = [] if loss is None else [f"loss {loss:.3f}{self._unit('train/loss')}"]
        parts += [f"held-out {value:.3f}{self._unit(self._validator.metric)}" for value in self._validator.measured.values()]
        if "perf/tokens_per_second" in values:
            parts.append(f"{values['perf/tokens_per_second']:,.0f} tokens/s")
        return "  ".join(parts)

    def _unit(self, metric: str | None) -> str:
        """The unit of a metric, to stand behind its value: losses are in nats per token, that of an objective has none, and held-out text
        is measured in bits per byte."""
        if metric is None or (self.objective is not None and metric in _LOSSES):
            return ""
        return f" {unit}" if (unit := describe(metric).unit) else ""

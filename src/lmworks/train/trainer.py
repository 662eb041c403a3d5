"""The loop. It owns no data and no rates (the course does), and no files (checkpoints, ledger and metrics do)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from lmworks import progress
from lmworks.allocator import keep_freed_memory
from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.errors import UserError
from lmworks.interrupt import Interrupted, Preempted
from lmworks.metrics import system
from lmworks.metrics.log import MetricLog
from lmworks.model.balance import set_temperature, temperature
from lmworks.optim.optimizer import Updates
from lmworks.optim.scaler import LossScaler
from lmworks.parallel.model import ParallelModel
from lmworks.parallel.parallelize import is_compiled
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import EarlyStopping as EarlyStoppingOptions
from lmworks.recipe.schema.train import Ewc
from lmworks.recipe.schema.units import Duration
from lmworks.shards.read.batch import Batch
from lmworks.shards.read.prefetch import Prefetch
from lmworks.train.anomaly import FirstNonFinite, first_non_finite
from lmworks.train.course import Course, Stage, steps_between
from lmworks.train.detail import LayerSignals
from lmworks.train.ewc import Consolidation
from lmworks.train.guard import Guard
from lmworks.train.mixture import Follower
from lmworks.train.readings import Clock, experts, losses
from lmworks.train.sampling import Sampler
from lmworks.train.seeds import seed_of
from lmworks.train.step import StepResult, micro_batch_of, train_step
from lmworks.train.stopping import USED, EarlyStopping
from lmworks.watch.finite import BadSteps
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.ledger import Ledger
from lmworks.watch.policy import GoBack
from lmworks.watch.signals import Stop, graceful_stop
from lmworks.watch.spike import Limits

_COMPARE_EVERY = 20  # steps between comparisons of the ranks' own times


@dataclass(frozen=True)
class Agreed:
    """What the ranks tell each other at the beginning of a step: its valid tokens over all data ranks, whether any was asked to stop, and
    by a scheduler, whether the first finds it time to save, whether the save in the background has failed on any, and whether the first has
    read of a change of the mixture."""

    valid: int
    stop: bool
    preempted: bool
    late: bool
    failed: bool
    mixture: bool


@dataclass
class Trainer:
    """Runs a course from wherever its newest good checkpoint is to the end.

    `validate` returns metrics (`validation/bits_per_byte` or `validation/loss` decides which checkpoint is best) and `sampler` writes
    sample outputs; both leave the model as it was.
    """

    recipe: Recipe
    model: ParallelModel
    optimizer: Updates
    course: Course
    checkpoints: Checkpoints
    ledger: Ledger
    bad_steps: BadSteps
    validate: Callable[[], dict[str, float]]
    sampler: Sampler
    flops_per_token: Callable[[int], float]
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(None))
    mixture: Follower | None = None
    early_stopping: EarlyStoppingOptions | None = None
    label: str = "pretrain"
    resume_command: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        train = self.recipe.train
        self.step = self.saved = 0
        self.bad_total = 0
        self.peak = system.measure_peak() * self.model.ranks.world
        self.scaler = LossScaler(device=self.model.device) if train.precision == "fp16" else None
        moe = self.model.config.moe
        sparse = self.model.all_sparse
        self.expert_counts = torch.zeros(sparse, moe.n_routed_experts, dtype=torch.float64) if moe and sparse else None
        self.stopping = EarlyStopping(self.early_stopping)
        self._penalty: Consolidation | None = None
        self._stage: Stage | None = None
        self._save_steps = self._every(train.save_every)
        self._validate_steps = self._every(train.validate_every)
        self._sample_steps = self._every(train.sample_every)
        self._log_steps = self._every(train.log_every)
        every = self.recipe.stability.recheck_every
        self._recheck_steps = None if every is None else self._every(every)
        detail = self.recipe.metrics.detail_every
        self._detail_steps = None if detail is None else self._every(detail)
        self.began_with: dict[str, Any] = {}  # the meta of the checkpoint that was resumed from
        self._measured: dict[int, float] = {}  # the newest validation, by the step after which it was made
        self._rate = 0.0  # of the last step
        self._saving = False  # whether a save in the background has not been heard of
        self._clock = Clock()
        self.guard = Guard(
            self.recipe.stability, self.bad_steps, self.checkpoints, self.ledger,
            stage=self.label, save_every=self._save_steps, cached=self.recipe.shards.cache is not None,
        )  # fmt: skip

    def _every(self, duration: Duration) -> int:
        return steps_between(duration, self.course.steps, self.course.tokens)

    def state(self, values: bool = True) -> dict[str, Any]:
        """Everything that a later step depends on, by name; tensors are the live ones, or (`values` False) places to load into."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(values),
            "optimizer": {key: tensor for key, tensor in self.optimizer.state_dict(values).items() if not key.startswith("average.")},
        }
        if self.optimizer.ema is not None:  # a part of its own, which readers of the finished model load without the optimizer
            state["average"] = dict(self.optimizer.ema.average)
        if self.expert_counts is not None:
            state["experts"] = {"counts": self.expert_counts}
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def resume(self) -> int:
        """Load the newest good checkpoint, if there is one; returns its step. Raises `UserError` if all are bad."""
        meta = self._load()
        for path, reason in self.checkpoints.refused:
            progress.console.print(f"{path} is not used: {reason}", style="yellow")
        if meta is None:
            self._refuse_to_forget()
            self.step = self.guard.skips.next(0)
            return 0
        self.began_with = meta
        planned = {"steps": self.course.steps, "planned_tokens": self.course.tokens}  # more than at the start where a phase was added
        self.ledger.write("resume", stage=self.label, step=self.step, tokens=self.course.tokens_before(self.step), **planned, **self._how())
        progress.console.print(f"{self.label} goes on from step {self.step:,} of {self.course.steps:,}", style="dim")
        return self.saved

    def _load(self) -> dict[str, Any] | None:
        """Put everything back to the newest good checkpoint that no rollback has taken back; its meta, or None if there is none."""
        state = self.state(values=False)
        meta = self.checkpoints.load_latest(state, self.guard.undone)
        if meta is None:
            return None
        self.model.loaded(state)
        self.guard.load(meta)
        self.saved = int(meta["step"])
        self.step = self.guard.skips.next(self.saved)
        self.bad_total = int(meta["bad_steps"])
        self._measured = {int(step): value for step, value in meta["measured"].items()}
        if "early_stopping" in meta:
            self.stopping.load(meta["early_stopping"])
        return meta

    def _how(self) -> dict[str, Any]:
        """What this machine decides and the recipe may leave open, and how many devices train: what the run costs is counted by it."""
        device = self.model.device
        how: dict[str, Any] = {"device": device.type, "precision": str(self.model.compute_dtype).removeprefix("torch.")}
        how |= {"ranks": self.model.ranks.world, "threads": torch.get_num_threads()}
        return how | {"layers": "compiled" if is_compiled(self.recipe, device) else "eager"}

    def _refuse_to_forget(self) -> None:
        """No good checkpoint, but there have been some, now or in an earlier try: never train over that without being told."""
        place = self.checkpoints.directory
        bad = [path.name for path in sorted(place.glob("step-*.bad-*"), reverse=True)]
        if bad:
            reason = f" (the newest: {self.checkpoints.refused[0][1]})" if self.checkpoints.refused else ""
            raise UserError(
                f"no checkpoint in {place} is good, and {len(bad)} were set aside as damaged{reason}: {', '.join(bad[:3])}; "
                "restore one from a copy, or delete that folder to train from the start"
            )

    def run(self, metrics: MetricLog) -> None:
        """Train to the end of the course. Raises `Interrupted` after saving when asked to stop."""
        self.metrics = metrics
        if self.model.device.type == "cpu":
            keep_freed_memory()
        self.model.train()
        if self.step == 0:
            how, layers = self._how(), "eager" if not is_compiled(self.recipe, self.model.device) else "compiled in the first step"
            progress.console.print(
                f"{self.course.steps:,} steps, {self.course.tokens:,} tokens, on {how['ranks']} x {how['device']} in {how['precision']}; "
                f"layers {layers}", style="dim",
            )  # fmt: skip
            self.ledger.write("start", stage=self.label, steps=self.course.steps, tokens=self.course.tokens, **self._how(), **self.meta)
        self.sampler.begin(self.saved + 1)
        if self.model.whole is None:
            progress.console.print("no samples are written during the run: its layers lie on several pipeline stages", style="dim")
        if self.mixture is not None:
            self.mixture.take_up(self.step)
        self._saved_at = time.monotonic()
        patience = float(self.recipe.stability.data_timeout)
        with graceful_stop() as stop, progress.bar(self.label, self.course.tokens, self.course.tokens_before(self.step)) as bar:
            while not self._done:
                end = self.guard.skips.until(self.step, self.course.steps)
                with Prefetch(self._share, self.step, end, patience=patience) as batches:
                    self._stretch(batches, end, stop, bar)
                if self.stopping.stops:
                    break
                self._move(self.guard.skips.next(self.step), bar)
            if self.step != self.saved:  # the last steps were left out
                self._save(wait=True)
            self._leave_if(self._agree(0, stop, False), stop)
        self.ledger.write("finish", stage=self.label, step=self.step, tokens=self.course.tokens)

    def _stretch(self, batches: Prefetch, end: int, stop: Stop, bar: progress.Bar) -> None:
        """Train to step `end`, or until the run has gone back or ends early."""
        train = self.recipe.train
        while self.step < end and not self._done:
            began = time.monotonic()
            self._enter(self.course.stage(self.step))
            self.heartbeat.beat(self.step, "data")
            batch = next(batches)
            late = train.save_every_seconds is not None and time.monotonic() - self._saved_at > train.save_every_seconds
            own = time.monotonic() - began
            agreed = self._agree(batch.valid_tokens, stop, late)
            if agreed.failed:
                self._settle()
            if agreed.late or self.guard.saves.due(self.step):
                self._save(wait=False)
            self._leave_if(agreed, stop)
            if agreed.mixture and self.mixture is not None:
                self.mixture.take_up(self.step + batches.ahead)
            torch.manual_seed(seed_of(self.recipe.seed, self.step, self.model.ranks.number))
            set_temperature(self.model.routers(), self.model.config.moe, self.step)
            limits = self.guard.policy.limits(self.step, self.course.steady_since(self.step))
            self.heartbeat.beat(self.step, "update")
            signals = LayerSignals(self.model) if self._detail_steps and (self.step + 1) % self._detail_steps == 0 else None
            result, culprit = self._update(batch, agreed.valid, limits)
            loss = float(result.loss)
            back = self._observe(result, batch, agreed.valid, limits, culprit) or self._recheck(batch)
            if back is not None and self._go_back(back, bar):
                return
            tokens = self._move(self.step + 1, bar)
            seconds = time.monotonic() - began
            self._clock.step += seconds
            self._clock.own += own
            self._clock.data_wait += batches.waited
            self._clock.steps += 1
            self._clock.tokens += tokens
            self.guard.waited(self.step, batches.waited, seconds)
            values: dict[str, float] = {} if signals is None else signals.metrics(batch)
            if self._done or self.step % self._validate_steps == 0:
                values |= self._validation()
            done = self._done
            if done or self.step % self._log_steps == 0:
                values |= self._step_metrics(result, batch) | self._slowest()
                self._clock = Clock()
            if values:
                self.metrics.write(self.step, values)
            bar.note(self._note(loss, values))
            if (done or self.step % self._sample_steps == 0) and self.model.whole is not None:
                with self.model.averaged(self.optimizer.ema):
                    self.sampler.write(self.model.whole, self.step)
            if done or self._saves_here():
                self._save(wait=done)

    @property
    def _done(self) -> bool:
        """Whether nothing is left to train."""
        return self.step >= self.course.steps or self.stopping.stops

    @property
    def _ended_early(self) -> bool:
        return self.stopping.stops and self.step < self.course.steps

    @property
    def _used_step(self) -> int:
        """The step whose weights are those of this stage if it ends here: the newest; after an early end the best, where that is kept."""
        best = self.stopping.lowest_step
        return best if self._ended_early and self.recipe.checkpoints.keep_best and best else self.step

    def _saves_here(self) -> bool:
        """Whether the steps so far end with a checkpoint. Where the stage may end early, one that is the best so far is needed then."""
        if self.recipe.checkpoints.keep_best and self.stopping.lowest_step == self.step:
            return True
        stage = self._stage
        if stage is None or stage.save_every is None:
            return self.step % self._save_steps == 0
        return (self.step - stage.first_step) % stage.save_every == 0

    def _recheck(self, batch: Batch) -> GoBack | None:
        """Look for silent corruption, where the recipe asks for it after this step."""
        if self._recheck_steps is None or (self.step + 1) % self._recheck_steps:
            return None
        return self.guard.look(self.step, self.model, self.optimizer, batch, self._micro_batch(batch))

    def _move(self, step: int, bar: progress.Bar) -> int:
        """Make this the step to train next; the tokens between."""
        tokens = self.course.tokens_before(step) - self.course.tokens_before(self.step)
        self.step = step
        bar.advance(tokens)
        return tokens

    def _leave_if(self, agreed: Agreed, stop: Stop) -> None:
        """Save and leave, if somebody has asked to stop."""
        if not agreed.stop:
            return
        self._settle()
        if self.step != self.saved:
            self._save(wait=True)
        raise (Preempted if agreed.preempted else Interrupted)(stop.message(self.step, self.resume_command))

    def _go_back(self, back: GoBack, bar: progress.Bar) -> bool:
        """Put the run back to an earlier checkpoint, as a new start would; whether that was possible."""
        assert self._stage is not None
        self._settle()
        if not self.guard.roll_back(self.step, self._stage.first_step, back):
            return False
        undone = self.step
        meta = self._load()
        assert meta is not None
        step, self.step = self.step, undone  # the bar goes back by the tokens between
        self._move(step, bar)
        self.metrics.rewind(self.saved + 1)
        self.sampler.begin(self.saved + 1)
        self._stage, self._clock = None, Clock()
        return True

    def _enter(self, stage: Stage) -> None:
        """Make a phase boundary real: positions, balancing rate, the weight of what lies ahead; weights and optimizer go on as they are."""
        if self._stage == stage:
            return
        self._penalty = None if stage.ewc is None else self._consolidation(stage, stage.ewc)
        self.guard.saves.every = stage.save_every or self._save_steps
        if stage.rope is not None:
            self.model.set_rope(stage.rope)
        if stage.mtp_loss_weight is not None:
            self.model.set_mtp_loss_weight(stage.mtp_loss_weight)
        if self.step == stage.first_step or self._stage is not None:
            self.ledger.write("phase", stage=self.label, phase=stage.name, step=self.step, sequence_length=stage.sequence_length)
        self._stage = stage

    def _consolidation(self, stage: Stage, options: Ewc) -> Consolidation:
        """The penalty of a phase, estimated at the weights that it begins with: now, or before the run was stopped."""
        made = Consolidation(self.model, options)
        place = self.checkpoints.directory / f"ewc-{stage.name}"
        if self.saved > stage.first_step:  # weights of a step inside the phase have been loaded
            made.load(place, stage.first_step, self.checkpoints.identity)
            return made
        before = self.course.stage(max(stage.first_step, 1) - 1)
        if before.rope is not None:
            self.model.set_rope(before.rope)
        self.heartbeat.beat(self.step, "ewc")
        loss_scale = 1.0 if self.scaler is None else float(self.scaler.scale)
        made.estimate(self.course.earlier(stage, options.sequences), loss_scale)
        made.save(place, stage.first_step, self.checkpoints.identity)
        self.ledger.write("ewc", stage=self.label, phase=stage.name, step=self.step, sequences=options.sequences)
        return made

    def _share(self, step: int) -> Batch:
        """What this rank reads of a step."""
        return self.course.batch(step, *self.model.rows(self.course.rows(step)))

    def _agree(self, valid: int, stop: Stop, late: bool) -> Agreed:
        """What all ranks know together at the beginning of a step."""
        ranks = self.model.ranks
        asked = self.mixture is not None and self.mixture.asked()
        told = (valid, stop.requested, stop.preempted, late and ranks.is_first, self.checkpoints.failed, asked)
        if not ranks.distributed:
            return Agreed(*told)
        sums = torch.tensor(told, dtype=torch.int64)
        torch.distributed.all_reduce(sums)
        valid, *flags = sums.tolist()
        copies = ranks.world // ranks.size("dp")  # ranks that read the same rows
        return Agreed(valid // copies, *map(bool, flags))

    def _update(self, batch: Batch, valid: int, limits: Limits) -> tuple[StepResult, str | None]:
        """Train a step; also the first operator of this rank whose result was not finite, where every step is watched."""
        assert self._stage is not None
        self._rate = self.course.rate(self.step) * self.guard.policy.rate(self.step)
        watched = FirstNonFinite(self.model.parts) if self.recipe.stability.detect_anomaly else None
        with watched or nullcontext():
            result = train_step(
                self.model, self.optimizer, batch, rows=self.course.rows(self.step), valid=valid, limits=limits,
                micro_batch_size=self._micro_batch(batch), rate=self._rate, penalty=self._penalty,
                clip=self.recipe.optimizer.max_grad_norm, bias_update_rate=self._stage.bias_update_rate, scaler=self.scaler,
            )  # fmt: skip
        return result, None if watched is None else watched.found

    def _micro_batch(self, batch: Batch) -> int:
        """Sequences at a time: of all lengths as many tokens."""
        return micro_batch_of(self.recipe, batch.tokens.shape[1], self.model.pipeline is not None)

    def _observe(self, result: StepResult, batch: Batch, valid: int, limits: Limits, culprit: str | None) -> GoBack | None:
        loss, norm = float(result.loss), float(result.grad_norm)
        good = math.isfinite(loss) and math.isfinite(norm)
        self.bad_total += not good
        if result.counts_LE is not None and self.expert_counts is not None and bool(result.applied):
            self.expert_counts += result.counts_LE.double().cpu()
        # An overflow that a smaller scale mends is how fp16 finds its scale, and no reason to stop.
        if not good and math.isfinite(loss) and self.scaler is not None and self.scaler.scale.item() > 1:
            return None
        if not good and self.bad_steps.in_a_row == 0:
            self.guard.blame(self.step, self._again(batch, valid) if culprit is None else culprit)
        return self.guard.policy.observe(self.step, loss, norm, limits, partial(self._arrays, batch))

    def _again(self, batch: Batch, valid: int) -> str | None:
        """Run the step's forward and backward once more, to find this rank's first operator whose result is not finite."""
        self.heartbeat.beat(self.step, "rehearse")
        torch.manual_seed(seed_of(self.recipe.seed, self.step, self.model.ranks.number))
        scale = (1.0 if self.scaler is None else self.scaler.scale) / max(valid, 1)
        return first_non_finite(self.model, batch, self.course.rows(self.step), self._micro_batch(batch), scale)

    def _arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        """The whole batch of the step, for replay; `batch` is this rank's share of it."""
        if self.model.ranks.distributed:
            batch = self.course.batch(self.step, 0, self.course.rows(self.step))
        return {"tokens": batch.tokens, "labels": batch.labels, "cu_seqlens": batch.cu_seqlens}

    def _validation(self) -> dict[str, float]:
        self.heartbeat.beat(self.step, "validation")
        began = time.monotonic()
        with self.model.averaged(self.optimizer.ema):
            values = self.validate()
        self.stopping.observe(self.step, values)
        name = self.stopping.metric(values)
        self._measured = {self.step: values[name]} if name is not None and math.isfinite(values[name]) else {}
        if self._ended_early:
            found, tokens = self.stopping.state(), self.course.tokens_before(self.step)
            self.ledger.write("early_stop", stage=self.label, step=self.step, tokens=tokens, used_step=self._used_step, **found)
            waited = f"no improvement in {self.stopping.waited} validations since step {self.stopping.best_step:,}"
            told = f"{self.label} ends early after step {self.step:,}: {waited}; the weights of step {self._used_step:,} are used"
            progress.console.print(told, style="yellow")
        return values | {"perf/validation_seconds": time.monotonic() - began}

    def _step_metrics(self, result: StepResult, batch: Batch) -> dict[str, float]:
        length = batch.tokens.shape[1]
        rates = self.optimizer.learning_rates(self._rate)
        values = {
            "train/tokens": self._trained(),
            "train/batch_tokens": self.course.tokens_before(self.step) - self.course.tokens_before(self.step - 1),
            "train/sequence_length": length,
            "train/phase": self._stage.index if self._stage else 0,
            "train/bad_steps": self.bad_total,
            "train/spikes": self.guard.policy.spike_total,
            "optim/learning_rate": rates.get("muon", rates.get("adamw", 0.0)),
            "optim/adam_learning_rate": rates.get("adamw", 0.0),
            "optim/clipped": float(0 < self.recipe.optimizer.max_grad_norm < float(result.grad_norm)),
        }
        moe = self.model.config.moe
        if moe is not None and moe.temperature_steps:
            values["experts/temperature"] = temperature(moe, self.step - 1)
        if self._penalty is not None:
            values["train/ewc"] = self._penalty.penalty()
        if self.scaler is not None:
            values["optim/loss_scale"] = self.scaler.scale.item()
        clock = self._clock.metrics(self.flops_per_token(length), self.peak)
        return values | losses(result) | clock | experts(self.model, result.counts_LE) | system.machine_metrics() | system.gpu_metrics()

    def _slowest(self) -> dict[str, float]:
        """Now and then, who holds up the others."""
        clock = self._clock
        if self.step // _COMPARE_EVERY == (self.step - clock.steps) // _COMPARE_EVERY:
            return {}
        rank = self.guard.compare_ranks(self.step, clock.own / clock.steps, clock.step / clock.steps, self.model.device)
        return {} if rank is None else {"perf/slowest_rank": rank}

    def _trained(self) -> int:
        """Tokens that were trained on before `step`: all that come before it but those left out."""
        before = self.course.tokens_before
        return before(self.step) - sum(before(stop) - before(start) for start, stop in self.guard.skips.before(self.step))

    def _save(self, wait: bool) -> None:
        """Save; a failure is raised where the run ends with this save, and otherwise left to the guard."""
        began = time.monotonic()
        self._settle()
        meta = {
            "step": self.step, "tokens": self.course.tokens_before(self.step), "phase": self._stage.name if self._stage else None,
            "bad_steps": self.bad_total, "measured": self._measured, "early_stopping": self.stopping.state(), USED: self._used_step,
            **self.guard.meta(), **self.meta,
        }  # fmt: skip
        self.metrics.flush()
        try:
            # Only what was measured on these very weights may make them the best.
            self.checkpoints.save(self.step, self.model.written(self.state()), meta, metric=self._measured.get(self.step), wait=wait)
        except UserError as error:
            if wait:
                raise
            self.guard.save_failed(self.step, error)
        else:
            self.saved, self._saving = self.step, True
            if wait or not self.recipe.checkpoints.asynchronous:
                self._settle()
        self._saved_at = time.monotonic()
        self._clock.save += time.monotonic() - began

    def _settle(self) -> None:
        """Wait for the save in the background, and learn how it ended."""
        try:
            self.checkpoints.wait()
        except UserError as error:
            self.saved = -1
            self.guard.save_failed(self.step, error)
        else:
            if self._saving:
                self.guard.saves.succeeded()
        self._saving = False

    def _note(self, loss: float, values: dict[str, float]) -> str:
        note = f"loss {loss:.3f}"
        for metric in self._measured.values():
            note += f"  held-out {metric:.3f}"
        if "perf/tokens_per_second" in values:
            note += f"  {values['perf/tokens_per_second']:,.0f} tokens/s"
        return note

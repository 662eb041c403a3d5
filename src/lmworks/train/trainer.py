"""The loop. It owns no data and no rates (the course does), and no files (checkpoints, ledger and metrics do)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lmworks import progress
from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.errors import UserError
from lmworks.interrupt import Interrupted
from lmworks.metrics import system
from lmworks.metrics.log import MetricLog
from lmworks.model import Transformer
from lmworks.model.balance import set_temperature, statistics
from lmworks.optim.optimizer import Optimizer
from lmworks.optim.scaler import LossScaler
from lmworks.recipe.recipe import Recipe
from lmworks.recipe.units import Duration
from lmworks.shards.batch import Batch
from lmworks.shards.prefetch import Prefetch
from lmworks.train.course import Course, Stage
from lmworks.train.sampling import Sampler
from lmworks.train.step import StepResult, train_step
from lmworks.watch.finite import BadSteps
from lmworks.watch.ledger import Ledger
from lmworks.watch.signals import graceful_stop

_SHAPES = 1024  # more shapes of a layer's input than this are a mistake, not a recipe


@dataclass
class Clock:
    """Where the wall time since the last metrics line went, in seconds, and what was done in it."""

    step: float = 0.0
    data_wait: float = 0.0
    save: float = 0.0
    steps: int = 0
    tokens: int = 0


@dataclass
class Trainer:
    """Runs a course from wherever its newest good checkpoint is to the end.

    `validate` returns metrics (`validation/bits_per_byte` or `validation/loss` decides which checkpoint is best) and `sampler` writes
    sample outputs; both leave the model as it was.
    """

    recipe: Recipe
    model: Transformer
    optimizer: Optimizer
    course: Course
    checkpoints: Checkpoints
    ledger: Ledger
    bad_steps: BadSteps
    validate: Callable[[], dict[str, float]]
    sampler: Sampler
    flops_per_token: Callable[[int], float]
    label: str = "pretrain"
    resume_command: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        train = self.recipe.train
        self.step = 0
        self.bad_total = 0
        self.peak = system.measure_peak()
        self.scaler = LossScaler(device=self.model.embedding.weight.device) if train.precision == "fp16" else None
        moe = self.model.config.moe
        sparse = len(self.model.routers())
        self.expert_counts = torch.zeros(sparse, moe.experts, dtype=torch.float64) if moe and sparse else None
        self._stage: Stage | None = None
        self._save_steps = self._every(train.save_every)
        self._validate_steps = self._every(train.validate_every)
        self._sample_steps = self._every(train.sample_every)
        self._log_steps = self._every(train.log_every)
        self.began_with: dict[str, Any] = {}  # the meta of the checkpoint that was resumed from
        self._measured: dict[int, float] = {}  # the newest validation, by the step after which it was made
        self._clock = Clock()

    def _every(self, duration: Duration) -> int:
        total = self.course.tokens
        return max(1, duration.steps(step_tokens=max(1, total // self.course.steps), phase_tokens=total))

    def state(self) -> dict[str, Any]:
        """Everything that a later step depends on, by name; tensors are the live ones."""
        state: dict[str, Any] = {
            "model": dict(self.model.state_dict(keep_vars=False)),
            "optimizer": {key: tensor for key, tensor in self.optimizer.state_dict().items() if not key.startswith("average.")},
            "rng": {"cpu": torch.get_rng_state()},
        }
        if self.optimizer.ema is not None:  # a part of its own, which readers of the finished model load without the optimizer
            state["average"] = dict(self.optimizer.ema.average)
        if torch.cuda.is_available():
            state["rng"]["cuda"] = torch.cuda.get_rng_state()
        if self.expert_counts is not None:
            state["experts"] = {"counts": self.expert_counts}
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def resume(self) -> int:
        """Load the newest good checkpoint, if there is one; returns the step to go on with. Raises `UserError` if all are bad."""
        torch.manual_seed(self.recipe.seed)  # what this process has drawn so far must not matter
        state = self.state()
        meta = self.checkpoints.load_latest(state)
        for path, reason in self.checkpoints.refused:
            progress.console.print(f"[yellow]{path} is not used: {reason}[/yellow]")
        if meta is None:
            self._refuse_to_forget()
            return 0
        torch.set_rng_state(state["rng"]["cpu"])
        if "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"])
        self.began_with = meta
        self.step = int(meta["step"])
        self.bad_total = int(meta["bad_steps"])
        self.bad_steps.in_a_row = int(meta["bad_in_a_row"])
        self._measured = {int(step): value for step, value in meta["measured"].items()}
        self.ledger.write("resume", stage=self.label, step=self.step, tokens=self.course.tokens_before(self.step), **self._how())
        progress.console.print(f"[dim]{self.label} goes on from step {self.step:,} of {self.course.steps:,}[/dim]")
        return self.step

    def _how(self) -> dict[str, str]:
        """What this machine decides and the recipe may leave open."""
        return {"device": self.model.embedding.weight.device.type, "precision": str(self.model.compute_dtype).removeprefix("torch.")}

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
        train = self.recipe.train
        self.model.train()
        if train.compile:
            self._compile()
        if self.step == 0:
            self.ledger.write("start", stage=self.label, steps=self.course.steps, tokens=self.course.tokens, **self._how(), **self.meta)
        self.sampler.begin(self.step + 1)
        last_save = time.monotonic()
        tokens_done = self.course.tokens_before(self.step)
        with (
            graceful_stop() as stop,
            Prefetch(self.course.batch, self.step, self.course.steps) as batches,
            progress.bar(self.label, self.course.tokens, tokens_done) as bar,
        ):
            while self.step < self.course.steps:
                began = time.monotonic()
                self._enter(self.course.stage(self.step))
                batch = next(batches)
                set_temperature(self.model, self.step)
                result = self._update(batch)
                loss = self._observe(result, batch)
                self.step += 1
                self._clock.step += time.monotonic() - began
                self._clock.data_wait += batches.waited
                self._clock.steps += 1
                self._clock.tokens += batch.tokens.size
                done = self.step == self.course.steps
                values: dict[str, float] = {}
                if done or self.step % self._validate_steps == 0:
                    values |= self._validation()
                if done or self.step % self._log_steps == 0:
                    values |= self._step_metrics(result, batch, self._clock)
                    self._clock = Clock()
                if values:
                    self.metrics.write(self.step, values)
                bar.advance(batch.tokens.size)
                bar.note(self._note(loss, values))
                if done or self.step % self._sample_steps == 0:
                    self.sampler.write(self.model, self.step)
                late = train.seconds_between_saves is not None and time.monotonic() - last_save > train.seconds_between_saves
                if done or stop.requested or late or self.step % self._save_steps == 0:
                    self._save(wait=done or stop.requested)
                    last_save = time.monotonic()
                if stop.requested:
                    raise Interrupted(stop.message(self.step, self.resume_command))
        self.ledger.write("finish", stage=self.label, step=self.step, tokens=self.course.tokens)

    def _compile(self) -> None:
        """Compile for each shape on its own, however many there are: past torch's limit (8) it would silently run new shapes as eager
        code, and which shapes those are would depend on where the run was last resumed, and with it the last bits of the weights."""
        import torch._dynamo

        torch._dynamo.config.recompile_limit = _SHAPES
        torch._dynamo.config.accumulated_recompile_limit = 16 * _SHAPES
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        self.model.compile(dynamic=False)

    def _enter(self, stage: Stage) -> None:
        """Make a phase boundary real: positions and balancing rate; the weights and the optimizer go on as they are."""
        if self._stage == stage:
            return
        if stage.rope is not None:
            self.model.set_rope(stage.rope)
        if self.step == stage.first_step:
            self.ledger.write("phase", stage=self.label, phase=stage.name, step=self.step, sequence_length=stage.sequence_length)
        self._stage = stage

    def _update(self, batch: Batch) -> StepResult:
        assert self._stage is not None and self.recipe.train.micro_batch
        tokens_at_once = self.recipe.train.micro_batch * max(int(phase.sequence_length) for phase in self.recipe.train.phases)
        return train_step(
            self.model, self.optimizer, batch,
            micro_batch=max(1, tokens_at_once // batch.tokens.shape[1]), rate=self.course.rate(self.step),
            clip=self.recipe.optimizer.clip, balance_rate=self._stage.balance_rate, scaler=self.scaler,
        )  # fmt: skip

    def _observe(self, result: StepResult, batch: Batch) -> float:
        loss, norm = float(result.loss), float(result.grad_norm)
        good = math.isfinite(loss) and math.isfinite(norm)
        # An overflow that a smaller scale mends is how fp16 finds its scale, and no reason to stop.
        if good or not math.isfinite(loss) or self.scaler is None or self.scaler.scale.item() <= 1:
            arrays = {"tokens": batch.tokens, "labels": batch.labels, "cu_seqlens": batch.cu_seqlens}
            if not self.bad_steps.observe(self.step, loss, norm, arrays) and self.bad_steps.too_many:
                self.ledger.write("stopped", step=self.step, reason=self.bad_steps.reason(loss))
                advice = f"no weight was changed by them; {self.bad_steps.where}; lower optimizer.learning_rate or look at the batches"
                raise UserError(f"stopped at step {self.step}: {self.bad_steps.reason(loss)}; {advice}")
        self.bad_total += not good
        if good and result.counts_LE is not None and self.expert_counts is not None:
            self.expert_counts += result.counts_LE.double().cpu()
        return loss

    def _validation(self) -> dict[str, float]:
        began = time.monotonic()
        values = self.validate()
        metric = values.get("validation/bits_per_byte", values.get("validation/loss"))
        self._measured = {self.step: metric} if metric is not None and math.isfinite(metric) else {}
        return values | {"perf/validation_seconds": time.monotonic() - began}

    def _step_metrics(self, result: StepResult, batch: Batch, clock: Clock) -> dict[str, float]:
        loss = float(result.loss)
        rates = self.optimizer.learning_rates(self.course.rate(self.step - 1))
        per_token = self.flops_per_token(batch.tokens.shape[1])
        values = {
            "train/loss": loss,
            "train/perplexity": math.exp(min(loss, 80.0)) if math.isfinite(loss) else loss,
            "train/z_loss": float(result.z_loss),
            "train/tokens": self.course.tokens_before(self.step),
            "train/batch_tokens": batch.tokens.size,
            "train/valid_tokens": result.valid_tokens,
            "train/sequence_length": batch.tokens.shape[1],
            "train/phase": self._stage.index if self._stage else 0,
            "train/bad_steps": self.bad_total,
            "optim/learning_rate": rates.get("muon", rates.get("adamw", 0.0)),
            "optim/adam_learning_rate": rates.get("adamw", 0.0),
            "optim/grad_norm": float(result.grad_norm),
            "perf/tokens_per_second": clock.tokens / max(clock.step, 1e-9),
            "perf/step_seconds": clock.step / max(1, clock.steps),
            "perf/data_wait": clock.data_wait,
            "perf/save_seconds": clock.save,
            "perf/mfu": system.mfu(per_token * clock.tokens, clock.step, self.peak),
            "perf/memory": system.memory_bytes(),
        }
        if result.auxiliary_loss is not None:
            values["train/auxiliary_loss"] = float(result.auxiliary_loss)
        if self.scaler is not None:
            values["optim/loss_scale"] = self.scaler.scale.item()
        return values | self._expert_metrics(result.counts_LE) | system.gpu_metrics()

    def _expert_metrics(self, counts_LE: Tensor | None) -> dict[str, float]:
        moe = self.model.config.moe
        if counts_LE is None or moe is None:
            return {}
        layers = statistics(counts_LE, moe.capacity_factor)
        bias_L = torch.stack([ffn.router.bias.abs().max() for ffn in self.model.routers()])
        values: dict[str, float] = {}
        for name, per_layer, whole in (
            ("load_cv", layers["cv"], layers["cv"].mean()),
            ("load_max", layers["max_ratio"], layers["max_ratio"].max()),
            ("load_min", layers["min_ratio"], layers["min_ratio"].min()),
            ("dead", layers["dead"], layers["dead"].sum()),
            ("overflow", layers["overflow"], layers["overflow"].mean()),
            ("bias_max", bias_L, bias_L.max()),
        ):
            values[f"experts/{name}"] = float(whole)
            values |= {f"experts/{name}/{moe.dense_layers + i}": round(float(value), 6) for i, value in enumerate(per_layer)}
        return values

    def _save(self, wait: bool) -> None:
        began = time.monotonic()
        meta = {
            "step": self.step, "tokens": self.course.tokens_before(self.step), "phase": self._stage.name if self._stage else None,
            "bad_steps": self.bad_total, "bad_in_a_row": self.bad_steps.in_a_row, "measured": self._measured, **self.meta,
        }  # fmt: skip
        self.metrics.flush()
        # Only what was measured on these very weights may make them the best.
        self.checkpoints.save(self.step, self.state(), meta, metric=self._measured.get(self.step), wait=wait)
        self._clock.save += time.monotonic() - began

    def _note(self, loss: float, values: dict[str, float]) -> str:
        note = f"loss {loss:.3f}"
        for metric in self._measured.values():
            note += f"  held-out {metric:.3f}"
        if "perf/tokens_per_second" in values:
            note += f"  {values['perf/tokens_per_second']:,.0f} tokens/s"
        return note

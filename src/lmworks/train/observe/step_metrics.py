"""The metrics of a step: losses, learning rates, expert loads, and the wall time since the last metrics line."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmworks.metrics import system
from lmworks.model.balance import load_statistics, temperature
from lmworks.optim.optimizer import Updates
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.parameter import KINDS
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.train.curriculum import Curriculum, PhaseBoundary
from lmworks.train.fault_handler import FaultHandler
from lmworks.train.observe.trained_rows import TrainedRows
from lmworks.train.saving import TrainingState
from lmworks.train.step import StepResult, StepValues, read_values

_COMPARE_RANKS_EVERY = 20  # steps
FlopsPerToken = Callable[[Model, int, bool], float]  # of a model, in sequences of so many tokens, with or without frozen weights


@dataclass
class Clock:
    """Wall time since the last metrics line, in seconds, and the steps, the tokens and their FLOPs that were trained in it."""

    step: float = 0.0
    own: float = 0.0  # of this rank alone, before the first collective of a step
    data_wait: float = 0.0
    save: float = 0.0
    measuring: float = 0.0  # of validations, evaluations and samples
    began: float = field(default_factory=time.monotonic)
    steps: int = 0
    tokens: int = 0
    flops: float = 0.0

    def add(self, *, seconds: float, own: float, data_wait: float, tokens: int, flops: float) -> None:
        """Add one step."""
        self.step += seconds
        self.own += own
        self.data_wait += data_wait
        self.steps += 1
        self.tokens += tokens
        self.flops += flops

    def metrics(self, peak: float) -> dict[str, float]:
        """`perf/...`; `peak` is in FLOP/s, of all ranks."""
        return {
            "perf/tokens_per_second": self.tokens / max(self.step, 1e-9),
            "perf/step_seconds": self.step / max(1, self.steps),
            "perf/data_wait": self.data_wait,
            "perf/save_seconds": self.save,
            "perf/gap_seconds": max(0.0, time.monotonic() - self.began - self.step - self.save - self.measuring),
            "perf/mfu": system.mfu(self.flops, self.step, peak),
            "perf/memory": system.memory_bytes(),
        }


class StepMetrics:
    """The metrics line of a step. `clock` counts the time since the last line; `bad_steps` is given with each line."""

    def __init__(
        self, recipe: Recipe, model: ParallelModel, optimizer: Updates, curriculum: Curriculum, state: TrainingState,
        boundary: PhaseBoundary, faults: FaultHandler, rows: TrainedRows, flops_per_token: FlopsPerToken,
    ) -> None:  # fmt: skip
        self.clock = Clock()
        self._max_grad_norm, self._model, self._curriculum = recipe.optimizer.max_grad_norm, model, curriculum
        self._state, self._boundary, self._faults, self._flops_per_token = state, boundary, faults, flops_per_token
        self._rows, self._threshold = rows, recipe.optimizer.qk_clip_threshold or 0.0
        self._flops: dict[tuple[int, int], float] = {}  # per token, by phase and sequence length
        self._peak = system.measure_peak() * model.ranks.world
        # a pipeline stage has other layers than the next, whose rates differ with layer_lr_decay; they never change
        self._rates = {kind: model.ranks.all_reduce_max(optimizer.learning_rates().get(kind, 0.0)) for kind in ("muon", "adamw")}
        self._process, self._machine = system.ProcessSignals(), system.MachineSignals()

    def add_step(self, *, seconds: float, own: float, data_wait: float, tokens: int, sequence_length: int) -> None:
        """Count a step, with the FLOPs of the model in force: a phase may change its windows."""
        phase = self._boundary.phase
        key = (phase.index if phase else 0, sequence_length)
        if key not in self._flops:
            self._flops[key] = self._flops_per_token(self._model.config, sequence_length, self._model.has_adapters)
        self.clock.add(seconds=seconds, own=own, data_wait=data_wait, tokens=tokens, flops=tokens * self._flops[key])

    def learning_rate(self, lr_factor: float) -> float:
        """The rate of the matrices, or of AdamW where it trains all."""
        return lr_factor * (self._rates["muon"] or self._rates["adamw"])

    def restart_clock(self) -> None:
        self.clock = Clock()

    def read(self, result: StepResult, for_line: bool) -> StepValues:
        """Wait for a step and read what it has found, with what a metrics line needs besides if there is to be one; collective."""
        biases_L = self._model.largest_biases() if for_line and result.counts_LE is not None else None
        penalty = self._boundary.penalty.penalty() if for_line and self._boundary.penalty is not None else None
        return read_values(result, self._state.scaler, biases_L, penalty, self._model.end_norms() if for_line else None)

    def line(self, step: int, found: StepValues, sequence_length: int, lr_factor: float, bad_steps: int) -> dict[str, float]:
        """All metrics after `step` steps, whose last has found this; all ranks call it together. Restarts the clock."""
        phase, tokens_before = self._boundary.phase, self._curriculum.tokens_before
        values = {
            "train/tokens": self._trained_tokens(step),
            "train/batch_tokens": tokens_before(step) - tokens_before(step - 1),
            "train/sequence_length": sequence_length,
            "train/phase": phase.index if phase else 0,
            "train/bad_steps": bad_steps,
            "train/spikes": self._faults.policy.spike_total,
            "optim/learning_rate": self.learning_rate(lr_factor),
            "optim/adam_learning_rate": lr_factor * self._rates["adamw"],
            "optim/clipped": float(0 < self._max_grad_norm < found.grad_norm),
        }
        moe = self._model.config.moe
        if moe is not None and moe.temperature_steps and phase and phase.model is not None:  # it is 1 in later stages
            values["experts/temperature"] = temperature(moe, step - 1)
        if found.penalty is not None:
            values["train/ewc"] = found.penalty
        if self._state.scaler is not None:
            values["optim/loss_scale"] = found.loss_scale
        clock = self.clock.metrics(self._peak)
        values |= loss_metrics(found) | clock | weight_metrics(self._model.trained_by_kind, found)
        values |= expert_metrics(self._model.config, found)
        values |= attention_metrics(self._model.config, self._threshold, found)
        if (repeated := self._rows.take_share()) is not None:
            values["train/repeated_rows"] = repeated
        values |= self._process.metrics() | (self._machine.metrics() if self._model.ranks.is_first else {}) | self._compared_ranks(step)
        self.restart_clock()
        return values

    def _trained_tokens(self, step: int) -> int:
        """Tokens of the steps before `step`, without those that a rollback has skipped."""
        before = self._curriculum.tokens_before
        return before(step) - sum(before(stop) - before(start) for start, stop in self._faults.skips.before(step))

    def _compared_ranks(self, step: int) -> dict[str, float]:
        """The metrics that compare ranks, in the first line after every 20th step."""
        clock = self.clock
        if step // _COMPARE_RANKS_EVERY == (step - clock.steps) // _COMPARE_RANKS_EVERY:
            return {}
        own, seconds = clock.own / clock.steps, clock.step / clock.steps
        reader, newest = self._model.ranks.rank("dp"), self._rows.newest
        return self._faults.compare_ranks(step, own, seconds, clock.data_wait, reader, newest, self._model.device)


def loss_metrics(found: StepValues) -> dict[str, float]:
    """The losses and the gradient norm of a step."""
    loss = found.loss
    values = {
        "train/loss": loss,
        "train/perplexity": math.exp(min(loss, 80.0)) if math.isfinite(loss) else loss,
        "train/z_loss": found.z_loss,
        "train/valid_tokens": found.valid_tokens,
        "optim/grad_norm": found.grad_norm,
    }
    if found.auxiliary_loss is not None:
        values["train/auxiliary_loss"] = found.auxiliary_loss
    if found.mtp_loss is not None:
        values["train/mtp_loss"] = found.mtp_loss
    return values


def weight_metrics(trained_by_kind: Sequence[int], found: StepValues) -> dict[str, float]:
    """The root mean square of the gradients of each kind of weight, and the norms of the embedding and of the head."""
    values: dict[str, float] = {}
    if found.grad_squares_G is not None:
        known = zip(KINDS, trained_by_kind, found.grad_squares_G.tolist(), strict=True)
        values |= {f"optim/grad_rms/{kind}": math.sqrt(square / count) for kind, count, square in known if count}
    if found.end_norms is not None:
        named = zip(("optim/embedding_norm", "optim/head_norm"), found.end_norms.tolist(), strict=True)
        values |= {name: norm for name, norm in named if norm}
    return values


def attention_metrics(model: Model, threshold: float, found: StepValues, heads: bool = False) -> dict[str, float]:
    """`attention/...`: the largest scores of the step, of all heads, by layer and, with `heads`, by head; and the heads above `threshold`.
    Empty where they are not recorded; layers of multi-token prediction that were not used have none."""
    if found.logits_AH is None:
        return {}
    numbered = zip(model.attention_layers, found.logits_AH.tolist(), strict=True)
    layers = {layer: logits_H for layer, logits_H in numbered if max(logits_H) > -math.inf}
    if heads:
        return {
            f"attention/logit_max/{layer}/{head}": round(logit, 6) for layer, logits in layers.items() for head, logit in enumerate(logits)
        }
    values = {f"attention/logit_max/{layer}": round(max(logits_H), 6) for layer, logits_H in layers.items()}
    return values | {
        "attention/logit_max": max(map(max, layers.values()), default=math.nan),
        "attention/clipped_heads": float(sum(logit > threshold for logits_H in layers.values() for logit in logits_H)),
    }


def source_metrics(names: Sequence[str], tokens_S: Sequence[int], found: StepValues) -> dict[str, float]:
    """The loss of each source that the step has tokens of, and how many sources it mixes. Empty where the sources are not known."""
    if not sum(tokens_S) or len(names) != len(tokens_S):
        return {}
    shares = [tokens / sum(tokens_S) for tokens in tokens_S if tokens]
    values = {"train/effective_sources": math.exp(-sum(share * math.log(share) for share in shares))}
    if found.sources_S is not None:
        known = zip(names, tokens_S, found.sources_S.tolist(), strict=True)
        values |= {f"train/source/{name}/loss": loss / tokens for name, tokens, loss in known if tokens}
    return values


def expert_metrics(model: Model, found: StepValues) -> dict[str, float]:
    """`experts/...`: the balance of the load of the experts (L sparse layers), over all layers and by layer; layers of multi-token
    prediction that were not used have none."""
    if found.counts_LE is None or model.moe is None or not (used_L := found.counts_LE.sum(-1) > 0).any():
        return {}
    assert found.biases_L is not None
    numbers = [layer for layer, used in zip(model.sparse_layers, used_L.tolist(), strict=True) if used]
    layers, bias_L = load_statistics(found.counts_LE[used_L], model.moe.capacity_factor), found.biases_L[used_L]
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
        values |= {f"experts/{name}/{layer}": round(float(value), 6) for layer, value in zip(numbers, per_layer, strict=True)}
    return values

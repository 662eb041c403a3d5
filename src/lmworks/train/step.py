"""One optimizer step: forward and backward of its micro-batches, clipping, update, balancing of the experts.

`Objective` is what a stage minimizes, where that is not the loss of the next token. `StepFlags` are what the ranks reduce at the beginning
of a step, so that all of them take the same branches in it. `StepValues` are what a step has found, on the host: one copy for everything
that the trainer, the policies and the metrics read of it.

Shapes: L MoE layers, E experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lmworks.model.transfers import to_host
from lmworks.optim.clip import LossScaler
from lmworks.optim.groups import local
from lmworks.optim.optimizer import Updates
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel, StepSums
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import Batch
from lmworks.train.ewc import EwcPenalty
from lmworks.watch.policy import Limits


@dataclass(frozen=True)
class Update:
    """One optimizer update of a step. `batch`: the rows of all ranks, with weights, the same on each. The weighted loss is divided by
    `normalizer`; `loss` is the objective's value."""

    batch: Batch
    normalizer: float
    loss: Tensor


@dataclass(frozen=True)
class Trained:
    """What an update was made from: `batch`, this rank's share of `rows` rows, whose summed loss was divided by `normalizer`. `whole` is or
    returns the rows of all ranks."""

    batch: Batch
    rows: int
    normalizer: float
    whole: Batch | Callable[[], Batch]


class Objective(Protocol):
    """Makes the updates of a step. Dropout, router losses, the z-loss and the losses of multi-token prediction are off: a token has the
    same probability when it is generated, scored and learned. All methods are collective."""

    def updates(self, step: int) -> Iterator[Update]:
        """The updates of a step, each to be applied before the next is asked for: a function of the weights, the seed and the step."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the last step."""


@dataclass(frozen=True)
class StepResult:
    """Means over the valid tokens of the step (`auxiliary_loss`: over all tokens), on all ranks, still on the device: nothing here has made
    the host wait.

    `applied` is whether the update was applied; in a step of several it is whether all were, and `updates` how many of them.
    `counts_LE` are the tokens per expert, `sources_S` the summed cross-entropy of each source, `grad_squares_G` the sum of squares of the
    gradients of each kind of weight (`recipe.parameter.KINDS`) before clipping, `logits_AH` the largest score of each head of each layer of
    attention, where they are recorded.
    """

    loss: Tensor
    z_loss: Tensor
    auxiliary_loss: Tensor | None
    mtp_loss: Tensor | None
    grad_norm: Tensor
    applied: Tensor
    counts_LE: Tensor | None
    valid_tokens: int
    sources_S: Tensor | None = None
    grad_squares_G: Tensor | None = None
    logits_AH: Tensor | None = None
    updates: Tensor | None = None


def seed_dropout(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed what draws the dropout masks of a step on this device, and no more: `torch.manual_seed` seeds every kind of device, and keeps
    the stack of the caller for each that is absent, 3 ms."""
    drawn = dropout_seed(seed, step, rank)
    torch.default_generator.manual_seed(drawn)
    if device.type == "cuda":
        torch.cuda.manual_seed(drawn)


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """63 bits for the generators before a step: dropout is a function of the seed, the step and the rank, so that the state of no
    generator has to be saved."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest(), "little") >> 1


def micro_batch_of(recipe: Recipe, sequence_length: int, pipelined: bool = False) -> int:
    """Sequences of a micro-batch.

    `train.micro_batch_sequences` is that of the longest phase (`Recipe.micro_batch_stages`); shorter sequences get proportionally more, so
    that a micro-batch has the same number of tokens. A pipeline needs many micro-batches and keeps the key's, as the plan does.
    """
    assert recipe.train.micro_batch_sequences
    if pipelined:
        return recipe.train.micro_batch_sequences
    longest = max((int(stage.sequence_length) for stage in recipe.micro_batch_stages), default=sequence_length)
    return max(1, recipe.train.micro_batch_sequences * longest // sequence_length)


def train_step(
    model: ParallelModel, optimizer: Updates, batch: Batch, *,
    micro_batch_size: int, lr_factor: float, max_grad_norm: float, bias_update_rate: float, scaler: LossScaler | None = None,
    sequences: int | None = None, valid_tokens: int | None = None, limits: Limits = Limits(), penalty: EwcPenalty | None = None,
    normalizer: float | None = None, allowed: Tensor | None = None,
) -> StepResult:  # fmt: skip
    """Update the model from one batch.

    batch: the sequences that this rank reads. sequences, valid_tokens: of the whole step, over all ranks; those of `batch` by default.
    lr_factor: multiplies the peak learning rate of every parameter group (`Curriculum.lr_factor`).
    bias_update_rate: of the expert biases (`PhaseSettings.bias_update_rate`).
    limits: loss and gradient norm above which the step is a spike.
    normalizer: what the summed loss is divided by; the valid tokens by default.
    allowed: False, on the device, where nothing may be changed: an update before this one in the same step was not applied.

    The summed loss of each micro-batch is divided by the valid tokens of the whole step, so the result does not depend on how the batch
    is divided into micro-batches and over ranks (a mean of means would give short documents more weight). The auxiliary loss of the
    routers is divided by all tokens, since all are routed: its weight does not depend on how many of them are trained. Gradients are
    accumulated in fp32; those of a `penalty` are added to them. A step whose loss or gradient norm is not finite, or not below its limit,
    changes nothing on any rank.
    """
    optimizer.zero_grad()
    gradients = accumulate_gradients(model, batch, micro_batch_size, sequences, valid_tokens, normalizer, scaler)
    return apply_gradients(model, optimizer, gradients, lr_factor, max_grad_norm, bias_update_rate, scaler, limits, penalty, allowed)


@dataclass(frozen=True)
class Gradients:
    """What has been accumulated for a step, besides the gradients themselves: sums over all ranks, what the loss was divided by, and the
    positions and valid tokens of all ranks."""

    sums: StepSums
    normalizer: float
    positions: int
    valid_tokens: int

    def __add__(self, more: Gradients) -> Gradients:
        return Gradients(self.sums + more.sums, self.normalizer, self.positions + more.positions, self.valid_tokens + more.valid_tokens)


def accumulate_gradients(
    model: ParallelModel, batch: Batch, micro_batch_size: int, sequences: int | None = None, valid_tokens: int | None = None,
    normalizer: float | None = None, scaler: LossScaler | None = None,
) -> Gradients:  # fmt: skip
    """Forward and backward of a batch, whose gradients are added to those that the parameters have. See `train_step`."""
    sequences = len(batch.tokens) if sequences is None else sequences
    valid_tokens = batch.valid_tokens if valid_tokens is None else valid_tokens
    tokens = max(valid_tokens, 1) if normalizer is None else normalizer
    scale = (1.0 if scaler is None else scaler.scale) / tokens
    positions = sequences * batch.tokens.shape[1]
    share = max(valid_tokens, 1) / positions
    sums = model.sum_over_ranks(model.forward_backward(batch, sequences, micro_batch_size, scale, share))
    return Gradients(sums, tokens, positions, valid_tokens)


def apply_gradients(
    model: ParallelModel, optimizer: Updates, gradients: Gradients, lr_factor: float, max_grad_norm: float, bias_update_rate: float,
    scaler: LossScaler | None = None, limits: Limits = Limits(), penalty: EwcPenalty | None = None, allowed: Tensor | None = None,
) -> StepResult:  # fmt: skip
    """Clip what was accumulated, and update the weights and the biases of the experts. See `train_step`."""
    sums, tokens, positions = gradients.sums, gradients.normalizer, gradients.positions
    if scaler is not None:
        torch._foreach_mul_([local(p.grad) for p in model.parameters() if p.grad is not None], 1 / scaler.scale)
    if penalty is not None:
        penalty.add_gradients()
    grad_norm, squares_G = model.clip_gradients(max_grad_norm)
    loss = sums.cross_entropy / tokens
    finite = torch.isfinite(loss) & torch.isfinite(grad_norm)
    apply = finite & (loss < limits.loss) & (grad_norm < limits.grad_norm)
    if allowed is not None:
        apply = apply & allowed
    optimizer.step(lr_factor, apply, sums.logits_AH)
    if scaler is not None:
        scaler.update(finite)
    if sums.counts_LE is not None:
        model.update_biases(sums.counts_LE, bias_update_rate, apply)
    return StepResult(
        loss, sums.z / tokens, None if sums.counts_LE is None else sums.auxiliary / positions,
        sums.mtp / tokens if model.config.mtp else None, grad_norm, apply, sums.counts_LE, gradients.valid_tokens, sums.sources_S,
        squares_G, sums.logits_AH,
    )  # fmt: skip


@dataclass(frozen=True)
class StepFlags:
    """Values of one step that are equal on all ranks.

    valid_tokens: tokens of the step that carry loss, over all data-parallel ranks.
    rows: the hash of the rows of the step, a sum over them (`observe/trained_rows.py`).
    detail: the first rank has time for statistics of the layers in this step (`observe/detail_lines.py`).
    sources: valid tokens of each source of the curriculum; empty where they are not known.
    stop: a rank has received a signal to stop. preempted: the signal came from a scheduler.
    save_due: the time after which a checkpoint is due has passed (`Saver.every_seconds`), by the clock of the first rank.
    save_failed: the asynchronous save has failed on a rank.
    mixture_changed: the first rank has found a pending change of the mixture in the ledger.
    batch_grows: the first rank has found that the batch is to grow before this step.
    """

    valid_tokens: int
    rows: int
    stop: bool
    preempted: bool
    save_due: bool
    save_failed: bool
    mixture_changed: bool
    detail: bool = False
    batch_grows: bool = False
    sources: tuple[int, ...] = ()


def all_reduce_flags(own: StepFlags, ranks: Ranks) -> StepFlags:
    """The flags of all ranks: tokens are summed over the data-parallel ranks, and a flag is set where any rank has set it."""
    rows = own.rows if all(ranks.rank(axis) == 0 for axis in ("pp", "cp", "tp")) else 0  # once from the ranks that read the same
    detail, save_due = own.detail and ranks.is_first, own.save_due and ranks.is_first
    grows = own.batch_grows and ranks.is_first
    values = (own.valid_tokens, rows, own.stop, own.preempted, save_due, own.save_failed, own.mixture_changed, detail, grows)
    if not ranks.distributed:
        return StepFlags(*values, own.sources)
    sums = torch.tensor((*values, *own.sources), dtype=torch.int64)
    torch.distributed.all_reduce(sums)
    summed = sums.tolist()
    (valid_tokens, rows, *flags), sources = summed[: len(values)], summed[len(values) :]
    copies = ranks.world // ranks.size("dp")  # ranks that read the same sequences
    stop, preempted, save_due, save_failed, mixture_changed, detail, grows = map(bool, flags)
    by_source = tuple(tokens // copies for tokens in sources)
    return StepFlags(valid_tokens // copies, rows, stop, preempted, save_due, save_failed, mixture_changed, detail, grows, by_source)


@dataclass(frozen=True)
class StepValues:
    """A `StepResult` as numbers, the loss scale after the step (1 without a scaler), and whether no smaller one can mend its overflow.

    `counts_LE` and `biases_L`, the largest absolute bias of each of L sparse layers, are fp64 tensors on the CPU. `biases_L` and `penalty`
    (of elastic weight consolidation) are None where they were not asked for. `updates`: how many were applied, in a step of several.
    """

    loss: float
    z_loss: float
    auxiliary_loss: float | None
    mtp_loss: float | None
    grad_norm: float
    counts_LE: Tensor | None
    valid_tokens: int
    loss_scale: float
    scale_exhausted: bool
    biases_L: Tensor | None
    penalty: float | None
    sources_S: Tensor | None = None
    grad_squares_G: Tensor | None = None
    end_norms: Tensor | None = None
    logits_AH: Tensor | None = None
    updates: int | None = None


def read_values(
    result: StepResult, scaler: LossScaler | None, biases_L: Tensor | None = None, penalty: Tensor | None = None,
    end_norms: Tensor | None = None,
) -> StepValues:  # fmt: skip
    """Wait for the step, once, and read what it has found."""
    optional = {
        "auxiliary_loss": result.auxiliary_loss, "mtp_loss": result.mtp_loss, "counts_LE": result.counts_LE, "biases_L": biases_L,
        "penalty": penalty, "sources_S": result.sources_S, "grad_squares_G": result.grad_squares_G, "end_norms": end_norms,
        "logits_AH": result.logits_AH, "updates": result.updates,
        "scale": None if scaler is None else scaler.scale, "exhausted": None if scaler is None else scaler.exhausted,
    }  # fmt: skip
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    loss, norm, z, *rest = to_host(result.loss, result.grad_norm, result.z_loss, *given.values())
    found = dict(zip(given, rest, strict=True))

    def number(name: str) -> float | None:
        return float(found[name]) if name in found else None

    return StepValues(
        float(loss), float(z), number("auxiliary_loss"), number("mtp_loss"), float(norm), found.get("counts_LE"), result.valid_tokens,
        float(found.get("scale", 1.0)), bool(found.get("exhausted", False)), found.get("biases_L"), number("penalty"),
        found.get("sources_S"), found.get("grad_squares_G"), found.get("end_norms"), found.get("logits_AH"),
        int(found["updates"]) if "updates" in found else None,
    )  # fmt: skip

"""Pipeline parallelism on `torch.distributed.pipelining`: each rank of `pp` holds some layers, and micro-batches pass through the ranks.

A stage is a `Transformer` without the modules of other stages; the names of the remaining ones do not change. Stage s is on rank s % pp.
Every rank reads the tokens, labels and document boundaries of a micro-batch itself; only activations (B, T, D) are sent between stages,
where T is this rank's part of the sequence.

torch provides the schedules and the communication: `PipelineStage`, with explicit shapes, because inferring them would run a micro-batch
twice, and `step` of a schedule, whose only argument is the index of each micro-batch. Of torch's private interface only `_modules` is
used, below. Gradients are sums, so `scale_grads` is off; gradients of sharded weights are reduced after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmworks.model import Transformer
from lmworks.model.transformer import LayerStats
from lmworks.optim.groups import local_grad
from lmworks.parallel.collectives import override_members
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.pipeline_stages import pipeline_stage_layers
from lmworks.recipe.schema.layout import Layout

Inputs = tuple[Any, ...]  # the arguments of `Transformer.loss`


def stage_numbers(layout: Layout, rank: int) -> range:
    """The stages of a rank of `pp`, in the order of the forward pass."""
    return range(rank, layout.pp * layout.pipeline_stages_per_rank, layout.pp)


def cut(model: Transformer, layout: Layout, number: int) -> Transformer:
    """Remove from a model on the meta device what does not belong to a stage.

    The last stage has a copy of the embedding if it needs one, for a tied head or multi-token prediction.
    """
    last = number == layout.pp * layout.pipeline_stages_per_rank - 1
    here = pipeline_stage_layers(model.config, layout)[number]
    for layer in range(model.config.num_hidden_layers or 0):
        if layer not in here:
            del model.layers._modules[str(layer)]  # `del model.layers[layer]` would renumber the others
    if number and not (last and shares_embedding(model)):
        model.register_module("embedding", None)
    if not last:
        model.register_module("norm", None)
        model.register_module("head", None)
        model.mtp = nn.ModuleList()
    return model


def shares_embedding(model: Transformer) -> bool:
    """Whether the last stage uses the embedding too."""
    return model.config.tie_word_embeddings or model.config.mtp is not None


def sum_by_source(of_tokens_N: Tensor, sources_SB: Tensor) -> Tensor:
    """The sum of a value of each token over the rows of each source; (S,) fp32. A product of matrices, whose bits do not vary."""
    return sources_SB @ of_tokens_N.view(sources_SB.shape[1], -1).sum(1, dtype=torch.float32)


@dataclass
class Step:
    """The micro-batches of a step, whether each is real or blank, the factor of the loss, and the results of this rank's stages."""

    inputs: Sequence[Inputs]
    real: Sequence[bool]
    scale: float | Tensor
    sources_SB: Sequence[Tensor | None] = ()  # of each micro-batch, where they are known
    # by stage and micro-batch: cross-entropy, z, auxiliary, mtp, cross-entropy of each source
    scalars: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    counts_LE: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    logits_AH: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # of the real micro-batches, where they are recorded
    of_tokens_N: dict[int, Tensor] = field(default_factory=dict)  # by micro-batch: the cross-entropy of each token, without gradients


_NO_STEP = Step([], [], 0.0)


class Pipeline:
    """This rank's stages, and the execution of a step's micro-batches. All ranks call every method in the same order."""

    def __init__(self, parts: list[Transformer], ranks: Ranks) -> None:
        self.parts, self.ranks, self.layout = parts, ranks, ranks.layout
        self.numbers = stage_numbers(self.layout, ranks.rank("pp"))
        self.stages = self.layout.pp * self.layout.pipeline_stages_per_rank
        self.device = next(parts[0].parameters()).device
        self._step = _NO_STEP
        self._schedule: tuple[tuple[int, ...], Any] | None = None
        for part, number in zip(parts, self.numbers, strict=True):
            override_members(part, {"forward": self._stage_forward(number)})

    @property
    def duplicates(self) -> list[Tensor]:
        """Parameters of this rank that the first stage has as well."""
        return [self.parts[-1].embedding.weight] if self._is_last and shares_embedding(self.parts[-1]) else []

    @property
    def _is_last(self) -> bool:
        return self.numbers[-1] == self.stages - 1

    def forward_backward(
        self, inputs: Sequence[Inputs], real: Sequence[bool], scale: float | Tensor, sources_SB: Sequence[Tensor | None] = ()
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Accumulate the gradients of `scale` times the summed loss of micro-batches of one shape; blank ones contribute nothing.

        Returns the sums of this rank's stages (cross-entropy, z, auxiliary, mtp, cross-entropy of each source), the tokens per expert
        of its MoE layers, and the largest score of each head of its layers of attention, where they are recorded.
        """
        self._step = Step(inputs, real, scale, sources_SB)
        number = torch.arange(len(inputs))
        self._schedule_for(len(inputs), inputs[0][0].shape).step(number=number, target=number)
        self._sum_duplicate_gradients()
        step, self._step = self._step, _NO_STEP
        counts = [
            torch.stack([counts for (stage, _), counts in sorted(step.counts_LE.items()) if stage == number]).sum(0)
            for number in self.numbers
            if (number, 0) in step.counts_LE
        ]
        logits = [
            torch.stack([found for (stage, _), found in step.logits_AH.items() if stage == number]).amax(0)
            for number in self.numbers
            if any(stage == number for stage, _ in step.logits_AH)
        ]
        scalars = torch.stack([step.scalars[key] for key in sorted(step.scalars)]).sum(0)
        return scalars, torch.cat(counts) if counts else None, torch.cat(logits) if logits else None

    def cross_entropy(self, inputs: Sequence[Inputs], real: Sequence[bool]) -> Tensor:
        """The summed cross-entropy of micro-batches, of any shapes, forward only; on the last stage's rank, and 0 on the others."""
        step = self._forward(inputs, real)
        return torch.stack([step.scalars[key][0] for key in sorted(step.scalars)]).sum()

    def token_cross_entropy(self, inputs: Sequence[Inputs], real: Sequence[bool]) -> list[Tensor] | None:
        """The cross-entropy of each token (N,) of each micro-batch, forward only; None but on the last stage's rank."""
        step = self._forward(inputs, real)
        return [step.of_tokens_N[index] for index in range(len(inputs))] if step.of_tokens_N else None

    @torch.no_grad()
    def _forward(self, inputs: Sequence[Inputs], real: Sequence[bool]) -> Step:
        """Run micro-batches of any shapes forward; what this rank's stages found."""
        self._step = Step(inputs, real, 1.0)
        sent: list[tuple[dist.Work | None, Tensor]] = []
        group, rank, size = self.ranks.group("pp"), self.ranks.rank("pp"), self.layout.pp
        for part, number in zip(self.parts, self.numbers, strict=True):
            for index, (tokens, *_) in enumerate(inputs):
                received = []
                if number:
                    received.append(torch.empty(self._activation_shape(tokens.shape), dtype=part.compute_dtype, device=self.device))
                    dist.recv(received[0], group=group, group_src=(rank - 1) % size)
                out = part(*received, number=index)
                if number < self.stages - 1:
                    sent.append((dist.isend(out, group=group, group_dst=(rank + 1) % size), out))
        for work, _ in sent:
            if work is not None:
                work.wait()
        step, self._step = self._step, _NO_STEP
        return step

    def _stage_forward(self, stage: int) -> Any:
        """The forward of a stage: from the activations of the previous stage, or tokens, to activations, or to the loss."""

        def forward(part: Transformer, *received: Tensor, number: Any) -> Tensor:
            return self.forward_stage(part, stage, int(number), *received)

        return forward

    def forward_stage(self, part: Transformer, stage: int, index: int, *received: Tensor) -> Tensor:
        """The forward pass of micro-batch `index` through `stage`: activations for the next stage, or the loss of the last."""
        tokens_BT, labels_BT, cu_seqlens, cache, ahead, weights_BT = self._step.inputs[index]
        scale = self._step.scale if self._step.real[index] else 0.0
        spans = part.spans(tokens_BT, cu_seqlens, cache)
        x_BTD, layers = part.blocks(received[0] if received else part.embed(tokens_BT), spans, cache)
        if stage < self.stages - 1:
            self._record(stage, index, layers, x_BTD.new_zeros(3, dtype=torch.float32), None)
            return x_BTD if layers.aux is None else _WithAuxiliaryLoss.apply(x_BTD, layers.aux * part.auxiliary_factor * scale)
        loss = part.last_loss(x_BTD, layers, tokens_BT, labels_BT, spans, cache, ahead, weights_BT)
        if not torch.is_grad_enabled():
            self._step.of_tokens_N[index] = loss.head.of_tokens_N
        mtp = torch.zeros_like(loss.head.z) if loss.mtp is None else loss.mtp.detach()
        self._record(stage, index, loss.layers, torch.stack((loss.head.cross_entropy, loss.head.z, mtp)), loss.head.of_tokens_N)
        return (loss.total * scale)[None]

    def _record(self, stage: int, index: int, layers: LayerStats, head: Tensor, of_tokens_N: Tensor | None) -> None:
        """Record the results of a stage for a micro-batch; zeros for a blank one. `of_tokens_N`: of the last stage."""
        aux = head.new_zeros(()) if layers.aux is None else layers.aux.detach()
        cross_entropy, z, mtp = head
        real = self._step.real[index]
        scalars = torch.stack((cross_entropy, z, aux, mtp))
        if self._step.sources_SB and (sources_SB := self._step.sources_SB[index]) is not None:
            sums = head.new_zeros(len(sources_SB)) if of_tokens_N is None else sum_by_source(of_tokens_N, sources_SB)
            scalars = torch.cat((scalars, sums))
        self._step.scalars[stage, index] = scalars * real
        if layers.counts is not None:
            self._step.counts_LE[stage, index] = layers.counts * float(real)
        if layers.logits_AH is not None and real:
            self._step.logits_AH[stage, index] = layers.logits_AH

    def _schedule_for(self, count: int, shape: Sequence[int]) -> Any:
        """The schedule for `count` micro-batches of shape (B, T): that of the previous step unless they have changed."""
        key = (count, *shape)
        if self._schedule is None or self._schedule[0] != key:
            self._schedule = None  # frees its buffers before new ones are allocated
            self._schedule = (key, self._new_schedule(count, shape))
        return self._schedule[1]

    def _new_schedule(self, count: int, shape: Sequence[int]) -> Any:
        # Imported here because it imports torch's compiler, which takes half a second.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
        from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

        total = torch.empty(1, device="meta", requires_grad=True)
        activations = torch.empty(self._activation_shape(shape), dtype=self.parts[0].compute_dtype, device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                part, number, self.stages, self.device, input_args=(activations,) if number else (),
                output_args=(total if number == self.stages - 1 else activations,), group=self.ranks.group("pp"),
            )
            for part, number in zip(self.parts, self.numbers, strict=True)
        ]  # fmt: skip
        options: dict[str, Any] = {"n_microbatches": count, "loss_fn": _loss, "scale_grads": False}
        match self.layout.pipeline_schedule:
            case "interleaved":
                return ScheduleInterleaved1F1B(stages, **options)  # type: ignore[arg-type]
            case "zero-bubble":
                return ScheduleInterleavedZeroBubble(stages, **options)  # type: ignore[arg-type]
            case "1f1b" if count >= self.stages:
                return Schedule1F1B(stages[0], **options)
            case _:  # 1F1B with fewer micro-batches than stages starts no backward before the last forward: it is GPipe
                return ScheduleGPipe(stages[0], **options)

    def _activation_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """The shape of the activations between stages, for tokens (B, T)."""
        rows, length = shape
        assert self.parts[0].config.hidden_size
        return rows, length // self.ranks.size("tp"), self.parts[0].config.hidden_size

    @torch.no_grad()
    def _sum_duplicate_gradients(self) -> None:
        """Sum the gradients of an embedding that two stages use, on both."""
        first, last = 0, self.layout.pp - 1
        rank, group = self.ranks.rank("pp"), self.ranks.group("pp")
        if not shares_embedding(self.parts[0]) or rank not in (first, last):
            return
        weight = self.parts[0 if rank == first else -1].embedding.weight
        if not weight.requires_grad:  # frozen under adapters
            return
        if weight.grad is None:  # a copy that only multi-token prediction uses, which has no loss in evaluation mode
            weight.grad = torch.zeros_like(weight)
        mine = local_grad(weight)
        assert mine is not None
        theirs = torch.empty_like(mine)
        if rank == first:
            dist.send(mine, group=group, group_dst=last)
            dist.recv(theirs, group=group, group_src=last)
        else:
            dist.recv(theirs, group=group, group_src=first)
            dist.send(mine, group=group, group_dst=first)
        mine += theirs  # addition is commutative, so both ranks get the same bits


def _loss(total: Tensor, _: Tensor) -> Tensor:
    return total.sum()


class _WithAuxiliaryLoss(torch.autograd.Function):
    """Returns the activations unchanged; in the backward pass the auxiliary loss of the stage gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.shape = loss.shape
        return x.clone()  # torch's zero-bubble schedules detach the output of a stage in place, which a view does not allow

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.ones(ctx.shape, device=grad.device)

"""A model on the ranks of a layout; a single process is a layout of one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmworks.errors import UserError
from lmworks.inference.sampling import GenerateOptions, drawn_chunk_loss
from lmworks.model import Transformer
from lmworks.model.balance import update_biases
from lmworks.model.moe import MoE
from lmworks.model.transfers import HostToDevice, to_host
from lmworks.model.transformer import Loss
from lmworks.optim.clip import clip_gradients
from lmworks.optim.groups import local, shards
from lmworks.optim.optimizer import Ema
from lmworks.parallel import context, data
from lmworks.parallel.mesh import Ranks, alone
from lmworks.parallel.pipeline import Pipeline, sum_by_source
from lmworks.parallel.pipeline_stages import pipelined_micro_batch, runnable
from lmworks.parallel.splits import model_problems
from lmworks.recipe.parameter import KINDS, kind_of
from lmworks.recipe.schema.model import Model, is_adapter
from lmworks.shards.batch import IGNORE, Batch
from lmworks.shards.order import sequences_of_rank

_ENDS = ("embedding.weight", "head.weight")


@dataclass(frozen=True)
class StepSums:
    """Sums over the valid tokens of a rank's share of a step, and the tokens per expert of each of its MoE layers.

    `sources_S` is the cross-entropy of each source (`Batch.sources`), None where they are not known. `logits_AH` has the largest score of
    each head of all A layers of attention of the model, -inf where this rank has seen none; None where they are not recorded.
    """

    cross_entropy: Tensor
    z: Tensor
    auxiliary: Tensor
    mtp: Tensor
    counts_LE: Tensor | None
    sources_S: Tensor | None = None
    logits_AH: Tensor | None = None

    def __add__(self, more: StepSums) -> StepSums:
        counts = None if self.counts_LE is None or more.counts_LE is None else self.counts_LE + more.counts_LE
        sums = self.cross_entropy + more.cross_entropy, self.z + more.z, self.auxiliary + more.auxiliary, self.mtp + more.mtp
        sources = None if self.sources_S is None or more.sources_S is None else self.sources_S + more.sources_S
        largest = None if self.logits_AH is None or more.logits_AH is None else torch.maximum(self.logits_AH, more.logits_AH)
        return StepSums(*sums, counts, sources, largest)


class ParallelModel:
    """This rank's parts of a model, and how micro-batches go through them.

    Methods are collective: every rank calls them in the same order.
    """

    def __init__(self, parts: list[Transformer], ranks: Ranks | None = None) -> None:
        self.parts, self.ranks = parts, ranks or alone()
        self.compute_dtype = parts[0].compute_dtype
        self.device = next(parts[0].parameters()).device
        self._to_device = HostToDevice(self.device)
        # The indices of this rank's MoE layers among all MoE layers of the model; those of multi-token prediction are last.
        indices = [number for part in parts for number in _moe_layer_indices(part)]
        self._moe_indices = torch.tensor(indices, dtype=torch.int64).to(self.device)
        # The rows of this rank's layers of attention among those of the model, if their largest scores are recorded.
        attending = self.config.attention_layers
        self._logit_rows = [
            attending.index(number) for part in parts for number, block in part.numbered_blocks() if block.records_logits
        ]
        self._records_logits = any(part.records_logits for part in parts)
        self.pipeline = Pipeline(parts, self.ranks) if self.ranks.size("pp") > 1 else None

    @property
    def whole(self) -> Transformer | None:
        """The model, if this rank runs all of its layers, as generation needs; None with pipeline stages."""
        return self.parts[0] if self.ranks.size("pp") == 1 else None

    @property
    def duplicates(self) -> list[Tensor]:
        """Parameters of this rank that another pipeline stage holds too and accounts for (a tied embedding)."""
        return self.pipeline.duplicates if self.pipeline else []

    def without_duplicates(self, state: dict[str, Any]) -> dict[str, Any]:
        """A training state, tensors by kind and name, without the duplicates that another pipeline stage writes to a checkpoint."""
        held = {id(duplicate) for duplicate in self.duplicates}
        names = tuple(name for name, parameter in self.named_parameters() if id(parameter) in held)
        return {kind: {name: value for name, value in found.items() if not name.endswith(names)} for kind, found in state.items()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            yield from part.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self, values: bool = True) -> dict[str, Any]:
        """Live tensors by the names that they have in a single process; with pipeline stages, those of this rank. Of a model with
        low-rank adapters these are the adapters, all that training changes.

        If they are copies (`state_loaded`), `values` says whether values are needed, or only empty tensors to load into.
        """
        state = {name: value for part in self.parts for name, value in part.state_dict().items()}
        return {name: value for name, value in state.items() if is_adapter(name)} if self.has_adapters else state

    def base_state_dict(self) -> dict[str, Any]:
        """The live tensors of the weights without adapters: the model that training starts from."""
        return {name: value for part in self.parts for name, value in part.state_dict().items() if not is_adapter(name)}

    @property
    def has_adapters(self) -> bool:
        """Whether low-rank adapters are trained, and the weights are frozen."""
        return any(is_adapter(name) for name, _ in self.named_parameters())

    def state_loaded(self, state: dict[str, Any]) -> None:
        """Use a training state that was loaded into the tensors of `state_dict`; does nothing if those are the live tensors."""

    def moe_layers(self) -> list[MoE]:
        return [ffn for part in self.parts for ffn in part.moe_layers()]

    @property
    def config(self) -> Model:
        """The model in force: a phase may change positions, windows, and how experts are balanced."""
        return self.parts[0].config

    def configure(self, config: Model) -> None:
        """Raises `UserError` if the layout cannot compute what a checkpoint, made on another layout, has in force."""
        for problem in model_problems(config, self.ranks.layout):
            raise UserError(f"layout: {problem}")
        for part in self.parts:
            part.configure(config)

    def set_norm_blend(self, blend: float) -> None:
        for part in self.parts:
            part.set_norm_blend(blend)

    @property
    def training(self) -> bool:
        return self.parts[0].training

    def eval(self) -> None:
        self.train(False)

    def set_sampling(self, options: GenerateOptions) -> None:
        """From now on the losses are those under the distribution that tokens are drawn from with these options. Without filters (top_k,
        top_p, min_p) on any layout; with them, each rank must have the whole vocabulary."""
        if options.distribution != (1.0, 0, 1.0, 0.0):
            for part in self.parts:
                part._chunk_loss = drawn_chunk_loss(part._chunk_loss, options)

    def train(self, mode: bool = True) -> None:
        for part in self.parts:
            part.train(mode)

    @contextmanager
    def ema_weights(self, ema: Ema | None) -> Iterator[None]:
        """Within the block, the model has its averaged weights, as evaluation and export use them; no change without an `ema`."""
        if ema is None:
            yield
            return
        self.release()
        with ema.in_place():
            try:
                yield
            finally:
                self.release()

    @contextmanager
    def exact_logprobs(self) -> Iterator[None]:
        """Within the block, a model that computes in fp32 computes in fp64, which needs no gradients; another one is unchanged.

        The order in which a matrix product or a norm adds up depends on the number of rows, so that a token decoded among others and the
        same token scored in its answer differ by the rounding of the type: 3e-6 of the probability in fp32, 1e-13 in fp64.
        """
        if self.compute_dtype != torch.float32:
            yield
            return
        models: list[ParallelModel | Transformer] = [self, *self.parts]
        for one in models:
            one.compute_dtype = torch.float64
        try:
            yield
        finally:
            for one in models:
                one.compute_dtype = torch.float32

    def release(self) -> None:
        """Free gathered weights: the parameters are those of this rank again."""
        for part in self.parts:
            data.release(part)

    def rank_sequences(self, count: int) -> tuple[int, int]:
        """The sequences [start, stop), of the `count` sequences of a step, that this rank reads; see `lmworks.shards.order`."""
        return sequences_of_rank(count, self.ranks.rank("dp"), self.ranks.size("dp"))

    def forward_backward(
        self, batch: Batch, rows: int, micro_batch_size: int, scale: float | Tensor, valid_share: float = 1.0
    ) -> StepSums:
        """Accumulate the gradients of `scale` times the summed loss over this rank's rows of a step, `micro_batch_size` rows at a time.

        `rows` is the number of rows of the whole step: a rank with one row fewer than others may run a blank micro-batch. The returned
        sums are those of this rank, before `sum_over_ranks`. `valid_share`: valid tokens relative to all tokens of the step, where `scale`
        divides by the valid ones. The auxiliary loss of the routers is a sum over all tokens, and becomes their mean by this factor.
        """
        for part in self.parts:
            part.auxiliary_factor = valid_share
        if not self.training:
            for part in self.parts:
                data.gather_unused(part)
        if self.pipeline:
            return self._pipelined(self.pipeline, batch, rows, micro_batch_size, scale)
        (model,) = self.parts
        sums, counts, by_source, logits = [], [], [], []
        largest = -(-rows // self.ranks.size("dp"))
        pieces = list(micro_batches(batch, -(-largest // micro_batch_size), micro_batch_size))
        balance = None if self.config.moe is None else self.config.moe.balance
        if balance is not None and balance.has_step_loss and self.training:
            model.step_counts = self._step_counts(model, pieces)
        for index, (piece, real) in enumerate(pieces):
            inputs, sources_SB = self._inputs_and_sources(piece)
            loss = self._backward(model, inputs, scale if real else 0.0, last=index == len(pieces) - 1)
            if real:
                none = torch.zeros_like(loss.head.z)
                auxiliary, mtp = (none if value is None else value.detach() for value in (loss.layers.aux, loss.mtp))
                sums.append(torch.stack((loss.head.cross_entropy, loss.head.z, auxiliary, mtp)))
                if sources_SB is not None:
                    by_source.append(sum_by_source(loss.head.of_tokens_N, sources_SB))
                if loss.layers.logits_AH is not None:
                    logits.append(loss.layers.logits_AH)
            if loss.layers.counts is not None:
                counts.append(loss.layers.counts * float(real))
        model.step_counts = None
        scalars = torch.stack(sums).sum(0) if sums else torch.zeros(4, device=self.device)
        cross_entropy, z, auxiliary, mtp = scalars
        found = torch.stack(by_source).sum(0) if by_source else self._no_sources(batch)
        logits_AH = self._logits_of_model(torch.stack(logits).amax(0) if logits else None)
        return StepSums(cross_entropy, z, auxiliary, mtp, torch.stack(counts).sum(0) if counts else None, found, logits_AH)

    def _logits_of_model(self, own_AH: Tensor | None) -> Tensor | None:
        """The largest scores that this rank has seen, in the places of its layers and heads among all; None if they are not recorded."""
        if not self._records_logits:
            return None
        heads = self.config.num_attention_heads
        assert heads
        logits_AH = torch.full((len(self.config.attention_layers), heads), float("-inf"), device=self.device)
        if own_AH is not None:  # without rows for multi-token prediction in evaluation mode, which come last
            own = heads // self.ranks.size("tp")
            first = own * self.ranks.rank("tp")
            for row, found_H in zip(self._logit_rows, own_AH, strict=False):
                logits_AH[row, first : first + own] = found_H
        return logits_AH

    def _no_sources(self, batch: Batch) -> Tensor | None:
        """The sums of a rank that has no rows."""
        return None if batch.sources is None else torch.zeros(batch.sources.shape[1], device=self.device)

    @torch.no_grad()
    def _step_counts(self, model: Transformer, pieces: list[tuple[Batch, bool]]) -> Callable[[Tensor], Tensor]:
        """What gives the tokens per expert of the step over all ranks and micro-batches, which the auxiliary loss of each micro-batch
        needs, from those of a micro-batch. Several are counted before the first one's backward pass, in forward passes of their own, whose
        dropout masks differ from those of the step. No pipeline has this loss, so that every rank has all layers."""
        if len(pieces) == 1:
            return lambda counts_LE: self.ranks.all_reduce(counts_LE.detach() * float(pieces[0][1]), "loss")
        found = []
        for piece, real in pieces:
            counts_LE = model.loss(*self._inputs(piece)).layers.counts
            assert counts_LE is not None
            found.append(counts_LE * float(real))
        summed_LE = self.ranks.all_reduce(torch.stack(found).sum(0), "loss")
        return lambda _: summed_LE

    def _backward(self, model: Transformer, inputs: tuple[Any, ...], scale: float | Tensor, last: bool) -> Loss:
        """Accumulate the gradients of `scale` times the loss of a micro-batch; `last`: it is the last one of its step."""
        data.set_last_micro_batch(model, self.ranks.layout.zero, last)
        loss = model.loss(*inputs)
        (loss.total * scale).backward()
        return loss

    def clip_gradients(self, max_grad_norm: float) -> tuple[Tensor, Tensor | None]:
        """Scale the gradients so that their global norm is at most `max_grad_norm` (0 leaves them unchanged); returns the norm before, and
        the sum of squares of the gradients of each of `KINDS` before, (G,), None where it is not known."""
        kinds = {id(parameter): KINDS.index(kind_of(name, parameter.ndim)) for name, parameter in self.named_parameters()}
        return clip_gradients(
            self.parameters(), max_grad_norm, self.ranks.world_group, self.ranks.size("weights"), self.duplicates, kinds, len(KINDS)
        )  # fmt: skip

    @cached_property
    def trained_by_kind(self) -> list[int]:
        """The trained elements of the whole model of each of `KINDS`; collective, when it is asked for first."""
        held, sizes = {id(duplicate) for duplicate in self.duplicates}, [0] * len(KINDS)
        for name, parameter in self.named_parameters():
            if parameter.requires_grad and id(parameter) not in held:
                sizes[KINDS.index(kind_of(name, parameter.ndim))] += parameter.numel()
        if self.ranks.size("pp") == 1:
            return sizes
        return list(self.ranks.all_reduce(torch.tensor(sizes, device=self.device), "pp").tolist())

    @torch.no_grad()
    def end_norms(self) -> Tensor | None:
        """The norms of the embedding and of the head, 0 for a head that is tied to it: (2,) fp64 on the device. None where this rank cannot
        see weights."""
        held, squares = {id(duplicate) for duplicate in self.duplicates}, torch.zeros(2, dtype=torch.float64, device=self.device)
        for name, parameter in self.named_parameters():
            if name in _ENDS and id(parameter) not in held and local(parameter).numel():
                share = shards(parameter) / self.ranks.size("weights")
                norm = torch.linalg.vector_norm(torch.linalg.vector_norm(local(parameter), dim=-1, dtype=torch.float32))
                squares[_ENDS.index(name)] += norm.double().square() * share
        return self.ranks.all_reduce(self.ranks.all_reduce(squares, "weights"), "pp").sqrt()

    def norm(self, values: Mapping[str, Tensor]) -> Tensor:
        """The Euclidean norm of `values`, which has one tensor per parameter name with this rank's part; 0-d fp64."""
        held, square = {id(duplicate) for duplicate in self.duplicates}, torch.zeros((), dtype=torch.float64, device=self.device)
        for name, parameter in self.named_parameters():
            if id(parameter) not in held:  # a part that several ranks hold is counted once in total
                square += values[name].double().square().sum() * (shards(parameter) / self.ranks.size("weights"))
        return self.ranks.all_reduce(self.ranks.all_reduce(square, "weights"), "pp").sqrt()

    def rerun_forward_backward(self, batch: Batch, rows: int, micro_batch_size: int, scale: float | Tensor) -> None:
        """Run `forward_backward` again for hooks to observe; all gradients are discarded."""
        for parameter in self.parameters():
            parameter.grad = None
        self.forward_backward(batch, rows, micro_batch_size, scale)
        for parameter in self.parameters():
            parameter.grad = None

    def _pipelined(self, pipeline: Pipeline, batch: Batch, rows: int, micro_batch_size: int, scale: float | Tensor) -> StepSums:
        """`forward_backward` with pipeline stages. A schedule needs micro-batches of one shape, and only some numbers of them are possible.
        If the rows do not divide, as in a batch-size ramp, micro-batches are single rows, padded with blank ones at the end."""
        own, rest = divmod(rows, self.ranks.size("dp"))
        micro_batch_size = 1 if rest else pipelined_micro_batch(self.ranks.layout, own, micro_batch_size) or 1
        count = runnable(self.ranks.layout, (own + bool(rest)) // micro_batch_size)
        pieces = list(micro_batches(batch, count, micro_batch_size, blank=micro_batch_size))
        inputs, sources = zip(*(self._inputs_and_sources(piece) for piece, _ in pieces), strict=True)
        found, counts_LE, logits = pipeline.forward_backward(inputs, [real for _, real in pieces], scale, sources)
        cross_entropy, z, auxiliary, mtp, *_ = found
        by_source = None if batch.sources is None else found[4:]
        return StepSums(cross_entropy, z, auxiliary, mtp, counts_LE, by_source, self._logits_of_model(logits))

    @torch.no_grad()
    def sum_over_ranks(self, sums: StepSums) -> StepSums:
        """All-reduce the sums of a step; the result has the counts of all MoE layers, 0 for those of multi-token prediction in evaluation
        mode, and the largest scores of all heads."""
        if not self.ranks.distributed and (sums.counts_LE is None or len(sums.counts_LE) == self.num_moe_layers):
            return sums
        counts_LE, moe = None, self.config.moe
        used = self.num_moe_layers - (0 if self.training or self.config.mtp is None else self.config.mtp.num_nextn_predict_layers)
        if moe is not None and used > 0:
            counts_LE = torch.zeros(self.num_moe_layers, moe.n_routed_experts, device=self.device)
            if sums.counts_LE is not None:
                counts_LE.index_copy_(0, self._moe_indices[: len(sums.counts_LE)], sums.counts_LE.float())
        if not self.ranks.distributed:
            return replace(sums, counts_LE=counts_LE)
        scalars = torch.stack((sums.cross_entropy, sums.z, sums.auxiliary, sums.mtp))
        scalars = scalars if sums.sources_S is None else torch.cat((scalars, sums.sources_S))
        scalars = self.ranks.all_reduce(self.ranks.all_reduce(scalars, "loss"), "pp")
        if counts_LE is not None:
            counts_LE = self.ranks.all_reduce(self.ranks.all_reduce(counts_LE, "loss"), "pp")
        cross_entropy, z, auxiliary, mtp, *_ = scalars
        by_source = None if sums.sources_S is None else scalars[4:]
        if sums.logits_AH is not None:
            dist.all_reduce(sums.logits_AH, op=dist.ReduceOp.MAX)
        return StepSums(cross_entropy, z, auxiliary, mtp, counts_LE, by_source, sums.logits_AH)

    def update_biases(self, counts_LE: Tensor, bias_update_rate: float, apply: Tensor | None = None) -> None:
        """Update the expert biases of this rank's MoE layers from the counts of all ranks (`model/balance.py`); none in evaluation mode,
        in which the layers of multi-token prediction count nothing."""
        if self.config.moe is not None and self.training:
            own_LE = counts_LE.index_select(0, self._moe_indices)
            update_biases(self.moe_layers(), own_LE, bias_update_rate, self.config.moe.balance, apply)

    def summed_cross_entropies(self, batches: Iterable[Batch]) -> list[float]:
        """The summed cross-entropy of each batch, a whole one, in nats, without gradients. The host waits once, for all of them."""
        sums = [self.summed_cross_entropy_on_device(batch) for batch in batches]
        return [float(one) for one in to_host(*sums)] if sums else []

    @torch.no_grad()
    def summed_cross_entropy_on_device(self, batch: Batch) -> Tensor:
        """`summed_cross_entropy` as a 0-d tensor on the device, for which the host has not waited."""
        own = self._divisible(batch).rows(*self.rank_sequences(len(batch.tokens)))
        if self.pipeline:
            largest = max(1, -(-len(batch.tokens) // self.ranks.size("dp")))
            at_once = -(-largest // self.pipeline.stages)
            pieces = list(micro_batches(own, -(-largest // at_once), at_once))
            found = self.pipeline.cross_entropy([self._inputs(piece) for piece, _ in pieces], [real for _, real in pieces])
            return self.ranks.all_reduce(self.ranks.all_reduce(found, "loss"), "pp")
        (model,) = self.parts
        (piece, real), *_ = micro_batches(own, 1, len(batch.tokens))
        found = model.loss(*self._inputs(piece)).head.cross_entropy * float(real)
        return self.ranks.all_reduce(found, "loss")

    def summed_cross_entropy(self, batch: Batch) -> float:
        """`summed_cross_entropies` of one batch."""
        return self.summed_cross_entropies([batch])[0]

    def token_cross_entropy(self, batch: Batch, micro_batch_size: int | None = None) -> Tensor:
        """The cross-entropy of each label of a whole batch, in nats, 0 where there is none: (B, T) on the CPU, the same on all ranks."""
        return self.token_cross_entropy_on_device(batch, micro_batch_size).cpu()

    @torch.no_grad()
    def token_cross_entropy_on_device(self, batch: Batch, micro_batch_size: int | None = None) -> Tensor:
        """`token_cross_entropy` as a tensor on the device, for which the host has not waited.

        `micro_batch_size`: rows of a forward pass; all of a rank's rows, or those of a pipeline stage, when left out.
        """
        start, stop = self.rank_sequences(len(batch.tokens))
        padded = self._divisible(batch)
        own = padded.rows(start, stop)
        whole_BT = torch.zeros(padded.tokens.shape, device=self.device, dtype=torch.promote_types(self.compute_dtype, torch.float32))
        largest = max(1, -(-len(batch.tokens) // self.ranks.size("dp")))
        if self.pipeline:
            at_once = micro_batch_size or -(-largest // self.pipeline.stages)
            pieces = list(micro_batches(own, -(-largest // at_once), at_once))
            found = self.pipeline.token_cross_entropy([self._inputs(piece) for piece, _ in pieces], [real for _, real in pieces]) or []
        else:
            (model,), at_once = self.parts, micro_batch_size or largest
            pieces = list(micro_batches(own, -(-largest // at_once), at_once))
            found = [model.loss(*self._inputs(piece)).head.of_tokens_N for piece, _ in pieces]
        for number, (tokens_N, (piece, real)) in enumerate(zip(found, pieces, strict=False)):
            if real:
                rows_BT = whole_BT[start + number * at_once :][: len(piece.tokens)]
                context.place(rows_BT, tokens_N, self.ranks)
        return self.ranks.all_reduce(self.ranks.all_reduce(whole_BT, "loss"), "pp")[:, : batch.tokens.shape[1]]

    def _divisible(self, batch: Batch) -> Batch:
        """A batch that is only scored, in rows that the ranks of cp and tp can share: its length may be chosen without regard to them."""
        cp, tp = self.ranks.size("cp"), self.ranks.size("tp")
        step = math.lcm(2 * cp if cp > 1 else 1, cp * tp)  # a rank of cp holds two slices, whose tokens tp shares
        return batch.lengthened(-(-batch.tokens.shape[1] // step) * step)

    def _inputs(self, batch: Batch) -> tuple[Any, ...]:
        """A micro-batch as the arguments of `Transformer.loss`."""
        return self._inputs_and_sources(batch)[0]

    def _inputs_and_sources(self, batch: Batch) -> tuple[tuple[Any, ...], Tensor | None]:
        """The same, and the sources of its rows (S, B), copied together."""
        sources_SB = None if batch.sources is None else batch.sources.T
        tokens, labels, cu_seqlens, weights, sources = self._to_device(
            batch.tokens, batch.labels, batch.cu_seqlens, batch.weights, sources_SB
        )  # fmt: skip
        assert tokens is not None and labels is not None and cu_seqlens is not None
        if self.ranks.size("cp") > 1:
            return context.split(tokens, labels, cu_seqlens, self.ranks, len(self.parts[-1].mtp), weights), sources
        return (tokens, labels, cu_seqlens, None, None, weights), sources

    @torch.no_grad()
    def largest_biases(self) -> Tensor:
        """The largest absolute expert bias of each MoE layer, on all ranks."""
        found = torch.zeros(self.num_moe_layers, device=self.device)
        if layers := self.moe_layers():
            found.index_copy_(0, self._moe_indices, torch.stack([ffn.router.bias for ffn in layers]).abs().amax(-1))
        return self.ranks.all_reduce(found, "pp")

    @property
    def num_moe_layers(self) -> int:
        """MoE layers of the whole model."""
        return len(self.config.sparse_layers)


def micro_batches(batch: Batch, count: int, rows: int, blank: int = 1) -> Iterator[tuple[Batch, bool]]:
    """`count` micro-batches of at most `rows` rows, and whether each is real: past the end of the batch they are `blank` empty rows."""
    for start in range(0, count * rows, rows):
        stop = min(start + rows, len(batch.tokens))
        if start < stop:
            yield batch.rows(start, stop), True
        else:
            length = batch.tokens.shape[1]
            nothing = np.zeros((blank, length), np.int32)
            starts = np.arange(blank + 1, dtype=np.int32) * length
            weights = None if batch.weights is None else np.zeros(nothing.shape, np.float32)
            sources = None if batch.sources is None else np.zeros((blank, batch.sources.shape[1]), np.float32)
            yield Batch(nothing, np.full_like(nothing, IGNORE), starts, batch.phase, batch.step, weights=weights, sources=sources), False


def _moe_layer_indices(part: Transformer) -> list[int]:
    """The indices of the MoE layers of a part among those of the whole model, in the order of `moe_layers()`."""
    sparse = part.config.sparse_layers
    return [sparse.index(layer) for layer, block in part.numbered_blocks() if isinstance(block.ffn, MoE)]

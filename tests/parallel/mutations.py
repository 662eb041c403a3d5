"""Mistakes that are easily made in a parallel trainer, to be planted on all ranks of a layout: `parity.compare` must find each.

A mistake is a function that patches lmworks. The forward pass of many is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate

from lmworks.model.layers import Linear
from lmworks.optim import clip
from lmworks.parallel import collectives, experts, parallelize, pipeline, tensor
from lmworks.parallel.parallel_model import ParallelModel
from parallel.parity import Trained, train, train_16bit

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mistake:
    """What is planted, and where it must show: a layout and a kind of model."""

    plant: Plant
    layout: dict[str, Any] = field(default_factory=dict)
    kind: str = "dense"


def train_mistaken(name: str, precision: str) -> Trained:
    """Some steps on this rank with a mistake in them."""
    mistake = MISTAKES[name]
    with pytest.MonkeyPatch.context() as patch:
        mistake.plant(patch)
        return (train_16bit if precision == "bf16" else train)(mistake.layout, mistake.kind)


def _gathered_gradients_are_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collectives, "gather", collectives.gather_alike)


def _shared_key_of_latent_attention_is_not_summed(patch: pytest.MonkeyPatch) -> None:
    """The published one: all heads use the one rotated key, each rank with its own heads, and the forward is right."""
    forwards = tensor._forwards

    def planted(stream: tensor.Stream) -> dict[Any, Any]:
        def down(self: Linear, x: torch.Tensor) -> torch.Tensor:
            latent, key = Linear.forward(self, x).split((12, 4), dim=-1)
            return torch.cat((stream.enter(latent), stream.whole(key)), dim=-1)

        return forwards(stream) | {"kv_down": down}

    patch.setattr(tensor, "_forwards", planted)


def _partial_outputs_are_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collectives, "scatter_sum", collectives.split)


def _gradients_of_norms_are_not_summed(patch: pytest.MonkeyPatch) -> None:
    def replicated(mesh: Any, *modules: Any) -> None:
        for module in filter(None, modules):
            tensor._place(module, mesh, Replicate(), same_computation=True)

    patch.setattr(tensor, "_replicated", replicated)


def _gradients_of_the_router_are_summed_though_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collectives, "scale_grad_by_group", lambda x, group: x)


def _gradients_of_routing_weights_are_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collectives, "identity_allreduce_grad", lambda x, group: x)


def _vocabulary_begins_a_word_late(patch: pytest.MonkeyPatch) -> None:
    loss = tensor.chunk_loss
    patch.setattr(tensor, "chunk_loss", lambda *args, first, group: loss(*args, first=first + 1, group=group))


def _partition_function_is_of_the_own_vocabulary(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collectives, "all_sum", lambda x, group: x)


def _slices_are_filled_from_the_beginning(patch: pytest.MonkeyPatch) -> None:
    here = parallelize.local_shard
    patch.setattr(parallelize, "local_shard", lambda parameter: (here(parameter)[0], (0,) * parameter.ndim))


def _auxiliary_loss_counts_on_every_tensor_rank(patch: pytest.MonkeyPatch) -> None:
    forwards = tensor._forwards

    def planted(stream: tensor.Stream) -> dict[Any, Any]:
        found = forwards(stream)

        def router(self: Any, x: torch.Tensor) -> Any:
            routing = found[tensor.Router](self, x)
            return replace(routing, aux=None if routing.aux is None else collectives.all_sum(routing.aux, stream.group))

        return found | {tensor.Router: router}

    patch.setattr(tensor, "_forwards", planted)


def _norm_counts_copies_as_often_as_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(clip, "shards", lambda tensor: torch.distributed.get_world_size())


def _gradients_are_averaged(patch: pytest.MonkeyPatch) -> None:
    divide = FSDPModule.set_gradient_divide_factor
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: divide(self, 2.0))


def _all_ranks_read_the_first_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParallelModel, "rank_sequences", lambda self, count: (0, count // self.ranks.size("dp")))


def _counts_are_of_this_rank(patch: pytest.MonkeyPatch) -> None:
    total = ParallelModel.sum_over_ranks
    patch.setattr(ParallelModel, "sum_over_ranks", lambda self, sums: replace(total(self, sums), counts_LE=sums.counts_LE))


def _counts_are_doubled(patch: pytest.MonkeyPatch) -> None:
    total = ParallelModel.sum_over_ranks

    def doubled(self: ParallelModel, sums: Any) -> Any:
        found = total(self, sums)
        return replace(found, counts_LE=None if found.counts_LE is None else found.counts_LE * 2)

    patch.setattr(ParallelModel, "sum_over_ranks", doubled)


def _rows_are_computed_as_they_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(experts, "_reorder", lambda rows, order: rows)


def _rows_come_without_gradients(patch: pytest.MonkeyPatch) -> None:
    exchange = collectives.exchange
    patch.setattr(collectives, "exchange", lambda rows, *args: exchange(rows.detach(), *args))


def _experts_are_on_the_next_rank(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 computes with the experts of rank 1: as if the offset of the own experts were wrong."""
    here = parallelize.local_shard

    def shifted(parameter: torch.Tensor) -> Any:
        part, begins = here(parameter)
        return part, begins if parameter.ndim < 3 else ((begins[0] + 4) % 8, *begins[1:])

    patch.setattr(parallelize, "local_shard", shifted)


def _auxiliary_loss_of_the_first_stage_has_no_gradient(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pipeline._WithAuxiliaryLoss, "apply", lambda x, loss: x.clone())


def _copies_of_the_embedding_are_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pipeline.Pipeline, "_sum_duplicate_gradients", lambda self: None)


def _norm_counts_the_embedding_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParallelModel, "duplicates", ())


def _first_stage_has_the_documents_of_other_micro_batches(patch: pytest.MonkeyPatch) -> None:
    forward_backward = pipeline.Pipeline.forward_backward

    def planted(self: pipeline.Pipeline, inputs: Any, *args: Any) -> Any:
        if self.ranks.rank("pp") == 0:
            inputs = [(tokens, labels, other[2], *rest) for (tokens, labels, _, *rest), other in zip(inputs, reversed(inputs), strict=True)]
        return forward_backward(self, inputs, *args)

    patch.setattr(pipeline.Pipeline, "forward_backward", planted)


def _gradients_are_divided_by_the_micro_batches(patch: pytest.MonkeyPatch) -> None:
    schedule = pipelining.Schedule1F1B
    patch.setattr(pipelining, "Schedule1F1B", lambda stage, **options: schedule(stage, **options | {"scale_grads": True}))


TP, EP, DP, PP = {"tp": 2}, {"dp_shard": 2, "ep": 2}, {"dp_shard": 2}, {"pp": 2}
MISTAKES: dict[str, Mistake] = {
    "gathered gradients are not summed": Mistake(_gathered_gradients_are_not_summed, TP),
    "the shared key of latent attention is not summed": Mistake(_shared_key_of_latent_attention_is_not_summed, TP, "mla"),
    "partial outputs are not summed": Mistake(_partial_outputs_are_not_summed, TP),
    "gradients of norms are not summed": Mistake(_gradients_of_norms_are_not_summed, TP),
    "gradients of the router are summed though alike": Mistake(_gradients_of_the_router_are_summed_though_alike, TP, "moe"),
    "gradients of routing weights are not summed": Mistake(_gradients_of_routing_weights_are_not_summed, TP, "moe"),
    "the vocabulary begins a word late": Mistake(_vocabulary_begins_a_word_late, TP),
    "the partition function is of the own vocabulary": Mistake(_partition_function_is_of_the_own_vocabulary, TP),
    "slices are filled from the beginning": Mistake(_slices_are_filled_from_the_beginning, TP),
    "the auxiliary loss counts on every tensor rank": Mistake(_auxiliary_loss_counts_on_every_tensor_rank, TP, "moe"),
    "the norm counts copies as often as they are": Mistake(_norm_counts_copies_as_often_as_they_are, TP),
    "gradients are averaged": Mistake(_gradients_are_averaged, DP),
    "all ranks read the first rows": Mistake(_all_ranks_read_the_first_rows, DP),
    "counts are of this rank": Mistake(_counts_are_of_this_rank, EP, "moe"),
    "counts are doubled": Mistake(_counts_are_doubled, EP, "moe"),
    "rows are computed as they come": Mistake(_rows_are_computed_as_they_come, EP, "moe"),
    "rows come without gradients": Mistake(_rows_come_without_gradients, EP, "moe"),
    "experts are on the next rank": Mistake(_experts_are_on_the_next_rank, EP, "moe"),
    "the auxiliary loss of the first stage has no gradient": Mistake(_auxiliary_loss_of_the_first_stage_has_no_gradient, PP, "moe"),
    "copies of a tied embedding are not summed": Mistake(_copies_of_the_embedding_are_not_summed, PP, "tied"),
    "copies of the embedding are not summed for multi-token prediction": Mistake(_copies_of_the_embedding_are_not_summed, PP, "mtp"),
    "the norm counts the embedding twice": Mistake(_norm_counts_the_embedding_twice, PP, "tied"),
    "the first stage has the documents of other micro-batches": Mistake(_first_stage_has_the_documents_of_other_micro_batches, PP),
    "gradients are divided by the micro-batches": Mistake(_gradients_are_divided_by_the_micro_batches, PP),
    "gradients are averaged over the ranks of a stage": Mistake(_gradients_are_averaged, PP | DP),
}

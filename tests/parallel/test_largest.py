"""The 355B model on 8,192 ranks: one rank's part is built without memory, on torch's fake process group, and compared with the plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

from lmworks.model import Transformer
from lmworks.optim.groups import group_parameters, local
from lmworks.parallel import parallelize
from lmworks.parallel.mesh import Ranks
from lmworks.plan.layout import choose
from lmworks.plan.memory import memory
from lmworks.recipe.load import load_cluster, load_recipe
from lmworks.recipe.schema.layout import Layout, world_size
from made_up_ranks import made_up_ranks

PIPELINED = Layout(pp=16, tp=8, dp_shard=64, ep=32)


@contextmanager
def _part(recipe: Any, layout: Layout, rank: int) -> Iterator[Transformer]:
    """What `rank` holds, on the meta device."""
    with patch.object(parallelize, "materialize", lambda *_: None), made_up_ranks(rank, world_size(layout)):
        (part,) = parallelize.build(recipe, Ranks(layout), torch.device("cpu"))
        yield part


def _gathered(parameter: torch.Tensor) -> int:
    """Elements of what FSDP gathers: this rank's slice by tensor and expert parallelism."""
    count = parameter.numel()
    if isinstance(parameter, DTensor):
        for name, placement in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True):
            if name in ("tp", "ep") and placement.is_shard():
                count //= parameter.device_mesh[name].size()
    return count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "stage"), [(None, 0), (PIPELINED, 0), (PIPELINED, 7), (PIPELINED, 15)], ids=["planned", "first", "middle", "last"]
)
def test_a_rank_holds_what_the_plan_says(layout: Layout | None, stage: int) -> None:
    """Weights and gradients, whole under ZeRO-1, to the byte; what is sharded to 10%: FSDP deals whole rows to ranks, the first ones have
    more (5,120 rows on 2,048 ranks are 3 and not 2.5), where the plan divides elements."""
    recipe, cluster = load_recipe("glm46-355b-a32b").recipe, load_cluster("8192xh800")
    layout = layout or choose(recipe, cluster, recipe.train.phases[0], None).layout
    assert world_size(layout) == 8192
    assert layout.zero == 1
    planned = memory(recipe, cluster, layout, 2048, 1, 32, stage=stage).components
    with _part(recipe, layout, stage * world_size(layout) // layout.pp) as part:
        parameters = dict(part.named_parameters())
        assert all(local(parameter).is_meta for parameter in parameters.values())
        gathered = sum(map(_gathered, parameters.values()))
        assert 4 * gathered == planned["gradients"]
        assert 2 * gathered == planned["weights"]
        assert 1 <= 4 * sum(local(parameter).numel() for parameter in parameters.values()) / planned["fp32 master"] < 1.1
        bytes_of = {"muon": 4, "adamw": 8}
        groups = group_parameters(parameters.items(), recipe.optimizer, recipe.model.num_hidden_layers)
        states = sum(bytes_of[group.kind] * local(p).numel() for group in groups for p in group.parameters.values())
        assert 1 <= states / planned["optimizer state"] < 1.1
        tp, ep = layout.tp, layout.ep
        number = max(int(name.split(".")[1]) for name in parameters if name.startswith("layers."))
        experts, query = parameters[f"layers.{number}.ffn.experts.gate"], parameters[f"layers.{number}.attention.query.weight"]
        assert experts.shape == (160, 1536, 5120)
        assert local(experts).shape[:2] == (160 // ep, 1536 // tp)
        assert query.shape == (96 * 128, 5120)
        assert local(query).shape == (-(-96 * 128 // tp // (layout.dp_shard * layout.cp)), 5120)

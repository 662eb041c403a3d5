"""The first of many ranks: it builds its part of a model and takes steps, in a process group whose other ranks are made up."""

from __future__ import annotations

import time
from collections.abc import Iterator

from gpu.models import TINY_MOE, batch_of, build, fresh_memory, recipe_of, the_device, wait
from gpu.runner import Row
from gpu.training import GIB, kernels, layers_that_fit, timed_steps, with_memory

from lmworks.optim.groups import local
from lmworks.parallel.mesh import Ranks
from lmworks.plan.layout import choose, describe, place
from lmworks.recipe.load import load_cluster, load_recipe
from lmworks.recipe.schema.layout import Layout, world_size
from lmworks.recipe.schema.recipe import Recipe
from made_up_ranks import made_up_answers, made_up_ranks


def first_rank(name: str, cluster_name: str, toy: bool) -> Iterator[Row]:
    """Rank 0 of a recipe in the layout that the plan chooses on a cluster, with as many layers as fit this device by the plan.

    `toy`: a tiny model on as many ranks.
    """
    device, planned_for = the_device(), load_cluster(cluster_name)
    recipe = load_recipe(name).recipe
    layout = choose(recipe, planned_for, recipe.train.phases[0], None).layout
    whole = recipe.model.num_hidden_layers
    assert whole
    if toy:
        layout, whole = Layout(tp=2, dp_shard=world_size(layout) // 2, ep=4, zero=1), 3

    def with_layers(layers: int) -> Recipe:
        key = f"model.num_hidden_layers={layers}"
        return recipe_of(TINY_MOE, 64, 2 * layout.dp_shard, key) if toy else load_recipe(name, [key]).recipe

    cluster = with_memory(planned_for, device)

    def need(layers: int) -> float:
        cut = with_layers(layers)
        return place(cut, cluster, layout, cut.train.phases[0]).memory.total

    layers = layers_that_fit(whole, cluster, need)
    recipe = with_layers(layers)
    phase = recipe.train.phases[0]
    placed = place(recipe, cluster, layout, phase)
    length, rows = int(phase.sequence_length), placed.micro_batch_size * placed.accumulation
    yield {"layout": describe(layout), "ranks": world_size(layout), "layers": layers, "layers_of_model": whole, "rows": rows,
           "length": length, "micro_batch_size": placed.micro_batch_size, "planned_gib": placed.memory.total / GIB,
           "planned": {part: size / GIB for part, size in placed.memory.components.items()}}  # fmt: skip
    fresh_memory(device)
    with made_up_ranks(0, world_size(layout)), made_up_answers():
        began = time.perf_counter()
        ranks = Ranks(layout, device.type)
        meshed = time.perf_counter()
        model, optimizer = build(recipe, device, ranks=ranks)
        wait(device)
        yield {"mesh_seconds": meshed - began, "build_seconds": time.perf_counter() - meshed,
               "parameters_held": sum(local(one).numel() for one in model.parameters())}  # fmt: skip
        batch = batch_of(recipe, rows, length, documents=2)
        row, one_step = timed_steps(model, optimizer, batch, placed.micro_batch_size, ranks.size("dp"))
        yield row | {"planned_gib": placed.memory.total / GIB}
        yield {"kernels": kernels(one_step, device)}

"""The plan finds no fault in a layout if and only if the ranks and the model can be built as it says."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from lmworks.errors import UserError
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import build
from lmworks.plan.layout import problems
from lmworks.recipe import checks
from lmworks.recipe.phases import in_force
from lmworks.recipe.schema.layout import Cluster, Layout, world_size
from lmworks.recipe.schema.recipe import Recipe
from made_up_ranks import made_up_ranks
from parallel.parity import MODELS

_SIX = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_BUILT = MODELS["dense"] | {"num_hidden_layers": 2, "intermediate_size": 12, "vocab_size": 12}
KINDS: dict[str, dict[str, Any]] = {
    "dense": _BUILT, "dropout": _BUILT | {"attention_dropout": 0.1}, "moe": _BUILT | {"moe": _SIX},
    "states": _BUILT | {"layer_types": ["hybrid"], "mamba": {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 2}},
}  # fmt: skip
_SHORT = {"mixture": {"web": 1.0}, "tokens": "64 tokens", "sequence_length": "16 tokens", "global_batch_tokens": "64 tokens"}


def recipe_of(kind: str, *balancing: str | None) -> Recipe:
    """A recipe in whose phases experts are balanced so, or as before."""
    phases = [_SHORT | {"name": f"p{number}"} | ({"balance": {"method": one}} if one else {}) for number, one in enumerate(balancing)]
    tree = {"name": "splits", "model": KINDS[kind], "train": {"precision": "fp32", "compile": False, "phases": phases}}
    return Recipe.model_validate(tree)


def built(recipe: Recipe, layout: Layout) -> str | None:
    """Why the last rank of a layout is not built; None if it is."""
    world = world_size(layout)
    with made_up_ranks(world - 1, world):
        try:
            build(recipe, Ranks(layout), torch.device("cpu"))
        except UserError as error:
            return str(error)
    return None


def planned(recipe: Recipe, layout: Layout) -> list[str]:
    return list(problems(recipe, Cluster(device="CPU", devices_per_node=world_size(layout), tflops=1.0, memory_gib=1.0), layout))


_AXES = [axes for axes in product((1, 2, 3), (1, 2, 3), (1, 2, 3), (1, 2, 3), (1, 2, 3, 6)) if axes[0] * axes[1] * axes[2] * axes[3] <= 6]
LAYOUTS = [Layout(pp=pp, dp_shard=dp, cp=cp, tp=tp, ep=ep) for pp, dp, cp, tp, ep in _AXES] + [
    Layout(pp=2, zero=2), Layout(dp_shard=2, zero=3), Layout(pp=2, layers_per_pipeline_stage=(2, 0)), Layout(pipeline_stages_per_rank=2),
    Layout(pp=2, pipeline_schedule="interleaved"), Layout(pp=2, pipeline_schedule="zero-bubble"),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_is_planned_if_and_only_if_it_is_built(kind: str) -> None:
    recipe, verdicts = recipe_of(kind), set()
    for layout in LAYOUTS:
        found, why = planned(recipe, layout), built(recipe, layout)
        assert bool(found) == bool(why), (layout, found, why)
        verdicts.add(bool(found))
    assert verdicts == {False, True}


@pytest.mark.parametrize(("method", "layout"), [("aux", Layout(pp=2)), ("sinkhorn", Layout(cp=2))])
def test_what_a_phase_changes_counts(method: str, layout: Layout) -> None:
    """Also where a later phase changes it back; and where a checkpoint of another layout has it in force."""
    plain, changed = recipe_of("moe", None, "bias"), recipe_of("moe", None, method, "bias")
    assert planned(plain, layout) == [] and built(plain, layout) is None
    (found,) = planned(changed, layout)
    assert f"balance.method {method}" in found and built(changed, layout) == f"layout: {found}"
    with made_up_ranks(0, 2):
        model = ParallelModel(build(plain, ranks := Ranks(layout), torch.device("cpu")), ranks)
        model.configure(in_force(plain)[1])
        with pytest.raises(UserError, match=f"layout: .*{method}"):
            model.configure(in_force(changed)[1])
    model = ParallelModel(build(changed, Ranks(Layout()), torch.device("cpu")))
    model.configure(in_force(changed)[1])


def test_what_context_ranks_cannot_compute_is_refused_with_its_key_when_a_recipe_is_loaded() -> None:
    def refused(recipe: Recipe) -> list[tuple[object, ...]]:
        found = checks.problems(recipe.model_copy(update={"layout": Layout(cp=2)}))
        return [keys for keys, _ in found if keys[0] == "layout" or "balance" in keys]

    assert refused(recipe_of("moe", None, "bias")) == []
    assert refused(recipe_of("dropout")) == refused(recipe_of("states", None)) == [("layout", "cp")]
    assert refused(recipe_of("moe", None, "sinkhorn", None)) == [("train", "phases", 1, "balance", "method")]

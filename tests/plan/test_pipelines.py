"""Pipelines in the plan: which are refused and what is said, and the formulas of bubble and memory in special cases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmworks.parallel.pipeline_stages import bubble, micro_batches_for, micro_batches_in_flight
from lmworks.plan.layout import describe, problems
from lmworks.recipe.load import load_cluster, load_recipe
from lmworks.recipe.schema.layout import Layout
from lmworks.run import refusals

GRPO = (
    "{data: [{name: sums, kind: tasks, tasks: [{name: arithmetic}]}], learning_rate: 0.001, sequence_length: 64 tokens, "
    "max_new_tokens: 8}"
)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"pp": 64}, "pp 64 exceeds the 36 layers"),
        (
            {"pp": 16, "pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 3},
            "pp 16 x pipeline_stages_per_rank 3 exceeds the 36 layers",
        ),
        ({"pp": 4, "layers_per_pipeline_stage": (9, 9, 9, 8)}, "layers_per_pipeline_stage must be 4 positive numbers that add up to 36"),
        ({"pp": 4, "layers_per_pipeline_stage": (12, 12, 12)}, "layers_per_pipeline_stage must be 4 positive numbers"),
        ({"pp": 4, "layers_per_pipeline_stage": (18, 18, 0, 0)}, "layers_per_pipeline_stage must be 4 positive numbers"),
        (
            {"pp": 4, "pipeline_stages_per_rank": 2},
            "schedule 1f1b has one stage on each rank; set pipeline_stages_per_rank=1, or schedule=interleaved",
        ),
        (
            {"pp": 4, "pipeline_schedule": "interleaved"},
            "schedule interleaved needs several stages on each rank; set pipeline_stages_per_rank=2",
        ),
        ({"pipeline_stages_per_rank": 2}, "need a pipeline; remove them, or set pp"),
        ({"pp": 4, "pipeline_schedule": "zero-bubble"}, "schedule zero-bubble splits the backward pass, which compiled layers cannot"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(layout: dict[str, Any], reason: str) -> None:
    recipe = load_recipe("smollm3-3b", ["train.compile=true"]).recipe
    wanted = Layout.model_validate({"dp_shard": 64 // layout.get("pp", 1)} | layout)
    assert any(reason in found for found in problems(recipe, load_cluster("64xh100"), wanted))


def test_the_zero_bubble_schedule_does_not_combine_with_selective_activation_checkpointing() -> None:
    recipe = load_recipe("smollm3-3b", ["train.compile=false", "train.activation_checkpointing=selective"]).recipe
    wanted = Layout(pp=4, dp_shard=16, pipeline_schedule="zero-bubble")
    found = list(problems(recipe, load_cluster("64xh100"), wanted))
    assert any("set train.activation_checkpointing to full or none, or schedule=1f1b" in reason for reason in found)


def test_rounds_that_are_not_equal_are_refused_with_settings_that_are() -> None:
    """576 sequences over 64 data ranks are 9 each, and 9 micro-batches over 4 ranks make no two equal rounds."""
    recipe, cluster = load_recipe("smollm3-3b").recipe, load_cluster("8192xh800").model_copy(update={"nodes": 32})
    wanted = Layout(pp=4, dp_shard=64, pipeline_schedule="interleaved", pipeline_stages_per_rank=2)
    (found,) = problems(recipe, cluster, wanted, recipe.train.phases[0])
    assert found.startswith("the 9 sequences per rank and step of phase")
    assert "set train.micro_batch_sequences=3 or schedule=1f1b and pipeline_stages_per_rank=1" in found
    larger = load_recipe("smollm3-3b", ["train.micro_batch_sequences=3"]).recipe
    assert not list(problems(larger, cluster, wanted, larger.train.phases[0]))


def test_schedules_of_one_micro_batch_stand_idle_alike() -> None:
    assert bubble(4, 1) == bubble(4, 1, "gpipe") == 3 / 4
    assert bubble(4, 8, "interleaved", 2) == bubble(4, 16)
    assert bubble(4, 8, "zero-bubble") == 3 / 27
    assert micro_batches_for(16, 0.12, "interleaved", 2) == 55


def test_activations_that_are_alive() -> None:
    """GPipe keeps all; 1F1B on the first rank one for each stage, on the last one; one stage on each rank is no interleaving."""
    assert micro_batches_in_flight(Layout(), 0, 8) == 1
    assert [micro_batches_in_flight(Layout(pp=4, pipeline_schedule="gpipe"), rank, 8) for rank in range(4)] == [8, 8, 8, 8]
    assert [micro_batches_in_flight(Layout(pp=4), rank, 8) for rank in range(4)] == [4, 3, 2, 1]


def test_the_schedule_is_named() -> None:
    assert describe(Layout(pp=4)) == "PP4, ZeRO-1"
    assert describe(Layout(pp=4, pipeline_schedule="interleaved", pipeline_stages_per_rank=2)) == "PP4, interleaved 2 stages a rank, ZeRO-1"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["layout.cp=2", "tune.sequence_length=62", "tune.global_batch_tokens=620"], "layout: cp 2 does not divide sequences of 62"),
        (["layout.pp=2", f"grpo={GRPO}"], "layout: phase grpo generates with the weights that it trains, which pp 2 cannot"),
        (["layout.cp=2"], None),
        (["layout.dp_shard=3"], None),
        (["layout.dp_shard=9"], "layout: the 8 sequences of a step of phase anneal are fewer than the 9 data ranks"),
    ],
)  # fmt: skip
def test_stages_after_pretraining_are_refused_before_it(settings: list[str], reason: str | None) -> None:
    """Not at their start, once pretraining was paid for."""
    recipe = load_recipe("quickstart", ["model.moe=null", *settings]).recipe
    assert recipe.trains_base and recipe.tune is not None
    found = [str(error) for error in refusals._layout(SimpleNamespace(recipe=recipe, data={}))]  # type: ignore[arg-type]
    assert (len(found) == 1 and reason in found[0]) if reason is not None else found == []

"""What a plan adds to computation: communication between machines, validation, saves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmworks.checkpoint import listing
from lmworks.checkpoint.listing import Saved
from lmworks.plan.costs import Course, courses, disk, overheads
from lmworks.plan.layout import place
from lmworks.plan.plan import Plan, make_plan
from lmworks.recipe.load import load_cluster, load_recipe
from lmworks.recipe.schema.layout import Cluster, Layout
from lmworks.recipe.timeline import Timeline
from lmworks.train.saving import Intervals, is_due

TEN = Course(0, 10, 10, 10)


def two_machines(**change: Any) -> Cluster:
    return load_cluster("8xh100").model_copy(update={"nodes": 2, "network_gbps": 400.0, **change})


def test_traffic_between_machines_by_hand() -> None:
    """ZeRO-1 over 2 machines of 8: fp32 gradients and bf16 weights, half of them through the links that 8 ranks share."""
    recipe, cluster = load_recipe("dense-125m").recipe, two_machines(network_gbps=0.001)
    phase = recipe.train.phases[0]
    placed = place(recipe, cluster, Layout(dp_shard=16, zero=1), phase)
    plain = make_plan(recipe, "", cluster, Layout(dp_shard=16, zero=1))
    one = overheads(recipe, cluster, phase, placed, TEN, 0.0, 0.0)
    assert one.communication == pytest.approx(10 * 6 * plain.counts.total / 2 / 8 / (0.001e9 / 8), rel=1e-6)
    hidden = overheads(recipe, two_machines(), phase, placed, TEN, 100.0, 0.0)
    assert hidden.communication == 0, "behind the computation of a micro-batch"
    inside = Layout(dp_replicate=2, dp_shard=8, zero=1)
    other = overheads(recipe, cluster, phase, place(recipe, cluster, inside, phase), TEN, 0.0, 0.0)
    assert other.communication == pytest.approx(10 * 2 * 4 * plain.counts.total / 8 / 2 / (0.001e9 / 8), rel=1e-6), "copies exchange shards"


def test_experts_on_other_machines_are_waited_for_and_limit_the_mfu() -> None:
    resolved = load_recipe("glm-15b-a3b", ["train.activation_checkpointing=full", "train.micro_batch_sequences=1"])

    def planned(ep: int) -> Plan:
        """Two machines of 8 devices, with experts on `ep` ranks; the MFU was measured on one machine."""
        return make_plan(resolved.recipe, "", two_machines(), Layout(dp_shard=16, ep=ep, zero=1), measured_mfu=0.4, layout_in_mfu=False)

    near, far = planned(8), planned(16)
    assert near.overheads.communication < 0.05 * near.compute_seconds < far.overheads.communication
    assert far.seconds == pytest.approx(far.compute_seconds + far.overheads.total)
    stated = make_plan(resolved.recipe, "", two_machines(network_gbps=50.0), Layout(dp_shard=16, ep=16, zero=1))
    assert stated.seconds < stated.compute_seconds + stated.overheads.communication, "a stated MFU contains the communication"
    assert any("the MFU is at most" in line for line in stated.warnings())


def test_data_ranks_that_share_a_step_unevenly_wait_for_each_other() -> None:
    """Seven devices are as good as any number: 128 sequences are 18 or 19 of each."""
    recipe, cluster = load_recipe("dense-125m").recipe, load_cluster("8xh100").model_copy(update={"devices_per_node": 7})
    phase = recipe.train.phases[0]
    sequences = phase.global_batch_tokens // phase.sequence_length
    assert sequences % 7 and not sequences % 8
    plan = make_plan(recipe, "", cluster)
    found, *_ = plan.phases
    assert found.placed.layout.dp_shard == 7 and found.placed.micro_batch_size * found.placed.accumulation == -(-sequences // 7)
    assert found.overheads.uneven_shares == pytest.approx(found.compute_seconds * (-(-sequences // 7) / (sequences / 7) - 1))
    assert found.seconds == pytest.approx(found.compute_seconds + found.overheads.total - found.overheads.of_layout)
    told, *_ = [line for line in plan.warnings() if "unevenly" in line]
    waits = 1 - sequences / 7 / -(-sequences // 7)
    assert f"7 data ranks share the {sequences} sequences of a step unevenly, and wait for each other in {waits:.2g}" in told
    batch = int(told.rpartition("=")[2].split(",")[0])
    changed = [f"train.phases.{one.name}.global_batch_tokens={batch}" for one in recipe.train.phases]
    even = make_plan(load_recipe("dense-125m", changed).recipe, "", cluster)
    assert even.overheads.uneven_shares == 0 and not [line for line in even.warnings() if "unevenly" in line]


def test_saves_count_only_what_is_slower_than_training() -> None:
    recipe = load_recipe("dense-125m").recipe
    phase, layout = recipe.train.phases[0], Layout(dp_shard=8, zero=1)
    placed = place(recipe, load_cluster("8xh100"), layout, phase)

    def saves(speed: float, asynchronous: bool) -> float:
        cluster = load_cluster("8xh100").model_copy(update={"disk_gb_per_second": speed})
        changed = recipe.model_copy(update={"checkpoints": recipe.checkpoints.model_copy(update={"asynchronous": asynchronous})})
        return overheads(changed, cluster, phase, placed, Course(0, 1000, 1000, int(phase.tokens)), 1000.0, 1e9).saves

    assert saves(1.0, False) == pytest.approx(10.0) and saves(1.0, True) == 0 and saves(0.0, False) == 0
    assert saves(0.005, True) == pytest.approx(10 * (200 - 100)), "a save of 200 s every 100 s"


def test_percentages_are_of_the_stage_as_in_training() -> None:
    """Five phases, of which training validates and keeps checkpoints by percentages of all of them together."""
    recipe = load_recipe("smollm3-3b", ["train.validate_every=7%", "checkpoints.keep_every=10%"]).recipe
    timeline = Timeline(recipe.train.phases)
    steps, tokens = timeline.steps, sum(phase.tokens for phase in timeline.phases)
    interval = Intervals.of(recipe, SimpleNamespace(steps=steps, planned_steps=steps, tokens=tokens)).validate  # type: ignore[arg-type]
    due = [step for step in range(1, steps + 1) if is_due(step, interval) or step == steps]
    found = [course.times(recipe.train.validate_every) for course in courses(recipe.train.phases)]
    assert len(found) == 5 and sum(found) == len(due) == 15
    assert found[0] == sum(step <= courses(recipe.train.phases)[0].end for step in due)
    saved = [Saved(Path(str(step)), step, tokens * step // steps, None, False) for step in range(0, steps + 1, steps // 200)]
    kept = listing.keep(saved, recipe.checkpoints, saved[-1].step, tokens)
    others = recipe.checkpoints.keep_last + recipe.checkpoints.keep_best
    assert sum("every" in reason for reason in kept.values()) == 9
    assert 9 <= disk(recipe).checkpoints_kept - others <= 10, "the last step may be a tenth multiple"


def test_a_pipeline_is_idle_on_top_of_an_mfu_of_one_process() -> None:
    recipe, layout = load_recipe("smollm3-3b").recipe, Layout(tp=4, pp=4, dp_shard=4)
    cluster = load_cluster("64xh100")
    alone, whole = (make_plan(recipe, "", cluster, layout, measured_mfu=0.4, layout_in_mfu=has) for has in (False, True))
    for phase in alone.phases:
        assert phase.bubble > 0
        assert phase.overheads.bubble == pytest.approx(phase.compute_seconds / (1 - phase.bubble) - phase.compute_seconds)
    assert alone.seconds - whole.seconds == pytest.approx(alone.overheads.communication + alone.overheads.bubble)


def test_reading_counts_where_it_is_slower_than_training() -> None:
    recipe = load_recipe("dense-125m").recipe
    (slow, fast) = (make_plan(recipe, "", load_cluster("8xh100").model_copy(update={"disk_gb_per_second": one})) for one in (1e-6, 1.0))
    read = sum(int(phase.tokens) for phase in recipe.train.phases) * 2 / 1e3
    assert slow.overheads.data == pytest.approx(read - slow.compute_seconds) and fast.overheads.data == 0

"""What the plan says of GLM-4.6 and of the shipped recipes: what is right, computed, and for GLM-4.6 printed by the plan."""

from __future__ import annotations

import pytest

from lmworks.errors import UserError
from lmworks.parallel import pipeline_stages
from lmworks.plan import costs, counts
from lmworks.plan.layout import choose, problems
from lmworks.plan.memory import kv_cache_bytes, state_bytes
from lmworks.plan.plan import Plan, make_plan, plain
from lmworks.recipe.load import load_cluster, load_recipe
from lmworks.recipe.schema.layout import Cluster, Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.ui.amounts import days

DAY = 86_400
DOCUMENTED = Layout(pp=16, tp=8, dp_shard=64, ep=32)


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("glm46-355b-a32b").recipe


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load_cluster("8192xh800")


@pytest.fixture(scope="module")
def plan(recipe: Recipe, cluster: Cluster) -> Plan:
    return make_plan(recipe, "", cluster)


def test_parameters(plan: Plan) -> None:
    """352.8B and 33.6B (32.9B without the embedding look-up) from the published config, plus the multi-token-prediction layer: 4.0B."""
    assert round(plan.counts.total / 1e9, 1) == 352.8
    assert round(plan.counts.active / 1e9, 1) == 33.6
    assert round(plan.counts.active_computed / 1e9, 1) == 32.9
    assert round(plan.counts.mtp / 1e9, 1) == 4.0
    assert round(plan.counts.trained / 1e9, 1) == 356.8  # what zai-org/GLM-4.6 holds


def test_operations(plan: Plan) -> None:
    """Forward 2N and both 6N: 6 x 32e9 x 23e12 = 4.4e24; attention comes on top."""
    assert f"{counts.training_flops(32e9, 23e12):.1e}" == "4.4e+24"
    exact = counts.training_flops(plan.counts.active_computed, plan.tokens)
    assert plan.flops_parameters == pytest.approx(exact, rel=1e-12)
    assert plan.flops_parameters == pytest.approx(4.4e24, rel=0.035)  # 32.9B where the rule of thumb says 32B
    assert plan.tokens == pytest.approx(23e12, rel=1e-5)
    # 12 H d per pair and layer, (L + 1) / 2 pairs per token
    by_hand = sum(phase.tokens * 12 * 96 * 128 * 92 * (phase.sequence_length + 1) / 2 for phase in plan.phases)
    assert plan.flops - plan.flops_parameters - plan.flops_mtp == pytest.approx(by_hand, rel=1e-9)
    # one layer more, its projection of two inputs to one, and the head again
    layer = plan.counts.mtp_active + 151_552 * 5120
    assert plan.flops_mtp == pytest.approx(6 * layer * plan.tokens + by_hand / 92, rel=1e-9)
    assert plan.flops > 1.2 * plan.flops_parameters


def test_device_hours_and_money() -> None:
    """8,192 GPUs x 92 days are 753,664 GPU-days = 18.1M GPU-hours; at $2.50 that is $45M."""
    hours = costs.device_hours(8192, 92 * DAY)
    assert hours / 24 == 753_664
    assert round(hours / 1e6, 1) == 18.1
    assert round(hours * 2.5 / 1e6) == 45


def test_peak_and_time(plan: Plan, cluster: Cluster) -> None:
    """989 dense TFLOPS; 2.8M tokens/s on 8,192 of them is 6.6% MFU; at the 35% of models with experts the run takes 19 days, 24 with
    attention and with multi-token prediction."""
    assert cluster.tflops == 989
    assert round(100 * counts.mfu(2.8e6, 6 * 32e9, 8192, cluster.tflops), 1) == 6.6
    assert plan.mfu == 0.35 and "arXiv:2412.19437" in plan.mfu_source and cluster.mfu == 0.4
    assert round(costs.seconds(4.4e24, 8192, cluster, 0.4) / DAY) == 16
    assert round(plan.seconds_parameters / DAY) == 19
    assert days(plan.seconds) == "23.9 days"
    assert plan.device_hours == pytest.approx(8192 * plan.seconds / 3600)
    assert plan.dollars == pytest.approx(2.5 * plan.device_hours)


def test_documented_layout_is_legal(recipe: Recipe, cluster: Cluster) -> None:
    """TP8 x PP16 leaves DP64, and EP32 divides it; EP is no factor of the product."""
    general = recipe.train.phases[0]
    assert list(problems(recipe, cluster, DOCUMENTED, general)) == []
    product = DOCUMENTED.model_copy(update={"dp_shard": 2})  # TP8 x PP16 x EP32 = 4,096 with the rest, 2, data parallel
    (first, *_) = problems(recipe, cluster, product, general)
    assert "is 256 ranks, the cluster has 8,192 devices" in first
    with pytest.raises(UserError, match=r"ep 32 does not divide dp_shard x cp = 16; expert ranks are a subset of the data"):
        choose(recipe, cluster.model_copy(update={"nodes": 256}), general, DOCUMENTED.model_copy(update={"dp_shard": 16}))


def test_documented_batch(recipe: Recipe, cluster: Cluster) -> None:
    """DP64, micro-batch 1, 2,048 tokens and accumulation 32 are 4.2M tokens."""
    assert round(costs.batch_tokens(64, 1, 2048, 32) / 1e6, 1) == 4.2
    placed = choose(recipe, cluster, recipe.train.phases[0], DOCUMENTED)
    assert (placed.micro_batch_size, placed.accumulation) == (1, 32)
    assert placed.memory.total < cluster.memory_gib * 2**30


def test_zero3_with_a_pipeline_is_refused(recipe: Recipe, cluster: Cluster) -> None:
    general = recipe.train.phases[0]
    for level in (2, 3):
        with pytest.raises(
            UserError, match=f"ZeRO-{level} cannot be combined with a pipeline.*; set ZeRO-1; the nearest legal layout is TP8"
        ):
            choose(recipe, cluster, general, DOCUMENTED.model_copy(update={"zero": level}))


def test_adam_states(recipe: Recipe, cluster: Cluster) -> None:
    """fp32 master and two moments of 355B are 4.3 TB; a plan must fit, and does not on 64 devices."""
    assert round(state_bytes(355e9) / 1e12, 1) == 4.3
    adam = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"kind": "adamw"})})
    plan = make_plan(adam, "", cluster)
    assert plan.disk.checkpoint == pytest.approx(12 * plan.counts.trained)
    for phase in plan.phases:
        assert phase.placed.memory.total <= cluster.memory_gib * 2**30
    with pytest.raises(UserError, match=r"needs [\d,.]+ GiB on a device of 74\.5 .*the nearest that fits is"):
        make_plan(adam, "", load_cluster("64xh100"))


def test_bubble() -> None:
    """(p-1)/(m+p-1): 65% for p=16, m=8; 12% needs m=110."""
    assert round(pipeline_stages.bubble(16, 8), 2) == 0.65
    assert pipeline_stages.micro_batches_for(16, 0.12) == 110
    assert pipeline_stages.bubble(16, 110) <= 0.12 < pipeline_stages.bubble(16, 109)
    assert pipeline_stages.bubble(1, 1) == 0


def test_gqa_divides_the_cache_by_twelve(recipe: Recipe, plan: Plan) -> None:
    heads = recipe.model.model_copy(update={"num_key_value_heads": recipe.model.num_attention_heads})
    assert kv_cache_bytes(heads, 200_000) == 12 * kv_cache_bytes(recipe.model, 200_000)
    assert plan.kv_cache_shrink == 12
    assert plan.kv_cache == 2 * 92 * 8 * 128 * 2 * 202_752


def test_steps() -> None:
    """300B tokens at 131,072 per step are 2.29M steps."""
    assert round(costs.steps(300 * 10**9, 131_072) / 1e6, 2) == 2.29


def test_plan_as_plain_values(plan: Plan) -> None:
    value = plain(plan)
    assert value["counts"]["total"] == 352_797_814_784
    assert value["phases"][0]["placed"]["memory_total"] == plan.phases[0].placed.memory.total
    assert value["seconds"] == plan.seconds

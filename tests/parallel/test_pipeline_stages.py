"""Where a pipeline cuts a model."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmworks.parallel.pipeline_stages import _balanced, pipeline_stage_layers, rank_layers, runnable
from lmworks.recipe.load import load_recipe
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.model import Model
from small_config import small_config

MODEL = Model.model_validate(
    small_config(num_hidden_layers=12)
)


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(st.integers(1, 9), min_size=1, max_size=9), share=st.floats(0, 1))
def test_no_other_cut_has_a_cheaper_dearest_stage(costs: list[int], share: float) -> None:
    stages = 1 + round(share * (len(costs) - 1))

    def dearest(ends: tuple[int, ...]) -> float:
        return max(sum(costs[start:end]) for start, end in pairwise((0, *ends, len(costs))))

    found = _balanced(tuple(map(float, costs)), stages)
    assert len(found) == stages
    assert min(found) >= 1
    ends = tuple(sum(found[: stage + 1]) for stage in range(stages - 1))
    assert dearest(ends) == min(map(dearest, combinations(range(1, len(costs)), stages - 1)))


@pytest.mark.parametrize("layout", [{"pp": 4}, {"pp": 3, "pipeline_stages_per_rank": 2}, {"pp": 2, "layers_per_pipeline_stage": (9, 3)}])
def test_every_layer_lies_on_one_rank(layout: dict[str, int]) -> None:
    stages = pipeline_stage_layers(MODEL, Layout.model_validate(layout))
    assert [layer for stage in stages for layer in stage] == list(range(12))
    held = [layer for rank in range(layout["pp"]) for layer in rank_layers(MODEL, Layout.model_validate(layout), rank)]
    assert sorted(held) == list(range(12))


def test_the_head_counts_as_layers() -> None:
    """A vocabulary that makes the head as dear as two layers and a half leaves the last stage fewer of them."""
    layer = 8_320  # 2 norms, 4 matrices of attention, 3 of the feed-forward part
    wide = MODEL.model_copy(update={"vocab_size": 5 * layer // 2 // 32})
    assert [len(stage) for stage in pipeline_stage_layers(wide, Layout(pp=4))] == [2, 4, 4, 2]


def test_a_large_model_with_multi_token_prediction() -> None:
    """GLM-4.6 on 16 stages: what follows the last layer is worth two."""
    recipe = load_recipe("glm46-355b-a32b").recipe
    counts = [len(stage) for stage in pipeline_stage_layers(recipe.model, Layout(pp=16))]
    assert sum(counts) == 92
    assert counts[-1] < max(counts)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "possible"),
    [("gpipe", 1, 1), ("1f1b", 5, 5), ("interleaved", 8, 8), ("interleaved", 9, 10), ("interleaved", 3, 3), ("zero-bubble", 13, 15)],
)  # fmt: skip
def test_the_next_number_of_micro_batches_that_a_schedule_runs(schedule: str, micro_batches: int, possible: int) -> None:
    assert runnable(Layout(pp=4, pipeline_schedule=schedule), micro_batches) == possible  # type: ignore[arg-type]

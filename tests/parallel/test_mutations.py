"""The comparison with one process finds every planted mistake: so its tolerance is not too wide."""

from __future__ import annotations

import pytest

from lmworks.recipe.schema.layout import Layout, world_size
from parallel.mutations import MISTAKES, train_mistaken
from parallel.parity import alone, alone_16bit, compare, compare_16bit
from rank_pool import RankPool


def test_mistakes_are_planted_in_code_that_is_there() -> None:
    for mistake in MISTAKES.values():
        with pytest.MonkeyPatch.context() as patch:
            mistake.plant(patch)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MISTAKES)
def test_is_found(ranks: RankPool, name: str, precision: str) -> None:
    kind = MISTAKES[name].kind
    found = ranks.run(train_mistaken, world_size(Layout.model_validate(MISTAKES[name].layout)), name, precision)
    with pytest.raises(AssertionError):
        compare_16bit(*alone_16bit(kind), found) if precision == "bf16" else compare(alone(kind), found)

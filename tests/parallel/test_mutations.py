"""The comparison with one process finds every planted mistake: so its tolerance is not too wide."""

from __future__ import annotations

import pytest

from lmworks.recipe.after import Layout, world_size
from parallel.mutations import MISTAKES, train_mistaken
from parallel.parity import alone, compare
from rank_pool import RankPool


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_is_found(ranks: RankPool, name: str) -> None:
    found = ranks.run(train_mistaken, world_size(Layout.model_validate(MISTAKES[name].layout)), name)
    with pytest.raises(AssertionError):
        compare(alone(MISTAKES[name].kind), found)

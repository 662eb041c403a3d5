"""What the first rank does alone may take longer than a collective may, and what it raises there is raised on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lmworks.errors import UserError
from lmworks.io.run_layout import of_stage
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.layout import Layout
from lmworks.train.dpo import dpo
from lmworks.train.grpo import grpo
from lmworks.train.pretrain import pretrain
from lmworks.train.stage import TrainingContext, weights_before
from lmworks.train.tune import tune
from rank_pool import RankPool
from tiny_run import Tiny, training_context

Work = Callable[[TrainingContext], Any]
PLACES: dict[str, tuple[str, Work]] = {
    "tune": ("tune.build_chat_data", tune),
    "dpo": ("dpo.build_preferences", dpo),
    "grpo": ("grpo.write_json", grpo),
    "pretrain": ("pretrain.verify", pretrain),
    "the stage before": ("stage.final_checkpoint", lambda context: weights_before(context, of_stage("tune"))),
}
_STAGES = {name: SimpleNamespace(sequence_length=8, lora=None) for name in ("dpo", "grpo")}


def refused(tiny: Tiny, place: str) -> str:
    """What a rank says when the first one fails at a place, twice the time-out of a collective after it has begun."""
    name, work = PLACES[place]
    recipe: Any = SimpleNamespace(**_STAGES) if place in _STAGES else tiny.resolve("layout.dp_shard=2").recipe
    context = training_context(recipe, tiny.run_dir, ranks=Ranks(Layout(dp_shard=2)))

    def hurry(*given: Any) -> int:
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(timedelta(seconds=1))
        return 0

    def fail(*given: Any) -> None:
        assert dist.get_rank() == 0
        time.sleep(2)
        raise UserError("found late")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"lmworks.train.{name}", fail)
        patch.setattr("lmworks.train.pretrain._size", hurry)  # the last that all ranks do before the first verifies
        patch.setattr("lmworks.train.grpo.read_prompts", lambda *given: SimpleNamespace(train=[], held_out=[], sets=[]))
        patch.setattr("lmworks.train.grpo.weights_before", lambda *given: None)
        if place != "pretrain":
            hurry()
        try:
            work(context)
        except UserError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("place", PLACES)
def test_the_others_wait_and_fail_with_the_first(ranks: RankPool, tiny_copy: Tiny, place: str) -> None:
    assert ranks.run(refused, 2, tiny_copy, place) == ["found late"] * 2

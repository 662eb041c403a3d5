"""Rollouts on several ranks: the gathered model is the whole one, and every prompt is drawn once with the answers of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lmworks.checkpoint.communicator import new_communicator
from lmworks.inference.sampling import GenerateOptions
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.layout import Layout, world_size
from lmworks.train.answers import pack
from lmworks.train.rewards import Judge, Reward
from lmworks.train.rollouts import Prompt, Rollouts, whole_model
from parallel.parity import batch_of, model_of
from rank_pool import RankPool

LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({"dp_shard": 2, "zero": 3}, "moe"), ({"tp": 2}, "tied"), ({"dp_shard": 2, "ep": 2}, "mtp"), ({"cp": 2}, "mla"),
    ({"dp_replicate": 2}, "dense"), ({"dp_shard": 2, "ep": 2, "zero": 3}, "lora-moe"), ({"tp": 2}, "lora-tied"),
]  # fmt: skip


class Letters:
    """A tokenizer of one character per id."""

    stop_ids = (5,)

    def decode(self, ids: list[int], skip_special: bool = False) -> str:
        return "".join(chr(97 + id % 26) for id in ids)

    decode_reply = decode

    def state_of_thoughts(self, prompt: list[int]) -> str:
        return "free"


def draw(layout: dict[str, Any], kind: str) -> tuple[np.ndarray, list[list[tuple[list[int], list[float], float]]], float]:
    """The logits of the gathered model, the groups that a rank knows, and how far the ratio of a token's probabilities in scoring and
    rollout is from 1."""
    model, _ = model_of(kind, Ranks(Layout(**layout)))
    batch = batch_of(0)
    with torch.no_grad():
        logits = whole_model(model)(torch.from_numpy(batch.tokens))
    judge = Judge(lambda text, row: Reward(float(text.count("a"))))
    rollouts = Rollouts(model, Letters(), [judge], GenerateOptions(6, 1.0), new_communicator())  # type: ignore[arg-type]
    groups = rollouts.draw([Prompt((1, 2, number), {}, 0) for number in range(5)], 2, "seed")
    found = [[(one.answer.ids.tolist(), one.logprobs.tolist(), one.reward.value) for one in group] for group in groups]
    drawn = [one for group in groups for one in group]
    packed = pack([one.answer for one in drawn], 16, 0)
    with model.exact_logprobs():
        scored = -model.token_cross_entropy(packed.batch)
    away = ((scored - packed.place([one.logprobs for one in drawn])).exp() - 1).abs()[packed.mask_BT]
    return logits.numpy(), found, float(away.max())


@pytest.mark.parametrize(("layout", "kind"), LAYOUTS, ids=str)
def test_ranks_draw_what_one_process_draws(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    """Logits in fp32: the same sums in other orders, at most 1e-5 of a logit. What is drawn and scored is in fp64, some 1e-13."""
    logits, groups, _ = draw({}, kind)
    for theirs, found, away in ranks.run(draw, world_size(Layout(**layout)), layout, kind):
        np.testing.assert_allclose(theirs, logits, atol=1e-5)
        assert away < 1e-10
        for group, other in zip(groups, found, strict=True):
            for (ids, logprobs, reward), (their_ids, their_logprobs, their_reward) in zip(group, other, strict=True):
                assert ids == their_ids and reward == their_reward
                np.testing.assert_allclose(their_logprobs, logprobs, atol=1e-10)

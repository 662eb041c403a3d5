"""The budgets that `init` writes, and what it says of them, are those that the plan finds."""

from __future__ import annotations

import pytest

from lmworks.host import devices
from lmworks.init.budgets import FEWEST, Budgets, dpo_budget, tune_budget
from lmworks.init.meaning import Found
from lmworks.recipe.schema.align import Dpo
from lmworks.recipe.schema.layout import Cluster
from lmworks.recipe.timeline import steps_of

CLUSTER = Cluster.of_gpus(1, next(iter(devices.GPUS.values())))


def rows(tokens: list[int], count: int = 10_000) -> list[Found]:
    lengths = [4 * one for one in tokens]
    return [Found("preferences", "files", "rows.jsonl", 1, 1, rows=count, text_bytes=count * sum(lengths) // len(lengths), lengths=lengths)]


def budgets(seconds: float, stage: str, context: int = 4096) -> Budgets:
    return Budgets(seconds, CLUSTER, base=100_000_000_000, context=context, stages=[stage])


@pytest.mark.parametrize("tokens", [[100], [100] * 6 + [5000] * 4])
@pytest.mark.parametrize("count", [10_000, 120])
def test_the_fewest_pairs_make_the_fewest_steps(tokens: list[int], count: int) -> None:
    """Also when some are held out, and others are too long."""
    keys, used, why = dpo_budget(budgets(1e-3, "dpo"), rows(tokens, count))
    assert used is not None and used < 60 and f"{FEWEST} steps are the fewest" in why
    held_out = max(1, int(used * Dpo.model_fields["validation_fraction"].default))
    assert steps_of(used - held_out, int(keys["pairs_per_step"]), 1.0) in (FEWEST, FEWEST + 1)


def test_all_pairs_that_there_are_make_the_fewest_steps() -> None:
    """Half of them are too long, of which the batch knows."""
    keys, used, _ = dpo_budget(budgets(1e12, "dpo"), rows([100] * 5 + [9000] * 5, 400))
    assert used is None and int(keys["pairs_per_step"]) == 8  # of 190


@pytest.mark.parametrize(
    ("tokens", "seconds", "context", "said"),
    [
        ([100] * 6 + [200] * 4, 1e-3, 4096, "256 tokens hold 100% of the sampled rows"),  # as short as any
        ([100, 1000, 1000], 1e-3, 512, "512 tokens hold 33% of the sampled rows"),  # as long as the model has
        ([100] * 6 + [1000] * 4, 1e-3, 4096, "256 tokens hold 60% of the sampled rows; the time allows no longer ones"),
        ([100] * 6 + [1000] * 4, 1e12, 4096, "1024 tokens hold 100% of the sampled rows"),
        ([100] * 4 + [1000] * 6, 1e-3, 4096, "1024 tokens hold 100% of the sampled rows"),  # most would be cut
    ],
)  # fmt: skip
def test_what_limits_the_length_is_said(tokens: list[int], seconds: float, context: int, said: str) -> None:
    keys, why = tune_budget(budgets(seconds, "tune", context), rows(tokens), True)
    assert why.endswith(f"; {said}") and keys["sequence_length"] == f"{said.split()[0]} tokens"

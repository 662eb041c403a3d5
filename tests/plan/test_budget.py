"""A time, turned into tokens: the plan of what comes out takes that time."""

from __future__ import annotations

import pytest

from lmworks.plan.budget import fit_time
from lmworks.recipe.load import load_cluster, load_recipe


@pytest.mark.parametrize("window", ["full", "512 tokens"])
def test_windows_that_a_phase_sets_are_counted(window: str) -> None:
    """Long sequences, of which attention is most of the work: a window in a phase halves it."""
    changed = [f"train.phases.{phase.name}.{key}" for phase in load_recipe("dense-125m").recipe.train.phases
               for key in (f"sliding_window={window}", "sequence_length=65536 tokens", "global_batch_tokens=1Mi")]  # fmt: skip
    cluster, seconds = load_cluster("64xh100"), 86_400.0
    _, plan, _ = fit_time(load_recipe("dense-125m", changed), cluster, seconds, choose_size=False)
    assert plan.seconds == pytest.approx(seconds, rel=0.1)

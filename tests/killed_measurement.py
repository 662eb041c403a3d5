"""A measurement of the speed of an arm that the kernel kills, for want of memory, where the model is wide: in a process of its own only."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence

from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import Batch
from lmworks.train.calibrate import Speed


def measure(recipe: Recipe, batches: Sequence[Batch], patience: float, flops_per_token: Callable[[int], float]) -> Speed:
    """In place of `lmworks.train.calibrate.measure`."""
    assert multiprocessing.parent_process() is not None, "the kernel would have killed the command"
    if recipe.model.intermediate_size == 512:
        os.kill(os.getpid(), signal.SIGKILL)
    return Speed({batch.tokens.shape[1]: flops_per_token(batch.tokens.shape[1]) * 1e6 for batch in batches}, 1e9, 1e9)

"""What this machine makes of a recipe's own training step: the measurement behind `lmworks plan --calibrate`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from lmworks import progress
from lmworks.metrics import system
from lmworks.optim.optimizer import build_optimizer
from lmworks.recipe.recipe import Recipe
from lmworks.shards.batch import Batch
from lmworks.train.pretrain import build_model
from lmworks.train.step import train_step

_SECONDS = 30.0


def calibrate(recipe: Recipe, flops_per_token: Callable[[int], float]) -> tuple[float, str]:
    """(MFU, how it was measured) of the first phase's step on random tokens, the real model, optimizer and micro-batch included.

    Takes about half a minute after compiling. The share is of this machine's measured peak, so it carries over to a cluster
    of the same devices only.
    """
    phase, micro_batch = recipe.train.phases[0], recipe.train.micro_batch or 1
    length, rows = int(phase.sequence_length), int(phase.batch // phase.sequence_length)
    rows = min(rows, 4 * micro_batch)
    assert recipe.model.vocab_size
    tokens = np.random.default_rng(recipe.seed).integers(0, recipe.model.vocab_size, (rows, length + 1), dtype=np.int32)
    batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(0, rows * length + 1, length, dtype=np.int32), 0, 0)
    model = build_model(recipe)
    model.train()
    optimizer = build_optimizer(model, recipe.optimizer)
    peak = system.measure_peak()

    def step() -> float:
        began = time.monotonic()
        result = train_step(model, optimizer, batch, micro_batch=micro_batch, rate=1.0, clip=recipe.optimizer.clip, balance_rate=0.001)
        float(result.loss)  # waits for the device
        return time.monotonic() - began

    with progress.bar("calibrate", _SECONDS) as bar:
        step()
        step()
        seconds = [step()]
        while sum(seconds) < _SECONDS and len(seconds) < 100:
            bar.advance(seconds[-1])
            seconds.append(step())
    median = statistics.median(seconds)
    steps = f"median of {len(seconds)} steps of {batch.tokens.size:,} tokens, {median:.2f} s each"
    how = f"measured here: {steps}, peak {peak / 1e12:.2f} TFLOP/s"
    return system.mfu(flops_per_token(length) * batch.tokens.size, median, peak), how

"""The gradient noise scale of a checkpoint (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1).

With |G_b|^2 and |G_B|^2 the squared gradient norms of a small batch of b and a large one of B tokens,

    |G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b)        the squared norm of the true gradient
    S     = (|G_b|^2 - |G_B|^2) / (1 / b - 1 / B)    the trace of the covariance of a token's gradient
    S / |G|^2                                        the noise scale, in tokens

Both are unbiased. Means over several large batches are divided, because a ratio of single estimates is biased.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.progress import bar
from lmworks.recipe.schema.recipe import Recipe

_LARGE, _SMALL_PER_LARGE = 8, 8


@dataclass(frozen=True)
class NoiseScale:
    """The noise scale in tokens, and what it was measured on. `tokens` is None where the true gradient cannot be told from 0."""

    tokens: float | None
    small: int
    large: int
    batches: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def from_norms(small: np.ndarray, large: np.ndarray, small_tokens: int, large_tokens: int) -> NoiseScale:
    """From squared gradient norms of small batches, and of large ones that are their means."""
    b, B = small_tokens, large_tokens
    squared = (B * large.mean() - b * small.mean()) / (B - b)
    trace = (small.mean() - large.mean()) / (1 / b - 1 / B)
    return NoiseScale(float(trace / squared) if squared > 0 and trace > 0 else None, b, B, len(large))


def measure(recipe: Recipe, run_dir: Path, checkpoint: Path) -> NoiseScale:
    """Measure the noise scale of `checkpoint` on batches of the last phase of `recipe`, whose shards lie in `run_dir`.

    A small batch is one sequence. The weights are not changed.
    """
    import torch

    from lmworks.checkpoint import loading
    from lmworks.optim.clip import global_norm
    from lmworks.shards.read.batches import Batches
    from lmworks.train.curriculum import PretrainingCurriculum
    from lmworks.train.pretrain import build_model

    batches = Batches(recipe, run_dir / "shards")
    curriculum = PretrainingCurriculum(recipe, batches)
    model = build_model(recipe)
    loading.load(checkpoint, {"model": model.state_dict()})
    phase = curriculum.phase(curriculum.steps - 1)
    if phase.model is not None:
        model.configure(phase.model)
    model.train()
    small: list[float] = []
    large: list[float] = []
    parameters = list(model.parameters())
    count = curriculum.sequences(curriculum.steps - 1)
    available = (curriculum.steps - phase.first_step) * count
    with bar("gradient noise scale", _LARGE * _SMALL_PER_LARGE) as progress:
        for number in range(_LARGE):
            sums = [torch.zeros_like(parameter) for parameter in parameters]
            for index in range(_SMALL_PER_LARGE):
                drawn = (number * _SMALL_PER_LARGE + index) % available
                batch = curriculum.batch(phase.first_step + drawn // count, drawn % count, drawn % count + 1)
                for parameter in parameters:
                    parameter.grad = None
                model.forward_backward(batch, 1, 1, 1 / max(1, batch.valid_tokens), batch.valid_tokens / batch.tokens.size)
                gradients = [torch.zeros_like(one) if one.grad is None else one.grad.detach() for one in parameters]
                small.append(float(global_norm(gradients)) ** 2)
                torch._foreach_add_(sums, gradients, alpha=1 / _SMALL_PER_LARGE)
                progress.advance()
            large.append(float(global_norm(sums)) ** 2)
    length = phase.sequence_length
    found = from_norms(np.array(small), np.array(large), length, length * _SMALL_PER_LARGE)
    return found if found.tokens is None or math.isfinite(found.tokens) else NoiseScale(None, found.small, found.large, found.batches)

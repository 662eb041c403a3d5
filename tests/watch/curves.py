"""Loss curves that look like real ones: a power law, a step at each phase boundary, noise with heavy tails."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Curve:
    """`losses` and `norms` by step; `since` is, for each step, where the steady stretch that it lies in begins."""

    losses: np.ndarray
    norms: np.ndarray
    since: np.ndarray
    noise: float


def falling(seed: int, steps: int = 1500) -> Curve:
    """Two or three phases of which each begins with a warm-up of 40 steps, on other text."""
    draw = np.random.default_rng(seed)
    boundaries = [0, *sorted(draw.choice(np.arange(300, steps - 200), size=int(draw.integers(1, 3)), replace=False).tolist())]
    position = np.arange(1, steps + 1)
    loss = 1.7 + draw.uniform(4, 8) * (position + draw.uniform(5, 50)) ** -draw.uniform(0.25, 0.5)
    since = np.zeros(steps, int)
    norms = 0.2 + 2 * position**-0.4
    for boundary in boundaries:
        loss[boundary:] += draw.uniform(-0.6, 0.8) if boundary else 0.0
        inside = position[boundary:] - boundary
        loss[boundary:] += (0.5 if boundary else 3.0) * np.exp(-inside / 60)
        norms[boundary:] *= 1 + 3 * np.exp(-inside / 30)
        since[boundary:] = boundary + 40
    noise = float(draw.choice([0.01, 0.03, 0.08]))
    heavy = draw.standard_t(8, steps) / np.sqrt(8 / 6)
    return Curve(loss + noise * heavy, norms * np.exp(0.25 * draw.standard_normal(steps)), since, noise)

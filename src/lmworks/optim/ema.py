"""An exponential moving average of the weights (Polyak & Juditsky 1992)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lmworks.optim.conditional import conditional_update
from lmworks.optim.placement import local


class Ema:
    """average <- decay * average + (1 - decay) * weight, in fp32, starting from the initial weights.

    State: `average[name]`, with the placement of the parameter.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self.decay, self.parameters = decay, dict(parameters)
        self.average = {name: p.detach().float().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, apply: Tensor | None = None) -> None:
        """Update the average with the weights; `apply` (0-d bool) False leaves it unchanged."""
        for name, parameter in self.parameters.items():
            average = local(self.average[name])
            with conditional_update([average], apply):
                average.lerp_(local(parameter).float(), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model has the averaged weights. Needs memory for one more parameter."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            weight, average = local(parameter), local(self.average[name])
            assert weight.dtype == average.dtype, f"{name} would be rounded"
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)

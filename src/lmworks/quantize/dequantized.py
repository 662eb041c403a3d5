"""Scores by our own model with dequantized weights, where the engine of a format is not installed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmworks.model import Transformer


class OwnScorer:
    """Logits of our model, in fp32. They show what the rounding of weights costs, not what an engine adds to it."""

    name = "lmworks with dequantized weights, fp32"

    def __init__(self, model: Transformer) -> None:
        self.model = model

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits (T, V)."""
        return self.model(torch.tensor(ids)[None])[0].float()

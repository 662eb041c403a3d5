"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): further layers that each predict one more token ahead.

Layer d (counted from 1) combines the hidden state at t of the previous layer with the embedding of token t + d, and predicts token
t + d + 1 with the model's own head. These layers are used only in training, not in evaluation and generation.

Shapes: B batch, T time, D hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmworks.model.layers import Linear, RMSNorm
from lmworks.model.loss import IGNORE
from lmworks.recipe.schema.model import Model


class MtpLayer(nn.Module):
    """norm(block(projection([norm(embedding), norm(hidden)])))."""

    def __init__(self, config: Model, block: nn.Module) -> None:
        super().__init__()
        assert config.hidden_size
        self.embedding_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.projection = Linear(2 * config.hidden_size, config.hidden_size)
        self.block = block
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_BTD: Tensor, embedded_BTD: Tensor, *context: object) -> tuple[Any, ...]:
        """The normed hidden state (B, T, D), and the statistics of the block; `context`: its further arguments."""
        joined = torch.cat((self.embedding_norm(embedded_BTD), self.hidden_norm(hidden_BTD)), dim=-1)
        x_BTD, *statistics = self.block(self.projection(joined), *context)
        return self.norm(x_BTD), *statistics


class Ahead(NamedTuple):
    """Input and target of one layer: the token d positions ahead, and its label."""

    tokens_BT: Tensor
    labels_BT: Tensor


def look_ahead(tokens_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor, layers: int) -> list[Ahead]:
    """`Ahead` of each layer, from full rows and the positions in their documents; labels in another document are IGNORE."""
    found = []
    for depth in range(1, layers + 1):
        same = _shift(positions_BT, depth, -1) == positions_BT + depth
        labels = torch.where(same, _shift(labels_BT, depth, IGNORE), IGNORE)
        found.append(Ahead(_shift(tokens_BT, depth, 0), labels))
    return found


def _shift(x_BT: Tensor, places: int, fill: int) -> Tensor:
    return F.pad(x_BT[:, places:], (0, min(places, x_BT.shape[1])), value=fill)

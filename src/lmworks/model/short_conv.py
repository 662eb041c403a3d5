"""The causal depthwise convolution before a recurrence: each channel's weighted sum of its last W values within the document.

Shapes: B batch, T time, X channels, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def short_conv(x_BTX: Tensor, weight_XW: Tensor, positions_BT: Tensor, before_BWX: Tensor | None = None) -> Tensor:
    """The sums (B, T, X). `before_BWX`: the last W - 1 values before the rows; they reach the tokens whose positions say so."""
    T, back, weight = x_BTX.shape[1], weight_XW.shape[1] - 1, weight_XW.to(x_BTX.dtype)
    longer = _with(x_BTX, before_BWX, back)
    out = x_BTX * weight[:, -1]
    for shift in range(1, back + 1):
        # a filter of 0 where the document is not that long yet
        filter_BTX = torch.where((positions_BT >= shift)[..., None], weight[:, back - shift], weight.new_zeros(()))
        out = torch.addcmul(out, longer[:, back - shift : back - shift + T], filter_BTX)
    return out


def last_values(x_BTX: Tensor, before_BWX: Tensor | None, width: int, counts_B1: Tensor | None = None) -> Tensor:
    """The values (B, W - 1, X) that the next tokens need of these rows; `counts_B1`: the tokens of each row that are no padding."""
    longer = _with(x_BTX, before_BWX, width - 1)
    if counts_B1 is None:
        return longer[:, longer.shape[1] - (width - 1) :]
    places_BW = counts_B1 + torch.arange(width - 1, device=x_BTX.device)
    return longer.gather(1, places_BW[..., None].expand(-1, -1, x_BTX.shape[2]))


def _with(x_BTX: Tensor, before_BWX: Tensor | None, back: int) -> Tensor:
    return F.pad(x_BTX, (0, 0, back, 0)) if before_BWX is None else torch.cat((before_BWX.to(x_BTX.dtype), x_BTX), dim=1)


class Filters(nn.Module):
    """The filters (X, 1, W) of a depthwise convolution, in the shape of torch's Conv1d, and their biases."""

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x_BTX: Tensor, positions_BT: Tensor, before_BWX: Tensor | None) -> Tensor:
        """The sums of each channel, (B, T, X)."""
        return self.convolve(x_BTX, positions_BT, before_BWX, self.weight, self.bias)

    @staticmethod
    def convolve(x_BTX: Tensor, positions_BT: Tensor, before_BWX: Tensor | None, weight_X1W: Tensor, bias_X: Tensor | None) -> Tensor:
        """The same with some of the filters."""
        out = short_conv(x_BTX, weight_X1W[:, 0], positions_BT, before_BWX)
        return out if bias_X is None else out + bias_X.to(out.dtype)

"""Attention sinks: a learned logit per head that takes part in the softmax without a key and a value (gpt-oss, arXiv:2508.10925).

softmax over scores and sink equals softmax over the scores alone times sigmoid(lse - sink), with lse the log-sum-exp of the scores: the
kernels that give it need not know of sinks.

Shapes: B batch, T queries, S keys, H query heads, K key/value heads, C head dimension, V value dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lmworks.host.devices import at_least_fp32
from lmworks.model.documents import Visible, causal


def attend_sinks(
    query_BHTC: Tensor, key_BKSC: Tensor, value_BKSV: Tensor, mask: Visible | None, dropout: float, sinks_H: Tensor, plain: bool = False
) -> Tensor:  # fmt: skip
    """softmax(q k^T / sqrt(C)) v, (B, H, T, V), where each head has a sink among its scores; causal if no mask is given. `plain`: in plain
    operations, the reference implementation."""
    if mask is None:
        mask = causal(query_BHTC, key_BKSC)
    few = query_BHTC.shape[2] == 1 or (mask.blocks is None and query_BHTC.device.type != "cpu")
    if plain or dropout or few:
        return _all_scores(query_BHTC, key_BKSC, value_BKSV, mask, dropout, sinks_H)
    out_BHTV, lse_BHT = mask.attend_lse(query_BHTC, key_BKSC, value_BKSV)
    share_BHT1 = torch.sigmoid(lse_BHT - sinks_H.to(lse_BHT.dtype)[:, None])[..., None]
    return out_BHTV * share_BHT1.to(out_BHTV.dtype)


def _all_scores(query_BHTC: Tensor, key_BKSC: Tensor, value_BKSV: Tensor, mask: Visible, dropout: float, sinks_H: Tensor) -> Tensor:
    """The same with all scores in memory. The heads of a group are queries of one head, so that keys and values are read once."""
    B, H, T, C = query_BHTC.shape
    K, S = key_BKSC.shape[1], key_BKSC.shape[2]
    scores = at_least_fp32(query_BHTC.reshape(B, K, -1, C) @ key_BKSC.transpose(-1, -2)).view(B, H, T, S) * C**-0.5
    scores = scores.masked_fill(~mask.dense(), float("-inf"))
    sinks = sinks_H.to(scores.dtype)[:, None, None].expand(B, H, T, 1)
    weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1].to(value_BKSV.dtype)
    return (F.dropout(weights, dropout).view(B, K, -1, S) @ value_BKSV).view(B, H, T, -1)

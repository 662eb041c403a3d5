"""Which experts see which token: gates, selection bias, and how the load is kept even.

Shapes: B batch, T time, N = B * T tokens, E experts, G groups, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmworks.recipe.model import Moe


@dataclass(frozen=True)
class Routing:
    """Chosen experts and their weights, both (N, K), with what training needs beside them.

    `counts` (E,) are the tokens per expert of this forward pass; `aux` is the auxiliary loss summed over tokens, or None.
    They are values that flow out of the forward, not state: a recomputed or an evaluating forward changes nothing.
    """

    experts: Tensor
    weights: Tensor
    counts: Tensor
    aux: Tensor | None


class Router(nn.Module):
    """Sigmoid (or softmax) gates with a bias that only selects (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""

    bias: Tensor
    temperature: Tensor

    def __init__(self, moe: Moe, size: int) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, size))
        self.register_buffer("bias", torch.zeros(moe.experts))
        self.register_buffer("temperature", torch.tensor(1.0), persistent=False)

    def forward(self, x_BTD: Tensor) -> Routing:
        moe = self.moe
        B, T, D = x_BTD.shape
        # fp32 throughout: a rounded gate picks another expert.
        logits_NE = F.linear(x_BTD.reshape(B * T, D).float(), self.weight.float()) / self.temperature
        gates_NE = logits_NE.sigmoid() if moe.gate == "sigmoid" else logits_NE.softmax(-1)
        experts_NK = self._select(gates_NE.detach(), logits_NE.detach())
        weights_NK = gates_NE.gather(1, experts_NK)
        if moe.normalize_top_k:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        chosen_NE = torch.zeros_like(gates_NE).scatter_(1, experts_NK, 1.0).detach()
        aux = self._auxiliary(gates_NE, chosen_NE, B, T) if self.training and torch.is_grad_enabled() else None
        return Routing(experts_NK, weights_NK * moe.routed_scale, chosen_NE.sum(0), aux)

    def _select(self, gates_NE: Tensor, logits_NE: Tensor) -> Tensor:
        moe = self.moe
        if moe.balance.method == "sinkhorn" and self.training:
            return sinkhorn(logits_NE).topk(moe.top_k, dim=-1, sorted=False).indices
        scores_NE = gates_NE + self.bias
        if moe.groups > 1:
            grouped_NGE = scores_NE.view(-1, moe.groups, moe.experts // moe.groups)
            group_NG = grouped_NGE.topk(min(2, grouped_NGE.shape[-1]), dim=-1).values.sum(-1)
            kept_NG = torch.zeros_like(group_NG).scatter_(1, group_NG.topk(moe.top_groups, dim=-1, sorted=False).indices, 1.0)
            scores_NE = grouped_NGE.masked_fill(kept_NG[..., None] == 0, float("-inf")).view_as(scores_NE)
        return scores_NE.topk(moe.top_k, dim=-1, sorted=False).indices

    def _auxiliary(self, gates_NE: Tensor, chosen_NE: Tensor, B: int, T: int) -> Tensor | None:
        """E/K * sum_e f_e P_e with f the share of choices and P the mean normalised gate, weighted by the tokens it spans.

        Over each sequence (DeepSeek-V3, eq. 17-20), and for method `aux` over the whole micro-batch (Switch, arXiv:2101.03961).
        """
        moe, balance = self.moe, self.moe.balance
        spans = [(B, balance.sequence_aux_weight)] + ([(1, balance.aux_weight)] if balance.method == "aux" else [])
        if not any(weight for _, weight in spans):
            return None
        shares_NE = gates_NE / gates_NE.sum(-1, keepdim=True)
        total = gates_NE.new_zeros(())
        for rows, weight in spans:
            share = shares_NE.view(rows, -1, moe.experts).mean(1)
            load = self.mean_load(chosen_NE.view(rows, -1, moe.experts))
            total = total + weight * moe.experts / moe.top_k * (share * load).sum() * (B * T / rows)
        return total

    def mean_load(self, chosen_BTE: Tensor) -> Tensor:
        """The share of tokens that chose each expert, over whole sequences; (B, E)."""
        return chosen_BTE.mean(1)


@torch.no_grad()
def sinkhorn(logits_NE: Tensor, iterations: int = 8) -> Tensor:
    """Scale exp(logits) until rows and columns are even (Clark et al. 2022); needs the whole batch, so only for training."""
    cost = (logits_NE - logits_NE.max()).exp()
    rows, columns = logits_NE.new_ones(cost.shape[0]), logits_NE.new_ones(cost.shape[1])
    for _ in range(iterations):
        rows = 1 / (cost.shape[0] * ((cost * columns).sum(1) + 1e-8))
        columns = 1 / (cost.shape[1] * ((cost * rows[:, None]).sum(0) + 1e-8))
    return cost * columns * rows[:, None]

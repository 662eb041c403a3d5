"""The router: gates, selection bias and load balancing.

Shapes: B batch (sequences), T time, N = B * T tokens, E experts, G groups, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmworks.host.devices import at_least_fp32
from lmworks.recipe.schema.model import ROUTER_EPS, Moe


@dataclass(frozen=True)
class Routing:
    """Selected experts and their weights, both (N, K), and statistics for training.

    `counts` (E,) are the tokens per expert of this forward pass; `aux` is the auxiliary loss of the sequences, summed over tokens, or None;
    `shares` (E,) are, for method `aux`, what the loads of the whole step are multiplied by in its loss (`balance.step_loss`), or None.
    They are outputs of the forward pass, not state: recomputation and evaluation change nothing.
    """

    experts: Tensor
    weights: Tensor
    counts: Tensor
    aux: Tensor | None = None
    shares: Tensor | None = None


class Router(nn.Module):
    """Sigmoid (or softmax) gates with a bias that is used only for selection (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Some models
    also train a bias of the logits (gpt-oss)."""

    bias: Tensor
    temperature: Tensor

    def __init__(self, moe: Moe, size: int, eps: float = ROUTER_EPS) -> None:
        super().__init__()
        self.moe, self.eps = moe, eps
        self.weight = nn.Parameter(torch.empty(moe.n_routed_experts, size))
        self.logit_bias = nn.Parameter(torch.empty(moe.n_routed_experts)) if moe.add_bias else None
        self.register_buffer("bias", torch.zeros(moe.n_routed_experts))
        self.register_buffer("temperature", torch.tensor(1.0), persistent=False)

    def forward(self, x_BTD: Tensor) -> Routing:
        moe = self.moe
        B, T, D = x_BTD.shape
        # never narrower than fp32: a rounded gate could select another expert.
        x_ND = at_least_fp32(x_BTD.reshape(B * T, D))
        added = None if self.logit_bias is None else self.logit_bias.to(x_ND.dtype)
        logits_NE = F.linear(x_ND, self.weight.to(x_ND.dtype), added) / self.temperature
        gates_NE = self.gates(logits_NE)
        if moe.balance.method == "sinkhorn" and self.training:
            balanced_BTE = sinkhorn(logits_NE.detach().view(B, T, -1))
            experts_NK = balanced_BTE.flatten(0, 1).topk(moe.num_experts_per_tok, dim=-1, sorted=False).indices
        else:
            experts_NK = self._select(gates_NE.detach(), logits_NE.detach())
        weights_NK = gates_NE.gather(1, experts_NK)
        if moe.norm_topk_prob:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + self.eps)
        chosen_NE = torch.zeros_like(gates_NE).scatter_(1, experts_NK, 1.0).detach()
        losses = self._auxiliary(gates_NE, chosen_NE, B, T) if self.training and torch.is_grad_enabled() else (None, None)
        return Routing(experts_NK, weights_NK * moe.routed_scaling_factor, chosen_NE.sum(0), *losses)

    def gates(self, logits_NE: Tensor) -> Tensor:
        """The gate values from which the weights are computed."""
        return logits_NE.sigmoid() if self.moe.scoring_func == "sigmoid" else logits_NE.softmax(-1)

    def _select(self, gates_NE: Tensor, logits_NE: Tensor) -> Tensor:
        moe = self.moe
        scores_NE = gates_NE + self.bias
        if moe.n_group > 1:
            grouped_NGE = scores_NE.view(-1, moe.n_group, moe.n_routed_experts // moe.n_group)
            group_NG = grouped_NGE.topk(min(2, grouped_NGE.shape[-1]), dim=-1).values.sum(-1)
            kept_NG = torch.zeros_like(group_NG).scatter_(1, group_NG.topk(moe.topk_group, dim=-1, sorted=False).indices, 1.0)
            scores_NE = grouped_NGE.masked_fill(kept_NG[..., None] == 0, float("-inf")).view_as(scores_NE)
        return scores_NE.topk(moe.num_experts_per_tok, dim=-1, sorted=False).indices

    def _auxiliary(self, gates_NE: Tensor, chosen_NE: Tensor, B: int, T: int) -> tuple[Tensor | None, Tensor | None]:
        """E/K * sum_e f_e P_e with f the fraction of tokens routed to e and P the mean normalized gate, summed over tokens.

        Over each sequence (DeepSeek-V3, eq. 17-20), and for method `aux` over the tokens of the whole step (Switch, arXiv:2101.03961; over
        the global batch, arXiv:2501.11873). Of the latter the parts that are multiplied by f are returned, since f is of the whole step.
        """
        moe, balance = self.moe, self.moe.balance
        batch_weight = balance.aux_loss_weight if balance.method == "aux" else 0.0
        if not balance.sequence_aux_loss_weight and not batch_weight:
            return None, None
        shares_BE = (gates_NE / gates_NE.sum(-1, keepdim=True)).view(B, T, -1).sum(1)
        scale = moe.n_routed_experts / moe.num_experts_per_tok
        sequences = balance.sequence_aux_loss_weight * (shares_BE * self.mean_load(chosen_NE.view(B, T, -1))).sum()
        return scale * sequences, scale * batch_weight * shares_BE.sum(0) if batch_weight else None

    def mean_load(self, chosen_BTE: Tensor) -> Tensor:
        """The fraction of tokens routed to each expert, over full sequences; (B, E)."""
        return chosen_BTE.mean(1)


@torch.no_grad()
def sinkhorn(logits_BTE: Tensor, iterations: int = 8) -> Tensor:
    """Sinkhorn normalization of exp(logits) of each sequence over tokens and experts (Clark et al. 2022, arXiv:2202.01169).

    It is per sequence, which only `cp` splits. A token's experts depend on later tokens, so it is used only in training.
    """
    cost_BTE = (logits_BTE - logits_BTE.amax((1, 2), keepdim=True)).exp()
    columns_B1E = cost_BTE.new_ones(cost_BTE.shape[0], 1, cost_BTE.shape[2])
    for _ in range(iterations):
        rows_BT1 = 1 / (cost_BTE.shape[1] * ((cost_BTE * columns_B1E).sum(2, keepdim=True) + 1e-8))
        columns_B1E = 1 / (cost_BTE.shape[2] * ((cost_BTE * rows_BT1).sum(1, keepdim=True) + 1e-8))
    return cost_BTE * columns_B1E * rows_BT1

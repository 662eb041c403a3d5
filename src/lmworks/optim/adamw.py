"""AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmworks.optim.groups import Group, conditional_update, local, local_grad

_FUSED = ("cpu", "cuda", "xpu", "mps")


def fused_update(
    weights: list[Tensor], grads: list[Tensor], first: list[Tensor], second: list[Tensor], count: Tensor,
    learning_rate: float, betas: tuple[float, float], weight_decay: float, eps: float, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """torch's fused kernel, in place, as in `torch.optim.AdamW(fused=True)`; `count` is the number of steps including this one."""
    torch._fused_adamw_(
        weights, grads, first, second, [], [count] * len(weights),
        lr=learning_rate, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, eps=eps,
        amsgrad=False, maximize=False, grad_scale=None, found_inf=found_inf,
    )  # fmt: skip


class AdamW:
    """AdamW over parameter groups, with torch's fused kernel if the device has one; equal to `torch.optim.AdamW`.

    State: `first[name]`, `second[name]` (fp32, with shape and placement of the parameter) and one step `count` (0-d fp32, exact to 16.7M).
    The fused kernel leaves everything unchanged where `apply` is False (its `found_inf`).
    """

    def __init__(self, groups: Sequence[Group], *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, fused: bool = True) -> None:
        self.groups, self.betas, self.eps = list(groups), betas, eps
        parameters = {name: p for group in groups for name, p in group.parameters.items()}
        self.first = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
        self.second = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
        device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        self.count = torch.zeros((), dtype=torch.float32, device=device)
        self.fused = fused and device.type in _FUSED and all(p.device == device and p.dtype == torch.float32 for p in parameters.values())

    @torch.no_grad()
    def step(self, lr_factor: float = 1.0, apply: Tensor | None = None) -> None:
        """One update with the groups' learning rates times `lr_factor`; parameters without a gradient are unchanged.

        `apply` (0-d bool) False leaves parameters and state unchanged, without a host synchronization; None is True."""
        self.count.add_(1.0 if apply is None else apply)
        for group in self.groups:
            names = [name for name, p in group.parameters.items() if p.grad is not None]
            if names:
                (self._fused if self.fused else self._plain)(group, names, lr_factor * group.learning_rate, apply)

    def _fused(self, group: Group, names: list[str], learning_rate: float, apply: Tensor | None) -> None:
        weights = [local(group.parameters[name]) for name in names]
        grads = [grad for name in names if (grad := local_grad(group.parameters[name])) is not None]
        first, second = [local(self.first[name]) for name in names], [local(self.second[name]) for name in names]
        found_inf = None if apply is None else (~apply).float()
        fused_update(weights, grads, first, second, self.count, learning_rate, self.betas, group.weight_decay, self.eps, found_inf)

    def _plain(self, group: Group, names: list[str], learning_rate: float, apply: Tensor | None) -> None:
        beta1, beta2 = self.betas
        for name in names:
            weight, first, second = local(group.parameters[name]), local(self.first[name]), local(self.second[name])
            grad = local_grad(group.parameters[name])
            assert grad is not None
            grad = grad.float()
            with conditional_update([weight, first, second], apply):
                weight.mul_(1 - learning_rate * group.weight_decay)
                first.lerp_(grad, 1 - beta1)
                second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                denominator = (second / (1 - beta2**self.count)).sqrt_().add_(self.eps)
                weight.sub_(first / denominator * (learning_rate / (1 - beta1**self.count)))

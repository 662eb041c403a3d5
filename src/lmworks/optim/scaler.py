"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class LossScaler:
    """The factor on the loss that keeps small gradients from vanishing in fp16.

    A step that overflows halves it (not below 1), `window` good steps in a row double it. All state is 0-d tensors on `device`, where
    `update` decides, so the host never waits. Multiply the loss by `scale`, divide the gradients by it, then `update(finite)`. `exhausted`:
    the last step overflowed with the factor 1, so that no smaller one can mend it.
    """

    def __init__(self, initial: float = 2.0**16, window: int = 1000, device: torch.device | str = "cpu") -> None:
        self.window = window
        self.scale = torch.tensor(float(initial), device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.exhausted = torch.zeros((), dtype=torch.bool, device=device)

    @torch.no_grad()
    def update(self, finite: Tensor | bool) -> None:
        """Take in whether the gradients of this step were finite (0-d bool)."""
        finite = torch.as_tensor(finite, device=self.scale.device)
        self.exhausted.copy_(~finite & (self.scale <= 1))
        good = self.good_steps + 1
        grown = torch.where(good >= self.window, self.scale * 2, self.scale)
        self.scale.copy_(torch.where(finite, grown, (self.scale / 2).clamp(min=1.0)))
        self.good_steps.copy_(torch.where(finite, good % self.window, torch.zeros_like(good)))

    def state_dict(self) -> dict[str, Tensor]:
        """The state itself, not a copy."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state` in."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])

"""The global gradient norm, and clipping by it (Pascanu et al. 2013, arXiv:1211.5063), without host synchronization; and loss scaling.

Loss scaling for fp16 is dynamic (Micikevicius et al. 2018, arXiv:1710.03740).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lmworks.optim.groups import local, local_grad, shards


@torch.no_grad()
def global_norm(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None, holders: int | None = None) -> Tensor:
    """The Euclidean norm over all elements of all tensors; 0-d fp32, not finite if any element is not.

    With `group` the norm is over the tensors of all its ranks, each element once. `holders`: number of ranks with a shard or a replica of
    a tensor (`Ranks.size("weights")`), all by default; with pipeline stages it is smaller, because stages have different tensors.

    On CPU it is computed row by row: torch sums a whole tensor in fp32, with an error of 1e-3 at 20M elements.
    """
    here = [local(tensor) for tensor in tensors]
    if not here:
        norm = torch.zeros(())
    else:
        if here[0].device.type == "cpu":
            norms = [torch.linalg.vector_norm(torch.linalg.vector_norm(tensor.float(), dim=-1)) for tensor in here]
        else:
            norms = list(torch._foreach_norm(here, 2, torch.float32))
        if group is not None:
            # With H holders and S shards, H / S ranks hold the same shard, so each contributes S / H of it.
            sharers = dist.get_world_size(group) if holders is None else holders
            torch._foreach_mul_(norms, [(shards(tensor) / sharers) ** 0.5 for tensor in tensors])
        norm = torch.linalg.vector_norm(torch.stack(norms))
    if group is not None:
        square = norm.double().square()
        dist.all_reduce(square, group=group)
        norm = square.sqrt().float()
    return norm


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor], max_grad_norm: float, group: dist.ProcessGroup | None = None, holders: int | None = None,
    copies: Collection[Tensor] = (),
) -> Tensor:  # fmt: skip
    """Scale the gradients in place so that their global norm is at most `max_grad_norm` (0: no clipping); returns the norm before.

    `group` and `holders` as in `global_norm`; collective over the group. `copies`: parameters that another pipeline stage has too and
    counts (a tied embedding); they are scaled here but not counted.
    Non-finite gradients stay non-finite; `Optimizer.step` ignores them where its `apply` is False.
    """
    parameters, elsewhere = list(parameters), {id(parameter) for parameter in copies}
    grads = [grad for parameter in parameters if (grad := local_grad(parameter)) is not None]
    counted = [parameter.grad for parameter in parameters if parameter.grad is not None and id(parameter) not in elsewhere]
    # A rank without gradients still takes part in the all-reduce, with an empty tensor on its device.
    norm = global_norm(counted or [parameter.new_zeros(0) for parameter in map(local, parameters[:1])], group, holders)
    # On CPU the norm is known, so multiplying all gradients by one can be skipped.
    if max_grad_norm and grads and not (norm.device.type == "cpu" and norm.item() <= max_grad_norm):
        torch._foreach_mul_(grads, (max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


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

"""The global gradient norm, and clipping by it (Pascanu et al. 2013, arXiv:1211.5063), without host synchronization; and loss scaling.

Loss scaling for fp16 is dynamic (Micikevicius et al. 2018, arXiv:1710.03740).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lmworks.optim.groups import local, local_grad, shards


def global_norm(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None, holders: int | None = None) -> Tensor:
    """The Euclidean norm over all elements of all tensors; 0-d fp32, not finite if any element is not. See `norm_and_squares`."""
    return norm_and_squares(tensors, group, holders)[0]


@torch.no_grad()
def norm_and_squares(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None, holders: int | None = None, kinds: Sequence[int] = (), count: int = 0
) -> tuple[Tensor, Tensor]:
    """The Euclidean norm over all elements of all tensors, 0-d fp32, not finite if any element is not; and with the kind of each tensor, a
    number below `count`, the sum of squares of each kind: (count,).

    With `group` the norm is over the tensors of all its ranks, each element once. `holders`: number of ranks with a shard or a replica of
    a tensor (`Ranks.size("weights")`), all by default; with pipeline stages it is smaller, because stages have different tensors.

    On CPU it is computed row by row: torch sums a whole tensor in fp32, with an error of 1e-3 at 20M elements.
    """
    here = [local(tensor) for tensor in tensors]
    squares = torch.zeros(count, device=here[0].device if here else None)
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
        norms_n = torch.stack(norms)
        norm = torch.linalg.vector_norm(norms_n)
        if count:
            squares = torch.stack([_sum_of_squares(norms, kinds, kind) for kind in range(count)])
    if group is not None:
        sums = torch.cat((norm.double().square()[None], squares.double()))
        dist.all_reduce(sums, group=group)
        norm, squares = sums[0].sqrt().float(), sums[1:]
    return norm, squares


def _sum_of_squares(norms: Sequence[Tensor], kinds: Sequence[int], kind: int) -> Tensor:
    members = [norm for norm, one in zip(norms, kinds, strict=True) if one == kind]
    return torch.linalg.vector_norm(torch.stack(members)).square() if members else norms[0].new_zeros(())


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor], max_grad_norm: float, group: dist.ProcessGroup | None = None, holders: int | None = None,
    copies: Collection[Tensor] = (), kind_of: Mapping[int, int] | None = None, count: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scale the gradients in place so that their global norm is at most `max_grad_norm` (0: no clipping); returns the norm before, and the
    sum of squares of the gradients of each kind, (count,). `kind_of`: the kind of a parameter by its id.

    `group` and `holders` as in `global_norm`; collective over the group. `copies`: parameters that another pipeline stage has too and
    counts (a tied embedding); they are scaled here but not counted.
    Non-finite gradients stay non-finite; `Optimizer.step` ignores them where its `apply` is False.
    """
    parameters, elsewhere = list(parameters), {id(parameter) for parameter in copies}
    grads = [grad for parameter in parameters if (grad := local_grad(parameter)) is not None]
    here = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None and id(parameter) not in elsewhere]
    counted = [grad for _, grad in here]
    kinds = [kind_of[id(parameter)] for parameter, _ in here] if kind_of and counted else [0]
    # A rank without gradients still takes part in the all-reduce, with an empty tensor on its device.
    measured = counted or [parameter.new_zeros(0) for parameter in map(local, parameters[:1])]
    norm, squares = norm_and_squares(measured, group, holders, kinds if count else (), count)
    if max_grad_norm and grads:
        factor = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        if factor.device.type != "cpu" or factor.item() != 1:  # on a CPU it is known, and nothing is multiplied by one
            torch._foreach_mul_(grads, factor)
    return norm, squares


class LossScaler:
    """The factor on the loss that keeps small gradients from vanishing in fp16.

    A step that overflows halves it (not below 1), `window` good steps in a row double it. All state is 0-d tensors on `device`, where
    `update` decides, so the host never waits. Multiply the loss by `scale`, divide the gradients by it, then `update(finite)`. `exhausted`:
    the last step overflowed with the factor 1, so that no smaller one can mend it.
    """

    def __init__(self, initial: float = 2.0**16, window: int = 1000, device: torch.device | str = "cpu") -> None:
        self.window, self.initial = window, float(initial)
        self.scale = torch.tensor(self.initial, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.exhausted = torch.zeros((), dtype=torch.bool, device=device)

    def restart(self) -> None:
        """Return to the state of the start."""
        self.scale.fill_(self.initial)
        self.good_steps.zero_()

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

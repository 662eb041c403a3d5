"""Muon: momentum, orthogonalized by Newton-Schulz (Jordan 2024, https://kellerjordan.github.io/posts/muon/; Moonlight, arXiv:2502.16982).

Shapes: N matrices of R rows and C columns, R <= C in a stack; a parameter is one matrix (R, C) or E experts (E, R, C).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lmworks.optim.groups import Group, conditional_update, local, local_grad
from lmworks.optim.matrix_exchange import Arrival, Bucket, plan_exchange

QUINTIC = (3.4445, -4.775, 2.0315)
_EPS = 1e-7


def orthogonalize(stack_NRC: Tensor, steps: int = 5) -> Tensor:
    """Bring all singular values of each matrix near 1 (between about 0.7 and 1.2) by the quintic iteration X <- aX + b(XX')X + c(XX')^2 X.

    The stack is overwritten; arithmetic is in its dtype. R <= C keeps the Gram matrix small.
    """
    a, b, c = QUINTIC
    assert stack_NRC.shape[1] <= stack_NRC.shape[2]
    x = stack_NRC.div_(torch.linalg.vector_norm(stack_NRC, dim=(1, 2), keepdim=True).clamp(min=_EPS))
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def orthogonalize_plain(matrix_RC: Tensor, steps: int = 5) -> Tensor:
    """The reference implementation: one matrix of any shape, in fp32, as published."""
    a, b, c = QUINTIC
    x = matrix_RC.float()
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(steps):
        x = a * x + b * (x @ x.T @ x) + c * (x @ x.T @ x @ x.T @ x)
    return x


def update_scale(rows: int, cols: int, kind: Literal["rms", "spectral"]) -> float:
    """What an orthogonal update is multiplied by, beside the learning rate.

    rms: an orthogonal R x C matrix has elements of root mean square 1/sqrt(max(R, C)); this brings it to 0.2, about what AdamW's updates
    have, so that both share rates and weight decay (arXiv:2502.16982, section 2.2). spectral: Jordan's, for rates near 0.02.
    """
    return 0.2 * math.sqrt(max(rows, cols)) if kind == "rms" else math.sqrt(max(1.0, rows / cols))


class Muon:
    """Muon over groups of matrices and expert stacks; equal to `torch.optim.Muon` on each matrix alone, however they are sharded.

    `dtype` is that of Newton-Schulz (torch: bf16); what the machine is has no say in it. The state, `momentum[name]`, is fp32, shaped and
    placed as its parameter. Sharded matrices travel in `dtype`: they are rounded to it on one
    process as well, so that nothing is lost. Momentum is elementwise and stays where it is.
    `stack_elements` bounds a stack, and with it the scratch memory of about 12 bytes per element. Left out, it is 1Mi on CPU, where a
    stack should stay in the cache and fresh large buffers cost page faults, and 128Mi elsewhere, where few large kernels are best.
    Construction and `step` are collective where parameters are sharded; `process_groups` are those that may carry the exchange, others are
    made (`whole.plan`).
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        steps: int = 5,
        scale: Literal["rms", "spectral"] = "rms",
        dtype: torch.dtype = torch.float32,
        stack_elements: int | None = None,
        process_groups: Iterable[ProcessGroup] = (),
    ) -> None:
        self.beta, self.nesterov, self.steps, self.scale = momentum, nesterov, steps, scale
        self._group_of = {name: group for group in groups for name in group.parameters}
        parameters = {name: p for group in groups for name, p in group.parameters.items()}
        self.momentum = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
        devices = {p.device for p in parameters.values()}
        on_cpu = all(device.type == "cpu" for device in devices)
        self.dtype = dtype
        buckets = plan_exchange(parameters, stack_elements or (1 << 20 if on_cpu else 1 << 27), process_groups)
        self._shared, self._alone = ([bucket for bucket in buckets if bucket.shared is shared] for shared in (True, False))

    @torch.no_grad()
    def step(self, lr_factor: float = 1.0, apply: Tensor | None = None) -> None:
        """One update with the groups' learning rates times `lr_factor`; parameters without a gradient are left alone.

        `apply` (0-d bool) False leaves parameters and momentum unchanged, without a host synchronization; None is True.

        While a shared bucket is orthogonalized, the parts of the next and the updates of the previous one are in transit.
        """
        coming: tuple[Bucket, Arrival] | None = None
        leaving: tuple[Bucket, Arrival] | None = None
        for bucket in [*self._shared, None, None]:
            begun = None if bucket is None else (bucket, self._collect(bucket, apply))
            done = None if coming is None else (coming[0], self._distribute(*coming))
            if leaving is not None:
                self._apply(*leaving, lr_factor, apply)
            coming, leaving = begun, done
        # Where nothing travels, one bucket after the other keeps the caches warm.
        for bucket in self._alone:
            self._apply(bucket, self._distribute(bucket, self._collect(bucket, apply)), lr_factor, apply)

    def _collect(self, bucket: Bucket, apply: Tensor | None) -> Arrival:
        """Take the gradients into the momentum, and send the directions to the owners."""
        grads = {i: part.of(g).float() for i, part in enumerate(bucket.parts) if (g := local_grad(part.run.parameter)) is not None}
        momenta = {i: bucket.parts[i].of(local(self.momentum[bucket.parts[i].run.name])) for i in grads}
        sent = [i for i in bucket.sends if i in grads]
        with conditional_update(list(momenta.values()), apply):
            if grads:
                torch._foreach_lerp_(list(momenta.values()), list(grads.values()), 1 - self.beta)
            directions = {i: momenta[i] for i in sent}
            if sent and self.nesterov:
                made = torch._foreach_lerp([grads[i] for i in sent], list(directions.values()), self.beta)
                directions = dict(zip(sent, made, strict=True))
        # The sizes of an exchange are fixed: a part without a gradient goes as zeros, and what comes back for it is not taken.
        parts = [directions[i] if i in directions else torch.zeros(bucket.parts[i].shape, device=bucket.device) for i in bucket.sends]
        return bucket.collect.start(parts, self.dtype, bucket.device)

    def _distribute(self, bucket: Bucket, directions: Arrival) -> Arrival:
        """Orthogonalise what this rank owns, and send the updates to all that hold a part."""
        stacks = [torch.empty(shape, dtype=self.dtype, device=bucket.device) for shape in bucket.stacks]
        for place, direction in zip(bucket.taken, directions(), strict=True):
            place.of(stacks).copy_(direction)
        done = [orthogonalize(stack, self.steps) for stack in stacks]
        return bucket.distribute.start([place.of(done) for place in bucket.given], self.dtype, bucket.device)

    def _apply(self, bucket: Bucket, updates: Arrival, lr_factor: float, apply: Tensor | None) -> None:
        """Decay and move what this rank holds."""
        arrived = [(part, update) for part, update in zip(bucket.parts, updates(), strict=True) if part.run.parameter.grad is not None]
        weights = [part.of(local(part.run.parameter)) for part, _ in arrived]
        groups = [self._group_of[part.run.name] for part, _ in arrived]
        with conditional_update(weights, apply):
            if weights:
                torch._foreach_mul_(weights, [1 - lr_factor * group.learning_rate * group.weight_decay for group in groups])
            for (part, update), weight, group in zip(arrived, weights, groups, strict=True):
                rows, cols = part.run.parameter.shape[-2:]
                weight.add_(update, alpha=-lr_factor * group.learning_rate * update_scale(rows, cols, self.scale))

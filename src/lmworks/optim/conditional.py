"""Promise 5: a bad value never reaches a weight, because the old one is selected, not because the new one is multiplied by zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def conditional_update(tensors: Sequence[Tensor], apply: Tensor | None) -> Iterator[None]:
    """Update `tensors` in place in the body; what `apply` (0-d bool) denies is put back bit for bit.

    The choice is made on the device, so nothing waits for it. It costs one copy of `tensors` for as long as the body runs;
    with `apply` None the caller already knows that the step is good, and nothing is copied.
    """
    if apply is None:
        yield
        return
    old = [tensor.clone() for tensor in tensors]
    yield
    for tensor, before in zip(tensors, old, strict=True):
        torch.where(apply, tensor, before, out=tensor)

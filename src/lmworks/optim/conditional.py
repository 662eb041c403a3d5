"""Promise 5: a bad value never reaches a weight, because the old one is selected, not because the new one is multiplied by zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def conditional_update(tensors: Sequence[Tensor], apply: Tensor | None) -> Iterator[None]:
    """Update `tensors` in place in the body; if `apply` (0-d bool) is False, the old values are restored bit for bit.

    The selection is on the device, without host synchronization. It costs one copy of `tensors` during the body. With `apply` None the
    update is always applied, and nothing is copied.
    """
    if apply is None:
        yield
        return
    old = [tensor.clone() for tensor in tensors]
    yield
    for tensor, before in zip(tensors, old, strict=True):
        torch.where(apply, tensor, before, out=tensor)

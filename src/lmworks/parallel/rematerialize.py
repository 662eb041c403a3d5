"""Activation checkpointing, from outside the model (Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lmworks.model import Transformer

_KEPT = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten._grouped_mm.default}


def checkpoint_activations(model: Transformer, mode: Literal["none", "selective", "full"], compiled: bool = False) -> None:
    """Recompute layers in the backward pass: all of it (`full`), or all but the matrix products (`selective`).

    `compiled` says that the layers will be compiled: the compiler knows torch's own selection only.
    What the forward returns (expert counts, auxiliary loss) is that of the first pass: recomputation counts nothing twice.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": model.config.dropout + model.config.attention_dropout > 0}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy) if compiled else _products
    for block in model.every_block():
        block.forward = _recomputed(block.forward, options)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, **options) if torch.is_grad_enabled() else forward(*args)

    return run


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _products() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Keep matrix products in the forward, give them back in the same order in the backward.

    torch's own selection asks that both passes call exactly the same operators. Where parts of a layer are sharded by themselves
    (experts, an exact router) they do not: FSDP2 gathers weights in the one when it need not in the other.
    """
    kept: deque[Tensor] = deque()
    return _Keep(kept), _Reuse(kept)


class _Keep(TorchDispatchMode):
    def __init__(self, kept: deque[Tensor]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        if operator in _KEPT:
            self._kept.append(out.detach())
        return out


class _Reuse(TorchDispatchMode):
    def __init__(self, kept: deque[Tensor]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._kept.popleft() if operator in _KEPT else operator(*args, **(kwargs or {}))

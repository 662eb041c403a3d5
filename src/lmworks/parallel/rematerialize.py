"""Activation checkpointing, from outside the model (Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lmworks.model import Transformer

_KEPT = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten._grouped_mm.default}


def checkpoint_activations(model: Transformer, mode: Literal["none", "selective", "full"]) -> None:
    """Recompute layers in the backward pass: all of it (`full`), or all but the matrix products (`selective`).

    What the forward returns (expert counts, auxiliary loss) is that of the first pass: recomputation counts nothing twice.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": model.config.dropout + model.config.attention_dropout > 0}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in model.every_block():
        block.forward = _recomputed(block.forward, options)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, **options) if torch.is_grad_enabled() else forward(*args)

    return run


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE

"""Activation checkpointing (Chen et al. 2016, arXiv:1604.06174), applied to a model from outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lmworks.model import Transformer
from lmworks.recipe.schema.activation_checkpointing import ActivationCheckpointing

_SAVED = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten._grouped_mm.default}


def checkpoint_activations(model: Transformer, policies: ActivationCheckpointing, adapter_dropout: float = 0.0) -> None:
    """Recompute each layer in the backward pass according to its policy in `policies`.

    The outputs of the forward pass (expert counts, auxiliary loss) are those of the first pass, so nothing is counted twice.
    """
    preserve = model.config.residual_dropout + model.config.attention_dropout + adapter_dropout > 0
    for layer, block in model.numbered_blocks():
        policy = policies.of(layer)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve}
        if policy.keeps == "products":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
        if policy.keeps != "everything":
            block.forward = _recomputed(block.forward, options)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, **options) if torch.is_grad_enabled() else forward(*args)

    return run


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE

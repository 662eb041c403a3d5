"""Assigns parameters to optimizers and groups by name, so that the result does not depend on the sharding."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from lmworks.errors import UserError
from lmworks.recipe.schema.lora import is_adapter
from lmworks.recipe.schema.optimizer import Optimizer as Options

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MTP = re.compile(r"(?:^|\.)mtp\.\d+\.")


@dataclass
class Group:
    """Parameters with the same optimizer and hyperparameters. `learning_rate` is the peak; the schedule's factor multiplies it."""

    kind: Literal["muon", "adamw"]
    learning_rate: float
    weight_decay: float
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a hidden matrix: a 2-D weight or a stack of experts inside the layers, including multi-token prediction.

    The router is one: GLM-4.5 (arXiv:2508.06471) uses AdamW only for word embeddings, biases and norms, and Moonlight (arXiv:2502.16982)
    for all that is not a matrix, the embedding and the head, so both train the router with Muon. Embedding and head use AdamW: their rows
    belong to tokens of very different frequency, and they do not map hidden states to hidden states.
    Adapters use AdamW: an orthogonalized update of A and B is no orthogonal update of B A, and the published learning rates are for AdamW.
    """
    return parameter.ndim >= 2 and not is_adapter(name) and (_LAYER.search(name) is not None or _MTP.search(name) is not None)


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, adapters and the head; never to norms, biases and embeddings (a tied head is one)."""
    return is_matrix(name, parameter) or name == "head.weight" or is_adapter(name)


def clean_name(name: str) -> str:
    """The parameter's name without the prefix that `torch.compile` adds."""
    return name.replace("_orig_mod.", "")


def group_parameters(
    named_parameters: Iterable[tuple[str, nn.Parameter]], options: Options, layers: int | None = None
) -> list[Group]:  # fmt: skip
    """Group the parameters that require gradients, in the order of their names' first appearance.

    With `layer_lr_decay` d and n layers, the rate of layer i is multiplied by d**(n-1-i), that of the embedding by d**n, and that
    of the final norm, the head and multi-token prediction by 1. `layers` is n, needed for a pipeline stage; by default the largest i + 1.
    """
    named = [(clean_name(name), parameter) for name, parameter in named_parameters]
    if layers is None:
        layers = 1 + max((layer for name, _ in named if (layer := _layer(name)) is not None), default=-1)
    # With `rms` scaling the updates of both optimizers have the same size, so they share the learning rate by default.
    peak, shared = options.learning_rate, options.kind == "adamw" or options.update_scale == "rms"
    adam_peak = (None if options.kind == "adamw" else options.adam_learning_rate) or (peak if shared else None)
    if peak is None or adam_peak is None:
        missing = "learning_rate" if peak is None else "adam_learning_rate"
        raise UserError(f"optimizer.{missing} has no value; set it, or load the recipe with load_recipe, which derives it")
    groups: dict[tuple[str, float, float], Group] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        kind: Literal["muon", "adamw"] = "muon" if options.kind == "muon" and is_matrix(name, parameter) else "adamw"
        layer = _layer(name)
        above = layers - 1 - layer if layer is not None else layers if name.startswith("embedding.") else 0
        rate = (peak if kind == "muon" else adam_peak) * options.layer_lr_decay**above
        decay = options.weight_decay if decays(name, parameter) else 0.0
        groups.setdefault((kind, rate, decay), Group(kind, rate, decay)).parameters[name] = parameter
    return list(groups.values())


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found[1]) if found else None
